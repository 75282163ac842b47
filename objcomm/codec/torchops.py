"""Operators of ``torch.ops``: they travel by name. torch itself cannot pickle them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DecodeError

_ops: Any = torch._ops


KINDS: tuple[type, ...] = (_ops.OpOverload, _ops.OpOverloadPacket, _ops.HigherOrderOperator)


def reduce(obj: Any) -> tuple[Any, ...]:
    """How an operator is pickled."""
    if isinstance(obj, _ops.OpOverload):
        return find, (obj.namespace, obj._opname, obj._overloadname)
    if isinstance(obj, _ops.OpOverloadPacket):
        namespace, _, name = obj._qualified_op_name.partition("::")
        return find, (namespace, name)
    return find, (obj.namespace, obj.name())


def find(*names: str) -> Any:
    """The operator of that namespace, name and overload.

    Raises:
        DecodeError: there is none.
    """
    found: Any = torch.ops
    try:
        for name in names:
            found = getattr(found, name)
    except AttributeError as error:
        raise DecodeError(
            f"the operator torch.ops.{'.'.join(names)} is not known here",
            hint="load the library that registers it before receiving",
        ) from error
    return found

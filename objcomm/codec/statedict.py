"""What ``Module.state_dict()`` returns: an OrderedDict with an attribute. It need not be pickled for that."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..errors import EncodeError
from . import registry

NAME = "OrderedDict.attributes"


def _flatten(obj: OrderedDict[Any, Any]) -> list[Any]:
    attributes = dict(vars(obj))
    hidden = next((name for name in attributes if hasattr(OrderedDict, name)), None)
    if hidden is not None:
        raise EncodeError(f"an OrderedDict with an attribute {hidden!r} in place of its own cannot be sent")
    return [OrderedDict(obj), attributes]


def _rebuild(parts: list[Any]) -> OrderedDict[Any, Any]:
    items, attributes = parts
    if type(items) is not OrderedDict or type(attributes) is not dict:
        raise ValueError("an OrderedDict with attributes is made of an OrderedDict and a dict")
    if not all(type(name) is str and not hasattr(OrderedDict, name) for name in attributes):
        raise ValueError("attributes have names, and none that an OrderedDict has already")
    vars(items).update(attributes)
    return items


registry.register(NAME, lambda obj: type(obj) is OrderedDict and bool(vars(obj)), _flatten, _rebuild, base=OrderedDict)

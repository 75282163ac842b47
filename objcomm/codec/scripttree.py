"""A TorchScript module as both ends can compare it: its submodules, their methods and tensors, and what they share.

Names of types are not compared: torch renames them so that they are unique in an archive. That two modules are one, or
have one type, is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_C: Any = torch._C

# Where the wrapper of a lowered module keeps it, and where that keeps what the backend made of the module.
_PROCESSED = "__processed_module"
_SETSTATE = "__setstate__"


class Node(NamedTuple):
    """A module in a tree; ``module`` is torch's own object, without its Python wrapper."""

    path: str
    module: Any


def walk(root: Any, path: str = "") -> Iterator[Node]:
    """A module and those inside of it, each as often as it occurs."""
    yield Node(path, root)
    for name, child in _C.ModuleDict(root).items():
        yield from walk(child, f"{path}.{name}" if path else name)
    if root.hasattr(_PROCESSED):
        processed = root.getattr(_PROCESSED)
        if isinstance(processed, _C.ScriptModule):
            yield from walk(processed, f"{path}.{_PROCESSED}" if path else _PROCESSED)


def values_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers and attributes that hold tensors, of a module itself, by name."""
    found = dict(_C.ParameterDict(module).items())
    found.update(_C.BufferDict(module).items())
    for name, (kind, _) in _C.ConcreteModuleType.from_jit_type(module._type()).get_attributes().items():
        if name not in found and "Tensor" in kind.annotation_str:
            found[name] = module.getattr(name)
    yield from found.items()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value of TorchScript: itself, or in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is dict:
        yield from tensors_in([*value.keys(), *value.values()])
    elif type(value) in (list, tuple):
        for item in value:
            yield from tensors_in(item)


def find(root: Any, path: str) -> Any:
    """The module at a path below another one."""
    for name in path.split(".") if path else ():
        root = root.getattr(name)
    return root


class _Numbers:
    """Numbers for what is the same, in the order in which it is met."""

    def __init__(self) -> None:
        self._seen: dict[Any, list[Any]] = {}
        self._count = 0

    def of(self, key: Any, obj: Any) -> int:
        for number, known in self._seen.setdefault(key, []):
            if known == obj:
                return int(number)
        self._seen[key].append((self._count, obj))
        self._count += 1
        return self._count - 1


def manifest(roots: list[Any]) -> list[Any]:
    """What the receiver's modules must be like, as plain values: of each module in turn

    ``[root, path, number of the module, number of its type, methods, whether it has __setstate__, tensors]``.
    """
    modules, types = _Numbers(), _Numbers()
    described: list[Any] = []
    for index, root in enumerate(roots):
        for path, module in walk(root):
            kind = module._type()
            described.append(
                [
                    index,
                    path,
                    modules.of(hash(module), module),
                    types.of(kind.qualified_name(), kind),
                    sorted(module._method_names()),
                    module._has_method(_SETSTATE),
                    [
                        [name, [[str(tensor.dtype), list(tensor.shape), tensor.requires_grad] for tensor in held]]
                        for name, held in sorted((name, list(tensors_in(value))) for name, value in values_of(module))
                    ],
                ]
            )
    return described


def difference(sent: list[Any], here: list[Any]) -> str | None:
    """What two manifests do not agree on, if anything."""
    if sent == here:
        return None
    for old, new in zip(sent, here, strict=False):
        if old != new:
            where = f"module {old[1]!r} of root {old[0]}"
            labels = ("the root", "the path", "which modules are one", "which types are one", "methods", "__setstate__")
            changed = [label for label, a, b in zip((*labels, "tensors"), old, new, strict=True) if a != b]
            return f"{where} differs in {', '.join(changed)}"
    return f"{len(here)} modules instead of {len(sent)}"

"""Which submodules of a model are parallelized one by one, under which names, and whether that can be right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_MARK = "_nnscaler_mark"
_NO_CODE = ("__doc__", "__firstlineno__")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


Marked = Iterable["str | type[nn.Module]"] | str | type[nn.Module] | None


@dataclass(frozen=True)
class Mark:
    """What :func:`mark` was told; None is left to the call that parallelizes."""

    dummy_forward_args: Mapping[str, Any] | None = None
    pas_policy: Any = None
    compute_config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """One module to parallelize.

    Attributes:
        module: the module itself.
        places: the qualified names that the model has for it; the first gives the instance its name.
        mark: what it was marked with.
    """

    module: nn.Module
    places: tuple[str, ...]
    mark: Mark

    @property
    def place(self) -> str:
        return self.places[0]


def mark(
    module: nn.Module,
    *,
    dummy_forward_args: Mapping[str, Any] | None = None,
    pas_policy: Any = None,
    compute_config: Any = None,
    **options: Any,
) -> nn.Module:
    """Mark a module for :func:`parallelize_submodules`, and return it.

    Args:
        module: any module but the whole model.
        dummy_forward_args: names and example values of the arguments of its ``forward``.
        pas_policy: as for ``nnscaler.parallelize``.
        compute_config: as for ``nnscaler.parallelize``.
        options: further arguments of ``nnscaler.parallelize``, for this module.

    What is left out is taken from the call of :func:`parallelize_submodules`.

    >>> model = nn.Sequential(nn.Linear(2, 2), mark(nn.Linear(2, 2)))
    >>> [selected.place for selected in select(model)]
    ['1']
    """
    vars(module)[_MARK] = Mark(dummy_forward_args, pas_policy, compute_config, options)
    return module


def select(model: nn.Module, marked: Marked = None) -> list[Selected]:
    """The modules to parallelize, in the order in which the model names them.

    Args:
        model: the whole.
        marked: qualified names and classes, or one; None for those that :func:`mark` marked.

    Raises:
        ValueError: there is none, or a model of such parts would not be the model it was; the message says why.
    """
    wanted: list[str | type[nn.Module]] | None
    wanted = None if marked is None else [marked] if isinstance(marked, (str, type)) else list(marked)
    places: dict[int, list[str]] = {}
    chosen: dict[int, nn.Module] = {}
    for place, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(place)
        if _is_wanted(place, module, wanted):
            chosen[id(module)] = module
    named = {item for item in wanted or () if isinstance(item, str)}
    unknown = named.difference(*places.values()) if places else named
    if unknown:
        raise ValueError(f"{type(model).__qualname__} has no submodule {', '.join(sorted(unknown))}")
    if not chosen:
        raise ValueError(f"no submodule of {type(model).__qualname__} is marked")
    found = [Selected(module, tuple(places[key]), vars(module).get(_MARK) or Mark()) for key, module in chosen.items()]
    for check in (
        _refuse_root,
        _refuse_nested,
        _refuse_shared,
        _refuse_hooks,
        _refuse_unregistered,
        _refuse_numbered,
    ):
        check(model, found)
    return found


def _is_wanted(place: str, module: nn.Module, wanted: list[str | type[nn.Module]] | None) -> bool:
    if wanted is None:
        return _MARK in vars(module)
    return any(place == item if isinstance(item, str) else isinstance(module, item) for item in wanted)


def _refuse_root(model: nn.Module, found: list[Selected]) -> None:
    if any("" in item.places for item in found):
        raise ValueError("the whole model is marked: nnscaler.parallelize is for that")


def _refuse_nested(model: nn.Module, found: list[Selected]) -> None:
    by_id = {id(item.module): item for item in found}
    for item in found:
        for inner in item.module.modules():
            if inner is not item.module and id(inner) in by_id:
                raise ValueError(
                    f"{by_id[id(inner)].place} is part of {item.place}, and both are marked: parallelized modules "
                    f"cannot be nested"
                )


def _refuse_shared(model: nn.Module, found: list[Selected]) -> None:
    """A generated module has parameters of its own: what was one parameter would become two."""
    owners: dict[Any, dict[int | None, str]] = {}
    for place, module in model.named_modules(remove_duplicate=False):
        owner = next((id(item.module) for item in found if _is_inside(place, item)), None)
        for name, parameter in module.named_parameters(prefix=place, recurse=False):
            owners.setdefault(_memory(parameter), {}).setdefault(owner, name)
    for names in owners.values():
        if len(names) > 1:
            one, other = list(names.values())[:2]
            raise ValueError(
                f"{one} and {other} are one parameter, and would be two after parallelizing: mark a module that holds "
                f"both"
            )


def _is_inside(place: str, item: Selected) -> bool:
    return any(place == own or place.startswith(f"{own}.") for own in item.places)


def _memory(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()


def _refuse_hooks(model: nn.Module, found: list[Selected]) -> None:
    for item in found:
        if any(getattr(item.module, name, None) for name in _HOOKS):
            raise ValueError(f"{item.place} has hooks, which a generated module would not run: remove them first")


def _refuse_unregistered(model: nn.Module, found: list[Selected]) -> None:
    """What refers to a module beside the model's own tree would go on using the original."""
    by_id = {id(item.module): item for item in found}
    inside = {id(inner) for item in found for inner in item.module.modules()}
    for place, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, value in vars(module).items():
            held = next((by_id[id(one)] for one in _contents(value) if id(one) in by_id), None)
            if name != "_modules" and held is not None:
                raise ValueError(
                    f"{place or type(model).__qualname__}.{name} refers to {held.place} too, but not as a submodule: "
                    f"it would go on using the original"
                )


def _refuse_numbered(model: nn.Module, found: list[Selected]) -> None:
    for item in found:
        for name, _ in [*item.module.named_parameters(), *item.module.named_buffers()]:
            if name[0].isdigit():
                raise ValueError(
                    f"{item.place} is a {type(item.module).__qualname__}, in which nnScaler would make a Python name "
                    f"of {name!r}, which begins with a digit: mark its parts, or a module that has it as an attribute"
                )


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    else:
        yield value


def instance_name(model_name: str, place: str) -> str:
    r"""The name of a parallelized submodule: that of the model and its qualified name there.

    The qualified name of an instance is unique where that of its class is not (the open end of PyTorch's pull request
    59921, which named lowered modules after their classes). Dots stay, since nnScaler makes folders of them; all else
    that no Python name has is written by its number.

    >>> instance_name("Model", "encoder.layers.0")
    'Model.encoder.layers.0'
    >>> instance_name("Model", "a/b"), instance_name("Model", "a-2f-b")
    ('Model.a-2f-b', 'Model.a-2d-2f-2d-b')
    """
    return f"{model_name}.{'.'.join(_escaped(part) for part in place.split('.'))}"


def _escaped(part: str) -> str:
    return re.sub(r"\W", lambda found: f"-{ord(found[0]):x}-", part)


def fingerprint(module: nn.Module, dummy_forward_args: Mapping[str, Any], policy: Any) -> str:
    """What generated code depends on and nnScaler does not compare: source, structure, plain attributes, examples."""
    lines = [f"{policy}" if isinstance(policy, str) else _name_of(policy), _outline(dict(dummy_forward_args))]
    classes: dict[type, str] = {}
    for place, inner in module.named_modules():
        cls = type(inner)
        plain = {key: value for key, value in vars(inner).items() if _is_plain(value)}
        tensors = [
            (name, _outline(value), value.requires_grad)
            for values in (inner._parameters, inner._buffers)
            for name, value in values.items()
            if value is not None
        ]
        lines.append(f"{place}: {_name_of(cls)} {inner.extra_repr()} {sorted(plain.items())} {tensors}")
        for base in cls.__mro__:
            if base.__module__.split(".")[0] not in ("torch", "builtins") and base not in classes:
                classes[base] = _body(base)
    lines += classes.values()
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))  # addresses are other ones in the next process
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _body(cls: type) -> str:
    """What a class defines: its functions, as they are compiled, and its plain attributes."""
    return f"{_name_of(cls)} {[(name, _member(value)) for name, value in vars(cls).items() if name not in _NO_CODE]}"


def _member(value: Any) -> str:
    if isinstance(value, property):
        return _member([value.fget, value.fset])
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_member, value))}]"
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return _outline(value)
    defaults = _outline([value.__defaults__, value.__kwdefaults__])
    return f"{_compiled(value.__code__)} {defaults} {[_held(cell) for cell in value.__closure__ or ()]}"


def _held(cell: CellType) -> str:
    """What a function uses of those around it: of a function, what it does itself, so that no circle is followed."""
    try:
        value = cell.cell_contents
    except ValueError:
        return "nothing"
    return _compiled(value.__code__) if isinstance(value, FunctionType) else _outline(value)


def _compiled(code: CodeType) -> str:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_compiled(constant))
        elif isinstance(constant, frozenset):  # in another order in the next process
            constants.append(f"{sorted(map(repr, constant))}")
        else:
            constants.append(repr(constant))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _name_of(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))


def _outline(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_outline(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{_name_of(type(value))}[{', '.join(map(_outline, value))}]"
    return repr(value) if _is_plain(value) else _name_of(type(value))

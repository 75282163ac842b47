"""Instances that travel as a reference to their class and their values: namedtuples, dataclasses, members of enums.

They are taken apart and built without running anything of the class: no ``__init__``, no ``__post_init__``, no
``__setattr__``, no property.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from ..errors import DecodeError, TrustError
from . import codes, versions
from .classes import Layout, dict_of, find, layout
from .codes import Mark, Part, indexed

# Members of a flag in restricted trust: the enum module goes through the bits of a combination one by one.
_MOST_FLAGS = 256

# -- encoding ----------------------------------------------------------------------------------------------------------


class ClassTable:
    """The classes, and members of enums, that one message refers to.

    Args:
        versions: say of each class which code it is, so that the receiver can compare.
    """

    def __init__(self, versions: bool) -> None:
        self._versions = versions
        self.entries: list[list[Any]] = []
        self._references: dict[tuple[Any, ...], Part] = {}

    def _refer(self, code: int, key: tuple[Any, ...], entry: list[Any]) -> Part:
        """The part that refers to a new entry. The key starts with its class."""
        part = self._references[key] = indexed(code, len(self.entries))
        version = versions.code_of(key[0]) if self._versions else ""
        self.entries.append([*entry, version] if version else entry)
        return part

    def taker(self, known: Layout) -> Callable[[Any], Part | None]:
        """What takes an instance apart: its part, or None if there is more to the instance than a part can say."""
        if known.kind in ("enum", "flag"):
            return lambda obj: self._member(known, obj)
        entry: list[Any] = [known.kind, *known.name, list(known.fields)]
        if known.kind == "dataclass":
            entry.append(None)
        mark = self._refer(codes.INSTANCE, (known.cls, *known.fields), entry)
        if known.kind == "dataclass":
            return self._dataclass_taker(known, mark)
        size, instance_dict = len(known.fields), known.instance_dict

        def take(obj: Any) -> Part | None:
            if tuple.__len__(obj) != size or (instance_dict is not None and instance_dict.__get__(obj)):
                return None
            return [mark, *tuple.__iter__(obj)]

        return take

    def _dataclass_taker(self, known: Layout, usual: Part) -> Callable[[Any], Part | None]:
        slots, instance_dict, fields = known.slots, known.instance_dict, known.fields
        if slots and instance_dict is None and tuple(slots) == fields:
            getters = [slot.__get__ for slot in slots.values()]

            def take_slots(obj: Any) -> Part | None:
                try:
                    return [usual, *(get(obj) for get in getters)]
                except AttributeError:
                    return self._dataclass(known, obj)

            return take_slots
        if slots or instance_dict is None:
            return lambda obj: self._dataclass(known, obj)
        attributes_of = instance_dict.__get__

        def take(obj: Any) -> Part | None:
            attributes = attributes_of(obj)
            if type(attributes) is dict and tuple(attributes) == fields:
                return [usual, *attributes.values()]
            return self._dataclass(known, obj)

        return take

    def _dataclass(self, known: Layout, obj: Any) -> Part | None:
        """An instance of a dataclass with other attributes than its fields, or in another order."""
        attributes = known.attributes(obj)
        if attributes is None or not all(type(name) is str for name in attributes[0]):
            return None
        names, values = attributes
        key = (known.cls, *names)
        mark = self._references.get(key)
        if mark is None:
            mark = self._refer(codes.INSTANCE, key, [known.kind, *known.name, list(known.fields), names])
        return [mark, *values]

    def _member(self, known: Layout, obj: Any) -> Part | None:
        cls: Any = known.cls
        name, value = object.__getattribute__(obj, "_name_"), object.__getattribute__(obj, "_value_")
        if not (isinstance(name, str) and dict_of(cls)["_member_map_"].get(name) is obj):
            if not (known.kind == "flag" and _is_own_flag(cls) and type(value) is int):
                return None
            if enum.EnumMeta.__call__(cls, value) is not obj:
                return None
            name = value
        part = self._references.get((cls, name))
        if part is None:
            part = self._refer(codes.MEMBER, (cls, name), [known.kind, *known.name, name])
        return part


class Resolved(NamedTuple):
    """What an entry of the class table stands for: a member of an enum, or the mark that rebuilds instances."""

    cls: type
    value: Any


def resolve(entry: list[Any], *, restricted: bool) -> Resolved:
    """Find the class of an entry of the class table.

    Raises:
        DecodeError: the class, or a member or field of it, is not there or not the same.
        TrustError: restricted trust, and a class that only cluster trust would build.
    """
    kind, module, qualname, *rest = entry
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise DecodeError("the class table of the message is malformed")
    cls = find(module, qualname, restricted=restricted)
    name = f"{module}.{qualname}"
    known = layout(cls)
    if known is None or known.kind != kind:
        text = f"class {name} is no {kind} here that can be rebuilt without running its code"
        raise TrustError(text) if restricted else DecodeError(text)
    if not restricted:
        rest = _check_version(cls, kind, rest)
    if kind == "enum" or kind == "flag":
        value = rest[0]
        return Resolved(cls, _member(cls, name, value, restricted=restricted))
    fields = tuple(rest[0])
    if fields != known.fields:
        raise DecodeError(
            f"{kind} {name} has the fields {', '.join(known.fields) or 'none'} here, "
            f"but {', '.join(map(str, fields)) or 'none'} at the sender",
            hint="both ranks must run the same version of the class",
        )
    if kind == "dataclass":
        names = fields if rest[1] is None else tuple(rest[1])
        return Resolved(cls, Mark(_dataclass_builder(known, name, names)))
    return Resolved(cls, Mark(_tuple_builder(known, name)))


def _check_version(cls: type, kind: str, rest: list[Any]) -> list[Any]:
    """What an entry says beyond the names of its class, when the code of the class has been found to be the same."""
    length = 2 if kind == "dataclass" else 1
    for code in rest[length:]:
        versions.check(cls, versions.Version(str(code)))
    return rest[:length]


def _member(cls: Any, name: str, value: Any, *, restricted: bool) -> object:
    if isinstance(value, str):
        member = dict_of(cls)["_member_map_"].get(value)
        if member is None:
            raise DecodeError(f"enum {name} has no member {value!r} here")
        return member
    if not _is_own_flag(cls) or type(value) is not int:
        raise DecodeError(f"a combination of the members of {name} cannot be built here")
    if restricted and value.bit_length() > _MOST_FLAGS:
        raise DecodeError(f"flag {name} has no {value.bit_length()} members here")
    try:
        return enum.EnumMeta.__call__(cls, value)
    except ValueError as error:
        raise DecodeError(f"flag {name} has no combination {value} here") from error


def _is_own_flag(cls: Any) -> bool:
    """Whether combinations are made by the enum module alone."""
    return any(cls._missing_.__func__ is base._missing_.__func__ for base in (enum.Flag, enum.IntFlag))  # type: ignore[attr-defined]


def _tuple_builder(known: Layout, name: str) -> Callable[[list[Any]], Any]:
    cls: Any = known.cls
    size = len(known.fields) + 1
    structseq = known.kind == "structseq"

    def build(items: list[Any]) -> Any:
        if len(items) != size:
            raise DecodeError(f"{name} has {size - 1} fields, not {len(items) - 1}")
        return cls(items[1:]) if structseq else tuple.__new__(cls, items[1:])

    return build


def _dataclass_builder(known: Layout, name: str, names: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    cls: Any = known.cls
    if not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise DecodeError(f"the message names the attributes of {name} wrongly")
    interned = tuple(map(sys.intern, names))
    homeless = [each for each in names if each not in known.slots]
    if homeless and known.instance_dict is None:
        raise DecodeError(f"instances of {name} have no attribute {homeless[0]!r} here")
    size = len(names) + 1
    get_dict = None if known.instance_dict is None else known.instance_dict.__get__
    setters = [known.slots[each].__set__ if each in known.slots else None for each in names]

    def build(items: list[Any]) -> Any:
        if len(items) != size:
            raise DecodeError(f"{name} has {size - 1} attributes in this message, not {len(items) - 1}")
        obj = object.__new__(cls)
        if len(homeless) == size - 1 and get_dict is not None:
            get_dict(obj).update(zip(interned, islice(items, 1, None), strict=True))
            return obj
        for setter, attribute, value in zip(setters, interned, islice(items, 1, None), strict=True):
            if setter is not None:
                setter(obj, value)
            elif get_dict is not None:
                get_dict(obj)[attribute] = value
        return obj

    return build

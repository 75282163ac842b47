"""Which classes can travel by name, and where their instances keep their values.

Nothing of a class runs when it is looked at here, not even of its metaclass. A class that says itself how it is
pickled, or that cannot be found by its name, has no layout: its instances are pickled.
"""

from __future__ import annotations

import abc
import copyreg
import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol
from weakref import WeakKeyDictionary

from ..errors import DecodeError

Kind = Literal["namedtuple", "structseq", "dataclass", "enum", "flag"]

# Straight from the slots of ``type``: a metaclass cannot answer in its place.
dict_of: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_module_of: Callable[[type], object] = type.__dict__["__module__"].__get__
_qualname_of: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_contents: Callable[[object], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__

_HEAP_TYPE = 1 << 9  # made by a class statement, or by C code that imitates one
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta, type(Protocol))
_BASES = (object, tuple, Generic, Protocol)

# Whoever defines one of these has own ideas about copies of the instances.
_CUSTOM = (
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__", "__del__"),
)


@dataclass(frozen=True)
class Layout:
    """How the instances of one class are taken apart and built.

    Attributes:
        fields: the names that both ends must agree on, in order.
        slots: the descriptors of the slots, by name.
        instance_dict: the descriptor of the instance's ``__dict__``, if it has one.
    """

    cls: type
    kind: Kind
    fields: tuple[str, ...] = ()
    slots: dict[str, types.MemberDescriptorType] = dataclasses.field(default_factory=dict)
    instance_dict: types.GetSetDescriptorType | None = None

    @property
    def name(self) -> tuple[str, str]:
        module, qualname = name_of(self.cls)
        return _canonical(module), qualname

    def attributes(self, obj: Any) -> tuple[list[str], list[Any]] | None:
        """Names and values of what an instance of a dataclass holds; None if its ``__dict__`` is of an odd type."""
        names: list[str] = []
        values: list[Any] = []
        for name, slot in self.slots.items():
            try:
                values.append(slot.__get__(obj))
            except AttributeError:
                continue
            names.append(name)
        if self.instance_dict is not None:
            attributes = self.instance_dict.__get__(obj)
            if type(attributes) is not dict:
                return None
            names += attributes
            values += attributes.values()
        return names, values


_layouts: WeakKeyDictionary[type, Layout | None] = WeakKeyDictionary()


def layout(cls: type) -> Layout | None:
    """The layout of a class whose instances travel by reference and values, or None."""
    # What a name stands for, and who reduces instances, may change at any time; the class itself does not.
    if type(cls) not in _METACLASSES or cls in copyreg.dispatch_table or not resolves(cls):
        return None
    try:
        return _layouts[cls]
    except KeyError:
        found = _layouts[cls] = _find_layout(cls)
        return found


def _find_layout(cls: type) -> Layout | None:
    if issubclass(cls, enum.Enum):
        return Layout(cls, "flag" if issubclass(cls, enum.Flag) else "enum")
    own = [base for base in _mro_of(cls) if base not in _BASES]
    if issubclass(cls, tuple) and "n_sequence_fields" in dict_of(cls) and cls.__bases__ == (tuple,):
        return _structseq_layout(cls)
    if any(not _flags_of(base) & _HEAP_TYPE or _is_custom(base) for base in own):
        return None
    if issubclass(cls, tuple):
        return _namedtuple_layout(cls, own)
    if any("__dataclass_fields__" in dict_of(base) for base in own):
        return _dataclass_layout(cls, own)
    return None


def python_bases(cls: type) -> list[type]:
    """The classes that a class statement made, of a class and all that it derives from."""
    return [base for base in _mro_of(cls) if _flags_of(base) & _HEAP_TYPE]


def _is_custom(base: type) -> bool:
    """Whether this one base, leaving its own bases aside, takes part in how instances are made or copied."""
    members = dict_of(base)
    generated = {"__getnewargs__"} if _is_generated(base) else set()
    for name in _CUSTOM:
        method = members.get(name)
        if method is not None and name not in generated and getattr(method, "__module__", None) != "dataclasses":
            return True
    return isinstance(members.get("__new__"), types.BuiltinMethodType)


def _is_generated(base: type) -> bool:
    """Whether ``collections.namedtuple`` made this class."""
    return tuple in base.__bases__ and type(dict_of(base).get("_fields")) is tuple


def _structseq_layout(cls: Any) -> Layout | None:
    if cls.n_fields != cls.n_sequence_fields or len(cls.__match_args__) != cls.n_fields:
        return None
    return Layout(cls, "structseq", cls.__match_args__)


def _namedtuple_layout(cls: type, own: list[type]) -> Layout | None:
    generated = [base for base in own if _is_generated(base)]
    slots, instance_dict = _storage(own)
    if len(generated) != 1 or slots is None or slots:
        return None
    return Layout(cls, "namedtuple", dict_of(generated[0])["_fields"], {}, instance_dict)


def _dataclass_layout(cls: type, own: list[type]) -> Layout | None:
    slots, instance_dict = _storage(own)
    if slots is None:
        return None
    names = tuple(field.name for field in dataclasses.fields(cls))
    return Layout(cls, "dataclass", names, slots, instance_dict)


def _storage(
    own: list[type],
) -> tuple[dict[str, types.MemberDescriptorType] | None, types.GetSetDescriptorType | None]:
    """Where instances keep their attributes; no slots at all (None) where one name would not say which is meant."""
    slots: dict[str, types.MemberDescriptorType] = {}
    instance_dict: types.GetSetDescriptorType | None = None
    for base in own:
        for name, member in dict_of(base).items():
            if isinstance(member, types.MemberDescriptorType):
                if name in slots:
                    return None, None
                slots[name] = member
            elif name == "__dict__":
                if not isinstance(member, types.GetSetDescriptorType):
                    return None, None
                instance_dict = member
    return slots, instance_dict


# -- names of classes --------------------------------------------------------------------------------------------------


def name_of(cls: type) -> tuple[str, str]:
    """Module and qualified name, as the class statement left them."""
    return str(_module_of(cls)), _qualname_of(cls)


def _canonical(module: str) -> str:
    """A process that multiprocessing spawned has its main module under a second name, which other ranks lack."""
    if module == "__mp_main__" and sys.modules.get("__mp_main__") is sys.modules.get("__main__"):
        return "__main__"
    return module


def resolves(obj: Any) -> bool:
    """Whether a class or function is found under its own module and qualified name, so that a reference is enough."""
    module: object = _module_of(obj) if isinstance(obj, type) else getattr(obj, "__module__", None)
    qualname: object = _qualname_of(obj) if isinstance(obj, type) else getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return False
    return _look_up(sys.modules.get(module), qualname) is obj


def _look_up(module: object, qualname: str) -> object:
    """What a module has under a qualified name, or None; only dictionaries are asked."""
    try:
        found: Any = _contents(module)
        for name in qualname.split("."):
            found = (found if type(found) is dict else dict_of(found)).get(name)
    except TypeError:
        return None
    return found


def find(module: str, qualname: str, *, restricted: bool) -> type:
    """The class of that name in this process. Only cluster trust imports its module.

    Raises:
        DecodeError: there is none, naming it.
    """
    name = f"{module}.{qualname}"
    if not restricted and module not in sys.modules:
        try:
            __import__(module)
        except Exception as error:
            raise DecodeError(
                f"class {name} is not known here: importing {module} failed with {type(error).__name__}: {error}",
                hint="make the module importable on this rank too",
            ) from error
    found = _look_up(sys.modules.get(module), qualname)
    if not isinstance(found, type):
        hint = "import its module before receiving" if restricted else "define it on this rank too, under that name"
        raise DecodeError(f"class {name} is not known here", hint=hint)
    return found

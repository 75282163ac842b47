"""What is in a TorchScript archive, found out without loading it: classes, functions, the states of objects.

A class that occurs twice, or an object whose class has lost the ``__setstate__`` that its state was made for, would be
loaded as something else than was saved: such an archive is refused before any of it is loaded. Nothing of the archive
runs here; its code is only looked at line by line, and its pickles are read with a stand-in for everything they name.
"""

from __future__ import annotations

import io
import keyword
import pickle
import re
import zipfile
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import DecodeError
from .backends import NAMESPACE

# Torch writes a definition at the start of a line, and what belongs to it two blanks further in.
_CLASS = re.compile(r"class (\w+)(?:\(.*\))?:")
_FUNCTION = re.compile(r"def (\w+)\(")
_METHOD = re.compile(r"  def (\w+)\(")
_ATTRIBUTE = re.compile(r'  (?:(\w+)|__annotations__\["([^"]+)"\]) (?::|=) (.+)')
# Names that are none of Python's are declared as they are, and used as strings, not all of which torch can read.
_DECLARED = re.compile(r'  __annotations__\["(.*)')
_USED = re.compile(r'\bgetattr\(\w+, "((?:[^"\\]|\\.)*)"\)')
_ESCAPES = re.compile(r"\\(?:[\\'\"abfnrtv]|[0-3][0-7]{2})")
_CPP_CLASS = re.compile(r"__torch__\.torch\.classes\.(\w+)\.(\w+)")

_SOURCE = re.compile(r"[^/]+/code/(.*)\.py")
# Whose functions the pickles name; whatever else they name is a class of the archive.
_HELPERS = ("torch", "torch._utils", "torch.jit._pickle", "torch.serialization")
_PICKLES = ("data.pkl", "constants.pkl")

# Names that TorchScript reads as something else. Not all of Python's keywords are its own.
_FREE = ("async", "await", "except", "finally", "from", "lambda", "nonlocal", "try", "yield")
_KEYWORDS = frozenset(keyword.kwlist).difference(_FREE) | {"__parameters__", "__buffers__"}

# What torch writes into the wrapper of what a backend has made of a module.
_LOWERED = frozenset(("__processed_module", "__backend"))


@dataclass
class Definition:
    """A class of an archive."""

    methods: set[str] = field(default_factory=set)
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def lowered(self) -> bool:
        """Whether it stands for a module that was lowered to a backend."""
        return self.attributes.keys() >= _LOWERED


@dataclass
class Contents:
    """What an archive defines and holds.

    Attributes:
        classes: by their qualified names.
        cpp_classes: classes of C++ that the archive needs, backends among them, as (namespace, name).
        locations: devices that its tensors were on.
        states: of each class with objects in the archive, whether their states are something else than a dict.
    """

    classes: dict[str, Definition] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    cpp_classes: set[tuple[str, str]] = field(default_factory=set)
    locations: set[str] = field(default_factory=set)
    states: dict[str, bool] = field(default_factory=dict)


def scan(data: bytes) -> Contents:
    """Look through an archive.

    Raises:
        DecodeError: it is malformed; or it defines a class or a function twice, or lacks a ``__setstate__`` that the
            state of one of its objects needs.
    """
    contents = Contents()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _read(archive, contents)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"the TorchScript archive is malformed: {type(error).__name__}: {error}") from error
    _check_states(contents)
    return contents


def _read(archive: zipfile.ZipFile, contents: Contents) -> None:
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise DecodeError("the TorchScript archive holds a file twice")
    for name in names:
        source = _SOURCE.fullmatch(name)
        if source is not None:
            _read_source(source[1].replace("/", "."), archive.read(name).decode(), contents)
    for name in names:
        if name.partition("/")[2] in _PICKLES:
            _read_pickle(archive.read(name), contents)


def _read_source(namespace: str, text: str, contents: Contents) -> None:
    prefix = f"{namespace}." if namespace else ""
    inside: Definition | None = None
    contents.cpp_classes.update(_CPP_CLASS.findall(text))
    for line in text.splitlines():
        _check_written(line)
        if not line or line.startswith("   "):
            continue
        if not line.startswith(" "):
            inside = None
            defined = _CLASS.match(line)
            function = None if defined else _FUNCTION.match(line)
            name = prefix + (defined or function)[1] if defined or function else ""  # type: ignore[index]
            if name and (name in contents.classes or name in contents.functions):
                raise DecodeError(f"the TorchScript archive defines {name} twice: one of them would replace the other")
            if defined:
                inside = contents.classes[name] = Definition()
            elif function:
                contents.functions.add(name)
        elif inside is not None:
            _read_member(inside, line)


def _check_written(line: str) -> None:
    """Refuse a name that torch has written so that it cannot read it."""
    declared = _DECLARED.match(line)
    if declared is not None and not re.fullmatch(r'[^"\\]+"\] = .+', declared[1]):
        raise _unreadable(declared[1].partition('"] = ')[0])
    for name in _USED.findall(line) if "getattr(" in line else ():
        if "\\" in _ESCAPES.sub("", name):
            raise _unreadable(name)


def _unreadable(name: str) -> DecodeError:
    return DecodeError(
        f"the TorchScript archive has a submodule, tensor or attribute named {name!r}, which torch cannot load",
        hint="rename it: ASCII letters, digits and underscores, and no keyword",
    )


def _read_member(definition: Definition, line: str) -> None:
    method = _METHOD.match(line)
    if method is not None:
        if method[1] in definition.methods:
            raise DecodeError(f"the TorchScript archive defines a method {method[1]} twice in one class")
        definition.methods.add(method[1])
        return
    attribute = _ATTRIBUTE.match(line)
    if attribute is not None:
        if attribute[1] in _KEYWORDS and not attribute[3].startswith("["):
            raise _unreadable(attribute[1])
        definition.attributes[attribute[1] or attribute[2]] = attribute[3]


def _check_states(contents: Contents) -> None:
    for name, definition in contents.classes.items():
        needed = definition.lowered or "__getstate__" in definition.methods
        if needed and "__setstate__" not in definition.methods:
            kind = "lowered module" if definition.lowered else "class"
            raise DecodeError(
                f"the TorchScript archive has no __setstate__ for the {kind} {name}: it was lost on the way"
            )
        if definition.lowered and "__getstate__" not in definition.methods:
            raise DecodeError(f"the TorchScript archive has no __getstate__ for the lowered module {name}")
    for name, special in contents.states.items():
        found = contents.classes.get(name)
        if found is None:
            if not _CPP_CLASS.fullmatch(name):
                raise DecodeError(f"the TorchScript archive holds an object of {name}, which it does not define")
        elif special and "__setstate__" not in found.methods:
            raise DecodeError(
                f"the TorchScript archive holds an object of {name} whose state needs a __setstate__, and there is none"
            )


# -- the pickles of an archive -----------------------------------------------------------------------------------------


_unpickler: Any = pickle._Unpickler


class _Anything:
    """In place of every function that a pickle of an archive names: it takes anything and does nothing."""

    def __new__(cls, *args: Any) -> Any:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class _Names:
    """What a reader of a pickle of an archive takes names for; nothing is imported."""

    def __init__(self, data: bytes, contents: Contents) -> None:
        super().__init__(io.BytesIO(data))  # type: ignore[call-arg]
        self._contents = contents
        self._stand_ins: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return dict
        full = f"{module}.{name}"
        if full not in self._stand_ins:
            self._stand_ins[full] = _Anything if module in _HELPERS else _stand_in(full, self._contents)
        return self._stand_ins[full]

    def persistent_load(self, pid: Any) -> Any:
        # ("storage", type, key, location, number of elements)
        if isinstance(pid, tuple) and len(pid) > 3 and isinstance(pid[3], str):
            self._contents.locations.add(pid[3])


class _Reader(_Names, pickle.Unpickler):
    pass


class _DialectReader(_Names, _unpickler):  # type: ignore[misc]
    """torch writes members of enums as a call of the class with a value where pickle wants a tuple of values."""

    dispatch: ClassVar[dict[int, Any]] = dict(_unpickler.dispatch)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        self.stack[-1] = function(*arguments) if isinstance(arguments, tuple) else function(arguments)

    dispatch[pickle.REDUCE[0]] = load_reduce


def _read_pickle(data: bytes, contents: Contents) -> None:
    try:
        _Reader(data, contents).load()
    except TypeError:
        _DialectReader(data, contents).load()


def _stand_in(name: str, contents: Contents) -> type:
    contents.states.setdefault(name, False)

    def set_state(self: Any, state: Any) -> None:
        if type(state) is not dict:
            contents.states[name] = True

    return type("_StandIn", (_Anything,), {"__setstate__": set_state})


# -- what an archive needs ---------------------------------------------------------------------------------------------


def backends(contents: Contents) -> list[str]:
    """The backends that modules of an archive were lowered to."""
    return sorted(name for namespace, name in contents.cpp_classes if namespace == NAMESPACE)

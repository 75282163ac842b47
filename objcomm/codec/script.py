"""TorchScript modules and functions: all of one message travel in one archive, so that they keep what they share.

Two modules that were lowered to one backend have types of one name as often as not. In one archive torch makes these
names unique; the archive is looked through before it leaves and before it is loaded (archive.py), and what has been
loaded is compared with what was sent (scripttree.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch

from ..errors import DecodeError, EncodeError, ObjcommError
from . import archive, backends, registry, scriptfunctions, scripttree, tensors
from .levels import Trouble
from .memory import MemoryWriter
from .ordinary import Ordinary
from .parts import GRAD_HINT
from .path import describe, reason

_C: Any = torch._C
_jit: Any = torch.jit

_CONTAINER = "objcomm.Message"
_ROOT = "root_{}"

# What torch itself puts into the Python wrapper of a module; the archive carries it.
_WRAPPER = frozenset(
    ("_c", "_initializing", "_parameters", "_buffers", "_modules", "_concrete_type", "training", "_name")
    + ("_actual_script_module",)  # of what torch.jit.trace returns
)
_CALLABLES = (_C.ScriptMethod, _C.ScriptFunction, MethodType, property)


class ScriptArchive:
    """The modules and functions of one message on their way out; see ``registry.Gathering``."""

    name = "script.archive"

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._roots: list[Any] = []
        self._functions: list[Any] = []

    def add(self, obj: Any) -> list[Any]:
        if isinstance(obj, _C.ScriptFunction):
            scriptfunctions.check(obj)
            self._functions.append(obj)
            return [self, len(self._functions) - 1, scriptfunctions.attributes(obj)]
        self._roots.append(obj)
        return [self, len(self._roots) - 1, _additions(obj)]

    def finish(self, memory: MemoryWriter, forbid_grad: bool) -> None:
        modules = [root._c for root in self._roots]
        for root in self._roots if forbid_grad else ():
            if any(tensor.requires_grad for tensor in root.parameters()):
                raise Trouble(root) from EncodeError("the gradients of its parameters would be lost", hint=GRAD_HINT)
        try:
            with Ordinary():
                data = _save(modules, self._functions)
        except Exception as error:
            raise Trouble(self._culprit()) from EncodeError(f"torch cannot save it: {_gist(error)}")
        try:
            contents = archive.scan(data)
        except DecodeError as error:
            text = f"torch made an archive that would not load as what it is: {error.text}"
            raise Trouble(self._culprit(archive.scan)) from EncodeError(text, hint=error.hint)
        if len(contents.locations) > 1:
            raise Trouble(self._roots[0]) from EncodeError(
                f"the TorchScript modules of a message are on several devices: {', '.join(sorted(contents.locations))}",
                hint="send those of each device by themselves",
            )
        # It arrives where the tensors of the archive shall be.
        places = contents.locations - {"meta"}
        probe = next((torch.zeros(1, dtype=torch.uint8, device=place) for place in places), None)
        self.parts += [data, probe, self._places(), len(self._functions), scripttree.manifest(modules)]
        self.parts += [_ties(modules, memory), self._wrappers()]

    def _places(self) -> list[Any]:
        """Of each root where it is: None by itself, or ``[root, path]`` inside of another one."""
        index = {id(root): number for number, root in enumerate(self._roots)}
        places: list[Any] = [None] * len(self._roots)
        for number, root in enumerate(self._roots):
            for path, module in root.named_modules(remove_duplicate=False):
                if path and id(module) in index:
                    places[index[id(module)]] = [number, path]
        return places

    def _wrappers(self) -> list[Any]:
        """Python objects in several places, as ``[[root, path], ...]`` each; the archive knows nothing of them."""
        places: dict[int, list[Any]] = {}
        for number, root in enumerate(self._roots):
            for path, module in root.named_modules(remove_duplicate=False):
                places.setdefault(id(module), []).append([number, path])
        return [each for each in places.values() if sum(bool(path) for _, path in each) > 1]

    def _culprit(self, check: Callable[[bytes], Any] = len) -> Any:
        """The first module or function that cannot be saved, or whose archive does not stand the check."""
        objs: Iterable[Any] = [*self._roots, *self._functions]
        for obj in objs:
            function = isinstance(obj, _C.ScriptFunction)
            try:
                check(_save([] if function else [obj._c], [obj] if function else []))
            except Exception:
                return obj
        return next(iter(objs))


def _save(modules: list[Any], functions: list[Any]) -> bytes:
    container = _C.ScriptModule(_CONTAINER, _C.CompilationUnit(), True)
    for number, module in enumerate(modules):
        container._register_attribute(_ROOT.format(number), module._type(), module)
    scriptfunctions.refer(container, functions)
    data: bytes = container.save_to_buffer({})
    return data


def _gist(error: BaseException) -> str:
    """What torch says without where it says that it was: the first lines, or the last one after a traceback."""
    lines = [line.strip() for line in reason(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[1].startswith("Traceback of TorchScript"):
        return f"{lines[0]} {lines[-1]}"
    return " ".join(lines[:2])


def _additions(root: Any) -> dict[str, dict[str, Any]]:
    """What the Python wrappers of a module and its submodules have beyond what torch saves, by path and name."""
    additions = {}
    for path, module in root.named_modules():
        more = {name: value for name, value in vars(module).items() if _is_addition(name, value)}
        if more:
            additions[path] = more
    return additions


def _is_addition(name: str, value: Any) -> bool:
    if name in _WRAPPER or isinstance(value, _CALLABLES):
        return False
    if name.startswith("_") and isinstance(value, (dict, set)):
        return bool(value) and not all(isinstance(hook, _CALLABLES) for hook in _values(value))
    return not (name.startswith("_") and value is None)


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _ties(modules: list[Any], memory: MemoryWriter) -> list[Any]:
    """What of the modules has memory that the rest of the message has too: ``[root, path, name, value]``."""
    ties: list[Any] = []
    overlaps = memory.overlaps()
    for index, root in enumerate(modules):
        for path, module in scripttree.walk(root):
            for name, value in scripttree.values_of(module):
                held = list(scripttree.tensors_in(value))
                if all(map(tensors.is_plain, held)) and any(map(overlaps, held)):
                    ties.append([index, path, name, value])
    return ties


# -- receiving ---------------------------------------------------------------------------------------------------------


class _Loaded:
    """The modules and functions of one message that has arrived."""

    def __init__(self, modules: list[Any], places: list[Any], functions: list[Any], wrappers: list[Any]) -> None:
        self._modules = modules
        self._places = places
        self._wrapped: dict[int, Any] = {}
        self.functions = functions
        for alike in wrappers:
            self._share(alike)

    def module(self, number: int) -> Any:
        if number not in self._wrapped:
            place = self._places[number]
            if place is None:
                self._wrapped[number] = _jit._recursive.wrap_cpp_module(self._modules[number])
            else:
                self._wrapped[number] = _below(self.module(place[0]), place[1])
        return self._wrapped[number]

    def _share(self, places: list[Any]) -> None:
        """Put the Python object that is in one place into others as well."""
        one = _below(self.module(places[0][0]), places[0][1])
        for root, path in places[1:]:
            above, _, name = path.rpartition(".")
            modules: Any = _below(self.module(root), above)._modules if path else {}
            if name in modules and modules[name]._c == one._c:
                modules._python_modules[name] = one


def _load(parts: list[Any]) -> _Loaded:
    data, probe, places, functions, sent, ties, wrappers = parts
    contents = archive.scan(data)
    for name in archive.backends(contents):
        backends.require(name)
    for namespace, name in sorted(contents.cpp_classes):
        if not backends.is_known(namespace, name):
            raise DecodeError(
                f"a TorchScript module needs the class {namespace}.{name} of C++, which is not known here",
                hint="load the library that registers it, with torch.classes.load_library, before receiving",
            )
    unit = _C.CompilationUnit()
    try:
        with Ordinary():
            container = _C.import_ir_module_from_buffer(unit, data, None if probe is None else probe.device, {}, False)
            modules = [container.getattr(_ROOT.format(number)) for number in range(len(places))]
            found = [scriptfunctions.find(unit, container, number) for number in range(functions)]
            unlike = scripttree.difference(sent, scripttree.manifest(modules))
            if unlike is not None:
                raise DecodeError(f"a TorchScript module is not loaded as what was sent: {unlike}")
            for root, path, name, value in ties:
                scripttree.find(modules[root], path).setattr(name, value)
    except ObjcommError:
        raise
    except Exception as error:
        names = ", ".join(repr(name) for name in archive.backends(contents))
        lowered = f" (lowered to {names})" if names else ""
        raise DecodeError(f"a TorchScript module{lowered} cannot be loaded here: {_gist(error)}") from error
    return _Loaded(modules, places, found, wrappers)


def _below(root: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        root = root._modules[name]
    return root


def _module(parts: list[Any]) -> Any:
    loaded, number, additions = parts
    root = _loaded(loaded).module(number)
    for path, attributes in additions.items():
        vars(_below(root, path)).update(attributes)
    return root


def _function(parts: list[Any]) -> Any:
    loaded, number, attributes = parts
    function = _loaded(loaded).functions[number]
    vars(function).update(attributes)
    return function


def _loaded(value: Any) -> _Loaded:
    if type(value) is not _Loaded:
        raise ValueError(f"{describe(value)} where a TorchScript archive should be")
    return value


registry.register_gathering(ScriptArchive, _load, code=True)
registry.register_gathered(
    "script.module", lambda obj: True, ScriptArchive, _module, code=True, base=torch.jit.ScriptModule
)
registry.register_gathered(
    "script.function", lambda obj: True, ScriptArchive, _function, code=True, base=torch.jit.ScriptFunction
)

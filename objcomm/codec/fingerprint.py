"""Which code a class, function or module is that travels by its name, so that a receiver with other code can tell.

Two things say it. The source of its module, if it is certain that this is what the module's file holds: then nothing
else counts. And its own functions, as they are compiled: where a file was written anew after its import, or a program
has replaced parts of a module, these are what is left to compare. A function that was replaced by one from elsewhere is
left out, on whichever rank, and so is what one rank has alone. So nothing differs unless both ranks have a function of
one name with other code, or no function in common.
"""

from __future__ import annotations

import hashlib
import sys
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from . import classes, modulesource
from .modulesource import Namespace

_KEPT = "__objcomm_version__"
_KEPT_WHOLE = "__objcomm_fingerprint__"
_NAME, _CODE = 4, 6  # hexadecimal digits of a function
_LITERALS = (bool, int, float, complex, str, bytes, type(None))

_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

# Another interpreter makes other code.
_INTERPRETER = f"{sys.implementation.cache_tag} {sys.hexversion:x}"


def of(obj: Any) -> str:
    """The fingerprint of a class or function that is found under its name, or of a module; nothing if there is none.

    It covers what a class derives from, and leaves out what is installed.
    """
    if isinstance(obj, types.ModuleType):
        return _of_module(obj)
    try:
        return _known[obj]
    except KeyError:
        found = _known[obj] = _find(obj)
        return found
    except TypeError:  # a metaclass has its own idea of what a key is
        return _find(obj)


def _of_module(module: types.ModuleType) -> str:
    kept = vars(module).get(_KEPT_WHOLE)
    if not isinstance(kept, tuple) or kept[0] is not module.__spec__:  # it may have been loaded again
        kept = vars(module)[_KEPT_WHOLE] = (module.__spec__, _find(module))
    return str(kept[1])


def differ(here: str, sent: str) -> bool:
    """Whether two fingerprints are certainly of different code."""
    mine, its = here.split("|"), sent.split("|")
    if len(mine) != 4 or len(its) != 4 or mine[0] != its[0]:
        return False
    if mine[1] and its[1]:
        return mine[1] != its[1]
    if mine[2] != its[2]:
        return False
    own, other = _split(mine[3]), _split(its[3])
    both = [(own[name], other[name]) for name in own.keys() & other.keys()]
    if any(not (one <= two or two <= one) for one, two in both):
        return True
    mine_all, its_all = set().union(*own.values()), set().union(*other.values())
    return bool(mine_all and its_all) and mine_all.isdisjoint(its_all)


def _split(functions: str) -> dict[str, set[str]]:
    """What goes by each name."""
    found: dict[str, set[str]] = {}
    for at in range(0, len(functions), _NAME + _CODE):
        name, code = functions[at : at + _NAME], functions[at + _NAME : at + _NAME + _CODE]
        found.setdefault(name, set()).add(code)
    return found


def _find(obj: Any) -> str:
    parts = [part for part in _parts(obj) if _is_compared(part.namespace)]
    if not parts:
        return ""
    sources = list(dict.fromkeys(_source(part.namespace) if part.is_named else "" for part in parts))
    source = "" if "" in sources else sources[0] if len(sources) == 1 else _digest(sources)
    loader = type(parts[0].namespace.get("__loader__")).__qualname__
    functions = {text for part in parts for text in _own(part)}
    if not source and not functions:  # a module in C, for instance
        return ""
    return f"{_INTERPRETER}|{source}|{loader} {sys.flags.optimize}|{''.join(sorted(functions))}"


class _Part(NamedTuple):
    """A class, function or module with the namespace that it is of; one without its name is not of what that is now."""

    obj: Any
    namespace: Namespace
    is_named: bool


def _parts(obj: Any) -> Iterator[_Part]:
    """A class and those that it derives from, or a function or module."""
    if isinstance(obj, types.ModuleType):
        yield _Part(obj, vars(obj), True)
        return
    for each in classes.python_bases(obj) if isinstance(obj, type) else [obj]:
        is_named = classes.resolves(each)
        found = vars(sys.modules[modulesource.module_name(each)]) if is_named else modulesource.namespace_of(each)
        if found is not None:
            yield _Part(each, found, is_named)


def _is_compared(namespace: Namespace) -> bool:
    ours = modulesource.is_ours(namespace) or modulesource.is_dynamic(namespace)
    return ours or modulesource.is_main(namespace)


# -- the source of a module --------------------------------------------------------------------------------------------


def _source(namespace: Namespace) -> str:
    """What is the same for modules of the same code, whatever their comments; nothing if that is not certain."""
    kept = namespace.get(_KEPT)
    if not isinstance(kept, tuple) or kept[0] is not namespace.get("__spec__"):
        kept = namespace[_KEPT] = (namespace.get("__spec__"), _find_source(namespace))
    return str(kept[1])


def _find_source(namespace: Namespace) -> str:
    if not modulesource.is_ours(namespace):
        return ""
    text = modulesource.remembered(namespace)
    if text is None:
        text = modulesource.read(namespace)
        if text is None or not modulesource.fits(namespace, text, wholly=True):
            return ""
    return _digest(map(_describe, modulesource.codes_in(compile(text, "", "exec", dont_inherit=True, optimize=0))))


def _digest(described: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(described).encode("utf-8", "surrogatepass")).hexdigest()[:20]


# -- what it is itself -------------------------------------------------------------------------------------------------


def _own(part: _Part) -> Iterator[str]:
    """What the module itself has made of one class, function or module, and what that calls there."""
    obj, namespace = part.obj, part.namespace
    # A module without a file has nothing else to be told by.
    wholly = isinstance(obj, types.ModuleType) or modulesource.is_dynamic(namespace)
    for function in modulesource.functions_of(namespace) if wholly else _reached(obj, namespace):
        # Code from a string, in a module with a file, was written by a decorator.
        if namespace.get("__file__") is None or not function.__code__.co_filename.startswith("<"):
            codes = "\n".join(map(_describe, modulesource.codes_in(function.__code__)))
            yield _entry(f"{function.__qualname__} {function.__code__.co_name}", codes)
    if isinstance(obj, type) and modulesource.is_dynamic(namespace):
        members = classes.dict_of(obj)
        yield from (_entry(name, repr(value)) for name, value in members.items() if _is_literal(name, value))


def _reached(obj: Any, namespace: Namespace) -> Iterator[types.FunctionType]:
    """The functions of a module in a class or function, and those of the module that they name."""
    todo, seen = [obj], {id(obj)}
    while todo:
        each = todo.pop()
        for function in modulesource.functions_in(classes.dict_of(each) if isinstance(each, type) else {"": each}):
            if function.__globals__ is not namespace:
                continue
            yield function
            names = {name for code in modulesource.codes_in(function.__code__) for name in code.co_names}
            found = [namespace[name] for name in sorted(names.intersection(namespace))]
            todo += (one for one in found if id(one) not in seen and isinstance(one, (type, types.FunctionType)))
            seen.update(map(id, found))


def _is_literal(name: str, value: Any) -> bool:
    return type(value) in _LITERALS and not (name.startswith("__") and name.endswith("__"))


def _entry(name: str, text: str) -> str:
    return f"{_hash(name)[-_NAME:]}{_hash(text)[-_CODE:]}"


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def _describe(code: types.CodeType) -> str:
    constants = [_constant(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return repr((code.co_code, constants, arguments, names))


def _constant(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        items = [_constant(item) for item in value]
        return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, frozenset) else items)})"
    return repr(value)

"""Where in an object something is, written as Python would: ``obj['cfg'].layers[3]``. Only looked for when needed."""

from __future__ import annotations

import functools
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ..errors import EncodeError, ObjcommError
from . import classes

ROOT = "obj"
_SEARCH_LIMIT = 1_000_000  # objects that are looked at before a path is given up
# Pickling parts again and again until the culprit is found must not take longer.
_DIG_SECONDS = 3.0
_DIG_LEVELS = 50
_SCALARS = (type(None), bool, int, float, str, bytes, complex)
_BUILTIN = (types.FunctionType, list, tuple, dict, set, frozenset)


def _is(kind: type, kinds: tuple[type, ...]) -> bool:
    """Like ``in``, but a metaclass has no say in it."""
    return any(kind is each for each in kinds)


def show(key: object) -> str:
    """A short repr that cannot fail."""
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__qualname__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def show_received(key: object, room: int = 80) -> str:
    """The same of a key that someone else chose: no code of its class runs, and it takes no longer than its text is."""
    kind = type(key)
    if isinstance(key, (str, bytes)) and _is(kind, (str, bytes)):
        return show(key[:room])
    if _is(kind, _SCALARS):
        return show(key)
    if isinstance(key, tuple) and kind is tuple and room > 8:
        parts = [show_received(item, room // 8) for item in key[:8]]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''}{', ...' if len(key) > 8 else ''})"
    return f"<{kind.__qualname__}>"


def describe(obj: Any) -> str:
    """An object by its type, for messages: its own repr may be long, or fail. Classes and functions by their names."""
    if type(obj) is type or type(obj) is types.FunctionType:
        return f"the {'class' if type(obj) is type else 'function'} {obj.__module__}.{obj.__qualname__}"
    name = ".".join(classes.name_of(type(obj))).removeprefix("builtins.")
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def children(obj: Any) -> Iterator[tuple[str, Any]]:
    """What an object directly holds, each with what to append to the object's path. Runs no code of its class."""
    kind = type(obj)
    if issubclass(kind, dict):
        for key, value in dict.items(obj):
            yield f"[{show(key)}]", value
            if not _is(type(key), _SCALARS):
                yield f".key({show(key)})", key
        if issubclass(kind, defaultdict):
            yield ".default_factory", obj.default_factory
    elif issubclass(kind, tuple):
        layout = classes.layout(kind)
        names = () if layout is None else layout.fields
        for index, item in enumerate(tuple.__iter__(obj)):
            yield (f".{names[index]}" if index < len(names) else f"[{index}]"), item
    elif issubclass(kind, list):
        for index, item in enumerate(list.__iter__(obj)):
            yield f"[{index}]", item
    elif issubclass(kind, (set, frozenset, deque)):
        for index, item in enumerate(kind.__iter__(obj)):
            yield f"[{index}]" if issubclass(kind, deque) else f".element({show(item)})", item
    yield from _attributes(obj)
    if kind is types.FunctionType:
        yield from _of_function(obj)


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    for base in classes.python_bases(type(obj)):
        for name, member in list(classes.dict_of(base).items()):
            try:
                if isinstance(member, types.MemberDescriptorType):
                    yield f".{name}", member.__get__(obj)
                elif name == "__dict__" and isinstance(member, types.GetSetDescriptorType):
                    for attribute, value in list(member.__get__(obj).items()):
                        yield f".{attribute}", value
            except (AttributeError, TypeError):
                continue
    if type(obj) is functools.partial:
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif type(obj) is types.MethodType:
        yield ".__self__", obj.__self__


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", value) for name, value in list(function.__dict__.items()))
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            yield f".__closure__[{index}].cell_contents", cell.cell_contents
        except ValueError:
            continue
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", default
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".__globals__[{name!r}]", function.__globals__[name]


def find(root: Any, target: Any) -> str | None:
    """The shortest path to an object that is part of another, or None."""
    if target is root:
        return ROOT
    seen = {id(root)}
    alive = [root]  # an id stays taken only while its object lives
    queue: deque[tuple[str, Any]] = deque([(ROOT, root)])
    while queue and len(alive) < _SEARCH_LIMIT:
        path, obj = queue.popleft()
        for label, child in children(obj):
            if child is target:
                return path + label
            if _is(type(child), _SCALARS) or id(child) in seen:
                continue
            seen.add(id(child))
            alive.append(child)
            queue.append((path + label, child))
    return None


def encoding_error(root: Any, objs: list[Any], cause: BaseException | None) -> ObjcommError:
    """The error to raise for an object that cannot be sent; ``objs`` are that object and the composites around it."""
    path = next((found for found in (find(root, obj) for obj in objs) if found is not None), None)
    if isinstance(cause, ObjcommError):
        if cause.path is None:
            cause.path = path
        return cause
    return EncodeError(f"{describe(objs[0])} cannot be sent: {reason(cause)}", path=path)


def reason(error: BaseException | None) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def dig(obj: Any, failure: Callable[[Any], Exception | None]) -> tuple[str, Any, Exception | None]:
    """Inside an object that fails, the smallest part that fails by itself: path below the object, part, exception.

    The object itself if the part would be too far inside: then it is the depth that fails.
    """
    whole = "", obj, failure(obj)
    path, part, error = whole
    seen = {id(obj)}
    end = time.monotonic() + _DIG_SECONDS
    for _ in range(_DIG_LEVELS):
        for label, child in islice(_pickled(part), _SEARCH_LIMIT):
            if _is(type(child), _SCALARS) or id(child) in seen:
                continue
            if time.monotonic() > end:
                return path, part, error
            seen.add(id(child))
            inner = failure(child)
            if inner is not None and _is_cause(inner, error):
                path, part, error = path + label, child, inner
                break
        else:
            return path, part, error
    return whole


def _is_cause(inner: Exception, outer: Exception | None) -> bool:
    """Whether what is wrong with a part is what is wrong with the whole: a refusal of the whole has no other cause."""
    if isinstance(outer, ObjcommError):
        return isinstance(inner, ObjcommError) and inner.text == outer.text
    return True


def _pickled(obj: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled of an object: like :func:`children`, but what the object itself says counts."""
    kind = type(obj)
    if issubclass(kind, type) or _is(kind, _BUILTIN):
        yield from children(obj)
        if issubclass(kind, type):
            yield from ((f".{name}", value) for name, value in list(classes.dict_of(obj).items()))
        return
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:
        return
    if not isinstance(reduced, tuple):
        return
    named = {id(child): label for label, child in children(obj)}
    for index, argument in enumerate(reduced[1]):
        yield named.get(id(argument), f".__reduce_ex__(5)[1][{index}]"), argument
    for state in reduced[2] if len(reduced) > 2 and isinstance(reduced[2], tuple) else reduced[2:3]:
        if isinstance(state, dict):
            yield from ((f".{name}", value) for name, value in state.items())
        elif state is not None:
            yield named.get(id(state), ".__getstate__()"), state
    yield from children(obj)

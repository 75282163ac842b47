"""Generated modules that arrive: this process' own ones, or made anew from their source, once for each digest."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import DecodeError
from . import generated, imports, modulesource
from .path import reason

_rebuilt: dict[str, types.ModuleType] = {}
_own_digests: dict[str, tuple[types.ModuleType, Any]] = {}
_lock = threading.RLock()
_MISSING: Any = object()


class Source(NamedTuple):
    """What a generated module is made from.

    Attributes:
        renamed: the classes that were given other names than where they are, and these names, by where they are.
        needs: which of the sources it came with it imports when it is made.
        later: which of them it imports in functions.
    """

    name: str
    source: str
    file: str
    renamed: dict[str, tuple[str, str]]
    needs: tuple[int, ...]
    later: tuple[int, ...]


def digest_of(sources: list[Source], number: int) -> str:
    """What tells a module, with all generated modules that it needs."""
    todo, reached = [number], {number}
    while todo:
        source = sources[todo.pop()]
        fresh = {*source.needs, *source.later} - reached
        reached |= fresh
        todo += fresh
    texts = [repr((each.name, sorted(each.renamed.items()), each.source)) for each in map(sources.__getitem__, reached)]
    text = "\n".join([sources[number].name, *sorted(texts)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Modules:
    """The modules of some sources that came together."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._found: dict[int, types.ModuleType] = {}

    def find(self, number: int) -> types.ModuleType:
        """This process' own module, or one that is made from the source.

        Raises:
            DecodeError: it cannot be made here.
        """
        with _lock:
            if number not in self._found:
                digest = digest_of(self._sources, number)
                module = self._own(number, digest) or _rebuilt.get(digest)
                if module is None:
                    self._make(number, digest)
                else:
                    self._found[number] = module
            return self._found[number]

    def _own(self, number: int, digest: str) -> types.ModuleType | None:
        """This process' own module of that name and digest, imported if need be."""
        source = self._sources[number]
        module = sys.modules.get(source.name)
        if module is None:
            try:
                spec = importlib.util.find_spec(source.name)
                same = spec is not None and _source_by(spec.loader, source.name) == source.source
                module = importlib.import_module(source.name) if same else None
            except Exception:
                return None
        if not isinstance(module, types.ModuleType):
            return None
        known = _own_digests.get(digest)
        is_known = known is not None and known[0] is module and known[1] is module.__spec__
        if is_known and generated.renamed(vars(module)) == source.renamed:
            return module
        if not self._is_same(vars(module), number, set()):
            return None
        _own_digests[digest] = module, module.__spec__
        return module

    def _is_same(self, namespace: modulesource.Namespace, number: int, seen: set[int]) -> bool:
        """Whether a module has that source, and what it imports has the sources that this one needs."""
        source = self._sources[number]
        if number in seen:
            return True
        seen.add(number)
        if modulesource.source_of(namespace) != source.source or generated.renamed(namespace) != source.renamed:
            return False
        needs = {self._sources[each].name: each for each in (*source.needs, *source.later)}
        led_to = imports.namespaces_of(namespace, source.source) if needs else []
        found = {str(inner.get("__name__")): inner for inner, _ in led_to}
        return all(name in found and self._is_same(found[name], each, seen) for name, each in needs.items())

    def _make(self, number: int, digest: str) -> None:
        source = self._sources[number]
        name, filename = source.name, f"<{source.name} {digest[:12]} of {os.path.basename(source.file)}>"
        linecache.cache[filename] = (len(source.source), None, source.source.splitlines(keepends=True), filename)
        module = self._found[number] = types.ModuleType(name)
        namespace = vars(module)
        namespace.update({"__file__": filename, "__package__": name.rpartition(".")[0], generated.MARK: True})
        modulesource.remember(namespace, source.source)
        needed = {self._sources[each].name: self.find(each) for each in source.needs}
        namespace[imports.NEEDED] = {name: vars(found) for name, found in needed.items()}
        for each in source.later:
            later = self._sources[each]
            if self._own(each, digest_of(self._sources, each)) is None:
                raise DecodeError(
                    f"the generated module {name} imports {later.name} in a function, and that is other code here",
                    hint="import it at the top of the module: then it travels along",
                )
        try:
            with _findable(module, needed):
                exec(compile(source.source, filename, "exec", dont_inherit=True), namespace)
            for path, (short, qualname) in source.renamed.items():
                cls = generated.at(namespace, path)
                cls.__name__, cls.__qualname__ = short, qualname
        except (Exception, SystemExit) as error:
            raise DecodeError(f"the generated module {name} cannot be made here: {reason(error)}") from error
        modulesource.homes.update(dict.fromkeys(modulesource.classes_of(namespace), namespace))
        _rebuilt[digest] = module


def _source_by(loader: Any, name: str) -> str | None:
    return loader.get_source(name) if hasattr(loader, "get_source") else None


@contextlib.contextmanager
def _findable(module: types.ModuleType, needed: dict[str, types.ModuleType]) -> Iterator[None]:
    """While a module is made, its imports find the modules that it needs, instead of others of these names.

    What looks for the module itself by its name, as dataclasses do, finds it, unless another one has the name.
    """
    before: dict[str, Any] = {}
    for name, found in {**({} if module.__name__ in sys.modules else {module.__name__: module}), **needed}.items():
        before[name] = sys.modules.get(name, _MISSING), _swap(name, found)
        sys.modules[name] = found
    try:
        yield
    finally:
        for name, (known, attribute) in before.items():
            if known is _MISSING:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = known
            _swap(name, attribute)


def _swap(name: str, value: Any) -> Any:
    """Set what the package of a module, if it is loaded, has under the name of the module; what it had before."""
    above, _, last = name.rpartition(".")
    package = sys.modules.get(above)
    if package is None:
        return _MISSING
    before = vars(package).get(last, _MISSING)
    if value is _MISSING:
        vars(package).pop(last, None)
    else:
        vars(package)[last] = value
    return before

"""Generated code is loaded from exactly one file under its name, and is never taken for other code of that name.

Python finds ``_parallel_modules.<module>.<class>.<instance>.gencode<rank>`` on the import path, where several folders
may hold a file for it, and gives back what is loaded under that name already. So the file is named here, and what is
loaded is compared with it. A class is known by what its source was when it was loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import foreign

CLASS = "GenModel"
_NAMESPACE = "_parallel_modules"


@dataclass(frozen=True)
class Code:
    """What a generated class is made of.

    Attributes:
        name: of the module.
        path: of its file.
        digest: SHA-256 of the source, in hexadecimal.
    """

    name: str
    path: str
    digest: str

    def __str__(self) -> str:
        return f"{self.path} (digest {self.digest[:12]})"


class _Loader(SourceFileLoader):
    """Loads a source that was read already, past the cache of bytecode, which may belong to an older file.

    The class is held under a name that tells its code, too. nnScaler replaces its qualified name by that of the
    original class, under which the module holds nothing; under this one, a reference finds this code or nothing, on
    whatever rank and from whatever folder.
    """

    def __init__(self, code: Code, source: bytes) -> None:
        super().__init__(code.name, code.path)
        self.code = code
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        cls = getattr(module, CLASS, None)
        if cls is not None:
            cls.__qualname__ = reference(self.code)
            setattr(module, cls.__qualname__, cls)
            foreign.guard(cls)

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)

    def get_data(self, path: Any) -> bytes:
        return self._source if path == self.path else super().get_data(path)


def read(name: str, path: Path) -> tuple[Code, bytes]:
    """What the file holds now."""
    source = path.read_bytes()
    return Code(name, str(path.resolve()), hashlib.sha256(source).hexdigest()), source


def code_of(module: ModuleType) -> Code:
    """What a loaded module was made of.

    Raises:
        RuntimeError: it was loaded by Python's own import, and its file is another one since.
    """
    loader = module.__loader__
    if isinstance(loader, _Loader):
        return loader.code
    path = Path(str(module.__file__))
    code, source = read(module.__name__, path) if path.is_file() else (None, b"")
    if code is None or not _functions_of(module) <= _compiled(compile(source, str(path), "exec", dont_inherit=True)):
        raise RuntimeError(f"{path}, loaded as {module.__name__}, was changed since: load it in a new process")
    return code


def _functions_of(module: ModuleType) -> set[CodeType]:
    """The code of the functions of a module and its generated class."""
    members = [*vars(module).values(), *vars(getattr(module, CLASS, object)).values()]
    functions = [member for member in members if isinstance(member, FunctionType)]
    return {function.__code__ for function in functions if function.__globals__ is vars(module)}


def _compiled(code: CodeType) -> set[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {code}.union(*map(_compiled, inner))


def refuse_other(name: str, path: Path) -> None:
    """Raise if other code than that of the file is loaded under the name.

    Raises:
        RuntimeError: it names both files.
    """
    module = sys.modules.get(name)
    if module is None:
        return
    loaded = code_of(module)
    if not path.is_file() or not path.samefile(loaded.path):
        raise RuntimeError(
            f"{path.resolve()} would be loaded as {name}, but {loaded.path} is loaded under that name in this process "
            f"already: give one of the two its own instance_name"
        )
    found, _ = read(name, path)
    if found.digest != loaded.digest:
        raise RuntimeError(
            f"{found} was written again after this process had loaded {loaded} as {name}: load it in a new process, or "
            f"give it its own instance_name"
        )


def load(name: str, path: Path) -> ModuleType:
    """Load the file as the module of that name, or return the module if this very code is loaded already.

    Raises:
        RuntimeError: other code is loaded under the name; the message names both files.
    """
    refuse_other(name, path)
    module = sys.modules.get(name)
    if module is not None:
        return module
    importlib.invalidate_caches()
    above, _, last = name.rpartition(".")
    parent = importlib.import_module(above)
    spec = _spec(*read(name, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    setattr(parent, last, module)
    return module


class Finder:
    """Lets Python's own import, as of a pickle, load generated code as it is loaded here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        last = name.rpartition(".")[2]
        if name.startswith(f"{_NAMESPACE}.") and last.startswith("gencode"):
            for folder in path or ():
                file = Path(folder) / f"{last}.py"
                if file.is_file():
                    return _spec(*read(name, file))
        return None


def _spec(code: Code, source: bytes) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(code.name, code.path, loader=_Loader(code, source))
    assert spec is not None
    return spec


def reference(code: Code) -> str:
    """The qualified name of the class of that code."""
    return f"{CLASS}_{code.digest[:12]}"


def give_reference(cls: type) -> None:
    """Give a class, which nnScaler has renamed, the qualified name under which its module holds it."""
    module = sys.modules[cls.__module__]
    cls.__qualname__ = reference(code_of(module))
    setattr(module, cls.__qualname__, cls)

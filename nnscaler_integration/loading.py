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
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

CLASS = "GenModel"


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
    """Loads a source that was read already, past the cache of bytecode, which may belong to an older file."""

    def __init__(self, code: Code, source: bytes) -> None:
        super().__init__(code.name, code.path)
        self.code = code
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)

    def get_data(self, path: Any) -> bytes:
        return self._source if path == self.path else super().get_data(path)


def read(name: str, path: Path) -> tuple[Code, bytes]:
    """What the file holds now."""
    source = path.read_bytes()
    return Code(name, str(path.resolve()), hashlib.sha256(source).hexdigest()), source


def code_of(module: ModuleType) -> Code:
    """What a loaded module was made of: as it was when it was loaded, if it was loaded here."""
    loader = module.__loader__
    if isinstance(loader, _Loader):
        return loader.code
    return read(module.__name__, Path(str(module.__file__)))[0]


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
    code, source = read(name, path)
    loader = _Loader(code, source)
    spec = importlib.util.spec_from_file_location(name, code.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    setattr(parent, last, module)
    return module


def give_name(cls: type) -> None:
    """Let the module hold its class under the class's qualified name, which tells the code too.

    nnScaler replaces the name ``GenModel`` by that of the original class, under which the module holds nothing. With
    the digest in it, a reference to the class finds this code or nothing, on whatever rank and from whatever folder.
    """
    module = sys.modules[cls.__module__]
    cls.__qualname__ = f"{cls.__name__}_{code_of(module).digest[:12]}"
    setattr(module, cls.__qualname__, cls)

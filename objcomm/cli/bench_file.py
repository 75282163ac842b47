"""Payloads that a user brings along in a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .payloads import PAYLOADS, Payload, usual


class PayloadError(ValueError):
    """There is no such payload, or the file that should have it does not work."""


def chosen(words: Sequence[str]) -> list[Payload]:
    """Payloads by their names, and all of every file that is named; P1 to P8 where nothing is.

    Raises:
        PayloadError: something is neither, or a file has none.

    >>> [payload.title for payload in chosen(["P2", "P8"])]
    ['nested dict, 2 tensors', '1,000 tensors of 16']
    """
    if not words:
        return usual()
    known = {payload.name: payload for payload in PAYLOADS}
    found: list[Payload] = []
    for word in words:
        if word.endswith(".py"):
            found += of_file(Path(word))
        elif word.upper() in known:
            found.append(known[word.upper()])
        else:
            ours = f"{PAYLOADS[0].name} to {PAYLOADS[-1].name}"
            raise PayloadError(f"there is no payload {word!r}: give one of {ours}, or a file that ends in .py")
    names = [payload.name for payload in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PayloadError(f"payload {twice!r} is given twice")
    return found


def of_file(path: Path) -> list[Payload]:
    """The payloads of a file, in its order.

    They are what its ``PAYLOADS`` has, a dict of names and functions; without that, every function that the file
    defines, that can be called without arguments and whose name has no underscore in front. The first line of a
    function's docstring is the title. The file is run once on every rank, as a module that other modules can import:
    classes that it defines are found by name on both ends.

    Raises:
        PayloadError: it cannot be read, it raises, or it has no payloads.
    """
    module = _run(path)
    listed = getattr(module, "PAYLOADS", None)
    if listed is None:
        listed = {name: value for name, value in vars(module).items() if _is_payload(module, name, value)}
        if not listed:
            raise PayloadError(
                f"{path} has no payloads: it should define a function without arguments that returns the object "
                "to send, or PAYLOADS, a dict of names and such functions"
            )
    elif not isinstance(listed, dict) or not listed or not all(map(callable, listed.values())):
        raise PayloadError(f"PAYLOADS of {path} must be a dict of names and functions without arguments")
    return [Payload(str(name), _title(make), make, foreign=True) for name, make in listed.items()]


def _run(path: Path) -> ModuleType:
    name = re.sub(r"\W", "_", path.stem)
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = f"payloads_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Known by its name, so that its classes are; and its neighbours are, as where it is run as a program.
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PayloadError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    return module


def _is_payload(module: ModuleType, name: str, value: Any) -> bool:
    if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def _title(make: Callable[..., Any]) -> str:
    text = (inspect.getdoc(make) or "").strip() if inspect.isfunction(make) else ""
    return text.splitlines()[0].rstrip(".") if text else ""

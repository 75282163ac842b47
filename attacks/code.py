"""Attempts to run code, or to have something imported. Restricted trust refuses all of them; cluster trust promises
nothing here: whoever sends may run code."""

from __future__ import annotations

import os
import sys
from typing import Any

from msgpack import ExtType

from objcomm.codec import codes, encode
from objcomm.config import Trust

from .common import attack, composite, leaf, mark, message, receive


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (66,)


@attack("restricted")
def pickle_that_ends_the_process(trust: Trust) -> object:
    encoded = encode([1, Bomb()])
    return receive(encoded.skeleton, trust, encoded.inline_bytes)


@attack("restricted")
def pickle_outside_of_the_stream(trust: Trust) -> object:
    """The stream is there as memory, and a leaf refers to an object of it, but the table says that there is none."""
    return receive(message([leaf(codes.OPAQUE, 0)], memory=[[[-1, 0, [16], None]], [0], [], []]), trust, 16)


@attack("restricted")
def class_of_a_module_that_is_not_imported(trust: Trust) -> object:
    assert "antigravity" not in sys.modules
    entry: list[Any] = ["dataclass", "antigravity", "Anything", [], None]
    return receive(message(mark(codes.INSTANCE, data=b""), classes=[entry]), trust)


@attack("restricted")
def class_that_runs_code_when_it_is_made(trust: Trust) -> object:
    entry = ["dataclass", "subprocess", "Popen", ["args"], None]
    return receive(message(mark(codes.INSTANCE, ["true"], data=b""), classes=[entry]), trust)


@attack("restricted")
def function_as_a_class(trust: Trust) -> object:
    entry = ["dataclass", "os", "system", ["command"], None]
    return receive(message(mark(codes.INSTANCE, "true", data=b""), classes=[entry]), trust)


@attack("restricted")
def factory_that_is_called_later(trust: Trust) -> object:
    entry: list[Any] = ["dataclass", __name__, "Bomb", [], None]
    return receive(message(mark(codes.DEFAULT_DICT, mark(codes.INSTANCE, data=b"")), classes=[entry]), trust)


@attack("restricted")
def torchscript_archive(trust: Trust) -> object:
    return receive(composite("script.archive", [b"PK\3\4", None, [None], 0, [], []]), trust)


@attack("restricted")
def exported_program(trust: Trust) -> object:
    return receive(composite("export.program", [b"PK\3\4", {}, {}, None, []]), trust)


@attack("restricted")
def graph_module(trust: Trust) -> object:
    return receive(composite("fx.graph_module", [None, "G", {}, [[], None, None, None], "import os"]), trust)


@attack("restricted")
def subclass_of_a_tensor(trust: Trust) -> object:
    return receive(composite("tensor.reduced", [ExtType(codes.BUILTIN, b"object"), []]), trust)


@attack("restricted")
def time_zone_from_a_package(trust: Trust) -> object:
    """``ZoneInfo`` imports the packages ``tzdata.zoneinfo.<first part>`` for a key that is no file."""
    return receive(message([ExtType(codes.ZONE, b"evil.module/Zone")]), trust)


@attack("restricted")
def time_zone_anywhere_in_the_file_system(trust: Trust) -> object:
    return receive(message([ExtType(codes.ZONE, b"../../../etc/passwd")]), trust)


@attack()
def builtin_that_is_none(trust: Trust) -> object:
    return receive(message([ExtType(codes.BUILTIN, b"eval")]), trust)


@attack()
def dtype_that_is_a_function_of_torch(trust: Trust) -> object:
    return receive(message([ExtType(codes.TORCH_NAME, b"torch.load")]), trust)


@attack()
def composite_that_is_not_registered(trust: Trust) -> object:
    return receive(composite("os.system", ["true"]), trust)

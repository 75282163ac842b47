"""Modules lowered to the two backends that torch ships for its own tests, and what they must be like on arrival."""

from __future__ import annotations

import io
import linecache
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_jit: Any = torch.jit
_C: Any = torch._C

PLAIN = "test_backend"  # runs forward, accum and sub_accum: sums and differences of two tensors
COMPILER = "backend_with_compiler_demo"  # compiles the code of forward, of a sum or a difference of one-element tensors
UNAVAILABLE = "test_backend_unavailable"
_LIBRARIES = ("libbackend_with_compiler.so", "libjitbackend_test.so")

PROCESSED = "__processed_module"
LOWERED = "__loweredModule__"


def load_backends() -> None:
    for name in _LIBRARIES:
        torch.ops.load_library(os.path.join(os.path.dirname(torch.__file__), "lib", name))


@contextmanager
def quiet() -> Iterator[None]:
    """torch.jit announces that it is deprecated; what it makes still has to be sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script(obj: Any) -> Any:
    with quiet():
        return _jit.script(obj)


def saved(module: Any) -> bytes:
    file = io.BytesIO()
    with quiet():
        _jit.save(module, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    with quiet():
        return _jit.load(io.BytesIO(data))


class Basic(torch.nn.Module):
    """What ``test_backend`` can run; its weight tells instances apart."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(weight)))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.accum(x, h), self.sub_accum(x, h)

    @_jit.export
    def accum(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x + h

    @_jit.export
    def sub_accum(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x - h


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x + h


class Pair(torch.nn.Module):
    """Two submodules and a weight of its own."""

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.scale = torch.nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.left.accum(x, h) * self.scale + self.right.sub_accum(x, h)
        return total


class Stateful(torch.nn.Module):
    """It says itself what its state is, and counts how often it was restored."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.restored = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @_jit.export
    def __getstate__(self) -> tuple[float, int, bool]:
        return self.factor, self.restored, self.training

    @_jit.export
    def __setstate__(self, state: tuple[float, int, bool]) -> None:
        self.factor = state[0]
        self.restored = state[1] + 1
        self.training = state[2]


def called(name: str, body: str) -> Any:
    """A new class ``tests.generated.<name>`` whose forward returns ``body``, an expression of x and h."""
    source = (
        f"import torch\nclass {name}(torch.nn.Module):\n"
        f"    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:\n        return {body}\n"
    )
    file = f"<{name} {body}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "tests.generated"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def lower(module: Any, backend: str = PLAIN) -> Any:
    scripted = script(module)
    if backend == COMPILER:
        spec = {"forward": {"input_shapes": "((1, 1, 320, 240), (1, 3))", "some_other_option": "True"}}
    else:
        spec = {name: {"": ""} for name in ("forward", "accum", "sub_accum")}
    with quiet():
        return _C._jit_to_backend(backend, scripted, spec)


def inner(module: Any) -> Any:
    """torch's own object behind the wrapper of a lowered module."""
    return module._c.getattr(LOWERED)


def weight_of(module: Any) -> torch.Tensor:
    """The weight in what the backend made of a :class:`Basic`."""
    weight: torch.Tensor = inner(module).getattr(PROCESSED).getattr("weight")
    return weight.detach()


def assert_alive(module: Any) -> None:
    """A lowered module has both halves of its state's way, and the second one has run."""
    lowered = inner(module)
    assert {"__getstate__", "__setstate__"} <= set(lowered._method_names())
    assert lowered._has_method("__setstate__")
    assert lowered.getattr("__handles")

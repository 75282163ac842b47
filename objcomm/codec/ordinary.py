"""The state of this thread in which tensors behave as the codec expects, whatever the caller has switched on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _python_dispatch

_C: Any = torch._C


def is_ordinary() -> bool:
    """Whether tensors made now are ordinary anyway. Gradients may be recorded: what only allocates does not care."""
    modes: int = _C._len_torch_function_stack() + _C._len_torch_dispatch_stack()
    return not modes and not torch.is_inference_mode_enabled()


class Ordinary:
    """No gradients recorded, no inference mode, no function or dispatch mode. Tensors made inside are ordinary ones.

    A default device, autocast to another type, a mode that counts operations or fakes tensors, all of these are the
    caller's business and must not reach what the codec does with bytes.
    """

    __slots__ = ("_functions", "_grad", "_inference", "_modes")

    def __enter__(self) -> None:
        self._inference: Any = None
        self._modes: contextlib.ExitStack | None = None
        if torch.is_inference_mode_enabled():
            self._inference = _C._InferenceMode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        _C._set_grad_enabled(False)
        self._functions = _C.DisableTorchFunction()
        self._functions.__enter__()
        if _C._len_torch_dispatch_stack():
            self._modes = contextlib.ExitStack()
            disable: Any = _python_dispatch._disable_current_modes
            self._modes.enter_context(disable())

    def __exit__(self, *error: object) -> None:
        if self._modes is not None:
            self._modes.close()
        self._functions.__exit__(None, None, None)
        _C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)

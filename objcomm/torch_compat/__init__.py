"""torch.distributed's object calls, with its names, arguments and behaviour, over objcomm.

One line lets a program, and every framework in it, use objcomm without knowing of it::

    objcomm.torch_compat.install()

after ``import objcomm.torch_compat``, on every rank. docs/torch-drop-in.md says what changes and what does not.
"""

from __future__ import annotations

from .calls import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .patching import install, installed, is_installed, uninstall

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "install",
    "installed",
    "is_installed",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "uninstall",
]

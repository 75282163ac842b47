"""What type checkers and editors see of the package: calls that return a handle if ``async_op`` is given say so.

tests/test_typing.py compares it with the functions themselves.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from torch.distributed import ProcessGroup

from . import autograd as autograd
from .codec.generated import register_generated as register_generated
from .collectives import gather_objects as gather_objects
from .config import configure as configure
from .config import settings as settings
from .counters import stats as stats
from .debugging import debug as debug
from .diagnosis import report as report
from .errors import DecodeError as DecodeError
from .errors import EncodeError as EncodeError
from .errors import LimitError as LimitError
from .errors import ObjcommError as ObjcommError
from .errors import PeerError as PeerError
from .errors import ProtocolError as ProtocolError
from .errors import TransferTimeout as TransferTimeout
from .errors import TrustError as TrustError
from .errors import UsageError as UsageError
from .p2p import Device
from .p2p import exchange_objects as exchange_objects
from .p2p import irecv_object as irecv_object
from .p2p import isend_object as isend_object
from .p2p import recv_object as recv_object
from .p2p import send_object as send_object
from .timeline import trace as trace
from .transport import init_control as init_control
from .work import ObjectWork as ObjectWork

__version__: str

__all__ = [
    "DecodeError",
    "EncodeError",
    "LimitError",
    "ObjcommError",
    "ObjectWork",
    "PeerError",
    "ProtocolError",
    "TransferTimeout",
    "TrustError",
    "UsageError",
    "all_gather_objects",
    "all_to_all_objects",
    "autograd",
    "broadcast_object",
    "configure",
    "debug",
    "exchange_objects",
    "gather_objects",
    "init_control",
    "irecv_object",
    "isend_object",
    "move_object",
    "recv_object",
    "register_generated",
    "report",
    "scatter_objects",
    "send_object",
    "settings",
    "stats",
    "trace",
]

_T = TypeVar("_T")

@overload
def move_object(
    obj: None,
    src: int,
    dst: int,
    *,
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any: ...
@overload
def move_object(
    obj: None,
    src: int,
    dst: int,
    *,
    async_op: Literal[True],
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> ObjectWork[Any]: ...
@overload
def move_object(
    obj: None,
    src: int,
    dst: int,
    *,
    async_op: bool,
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any | ObjectWork[Any]: ...
@overload
def move_object(
    obj: _T | None,
    src: int,
    dst: int,
    *,
    async_op: Literal[False] = False,
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> _T: ...
@overload
def move_object(
    obj: _T | None,
    src: int,
    dst: int,
    *,
    async_op: Literal[True],
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> ObjectWork[_T]: ...
@overload
def move_object(
    obj: _T | None,
    src: int,
    dst: int,
    *,
    async_op: bool,
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> _T | ObjectWork[_T]: ...
@overload
def broadcast_object(
    obj: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any: ...
@overload
def broadcast_object(
    obj: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> ObjectWork[Any]: ...
@overload
def broadcast_object(
    obj: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any | ObjectWork[Any]: ...
@overload
def broadcast_object(
    obj: _T | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> _T: ...
@overload
def broadcast_object(
    obj: _T | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> ObjectWork[_T]: ...
@overload
def broadcast_object(
    obj: _T | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> _T | ObjectWork[_T]: ...
@overload
def scatter_objects(
    objs: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> Any: ...
@overload
def scatter_objects(
    objs: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ObjectWork[Any]: ...
@overload
def scatter_objects(
    objs: None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> Any | ObjectWork[Any]: ...
@overload
def scatter_objects(
    objs: Sequence[_T] | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> _T: ...
@overload
def scatter_objects(
    objs: Sequence[_T] | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ObjectWork[_T]: ...
@overload
def scatter_objects(
    objs: Sequence[_T] | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> _T | ObjectWork[_T]: ...
@overload
def all_gather_objects(
    obj: object,
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> list[Any]: ...
@overload
def all_gather_objects(
    obj: object,
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ObjectWork[list[Any]]: ...
@overload
def all_gather_objects(
    obj: object,
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> list[Any] | ObjectWork[list[Any]]: ...
@overload
def all_to_all_objects(
    objs: Sequence[object],
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[False] = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> list[Any]: ...
@overload
def all_to_all_objects(
    objs: Sequence[object],
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: Literal[True],
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ObjectWork[list[Any]]: ...
@overload
def all_to_all_objects(
    objs: Sequence[object],
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> list[Any] | ObjectWork[list[Any]]: ...

"""objcomm moves Python objects of unknown size between the ranks of a PyTorch job."""

from .collectives import broadcast_object
from .config import configure, settings
from .counters import stats
from .debugging import debug
from .diagnosis import report
from .errors import (
    DecodeError,
    EncodeError,
    LimitError,
    ObjcommError,
    PeerError,
    ProtocolError,
    TransferTimeout,
    TrustError,
    UsageError,
)
from .p2p import exchange_objects, irecv_object, isend_object, move_object, recv_object, send_object
from .timeline import trace
from .transport import init_control
from .watcher import watch as _  # noqa: F401 -- it asks to be told what happens
from .work import ObjectWork

__version__ = "0.1.0"

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
    "broadcast_object",
    "configure",
    "debug",
    "exchange_objects",
    "init_control",
    "irecv_object",
    "isend_object",
    "move_object",
    "recv_object",
    "report",
    "send_object",
    "settings",
    "stats",
    "trace",
]

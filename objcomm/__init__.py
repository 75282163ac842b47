"""objcomm moves Python objects of unknown size between the ranks of a PyTorch job."""

from . import autograd
from .codec.generated import register_generated
from .collectives import (
    all_gather_objects,
    all_to_all_objects,
    broadcast_object,
    gather_objects,
    scatter_objects,
)
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

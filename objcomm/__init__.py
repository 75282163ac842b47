"""objcomm moves Python objects of unknown size between the ranks of a PyTorch job."""

from .collectives import (
    all_gather_objects,
    all_to_all_objects,
    broadcast_object,
    gather_objects,
    scatter_objects,
)
from .config import configure, settings
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
from .trace import stats
from .transport import init_control
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
    "broadcast_object",
    "configure",
    "exchange_objects",
    "gather_objects",
    "init_control",
    "irecv_object",
    "isend_object",
    "move_object",
    "recv_object",
    "scatter_objects",
    "send_object",
    "settings",
    "stats",
]

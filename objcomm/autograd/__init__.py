"""Objects whose tensors have a history: the backward pass crosses ranks where the objects did.

The sender's handle receives the gradients and continues the backward pass through the graph that made the tensors::

    sent = objcomm.autograd.send_object({"hidden": hidden, "mask": mask}, dst=1)      # rank 0
    sent.backward()

    received = objcomm.autograd.recv_object(src=0)                                    # rank 1
    loss(received.obj).backward()
    received.send_grads()

docs/autograd.md says more: several objects in flight, schedules, graphs that are used twice.
"""

from .received import ReceivedObject, irecv_object, recv_object
from .sent import SentObject, backward, isend_object, send_object

__all__ = [
    "ReceivedObject",
    "SentObject",
    "backward",
    "irecv_object",
    "isend_object",
    "recv_object",
    "send_object",
]

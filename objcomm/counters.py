"""What this process has sent and received so far."""

from __future__ import annotations


class Counters:
    """Plain integers, changed under the lock of the pair whose traffic they count, or from one thread."""

    __slots__ = (
        "messages_sent",
        "bytes_sent",
        "messages_received",
        "bytes_received",
        "objects_sent",
        "objects_received",
    )

    def __init__(self) -> None:
        self.messages_sent = 0
        self.bytes_sent = 0
        self.messages_received = 0
        self.bytes_received = 0
        self.objects_sent = 0
        self.objects_received = 0


counters = Counters()


def stats() -> dict[str, int]:
    """Counters of this process since it started.

    ``messages_*`` and ``bytes_*`` are what crossed the transport, heads and padding included, handshakes excluded;
    ``objects_*`` are whole objects handed over.

    >>> sorted(stats())
    ['bytes_received', 'bytes_sent', 'messages_received', 'messages_sent', 'objects_received', 'objects_sent']
    """
    return {name: getattr(counters, name) for name in Counters.__slots__}

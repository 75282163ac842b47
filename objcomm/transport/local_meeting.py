"""Two ranks find out, through the group's store, whether they can go around the network stack.

Each has one record there, for its peer alone, with a random token. What lies in a store may be left over from an
earlier group, so a record counts only once it names the token of the rank that reads it: then it was written by a
peer that is there now. Each names the other's token before it chooses; so both choose from the same two records, by
the same rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

VERSION = 1
_MAX_RECORD_BYTES = 4096
_TOKEN = re.compile(r"([0-9a-f]{2}){1,32}", re.ASCII)


class Store(Protocol):
    """What is needed of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class Record:
    """What a rank tells one peer of itself.

    Attributes:
        token: 16 random bytes in hexadecimal, of this link of this rank.
        saw: the peer's token, once it was read.
        why_not: why this rank cannot, or does not want to; empty if it can.
        gave_up: why it no longer tries, or no longer waits; empty while it does.
        closed: with ``gave_up``: there will be no way at all, rather than another one.
        boot: names the running kernel.
        network: names the network namespace, in which the names of sockets are.
        user: the effective user.
    """

    token: str
    saw: str = ""
    why_not: str = ""
    gave_up: str = ""
    closed: bool = False
    boot: str = ""
    network: str = ""
    user: int = -1
    version: int = VERSION


def record_of_this_process(allowed: bool) -> Record:
    """A new record: what this rank is, and whether it takes part."""
    token = secrets.token_hex(16)
    if not allowed:
        return Record(token, why_not="it is switched off (OBJCOMM_LOCAL_TRANSPORT)")
    if sys.platform != "linux":
        return Record(token, why_not=f"there is no such transport on {sys.platform}")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError as error:
        return Record(token, why_not=f"/proc does not tell which host this is: {error}")
    return Record(token, boot=boot, network=network, user=os.geteuid())


def why_apart(low: Record, high: Record, low_rank: int, high_rank: int) -> str:
    """Why these two ranks cannot talk directly; empty if they can. Both ends ask this of the same two records.

    >>> why_apart(Record("a", boot="x"), Record("b", boot="y"), 0, 3)
    'rank 0 and rank 3 are on different hosts'
    """
    for record, rank in ((low, low_rank), (high, high_rank)):
        if record.why_not:
            return f"on rank {rank}: {record.why_not}"
    pair = f"rank {low_rank} and rank {high_rank}"
    if low.version != high.version:
        return f"{pair} speak different versions of it, {low.version} and {high.version}"
    if low.boot != high.boot:
        return f"{pair} are on different hosts"
    if low.network != high.network:
        return f"{pair} are in different network namespaces"
    if low.user != high.user:
        return f"{pair} are of different users, {low.user} and {high.user}"
    return ""


class Meeting:
    """This rank's record for one peer, and the peer's for this rank."""

    def __init__(self, store: Callable[[], Store], name: str, side: int, mine: Record) -> None:
        """``store`` gives the store, and may take its time."""
        self._store = store
        self._keys = (f"{name}/{side}", f"{name}/{1 - side}")
        self.mine = mine

    def publish(self, **changes: Any) -> None:
        """Write this rank's record, with changes.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.mine = dataclasses.replace(self.mine, **changes)
        self._store().set(self._keys[0], json.dumps(dataclasses.asdict(self.mine)))

    def look(self) -> Record | None:
        """The peer's record, fresh or not; ``None`` while it has none. Never waits.

        Raises:
            RuntimeError: the store does not answer.
            ValueError: what lies there is no record.
        """
        store = self._store()
        if not store.check([self._keys[1]]):
            return None
        text = store.get(self._keys[1])
        if len(text) > _MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(text)} bytes")
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise ValueError("no record, but lists in lists") from error
        fields = {field.name: field for field in dataclasses.fields(Record)}
        if not isinstance(values, dict) or "token" not in values:
            raise ValueError(f"no record: {values!r}")
        known = {name: value for name, value in values.items() if name in fields}
        for name, value in known.items():
            if type(value).__name__ != fields[name].type:
                raise ValueError(f"{name} is {value!r}")
        record = Record(**known)
        if _TOKEN.fullmatch(record.token) is None:
            raise ValueError(f"the token is {record.token!r}")
        return record

    def meet(self) -> Record | None:
        """The peer's record once it is known to be of now, else ``None``. To be called again and again."""
        theirs = self.look()
        if theirs is None:
            return None
        if theirs.why_not:
            return theirs
        if theirs.token != self.mine.saw:
            self.publish(saw=theirs.token)
        if theirs.closed and theirs.saw in ("", self.mine.token):
            return theirs
        return theirs if theirs.saw == self.mine.token else None

    def forget(self) -> None:
        """Remove the peer's record, which has been read for the last time."""
        with contextlib.suppress(RuntimeError):
            self._store().delete_key(self._keys[1])

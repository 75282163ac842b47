"""The first corpus: honest messages of every kind of value, and what the attacks in attacks/ send.

python -m fuzz.seeds        writes what is missing in fuzz/corpus
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import msgpack
import torch

from objcomm.codec import encode
from objcomm.errors import DecodeError, ObjcommError
from objcomm.wire.bundle import Parcel, pack_bundle
from objcomm.wire.frame import Content, Kind
from objcomm.wire.notice import Notice, pack_notice

from .targets import TERMS

CORPUS = Path(__file__).parent / "corpus"


def _split(skeleton: bytes) -> tuple[bytes, bytes, bytes]:
    _, tables, composites = struct.unpack_from("<BII", skeleton)
    body = skeleton[9:]
    return body[:tables], body[tables : tables + composites], body[tables + composites :]


def skeletons() -> list[tuple[str, bytes]]:
    """Inputs of the target ``skeleton``, by name."""
    from tests.values import SAFE

    found = []
    for name, make in SAFE:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                encoded = encode(make(), trust="restricted")
        except ObjcommError:
            continue
        if encoded.segments or len(encoded.skeleton) > 3000:
            continue
        if encoded.skeleton[0] == 0:
            found.append((name, struct.pack("<BHH", 1, 0, 0) + encoded.skeleton[1:]))
        else:
            tables, composites, tree = _split(encoded.skeleton)
            found.append((name, struct.pack("<BHH", 0, len(tables), len(composites)) + tables + composites + tree))
    return found


def attempts() -> list[tuple[str, bytes]]:
    """Inputs of the target ``skeleton``: what attacks/ sends, if it is short."""
    from attacks import __main__ as attacks

    sent: list[bytes] = []

    def record(skeleton: bytes, **_: Any) -> Any:
        sent.append(skeleton)
        raise DecodeError("only written down")

    space = vars(attacks.common)
    parse, space["parse"] = space["parse"], record
    try:
        for attack, trusts in attacks.ALL.values():
            with contextlib.suppress(ObjcommError):
                attack(trusts[-1])
    finally:
        space["parse"] = parse
    found = []
    for skeleton in sent:
        if skeleton[0] == 1 and len(skeleton) < 3000:
            tables, composites, tree = _split(skeleton)
            found.append(("", struct.pack("<BHH", 0, len(tables), len(composites)) + tables + composites + tree))
    return found


def tables() -> list[tuple[str, bytes]]:
    """Inputs of the target ``table``."""
    base = torch.arange(24.0)
    import numpy as np

    objs: dict[str, Any] = {
        "one": torch.ones(3),
        "two": {"a": torch.ones(3, 2), "b": [torch.zeros(2, dtype=torch.int64)]},
        "views": [base, base[2:5], base.view(4, 6).t(), base[::3]],
        "expanded": torch.ones(1).expand(5, 4),
        "scattered": [torch.arange(4000.0)[::1000], torch.arange(4000.0)[1000::1000]],
        "array": np.arange(4),
        "record": np.zeros(2, dtype=[("a", "<f4"), ("b", "<i2", (2,))]),
        "dates": np.zeros(2, dtype="<M8[5s]"),
        "empty": [torch.empty(0, 3), torch.empty(())],
    }
    found = []
    for name, obj in objs.items():
        encoded = encode(obj, trust="restricted")
        packed, _, tree = _split(encoded.skeleton)
        memory = msgpack.packb(msgpack.unpackb(packed, strict_map_key=False)[0])
        if len(memory) < 256:
            found.append((name, bytes([len(memory)]) + memory + tree))
    return found


def frames() -> list[tuple[str, bytes]]:
    """Inputs of the target ``frame``."""
    note = Notice("EncodeError", "a lock cannot be pickled", "obj['lock']", 2)
    parcels = [
        Parcel(0, None, False, 0, encode({"a": 1}).skeleton),
        Parcel(1, note),
        Parcel(2, apart=True),
        Parcel(3, None, False, 0, encode(torch.ones(3)).skeleton, 12),
    ]
    bundle, _, bundle_inline = pack_bundle(parcels)
    tensors = encode({"mask": torch.ones(5, dtype=torch.bool), "x": [torch.ones(2), 1]})
    contents = {
        "plain": (0, Content(Kind.DATA, 0, b"", encode([1, "a", None]).skeleton)),
        "channel": (0, Content(Kind.DATA, 0, b"adapter", encode({"a": 1.5}).skeleton)),
        "tensors": (0, Content(Kind.DATA, 0, b"c", tensors.skeleton, tensors.inline_bytes)),
        "segments": (0, Content(Kind.DATA, 0, b"", encode(1).skeleton, 0, [(1000, False), (7, True)])),
        "error": (0, Content(Kind.ERROR, 0, b"", pack_notice(note))),
        "goodbye": (0, Content(Kind.GOODBYE, 0, b"", pack_notice(Notice("", "the process ends")))),
        "bundle": (2, Content(Kind.DATA, 0, b"<all_gather> ", bundle, bundle_inline)),
        "nothing": (2, Content(Kind.DATA, 0, b"<all_gather> ", pack_bundle([])[0])),
    }
    found = []
    for name, (choice, content) in contents.items():
        whole = content.head(0, TERMS).ljust(content.frame_bytes, b"\1")
        found.append((name, bytes([choice]) + whole))
        found.append((f"{name}, as it is", bytes([choice | 1]) + whole))
    return found


def entries() -> list[tuple[str, bytes]]:
    """Inputs of the target ``store``."""
    card = {"rank": 1, "version": 1, "window": 65536, "max_bytes": TERMS.max_bytes}
    record = {"token": "00" * 16, "saw": "11" * 16, "boot": "b", "network": "n", "user": 0, "version": 1}
    texts = [json.dumps(card), json.dumps(record), json.dumps(["send_object", "dst=1", "train.py:3"]), "17", "reason"]
    return [(str(index), text.encode()) for index, text in enumerate(texts)]


def notices() -> list[tuple[str, bytes]]:
    """Inputs of the target ``notice``."""
    kinds = ["EncodeError", "LimitError", "TransferTimeout", "PeerError", ""]
    return [(kind, pack_notice(Notice(kind, "why", "obj[0]", index or None))) for index, kind in enumerate(kinds)]


def write() -> None:
    made = {
        "skeleton": skeletons() + attempts(),
        "table": tables(),
        "frame": frames(),
        "store": entries(),
        "notice": notices(),
    }
    for target, inputs in made.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for _, data in inputs:
            (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    write()

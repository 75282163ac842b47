"""Object <-> skeleton, inline area and segments. Knows nothing of ranks, groups or the devices of peers.

>>> sent = encode({"step": 3, "mask": torch.ones(4, dtype=torch.bool)})
>>> inline = torch.empty(sent.inline_bytes, dtype=torch.uint8)
>>> sent.write_inline(inline)
>>> plan = parse(sent.skeleton, inline_bytes=sent.inline_bytes, segments=[], max_bytes=1 << 20)
>>> plan.build(inline, [])
{'step': 3, 'mask': tensor([True, True, True, True])}
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ..config import Trust
from ..errors import DecodeError, EncodeError, ObjcommError, TrustError
from . import codes, history, instances, opaque, path, registry
from . import skeleton as _skeleton
from .build import Builder
from .encoded import Encoded
from .into import Filling
from .kept import Kept
from .levels import Trouble
from .memory import MemoryReader
from .outline import decoding_error, locate
from .parts import CLUSTER_HINT

# They register how tensors travel that are more than memory. What is registered later is asked first: what takes any
# subclass, or refuses any tensor, comes before the rest.
for _name in ("subclasses", "layouts", "containers", "graphs", "exported", "lite", "script", "refusals"):
    import_module(f"{__name__}.{_name}")

__all__ = ["SEGMENT_THRESHOLD", "Encoded", "Plan", "encode", "parse"]

# From this size on a buffer is its own transfer; below it, copying it into one block with others is cheaper.
SEGMENT_THRESHOLD = 512 * 1024


# Most messages of a program are like earlier ones, tables and all. Longer tables cost more to keep than to read again.
_MOST_TABLES = 2048
_readers: Kept[tuple[Any, ...], MemoryReader] = Kept(128)


def encode(
    obj: object, *, trust: Trust = "cluster", threshold: int = SEGMENT_THRESHOLD, forbid_grad: bool = False
) -> Encoded:
    """Take an object apart. Nothing is copied yet but the small things.

    Args:
        obj: the object.
        trust: ``"restricted"`` refuses whatever would have to be pickled.
        threshold: bytes from which on a buffer becomes a segment.
        forbid_grad: refuse tensors that require grad, wherever in the object they are.

    Raises:
        EncodeError: something in the object cannot be sent; its path is named.
        TrustError: trust is restricted, and something would have to be pickled; its path is named.
    """
    try:
        return _skeleton.pack(obj, trust, threshold, forbid_grad)
    except Trouble as trouble:
        located = _located(obj, trouble, forbid_grad)
        raise located from _cause(located, trouble.__cause__)
    except ObjcommError:
        raise
    except Exception as error:
        raise EncodeError(f"the object cannot be encoded: {path.reason(error)}", path="obj") from error


def _cause(error: ObjcommError, cause: BaseException | None) -> BaseException | None:
    """What an error is raised from: it may be its own cause, told where it happened."""
    return error.__cause__ if cause is error else cause


def _located(root: object, trouble: Trouble, forbid_grad: bool) -> ObjcommError:
    cause = trouble.__cause__
    if not trouble.pickled:
        return path.encoding_error(root, trouble.objs, cause)
    failure = partial(opaque.failure, forbid_grad=forbid_grad)
    below, culprit, error = path.dig(trouble.objs[0], failure)
    above = path.find(root, trouble.objs[0])
    where = None if above is None else above + below
    if isinstance(error, ObjcommError):
        error.path = where
        return error
    text = f"{path.describe(culprit)} cannot be pickled: {path.reason(error or cause)}"
    return EncodeError(text, path=where, hint=opaque.instead_of(culprit))


class Plan:
    """A received skeleton, found whole and allowed. Nothing of the object exists yet."""

    def __init__(
        self,
        parsed: _skeleton.Parsed,
        entries: Sequence[instances.Resolved] = (),
        memory: MemoryReader | None = None,
        segments: Sequence[tuple[int, bool]] = (),
        restricted: bool = False,
    ) -> None:
        self._parsed = parsed
        self._entries = entries
        self._memory = memory
        self._segments = segments
        self._restricted = restricted
        self._filling: Filling | None = None
        self._leaves: list[Any] = []
        self._builder: Builder | None = None

    @property
    def keeps_inline(self) -> bool:
        """After :meth:`build`: whether the result looks at the inline area. If not, its memory may be used again."""
        return self._memory is not None and self._memory.keeps_inline

    def targets(self, into: object | None) -> list[torch.Tensor | None]:
        """Memory of ``into`` to receive segments straight into.

        Args:
            into: an object of the received structure, whose tensors :meth:`build` then fills; None to build anew.

        Returns:
            For each segment a flat uint8 tensor of its size and kind of device, or None: the caller allocates it.

        Raises:
            DecodeError: ``into`` does not match what is received; path, dtypes and shapes are named.
        """
        if into is None:
            return [None] * len(self._segments)
        table = None if self._memory is None else self._memory.table
        try:
            self._filling = Filling(self._parsed, self._entries, self._restricted, table, into)
            return self._filling.targets(self._segments)
        except ObjcommError:
            raise
        except Exception as error:
            text = f"what is received cannot be compared with into: {path.reason(error)}"
            raise DecodeError(text) from error

    def build(
        self, inline: torch.Tensor, segments: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> object:
        """Build the object.

        Args:
            inline: the inline area; the result owns it and may hold views of it.
            segments: flat uint8 tensors, owned by the result like ``inline``.
            device: where all tensors of the result shall live; None leaves each where its bytes are.

        Raises:
            DecodeError: it cannot be built here; the path of what cannot is named.
            TrustError: trust is restricted, and building it would run code.
        """
        builder: Builder | None = None
        parsed = self._parsed
        # Building makes many objects and no garbage: a collection would only look at all of them again.
        collecting = not parsed.short and gc.isenabled()
        if collecting:
            gc.disable()
        try:
            if parsed.plain:
                return _skeleton.unpack(parsed.tree)
            leaves = [] if self._memory is None else self._memory.build(inline, segments, device)
            if self._filling is not None:
                leaves = self._filling.fill(leaves)
            builder = Builder(parsed, self._entries, self._restricted, leaves)
            obj = builder.build()
            self._leaves, self._builder = leaves, builder
            return obj
        except Exception as error:
            located = decoding_error(error, parsed, builder)
            raise located from _cause(located, error)
        finally:
            if collecting:
                gc.enable()

    def requiring_grad(self) -> dict[int, torch.Tensor]:
        """After :meth:`build`: the tensors of the object that require grad, by numbers that both ends know them by."""
        builder = self._builder
        return {} if builder is None else history.numbered(self._leaves, builder.composites, builder.streamed)


def parse(
    skeleton: bytes | memoryview,
    *,
    inline_bytes: int,
    segments: Sequence[tuple[int, bool]],
    trust: Trust = "cluster",
    max_bytes: int,
) -> Plan:
    """Look at a received skeleton; nothing is allocated, and in restricted trust nothing imported.

    Args:
        skeleton: the skeleton.
        inline_bytes: size of the inline area that comes with it.
        segments: of each segment its bytes and whether the sender had them on an accelerator.
        trust: what this process allows, whatever the sender claims.
        max_bytes: no tensor may need more.

    Raises:
        DecodeError: it is malformed, or a class that it refers to is not here or not the same.
        LimitError: a tensor in it needs more than ``max_bytes``.
        TrustError: trust is restricted, and it holds pickled leaves, code, or classes that may not be built.
    """
    if not inline_bytes and not segments:
        plain = _skeleton.short_plain(skeleton)
        if plain is not None:
            return Plan(plain)
    restricted = trust == "restricted"
    pieces = _skeleton.split(skeleton)
    alike = (pieces.tables, inline_bytes, max_bytes, *segments)
    reader = _readers.get(alike) if pieces.tables else None
    if reader is not None:
        return Plan(_skeleton.Parsed(pieces.tree, False), (), reader, segments, restricted)
    parsed = _skeleton.parse(pieces)
    if parsed.plain and not inline_bytes and not segments:
        return Plan(parsed, restricted=restricted)
    if parsed.memory is None and (inline_bytes or segments):
        raise DecodeError("the message has an inline area or segments that its skeleton does not use")
    if restricted and parsed.stream is not None:
        refusal = TrustError("the message holds a pickle, and trust is restricted", hint=CLUSTER_HINT)
        raise locate(refusal, parsed, (codes.OPAQUE,), 0)
    for index, name in enumerate(parsed.names):
        entry = registry.named(name)
        if entry is None:
            unknown = DecodeError(f"no composite named {name!r} is registered here", hint="import what registers it")
            raise locate(unknown, parsed, (codes.COMPOSITE,), index)
        if restricted and entry.code:
            refusal = TrustError(f"the message holds code ({name}), and trust is restricted", hint=CLUSTER_HINT)
            raise locate(refusal, parsed, (codes.COMPOSITE,), index)
    entries: list[instances.Resolved] = []
    memory: MemoryReader | None = None
    try:
        for names in parsed.classes:
            entries.append(instances.resolve(names, restricted=restricted))
    except ObjcommError as error:
        raise locate(error, parsed, (codes.INSTANCE, codes.MEMBER), len(entries))  # noqa: B904  the same error
    except Exception as error:
        raise DecodeError(f"the class table is malformed: {path.reason(error)}") from error
    if parsed.memory is not None:
        try:
            memory = MemoryReader(parsed.memory, inline_bytes=inline_bytes, segments=segments, max_bytes=max_bytes)
        except ObjcommError:
            raise
        except Exception as error:
            raise DecodeError(f"the memory table is malformed: {path.reason(error)}") from error
        if parsed.only_memory and len(pieces.tables) <= _MOST_TABLES:
            _readers.keep(alike, memory)
    return Plan(parsed, entries, memory, segments, restricted)

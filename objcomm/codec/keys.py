"""The keys of dicts and the elements of sets in restricted trust: they are hashed and compared, by nobody's own code.

Whoever chooses the keys may choose them so that all of them collide. Strings and bytes are hashed with a secret of the
process; numbers, and whatever is made of numbers, are not. So containers of other keys are filled bit by bit, and the
processor time that this takes is limited for the message as a whole, far above what any honest keys need.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from time import thread_time
from typing import Any

from ..errors import LimitError, TrustError
from . import classes, codes, runs

_SALTED = frozenset((str, bytes, type(None), bool))
_FLAT = _SALTED | {int, float}
# So few numbers cost little, however they collide.
_FEW = 64
_BATCH = 256
# What one key may consist of, and how long a number in it may be: longer ones are not compared in linear time.
_MOST_PARTS = 10_000
_MOST_DIGITS_BYTES = 4096
_SECONDS = 0.5
_SECONDS_A_KEY = 50e-6


def _runs_code(kind: type) -> bool:
    """Whether a class has its own idea of what equal or a hash is, beyond what Python and dataclasses make."""
    for method in (kind.__hash__, kind.__eq__):
        code = getattr(method, "__code__", None)
        if code is not None and method is not Enum.__hash__ and code.co_filename != "<string>":
            return True
    return False


class Keys:
    """Fills what has keys, for one message.

    Args:
        kinds: the classes of this process of which instances may be keys.
    """

    def __init__(self, kinds: Iterable[type] = ()) -> None:
        self.refused = frozenset(kind for kind in kinds if _runs_code(kind))
        self._count = 0
        self._spent = 0.0

    # -- filling -----------------------------------------------------------------------------------------------------

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """A dict of pairs."""
        if len(pairs) <= _FEW:
            for key, _ in pairs:
                if type(key) not in _FLAT:
                    break
            else:
                return dict(pairs)
        filled: dict[Any, Any] = {}
        self._fill(filled, [key for key, _ in pairs], pairs)
        return filled

    def set(self, items: list[Any]) -> set[Any]:
        """A set of the items after the mark."""
        filled: set[Any] = set()
        self._fill(filled, items[1:], items[1:])
        return filled

    def frozenset(self, items: list[Any]) -> frozenset[Any]:
        return frozenset(self.set(items))

    def dict(self, items: list[Any]) -> dict[Any, Any]:
        """A dict of keys and values in turn, after the mark."""
        filled: dict[Any, Any] = self._mapping({}, items, 1)
        return filled

    def ordered_dict(self, items: list[Any]) -> Any:
        return self._mapping(OrderedDict(), items, 1)

    def default_dict(self, items: list[Any]) -> Any:
        return self._mapping(defaultdict(builtin_factory(items)), items, 2)

    def named(self, items: list[Any]) -> Any:
        """A dict of a list of keys and one of values."""
        return self.pairs(list(zip(*runs.keys_and_values(items), strict=True)))

    def _mapping(self, filled: Any, items: list[Any], start: int) -> Any:
        if (len(items) - start) % 2:
            raise ValueError("a key without a value")
        keys = items[start::2]
        self._fill(filled, keys, list(zip(keys, items[start + 1 :: 2], strict=True)))
        return filled

    def _fill(self, filled: Any, keys: list[Any], entries: list[Any]) -> None:
        kinds = set(map(type, keys))
        if kinds <= _SALTED or (len(keys) <= _FEW and kinds <= _FLAT):
            filled.update(entries)
            return
        start = thread_time() - self._spent
        try:
            for at in range(0, len(keys), _BATCH):
                if not kinds <= _FLAT:
                    for key in keys[at : at + _BATCH]:
                        self._look_into(key)
                        self._check(start)
                filled.update(entries[at : at + _BATCH])
                self._count += _BATCH
                self._check(start)
        finally:
            self._spent = thread_time() - start

    def _check(self, start: float) -> None:
        if thread_time() - start > _SECONDS + self._count * _SECONDS_A_KEY:
            raise LimitError(
                "the keys of this message take too long to be told apart", hint="use strings as keys, or cluster trust"
            )

    # -- looking -----------------------------------------------------------------------------------------------------

    def _look_into(self, key: Any) -> None:
        """What a key is made of.

        Raises:
            TrustError: hashing or comparing it would run code of a class of this process.
            LimitError: it would take long.
        """
        found = 0
        todo = [key]
        while todo:
            item = todo.pop()
            found += 1
            if found > _MOST_PARTS:
                raise LimitError(f"a key of more than {_MOST_PARTS} parts is only taken in cluster trust")
            kind = type(item)
            if kind in _SALTED or kind is float:
                continue
            if kind is int or kind is Decimal:
                if item.__sizeof__() > _MOST_DIGITS_BYTES:
                    raise LimitError(f"a number of {item.__sizeof__()} bytes as a key is only taken in cluster trust")
            elif kind in self.refused:
                raise TrustError(
                    f"{kind.__module__}.{kind.__qualname__} as a key would run its own __hash__ or __eq__",
                    hint="use plain values as keys, or cluster trust",
                )
            elif issubclass(kind, tuple):
                todo.extend(tuple.__iter__(item))
            elif kind is frozenset:
                todo.extend(item)
            elif kind is slice:
                todo += (item.start, item.stop, item.step)
            else:
                layout = classes.layout(kind)
                attributes = layout.attributes(item) if layout is not None and layout.kind == "dataclass" else None
                todo.extend(() if attributes is None else attributes[1])


def builtin_factory(items: list[Any]) -> Any:
    """The factory of a defaultdict, the first item after the mark."""
    if items[1] is not None and type(items[1]) is not type:
        raise TrustError("a defaultdict of restricted trust has None or a builtin type as its factory")
    return items[1]


def rebuilders(keys: Keys) -> dict[int, Callable[[list[Any]], Any]]:
    """What rebuilds everything that has keys, by code of its mark."""
    return {
        codes.SET: keys.set,
        codes.FROZENSET: keys.frozenset,
        codes.DICT: keys.dict,
        codes.ORDERED_DICT: keys.ordered_dict,
        codes.DEFAULT_DICT: keys.default_dict,
        codes.NAMED: keys.named,
    }

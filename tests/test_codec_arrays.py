"""numpy arrays through the codec: every dtype, every way to lie in memory, what is left to the pickle path."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from objcomm.codec import arrays, encode
from objcomm.errors import DecodeError, TrustError
from tests.loopback import loopback, plan_of
from tests.memory_loop import assert_same_memory, bytes_sent, through
from tests.same import assert_same

ROOT = Path(__file__).parent.parent


def _dtypes() -> dict[str, np.dtype[Any]]:
    plain = [*"?bBhHiIlLqQefdgFDG", "S1", "S10", "U1", "U7", "V3", "M8[ns]", "M8[D]", "m8[25us]", "m8", "M8"]
    named = {each: np.dtype(each) for each in plain}
    named |= {f"swapped {each}": np.dtype(each).newbyteorder() for each in ("i2", "f8", "c16", "U3", "M8[s]", "m8[h]")}
    point = np.dtype([("x", "<f4"), ("y", ">i8")])
    named |= {
        "record": point,
        "aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
        "offsets": np.dtype({"names": ["a", "b"], "formats": ["i2", "f4"], "offsets": [6, 1], "itemsize": 16}),
        "overlapping fields": np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        "nested": np.dtype([("p", point), ("q", point, (2, 3)), ("s", "S4")]),
        "titles": np.dtype([(("long title", "a"), "i4"), ("b", "M8[us]")]),
        "of np.record": np.dtype((np.record, [("a", "i4"), ("b", "f8")])),
        "odd names": np.dtype([("", "i4"), ("a b", "i4"), ("ü", "i4")]),
    }
    return named


DTYPES = _dtypes()


def _filled(dtype: np.dtype[Any], *shape: int) -> np.ndarray[Any, Any]:
    """An array of any bytes that are values of the dtype."""
    array = np.zeros(shape, dtype)
    if dtype.kind == "U":
        array[...] = "äb\U0001f600"[: dtype.itemsize // 4]
    elif dtype.kind == "b":
        array[...] = np.random.default_rng(0).integers(0, 2, shape)
    elif dtype.char in "gG":
        array[...] = np.random.default_rng(0).standard_normal(shape)
    elif dtype.itemsize and not dtype.hasobject and array.size and dtype.names is None:
        flat = np.random.default_rng(0).integers(0, 256, array.nbytes, dtype=np.uint8)
        array = flat.view(dtype).reshape(shape)
    elif array.size:
        for name in dtype.names or ():
            array[name] = _filled(array[name].dtype, *array[name].shape)
    return array


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_as_it_was(name: str) -> None:
    dtype = DTYPES[name]
    objs = [_filled(dtype, 7), _filled(dtype), _filled(dtype, 3, 4).T, _filled(dtype, 0, 3), _filled(dtype, 5000)]
    assert all(arrays.is_plain(each) for each in objs)
    for threshold in (1, 1 << 19):
        received = loopback([*objs, objs[0]], threshold=threshold, trust="restricted")
        assert_same([*objs, objs[0]], received)
        assert received[-1] is received[0]
        for one, other in zip(objs, received, strict=False):
            assert one.dtype == other.dtype and one.dtype.char == other.dtype.char
            assert one.dtype.type is other.dtype.type
            assert one.dtype.isalignedstruct == other.dtype.isalignedstruct
            assert one.dtype.fields == other.dtype.fields


def test_elements_of_no_size() -> None:
    array = np.zeros((3, 4), np.dtype([]))
    assert_same(array, loopback(array))


WAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "scalar": lambda: np.array(3.5),
    "C order": lambda: np.arange(24.0).reshape(2, 3, 4),
    "Fortran order": lambda: np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "permuted": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    "with gaps": lambda: np.arange(100)[10:60:7],
    "columns": lambda: np.arange(100).reshape(10, 10)[:, 3:5],
    "flipped": lambda: np.arange(10)[::-1],
    "flipped and transposed": lambda: np.arange(24.0).reshape(4, 6)[::-1, ::-2].T,
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (4, 3)),
    "huge by broadcast": lambda: np.broadcast_to(np.arange(1.0), (1 << 40,)),
    "windows": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(20), 5),
    "a field": lambda: np.zeros(5, dtype=[("a", "i1"), ("b", "<f8")])["b"],
    "misaligned": lambda: np.frombuffer(bytearray(range(100)), np.float64, 5, offset=3),
    "read-only": lambda: np.frombuffer(bytes(range(80)), np.int64),
    "large and read-only": lambda: np.frombuffer(bytes(80_000), np.int64),
    "empty": lambda: np.empty((3, 0, 2)),
    "empty with odd strides": lambda: np.empty((3, 4))[:, 2:2],
    "single with odd strides": lambda: np.arange(100).reshape(10, 10)[4:5, ::3],
    "32 dimensions": lambda: np.arange(4.0).reshape([1] * 30 + [2, 2]),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("threshold", [1, 1 << 19])
def test_every_way_to_lie_in_memory(name: str, threshold: int) -> None:
    array = WAYS[name]()
    received = loopback(array, threshold=threshold)
    assert received.flags.writeable == array.flags.writeable
    if name == "huge by broadcast":
        assert received.shape == array.shape and received.strides == (0,) and received[1 << 39] == 0
        return
    assert_same(array, received)
    assert_same_memory([array], [received])


def test_a_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.arange(1000))
    mapped = np.load(path, mmap_mode="r")
    plain = np.asarray(mapped)
    assert type(plain) is np.ndarray and not plain.flags.writeable
    assert_same(plain, loopback(plain))
    received = loopback({"m": mapped})["m"]
    assert np.array_equal(received, mapped)


@pytest.mark.parametrize("size", [7, 3000, 1 << 17])
def test_what_arrives_is_ordinary(size: int) -> None:
    a, b = loopback([np.ones(size), np.ones(size)])
    a += 1
    a[0] = 9
    assert b.sum() == size
    assert a.flags.aligned and a.flags.c_contiguous and a.flags.writeable
    torch.from_numpy(a).fill_(3)
    assert a[0] == 3
    if size == 7:
        assert a.flags.owndata
        a.resize(100, refcheck=False)


def test_tensors_and_arrays_of_one_memory_stay_together() -> None:
    tensor = torch.arange(1000.0)
    objs = [tensor, tensor.numpy(), tensor.numpy()[10:20], tensor.view(10, 100).T.numpy()]
    for threshold in (1, 1 << 19):
        received = loopback(objs, threshold=threshold)
        assert_same(objs, received)
        received[0].fill_(7)
        assert all((each == 7).all() for each in received[1:])
    assert bytes_sent(objs) == 4000


def test_a_read_only_view_of_a_writable_array() -> None:
    array = np.arange(10)
    view = array.view()
    view.flags.writeable = False
    writable, read_only = loopback([array, view])
    assert writable.flags.writeable and not read_only.flags.writeable
    writable[3] = 77
    assert read_only[3] == 77


@pytest.mark.parametrize("char", ["l", "q", "L", "Q"])
def test_types_of_one_size_stay_apart(char: str) -> None:
    one, other = np.zeros(3, "l"), np.zeros(3, char)
    received = through([one, other])
    assert [each.dtype.char for each in received] == ["l", char]


# -- what is left to the pickle path ---------------------------------------------------------------------------------


class Mine(np.ndarray):
    pass


LEFT: dict[str, Callable[[], Any]] = {
    "objects": lambda: np.array([1, "a", None, [2]], dtype=object),
    "objects in a record": lambda: np.array([(1, "a")], dtype=[("n", "i4"), ("o", object)]),
    "metadata": lambda: np.zeros(3, np.dtype("f8", metadata={"unit": "m"})),
    "recarray": lambda: np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked": lambda: np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False], fill_value=9),
    "matrix": lambda: np.matrix([[1, 2], [3, 4]]),
    "a class of its own": lambda: np.arange(4).view(Mine),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_the_rest_is_pickled(name: str) -> None:
    array = LEFT[name]()
    assert not arrays.is_plain(array)
    received = loopback({"x": array})["x"]
    assert type(received) is type(array) and received.dtype == array.dtype
    assert repr(received) == repr(array)
    with pytest.raises(TrustError):
        encode(array, trust="restricted")


def test_strings_of_any_length_are_pickled() -> None:
    if not hasattr(np.dtypes, "StringDType"):
        return
    array = np.array(["a", "bc" * 50], dtype=np.dtypes.StringDType())
    assert not arrays.is_plain(array)
    assert loopback(array).tolist() == array.tolist()


def test_arrays_inside_of_pickled_objects_travel_as_memory() -> None:
    array = np.arange(100_000)
    encoded = encode({"f": lambda: array, "a": array})
    assert [segment.numel() for segment in encoded.segments] == [800_000]
    assert len(encoded.skeleton) + encoded.inline_bytes < 10_000
    received = loopback({"f": lambda: array, "a": array})
    assert received["f"]() is received["a"]


# -- without numpy ---------------------------------------------------------------------------------------------------

_BLOCKED = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["numpy"] = None
import torch
from objcomm.codec import encode, parse
from objcomm.errors import DecodeError


def loopback(obj):
    sent = encode(obj)
    inline = torch.empty(sent.inline_bytes, dtype=torch.uint8)
    sent.write_inline(inline)
    sizes = [(segment.numel(), False) for segment in sent.segments]
    plan = parse(sent.skeleton, inline_bytes=sent.inline_bytes, segments=sizes, max_bytes=1 << 30)
    return plan.build(inline, [segment.clone() for segment in sent.segments])


x = torch.arange(300_000.0)
obj = {"x": x, "y": x[5:], "small": torch.ones(3), "f": lambda: x, "b": b"x" * 1_000_000, "a": bytearray(100_000)}
got = loopback(obj)
assert torch.equal(got["x"], x) and got["f"]() is got["x"] and got["y"].data_ptr() == got["x"].data_ptr() + 20
assert got["b"] == obj["b"] and got["a"] == obj["a"]
table = [[["<d", 0, [2], None]], [0], [], []]
try:
    from objcomm.codec.memory import MemoryReader
    MemoryReader(table, inline_bytes=16, segments=[], max_bytes=1 << 20)
except DecodeError as error:
    assert "numpy is not installed" in str(error), error
else:
    raise AssertionError
assert sys.modules["numpy"] is None
"""


def test_everything_else_works_without_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", _BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_array_whose_dtype_the_receiver_cannot_make() -> None:
    encoded = encode(np.zeros(3, "M8[ns]"))
    assert b"<M8[ns]" in encoded.skeleton
    with pytest.raises(DecodeError, match="wrongly"):
        plan_of(encoded, skeleton=encoded.skeleton.replace(b"<M8[ns]", b"<M8[zz]"))


@pytest.mark.parametrize("size", [7, 3000])
def test_many_arrays_and_tensors_among_each_other(size: int) -> None:
    kinds = itertools.cycle(["f4", "i8", "?", "S3", "M8[s]"])
    objs = [np.zeros(size, next(kinds)) if index % 2 else torch.full((size,), float(index)) for index in range(60)]
    assert_same_memory(objs, through(objs))

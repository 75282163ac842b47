"""How a leaf looks at memory: element type, shape, strides, and what follows from them.

Both ends compute with the same class, so that sizes, offsets and the place of every leaf need not be sent.
All strides here are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from . import dtypes

# Flags of a form.
REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
READ_ONLY: Final = 4
ACCELERATOR: Final = 8

# The code of raw bytes; tensors have one of dtypes.CODES, arrays the description of a numpy dtype.
BYTES: Final = -1

# Leaves below this size get memory of their own at the receiver, at the price of a copy of them.
TINY: Final = 4096

# What torch and numpy count elements and bytes with.
_MOST = (1 << 63) - 1


class Form:
    """Shape, strides and element type of one leaf. Immutable.

    Attributes:
        code: the code of a torch dtype, the description of a numpy dtype, or BYTES.
        dtype: the dtype of torch or of numpy; None for raw bytes.
        is_tensor: the leaf is a tensor.
        hull: bytes from the first to the last that the leaf shows, gaps included.
        shown: bytes that the leaf shows, repetitions by a stride of 0 left out.
        lead: bytes from the lowest address to the element with index 0; not 0 where a stride is negative.
        natural: the strides are those of row-major order.
        group: the code of the dtype where the leaf is gathered together with others of the dtype, else -1.
    """

    __slots__ = (
        "_axes",
        "_packed",
        "_steps",
        "code",
        "dtype",
        "flags",
        "group",
        "hull",
        "is_tensor",
        "itemsize",
        "lead",
        "natural",
        "shape",
        "shown",
        "strides",
    )

    def __init__(
        self,
        code: Any,
        dtype: Any,
        itemsize: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        flags: int = 0,
    ) -> None:
        self.code = code
        self.is_tensor = type(code) is int and code != BYTES
        self.dtype = dtype
        self.itemsize = itemsize
        self.shape = shape
        self.flags = flags
        usual: list[int] = []
        step = itemsize
        size = itemsize
        for extent in reversed(shape):
            usual.append(step)
            step *= extent or 1
            size *= extent
        usual.reverse()
        if step > _MOST:
            raise ValueError(f"a shape of {list(shape)} is more than can be counted")
        self.strides = usual if strides is None else strides
        self.natural = strides is None or list(strides) == usual
        self.lead = 0
        self._packed: Form | None = None
        self._steps: tuple[int, ...] | None = None
        self._axes: tuple[tuple[tuple[int, int], ...], int, bool] | None = None
        if self.natural or not size:
            self.hull = self.shown = size
        else:
            self._measure(self.strides)
        gathered = self.natural and 0 < size < TINY and self.is_tensor and code in dtypes.GATHERED
        self.group: int = code if gathered else -1

    def _measure(self, strides: Sequence[int]) -> None:
        hull = shown = self.itemsize
        for extent, stride in zip(self.shape, strides, strict=True):
            hull += (extent - 1) * abs(stride)
            if stride < 0:
                self.lead -= (extent - 1) * stride
            if stride:
                shown *= extent
        if hull > _MOST:
            raise ValueError(f"strides of {list(strides)} reach further than can be counted")
        self.hull, self.shown = hull, shown

    @property
    def axes(self) -> tuple[tuple[tuple[int, int], ...], int, bool]:
        """What the memory looks like, whatever the order of the dimensions.

        Returns:
            (extent, stride) of the dimensions that jump, the widest stride first; the bytes in a row at each place;
            and whether no byte can be shown by two elements, those of a stride of 0 aside.
        """
        if self._axes is None:
            steps = sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s)
            run = reach = self.itemsize
            apart = True
            jumps: list[tuple[int, int]] = []
            for stride, extent in steps:
                apart = apart and stride >= reach
                reach += (extent - 1) * stride
                if stride == run and not jumps:
                    run *= extent
                elif jumps and stride == jumps[-1][0] * jumps[-1][1]:
                    jumps[-1] = (jumps[-1][0] * extent, jumps[-1][1])
                else:
                    jumps.append((extent, stride))
            self._axes = tuple(reversed(jumps)), run, apart
        return self._axes

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides in elements."""
        if self._steps is None:
            self._steps = tuple(stride // self.itemsize for stride in self.strides)
        return self._steps

    @property
    def apart(self) -> bool:
        """No byte can be shown twice, a stride of 0 aside."""
        return self.natural or self.axes[2]

    def packed(self) -> Form:
        """The form after the gaps are taken out: the order of the dimensions in memory stays.

        A leaf without gaps is its own packed form, and so is one that shows its bytes several times.
        """
        if self.hull == self.shown or not self.apart or not self.hull:
            return self
        if self._packed is None:
            order = sorted(range(len(self.shape)), key=lambda axis: (abs(self.strides[axis]), -axis))
            strides = list(self.strides)
            step = self.itemsize
            for axis in order:
                if self.shape[axis] == 1:
                    strides[axis] = step
                elif strides[axis]:
                    strides[axis] = step if strides[axis] > 0 else -step
                    step *= self.shape[axis]
            self._packed = self.with_strides(strides)
        return self._packed

    def with_strides(self, strides: Sequence[int]) -> Form:
        return Form(self.code, self.dtype, self.itemsize, self.shape, strides, self.flags)

    def wire(self) -> list[Any]:
        """The form as it is written in a message."""
        strides = None if self.natural else list(self.strides)
        return [self.code, self.flags, list(self.shape), strides]


def longest(forms: Iterable[Form]) -> int:
    """Of many leaves the most bytes that one of them reaches over; they have few different forms."""
    return max([form.hull for form in set(forms)], default=0)

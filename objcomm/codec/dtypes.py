"""The numbers that stand for torch's element types in a message. They are part of the protocol."""

from __future__ import annotations

import torch

_NAMES = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "bfloat16",
    4: "int64",
    5: "int32",
    6: "int16",
    7: "int8",
    8: "uint8",
    9: "bool",
    10: "complex64",
    11: "complex128",
    12: "complex32",
    13: "uint16",
    14: "uint32",
    15: "uint64",
    16: "float8_e4m3fn",
    17: "float8_e4m3fnuz",
    18: "float8_e5m2",
    19: "float8_e5m2fnuz",
    20: "float8_e8m0fnu",
    21: "float4_e2m1fn_x2",
    32: "bits1x8",
    33: "bits2x4",
    34: "bits4x2",
    35: "bits8",
    36: "bits16",
    **{39 + bits: f"uint{bits}" for bits in range(1, 8)},
    **{47 + bits: f"int{bits}" for bits in range(1, 8)},
}

# A torch older than a dtype cannot receive it; everything else works.
BY_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in _NAMES.items() if isinstance(getattr(torch, name, None), torch.dtype)
}
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in BY_CODE.items()}

# Those that torch.cat gathers in one call on every kind of device.
GATHERED = frozenset(range(12))


def name_of(code: int) -> str:
    """What torch calls the dtype of a code, known to this torch or not."""
    return f"torch.{_NAMES[code]}" if code in _NAMES else f"dtype number {code}"

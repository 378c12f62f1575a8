"""Numbers of 8 bits that stand for others, times a scale: int8 and float8_e4m3fn. Those of NumPy and CuPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

INT8, FLOAT8 = EIGHT_BITS = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_INT8, LARGEST_FLOAT8 = np.float32(127), np.float32(448)


def bits_of(x: Any) -> Any:
    """float8_e4m3fn as uint8, for CuPy, whose arrays may be views of that dtype, with which it computes nothing."""
    return x.view(np.uint8) if x.dtype == FLOAT8 else x


def to_int8(x: Any) -> tuple[Any, Any]:
    """x in int8 along its last axis, and the scale, without that axis."""
    scale = abs(x).max(axis=-1, initial=0) / LARGEST_INT8
    scaled = np.rint(x / np.where(scale == 0, 1, scale)[..., None])
    return np.clip(scaled, -LARGEST_INT8, LARGEST_INT8).astype(np.int8), scale


def to_float8(x: Any, scale: Any) -> Any:
    """x in float8_e4m3fn, but for the dtype; scale: without the last axis."""
    return np.clip(x / scale[..., None], -LARGEST_FLOAT8, LARGEST_FLOAT8)

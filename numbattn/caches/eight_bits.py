"""Quantisation to 8 bits, int8 and float8_e4m3fn with scales, of NumPy and CuPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

INT8, FLOAT8 = EIGHT_BITS = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_INT8, LARGEST_FLOAT8 = np.float32(127), np.float32(448)
LIMITS = np.finfo(np.float32)
SCALES = LIMITS.tiny, LIMITS.max / LARGEST_FLOAT8  # of float8, from, to: products with them are normal and finite
# the largest number that int8 can hold: 127 times its scale is finite in float32
LARGEST_IN_INT8 = 127.0 * float(np.nextafter(LIMITS.max / LARGEST_INT8, np.float32(0)))
ROUNDING: dict[str, Any] = {"over": "ignore", "under": "ignore", "invalid": "ignore"}  # what quantising loses


def bits_of(x: Any) -> Any:
    """float8_e4m3fn as uint8: CuPy has arrays of the former, but cannot compute with them."""
    return x.view(np.uint8) if x.dtype == FLOAT8 else x


def to_int8(x: Any) -> tuple[Any, Any]:
    """x in int8, and a float32 scale for each vector along the last axis. Finite numbers out of range saturate."""
    if x.dtype == np.float64:
        x = np.where(np.isinf(x), x, np.clip(x, -LARGEST_IN_INT8, LARGEST_IN_INT8))
    with np.errstate(**ROUNDING):
        x = x.astype(np.float32)
        scale = abs(x).max(axis=-1, initial=0) / LARGEST_INT8
        scaled = np.rint(x / np.where(scale == 0, 1, scale)[..., None])
        return np.clip(scaled, -LARGEST_INT8, LARGEST_INT8).astype(np.int8), scale


def to_float8(x: Any, scale: Any) -> Any:
    """x in float8_e4m3fn; scale: one for each vector along the last axis. Numbers out of range saturate."""
    with np.errstate(**ROUNDING):
        scaled = x.astype(np.float32) / scale[..., None]
        return np.clip(scaled, -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(FLOAT8)


def check_scale(name: str, scale: Any) -> None:
    """Refuse scales of float8, in a NumPy array, by which numbers overflow or lose digits."""
    smallest, largest = SCALES
    if scale.size and not smallest <= scale.min() <= scale.max() <= largest:
        raise ValueError(f"{name}: got values from {scale.min()} to {scale.max()}, allowed {smallest:.2g} to "
                         f"{largest:.2g}")

"""Arrays turned by their positions, see `numbattn.rotations`. Cosines and sines of a token serve all heads.

A row is widened in a buffer, turned there, and narrowed as it is written: one kernel for each dtype of sums.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from ..base.checks import DTYPES, dtype_of_sums
from ..base.values import put
from ..rotations.turns import cosine_and_sine
from .compile import Kernel
from .launch import launch
from .record import Record, data_address
from .scratch import memory_of
from .tile import BFLOAT16, FLOAT16, HAS_FLOAT16, OF_SUMS, OPTIONS, inline, is_set, narrow, tile, widen

KINDS = {DTYPES[0]: FLOAT16, DTYPES[1]: BFLOAT16}
COST = 16  # of an element, in multiplications: most of it is memory's
TOKENS = 16  # of a block


class Rows(NamedTuple):
    """An array of rows with contiguous features, (first, second, heads, seqlen, features)."""

    address: int
    first: int  # bytes from one to the next, along each axis
    second: int
    head: int
    row: int
    kind: int


class Sizes(NamedTuple):
    """The numbers of a call."""

    second: int
    heads: int
    seqlen: int
    features: int
    width: int  # of features that turn along an axis of positions
    interleaved: int
    factor: float


class Buffers(NamedTuple):
    """Memory of one thread."""

    row: Any
    cosines: Any
    sines: Any


def turn(out, x, positions, rotary, width, back):
    """x turned in `out`, both (first, second, heads, seqlen, features); positions: (first, second, 1, seqlen, axes),
    where axes may be 1. back: by the opposite angles."""
    first, second, heads, seqlen, features = x.shape
    turns, factor = rotary._turns(width)
    real = dtype_of_sums(x.dtype)
    read, written = (a if has_rows(a) else np.ascontiguousarray(a) for a in (x, out))
    if KINDS.get(out.dtype) == FLOAT16 and not HAS_FLOAT16:
        written = np.empty(out.shape, real)
    at = np.ascontiguousarray(positions[:, :, 0], np.float64)
    pairs = at.shape[-1] * (width // 2)
    scratch, nbytes = scratch_for(features, pairs, real)
    sizes = sizes_of(second, heads, seqlen, features, width, int(rotary.interleaved), factor)
    rows = Record(*rows_of(read), *rows_of(written), at, -turns if back else turns, held=(read, written))
    call = turn_kernel.given(scratch, sizes, rows)
    launch(call, first * second * -(-seqlen // TOKENS), x.size * COST, nbytes)
    if written is not out:
        put(out, written)


@lru_cache(maxsize=64)
def scratch_for(features, pairs, real):
    """The Record of Buffers, and their bytes."""
    return memory_of(Buffers, [(size, real) for size in (features, TOKENS * pairs, TOKENS * pairs)])


@lru_cache(maxsize=64)
def sizes_of(*numbers):
    """The Record of Sizes."""
    return Record(*Sizes(*numbers))


def of_dtype(number):
    """The cosine, 0, or the sine, 1, of turns, (like, turns), in the dtype of a number."""

    def function(like, turns):
        return cosine_and_sine(type(like))[number](turns)

    @overload(function, jit_options=OPTIONS)
    def choose(like, turns):
        in_dtype = inline(cosine_and_sine(like.name)[number])
        return lambda like, turns: in_dtype(turns)

    return function


cosine, sine = of_dtype(0), of_dtype(1)


def has_rows(x):
    """Whether kernels can read it as it lies."""
    return x.flags.aligned and (x.shape[-1] == 1 or x.strides[-1] == x.itemsize) and x.dtype.isnative


def rows_of(x):
    return Rows(data_address(x), *x.strides[:-1], KINDS.get(x.dtype, OF_SUMS))


@inline
def place_of(x, first, second, head, row):
    return x.address + first * x.first + second * x.second + head * x.head + row * x.row


@inline
def turn_halves(row, cosines, sines, width):
    """Turn the pairs of a row, of each axis (f, f + width / 2)."""
    half = width // 2
    for pair in range(0, cosines.size, half):
        c, s = cosines[pair : pair + half], sines[pair : pair + half]
        a, b = row[2 * pair : 2 * pair + half], row[2 * pair + half : 2 * pair + width]
        for f in range(half):
            u, v = a[f], b[f]
            a[f], b[f] = u * c[f] - v * s[f], v * c[f] + u * s[f]


@inline
def turn_neighbours(row, cosines, sines):
    """Turn the pairs of a row, (2 f, 2 f + 1)."""
    for f in range(cosines.size):
        u, v, c, s = row[2 * f], row[2 * f + 1], cosines[f], sines[f]
        row[2 * f], row[2 * f + 1] = u * c - v * s, v * c + u * s


@Kernel
def turn_kernel(first, end, stop, scratch, sizes: Sizes, x: Rows, out: Rows, positions, turns):
    row, pairs = scratch.row, scratch.cosines.size // TOKENS
    cosines, sines = tile(scratch.cosines, TOKENS, pairs), tile(scratch.sines, TOKENS, pairs)
    factor, half, blocks = row.dtype.type(sizes.factor), sizes.width // 2, (sizes.seqlen + TOKENS - 1) // TOKENS
    for block in range(first, end):
        if is_set(stop):
            break
        matrix, token = block // blocks, block % blocks * TOKENS
        one, two = matrix // sizes.second, matrix % sizes.second
        count = min(TOKENS, sizes.seqlen - token)
        for n in range(count):
            along = positions[min(one, positions.shape[0] - 1), min(two, positions.shape[1] - 1), token + n]
            for axis in range(along.size):
                c, s = cosines[n, axis * half : (axis + 1) * half], sines[n, axis * half : (axis + 1) * half]
                for f in range(half):
                    angle = along[axis] * turns[f]
                    c[f], s[f] = factor * cosine(factor, angle), factor * sine(factor, angle)
        for head in range(sizes.heads):
            for n in range(count):
                widen(row, place_of(x, one, two, head, token + n), x.kind)
                if sizes.interleaved:
                    turn_neighbours(row, cosines[n], sines[n])
                else:
                    turn_halves(row, cosines[n], sines[n], sizes.width)
                narrow(place_of(out, one, two, head, token + n), row, out.kind)

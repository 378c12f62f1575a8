"""Arrays turned by their positions, see `numbattn.rotations`: one pass over memory. A block computes the cosines and
sines of some tokens once, for several heads."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..base.values import address_of, moved, remembered
from ..rotations.turns import cosine_and_sine
from .kernel import kernel_factory, launch
from .kernels.shared.layouts import sum_type, vector
from .kernels.shared.schedule import split
from .tile import (
    Alignment,
    aligned,
    block_index,
    column_pairs,
    convert,
    copy_layout,
    device,
    load,
    map_elements,
    minimum,
    paired,
    save,
    shape,
)
from .tile.alignment import ArrayLayout, alignment, layout_of

THREADS, HEADS = 128, 8  # of a block


def turn(out: Any, x: Any, positions: Any, rotary: Any, width: int, back: bool) -> None:
    """x turned in `out`, both (first, second, heads, seqlen, features); positions: (first, second, 1, seqlen, axes),
    where axes may be 1. back: by the opposite angles."""
    first, second, heads, seqlen, features = x.shape
    part, dims = width if rotary.interleaved else width // 2, positions.shape[-1] * width
    nbytes = min(alignment_of_parts(layout_of(a, address_of(a)), part, dims) for a in (x, out))
    kernel, rows = kernel_of(width, features - dims, rotary.interleaved, x.dtype, nbytes)
    blocks = -(-seqlen // rows) * -(-heads // HEADS) * first * second
    turns, factor = turns_of(rotary, width, back, x)
    launch(kernel, (blocks, 1, 1), THREADS, 0, out, x, positions, turns, np.float64(factor))


@lru_cache(maxsize=1024)
def alignment_of_parts(layout: ArrayLayout, part: int, dims: int) -> int:
    """The alignment of the first `part` columns of an array, and of those from `dims` on, if there are any."""
    *lead, features = layout.shape
    parts = (0, part), (dims, features - dims)
    return min(
        alignment(layout._replace(shape=(*lead, n), address=(layout.address + at * layout.dtype.itemsize)))
        for at, n in parts if n
    )  # fmt: skip


def turns_of(rotary: Any, width: int, back: bool, like: Any) -> tuple[Any, float]:
    """`Rotary._turns` of each column of a tile, and the factor."""
    turns, factor = rotary._turns(width)

    def of_columns() -> tuple[Any]:
        return (np.repeat(-turns if back else turns, 1 + rotary.interleaved),)

    return kept_on_device(rotary, (width, back), like, of_columns)[0], factor


def columns_of(rotary: Any, x: Any) -> tuple[Any, Any, Any]:
    """Of each feature of an array: how far it turns in a step, towards the other one of its pair, what it is multiplied
    by, and which the other one is."""

    def found() -> tuple[Any, ...]:
        features = x.shape[-1]
        width = rotary._width(features)
        turns, factor = rotary._turns(width)
        pairs = np.arange(width).reshape(-1, 2) if rotary.interleaved else np.arange(width).reshape(2, -1).T
        signed, factors, others = np.zeros(features), np.ones(features), np.arange(features, dtype=np.int32)
        signed[pairs], factors[pairs], others[pairs] = turns[:, None] * [-1, 1], factor, pairs[:, ::-1]
        return signed, factors, others

    return kept_on_device(rotary, x.shape[-1], x, found)


def kept_on_device(rotary: Any, key: Any, like: Any, make: Callable[[], tuple[Any, ...]]) -> Any:
    """NumPy arrays in the library of another array; on a GPU they are copied once, for all streams."""
    device = None if isinstance(like, np.ndarray) else like.device.id

    def copied() -> Any:
        found = tuple([moved(x, like) for x in make()])
        if device is not None:
            from .launch import current_gpu  # needs CuPy

            current_gpu().stream().synchronize()
        return found

    return remembered(rotary._known, (key, device), copied)


@kernel_factory
def kernel_of(width, rest, interleaved, dtype, nbytes):
    """The kernel, and the tokens of a block. width: of features that turn along each axis of positions; rest: features
    after all these."""
    REAL, ROWS_OF, HALF = sum_type(dtype), Alignment(nbytes), width // 2
    cosine, sine = map(device, cosine_and_sine(REAL))
    run, part = vector(dtype), width if interleaved else HALF
    lanes = lanes_for(part, run)
    ROWS = THREADS // min(lanes, THREADS)
    TILE, OTHERS = (copy_layout(ROWS, lanes_for(n, run) * run, THREADS, run) for n in (part, rest))
    PAIRS = TILE.without(cols=1) if interleaved else TILE
    TOKENS, ANGLES = PAIRS.row_vector(), PAIRS.col_vector()

    @device
    def turned(a, b, cosines, sines):
        return a * cosines - b * sines, b * cosines + a * sines

    @device
    def turn_neighbours(out, x, first, row, cosines, sines):
        """Turn features 2 f and 2 f + 1."""
        a, b = column_pairs(convert(load(aligned(x[:, first : first + width], ROWS_OF), TILE, row), REAL))
        a, b = turned(a, b, cosines, sines)
        save(aligned(out[:, first : first + width], ROWS_OF), paired(a, b, TILE), row)

    @device
    def turn_halves(out, x, first, row, cosines, sines):
        """Turn features f and f + width / 2."""
        middle, end = first + HALF, first + width
        a = convert(load(aligned(x[:, first:middle], ROWS_OF), TILE, row), REAL)
        b = convert(load(aligned(x[:, middle:end], ROWS_OF), TILE, row), REAL)
        a, b = turned(a, b, cosines, sines)
        save(aligned(out[:, first:middle], ROWS_OF), a, row)
        save(aligned(out[:, middle:end], ROWS_OF), b, row)

    turn_pairs = turn_neighbours if interleaved else turn_halves

    def kernel(mOut, mX, mPositions, mTurns, factor):
        (_, second, heads, seqlen, _), (first_axis, second_axis, _, _, axes) = shape(mX), shape(mPositions)
        others, tile = split(block_index(), (seqlen + ROWS - 1) // ROWS)
        matrix, group = split(others, (heads + HEADS - 1) // HEADS)
        (i, j), row = split(matrix, second), tile * ROWS
        first, end = group * HEADS, minimum(group * HEADS + HEADS, heads)
        positions = mPositions[minimum(i, first_axis - 1), minimum(j, second_axis - 1), 0]    # of axes of size 1, too
        for axis in range(axes):
            position = convert(load(positions[:, axis], TOKENS, row), np.float64)
            angles = position * load(mTurns, ANGLES, 0)
            cosines = convert(map_elements(cosine, angles, 0, 0, (1, 1), ()) * factor, REAL)
            sines = convert(map_elements(sine, angles, 0, 0, (1, 1), ()) * factor, REAL)
            for head in range(first, end):
                turn_pairs(mOut[i, j, head], mX[i, j, head], axis * width, row, cosines, sines)
        if rest:
            for head in range(first, end):
                X = load(aligned(mX[i, j, head][:, axes * width :], ROWS_OF), OTHERS, row)
                save(aligned(mOut[i, j, head][:, axes * width :], ROWS_OF), X, row)

    return kernel, ROWS


def lanes_for(features, run):
    """As many lanes as move these features in vectors, a power of two."""
    return 1 << (max(-(-features // run), 1) - 1).bit_length()

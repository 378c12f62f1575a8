"""The two meanings of a word agree: on what comes out, and on what is refused."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba.core.errors import NumbaError

from numbattn.cuda.tile import (
    Alignment,
    SharedMemory,
    aligned,
    allocate,
    anywhere,
    atomic_add,
    beside,
    bitcast,
    clear,
    col_index,
    cols_between,
    column_halves,
    column_pairs,
    convert,
    copy_async,
    device,
    dot,
    exp2,
    full,
    get,
    has_bits,
    index,
    lines_of,
    load,
    log2,
    maximum,
    minimum,
    mma,
    operand,
    paired,
    part_argmin,
    part_sum,
    put,
    reciprocal,
    rescaled,
    row_index,
    row_max,
    row_sum,
    rows_between,
    save,
    shifted,
    simt,
    spread,
    sqrt,
    tanh,
    transposed_halves,
    wgmma,
    wgmma_wait,
    where,
    wide_product,
)
from tests.tools.launch import launch, simulated_only, world_of

TILE = simt(8, 16, 32, 4, 1)
ROWS, COLS, PARTS = TILE.row_vector(), TILE.col_vector(), TILE.row_parts()
NOBODY = np.int32(-1)
OTHER, SUMS = simt(8, 16, 32, 8, 2), mma(16, 16, 32)


# ----------------------------------------------------------------------------------------------------- random programs
def small(X):
    """So that no program leaves the numbers."""
    return minimum(maximum(X, -4), 4)


small = device(small)
# each takes two tiles of float32, and a row and a column vector, and makes a tile, or one with the vectors' axes
STEPS = [
    lambda X, Y, r, c: X + Y,
    lambda X, Y, r, c: X - c,
    lambda X, Y, r, c: r * X,
    lambda X, Y, r, c: X * 3 - 0.5,
    lambda X, Y, r, c: 2 - X,
    lambda X, Y, r, c: Y / (abs(X) + 1),
    lambda X, Y, r, c: -X,
    lambda X, Y, r, c: exp2(X) + tanh(Y),
    lambda X, Y, r, c: sqrt(abs(X)) - log2(abs(Y) + 1),
    lambda X, Y, r, c: reciprocal(X * X + 1),
    lambda X, Y, r, c: maximum(X, minimum(Y, 1.5)),
    lambda X, Y, r, c: where(X < Y, X, -1),
    lambda X, Y, r, c: beside(column_halves(Y)[1], column_halves(X)[0], TILE),
    lambda X, Y, r, c: where((r < X) & ~(c <= Y), 0.25, Y),
    lambda X, Y, r, c: where((r == r) | (c != X), c, X),
    lambda X, Y, r, c: X - row_max(Y),
    lambda X, Y, r, c: X + row_max(Y, r),
    lambda X, Y, r, c: row_sum(X) * Y,
    lambda X, Y, r, c: row_sum(part_sum(X, part_sum(Y)), 1) + X,
    lambda X, Y, r, c: X - row_max(-part_argmin(Y, 3, part_sum(X), full(PARTS, NOBODY))[0]),
    lambda X, Y, r, c: X + row_max(convert(part_argmin(Y, 3, part_sum(X), full(PARTS, NOBODY))[1], np.float32)),
    lambda X, Y, r, c: X if anywhere(c - 5 > X) else Y,
    lambda X, Y, r, c: full(TILE, r) + full(TILE, c),
    lambda X, Y, r, c: rescaled(X, r),
    lambda X, Y, r, c: convert(convert(X * 8, np.int32) // 3 // 2 ^ (row_index(TILE, 3) << 1), np.float32),
    lambda X, Y, r, c: convert(convert(X, np.float16), np.float32),
    lambda X, Y, r, c: convert(convert(X, np.float64) / 3 + 0.1, np.float32),
    lambda X, Y, r, c: bitcast(row_max(bitcast(abs(X), np.int32)) & ~0xFFFF, np.float32) + X,
    lambda X, Y, r, c: convert(col_index(TILE, 1) & 5, np.float32) + X,
    lambda X, Y, r, c: where(cols_between(TILE, 0, row_index(TILE, -2), row_index(TILE, 3)), X, Y),
]
STEPS = [device(step) for step in STEPS]
WHOLE = device(lambda X: X + full(TILE, np.float32(0)))


def then(program, step, swapped):
    if swapped:
        return device(lambda X, Y, r, c: small(WHOLE(step(Y, program(X, Y, r, c), r, c))))
    return device(lambda X, Y, r, c: small(WHOLE(step(program(X, Y, r, c), Y, r, c))))


def compare(program, seed, least):
    """Run it in both worlds. least: the part of the elements that agree."""

    def kernel(x, y, r, c, z):
        save(z, program(load(x, TILE, 0), load(y, TILE, 0), load(r, ROWS, 0), load(c, COLS, 0)), 0)

    rng, found = np.random.default_rng(seed), []
    arrays = [rng.integers(-16, 17, shape).astype(np.float32) / 8 for shape in ((8, 16), (8, 16), 8, 16)]
    for world in "simulated", "compiled":
        with world_of(world):
            found.append(np.full((8, 16), np.nan, np.float32))
            launch(kernel, (1, 1, 1), 32, 0, *arrays, found[-1])
    assert np.isclose(*found, rtol=1e-4, atol=1e-4).mean() >= least, found


@simulated_only  # once: it runs both
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_steps_come_out_alike(step):
    compare(then(device(lambda X, Y, r, c: X), STEPS[step], False), step, least=1)


@simulated_only
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.booleans()), min_size=3, max_size=8), st.integers(0, 99))
def test_random_programs_come_out_alike(steps, seed):
    program = device(lambda X, Y, r, c: X)
    for step in steps:
        program = then(program, *step)
    compare(program, seed, least=0.9)  # where a program compares or rounds, a last bit may decide


# ------------------------------------------------------------------------------------------------------ wrong programs
shared = SharedMemory()
PLACE, WIDE = shared.tile(8, 16, np.float32), shared.tile(16, 16, np.float32)
HALF, BOXES = shared.tile(16, 16, np.float16), shared.boxes(64, 64, np.float16)
SINGLES = shared.boxes(64, 32, np.float32)
LEFT, WARPGROUP_SUMS = simt(16, 16, 32, 4, 1), wgmma(64)
ZERO, PAIR = np.float32(0), (1, 2)
# X, Y: float32; I: int32; F: float16; T: truths; r, c: vectors of float32; x: the matrix of X, of 8x16
WRONG = {
    "and": lambda x, v, X, I, F, T, r, c: (X > 0) and (X < 1),
    "or": lambda x, v, X, I, F, T, r, c: (X > 0) or (X < 1),
    "not": lambda x, v, X, I, F, T, r, c: not T,
    "a choice by a tile": lambda x, v, X, I, F, T, r, c: X if T else -X,
    "two dtypes": lambda x, v, X, I, F, T, r, c: X + I,
    "two layouts": lambda x, v, X, I, F, T, r, c: X + load(x, OTHER, 0),
    "two dtypes compared": lambda x, v, X, I, F, T, r, c: X < I,
    "no number": lambda x, v, X, I, F, T, r, c: X + None,
    "a tuple": lambda x, v, X, I, F, T, r, c: X + PAIR,
    "an array": lambda x, v, X, I, F, T, r, c: X + v,
    "/ of integers": lambda x, v, X, I, F, T, r, c: I / 2,
    "// of floats": lambda x, v, X, I, F, T, r, c: X // 2,
    "% of a tile": lambda x, v, X, I, F, T, r, c: I % 2,
    "** of a tile": lambda x, v, X, I, F, T, r, c: X**2,
    "& of floats": lambda x, v, X, I, F, T, r, c: X & X,
    "~ of floats": lambda x, v, X, I, F, T, r, c: ~X,
    "<< of floats": lambda x, v, X, I, F, T, r, c: X << 1,
    "<< of truths": lambda x, v, X, I, F, T, r, c: T << T,
    "+ of truths": lambda x, v, X, I, F, T, r, c: T + T,
    "- of truths": lambda x, v, X, I, F, T, r, c: -T,
    "+ of float16": lambda x, v, X, I, F, T, r, c: F + F,
    "- of float16": lambda x, v, X, I, F, T, r, c: -F,
    "abs of truths": lambda x, v, X, I, F, T, r, c: abs(T),
    "comparison of float16": lambda x, v, X, I, F, T, r, c: F < F,
    "exp2 of integers": lambda x, v, X, I, F, T, r, c: exp2(I),
    "exp2 of float16": lambda x, v, X, I, F, T, r, c: exp2(F),
    "exp2 of a number": lambda x, v, X, I, F, T, r, c: X + exp2(ZERO),
    "maximum of float16": lambda x, v, X, I, F, T, r, c: maximum(F, F),
    "maximum of two dtypes": lambda x, v, X, I, F, T, r, c: maximum(X, I),
    "where of two numbers": lambda x, v, X, I, F, T, r, c: where(T, 1, 0),
    "where of a tile that is no truth": lambda x, v, X, I, F, T, r, c: where(I, X, 0),
    "where of a truth": lambda x, v, X, I, F, T, r, c: where(True, X, 0),
    "where of two dtypes": lambda x, v, X, I, F, T, r, c: where(T, X, I),
    "where of two layouts": lambda x, v, X, I, F, T, r, c: where(T, load(x, OTHER, 0), 0),
    "wide product of int32": lambda x, v, X, I, F, T, r, c: wide_product(I, 3)[0],
    "halves of int32": lambda x, v, X, I, F, T, r, c: transposed_halves(I, 4),
    "halves of words in two warps": lambda x, v, X, I, F, T, r, c: transposed_halves(convert(I, np.uint32), 32),
    "columns that are no half": lambda x, v, X, I, F, T, r, c: beside(X, X, TILE),
    "halves of two dtypes": lambda x, v, X, I, F, T, r, c: beside(column_halves(X)[0], column_halves(I)[0], TILE),
    "halves of a row vector": lambda x, v, X, I, F, T, r, c: column_halves(r)[0],
    "pairs in two threads": lambda x, v, X, I, F, T, r, c: column_pairs(X)[0],
    "pairs of no such layout": lambda x, v, X, I, F, T, r, c: paired(X, X, TILE),
    "spread to what is no finer": lambda x, v, X, I, F, T, r, c: spread(X, OTHER),
    "rescaled by a column vector": lambda x, v, X, I, F, T, r, c: rescaled(X, c),
    "rescaled by a number": lambda x, v, X, I, F, T, r, c: rescaled(X, ZERO),
    "rescaled integers": lambda x, v, X, I, F, T, r, c: rescaled(I, row_max(I, 0)),
    "maximum of rows of truths": lambda x, v, X, I, F, T, r, c: row_max(T, 0),
    "sum of rows of float16": lambda x, v, X, I, F, T, r, c: row_sum(F, 0),
    "sum of a number": lambda x, v, X, I, F, T, r, c: X + row_sum(ZERO, 0),
    "a seed of another dtype": lambda x, v, X, I, F, T, r, c: row_max(X, row_max(I, 0)),
    "a seed that is a column vector": lambda x, v, X, I, F, T, r, c: row_max(X, c),
    "a seed that is a tile": lambda x, v, X, I, F, T, r, c: row_sum(X, X),
    "parts into a row vector": lambda x, v, X, I, F, T, r, c: part_sum(X, r),
    "parts into a number": lambda x, v, X, I, F, T, r, c: part_sum(X, 0),
    "parts of another dtype": lambda x, v, X, I, F, T, r, c: part_sum(X, part_sum(I)),
    "a running minimum of integers": lambda x, v, X, I, F, T, r, c: part_argmin(I, 0, part_sum(I), part_sum(I))[0],
    "a running minimum into a row vector": lambda x, v, X, I, F, T, r, c: part_argmin(X, 0, r, row_index(TILE, 0))[0],
    "columns of a minimum that are floats": lambda x, v, X, I, F, T, r, c: part_argmin(
        X, 0, part_sum(X), part_sum(X))[0],
    "anywhere of floats": lambda x, v, X, I, F, T, r, c: X if anywhere(X) else -X,
    "rows in several lanes, shifted": lambda x, v, X, I, F, T, r, c: shifted(X, 0),
    "a vector full of a tile": lambda x, v, X, I, F, T, r, c: full(ROWS, X),
    "a tile full of another": lambda x, v, X, I, F, T, r, c: full(TILE, load(x, OTHER, 0)),
    "full of None": lambda x, v, X, I, F, T, r, c: full(TILE, None),
    "columns between floats": lambda x, v, X, I, F, T, r, c: cols_between(TILE, 0, r, r),
    "columns between column vectors": lambda x, v, X, I, F, T, r, c: cols_between(
        TILE, 0, col_index(TILE, 0), col_index(TILE, 0)),
    "bits of float16": lambda x, v, X, I, F, T, r, c: bitcast(F, np.int32),
    "bits as float64": lambda x, v, X, I, F, T, r, c: bitcast(X, np.float64),
    "to int16": lambda x, v, X, I, F, T, r, c: convert(X, np.int16),
    "an index of a float": lambda x, v, X, I, F, T, r, c: X + index(0.5),
    "a vector as a tile": lambda x, v, X, I, F, T, r, c: load(v, TILE, 0),
    "bits at places of floats": lambda x, v, X, I, F, T, r, c: has_bits(x, r, c, 1),
    "bits of floats": lambda x, v, X, I, F, T, r, c: has_bits(x, row_index(TILE, 0), col_index(TILE, 0), 1),
    "an aligned vector": lambda x, v, X, I, F, T, r, c: load(aligned(v, Alignment(0)), COLS, 0),
    "rows of a matrix that has no heads": lambda x, v, X, I, F, T, r, c: load(
        rows_between(x, 0, 0, 0, 1, Alignment(0)), TILE, 0),
    "lines of a vector that has no heads": lambda x, v, X, I, F, T, r, c: load(lines_of(v, 0, 0, 16), TILE, 0),
    "put of a number": lambda x, v, X, I, F, T, r, c: put(allocate(PLACE), ZERO),
    "put of another shape": lambda x, v, X, I, F, T, r, c: put(allocate(WIDE), X),
    "get of another shape": lambda x, v, X, I, F, T, r, c: get(allocate(WIDE), TILE),
    "get of boxes transposed": lambda x, v, X, I, F, T, r, c: get(allocate(BOXES).T, simt(64, 64, 32, 8, 1)),
    "clear of rows": lambda x, v, X, I, F, T, r, c: clear(allocate(PLACE), 0),
    "a copy to another dtype": lambda x, v, X, I, F, T, r, c: copy_async(allocate(HALF), x, LEFT, 0),
    "a copy transposed": lambda x, v, X, I, F, T, r, c: copy_async(allocate(WIDE).T, x, LEFT, 0),
    "a copy to boxes transposed": lambda x, v, X, I, F, T, r, c: copy_async(
        allocate(SINGLES).T, x, simt(32, 64, 32, 8, 1), 0),
    "an atomic of floats": lambda x, v, X, I, F, T, r, c: X + atomic_add(v, 0, 1),
    "a product of a fragment on CUDA cores": lambda x, v, X, I, F, T, r, c: dot(LEFT, full(LEFT, ZERO), allocate(WIDE)),
    "a product of integers": lambda x, v, X, I, F, T, r, c: dot(full(LEFT, 1), allocate(WIDE), allocate(WIDE)),
    "a product of another shape": lambda x, v, X, I, F, T, r, c: dot(LEFT, allocate(PLACE), allocate(WIDE)),
    "a product of boxes on CUDA cores": lambda x, v, X, I, F, T, r, c: dot(
        simt(64, 64, 32, 8, 1), allocate(BOXES), allocate(BOXES)),
    "a product of two dtypes": lambda x, v, X, I, F, T, r, c: dot(SUMS, allocate(HALF), allocate(WIDE)),
    "a product into float64": lambda x, v, X, I, F, T, r, c: dot(full(SUMS, 0.0), allocate(HALF), allocate(HALF)),
    "a product of a fragment of CUDA cores": lambda x, v, X, I, F, T, r, c: dot(SUMS, full(LEFT, ZERO), allocate(HALF)),
    "a product of a tile and a number": lambda x, v, X, I, F, T, r, c: dot(SUMS, allocate(HALF), ZERO),
    "a product of a warpgroup without boxes": lambda x, v, X, I, F, T, r, c: dot(
        wgmma(16), full(wgmma(16), ZERO), allocate(HALF)),
    "a product of a fragment that is no operand": lambda x, v, X, I, F, T, r, c: dot(
        WARPGROUP_SUMS, full(WARPGROUP_SUMS, ZERO), allocate(BOXES)),
    "an operand of CUDA cores": lambda x, v, X, I, F, T, r, c: dot(
        WARPGROUP_SUMS, operand(full(simt(64, 64, 32, 4, 1), ZERO), BOXES), allocate(BOXES)),
    "a wait for a tile": lambda x, v, X, I, F, T, r, c: wgmma_wait(X, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused(name):
    program = device(WRONG[name])

    def kernel(x, v):
        X, i, r, c = load(x, TILE, 0), row_index(TILE, 0) + col_index(TILE, 0), load(v, ROWS, 0), load(v, COLS, 0)
        program(x, v, X, i, convert(X, np.float16), X > 0, r, c)

    x, v = np.ones((8, 16), np.float32), np.ones(16, np.float32)
    with pytest.raises((TypeError, NumbaError)):
        launch(kernel, (1, 1, 1), 32, shared.nbytes, x, v, cc=(9, 0))

"""Tiles from and to arrays: any dtype, any strides, ragged ends, promised alignment."""

import numpy as np
import pytest

from numbattn.cuda.tile import (
    Alignment,
    aligned,
    bfloat16,
    block_index,
    col_index,
    copy_layout,
    fold_index,
    gather,
    has_bits,
    load,
    mma,
    row_index,
    save,
    scatter,
)
from tests.tools.launch import compiled_only, launch, poisoned, ptx_of

from .tiles import ALL_LAYOUTS, DTYPES, SHAPE, THREADS, as_device, numbers


def copier(layout, alignment=None):
    ALIGNMENT = Alignment(alignment or 0)

    def copy(source, target, first):
        save(aligned(target, ALIGNMENT), load(aligned(source, ALIGNMENT), layout, first), first)

    def copy_unpromised(source, target, first):
        save(target, load(source, layout, first), first)

    return copy_unpromised if alignment is None else copy


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32), (50, 27), (33, 1), (64, 40)])
def test_load_and_save_stop_at_the_end(layout, shape):
    x, y = numbers(shape), poisoned(shape)
    launch(copier(layout), (1, 1, 1), THREADS, 0, x, y, np.int32(32))
    assert np.isnan(y[:32]).all()
    np.testing.assert_array_equal(y[32:, :32], x[32:, :32])
    assert np.isnan(y[:, 32:]).all()


@pytest.mark.parametrize("layout", [mma(16, 16, 32), mma(16, 16, 32).folded(4)], ids=str)
def test_load_behind_the_end(layout):
    """Of no rows at all, as those of an empty segment after all others."""
    x, y = numbers((8, 16)), poisoned((16, 16))

    def kernel(x, y):
        save(y, load(x[8:9], layout, 0), 0)

    launch(kernel, (1, 1, 1), 32, 0, x, y)
    assert not y.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", ["contiguous", "pitched", "every other", "transposed", "backwards", "broadcast"])
def test_any_strides(dtype, strides):
    x = {
        "contiguous": lambda: numbers((32, 32), dtype),
        "pitched": lambda: numbers((32, 37), dtype)[:, :32],
        "every other": lambda: numbers((64, 64), dtype)[::2, ::2],
        "transposed": lambda: numbers((32, 32), dtype).T,
        "backwards": lambda: numbers((32, 32), dtype)[::-1, ::-1],
        "broadcast": lambda: np.broadcast_to(numbers((1, 32), dtype), (32, 32)),
    }[strides]()
    y = np.zeros((32, 32), dtype)
    launch(copier(ALL_LAYOUTS["simt in vectors"]), (1, 1, 1), THREADS, 0, as_device(x), as_device(y), np.int32(0))
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cols", "nbytes"), [(32, 16), (24, 16), (28, 8), (26, 4)])
def test_promised_alignment(dtype, cols, nbytes):
    x, y = numbers((40, cols), dtype), np.zeros((40, cols), dtype)
    nbytes = max(nbytes, x.itemsize)
    launch(copier(ALL_LAYOUTS["copy_layout"], nbytes), (1, 1, 1), THREADS, 0, as_device(x), as_device(y), np.int32(8))
    np.testing.assert_array_equal(y[8:], x[8:])
    assert not y[:8].any()


@compiled_only
@pytest.mark.parametrize(("dtype", "instruction"), [(np.float32, r"v4\.[bf]32"), (np.float64, r"v2\.[bf]64"),
                                                    (np.float16, r"v4\.[bu]32")])  # fmt: skip
def test_promised_alignment_moves_vectors(dtype, instruction):
    x = numbers((32, 32), dtype)
    vectors = ptx_of(copier(ALL_LAYOUTS["copy_layout"], 16), THREADS, x, x, np.int32(0))
    assert vectors.count(rf"ld\.global\.({instruction})") == 32 * 32 * x.itemsize // 16 // THREADS
    assert vectors.count(rf"st\.global\.({instruction})") == 32 * 32 * x.itemsize // 16 // THREADS
    single = ptx_of(copier(ALL_LAYOUTS["copy_layout"]), THREADS, x, x, np.int32(0))
    assert single.count(r"ld\.global\.v") == single.count(r"st\.global\.v") == 0


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in DTYPES for b in DTYPES if a != b])
def test_save_rounds_to_what_memory_holds(source, target):
    x, y = numbers((32, 32), source), np.zeros((32, 32), target)
    x[0, :4] = 0, np.inf, -np.inf, np.nan
    launch(copier(ALL_LAYOUTS["simt"]), (1, 1, 1), THREADS, 0, as_device(x), as_device(y), np.int32(0))
    between = np.float32 if {source, target} & {np.float16, bfloat16} else source
    np.testing.assert_array_equal(y.astype(np.float64), x.astype(between).astype(target).astype(np.float64))


@pytest.mark.parametrize("cc", [(7, 5), (9, 0, "a")])
def test_bfloat16_rounds_to_even_everywhere(cc):
    bits = np.arange(0, 2**32, 2**22 + 1, dtype=np.uint64)[:1024].astype(np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF  # two ties, one above, one that overflows
    x, y = bits.view(np.float32).reshape(32, 32), np.zeros((32, 32), bfloat16)
    launch(copier(ALL_LAYOUTS["simt"]), (1, 1, 1), THREADS, 0, x, as_device(y), np.int32(0), cc=cc)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(bfloat16).astype(np.float32))


def test_four_axes():
    x = numbers((2, 3, 40, 32)).swapaxes(0, 1)
    y = poisoned(x.shape)
    layout = ALL_LAYOUTS["simt"]

    def copy(source, target):
        batch, head, first = block_index(2), block_index(1), block_index() * 32
        save(target[batch, head], load(source[batch, head], layout, first), first)

    launch(copy, (2, 2, 3), THREADS, 0, x, y)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_vectors(layout):
    rows, cols, down, across = numbers(25), numbers(60, seed=1)[::2], poisoned(25), poisoned(30)
    ROWS, COLS = layout.row_vector(), layout.col_vector()

    def copy(rows, cols, down, across):
        save(down, load(rows, ROWS, 0), 0)
        save(across, load(cols, COLS, 5), 5)

    launch(copy, (1, 1, 1), THREADS, 0, rows, cols, down, across)
    np.testing.assert_array_equal(down, rows)
    np.testing.assert_array_equal(across[5:], cols[5:])
    assert np.isnan(across[:5]).all()


@pytest.mark.parametrize("kind", ["one for all", "one for each column"])
@pytest.mark.parametrize("layout", ["mma", "simt"])
def test_has_bits(layout, kind):
    layout, one = ALL_LAYOUTS[layout], kind == "one for all"
    x = np.random.default_rng(0).integers(0, 256, (20, 3), np.uint8)
    y = np.ones((32, 32), np.bool_)

    def pick(source, target):
        j = col_index(layout, -2)
        save(target, has_bits(source, row_index(layout, 0), j >> 3, 0x41 if one else 1 << (j & 7)), 0)

    launch(pick, (1, 1, 1), THREADS, 0, x, y)
    i, j = np.arange(32)[:, None], np.arange(-2, 30)[None, :]
    inside = (i < 20) & (j >= 0) & (j < 24)
    found = x[np.minimum(i, 19), np.clip(j >> 3, 0, 2)] & (0x41 if one else 1 << (j & 7))
    np.testing.assert_array_equal(y, inside & (found != 0))


def test_copying_deals_small_tiles_to_part_of_the_threads():
    layout = copy_layout(4, 8, 64, 1)
    x, z = numbers(SHAPE)[:4, :8].copy(), np.zeros((4, 8), np.float32)

    def kernel(x, z):
        save(z, load(x, layout, 0), 0)

    launch(kernel, (1, 1, 1), 64, 0, x, z)
    np.testing.assert_array_equal(z, x)


def test_alignment_of_arrays():
    x = np.zeros((4, 6, 64), np.float32)
    start = x.ctypes.data
    assert start % 16 == 0

    def alignment(view):
        return Alignment.of(view).nbytes

    assert alignment(x) == 16
    assert alignment(x.swapaxes(0, 1)) == 16
    assert alignment(x[..., :6]) == 8
    assert alignment(x[..., 1:5]) == 4
    assert alignment(x.swapaxes(1, 2)) == 0
    assert alignment(x[..., ::2]) == 0
    assert alignment(x[..., ::-1]) == 0
    assert alignment(np.broadcast_to(x[:, :1], x.shape)) == 16
    assert alignment(x.astype(np.float16)[..., :33]) == 2


@compiled_only
def test_offsets_have_64_bits():
    """Rows 2**33 bytes apart: only addresses are looked at, by an interpreter whose arrays lie far apart."""
    from tests.tools.assembler import compile_ptx
    from tests.tools.ptx import GLOBAL_BASE, Kernel, Memory

    layout = copy_layout(4, 8, 32, 1)
    step = 2**33

    def copy(source, target):
        save(target, load(source, layout, 0), 0)

    x = numbers((4, 8))
    ptx = compile_ptx(copy, (x, x), 32)

    class Folded(Memory):
        """All rows of the array 2**33 bytes apart in one small memory."""

        def places(self, address, size, what, read, parts=1):
            row, within = np.divmod(address.astype(np.int64) - GLOBAL_BASE, step)
            return super().places(GLOBAL_BASE + within + 32 * row, size, what, read, parts)

    memory = Folded(1 << 14, GLOBAL_BASE)
    at, _ = memory.add(x)
    out, read = memory.add(poisoned((4, 8)), written=False)
    arrays = [[0, 0, 32, 4, at, 4, 8, step, 4], [0, 0, 32, 4, out, 4, 8, step, 4]]
    Kernel(ptx).run((1, 1, 1), 32, 0, [np.int64(v) for array in arrays for v in array], memory)
    np.testing.assert_array_equal(read(), x)


def test_a_folded_layout_repeats_a_matrix():
    """And counts its rows in each of its tiles."""
    LAYOUT = mma(16, 16, 32).folded(4)
    x, y, rows, tiles = numbers((4, 16)), poisoned((16, 16)), np.zeros((16, 16), np.int32), np.zeros((16, 16), np.int32)

    def kernel(x, y, rows, tiles):
        save(y, load(x, LAYOUT, 0), 0)
        save(rows, row_index(LAYOUT, 3) + col_index(LAYOUT, 0) * 0, 0)
        save(tiles, fold_index(LAYOUT) + col_index(LAYOUT, 0) * 0, 0)

    launch(kernel, (1, 1, 1), 32, 0, x, y, rows, tiles)
    np.testing.assert_array_equal(y, np.tile(x, (4, 1)))
    np.testing.assert_array_equal(rows[:, 0], 3 + np.arange(16) % 4)
    np.testing.assert_array_equal(tiles[:, 0], np.arange(16) // 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cols", "nbytes"), [(32, 16), (27, 0)])
def test_rows_by_number(dtype, cols, nbytes):
    """To other rows, of any order; those that do not exist are read as 0, and not written."""
    layout, ROWS_OF = ALL_LAYOUTS["copy_layout"], Alignment(nbytes)
    ROWS = layout.row_vector()
    x, y, z = numbers((40, cols), dtype), np.full((40, cols), 99, dtype), np.full(40, 99, dtype)
    sources, targets = np.random.default_rng(0).permutation(np.arange(-4, 44)[:, None] * [1, 1], axis=0)[:32].T.copy()

    def kernel(x, y, z, sources, targets):
        one, other = load(sources, ROWS, 0), load(targets, ROWS, 0)
        scatter(aligned(y, ROWS_OF), gather(aligned(x, ROWS_OF), layout, one), other)
        scatter(z, gather(x[:, 1], ROWS, one), other)

    given = map(as_device, (x, y, z))
    launch(kernel, (1, 1, 1), THREADS, 0, *given, *(a.astype(np.int32) for a in (sources, targets[::-1])))
    wanted = np.full((40, cols), 99, dtype)
    for one, other in zip(sources, targets[::-1]):
        if 0 <= other < 40:
            wanted[other] = x[one] if 0 <= one < 40 else 0
    np.testing.assert_array_equal(y[:, :32], wanted[:, :32])
    touched = wanted[:, 1] != 99
    np.testing.assert_array_equal(z, np.where(touched, wanted[:, 1], z.dtype.type(99)))


FAULTS = {
    "b.and_(mine, target.has_row(row))": "mine",
    'b.icmp_unsigned("<", row, target.rows)': 'b.icmp_signed("<", row, target.rows)',
    'row_inside, values = b.icmp_unsigned("<", row, source.rows), []': "row_inside, values = I1(1), []",
    'or getattr(matrix, "fold", 0) else layout.indices': 'or getattr(matrix, "fold", 0) else layout',
    'icmp_signed("<", col, target.cols)': 'icmp_signed("<=", col, target.cols)',
    'icmp_unsigned("<", col, source.cols)': 'icmp_unsigned("<=", col, source.cols)',
    "test_load_behind_the_end": {
        "array[rows, cols] if inside.all() else elements(array, inside, rows, cols)": "array[rows, cols]",
    },
}

"""Which arrays the gradients of a score are summed in, and what their kernels are given of them."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import numbattn as na
from numbattn.cuda.kernels.shared.exact_sums import SIZE
from numbattn.cuda.kernels.shared.shares import score_matrix, share_of
from numbattn.cuda.passes import plans
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.words.steps import At
from tests.cuda.works import HOPPER, array, kernels

OFFSETS, UNEQUAL = np.array([0, 300, 1000], np.int32), np.array([0, 500, 1000], np.int32)
AMPERE, GRADIENT, PARTIAL = DEVICES[8, 0], "gradient of score 0", "partial gradient of score 0"


def backward(q, k, score, device=AMPERE, **options):
    return plans(device, q, k, k, score=score, **options)[1]


def view_of(step, name):
    (found,) = (x.view for x in step.arguments if isinstance(x, At) and x.array == name)
    return found


def place(view, *numbers):
    """Where an element, a matrix or a batch begins in its array."""
    return view.pointer + sum(number * stride for number, stride in zip(numbers, view.strides))


# ------------------------------------------------------------------------------------- who is summed, and where it goes
def served_by(planned, own):
    """{where a matrix of the gradient begins: numbers of the score matrices that are summed into it}."""
    sums, wanted = {}, defaultdict(list)
    for step in planned.steps:
        if step.key.name == "bias_gradient":
            to, do = view_of(step, own), view_of(step, "do")
            *_, own_batches, own_heads, adds = step.arguments
            (batches, heads, parts, _, _), (_, _, rows, cols) = to.shape, do.shape
            for number in range(own_batches * own_heads * parts):
                share = share_of(number, parts, own_batches, own_heads, batches, heads)
                found = sums.setdefault(place(to, share.own_batch, share.own_head, share.part), [])
                if not adds:
                    found.clear()
                for each in range(share.first, share.end):
                    found.append(place(do, *score_matrix(share, each)) // (rows * cols * do.itemsize))
    if own == GRADIENT:
        return sums
    partial, whole = (view_of(planned.steps[-1], name) for name in (PARTIAL, GRADIENT))
    for matrix, part in product(*map(range, partial.shape[:2])):
        wanted[place(whole, matrix)] += sums.pop(place(partial, matrix, part))
    assert not sums
    return wanted


LEADS = (), (8,), (1, 1), (3, 1), (3, 8), (2, 1, 1), (2, 1, 8), (2, 3, 1), (2, 3, 8), (1, 3, 8)


@pytest.mark.parametrize(("n", "multiprocessors"), [(20, 108), (100, 108), (100, 1)])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_every_score_matrix_is_summed_once(lead, n, multiprocessors):
    """Into the matrix that is broadcast to it: whole or in parts, by one launch or several."""
    q, k = (array(2, 3, heads, n, 64, dtype=np.float32) for heads in (8, 4))
    device = AMPERE._replace(multiprocessors=multiprocessors)
    planned = backward(q, k, na.Bias(array(*lead, n, n, dtype=np.float32)), device)
    found = served_by(planned, PARTIAL if PARTIAL in [x.name for x in planned.temporaries] else GRADIENT)
    matrices = np.broadcast_to(np.arange(np.prod(lead, dtype=int)).reshape(lead), (2, 3, 8)).ravel()
    assert {at: sorted(served) for at, served in found.items()} == {
        number * n * n * 4: np.flatnonzero(matrices == number).tolist() for number in {*matrices.tolist()}
    }


@pytest.mark.parametrize(("batch", "n", "own_heads", "parts"), [
    (1, 32, 8, 1), (7, 32, 8, 7),                               # as many as there are
    (4096, 32, 8, 98), (4096, 32, 1, 781), (1000, 256, 8, 2),   # that are there at once: at most 792, and 264
    (1000, 350, 8, 4), (1000, 1250, 8, 1),                      # that fill it evenly: of 288 blocks, and 3200
])  # fmt: skip
def test_what_a_batch_shares_is_summed_in_as_many_parts_as_fill_the_gpu(batch, n, own_heads, parts):
    q, k = (array(batch, heads, n, 64, dtype=np.float32) for heads in (8, 4))
    planned = backward(q, k, na.Bias(array(1, own_heads, n, n, dtype=np.float32)), HOPPER)
    shapes = {x.name: x.shape for x in planned.temporaries if x.name.endswith(GRADIENT)}
    assert shapes == ({PARTIAL: (1, own_heads, parts, n, n)} if parts > 1 else {})
    (step,) = (x for x in planned.steps if x.key.name == "bias_gradient")
    assert step.blocks == parts * own_heads * -(-n // step.tiles.tile_m) * -(-n // step.tiles.tile_n)
    assert kernels(planned)[-1] == ("sum_parts" if parts > 1 else "bias_gradient")


TABLE = ["sum_parts", "table_gradient"]


@pytest.mark.parametrize(("sizes", "dtype", "score", "added"), [
    ((256, 256, 128), np.float64, na.Bias(np.zeros((1, 8, 256, 256))), ["sum_parts"]),
    ((200, 256, 128), np.float32, na.Bias(np.zeros((200, 256))), ["sum_parts"]),
    ((200, 256, 128), np.float32, [na.Sink(np.zeros(8)), na.Bias(np.zeros((200, 256)))], ["sum_parts"]),
    ((100, 100, 64), np.float32, na.RelativeBias(np.zeros((8, 9))), TABLE),
    ((100, 100, 64), np.float32, na.Bias(np.zeros((8, 1, 100))), ["sum_parts"]),
    ((100, 100, 128), np.float16, na.Bias(np.zeros((100, 100))), None),     # of tensor cores' kernels
    ((100, 257, 64), np.float32, na.Bias(np.zeros((100, 257))), None),      # long
    ((100, 100, 300), np.float32, na.Bias(np.zeros((100, 100))), None),     # by slices
    ((100, 100, 64), np.float32, na.Bias(np.zeros((16, 1, 100, 100))), None),
    ((100, 100, 64), np.float32, [na.Bias(np.zeros((100, 100))), na.Softcap(2.0)], None),
])  # fmt: skip
def test_what_short_sequences_share_is_summed_in_the_backward_kernels(sizes, dtype, score, added):
    m, n, d = sizes
    q, k = (array(16, 8, rows, d, dtype=dtype) for rows in (m, n))
    found = kernels(backward(q, k, score))
    assert (found == ["delta", "backward_kv", "backward_q", *added]) if added else "bias_gradient" in found


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_table_that_is_read_by_segment_is_not_made_of_sums_of_dS(deterministic):
    q, offsets = array(16, 8, 100, 64, dtype=np.float32), np.array([0, 40, 100], np.int32)
    segments = na.Segments(offsets, np.array([0, 30, 100], np.int32))
    planned = backward(q, q, na.RelativeBias(np.zeros((8, 9))), mask=segments, deterministic=deterministic)
    assert "sums of dS" not in [x.name for x in planned.temporaries]
    assert "function_gradient" in kernels(planned)


@pytest.mark.parametrize(("batch", "heads", "heads_k"), [((1,), 8, 8), ((), 8, 8), ((16,), 8, 2)])
def test_one_element_or_heads_that_share_keys_have_a_kernel_of_their_own(batch, heads, heads_k):
    q, k = (array(*batch, x, 100, 64, dtype=np.float32) for x in (heads, heads_k))
    assert "bias_gradient" in kernels(backward(q, k, na.Bias(np.zeros((8, 100, 100), np.float32))))


@pytest.mark.parametrize(("batch", "heads", "own_heads", "parts"), [
    ((16,), 8, 8, (8, 8)), ((16,), 8, 1, (1, 64)), ((3,), 8, 8, (8, 3)), ((16,), 24, 24, (24, 2)),
    ((2, 3), 8, 8, (8, 6)),
])  # fmt: skip
def test_blocks_have_sums_of_their_own(batch, heads, own_heads, parts):
    """Of two tiles a head, as many as fill a GPU; or as there are elements of the batch."""
    q = array(*batch, heads, 256, 64, dtype=np.float32)
    planned = backward(q, q, na.Bias(array(own_heads, 256, 256, dtype=np.float32)), HOPPER)
    (sums,) = (x for x in planned.temporaries if x.name == PARTIAL)
    assert (sums.shape, sums.is_zero) == ((*parts, 256, 256), True)
    (step,) = (x for x in planned.steps if x.key.name == "backward_q")
    assert step.blocks == 2 * np.prod(parts)
    view, (own, each) = view_of(step, PARTIAL), parts
    assert view.shape == (each, own, 256, 256)
    assert place(view, each - 1, own - 1) == (own * each - 1) * 256 * 256 * 4


def test_launches_of_a_pass_add_to_the_same_sums():
    """Elements of the batch, in two launches, since their axes do not merge."""
    q = array(3, 2, 8, 100, 64, dtype=np.float32).swapaxes(0, 1)
    planned = backward(q, q, na.Bias(array(8, 100, 100, dtype=np.float32)), HOPPER)
    steps = [x for x in planned.steps if x.key.name == "backward_q"]
    assert len(steps) > 1
    assert len({view_of(step, PARTIAL) for step in steps}) == 1
    assert kernels(planned)[-1] == "sum_parts"


# -------------------------------------------------------------------------------------------------- what is summed in
@pytest.mark.parametrize(("shape", "dtype", "sums"), [
    ((2, 8, 100, 80), np.float16, None), ((8, 100, 80), np.float32, None),
    ((8, 100, 1), np.float32, None), ((8, 1, 80), np.float32, (8, 64, 80)), ((80,), np.float32, (64, 80)),
    ((1, 80), np.float16, (64, 80)), ((8, 1, 1), np.float32, (8, 100, 1)), ((2, 1, 1, 1), np.float32, (2, 1, 100, 1)),
], ids=str)  # fmt: skip
def test_what_a_bias_is_summed_in(shape, dtype, sums):
    """In the gradient itself if it has all queries; else by row of a tile, if one row serves all, or by query."""
    q, k = (array(2, heads, n, 64, dtype=np.float32) for heads, n in ((8, 100), (4, 80)))
    planned = backward(q, k, na.Bias(array(*shape, dtype=dtype)))
    found = {x.name: (x.shape, x.dtype) for x in planned.temporaries}
    assert found.get("sums of score 0") == (sums and (sums, np.float32))
    target = GRADIENT if sums is None else "sums of score 0"
    rows, cols = (shape if sums is None else sums)[-2:]
    (step,) = (x for x in planned.steps if x.key.name == "bias_gradient")
    name = f"partial {target}" if f"partial {target}" in found else target
    assert view_of(step, name).shape[-2:] == (rows, cols)


def test_what_launches_add_to_is_rounded_once():
    """A gradient of half precision over several batch axes is summed in float32, and rounded in the end."""
    q, score = array(2, 3, 8, 100, 64), na.Bias(array(3, 1, 100, 100))
    planned = backward(q, q, score, dropout=na.Dropout(0.1, 1))
    sums = next(x for x in planned.temporaries if x.name.endswith("sums of score 0"))
    assert sums.dtype == np.float32


@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=str)
def test_diagonals_lie_skewed_in_their_scratch(device):
    """Element i, j of a tile where column tile_m - 1 - i + j of row i is: columns are diagonals."""
    q = array(2, 8, 200, 64)
    planned = backward(q, q, na.RelativeBias(array(8, 9, dtype=np.float32)), device, deterministic=True)
    (step,) = (x for x in planned.steps if x.key.name.endswith("diagonal_sums"))
    tiles = step.tiles
    skewed, plain = (x.view for x in step.arguments if isinstance(x, At) and x.array == "scratch of diagonals")
    (scratch,) = (x for x in planned.temporaries if x.name == "scratch of diagonals")
    assert scratch.shape == plain.shape
    assert scratch.is_zero
    assert step.blocks <= plain.shape[0]
    memory = np.arange(np.prod(scratch.shape), dtype=scratch.dtype)
    at, whole = (as_strided(memory[x.pointer // 4 :], x.shape, x.strides) for x in (skewed, plain))
    i, j = np.ogrid[: tiles.tile_m, : tiles.tile_n]
    np.testing.assert_array_equal(at, whole[:, i, tiles.tile_m - 1 - i + j])


def test_what_is_cut_in_diagonals_has_room_for_all_of_them():
    """Of so many queries and keys each pair is on one of them."""
    m, n = 300, 130
    q, k = (array(2, 8, length, 128, dtype=np.float32) for length in (m, n))
    planned = backward(q, k, na.RelativeBias(array(8, 9, dtype=np.float32)))
    (step,) = (x for x in planned.steps if x.key.name == "diagonal_sums")
    sums, partial = (next(x for x in planned.temporaries if x.name == name)
                     for name in ("sums of score 0", "partial sums of score 0"))  # fmt: skip
    tile_m, tile_n = step.tiles.tile_m, step.tiles.tile_n
    assert tile_m > tile_n
    found = {tile_m // tile_n * -i + j for i, j in product(range(-(-m // tile_m)), range(-(-n // tile_n)))}
    rows = tile_m // tile_n + 1
    assert partial.shape[-2:] == (rows, (max(found) - min(found) + rows) * tile_n)
    assert partial.is_zero                                      # rows begin and end with what is in no diagonal
    assert sums.shape == (8, m + n - 1)


def test_what_tma_cannot_move_is_summed_as_it_lies():
    """After kernels for small matrices, which take the arrays of a call as they are."""
    q, k = array(3, 4, 100, 11), array(3, 2, 100, 11)
    planned = backward(q, k, na.RelativeBias(array(1, 3, dtype=np.float32)), HOPPER)
    assert kernels(planned) == ["delta", "small_backward", "diagonal_sums", "sum_parts"]
    assert not planned.stand_ins


@pytest.mark.parametrize(("mask", "offset", "names", "shape"), [
    (None, 5, ["hopper_diagonal_sums", "sum_parts"], ()),
    (None, np.zeros((2, 1), int), ["hopper_diagonal_sums", "sum_parts"], (2, 1)),
    (na.Segments(OFFSETS), None, ["diagonal_sums", "sum_parts"], ()),
    (na.Segments(OFFSETS, UNEQUAL), None, ["function_gradient"], (1, 9 * SIZE)),
], ids=["number", "matrix", "equal", "query"])  # fmt: skip
def test_the_gradient_of_a_table_by_its_offset(mask, offset, names, shape):
    """Matrices of different offsets have sums of their own. Where queries have, elements are read one by one."""
    q = array(2, 8, 1000, 64)
    planned = backward(q, q, na.RelativeBias(np.zeros(9), offset=offset), HOPPER, mask=mask, deterministic=True)
    assert kernels(planned)[-len(names) :] == names
    (sums,) = (x.shape for x in planned.temporaries if x.name == "sums of score 0")
    assert sums[: len(shape)] == shape


@pytest.mark.parametrize(("part", "strides"), [
    (na.Alibi(np.zeros(())), (0, 0)), (na.Alibi(np.zeros(8)), (0, 1)), (na.Alibi(np.zeros((2, 8))), (8, 1)),
    (na.RelativeBias(np.zeros(9)), (0, 0)), (na.RelativeBias(np.zeros((2, 1, 9))), (9, 0)),
], ids=str)  # fmt: skip
def test_what_is_summed_beside_other_gradients_has_sums_by_matrix(part, strides):
    """As far as matrices do not share them."""
    q = array(2, 8, 1000, 64)
    planned = backward(q, q, part, HOPPER)
    (step,) = (x for x in planned.steps if x.key.name == "hopper_backward_kv")
    view, elements = view_of(step, PARTIAL), part._array.size
    assert view.shape[:2] == (2, 8)
    assert view.shape[3] == 9 ** part._own_axes
    assert view.strides == (*[4 * stride for stride in strides], 4 * elements, 4)


FAULTS = {
    "View((tiles.tile_m - 1) * size, size": "View(tiles.tile_m * size, size",
    "(step, pitch - size, size)": "(step, pitch + size, size)",
    "int(pointer in seen)": "0",
    "batch if strides[0] else 1, heads if strides[1] else 1": "batch, heads",
    "cols == sizes[1] and rows < sizes[0]": "rows < sizes[0]",
    "sums_rows or rounded_twice or not fits": "sums_rows or not fits",
    "and len(planner.axes) > 1": "",
    "tiles.tile_m // tiles.tile_n * (m_blocks - 1) + n_blocks": "m_blocks + n_blocks - 1",
    "own * blocks, piece.batch": "blocks, piece.batch",
    "kind.gradient == ENTRIES and kind.offset == ALIGNED": "False",
    "lead = np.broadcast_shapes(lead, planner.layouts[array_of_offset(number)].shape)": "pass",
    "filter(fits, routes)": "routes",
    "cuda/words/spec.py": {
        "* -(-elements // parts))": "* elements // parts)",
        "max(source.blocks, THREADS // source.threads)": "THREADS // source.threads",
        " if blocks < 2 * room else 1), elements)": ", 1), elements)",
        "blocks, batches)": "blocks, batches + 1)",
    },
    "cuda/kernels/hopper/test_score_gradient.py": {"m_blocks * tiles.tile_m - problem.seqlen_q": "0"},
    "test_small.py::test_tables_and_offsets_that_heads_share": {
        "matrices, name = math.prod(heads) // tables": "matrices, name = 1",
        "of_heads.strides[-1:] * 2": "(0, 0)",
    },
}

"""Neighbourhoods on grids, beside the rule in plain Python."""

import pickle
from itertools import product

import numpy as np
import pytest

import numbattn as na
from numbattn import distributed
from tests.accuracy import check, random
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.launch import world_of


def windows(n, window, dilation, stride, causal, edges):
    """For each token of an axis its i' and {j: j' - i'} of the keys that it sees, by the rule of `Grid.window`."""
    seen = []
    for i in range(n):
        r, at = i % dilation, i // dilation
        count = len(range(r, n, dilation))
        if causal:
            leader = min(at // stride * stride + stride - 1, count - 1)
            keys = {c: c for c in range(max(leader - window + 1, 0), at + 1)}
        else:
            first = min(at // stride * stride + stride // 2, count - 1) - window // 2
            if edges == "moved":
                first = min(max(first, 0), count - window)
            keys = {c % count if edges == "periodic" else c: c for c in range(first, first + window)}
        seen.append({c * dilation + r: x - at for c, x in keys.items() if 0 <= c < count})
    return seen


def expected(shape, extra, axes):
    """The mask, and the offsets along each axis, of all tokens."""
    tables = [windows(n, *axis) for n, axis in zip(shape, axes)]
    at = list(np.ndindex(*shape))
    mask, offsets = np.ones((extra + len(at),) * 2, bool), {}
    for (i, x), (j, y) in product(enumerate(at, extra), repeat=2):
        found = [table[a].get(b) for table, a, b in zip(tables, x, y)]
        mask[i, j] = None not in found
        if mask[i, j]:
            offsets[i, j] = found
    return mask, offsets


CASES = {  # shape, extra, then of each axis window, dilation, stride, causal, edges
    "moved": ((13,), 0, [(4, 1, 1, False, "moved")]),
    "cut": ((13,), 2, [(5, 1, 1, False, "cut")]),
    "periodic": ((13,), 0, [(5, 1, 1, False, "periodic")]),
    "periodic, dilated": ((14,), 1, [(4, 3, 2, False, "periodic")]),
    "whole axis": ((6,), 0, [(6, 1, 3, False, "periodic")]),
    "causal": ((13,), 0, [(4, 2, 3, True, "moved")]),
    "a long axis": ((1, 515, 2), 0, [(1, 1, 1, False, "moved"), (9, 1, 1, False, "moved"), (1, 1, 1, False, "cut")]),
    "two axes": ((7, 6), 1, [(3, 2, 2, False, "moved"), (4, 1, 1, False, "cut")]),
    "one causal": ((5, 7), 0, [(3, 1, 2, True, "cut"), (3, 2, 3, False, "moved")]),
    "mixed": ((5, 8), 3, [(5, 1, 1, False, "periodic"), (3, 1, 3, False, "moved")]),
    "three axes": ((3, 4, 5), 0, [(3, 1, 1, False, "moved"), (2, 2, 1, False, "moved"), (2, 1, 1, True, "moved")]),
    "a torus": ((3, 4, 4), 1, [(2, 1, 1, False, "periodic"), (3, 1, 2, False, "periodic"), (2, 2, 1, False, "cut")]),
}
NAMES = "window", "dilation", "stride", "causal", "edges"


@pytest.fixture(params=CASES)
def case(request):
    """A Grid, the options of its window, and what it shows."""
    shape, extra, axes = CASES[request.param]
    options = dict(zip(NAMES, map(list, zip(*axes))))
    return na.Grid(shape, extra), options.pop("window"), options, *expected(shape, extra, axes)


def test_who_sees_whom(case):
    grid, window, options, mask, _ = case
    np.testing.assert_array_equal(grid.window(window, **options).dense(*mask.shape), mask)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_bias_by_offset_and_its_gradient(rng, case, heads):
    """As a Bias that has the table's numbers, whose gradients the table's are sums of."""
    grid, window, options, mask, offsets = case
    table = rng.standard_normal((heads, *(2 * w - 1 for w in window)))
    places = {pair: (slice(None), *(x + w - 1 for x, w in zip(of, window))) for pair, of in offsets.items()}
    bias = np.zeros((2, *mask.shape))
    for (i, j), place in places.items():
        bias[:, i, j] = table[place]
    q, k, v, do = rng.standard_normal((4, 2, len(mask), 5))
    score = grid.relative_bias(table, **options)
    o, backprop = na.attention_vjp(q, k, v, mask=grid.window(window, **options), score=score)
    wanted_o, wanted = na.attention_vjp(q, k, v, mask=mask[None], score=na.Bias(bias))
    (*grads, (dtable, _, _)), (*wanted_grads, (dbias,)) = ((*x, x.score) for x in (backprop(do), wanted(do)))
    for got, want in zip((o, *grads), (wanted_o, *wanted_grads)):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    sums = np.zeros((2, *table.shape[1:]))
    for (i, j), place in places.items():
        sums[place] += dbias[:, i, j]
    np.testing.assert_allclose(dtable, sums.reshape(heads, -1, *table.shape[1:]).sum(1), rtol=1e-11, atol=1e-12)


def test_precision(rng):
    grid = na.Grid((8, 20), extra=1)
    table = rng.standard_normal((2, 9, 13), dtype=np.float32)
    q, k, v = rng.standard_normal((3, 1, 2, 161, 8), dtype=np.float32)
    check(q, k, v, rng, mask=grid.window((5, 7)), score=grid.relative_bias(table))


def test_beside_other_masks_and_scores(rng):
    grid, (q, k, v) = na.Grid((6, 6)), rng.standard_normal((3, 1, 2, 36, 4))
    for mask in (grid.window(3) & na.Causal(), grid.window(3) | na.First(2)):
        check(q, k, v, rng, mask=mask, score=[na.Softcap(5.0), grid.relative_bias(np.zeros((1, 5, 5)))])


def test_a_window_of_the_whole_grid_is_dense_attention(rng):
    q, k, v = rng.standard_normal((3, 1, 24, 4))
    np.testing.assert_array_equal(na.attention(q, k, v, mask=na.Grid((4, 6)).window((4, 6))), na.attention(q, k, v))


def test_one_axis_with_cut_edges_is_a_window():
    mask = na.Grid((30,)).window(7, edges="cut")
    np.testing.assert_array_equal(mask.dense(30, 30), na.Window(3, 3).dense(30, 30))


@pytest.mark.parametrize("extra", [0, 2])
def test_packed_grids(rng, extra):
    """As each by itself."""
    shapes, options = [(4, 5), (6, 3), (9, 16)], {"edges": ("periodic", "moved"), "stride": (2, 1)}
    tokens, table = [np.prod(shape) + extra for shape in shapes], rng.standard_normal((2, 5, 5))

    def results(shape, *arrays):
        grid = na.Grid(shape, extra)
        score = grid.relative_bias(table, **options)
        o, backprop = na.attention_vjp(*arrays[:3], mask=grid.window(3, **options), score=score)
        grads = backprop(arrays[3])
        return o, *grads, grads.score[0]

    arrays, ends = rng.standard_normal((4, 2, sum(tokens), 4)), np.cumsum(tokens)
    *found, dtable = results(shapes, *arrays)
    alone = [results(shape, *of) for shape, of in zip(shapes, zip(*[np.split(x, ends[:-1], axis=1) for x in arrays]))]
    for got, want in zip(found, zip(*alone)):
        np.testing.assert_allclose(got, np.concatenate(want, axis=1), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dtable, sum(of[-1] for of in alone), rtol=1e-10, atol=1e-12)


def test_masks_are_kept_and_copied(rng):
    grid, (q, k, v) = na.Grid((4, 5)), rng.standard_normal((3, 1, 20, 4))
    mask = grid.window(3, edges=("cut", "periodic"))
    assert grid.window((3, 3), edges=["cut", "periodic"]) is mask
    assert not mask.arrays[0].flags.writeable
    again = pickle.loads(pickle.dumps(mask))
    np.testing.assert_array_equal(na.attention(q, k, v, mask=again), na.attention(q, k, v, mask=mask))
    for each in (mask, again):
        with pytest.raises(ValueError, match="mask: got 20 queries and 10 keys, expected 20 of each"):
            na.attention(q, k[:, :10], v[:, :10], mask=each)


@pytest.mark.parametrize(("heads", "tokens", "message"), [
    (3, 20, "score: got 3 heads, expected at most 2, as many as the table has"),
    (2, 21, "score: got 21 queries and 21 keys, expected at most 20 of each, as many as the grid has"),
])  # fmt: skip
def test_a_bias_for_other_calls(rng, heads, tokens, message):
    score, q = na.Grid((4, 5)).relative_bias(np.zeros((2, 5, 5))), rng.standard_normal((heads, tokens, 4))
    for each in (score, pickle.loads(pickle.dumps(score))):
        with pytest.raises(ValueError, match=message):
            na.attention(q, q, q, score=each)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: na.Grid(()), "Grid shape: got 0 axes, allowed 1 to 3"),
    (lambda: na.Grid((1, 2, 3, 4)), "Grid shape: got 4 axes, allowed 1 to 3"),
    (lambda: na.Grid((3, 0)), "Grid shape: got 0, allowed 1 or more"),
    (lambda: na.Grid([(3, 4), (5,)]), "Grid shape[1]: got 1 axes, expected 2, as shape[0] has"),
    (lambda: na.Grid([(3, 4), 5]), "Grid shape[1]: got 5, expected one to 3 integers"),
    (lambda: na.Grid([(8, 8), (8, 4)]).window(5),
     "window of axis 1 of shape[1]: got 5 with dilation 1, allowed 1 to 4: window * dilation is at most 4"),
    (lambda: na.Grid((2**20, 1, 1)), "Grid shape: got 1048576 tokens of an axis, or grids, allowed at most 1048574"),
    (lambda: na.Grid(3), "Grid shape: got 3, expected one to 3 integers"),
    (lambda: na.Grid((3, 2.0)), "Grid shape: got tuple, expected one to 3 integers"),
    (lambda: na.Grid((3,), extra=-1), "Grid extra: got -1, allowed 0 or more"),
    (lambda: na.Grid((2**16, 2**16)), "Grid shape: got 4294967296 tokens, allowed at most 2147483647"),
    (lambda: na.Grid((8,)).relative_bias(np.zeros((2, 5), np.float16)),
     "relative_bias table: got an array of float16, expected float32 or float64"),
    (lambda: na.Grid((8, 9)).window((3, 5), dilation=2),
     "window of axis 1: got 5 with dilation 2, allowed 1 to 4: window * dilation is at most 9"),
    (lambda: na.Grid((8,)).window(3, stride=4), "stride of axis 0: got 4, allowed 1 to 3"),
    (lambda: na.Grid((8,)).window((3, 3)), "window: got 2 values, expected one, or 1, one for each axis"),
    (lambda: na.Grid((8,)).window(3, causal=1), "causal of axis 0: got 1, expected True or False"),
    (lambda: na.Grid((8,)).window(3, edges="wrap"),
     "edges of axis 0: got 'wrap', allowed are 'moved', 'cut', 'periodic'"),
    (lambda: na.Grid((8,)).window(3, causal=True, edges="periodic"),
     "edges of axis 0: got 'periodic' along a causal axis, allowed are 'moved' and 'cut'"),
    (lambda: na.Grid((8, 8)).relative_bias(np.zeros((2, 5))),
     "relative_bias table: got the shape (2, 5), expected (heads, 2 * window - 1 of axis 0, 2 * window - 1 of axis"),
    (lambda: na.Grid((8,)).relative_bias(np.zeros((0, 5))),
     "relative_bias table: got the shape (0, 5), expected (heads, 2 * window - 1 of axis 0)"),
    (lambda: na.Grid(np.ones((2, 4), int)), "Grid shape[0]: got 4 axes, allowed 1 to 3"),
    (lambda: na.Grid((8,)).relative_bias(np.zeros((2, 17))),
     "window of axis 0: got 9 with dilation 1, allowed 1 to 8: window * dilation is at most 8"),
])  # fmt: skip
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value).startswith(message)


SLOW = pytest.mark.slow
SIMULATED = {  # tokens in boxes: shape, extra, edges; or in rows, with a bias
    "boxes": (AMPERE, (9, 15), (2, 4), 0, "moved", False),
    "boxes, hopper": (HOPPER, (9, 15), (2, 4), 0, "moved", False),
    "extra": pytest.param(AMPERE, (10, 14), (2, 9), 3, ("cut", "periodic"), False, marks=SLOW),
    "extra, hopper": pytest.param(HOPPER, (10, 14), (2, 9), 3, ("cut", "periodic"), False, marks=SLOW),
    "extra, turing": pytest.param(TURING, (10, 14), (2, 9), 3, ("cut", "periodic"), False, marks=SLOW),
    "bias": pytest.param(AMPERE, (3, 7), (3, 3), 1, ("periodic", "moved"), True, marks=SLOW),
    "bias, hopper": pytest.param(HOPPER, (3, 7), (3, 3), 1, ("periodic", "moved"), True, marks=SLOW),
}


@pytest.mark.parametrize(("device", "shape", "window", "extra", "edges", "biased"), SIMULATED.values(), ids=SIMULATED)
def test_by_simulated_kernels(rng, device, shape, window, extra, edges, biased):
    grid, table = na.Grid(shape, extra), rng.standard_normal((1, *(2 * n - 1 for n in window)))
    mask, score = grid.window(window, edges=edges), grid.relative_bias(table, edges=edges)
    q, k, v, do = rng.standard_normal((4, 1, 1, np.prod(shape) + extra, 16)).astype(np.float16)

    def results():
        o, backprop = na.attention_vjp(q, k, v, mask=mask, score=[score] * biased)
        grads = backprop(do)
        return o, *grads, *grads.score[:biased]

    with world_of("simulated"), on(device):
        found = results()
    for got, want in zip(found, results()):
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_on_a_gpu(rng, dtype):
    import cupy

    grid, table = na.Grid((9, 15), extra=1), cupy.asarray(rng.standard_normal((2, 3, 7), dtype=np.float32))
    mask, (q, k, v) = grid.window((2, 4)), (random(rng, (1, 2, 136, 32), np.dtype(dtype)) for _ in range(3))
    o, backprop = na.attention_vjp(*map(cupy.asarray, (q, k, v)), mask=mask, score=grid.relative_bias(table))
    wanted_o, wanted = na.attention_vjp(q, k, v, mask=mask, score=grid.relative_bias(table.get()))
    (*found, (dtable, _, _)), (*want, (of_table, _, _)) = ((*x, x.score) for x in (backprop(o), wanted(o.get())))
    dropped = [na.attention(*arrays, mask=mask, dropout=na.Dropout(0.2, 3))     # in the grid's order
               for arrays in (map(cupy.asarray, (q, k, v)), (q, k, v))]  # fmt: skip
    for got, right in zip((o, *found, dtable, dropped[0]), (wanted_o, *want, of_table, dropped[1])):
        np.testing.assert_allclose(got.get(), right, atol=2e-3 * np.abs(right).astype(float).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 1)], ids=["in boxes", "in the grid's order"])
def test_in_a_graph(rng, dropout):
    import cupy

    from tests.tools.graphs import capture, own_stream

    mask, (q, k, v) = na.Grid((9, 15)).window((2, 4)), (random(rng, (2, 135, 64), np.float16) for _ in range(3))
    q, k, v = map(cupy.asarray, (q, k, v))
    with own_stream():
        want = na.attention(q, k, v, mask=mask, dropout=dropout)
        o, graph = capture(lambda: na.attention(q, k, v, mask=mask, dropout=dropout))
        others = [cupy.full_like(x, np.nan) for x in (q, k, v, o) for _ in range(3)]
        for _ in range(2):
            o.fill(0)
            graph.launch()
            cupy.testing.assert_array_equal(o, want)
        assert all(cupy.isnan(x).all() for x in others)


def test_on_a_ring(rng):
    grid, ring = na.Grid((12, 13), extra=2), distributed.Simulated(3)
    options = {"mask": grid.window(5), "score": grid.relative_bias(rng.standard_normal((2, 9, 9)))}
    q, k, v, do = rng.standard_normal((4, 2, 158, 8))
    o, backprop = na.attention_vjp(q, k, v, **options)
    parts, of_parts = distributed.attention_vjp(ring, *map(ring.split, (q, k, v)), **options)
    for got, want in zip((parts, *of_parts(ring.split(do))), (o, *backprop(do))):
        np.testing.assert_allclose(ring.join(got), want, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="expected 158 of each, as many as the grid has tokens"):
        distributed.attention(ring, *[ring.split(np.concatenate([x, x], axis=1)) for x in (q, k, v)], **options)


FAULTS = {
    "test_by_simulated_kernels": {
        "cuda/kernels/shared/visibility/boxes.py": {
            "word = word & take(": "word = word | take(",
            "row_index(layout, first)": "row_index(layout, 0)",
            "(n0, m0) if SIDE": "(m0, n0) if SIDE",
            "((col >> 2) & LAST)": "((col >> 3) & LAST)",
        },
    },
    "test_who_sees_whom": {
        "grids/visibility.py": {
            'packed("begin") - fields.guards': 'packed("begin")',
            "inside = inside | (": "inside = inside & (",
            "| (is_met & ((inside & of_number) == of_number))": "",
        },
        "grids/axis.py": {
            "np.where(beyond > 0, start, 1)": "start",
            "i // s * s + (s - 1 if causal else s // 2)": "i // s * s + s // 2",
        },
    },
    "test_packed_grids": {
        "grids/visibility.py": {
            "fields.guard if len(parts) > 1 else 0": "0",
            "[number + 1] * (len(parts) > 1)": "[1] * (len(parts) > 1)",
        },
    },
    "test_a_bias_by_offset_and_its_gradient": {
        "grids/bias.py": {
            "steps + query[1, i] if steps < 0 else steps": "steps",
            "key[0, j] == EXTRA": "False",
            "seen.begin - seen.offset": "seen.begin",
        },
    },
}

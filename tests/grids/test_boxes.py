"""Tokens in the order of boxes: what their states say is what the mask shows, and calls in that order are the same."""

import math
from unittest.mock import patch

import numpy as np
import pytest

import numbattn as na
from numbattn.base.kept import KEPT
from numbattn.call.order import in_order
from numbattn.call.problem import describe
from numbattn.call.tangents import Tangents
from numbattn.grids import boxes
from numbattn.grids.axis import AxisWindow, Part
from numbattn.grids.boxes import (
    BLOCK,
    EMPTY,
    FULL,
    TILE,
    boxes_of,
    in_pairs,
    pairs_shown_in_rows,
    sizes_of,
    states_in_rows,
)
from numbattn.grids.visibility import PADDING
from numbattn.grids.windows import Windows

CASES = {  # shape, extra, options of a window
    "two axes": ((9, 15), 0, {"window": (2, 4)}),
    "strided": ((22, 12), 0, {"window": (13, 10), "stride": (3, 2)}),
    "wide windows": ((46, 48), 0, {"window": 29}),
    "extra": ((9, 15), 5, {"window": (2, 4)}),
    "three axes": ((3, 4, 12), 1, {"window": (2, 3, 3), "causal": (True, False, False)}),
    "wide windows, three axes": ((11, 15, 8), 0, {"window": (7, 7, 8)}),
    "periodic": ((10, 14), 0, {"window": (2, 9), "edges": ("cut", "periodic")}),
    "periodic, many boxes": ((24, 40), 0, {"window": (12, 6), "edges": "periodic"}),
    "dilated": ((300,), 0, {"window": 40, "dilation": 7}),
    "dilated, periodic": ((15, 9), 2, {"window": (3, 2), "dilation": (2, 3), "edges": "periodic"}),
    "packed": (((9, 15), (16, 10)), 2, {"window": (2, 4), "edges": ("cut", "periodic")}),
}


@pytest.fixture(params=CASES)
def mask(request):
    shape, extra, options = CASES[request.param]
    return na.Grid(shape, extra).window(**options)


def test_every_token_has_a_place(mask):
    boxes = boxes_of(mask._windows.parts)
    tokens, states = boxes.tokens, boxes.states
    assert tokens.size % TILE == 0
    assert states.shape == (tokens.size // BLOCK,) * 2
    np.testing.assert_array_equal(np.sort(tokens[tokens != PADDING]), np.arange(mask._windows.tokens))


def test_states_say_what_is_visible(mask):
    """EMPTY and FULL are never said in vain, and PARTIAL only of boxes at an edge of a residue class or of the grid."""
    boxes = boxes_of(mask._windows.parts)
    tokens, states = boxes.tokens, boxes.states
    shown = np.pad(mask.dense(*[mask._windows.tokens] * 2), (0, 1))[np.ix_(tokens, tokens)]     # PADDING is the last
    blocks = shown.reshape(len(states), BLOCK, len(states), BLOCK)
    some, every = blocks.any((1, 3)), blocks.all((1, 3))
    assert not some[states == EMPTY].any()
    assert every[states == FULL].all()
    axes = [axis for part in mask._windows.parts for axis in part.axes]
    if all(axis.dilation == 1 and axis.edges != "periodic" for axis in axes) and not mask._windows.parts[0].extra:
        np.testing.assert_array_equal(states != EMPTY, some)
        np.testing.assert_array_equal(states == FULL, every)


def test_the_mask_in_order_is_the_mask(mask):
    """Beside padding, which sees nothing and is seen by nobody."""
    order = mask._windows.in_order(np.empty(0))
    there = boxes_of(mask._windows.parts).tokens
    shown, size = order.mask.dense(there.size, there.size), mask._windows.tokens
    assert not shown[there == PADDING].any()
    assert not shown[:, there == PADDING].any()
    np.testing.assert_array_equal(shown[np.ix_(order.place, order.place)], mask.dense(size, size))


@pytest.mark.parametrize("options", [{}, {"edges": "cut"}, {"causal": True}, {"stride": 9}], ids=str)
def test_states_in_rows(options):
    """As those of the same function without them; blocks that are cut off at the end are never full."""
    mask = na.Grid((300,)).window(150, **options)
    found = states_in_rows(mask._windows.parts)
    blocks = np.pad(mask.dense(300, 300), (0, 20)).reshape(5, BLOCK, 5, BLOCK)
    np.testing.assert_array_equal(found != EMPTY, blocks.any((1, 3)))
    np.testing.assert_array_equal(found == FULL, blocks.all((1, 3)))
    for other in ({"extra": 1}, {"shape": (20, 15)}, {"shape": [(300,), (9,)]}):
        assert states_in_rows(na.Grid(**{"shape": (300,), **other}).window(1)._windows.parts) is None


@pytest.mark.parametrize("options", [
    {}, {"score": [na.Softcap(2.0)]}, {"score": na.Sink(np.ones(2), gradient=True)}, {"scale": 0.3},
], ids=["plain", "softcap", "sink", "scale"])  # fmt: skip
def test_all_passes_in_order(rng, options):
    """As with the same booleans, which have no order."""
    mask = na.Grid((9, 15), 2).window((2, 4))
    visible = na.Dense(mask.dense(137, 137)[None, None])
    q, tq, do = rng.standard_normal((3, 3, 2, 137, 4))
    k, v, tk = rng.standard_normal((3, 3, 1, 137, 4))
    dlse = rng.standard_normal((3, 2, 137))
    assert in_order(*describe(q, k, v, mask=mask, **options, may_wait=True)) is not None

    def results(mask):
        out = np.empty_like(q)
        o, backprop = na.attention_vjp(q, k, v, mask=mask, out=out, **options)
        assert o is out
        grads, second = backprop(do, dlse), backprop.vjp(do, dlse)[1]
        _, to = na.attention_jvp(q, k, v, tq, tk, None, mask=mask, **options)
        _, tos, laplacian = na.attention_laplacian(q, k, v, tq[None], tk[None], None, mask=mask, **options)
        return [o, backprop.saved.lse, *grads, *grads.score, to, tos, laplacian, *second(tq, tk, tk)[:4]]

    for got, want in zip(results(mask), results(visible), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("options", "is_reordered"), [
    ({}, True), ({"dropout": na.Dropout(0.5, 1)}, False), ({"causal": True}, False), ({"score": na.Softcap(1.0)}, True),
    ({"score": na.Alibi(np.ones(1))}, False), ({"score": na.Score(lambda s, batch, head, i, j: s)}, False),
    ({"score": na.Grid((9, 15)).relative_bias(np.zeros((1, 3, 7)))}, True),
])  # fmt: skip
def test_what_else_depends_on_places_keeps_the_order(options, is_reordered):
    q, mask = np.zeros((1, 135, 4)), na.Grid((9, 15)).window((2, 4))
    found = in_order(*describe(q, q, q, mask=mask, **options, may_wait=True))
    assert (found is not None) == is_reordered


@pytest.mark.parametrize(("shape", "window", "is_reordered"), [
    ((256,), (9,), False), ((32, 64), (3, 64), False), ((40, 40), (7, 7), False), ((3, 3), (3, 3), False),
    ((256, 256), (80, 80), True), ((30, 48, 80), (18, 24, 24), True),
])  # fmt: skip
def test_an_order_that_shows_few_pairs(shape, window, is_reordered):
    """Rows stay where they are if they are boxes already, if boxes are large for the grid, or if tokens are too few."""
    axes = tuple(AxisWindow(n, w, 1, 1, False, "moved") for n, w in zip(shape, window))
    assert (boxes_of((Part(axes, 0),)) is not None) == is_reordered


def test_boxes_of_a_bias_that_is_trained(rng):
    """Few sums by offset: rows of eight tokens along an axis; and the same results in that order, on any library."""
    parts = na.Grid((30, 48, 80)).window((18, 24, 24))._windows.parts
    assert [boxes_of(parts, summed).parts[0].sizes for summed in (False, True)] == [(2, 8, 4), (1, 8, 8)]
    image = na.Grid((256, 256)).window(80)._windows.parts
    assert boxes_of(image, True) is boxes_of(image)
    grid, in_order_of, (q, k, v, do) = na.Grid((8, 16, 16)), Windows.in_order, rng.standard_normal((4, 2, 2048, 4))
    score, mask = grid.relative_bias(rng.standard_normal((2, 7, 7, 7))), grid.window(4)
    order = mask._windows.in_order(q, True)
    assert order.sizes != mask._windows.in_order(q, False).sizes

    def results(summed):
        with patch.object(Windows, "in_order", lambda self, array, _: in_order_of(self, array, summed)):
            o, backprop = na.attention_vjp(q, k, v, mask=mask, score=score)
            return [o, *backprop(do), backprop(do).score[0]]

    for one, other in zip(results(False), results(True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


WRAPPED = {  # shape, window, its options, and whether an entry of a table follows from the steps between two tokens
    "two periods": ((12, 20), (5, 6), {"edges": "periodic"}, True),
    "cut and periodic": ((9, 15), (2, 8), {"edges": ("cut", "periodic")}, True),
    "all around": ((24, 8), (4, 8), {"edges": ("moved", "periodic")}, True),
    "groups": ((12, 20), (4, 5), {"edges": "periodic", "stride": (1, 3)}, True),
    "dilated": ((12, 20), (4, 3), {"edges": "periodic", "dilation": 2}, True),
    "groups that see far": ((24, 8), (4, 6), {"edges": ("moved", "periodic"), "stride": (1, 3)}, False),
    "classes of two sizes": ((12, 21), (4, 3), {"edges": "periodic", "dilation": (1, 2)}, False),
    "packed": (((12, 20), (16, 20)), (4, 5), {"edges": ("moved", "periodic")}, True),
    "packed, of two periods": (((12, 20), (20, 12)), (4, 5), {"edges": "periodic"}, False),
}


@pytest.fixture
def any_order(monkeypatch):
    """Tokens are in the order of boxes even where that shows as many pairs."""
    monkeypatch.setattr(boxes, "GAIN", math.inf)
    boxes_of.cache_clear()
    yield
    boxes_of.cache_clear()
    KEPT.clear()


@pytest.mark.parametrize(("shape", "window", "options", "by_steps"), WRAPPED.values(), ids=WRAPPED)
def test_a_bias_along_periodic_axes_in_order(rng, any_order, shape, window, options, by_steps):
    """As in the order of the tokens; a table's tangent is read as the table is."""
    grid, table = na.Grid(shape, extra=1), rng.standard_normal((2, *(2 * w - 1 for w in window)))
    mask, score = grid.window(window, **options), grid.relative_bias(table, **options)
    q, k, v, do = rng.standard_normal((4, 2, mask._windows.tokens, 4))
    ordered = in_order(*describe(q, k, v, mask=mask, score=score, may_wait=True))
    (part,) = ordered.inputs.score
    assert (part._turns is not None) == by_steps
    along = ordered.of_tangents(Tangents(None, None, None, (table[None], None, None)))
    np.testing.assert_array_equal(along.score[0][0], part.arrays[0])

    def results():
        o, backprop = na.attention_vjp(q, k, v, mask=mask, score=score)
        return [o, *backprop(do), *backprop(do).score[:1]]

    found = results()
    with patch.object(Windows, "in_order", lambda *_: None):
        for got, want in zip(found, results(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"edges": "periodic"}, {"dilation": 2}, {"stride": 3}], ids=str)
def test_pairs_shown_in_rows(options):
    mask = na.Grid((20, 30)).window(6, **options)
    tiles = np.pad(mask.dense(600, 600), (0, 40)).reshape(5, TILE, 5, TILE).any((1, 3))
    assert pairs_shown_in_rows(mask._windows.parts[0].axes) == tiles.sum() * TILE**2


def test_sizes_of_boxes():
    axes = tuple(AxisWindow(n, 1, 1, 1, False, "moved") for n in (40, 2, 8))
    assert set(sizes_of(axes)) == {(64, 1, 1), (32, 2, 1), (32, 1, 2), (16, 2, 2), (16, 1, 4), (8, 2, 4), (8, 1, 8),
                                   (4, 2, 8)}  # fmt: skip
    assert all(np.prod(sizes) == BLOCK for sizes in sizes_of(axes))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("counts", [(4, 3), (3, 4), (5, 2)])
def test_boxes_come_in_pairs(counts, axis):
    boxes = in_pairs(list(counts), axis).T
    assert sorted(map(tuple, boxes)) == [*np.ndindex(*counts)]
    paired = len(boxes) - (np.prod(counts) // counts[axis] if counts[axis] % 2 else 0)
    steps = (boxes[1:paired:2] - boxes[:paired:2])
    assert (steps == np.eye(2)[axis]).all()


FAULTS = {
    "test_states_say_what_is_visible": {
        "(hull.begin[:, None] < first + size)": "(hull.begin[:, None] <= first + size)",
        "(first <= hull.last[:, None])": "(first < hull.last[:, None])",
        "(hull.common_begin[:, None] <= first)": "(hull.common_begin[:, None] <= first + 1)",
        "first + size - 1 <= hull.common_last": "first + size - 2 <= hull.common_last",
        "& is_whole & is_whole[:, None]": "& is_whole",
        "begin.min(1), last.max(1), begin.max(1), last.min(1)": "begin.min(1), last.min(1), begin.max(1), last.min(1)",
        "[: 1 + axis.is_periodic]": "[:1]",
    },
    "test_every_token_has_a_place": {
        "is_there = is_there & (at < axis.size)": "is_there = is_there & (at <= axis.size)",
    },
    "test_boxes_come_in_pairs": {
        "is_alone = (boxes[axis] == counts[axis] - 1) & (second == 0)": "is_alone = second < 0",
    },
    "test_an_order_that_shows_few_pairs": {
        "> GAIN * sum(pairs": "> 9 * sum(pairs",
    },
    "test_a_bias_along_periodic_axes_in_order": {
        "grids/bias.py": {
            "steps[int(number >= period - 1), entries[number]] = number": "steps[0, entries[number]] = number",
            "axis.window - 1 if size <= period else axis.window // 2": "axis.window - 1",
            "axis.size % axis.dilation or (size > period and axis.stride > 1)": "axis.size % axis.dilation",
            "if axes[0].is_periodic and len({*axes}) == 1": "if axes[0].is_periodic",
            "seen.place - seen.period + 1": "seen.place - seen.period",
        },
        "call/order.py": {"part._in_order_of(x) for part, x": "x for part, x"},
    },
    "test_pairs_shown_in_rows": {
        "| ((wrapped_begin <= at) & (at <= wrapped_last))": "",
        "min((tile + 1) * TILE, count)), shape)": "tile * TILE + 1), shape)",
    },
    "test_sizes_of_boxes": {"size < 2 * axis.size for": "size < 99 * axis.size for"},
}

"""Differences along edges, and sums of edges."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from numbattn import graphs

from ..accuracy import to_numpy

BOX = np.array([[3.0, 0, 0], [1, 4, 0], [0, 0.5, 5]])


def drawn(rng, xp, nodes=20, edges=90):
    """A graph, its queries and keys, and a number for each edge in three columns."""
    i, j = rng.integers(nodes, size=(2, edges))
    g, order = graphs.Graph.from_edges(*map(xp.asarray, (i, j)), (nodes, nodes))
    order = to_numpy(order)
    return g, i[order], j[order], rng.standard_normal((2, edges, 3))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_sums(xp, rng, dtype):
    g, i, j, e = drawn(rng, xp)
    e = e.astype(dtype)
    for function, rows in ((graphs.sum_by_query, i), (graphs.sum_by_key, j)):
        wanted = np.zeros((2, 20, 3))
        np.add.at(wanted, (slice(None), rows), e)
        found = to_numpy(function(xp.asarray(e), g))
        assert found.dtype == dtype
        assert_allclose(found, wanted, atol=1e-13 if dtype == np.float64 else 1e-2)
        assert_array_equal(found, to_numpy(function(xp.asarray(e), g)))


@pytest.mark.parametrize("box", [BOX, BOX.diagonal().copy(), None], ids=["triclinic", "orthorhombic", "none"])
def test_differences(xp, rng, box):
    """Both are linear: the gradients are those of <de, e>, whatever the point."""
    g, i, j, de = drawn(rng, xp)
    x, shifts = rng.standard_normal((2, 20, 3)), rng.integers(-2, 3, (90, 3))
    given = {} if box is None else {"shifts": xp.asarray(shifts), "box": xp.asarray(box)}
    e, backprop = graphs.differences_vjp(xp.asarray(x), g, **given)
    vectors = 0 if box is None else shifts @ (np.diag(box) if box.ndim == 1 else box)
    assert_allclose(to_numpy(e), x[:, j] - x[:, i] + vectors, atol=1e-14)
    dx, dbox = backprop(xp.asarray(de))
    inner = (to_numpy(dx) * x).sum()
    if box is None:
        assert dbox is None
    else:
        assert dbox.shape == box.shape
        inner += (to_numpy(dbox) * box).sum()
    assert_allclose(inner, (de * to_numpy(e)).sum(), rtol=1e-12)


def test_no_edges(xp):
    box, x = xp.asarray([10.0, 10.0]), xp.asarray([[0.0, 0.0], [5.0, 5.0]])
    g, shifts = graphs.radius_graph(x, 1.0, box=box)
    e, backprop = graphs.differences_vjp(x, g, shifts=shifts, box=box)
    for got, wanted in zip(backprop(e), (np.zeros((2, 2)), np.zeros(2))):
        assert_array_equal(to_numpy(got), wanted)
    o, saved = graphs.attention_forward(x, x, x, g)
    assert_array_equal(to_numpy(o), np.zeros((2, 2)))
    assert_array_equal(to_numpy(saved.lse), [-np.inf] * 2)


def test_forces_and_their_derivative(rng):
    """The gradient of an energy by positions, and the derivative of that in a direction, by central differences."""
    g, *_ = drawn(rng, np, nodes=6, edges=20)
    x, tx = rng.standard_normal((2, 6, 3))
    W, q = rng.standard_normal((3, 4)), rng.standard_normal((6, 4))

    def gradient(x):
        """Of (o**2).sum() / 2, where o sees what is along edges."""
        e, to_positions = graphs.differences_vjp(x, g)
        o, backprop = graphs.attention_vjp(q, q, q, g, k_edge=e @ W)
        dx, _ = to_positions(backprop(o).k_edge @ W.T)
        return (o**2).sum() / 2, dx

    h, (_, dx) = 1e-5, gradient(x)
    (ahead, dx_ahead), (behind, dx_behind) = (gradient(x + step * tx) for step in (h, -h))
    assert_allclose((dx * tx).sum(), (ahead - behind) / (2 * h), rtol=1e-7)
    given = {"k_edge": graphs.differences(x, g) @ W, "tk_edge": graphs.differences(tx, g) @ W}
    o, to, *saved = graphs.attention_forward_jvp(q, q, q, g, None, None, None, **given)
    _, tgrads = graphs.attention_backward_jvp(o, *saved, tdo=to)
    tdx, _ = graphs.differences_vjp(x, g)[1](tgrads.k_edge @ W.T)
    assert_allclose(tdx, (dx_ahead - dx_behind) / (2 * h), atol=1e-7)


def test_wrong_arguments(rng):
    g = graphs.Graph(np.array([0, 1, 2]), np.array([1, 0]))
    x, shifts, box = np.zeros((2, 3)), np.zeros((2, 3), int), np.ones(3)
    for error, words, arguments, options in (
        (TypeError, "graph: got None", (x, None), {}),
        (TypeError, "x: got int64, allowed float32, float64", (shifts, g), {}),
        (ValueError, r"x: got the shape \(3, 2\), expected \(..., 2, d\)", (x.T, g), {}),
        (ValueError, "box: got None with shifts", (x, g), {"shifts": shifts}),
        (TypeError, "shifts: got numpy.ndarray of float64", (x, g), {"shifts": x, "box": box}),
        (ValueError, r"shifts: got the shape \(1, 3\)", (x, g), {"shifts": shifts[:1], "box": box}),
        (TypeError, "box: got float32, expected float64", (x, g), {"box": box.astype(np.float32)}),
        (ValueError, r"box: got the shape \(2,\)", (x, g), {"box": box[:2]}),
        (ValueError, "graph: got .*, expected as many keys", (x, graphs.Graph(g.indptr, g.indices, 3)), {}),
    ):
        with pytest.raises(error, match=words):
            graphs.differences(*arguments, **options)
    with pytest.raises(TypeError, match="e: got int64, allowed float16"):
        graphs.sum_by_key(np.zeros((g.edges, 1), int), g)
    with pytest.raises(ValueError, match=r"e: got the shape \(3, 2\), expected \(..., 2, features\)"):
        graphs.sum_by_key(x.T, g)
    with pytest.raises(ValueError, match=r"de: got the shape \(3, 2\)"):
        graphs.differences_vjp(x, g)[1](x.T)


FAULTS = {
    "x[..., graph.indices, :] - x[..., graph._rows, :]": "x[..., graph._rows, :] - x[..., graph.indices, :]",
    "graph._by_key.numbers, :]": "graph._by_key.others, :]",
    "dbox if box.ndim == 2 else dbox.diagonal().copy()": "dbox",
    "dx = dx - sum_by_query": "dx = dx + sum_by_query",
}

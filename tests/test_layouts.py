"""What a call is given lies as it likes: results are those of contiguous copies, and nobody reads beyond an array."""

from itertools import accumulate

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import graphs, points, sparse

from .tools.layouts import laid

FLOATS = np.float16, ml_dtypes.bfloat16, np.float32, np.float64
INTEGERS = np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64


class Drawn:
    """Arrays from a seed, in C order or `laid`, of numbers that all dtypes have, now and then equal along axes."""

    def __init__(self, seed, dtype, layouts=None):
        self.rng, self.dtype, self.layouts = np.random.default_rng(seed), np.dtype(dtype), layouts
        self.sums = np.promote_types(dtype, np.float32)

    def of(self, x, dtypes=(), **options):
        return x.copy() if self.layouts is None else laid(self.layouts, x, dtypes, **options)

    def numbers(self, low, high, shape):
        own = [1 if self.rng.random() < 0.25 else n for n in shape]
        return np.broadcast_to(self.rng.integers(low, high, own, endpoint=True), shape)

    def floats(self, *shape, dtype=None, dtypes=(), low=-16):
        return self.of((self.numbers(low, 16, shape) / 8).astype(dtype or self.dtype), dtypes)

    def any_floats(self, *shape):
        """Of any dtype, which calls convert."""
        return self.floats(*shape, dtype=self.sums, dtypes=FLOATS)

    def whole(self, low, high, *shape):
        return self.of(self.numbers(low, high, shape).astype(np.int64), INTEGERS)

    def truths(self, *shape):
        return self.of(self.numbers(0, 3, shape) > 0)

    def offsets(self, *lengths):
        return self.of(np.array([0, *accumulate(lengths)]), INTEGERS)

    def written(self, *shape, dtype=None):
        return self.of(np.zeros(shape, dtype or self.dtype), is_written=True)


# ------------------------------------------------------------------------------------------------------------ families
def attention(x):
    q, k, v = x.floats(2, 4, 9, 3), x.floats(1, 2, 11, 3), x.floats(2, 11, 5)
    score = [na.Alibi(x.any_floats(2, 4)), na.Bias(x.any_floats(4, 1, 11)), na.Sink(x.any_floats(4))]
    mask = na.Lengths(x.whole(1, 11, 2, 1)) & na.Intervals(x.whole(0, 3, 9), x.whole(5, 11, 2, 4, 9))
    mask, out = mask & x.truths(4, 9, 11), x.written(2, 4, 9, 5)
    o, saved = na.attention_forward(q, k, v, mask=mask, score=score, out=out)
    yield o, saved.lse
    grads = na.attention_backward(x.any_floats(2, 4, 9, 5), saved, dlse=x.any_floats(2, 4, 9))
    yield *grads, *grads.score


def tangents(x):
    q, k, v, table = x.floats(2, 4, 9, 3), x.floats(1, 2, 11, 3), x.floats(2, 11, 5), x.any_floats(4, 7)
    mask, score = na.Segments(x.offsets(4, 5), x.offsets(5, 6)), [na.Softcap(2.0), na.RelativeBias(table)]
    t = [x.floats(3, *y.shape) for y in (q, k, v)]
    along = [x.floats(3, *table.shape, dtype=table.dtype)]
    o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, *t, tscore=along, mask=mask, score=score)
    rows = {"tdo": x.any_floats(3, 2, 4, 9, 5), "dlse": x.any_floats(2, 4, 9), "tdlse": x.any_floats(3, 2, 4, 9)}
    _, tgrads = na.attention_backward_jvp(x.any_floats(2, 4, 9, 5), saved, tsaved, **rows)
    yield o, to, tsaved.tlse, *tgrads, *tgrads.score
    yield na.attention_laplacian(q, k, v, *t, *[x.floats(*y.shape) for y in (q, k, v)], mask=mask)
    yield na.attention_laplacian(q, k, v, *t, particle=(x.whole(-1, 2, 9), x.whole(-1, 2, 11)))


def statistics(x):
    q, k, rows = x.floats(2, 4, 9, 3), x.floats(2, 2, 11, 3), (2, 4, 9)
    found, backprop = na.attention_statistics_vjp(q, k, column_sums=True, entropy=True, weights=x.any_floats(*rows))
    yield found.column_sums, found.entropy
    grads = backprop(dcolumn_sums=x.any_floats(2, 4, 11), dentropy=x.any_floats(*rows), dlse=x.any_floats(*rows))
    yield *grads, grads.weights


def merge(x):
    states = [(x.floats(2, 4, 9, 3), x.floats(2, 4, 9, dtype=x.sums)) for _ in range(3)]
    merged, backprop = na.merge_vjp(states)
    yield *merged, *sum(backprop(x.any_floats(2, 4, 9, 3), x.any_floats(2, 4, 9)), ())


def rotary(x):
    turn, out = na.Rotary(100.0), x.written(2, 4, 9, 6)
    y, backprop = na.rotary_vjp(x.floats(2, 4, 9, 6), x.whole(0, 50, 2, 1, 9), turn, out=out)
    yield y, backprop(x.floats(2, 4, 9, 6)), *na.rotary_jvp(out, x.floats(3, 2, 4, 9, 6), x.any_floats(9), turn)


def cache(x):
    table = x.of(x.rng.permutation(9)[:6].reshape(2, 3).astype(np.int32))
    found = na.KVCache(x.written(9, 2, 4, 8), x.written(9, 2, 4, 5), x.written(2, dtype=np.int32), table)
    for tokens in 5, 2:
        found.append(x.any_floats(2, 2, tokens, 8), x.any_floats(2, 2, tokens, 5))
    found.append(x.any_floats(2, 3, 8), x.any_floats(2, 3, 5), x.offsets(1, 2))
    yield na.attention(x.floats(2, 4, 3, 8), found, causal=True), found.lengths
    found.keep(x.of(np.array([[0, 2], [1, -1]]), INTEGERS), nodes=3)
    yield found.k.copy(), found.v.copy(), found.lengths.copy()


def of_graphs(x):
    g, _ = graphs.Graph.from_edges(x.whole(0, 6, 20), x.whole(0, 8, 20), (7, 9))
    q, k, v = x.floats(2, 4, 7, 3), x.floats(1, 2, 9, 3), x.floats(2, 9, 5)
    shapes = {"bias": (4, 20), "factor": (20,), "k_edge": (2, 4, 20, 3), "v_edge": (20, 5)}
    edges = {name: x.floats(*shape) for name, shape in shapes.items()}
    moving = {f"t{name}": x.floats(3, *y.shape) for name, y in edges.items()}
    t = [x.floats(3, *y.shape) for y in (q, k, v)]
    o, to, saved, tsaved = graphs.attention_forward_jvp(q, k, v, g, *t, **edges, **moving)
    _, tgrads = graphs.attention_backward_jvp(x.any_floats(2, 4, 7, 5), saved, tsaved, tdo=x.any_floats(3, 2, 4, 7, 5))
    yield o, to, *tgrads, tgrads.bias, tgrads.factor, tgrads.k_edge, tgrads.v_edge
    yield graphs.sum_by_key(x.floats(4, 20, 3), g), graphs.sum_by_query(x.floats(4, 20, 3), g)


def of_points(x):
    y, z, b, w = x.floats(2, 7, 3), x.floats(1, 9, 3), x.floats(2, 9, 2), x.floats(9)
    t = [x.any_floats(*moved.shape) for moved in (y, z, b)]
    s, backprop = points.product_vjp(y, z, b, points.Matern(1.5, x.floats(3, dtype=np.float64, low=8)))
    grads = backprop(x.any_floats(*s.shape))
    yield s, *grads, grads.kernel, *backprop.hvp(x.any_floats(*s.shape), *t, tds=x.any_floats(*s.shape))
    f, backprop = points.logsumexp_vjp(y, z, w, points.Cost(2, 0.5), mask=na.Lengths(x.whole(1, 9, 2)))
    yield f, *backprop(x.any_floats(*f.shape)), *backprop.hvp(x.any_floats(*f.shape), *t[:2], x.any_floats(9))
    yield points.nearest(y, z, 3)[0], *points.kmeans_step(y, z, weights=x.floats(2, 7, low=0))[1:]
    yield points.cross_entropy(y, x.floats(9, 3), x.whole(-1, 8, 2, 7), points.Linear(), w=w)


def of_sparse(x):
    pattern = sparse.Pattern(na.BlockSparse(x.truths(3, 2), (16, 32)))
    y, backprop = sparse.product_vjp(x.floats(2, 5, 48), x.floats(pattern.count, 16, 32), pattern)
    yield y, *backprop(x.floats(2, 5, 64)), pattern.values(x.floats(48, 64))


FAMILIES = attention, tangents, statistics, merge, rotary, cache, of_graphs, of_points, of_sparse


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_layouts(family, dtype):
    for seed in range(12):
        given = Drawn(seed, dtype), Drawn(seed, dtype, np.random.default_rng([seed, 1]))
        for plain, found in zip(*map(family, given), strict=True):
            for want, got in zip(plain, found, strict=True):
                want, got = (np.asarray(y).astype(np.float64) for y in (want, got))
                size = abs(want[np.isfinite(want)]).max(initial=1)
                np.testing.assert_allclose(got, want, atol=size * (2e-2 if dtype == np.float16 else 1e-2), rtol=0)


FAULTS = {
    "cpu/rotations.py": {"test_layouts": {"x.strides[-1] == x.itemsize": "True"}},
}

"""Trees of tokens: each node has the result of a call on its path alone."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

import numbattn as na
import numbattn.distributed as nad
from numbattn.masks import Positions
from tests.accuracy import assert_equal
from tests.caches.test_ragged import filled
from tests.tools.device import BY_UNIT, on
from tests.tools.launch import world_of

TREE = [-1, 0, 0, 1, 1, 2, 3, -1, 7]
SHUFFLED = [4, 4, 0, -1, 3, 1]  # parents after their children
HEADS = 4


def far(s, batch, head, i, j, table):
    return s + table[head, abs(i - j) % 99] * (i + 1)


def near(s, batch, head, i, j):
    return s - 0.1 * abs(i - j) * (head + 1)


def every_third(batch, head, i, j):
    return i - j < 4 or (i + j + head) % 3 == 0


KINDS = {  # of mask and score
    "none": lambda rng: {},
    "causal": lambda rng: {"mask": na.Causal()},
    "window": lambda rng: {"mask": na.Window(3, 0)},
    "stream": lambda rng: {"mask": na.Window(3, 0) | na.First(2)},
    "sinks in the tree": lambda rng: {"mask": na.Window(1, 0) | na.First(12)},
    "two gaps": lambda rng: {"mask": (na.Window(1, 0) | na.First(3)) & (na.Window(4, 0) | na.Prefix(1))},
    "prefix": lambda rng: {"mask": na.Prefix(1) & na.Window(4, None)},
    "first": lambda rng: {"mask": na.First(11)},
    "three": lambda rng: {"mask": na.Window(2, 0) | na.First(1) | na.Prefix(0)},
    "alibi": lambda rng: {"score": na.Alibi(np.linspace(0.1, 0.7, HEADS))},
    "relative": lambda rng: {"score": [na.Softcap(3.0), na.RelativeBias(rng.standard_normal((HEADS, 9)))]},
    "score": lambda rng: {"score": na.Score(far, arrays=[rng.standard_normal((HEADS, 99))])},
    "no arrays": lambda rng: {"score": na.Score(near)},
    "where": lambda rng: {"mask": na.Where(every_third)},
    "all": lambda rng: {"mask": na.Where(every_third) & na.Window(9, 0), "score": na.Alibi(0.5)},
}


def path_to(node, parents):
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def depths_of(parents):
    return np.array([len(path_to(node, parents)) - 1 for node in range(len(parents))])


def beside(tail, options):
    """Options with a mask that has this one, too."""
    return options | {"mask": tail & options["mask"] if "mask" in options else tail}


def alone(q, k, v, parents, options):
    """o (heads, nodes, features) of a tree behind a prompt, whose own keys are the last ones: of each path alone."""
    before, o = k.shape[-2] - len(parents), np.empty((*q.shape[:-1], v.shape[-1]))
    for node in range(len(parents)):
        path = path_to(node, parents)
        rows = [*range(before), *(before + each for each in path)]
        found = na.attention(*(x.astype(float) for x in (q[:, path], k[:, rows], v[:, rows])), causal=True, **options)
        o[:, node] = found[:, -1]
    return o


def check_arrays(rng, kind, parents, before, dtype=np.float64, heads_k=2):
    options, nodes = KINDS[kind](rng), len(parents)
    q = rng.standard_normal((HEADS, nodes, 16)).astype(dtype)
    k, v = rng.standard_normal((2, heads_k, before + nodes, 16)).astype(dtype)
    o = na.attention(q, k, v, **beside(na.Tail(na.Bits.tree(parents)), options))
    return o, lambda: alone(q, k, v, parents, options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [TREE, SHUFFLED, [-1, 0, 1]], ids=["tree", "shuffled", "chain"])
def test_each_path_alone(kind, parents, rng):
    for before in 0, 1, 40:
        o, want = check_arrays(rng, kind, parents, before)
        np.testing.assert_allclose(o, want(), atol=1e-12)


@pytest.mark.parametrize(("unit", "kind"), [
    ("CUDA cores", "stream"), ("warpgroups", "two gaps"), ("tensor cores", "score"), ("tensor cores", "where"),
    ("CUDA cores", "no arrays"),
    *(pytest.param(unit, kind, marks=pytest.mark.slow) for unit in BY_UNIT for kind in KINDS),
])  # fmt: skip
def test_on_devices(unit, kind, rng):
    with world_of("simulated"), on(BY_UNIT[unit]):
        o, want = check_arrays(rng, kind, TREE, 70, np.float32, heads_k=1)
    np.testing.assert_allclose(o, want(), atol=1e-5)


def check_caches(rng, kind, trees, lengths, like=np.float64, ragged=True, xp=np, **cache):
    """A tree for each sequence, of its own size: in a ragged batch, or padded with further roots."""
    options, cache = KINDS[kind](rng), filled(rng, lengths, like=like, **cache)
    on_device = cache if xp is np else na.KVCache(*map(xp.asarray, cache._arrays().values()))
    sizes, most = [*map(len, trees)], max(map(len, trees))
    if ragged:
        offsets = np.cumsum([0, *sizes])
        q = rng.standard_normal((HEADS, offsets[-1], 16)).astype(like)
        words = np.concatenate([na.Bits.tree(tree).words for tree in trees])
        tail = na.Tail(na.Bits(words), positions=np.concatenate([*map(depths_of, trees)]))
        segments = na.Segments(xp.asarray(offsets), max_queries=most)
        o = na.attention(xp.asarray(q), on_device, **beside(tail & segments, options))
        queries, found = ([x[:, a:b] for a, b in pairwise(offsets)] for x in (q, o))
    else:
        q = rng.standard_normal((len(trees), HEADS, most, 16)).astype(like)
        tail = na.Tail(na.Bits.tree(np.array(trees)[:, None]))
        queries, found = q, na.attention(xp.asarray(q), on_device, **beside(tail, options))
    keys = [[x[b, :, :length] for x in cache._dense()] for b, length in enumerate(lengths)]
    return found, lambda: [alone(*each, tree, options) for *each, tree in zip(queries, *zip(*keys), trees)]


OF_CACHES = {"ragged": {}, "pages": {"page_size": 4}, "8 bits": {"dtype": np.int8, "page_size": 8}}
TREES = [[-1, 0, 0, 1, 1], [-1, 0, -1, 2, 2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", OF_CACHES)
def test_caches(cache, kind, rng):
    for trees, ragged in ([TREE, [-1], SHUFFLED], True), (TREES, False):
        lengths = [9, 30, 17][: len(trees)]
        found, want = check_caches(rng, kind, trees, lengths, ragged=ragged, **OF_CACHES[cache])
        for o, expected in zip(found, want()):
            np.testing.assert_allclose(o, expected, atol=1e-12)


@pytest.mark.parametrize(("unit", "kind", "ragged"), [
    ("tensor cores", "stream", True), ("tensor cores", "relative", False),
    *(pytest.param(unit, kind, ragged, marks=pytest.mark.slow)
      for unit in BY_UNIT for kind in KINDS for ragged in (True, False)),
])  # fmt: skip
def test_caches_on_devices(unit, kind, ragged, rng):
    trees, lengths = ([TREE, [-1], SHUFFLED], [20, 3, 77]) if ragged else (TREES, [70, 9])
    with world_of("simulated"), on(BY_UNIT[unit]):
        found, want = check_caches(rng, kind, trees, lengths, np.float32, ragged, page_size=4)
    for o, expected in zip(found, want()):
        np.testing.assert_allclose(o, expected, atol=1e-5)


def test_positions_of_any_mask(rng):
    """Rows in any order: those of a causal call."""
    q = rng.standard_normal((HEADS, 6, 16))
    k, v = rng.standard_normal((2, 2, 20, 16))
    order = rng.permutation(6)
    rows = [*range(14), *(14 + order)]
    options = {"mask": na.Window(8, None) | na.First(1), "score": na.Alibi(0.2)}
    want = na.attention(q, k, v, causal=True, **options)[:, order]
    for visible in np.ones((6, 6), bool), na.Bits.pack(np.ones((6, 6), bool)):
        tail = na.Tail(visible, positions=order)
        o = na.attention(q[:, order], k[:, rows], v[:, rows], causal=True, **beside(tail, options))
        np.testing.assert_allclose(o, want, atol=1e-12)


@pytest.mark.parametrize("kind", ["stream", "alibi", "relative", "score", "all"])
def test_gradients(kind, rng):
    """Those of all paths, each of which is alone."""
    options, nodes, before = KINDS[kind](rng), len(TREE), 11
    q, do = rng.standard_normal((2, HEADS, nodes, 16))
    k, v = rng.standard_normal((2, 2, before + nodes, 16))
    if kind == "score":
        options = {"score": na.Score(far, arrays=options["score"].arrays, gradient=True)}
    _, backprop = na.attention_vjp(q, k, v, **beside(na.Tail(na.Bits.tree(TREE)), options))
    found = backprop(do)
    want = [np.zeros_like(x) for x in (q, k, v, *found.score)]
    for node in range(nodes):
        path = path_to(node, TREE)
        rows = [*range(before), *(before + each for each in path)]
        _, backprop = na.attention_vjp(q[:, path], k[:, rows], v[:, rows], causal=True, **options)
        own = np.zeros((HEADS, len(path), 16))
        own[:, -1] = do[:, node]
        one = backprop(own)
        for into, at, dx in zip(want, (path, rows, rows), one):
            into[:, at] += dx
        for into, dx in zip(want[3:], one.score):
            into += dx
    for dx, expected in zip((*found, *found.score), want):
        np.testing.assert_allclose(dx, expected, atol=1e-12)
        assert dx.shape == expected.shape


@pytest.mark.parametrize("unit", [
    "tensor cores", *(pytest.param(unit, marks=pytest.mark.slow) for unit in ("CUDA cores", "warpgroups")),
])  # fmt: skip
def test_gradients_on_devices(unit, rng):
    options = {"score": na.Alibi(np.full(2, 0.3, np.float32)), "mask": na.Window(3, 0) | na.First(12)}
    q, k, v, do = rng.standard_normal((4, 2, 40, 16)).astype(np.float32)
    mask = na.Tail(na.Bits.tree([-1, *range(19), *range(10, 30)])) & options.pop("mask")
    _, backprop = na.attention_vjp(*(x.astype(float) for x in (q, k, v)), mask=mask, **options)
    want = backprop(do.astype(float))
    with world_of("simulated"), on(BY_UNIT[unit]):
        _, backprop = na.attention_vjp(q, k, v, mask=mask, **options)
        found = backprop(do)
    for dx, expected in zip((*found, *found.score), (*want, *want.score)):
        np.testing.assert_allclose(dx, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("unit", BY_UNIT)
def test_compiled(unit, rng):
    for kind in "sinks in the tree", "all":
        with world_of("compiled"), on(BY_UNIT[unit]):
            o, want = check_arrays(rng, kind, TREE, 70, np.float32)
        np.testing.assert_allclose(o, want(), atol=1e-5)


def test_tangents(rng):
    """Along slopes, by finite differences."""
    q, k, v = rng.standard_normal((3, HEADS, 9, 16))
    slopes, along = rng.random((2, HEADS))
    mask = na.Tail(na.Bits.tree(TREE))

    def o(step):
        return na.attention(q, k, v, mask=mask, score=na.Alibi(slopes + step * along))

    _, to = na.attention_jvp(q, k, v, None, None, None, mask=mask, score=na.Alibi(slopes), tscore=[along])
    np.testing.assert_allclose(to, (o(1e-5) - o(-1e-5)) / 2e-5, atol=1e-9)


def test_what_is_saved_keeps_positions(rng):
    x = rng.standard_normal((4, HEADS, 9, 16))
    options = beside(na.Tail(na.Bits.tree(TREE)), KINDS["all"](rng))
    _, saved = na.attention_forward(*x[:3], **options)
    want = na.attention_backward(x[3], saved)
    for again in pickle.loads(pickle.dumps(saved)), na.Saved.of(*x[:3], saved.o, saved.lse, **options):
        for dx, expected in zip(na.attention_backward(x[3], again), want):
            assert_equal(dx, expected)
    P = na.attention_weights(*x[:2], **options)
    np.testing.assert_allclose(P @ x[2], saved.o, atol=1e-12)


def test_lengths_that_grow_are_seen(rng):
    """By the same mask and the same cache, in place."""
    cache, q = filled(rng, [9, 20], like=np.float64), rng.standard_normal((2, HEADS, 9, 16))
    tail, score = na.Tail(na.Bits.tree(TREE)), na.Alibi(0.5)
    for length in 20, 15, 9:
        cache.truncate([9, length])
        o = na.attention(q, cache, mask=tail & na.Window(4, 0), score=score)
        k, v = (x[1, :, :length] for x in cache._dense())
        want = alone(q[1], k, v, TREE, {"mask": na.Window(4, 0), "score": score})
        np.testing.assert_allclose(o[1], want, atol=1e-12)


def test_kinds():
    """Causal says nothing beside a tree; without anything beside it kernels are those of any Tail."""
    tail = na.Tail(na.Bits.tree(TREE))
    assert (tail & na.Causal())._placed._kinds == (Positions, na.Tail)
    given = na.Tail(tail.mask, positions=tail.positions)
    assert (given & na.Causal())._placed._kinds == (Positions, na.Tail, na.Causal)
    assert (tail & na.Where(every_third))._placed._kinds == (Positions, na.Tail, na.Bits)
    for mask in na.Tail(np.eye(3, dtype=bool)), na.Causal() & na.Bits.tree(TREE):
        assert mask._placed is mask
    assert_equal(tail.positions, depths_of(TREE))
    again = na.Tail(na.Bits.tree(TREE))
    assert ((tail & na.Window(3, 0)) | (again & na.First(2)))._placed._kinds[0] == Positions


X = np.zeros((2, 6, 8))
TAIL = na.Tail(na.Bits.tree([-1, 0, 0, 1, 1, 0]))
ERRORS = [
    (lambda: na.Tail(np.eye(3, dtype=bool), positions=[0, 1, 3]), ValueError, "Tail positions: got values from 0 to 3"),
    (lambda: na.Tail(np.eye(3, dtype=bool), positions=[0.0] * 3), TypeError, "Tail positions: got"),
    (lambda: call(na.Tail(np.eye(6, dtype=bool), positions=[0] * 5)), ValueError, "mask: got Tail positions of the sh"),
    (lambda: call(TAIL & na.Window(3, 0, 1)), ValueError, r"mask: got Window\(3, 0, offset=1\) beside Tail"),
    (lambda: call(TAIL & (na.Causal(0) | na.First(2))), ValueError, r"mask: got Causal\(offset=0\) beside Tail"),
    (lambda: call(TAIL, na.Alibi(0.5, offset=0)), ValueError, "score: got Alibi.* beside the positions of a Tail"),
    (lambda: call(TAIL & na.Window(3, 0) & na.Lengths(4)), ValueError, "mask: got Lengths.* beside Tail.* and Window"),
    (lambda: call(TAIL & na.Segments([0, 2, 6]) & na.First(1)), ValueError, "mask: got Segments.* beside Tail.*First"),
    (lambda: call(TAIL & na.Tail(TAIL.mask, positions=np.arange(6))), ValueError, "the same positions in both"),
]  # fmt: skip


def call(mask, score=None):
    return na.attention(X, X, X, mask=mask, score=score)


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number):
    make, error, words = ERRORS[number]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(("options", "words"), [
    ({"mask": TAIL & na.Window(3, 0)}, "mask: got Window.* whose positions are not distributed"),
    ({"mask": TAIL, "score": na.Alibi(0.5)}, "score: got Alibi.* whose positions are not distributed"),
])  # fmt: skip
def test_several_ranks_refuse_positions(options, words):
    """But they take a tree by itself."""
    ring, x = nad.Simulated(2), np.random.default_rng(0).standard_normal((2, 6, 8))
    keys = ring.split(x)
    for attend, q in (nad.attention, keys), (nad.attention_over_keys, [x, x]):
        with pytest.raises(ValueError, match=words):
            attend(ring, q, keys, keys, **options)
    for o in nad.attention_over_keys(ring, [x, x], keys, keys, causal=True, mask=TAIL):
        np.testing.assert_allclose(o, na.attention(x, x, x, mask=TAIL), atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), [
    *((kind, np.float16) for kind in KINDS), *((kind, np.float32) for kind in ("stream", "all")),
])  # fmt: skip
def test_on_a_gpu(kind, dtype, rng):
    """In a ragged batch, and padded."""
    import cupy

    for trees, lengths, ragged in ([TREE, [-1], SHUFFLED], [20, 3, 777], True), (TREES, [70, 900], False):
        found, want = check_caches(rng, kind, trees, lengths, dtype, ragged, xp=cupy, page_size=16)
        for o, expected in zip(found, want()):
            np.testing.assert_allclose(o.get(), expected, atol=1e-5 if dtype == np.float32 else 4e-3)


FAULTS = {
    "test_caches": {
        "np.where(row < 0, token,": "np.where(row <= 0, token,",
        "row = token - first\n        return": "row = token - first - 1\n        return",
        "first + taken(self._depths(seqlen_q), row))": "first)",
    },
    ("masks/test_rolling.py::test_masks_and_scores[stream]", "masks/test_rolling.py::test_masks_and_scores[three]"): {
        "end = seqlen_k if self.ring is None else FAR": "end = seqlen_k",
    },
    "masks/test_rolling.py::test_errors": {
        "if not (leaf._crops_by_sequence or isinstance(leaf, Intervals | Where)):": "if False:",
    },
    "masks/test_rolling.py::test_masks_of_rows_are_seldom_drawn": {
        "if part not in ring.seen and not isinstance(part, Prefix)]": "]",
    },
    "test_kinds": {"not (is_tree and part == Causal())": "True"},
    "test_positions_of_any_mask": {"not (is_tree and part == Causal())": "part != Causal()"},
    "test_errors": {
        'getattr(leaf, "offset", None) is not None': "False",
        "found and (part._is_segments or isinstance(part, Lengths))": "False",
        "not _equal(tail.positions, tails[0].positions)": "False",
    },
    "functions/positions.py": {
        "test_caches": {
            "token if row < 0 else": "token if row <= 0 else",
            "return depth[i], max(key, 0), first": "return i, max(key, 0), first",
            "read(j - first - i,": "read(j - i,",
        },
    },
    "scores/placed.py": {
        "test_gradients": {"return whole.reshape((*lead, *x.shape))": "return whole"},
        "test_tangents": {"x if x is None else self._as_read(x)": "x"},
    },
    "distributed/share.py": {"test_several_ranks_refuse_positions": {"        if found:": "        if False:"}},
    "cuda/kernels/shared/visibility/cells.py": {
        "test_on_devices": {"where(j < first, j, first + take(depths, row))": "j"},
    },
}

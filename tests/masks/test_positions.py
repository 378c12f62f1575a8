"""Trees of tokens: each node has the result of a call on its path alone."""

from itertools import pairwise

import numpy as np
import pytest

import numbattn as na
from tests.caches.test_ragged import filled
from tests.tools.device import BY_UNIT, on
from tests.tools.launch import world_of

TREE = [-1, 0, 0, 1, 1, 2, 3, -1, 7]
SHUFFLED = [4, 4, 0, -1, 3, 1]  # parents after their children
HEADS = 4


def far(s, batch, head, i, j, table):
    return s + table[head, abs(i - j)] * (i + 1)


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


def check_arrays(rng, kind, parents, before, dtype=np.float64):
    options, nodes = KINDS[kind](rng), len(parents)
    q = rng.standard_normal((HEADS, nodes, 16)).astype(dtype)
    k, v = rng.standard_normal((2, 2, before + nodes, 16)).astype(dtype)
    o = na.attention(q, k, v, **beside(na.Tail(na.Bits.tree(parents)), options))
    return o, lambda: alone(q, k, v, parents, options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [TREE, SHUFFLED, [-1, 0, 1]], ids=["tree", "shuffled", "chain"])
def test_each_path_alone(kind, parents, rng):
    for before in 0, 1, 40:
        o, want = check_arrays(rng, kind, parents, before)
        np.testing.assert_allclose(o, want(), atol=1e-12)


@pytest.mark.parametrize(("unit", "kind"), [
    ("CUDA cores", "stream"), ("tensor cores", "sinks in the tree"), ("warpgroups", "two gaps"),
    ("CUDA cores", "relative"), ("tensor cores", "score"), ("warpgroups", "alibi"), ("tensor cores", "where"),
    *(pytest.param(unit, kind, marks=pytest.mark.slow) for unit in BY_UNIT for kind in KINDS),
])  # fmt: skip
def test_on_devices(unit, kind, rng):
    with world_of("simulated"), on(BY_UNIT[unit]):
        o, want = check_arrays(rng, kind, TREE, 70, np.float32)
    np.testing.assert_allclose(o, want(), atol=1e-5)


def check_caches(rng, kind, trees, lengths, like=np.float64, ragged=True, **cache):
    """A tree for each sequence, of its own size: in a ragged batch, or padded with further roots."""
    options, cache = KINDS[kind](rng), filled(rng, lengths, like=like, **cache)
    sizes, most = [*map(len, trees)], max(map(len, trees))
    if ragged:
        offsets = np.cumsum([0, *sizes])
        q = rng.standard_normal((HEADS, offsets[-1], 16)).astype(like)
        words = np.concatenate([na.Bits.tree(tree).words for tree in trees])
        tail = na.Tail(na.Bits(words), positions=np.concatenate([*map(depths_of, trees)]))
        o = na.attention(q, cache, **beside(tail & na.Segments(offsets), options))
        queries, found = ([x[:, a:b] for a, b in pairwise(offsets)] for x in (q, o))
    else:
        q = rng.standard_normal((len(trees), HEADS, most, 16)).astype(like)
        tail = na.Tail(na.Bits.tree(np.array(trees)[:, None]))
        queries, found = q, na.attention(q, cache, **beside(tail, options))
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
    ("tensor cores", "stream", True), ("warpgroups", "stream", False), ("CUDA cores", "all", True),
    ("tensor cores", "relative", False), ("warpgroups", "sinks in the tree", True),
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
    options = {"mask": na.Window(8, 0) | na.First(1), "score": na.Alibi(0.2)}
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

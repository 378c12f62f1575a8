"""Rolling caches: the results of a cache of all tokens, with the mask of the window."""

import pickle
from copy import copy, deepcopy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
import numbattn.distributed as nad
from numbattn import reference
from numbattn.masks import Ring
from tests.accuracy import assert_equal
from tests.masks.test_positions import HEADS, KINDS, depths_of, every_third
from tests.tools.device import BY_UNIT, on
from tests.tools.launch import world_of

LONG = 80
D = 16
FLOAT8 = ml_dtypes.float8_e4m3fn
CACHES = {"rows": {}, "pages": {"page_size": 3}, "int8": {"dtype": np.int8, "page_size": 4},
          "float8": {"dtype": FLOAT8}}  # fmt: skip


def two(batch, window, first, chunk, like=np.float64, **cache):
    """A rolling cache, and one of all tokens."""
    x = np.zeros(0, like)
    rolling = na.KVCache.rolling(batch, 2, window, D, first=first, chunk=chunk, like=x, **cache)
    return rolling, na.KVCache.zeros(batch, 2, LONG, D, like=x, **cache)


def append(rng, caches, counts):
    """Packed tokens, so many for each sequence."""
    offsets = np.cumsum([0, *counts])
    new = rng.standard_normal((2, 2, offsets[-1], D))
    for cache in caches:
        cache.append(*new, segments=offsets)


def of_window(ring, options):
    """Options of a call with a cache of all tokens."""
    near = na.Window(ring.window - 1, 0) | na.First(ring.first)
    return options | {"mask": na.Causal() & near & options.get("mask", na.Causal())}


def compare(rng, caches, count, options, atol=1e-12):
    """A call of `count` queries of each sequence; in a ragged batch, if that is a sequence of numbers."""
    rolling, whole = caches
    batch = len(rolling.lengths)
    if isinstance(count, int):
        q = rng.standard_normal((batch, HEADS, count, D))
    else:
        offsets = np.cumsum([0, *count])
        q = rng.standard_normal((HEADS, offsets[-1], D))
        options = options | {"mask": options.get("mask", na.Causal()) & na.Segments(offsets)}
    o, saved = na.attention_forward(q, rolling, **options)
    want, wanted = na.attention_forward(q, whole, **of_window(rolling._ring, options))
    np.testing.assert_allclose(o, want, atol=atol)
    np.testing.assert_allclose(saved.lse, wanted.lse, atol=atol)


@given(st.integers(0, 4), st.integers(1, 7), st.integers(0, 40))
def test_rows_have_the_last_tokens(first, size, count):
    ring, rows = Ring(first, size, size), np.full(first + size, -1)
    tokens = np.arange(count)
    rows[ring.rows(tokens)] = tokens                            # later ones overwrite earlier ones
    stored = np.arange(min(count, first + size))
    assert_equal(ring.tokens(stored, count), rows[: stored.size])
    assert_equal(np.sort(rows[: stored.size]), tokens[ring.lasts(tokens, count)])


@pytest.mark.parametrize("cache", CACHES)
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 9), st.sampled_from([0, 1, 4]), st.integers(1, 5), st.integers(0, 999))
def test_any_history(cache, window, first, chunk, seed):
    """Prompts, tokens, trees that are kept in part, sequences cut back; calls of as many queries as there are keys."""
    rng = np.random.default_rng(seed)
    caches = two(3, window, first, chunk, **CACHES[cache])
    rolling, whole = caches
    reached = np.zeros(3, int)
    for _ in range(8):
        lengths = rolling.lengths.astype(int)
        drop = np.minimum(np.where(reached <= rolling.capacity, lengths, chunk - (reached - lengths)), lengths)
        match rng.integers(4):
            case 0:
                append(rng, caches, np.minimum(rng.integers(0, 20, 3), LONG - lengths))
            case 1:
                append(rng, caches, np.minimum(rng.integers(0, chunk + 1, 3), LONG - lengths))
            case 2:
                left = lengths - rng.integers(0, drop + 1)
                for each in caches:
                    each.truncate(left)
                reached = np.where(left <= first, left, reached)
            case 3 if (nodes := min(chunk, *drop, *lengths)):
                path = [[*np.flatnonzero(rng.random(nodes) < 0.5), *[-1] * nodes][:nodes] for _ in range(3)]
                for each in caches:
                    each.keep(path, nodes)
                reached = np.where(rolling.lengths <= first, rolling.lengths, reached)
        assert_equal(rolling.lengths, whole.lengths)
        reached = np.maximum(reached, rolling.lengths)
        most = np.where(reached <= rolling.capacity, chunk, np.minimum(chunk, chunk - (reached - rolling.lengths)))
        most = np.where(rolling.lengths <= first, chunk, most)
        compare(rng, caches, int(min(most)), {})
        compare(rng, caches, [*rng.integers(0, most + 1)], {})


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_scores(kind, rng):
    """Of true positions, alone and in a ragged batch."""
    caches = two(2, 7, 2, 3)
    for counts in (5, 2), (3, 1), (44, 9):
        append(rng, caches, counts)
        compare(rng, caches, 3, KINDS[kind](rng))
        compare(rng, caches, [1, 3], KINDS[kind](rng))


def test_trees(rng):
    """With the window of each node's depth."""
    parents, score = [-1, 0, 0, 1, -1], na.Alibi(0.3)
    caches = two(2, 4, 1, 5, page_size=4)
    append(rng, caches, (30, 6))
    for mask in na.Tail(na.Bits.tree(parents)), na.Tail(rng.random((5, 5)) < 0.7, positions=depths_of(parents)):
        for more in {}, {"score": score}, {"mask": na.Where(every_third)}:
            compare(rng, caches, 5, more | {"mask": mask & more.get("mask", na.Causal())})
    forest = na.Tail(na.Bits.tree([-1, 0, 0, -1, 0]))
    compare(rng, caches, [3, 2], {"mask": forest})


def test_masks_of_rows_are_seldom_drawn():
    """Intervals of rows, and nothing at all where all rows are seen: the window itself is no reason to draw Bits."""
    q = np.zeros((1, 2, 1, D))
    for chunk, kinds in (1, ["Positions"]), (2, ["Positions", "AnyOf"]):
        rolling, _ = two(1, 5, 1, chunk)
        for options in {}, {"causal": True}, {"mask": na.Causal() & (na.Window(4, 0) | na.First(1)) & na.Prefix(3)}:
            _, saved = na.attention_forward(q, rolling, **options)
            assert [kind.__name__ for kind in saved.problem.mask_kinds] == kinds


@pytest.mark.parametrize("count", [1, 4])
def test_bits_of_a_sequence_alone_and_in_any_batch(count, rng):
    k, v = rng.standard_normal((2, 3, 2, LONG, D)).astype(np.float32)
    q, found = rng.standard_normal((3, HEADS, count, D)).astype(np.float32), []
    for page_size in None, 16, 100:
        rolling = na.KVCache.rolling(3, 2, 40, D, first=2, chunk=4, like=k, page_size=page_size)
        rolling.append(k, v)
        rolling.truncate([80, 78, 2])
        found.append(na.attention(q[:, :, :2] if count > 1 else q, rolling))
    for b, n in enumerate([80, 78, 2]):
        alone = na.KVCache.rolling(1, 2, 40, D, first=2, chunk=4, like=k)
        alone.append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        o = na.attention(q[b : b + 1, :, :2] if count > 1 else q[b : b + 1], alone)
        for others in found:
            assert_equal(others[b : b + 1], o)


def test_a_cache_of_the_same_arrays_is_the_same(rng):
    caches = two(2, 5, 1, 2, page_size=4)
    append(rng, caches, (33, 4))
    rolling = caches[0]
    again = na.KVCache(rolling.k, rolling.v, rolling.lengths, rolling.table, window=5, first=1, chunk=2)
    assert again == rolling
    assert repr(again).endswith("window=5, first=1, chunk=2)")
    q = rng.standard_normal((2, HEADS, 2, D))
    for each in again, pickle.loads(pickle.dumps(rolling)):
        assert_equal(na.attention(q, each), na.attention(q, rolling))
    new = np.ones((2, 2, 3, D))
    again.append(new, new)
    caches[1].append(new, new)
    compare(rng, caches, 2, {})


def test_weights_and_statistics(rng):
    """By row of the cache, of which there are fewer than in its pages."""
    caches = two(2, 5, 1, 3, page_size=3)
    append(rng, caches, (33, 4))
    q, options = rng.standard_normal((2, HEADS, 3, D)), {"score": na.Alibi(0.2)}
    P = na.attention_weights(q, caches[0], **options)
    want = na.attention_weights(q, caches[1], **of_window(caches[0]._ring, options))
    assert P.shape == (2, HEADS, 3, 8)
    for b, length in enumerate(caches[0].lengths):
        rows = np.arange(min(length, 8))
        at = caches[0]._ring.tokens(rows, length)
        np.testing.assert_allclose(P[b][..., rows], want[b][..., at], atol=1e-12)
        sums = na.attention_statistics(q, caches[0], column_sums=True, **options).column_sums
        np.testing.assert_allclose(sums[b][..., rows], want[b][..., at].sum(-2), atol=1e-12)


def test_edited_lengths_are_seen(rng):
    """In the same cache, and with what was kept of a call before."""
    caches = two(2, 5, 1, 2)
    options = {"mask": na.Window(3, 0), "score": na.Alibi(np.full(HEADS, 0.5))}
    for counts in (20, 3), (1, 0), (0, 1):
        append(rng, caches, counts)
        compare(rng, caches, 2, options)


@pytest.mark.parametrize(("unit", "kind", "how"), [
    ("tensor cores", "none", "ragged"), ("warpgroups", "alibi", "trees"),
    *(pytest.param(unit, kind, how, marks=pytest.mark.slow)
      for unit in BY_UNIT for kind in KINDS for how in ("batch", "ragged", "trees")),
])  # fmt: skip
def test_on_devices(unit, kind, how, rng):
    q, cache, options, want = call_of(rng, kind, how)
    with world_of("simulated"), on(BY_UNIT[unit]):
        o = na.attention(q, cache, **options)
    np.testing.assert_allclose(o, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("unit", BY_UNIT)
def test_compiled(unit, rng):
    for kind, how in ("none", "ragged"), ("alibi", "batch"):
        q, cache, options, want = call_of(rng, kind, how)
        with world_of("interpreted"), on(BY_UNIT[unit]):
            o = na.attention(q, cache, **options)
        np.testing.assert_allclose(o, want, atol=1e-5)


def call_of(rng, kind, how, like=np.float32, held=None, window=20, page_size=8, xp=np):
    """q, a cache, options of a call, and what the reference finds for each sequence with all of its tokens."""
    empty, whole = two(2, window, 3, 4, like=like, dtype=held, page_size=page_size)
    cache = na.KVCache(*map(xp.asarray, empty._arrays().values()), window=window, first=3, chunk=4)
    for offsets in [0, 76, 76 + 43], [0, 3, 7]:                 # of the second one rows begin again in its window
        k, v = rng.standard_normal((2, 2, offsets[-1], D)).astype(like)
        whole.append(k, v, segments=np.array(offsets))
        cache.append(xp.asarray(k), xp.asarray(v), segments=xp.asarray(offsets))
    options, ends = KINDS[kind](rng), np.array([0, 4, 5])
    if how == "trees":
        options |= {"mask": na.Tail(na.Bits.tree([-1, 0, 0, 1])) & options.get("mask", na.Causal())}
    q, keys = rng.standard_normal((2, HEADS, 4, D)).astype(like), zip(*whole._dense(), whole.lengths)
    counts = np.diff(ends) if how == "ragged" else (4, 4)
    want = [reference.attention_forward(q[b, :, :count].astype(float), k[:, :n], v[:, :n],
                                        **of_window(cache._ring, options))[0]
            for b, (count, (k, v, n)) in enumerate(zip(counts, keys))]  # fmt: skip
    if how != "ragged":
        return xp.asarray(q), cache, options, np.stack(want)
    q = np.concatenate([q[b, :, :count] for b, count in enumerate(counts)], axis=1)
    options |= {"mask": options.get("mask", na.Causal()) & na.Segments(xp.asarray(ends), max_queries=4)}
    return xp.asarray(q), cache, options, np.concatenate(want, axis=1)


X = np.zeros((2, 2, 9, D))


def made(**options):
    return na.KVCache(X[:, :, :8], X[:, :, :8], np.array([20, 3], np.int32), **{"window": 5, "chunk": 4} | options)


def cut(cache, *lengths):
    for each in lengths:
        cache.truncate(each)
    return cache


ERRORS = [
    (lambda: made(window=0), "KVCache window: got 0"),
    (lambda: made(chunk=3), r"KVCache k: got room for 8 tokens of a sequence, expected 7: first \+ window"),
    (lambda: made(first=2), "KVCache k: got room for 8 tokens of a sequence, expected 10"),
    (lambda: made(window=None, chunk=None, first=1), "KVCache first: got 1 without a window"),
    (lambda: na.KVCache.rolling(1, 1, 0, D, like=X), "KVCache.rolling window: got 0"),
    (lambda: na.attention(X[:, :, :5], made()), "q: got 5 queries of a sequence, at most 4, the chunk of the KVCache"),
    (lambda: cut(made(), [15, 3]), "lengths: got 15 tokens for sequence 0, allowed 16 to 20"),
    (lambda: cut(made(), [18, 3], [15, 3]), "lengths: got 15 tokens for sequence 0, allowed 16 to 18"),
    (lambda: na.attention(X[:, :, :3], cut(made(), [18, 3])), "q: got 3 queries of sequence 0, at most 2 until"),
    (lambda: made().keep([[0], [0]], 5), "nodes: got 5, "),
    (lambda: cut(made(), [17, 3]).keep([[-1, -1], [0, 1]], 2), "path: got 15 tokens for sequence 0, allowed 16 to 17"),
    *((lambda options=options: na.attention(X[:, :, :2], made(), **options), words) for options, words in (
        ({"mask": na.Causal(0) | na.First(2)}, r"mask: got Causal\(offset=0\) with a rolling KVCache, expected it"),
        ({"mask": na.Lengths(3)}, "mask: got Lengths.* without keys: First counts"),
        ({"mask": np.ones((2, 8), bool)}, "mask: got Dense.* with a rolling KVCache, whose keys have no columns"),
        ({"score": na.Bias(np.zeros((2, 8)))}, "score: got Bias.* with a rolling KVCache, whose keys have no columns"),
        ({"score": na.Alibi(0.5, offset=0)}, "score: got Alibi.* with a rolling KVCache, expected it without"),
        ({"dropout": na.Dropout(0.5, 1)}, "dropout: got Dropout.* with a rolling KVCache"),
    )),
    (lambda: nad.attention_over_keys(nad.Simulated(1), [X[:, :, :1]], [made()]), "k: got a rolling KVCache"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number):
    make, words = ERRORS[number]
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_left_may_be_dropped():
    """Where no key has been overwritten, and as far as only the first ones are left; more can come after that."""
    cache = made()
    cut(cache, [16, 0], [0, 0])
    cache.append(X[:, :, :4], X[:, :, :4])
    na.attention(X[:, :, :4], cut(cache, [4, 1]))
    assert not made().overflowed()


def test_an_interrupted_append_is_one_whose_tokens_were_dropped(rng):
    """A signal's exception comes when keys have been overwritten: appending again makes it good."""
    caches = two(2, 5, 1, 2)
    append(rng, caches, (20, 3))

    class Interrupted(np.ndarray):
        def __setitem__(self, at, x):
            super().__setitem__(at, x)
            raise KeyboardInterrupt

    held = caches[0]
    cache = na.KVCache(held.k, held.v.view(Interrupted), held.lengths, window=5, first=1, chunk=2)
    k, v = rng.standard_normal((2, 2, 2, 4, D))
    with pytest.raises(KeyboardInterrupt):
        cache.append(k, v)
    with pytest.raises(ValueError, match="q: got 1 queries of sequence 0, at most 0 until more tokens are appended"):
        na.attention(X[:, :, :1], cache)
    assert cut(cache, [20, 3]).lengths.tolist() == [20, 3]
    cache = copy(cache)
    object.__setattr__(cache, "v", held.v)
    for each in cache, caches[1]:
        each.append(k, v)
    compare(rng, (cache, caches[1]), 2, {})


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_know_of_what_was_dropped(copied):
    with pytest.raises(ValueError, match="q: got 3 queries of sequence 0, at most 2 until"):
        na.attention(X[:, :, :3], copied(cut(made(), [18, 3])))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "how", "dtype", "held"), [
    ("none", "batch", np.float16, None), ("none", "ragged", np.float16, np.int8), ("alibi", "trees", np.float16, None),
    ("stream", "ragged", np.float16, None), ("relative", "batch", np.float32, np.float16),
    ("all", "ragged", np.float32, None),
])  # fmt: skip
def test_on_a_gpu(kind, how, dtype, held, rng):
    import cupy

    q, cache, options, want = call_of(rng, kind, how, dtype, held, window=100 if how == "batch" else 40, xp=cupy)
    atol = 1e-5 if dtype == np.float32 and held is None else 4e-3
    np.testing.assert_allclose(na.attention(q, cache, **options).get(), want, atol=atol)


@pytest.mark.gpu
def test_tokens_dropped_on_a_gpu():
    """Lengths are clipped to what is allowed."""
    import cupy

    cache = na.KVCache(*map(cupy.asarray, made()._arrays().values()), window=5, chunk=4)
    cut(cache, cupy.asarray([18, 3]), cupy.asarray([3, 9]))
    assert cache.lengths.tolist() == [16, 3]
    cache.append(*[cupy.asarray(X[:, :, :6])] * 2)
    cut(cache, 0)
    assert cache.lengths.tolist() == [0, 0]


FAULTS = {
    "test_rows_have_the_last_tokens": {
        "self.first + (token - self.first) % self.size)": "self.first + token % self.size)",
        "count - 1 - (count - 1 - row) % self.size)": "count - 1 - (count - row) % self.size)",
        "(token >= count - self.size)": "(token > count - self.size)",
    },
    "test_any_history[rows]": {
        "begins_again = end > first + size": "begins_again = end >= first + size + 1 + (first == 1)",
        "np.where(begins_again, first, hidden)": "np.where(begins_again, 0, hidden)",
        "end = hidden + size - window": "end = hidden + size - window - (size > window)",
    },
    "test_masks_of_rows_are_seldom_drawn": {"        if self.size == self.window:\n            return ()\n": ""},
    "functions/positions.py": {
        "test_masks_and_scores[alibi]": {"(count - 1 - j) % (ring[1] - ring[0])": "(count - 1 - j) % ring[1]"},
    },
    "caches/arrays.py": {
        ("test_errors", "test_what_is_left_may_be_dropped"): {
            "(reached <= ring.capacity) | (lengths <= ring.first)": "reached <= ring.capacity",
            "(counts > left) & (least > 0)": "(counts > left + 1) & (least > 0)",
            "rows < wanted or (self.table is None and rows > wanted)": "rows < wanted",
        },
        "test_an_interrupted_append_is_one_whose_tokens_were_dropped": {
            "np.minimum(reached - self.chunk, self.lengths)": "reached - self.chunk",
        },
        "test_copies_know_of_what_was_dropped[deepcopy]": {'{"_reached": self._reached}': "{}"},
        "test_weights_and_statistics": {"return rows[:, :, : self.capacity]": "return rows"},
    },
    "caches/kv_cache.py": {
        "test_an_interrupted_append_is_one_whose_tokens_were_dropped": {
            "        self._overwrite(counts)\n        for x": "        for x",
        },
    },
}

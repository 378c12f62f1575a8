"""Attention of split sequences gives what it gives on one device."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import distributed as nad
from numbattn import reference
from numbattn.call import passes as computed
from numbattn.distributed.messages import Exchange, Wait
from numbattn.distributed.pieces import RankPlace
from numbattn.distributed.rank import backward, forward
from numbattn.distributed.share import RingOptions
from numbattn.distributed.simulated import Turns

from .problems import found_wrong


def far(s, batch, head, i, j, table):
    return s * (1 + 0.1 * batch + 0.2 * head) - table[i] * abs(i - j)


def segments(rng, m, n):
    bounds = [np.sort(np.append(rng.integers(0, size + 1, 3), [0, size])) for size in (m, n)]
    return na.Segments(bounds[0]) if m == n else na.Segments(*bounds)


MASKS = {  # of rng, m, n
    "none": lambda rng, m, n: None,
    "causal": lambda rng, m, n: na.Causal(),
    "window": lambda rng, m, n: na.Window(40, 3),
    "lengths": lambda rng, m, n: na.Lengths(keys=rng.integers(0, n + 1, (2, 1)), queries=int(rng.integers(0, m + 1))),
    "first": lambda rng, m, n: na.First(int(rng.integers(0, n + 9))),
    "prefix": lambda rng, m, n: na.Prefix(int(rng.integers(0, n + 1))),
    "documents": lambda rng, m, n: segments(rng, m, n) & na.Causal(),
    "windows in documents": lambda rng, m, n: segments(rng, m, n) & (na.Window(20, 0) | na.Prefix(min(2, n))),
    "stream in documents": lambda rng, m, n: segments(rng, m, n) & na.Causal() & (na.Window(9, 0) | na.First(40)),
    "intervals": lambda rng, m, n: na.Intervals(*np.sort(rng.integers(0, n + 1, (2, m)), axis=0)),
    "dense": lambda rng, m, n: na.Dense(rng.random((2, m, n)) < 0.4),
    "bits": lambda rng, m, n: na.Bits.pack(rng.random((m, n)) < 0.4) & na.Causal(),
    "blocks": lambda rng, m, n: na.BlockSparse(rng.random((1, 1, -(-m // 48), -(-n // 20))) < 0.4, (48, 20)),
    "nothing": lambda rng, m, n: na.Causal(-m - n),
}
SCORES = {  # of rng, m, n
    "none": lambda rng, m, n: None,
    "alibi": lambda rng, m, n: [na.Alibi(rng.random(2)), na.Softcap(3.0), na.Sink(rng.random((2, 1)))],
    "relative": lambda rng, m, n: na.RelativeBias(rng.random((2, 21)), offset=n - m),
    "bias": lambda rng, m, n: [na.Bias(rng.random((m, 1))), na.Bias(rng.random((2, m, n))), na.Bias(rng.random(n)),
                              na.Bias(0.5)],
    "function": lambda rng, m, n: [na.Score(far, arrays=[rng.random(m)], gradient=True), na.Sink(0.5)],
}


def strict(work):
    """A generator of a rank that arrays arrive as it expects them: NCCL and MPI take its word for it."""
    def checked(*given):
        running, answer, expected = work(*given), None, {}
        while True:
            try:
                message = running.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield message
            if isinstance(message, Exchange):
                expected[id(answer)] = answer, message.expected
            elif isinstance(message, Wait):
                _, likes = expected.pop(id(message.ticket))
                assert likes == [(x.shape, x.dtype) for x in answer]

    return checked


class Strict(nad.Simulated):
    def _run(self, work, *given):
        return super()._run(strict(work), *given)


@settings(deadline=None, max_examples=60)
@given(
    *[st.sampled_from([0, 1, 31, 64, 100, 129, 200])] * 2, st.integers(1, 8), st.sampled_from(list(MASKS)),
    st.sampled_from(list(SCORES)), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_as_on_one_device(m, n, ranks, mask, score, square, dropped, zigzag, seed):
    rng, n = np.random.default_rng(seed), m if square else n
    if score == "alibi" and "documents" in mask:
        n = m  # see test_what_is_not_distributed
    q, do, k, v = (rng.standard_normal((2, heads, size, 8)) for heads, size in ((2, m), (2, m), (1, n), (1, n)))
    dlse = rng.standard_normal((2, 2, m))
    options = {"mask": MASKS[mask](rng, m, n), "score": SCORES[score](rng, m, n), "scale": 0.4,
               "dropout": na.Dropout(0.3, seed, 4) if dropped else None}  # fmt: skip
    o, saved = na.attention_forward(q, k, v, **options)
    grads = na.attention_backward(do, saved, dlse=dlse)
    ring = Strict(ranks, "zigzag" if zigzag else "contiguous")
    split, join = ring.split, ring.join
    o_parts, saved_parts = nad.attention_forward(ring, *map(split, (q, k, v)), **options)
    found = nad.attention_backward(ring, split(do), saved_parts, dlse=split(dlse, -1))
    got = [join(o_parts), join([own.lse for own in saved_parts], -1), *map(join, found), *found.score]
    for one, other in zip(got, [o, saved.lse, *grads, *grads.score], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", range(12))
def test_random_problems(number):
    """All that a call can be asked for, in all dtypes and layouts."""
    assert found_wrong(20260 + number, number) == []


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_as_accurate_as_on_one_device(rng, dtype):
    """However many ranks: what travels and is added up is of float32."""
    q, k, v, do = rng.standard_normal((4, 2, 500, 16)).astype(dtype)
    slopes = np.array([0.01, 0.02], dtype)
    options = {"causal": True, "score": [na.Alibi(slopes), na.Sink(slopes)]}
    want = [reference.attention_forward(q, k, v, **options)[0], *reference.attention_backward(do, q, k, v, **options)]
    want += reference.attention_backward(do, q, k, v, **options).score
    ring = nad.Simulated(8)
    results = []
    for module, split, join, place in ((na, np.asarray, np.asarray, ()), (nad, ring.split, ring.join, (ring,))):
        o, backprop = module.attention_vjp(*place, *map(split, (q, k, v)), **options)
        grads = backprop(split(do))
        results.append([join(o), *map(join, grads), *grads.score])
    for alone, together, exact in zip(*results, want, strict=True):
        assert together.dtype == dtype
        errors = [np.sqrt(((x.astype(np.float64) - exact) ** 2).mean()) for x in (alone, together)]
        rounding = float(ml_dtypes.finfo(dtype).eps) / 2 * np.sqrt((exact**2).mean())  # all there is of two slopes
        assert errors[1] <= max(1.5 * errors[0], rounding)


# ------------------------------------------------------------------------------------------------------ what travels
class Watched(Strict):
    """Counts tokens of k that travel, by (source, to), and the bytes that each rank sends."""

    def _run(self, *args):
        self.travelled, self.sent = {}, [0] * self.ranks
        return super()._run(*args)

    def _delivered(self, x, source, to):
        self.travelled[source, to] = self.travelled.get((source, to), 0) + sum(x.shape[-2:-1]) // 2  # of k and v
        self.sent[source] += x.nbytes
        return super()._delivered(x, source, to)


def tokens_sent(ring, **options):
    q, k, v = (ring.split(x) for x in np.random.default_rng(0).standard_normal((3, 1024, 4)))
    o, saved = nad.attention_forward(ring, q, k, v, **options)
    forward = ring.travelled
    nad.attention_backward(ring, o, saved)
    assert ring.travelled.keys() >= forward.keys()
    return forward


def test_what_nobody_sees_does_not_travel():
    everything = tokens_sent(Watched(4))
    assert everything == {(a, b): 256 for a in range(4) for b in range(4) if a != b}
    causal = tokens_sent(Watched(4), causal=True)
    assert causal == {(a, b): 256 if a > b else 128 for a, b in everything}
    window = tokens_sent(Watched(4, "contiguous"), mask=na.Window(64, 0))
    assert window == {(a, a + 1): 256 for a in range(3)}
    documents = tokens_sent(Watched(4, "contiguous"), mask=na.Segments([0, 512, 1024]))
    assert documents == dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], 256)
    assert tokens_sent(Watched(4), mask=na.Lengths(keys=0)) == {}


def test_gradients_travel_in_the_dtype_of_sums():
    ring = Watched(2)
    q, k, v = (ring.split(x) for x in np.zeros((3, 128, 4), np.float16))
    _, saved = nad.attention_forward(ring, q, k, v)
    assert sum(ring.sent) == 2 * 128 * 4 * 2
    nad.attention_backward(ring, q, saved)
    assert sum(ring.sent) == 2 * 128 * 4 * (2 + 4)


class Logged(nad.Simulated):
    """Who does what when; arrays are copied as late as a driver may."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log = []

    def _begun(self, arrays, source, to):
        self.log.append("exchange")
        return arrays, [x.copy() for x in arrays]

    def _arrived(self, incoming, outgoing):
        self.log.append("wait")
        for arrays, copies in (incoming, outgoing):
            for x, copy in zip(arrays, copies):
                np.testing.assert_array_equal(x, copy, err_msg="written to before it has arrived")
        return incoming[1]


@pytest.fixture
def logged(monkeypatch):
    """Makes a Logged, which logs calls of kernels, too."""
    run = computed.run

    def made(*args):
        ring = Logged(*args)
        monkeypatch.setattr(computed, "run", lambda *args: ring.log.append("compute") or run(*args))
        return ring

    return made


def passes(ring, n=256, **options):
    """What is logged in both passes."""
    q, k, v = (ring.split(x) for x in np.random.default_rng(0).standard_normal((3, n, 4)))
    o, saved = nad.attention_forward(ring, q, k, v, **options)
    forward, ring.log = ring.log, []
    nad.attention_backward(ring, o, saved)
    return forward, ring.log


def test_arrays_are_on_their_way_while_ranks_compute(logged):
    """Keys of the next step, gradients of the last: all ranks have sent what they can before any of them computes. No
    rank computes twice before all have computed once. And nobody writes to what is on its way."""
    forward, backward = passes(logged(3))
    exchange, compute, step, wait = (3 * names for names in (["exchange"], ["compute"], ["compute", "wait"], ["wait"]))
    assert forward == [*exchange, *step, *exchange, *step, *compute]
    second, third = [*exchange, *compute, *exchange, *wait], [*step, *exchange, *wait]  # keys, gradients; gradients
    assert backward == [*exchange, *step, *second, *third]


@pytest.mark.parametrize(("order", "options", "calls"), [
    ("zigzag", {}, 9),
    ("zigzag", {"causal": True, "score": [na.Softcap(3.0), na.Sink(0.5)]}, 9),
    ("contiguous", {"causal": True}, 6),
    ("zigzag", {"mask": na.Window(400, 0)}, 9),
    ("zigzag", {"mask": na.Window(20, 0)}, 11),
    ("zigzag", {"causal": True, "score": na.Alibi(0.1)}, 21),
    ("zigzag", {"dropout": na.Dropout(0.5, 1)}, 36),
    ("zigzag", {"mask": np.ones((256, 256), bool)}, 36),
], ids=str)  # fmt: skip
def test_as_few_calls_as_masks_allow(logged, order, options, calls):
    """One for each step of a rank, where nothing but a Causal depends on where pieces are."""
    for log in passes(logged(3, order), **options):
        assert log.count("compute") == calls


# ------------------------------------------------------------------------------------------------- rows of one rank
def each(ring, work, *by_rank):
    """The results of generators that are given their own arguments."""
    places = [RankPlace(rank, ring.ranks, ring.order) for rank in range(ring.ranks)]
    turns = Turns(ring, [strict(work)(place, *own) for place, *own in zip(places, *by_rank)])
    return zip(*ring._together("each", turns.results))


@pytest.mark.parametrize("kind", ["dense", "bits", "intervals"])
def test_ranks_may_hold_their_own_rows_alone(rng, kind):
    """Of the mask and of a Bias, whose gradient is of these rows, too."""
    q, k, v, do = rng.standard_normal((4, 2, 200, 8))
    visible, bias, ring = rng.random((200, 200)) < 0.3, rng.standard_normal((200, 200)), nad.Simulated(3)
    first = rng.integers(0, 100, 200)
    whole = {"dense": na.Dense(visible), "bits": na.Bits.pack(visible), "intervals": na.Intervals(first, first + 70)}
    masks = {"dense": lambda rows: na.Dense(rows), "bits": na.Bits.pack, "intervals": lambda x: na.Intervals(x, x + 70)}
    o, backprop = na.attention_vjp(q, k, v, mask=whole[kind], score=[na.Bias(bias), na.Alibi(0.1)])
    grads = backprop(do)
    rows = ring.split(first, axis=0) if kind == "intervals" else ring.split(visible)
    calls = [RingOptions(False, masks[kind](own), None, None, [na.Bias(b), na.Alibi(0.1)])
             for own, b in zip(rows, ring.split(bias))]  # fmt: skip
    o_parts, saved = each(ring, forward, *map(ring.split, (q, k, v)), calls)
    dq, dk, dv, score = each(ring, backward, ring.split(do), [None] * 3, saved, [False] * 3)
    dbias, dslope = zip(*score)
    for parts, want in zip((o_parts, dq, dk, dv, dbias), (o, *grads, grads.score[0])):
        np.testing.assert_allclose(ring.join(list(parts)), want, atol=1e-13)
    np.testing.assert_allclose(dslope, [grads.score[1]] * 3, rtol=1e-12)


# -------------------------------------------------------------------------------------------------------------- errors
def test_what_is_not_distributed(rng):
    ring = nad.Simulated(2)
    q, k = ring.split(np.zeros((64, 8))), ring.split(np.zeros((96, 8)))
    with pytest.raises(ValueError, match=r"score: got Alibi.* without an offset within Segments of unequal"):
        nad.attention(ring, q, k, k, mask=na.Segments([0, 64], [0, 96]), score=na.Alibi(1.0))


X = [np.zeros((2, 32, 8))] * 2


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"mask": na.Lengths(keys=65)}, ValueError, "mask: Lengths keys: got 65, allowed 0 to 64"),
    ({"mask": na.Segments([0, 65])}, ValueError, "mask: Segments queries: got values from 0 to 65, allowed 0 to 64"),
    ({"mask": np.ones((33, 64), bool)}, ValueError, "mask: Dense: got 33 rows for queries, expected 64, all of them"),
    ({"score": na.Alibi(np.ones(3))}, ValueError, r"score: Alibi slopes: got the shape \(3,\)"),
    ({"score": na.Bias(np.ones((64, 32)))}, ValueError, "score: Bias: got 32 columns for keys, expected 64"),
    ({"score": na.Sink(np.ones(3))}, ValueError, r"score: Sink logits: got the shape \(3,\)"),
    ({"score": na.Alibi(1.0, offset=np.ones(3, int))}, ValueError, r"score: Alibi offset: got the shape \(3,\)"),
    ({"mask": na.Causal(-99) & np.ones((33, 64), bool)}, ValueError, "mask: Dense: got 33 rows for queries"),
    ({"mask": na.Causal(-99), "score": na.Bias(np.ones((64, 32)))}, ValueError, "score: Bias: got 32 columns for keys"),
    ({"mask": na.Causal(-99) & np.ones((3, 32, 64), bool)}, ValueError, r"mask: got booleans of the shape \(3, "),
    ({"scale": -1.0}, ValueError, "scale: got -1.0"),
    ({"dropout": 0.1}, TypeError, "dropout: got 0.1"),
    ({"plan": ["ring"]}, ValueError, r"plan: got \['ring'\], allowed 'ring', 'heads' or None"),
    ({"causal": 1}, TypeError, "causal: got 1"),
    ({"mask": "causal"}, TypeError, "mask: got 'causal'"),
])  # fmt: skip
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        nad.attention(nad.Simulated(2), X, X, X, **{"plan": "ring", **options})


def test_errors_of_arrays():
    ring = nad.Simulated(2)
    with pytest.raises(TypeError, match=r"q: got numpy.ndarray of float64, expected a list of 2, a part for each"):
        nad.attention(ring, X[0], X, X)
    with pytest.raises(ValueError, match="q: got 32 of 64 tokens on rank 1, expected 0: what `split` gives it"):
        nad.attention(nad.Simulated(3), *[[X[0], X[0], X[0][:, :0]]] * 3)
    _, backprop = nad.attention_vjp(ring, X, X, X)
    with pytest.raises(ValueError, match=r"do: got the shape \(2, 31, 8\), expected \(2, 32, 8\)"):
        backprop([X[0], X[0][:, 1:]])
    with pytest.raises(TypeError, match=r"saved: got 3, expected what distributed\.attention_forward returned"):
        nad.attention_backward(ring, X, [3, 3])
    _, saved = nad.attention_forward(ring, X, X, X)
    with pytest.raises(ValueError, match="got that of rank 1 of 2 in zigzag order, expected that of rank 0 of 2"):
        nad.attention_backward(ring, X, saved[::-1])
    with pytest.raises(ValueError, match="got that of rank 0 of 2 in zigzag order, expected that of rank 0 of 1"):
        nad.attention_backward(nad.Simulated(1), X[:1], saved[:1])
    with pytest.raises(ValueError, match="of 2 in zigzag order, expected that of rank 0 of 2 in contiguous order"):
        nad.attention_backward(nad.Simulated(2, "contiguous"), X, saved)
    _, causal = nad.attention_forward(ring, X, X, X, causal=True)
    with pytest.raises(ValueError, match=r"saved: mask: got All\(\) on rank 0, All\(Causal\(None\)\) on rank 1"):
        nad.attention_backward(ring, X, [saved[0], causal[1]])
    cache = na.KVCache.zeros(1, 1, 8, 8, like=X[0])
    with pytest.raises(TypeError, match="k: got a KVCache, which has no gradients"):
        nad.attention(ring, X, [cache] * 2, X)


FAULTS = {
    "rows_of(keys, theirs), source,": "keys, source,",
    "zip((dq, *totals), (some, rows, rows), grads)": "zip((dq,), (some,), grads)",
    "    add_rows((dk, dv), share.other_hop(place.ranks - 1).keys, (yield from arrived(sent_back)))": "    pass",
    "delta - (0 if dlse is None else dlse)": "delta",
    "if dx is not None and not is_own": "if dx is not None",
    "distributed/rank.py": {
        "        _check_place(saved, place)\n": "",
        "for name, fact in first.items()": "for name, fact in ()",
    },
    "distributed/share.py": {
        "return steps_of(self.score)": "return list(self.score)",
        "Origin(crop.first_query, crop.first_key,": "Origin(crop.first_query, crop.first_query,",
        "needs_positions or self.problem.dropout or": "needs_positions or",
        "any(part._needs_positions for part in self.parts)": "False",
        "cropped(self.mask, crop) if self.mask._holds_arrays else block.mask": "block.mask",
        "mask if mask._axis_of_queries is None else All()": "mask",
        "any(rows not in (1, seqlen_q) for rows in of_value)": "False",
        "check_mask(_without_rows(self.mask)._fit(shape), shape, xp)": "pass",
        "check_numbers(self.mask, shape, xp)": "pass",
        "self.sink._fit(batch, *self.sizes)": "pass",
        "check_mask(block.mask._fit(shape), shape, xp)": "pass",
        "check_part(part._cropped(block.crop, self.mask._frame), shape, xp)": "pass",
        "if got != length": "if got > length + 99",
        "distributed/test_devices.py": {
            "mask, near = yield from near_by(mask, score)": "near = score",
        },
    },
}

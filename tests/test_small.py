"""Many small matrices in one call. Each is computed as if it were alone: what a block or a thread computes before it,
or beside it, changes none of its bits.

On the CPU; simulated, on a device so small that each of its few blocks takes several matrices in turn; and on a GPU.
"""

from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference

from .accuracy import present, random, to_numpy
from .problems import on_device
from .rounding import rounding, wrong_elements

BFLOAT16 = ml_dtypes.bfloat16
LITTLE = {"multiprocessors": 1, "shared": 24 << 10}  # of the device: room for a few blocks


class Sizes(NamedTuple):
    batches: int
    heads: int
    heads_k: int
    m: int
    n: int
    d: int
    e: int
    dtype: type

    def arrays(self, rng):
        """q, k, v, do and dlse, of NumPy."""
        batches, heads, heads_k, m, n, d, e, dtype = self
        shapes = (batches, heads, m, d), (batches, heads_k, n, d), (batches, heads_k, n, e), (batches, heads, m, e)
        lse = np.float64 if dtype == np.float64 else np.float32
        return [random(rng, shape, dtype) for shape in shapes] + [random(rng, (batches, heads, m), lse)]


SMALL = {
    "8 x 8": Sizes(40, 3, 3, 8, 8, 8, 8, np.float32),
    "groups of heads": Sizes(30, 4, 2, 13, 30, 20, 7, BFLOAT16),
    "16 x 16": Sizes(30, 2, 2, 16, 16, 31, 17, np.float64),
    "64 x 64": Sizes(6, 2, 2, 64, 64, 32, 32, np.float32),
    "one key": Sizes(50, 2, 1, 20, 1, 31, 16, np.float64),
    "one query": Sizes(50, 2, 2, 1, 33, 16, 31, np.float16),
    "odd": Sizes(4, 2, 2, 127, 101, 40, 40, BFLOAT16),
}
PLACES = {
    **{f"cpu-{name}": ("cpu", sizes) for name, sizes in SMALL.items()},
    "simulated": ("ampere", Sizes(3, 2, 2, 9, 7, 5, 3, np.float32)),
    "simulated-groups": ("ampere", Sizes(5, 2, 1, 8, 9, 4, 8, np.float32)),
    "simulated-sizes": ("ampere", Sizes(5, 1, 1, 36, 36, 3, 5, np.float16)),
    **{f"gpu-{name}": ("gpu", sizes._replace(batches=40 * sizes.batches)) for name, sizes in SMALL.items()},
}
HAS_CUDA = find_spec("numba_cuda") and find_spec("cupy")
MARKS = {"ampere": pytest.mark.skipif(not HAS_CUDA, reason="needs numba-cuda"), "gpu": pytest.mark.gpu}


def everywhere(name, values, **simulated):
    """Parametrize by `place` and `name`: by all values but where it is simulated, which takes its time, by those given
    for the place."""
    cases = []
    for place, (device, _) in PLACES.items():
        few = simulated.get(place.replace("-", "_"), ()) if place.startswith("simulated") else values
        cases += [pytest.param(place, value, id=f"{place}-{value}", marks=MARKS.get(device, ())) for value in few]
    return pytest.mark.parametrize(("place", name), cases, indirect=["place"])


@pytest.fixture
def place(request):
    """The library whose arrays a call takes, and Sizes."""
    device, sizes = PLACES[request.param]
    with on_device(device, "simulated", **LITTLE) as xp:
        yield xp, sizes


def results(xp, q, k, v, do, dlse, **options):
    """o, lse, dq, dk, dv and the gradients of scores, of NumPy."""
    q, k, v, do, dlse = map(xp.asarray, (q, k, v, do, dlse))
    with np.errstate(all="ignore"):
        o, saved = na.attention_forward(q, k, v, **options)
        grads = na.attention_backward(do, saved, dlse=dlse, deterministic=True)
    return [*map(to_numpy, (o, saved.lse, *grads, *present(grads.score)))]


def assert_right(found, q, k, v, do, dlse, **options):
    """Give or take what rounding explains, of arrays of NumPy."""
    grads = reference.attention_backward(do, q, k, v, dlse=dlse, **options)
    exact = *reference.attention_forward(q, k, v, **options), *grads, *present(grads.score)
    errors = rounding(do, q, k, v, dlse, **options)
    for number, (got, want, error) in enumerate(zip(found, exact, errors, strict=True)):
        assert got.shape == want.shape
        assert not wrong_elements(got, want, error).any(), f"result {number}"


def assert_same_bits(got, want):
    for number, pair in enumerate(zip(got, want, strict=True)):
        one, other = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in pair)
        np.testing.assert_array_equal(one, other, err_msg=f"result {number}")


@MARKS["ampere"]
@pytest.mark.parametrize("name", ["simulated", "simulated-groups"])
def test_blocks_that_are_simulated_take_several_matrices(rng, name):
    passes, device = import_module("numbattn.cuda.passes"), import_module("tests.tools.device").AMPERE
    sizes = PLACES[name][1]
    plans = passes.plans(device._replace(**LITTLE), *sizes.arrays(rng)[:3])
    for plan, heads in zip(plans, (sizes.heads, sizes.heads_k)):
        (step,) = plan.steps
        assert step.blocks < sizes.batches * heads


# ---------------------------------------------------------------------------------------------------------- neighbours
OPTIONS = {  # of a bias that the batch shares, lengths of its matrices
    "plain": lambda bias, keys: {},
    "bias": lambda bias, keys: {"score": na.Bias(bias, gradient=False), "causal": True},
    "lengths": lambda bias, keys: {"score": na.Alibi(bias[:, 0, 0], gradient=False), "mask": na.Lengths(keys)},
}


def case(rng, sizes, name):
    """The arrays of a call, and a function: places in the batch -> what it gets beside them."""
    bias, keys = random(rng, (sizes.heads, sizes.m, sizes.n), np.float32), rng.integers(0, sizes.n + 1, sizes.batches)
    return sizes.arrays(rng), lambda at=slice(None): OPTIONS[name](bias, keys[at, None])


@everywhere("options", OPTIONS, simulated=["bias"])
def test_alone(rng, place, options):
    xp, sizes = place
    arrays, beside = case(rng, sizes, options)
    together = results(xp, *arrays, **beside())
    for b in (1, sizes.batches - 1):
        at = slice(b, b + 1)
        assert_same_bits(results(xp, *(x[at] for x in arrays), **beside(at)), [x[at] for x in together])


@everywhere("options", OPTIONS, simulated=["lengths"])
def test_in_another_order(rng, place, options):
    xp, sizes = place
    (arrays, beside), order = case(rng, sizes, options), rng.permutation(sizes.batches)
    want = [x[order] for x in results(xp, *arrays, **beside())]
    assert_same_bits(results(xp, *(x[order] for x in arrays), **beside(order)), want)


@everywhere("options", OPTIONS, simulated_groups=["lengths"])
def test_beside_what_is_not_finite(rng, place, options):
    """Some heads of k are NaN, others inf, with all that belongs to them."""
    xp, sizes = place
    (arrays, beside), group_size = case(rng, sizes, options), sizes.heads // sizes.heads_k
    spoil = rng.choice([1, 1, np.nan, np.inf], (sizes.batches, sizes.heads_k))
    spoil = {sizes.heads_k: spoil, sizes.heads: np.repeat(spoil, group_size, axis=1)}
    dropout = na.Dropout(0.2, seed=3)
    clean, spoilt = (
        results(xp, *given, **beside(), dropout=dropout)
        for given in (arrays, [(x.T * spoil[x.shape[1]].T.astype(x.dtype)).T for x in arrays])
    )
    assert_same_bits(*([x[spoil[x.shape[1]] == 1] for x in found] for found in (spoilt, clean)))


@everywhere("score", ["bias", "capped bias"], simulated=["bias", "capped bias"])
def test_padding_is_not_read(rng, place, score):
    """NaN or 0 beyond lengths, and in a bias where nobody looks, is the same; some matrices are empty."""
    xp, (batches, heads, _, m, n, *_) = place
    keys, queries = rng.integers(0, n + 1, (batches, 1)), rng.integers(0, m + 1, (batches, 1))
    keys[0], queries[-1] = 0, 0
    rows, cols = np.arange(m) >= queries, np.arange(n) >= keys
    unseen = (rows[:, :, None] | cols[:, None, :]).all(axis=0)
    bias, arrays, found = random(rng, (heads, m, n), np.float32), place[1].arrays(rng), []
    for nothing in (0, np.nan):
        bias[:, unseen] = nothing
        for x, beyond in zip(arrays, (rows, cols, cols, rows, rows)):
            x.swapaxes(1, 2)[beyond] = nothing
        parts = [na.Bias(bias)] if score == "bias" else [na.Bias(bias, gradient=False), na.Softcap(2.0)]
        found.append(results(xp, *arrays, mask=na.Lengths(keys, queries), score=parts))
    assert_same_bits(*found)
    o, lse, dq, dk, dv, *dbias = found[1]
    blind, hidden = rows | (keys == 0), cols | (queries == 0)
    for x, beyond in ((o, blind), (dq, blind), (dk, hidden), (dv, hidden)):
        assert not x.swapaxes(1, 2)[beyond].any()
    assert (np.isneginf(lse) == blind[:, None]).all()
    assert not any(x[:, unseen].any() for x in dbias)


def by_places(s, batch, head, i, j):
    return s + (i + 2 * j) % 5


@everywhere("score", ["none", "function"], simulated=["none", "function"], simulated_groups=["none"],
            simulated_sizes=["none"])
def test_segments(request, rng, place, score):
    """Packed, between tokens in no segment, one as long as may be and one empty: the same bits as of padded ones."""
    xp, sizes = place
    lengths = rng.integers(0, sizes.m + 1, min(sizes.batches, 12))
    lengths[:2] = sizes.m, 0
    offsets = np.cumsum([3, *lengths]).astype(np.int32)
    total = offsets[-1] + 2 * sizes.m
    arrays = sizes._replace(batches=1, m=total, n=total).arrays(rng)
    options = {} if score == "none" else {"score": na.Score(by_places), "causal": True}
    given = offsets if score == "none" else xp.asarray(offsets)         # on a GPU not read
    found = results(xp, *arrays, mask=na.Segments(given, max_queries=sizes.m), **options)
    assert_right(found, *arrays, mask=na.Segments(offsets), **options)
    is_on_cpu = request.node.callspec.params["place"].startswith("cpu")
    if score != "none" or is_on_cpu or sizes.heads > sizes.heads_k:     # it counts all tokens, or other kernels compute
        return
    padded = [np.zeros((len(lengths), x.shape[1], sizes.m, *x.shape[3:]), x.dtype) for x in arrays]
    for number, (first, end) in enumerate(pairwise(offsets)):
        for rows, into in zip(arrays, padded):
            into[number, :, : end - first] = rows[0, :, first:end]
    wanted = [np.full_like(x, -np.inf if number == 1 else 0) for number, x in enumerate(found)]
    alone = results(xp, *padded, mask=na.Lengths(lengths[:, None], lengths[:, None]))
    for number, (first, end) in enumerate(pairwise(offsets)):
        for rows, into in zip(alone, wanted):
            into[0, :, first:end] = rows[number, :, : end - first]
    assert_same_bits(found, wanted)


@everywhere("mask", ["dense", "bits"], simulated_groups=["bits"])
def test_rows_that_see_nothing(rng, place, mask):
    """All of some matrices, some of all."""
    xp, (batches, heads, _, m, n, *_) = place
    visible = rng.random((batches, 1, m, n)) < 0.5
    visible[::3], visible[:, :, ::4] = False, False
    blind = np.broadcast_to(~visible.any(-1), (batches, heads, m))
    mask = {"dense": na.Dense, "bits": na.Bits.pack}[mask](visible)
    o, lse, dq, dk, dv = results(xp, *place[1].arrays(rng), mask=mask)
    assert (np.isneginf(lse) == blind).all()
    assert not any(x.any() for x in (o[blind], dq[blind], dk[::3], dv[::3]))
    assert all(np.isfinite(x).all() for x in (o, lse[~blind], dq, dk, dv))


# ------------------------------------------------------------------------------------------------- with and without lse
@everywhere("options", OPTIONS, simulated=["bias"])
def test_no_lse_is_wanted(rng, place, options):
    xp, sizes = place
    (q, k, v, *_), beside = case(rng, sizes, options)
    q, k, v = map(xp.asarray, (q, k, v))
    o, _ = na.attention_forward(q, k, v, **beside())
    assert_same_bits([to_numpy(na.attention(q, k, v, **beside()))], [to_numpy(o)])


@everywhere("options", OPTIONS, simulated=["lengths"])
def test_gradients_of_given_o_and_lse(rng, place, options):
    xp, sizes = place
    arrays, beside = case(rng, sizes, options)
    q, k, v, do, dlse = map(xp.asarray, arrays)
    o, saved = na.attention_forward(q, k, v, **beside())
    given = na.Saved.of(q, k, v, o, saved.lse, **beside())
    found = o, saved.lse, *na.attention_backward(do, given, dlse=dlse)
    assert_right([*map(to_numpy, found)], *arrays, **beside())


# ------------------------------------------------------------------------------------------------- what a batch shares
SCORES = {  # by heads, queries and keys; then random
    "bias of heads": (na.Bias, lambda h, m, n: (h, m, n)), "bias": (na.Bias, lambda h, m, n: (m, n)),
    "bias of keys": (na.Bias, lambda h, m, n: (h, 1, n)), "bias of queries": (na.Bias, lambda h, m, n: (m, 1)),
    "distances": (na.RelativeBias, lambda h, m, n: (h, 9)), "slopes": (na.Alibi, lambda h, m, n: (h,)),
    "sink": (na.Sink, lambda h, m, n: (h,)),
}  # fmt: skip


@everywhere("score", SCORES, simulated=["bias of heads"])
def test_gradients_of_a_score_that_a_batch_shares(rng, place, score):
    """Right, and twice the same bits."""
    xp, sizes = place
    part, shape = SCORES[score]
    score = part(random(rng, shape(sizes.heads, sizes.m, sizes.n), sizes.dtype))
    arrays = sizes.arrays(rng)
    found, again = (results(xp, *arrays, score=score) for _ in range(2))
    assert_right(found, *arrays, score=score)
    assert_same_bits(again, found)


@MARKS["ampere"]
@pytest.mark.parametrize(("n", "part", "shape"), [(3, na.RelativeBias, (2, 9)), (1, na.Alibi, (2,))])
def test_arrays_of_as_many_elements_as_the_scores(rng, n, part, shape):
    """Which are no biases."""
    arrays = Sizes(3, 2, 2, n, n, 4, 4, np.float32).arrays(rng)
    score = part(random(rng, shape, np.float32))
    with on_device("ampere", "simulated", **LITTLE) as xp:
        assert_right(results(xp, *arrays, score=score), *arrays, score=score)


@MARKS["ampere"]
@pytest.mark.parametrize(("lead", "offset", "others"), [
    ((), 2, []), ((), None, [na.Bias(np.ones((2, 1, 1), np.float32))]), ((2,), np.array([[-1]]), []),
    ((1,), np.array([[2, -3]]), []), ((1, 2), np.array([[2, -3]]), []),
])  # fmt: skip
def test_tables_and_offsets_that_heads_share(rng, lead, offset, others):
    """Or do not."""
    arrays = Sizes(3, 2, 2, 5, 4, 4, 4, np.float32).arrays(rng)
    score = [*others, na.RelativeBias(random(rng, (*lead, 5), np.float16), offset=offset)]
    with on_device("ampere", "simulated", **LITTLE) as xp:
        assert_right(results(xp, *arrays, score=score), *arrays, score=score)


@everywhere("shared", ["q", "k", "kv"], simulated_groups=["kv"])
def test_gradients_of_inputs_that_a_batch_shares(rng, place, shared):
    xp, sizes = place
    arrays = [x[:1] if name in shared else x for name, x in zip(("q", "k", "v", "do", "dlse"), sizes.arrays(rng))]
    found, again = (results(xp, *arrays, causal=True) for _ in range(2))
    assert_right(found, *arrays, causal=True)
    assert_same_bits(again, found)


# -------------------------------------------------------------------------------------------------------- more than fit
@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(2**20,), (2**20, 1), (2**10, 2**10), (2**18, 4)], ids=str)
def test_a_million(lead):
    """With a bias for all; some of them, the first and the last are compared with float64, and the bias' gradient."""
    import cupy

    draw = cupy.random.default_rng(7)
    q, k, v, do = (draw.standard_normal((*lead, 8, 8), cupy.float32) for _ in range(4))
    bias = draw.standard_normal((*[1] * (len(lead) - 1), 1, 8, 8), cupy.float32)
    o, saved = na.attention_forward(q, k, v, score=na.Bias(bias))
    grads = na.attention_backward(do, saved, deterministic=True)
    found = [x.reshape(2**20, *x.shape[len(lead) :]) for x in (o, saved.lse, *grads)]
    given = [x.reshape(2**20, 1, 8, 8) for x in (do, q, k, v)]
    ends = cupy.arange(2000)
    some = cupy.unique(cupy.concatenate([ends, draw.integers(0, 2**20, 2000), 2**20 - 1 - ends]))
    call, score = [x[some] for x in given], na.Bias(bias.reshape(1, 8, 8))
    exact = *reference.attention_forward(*call[1:], score=score), *reference.attention_backward(*call, score=score)
    for got, want, error in zip(found, exact, rounding(*call, score=score)):
        assert not wrong_elements(got[some][:, None], want, error).any()
    assert all(bool(cupy.isfinite(x).all()) for x in found)
    dbias, total, largest = grads.score[0].reshape(8, 8), 0, 0
    for part in range(0, 2**20, 2**16):
        call = [x[part : part + 2**16] for x in given]
        total = total + reference.attention_backward(*call, score=score).score[0]
        largest = largest + rounding(*call, score=score)[5]
    assert not wrong_elements(dbias, total.reshape(8, 8), largest.reshape(8, 8)).any()


@pytest.mark.gpu
def test_on_several_streams_at_once(rng):
    """Partial sums of a bias' gradient are each call's own."""
    import cupy

    q, k, v, do = (cupy.asarray(random(rng, (3000, 8, 32, 32), np.float32)) for _ in range(4))
    score = na.Bias(cupy.asarray(random(rng, (1, 8, 32, 32), np.float32)))

    def computed():
        o, saved = na.attention_forward(q, k, v, score=score)
        grads = na.attention_backward(do, saved, deterministic=True)
        return o, saved.lse, *grads, *grads.score

    want = [*map(to_numpy, computed())]
    cupy.cuda.Device().synchronize()
    streams, found = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)], []
    for stream in streams * 3:
        with stream:
            found.append(computed())
    cupy.cuda.Device().synchronize()
    for got in found:
        assert_same_bits(map(to_numpy, got), want)

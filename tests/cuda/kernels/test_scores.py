"""Scores in the CUDA kernels: simulated on small problems, and on a GPU. The parts are those of tests/test_scores.py.

Arrays have the dtype of q, whose rounding o and so delta have: their gradients are not better.
"""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.dual import naming
from numbattn.problem import DTYPES
from tests.tools.device import AMPERE, BY_UNIT, HOPPER, TURING, on
from tests.tools.launch import compiled_only, simulated_only

from ... import test_scores as scores
from ...accuracy import assert_equal, check, random
from ...masks.calls import ONE_KEY
from ...test_scores import CORNERS, MASKS, PAIRS, PARTS, check_corner

try:
    import cupy
except ImportError:
    cupy = None

pytestmark = compiled_only  # but for the tests that say otherwise
LEADS = [(2,), (2, 1), (1, 1), ()]  # axes of slopes, of 2 batches and 2 heads
BOXED = [("pair bias",), ("bias", "sink"), ("alibi", "pair bias"), ("softcap", "pair bias")]


# ------------------------------------------------------------------------------------------------------ without a GPU
def on_device(rng, device, dtype, names, **options):
    score = [PARTS[name](rng, dtype) for name in names]
    with on(device):
        check(*scores.qkv(rng, dtype, heads_k=1, d=24, e=40), rng, score=score, **options)


SMALL = [("softcap", "alibi", "sink"), ("relative", "softcap"), ("pair bias", "softcap", "bias of queries"),
         ("relative", "function", "shift")]  # fmt: skip


@simulated_only
@pytest.mark.parametrize(("device", "names"), [
    *(("CUDA cores", names) for names in [*SMALL, ("bias of keys",)]), ("tensor cores", SMALL[2]),
    *(("warpgroups", names) for names in SMALL),
], ids=lambda x: x if isinstance(x, str) else "-".join(x))  # fmt: skip
def test_small_problems(rng, small, device, names):
    on_device(rng, BY_UNIT[device], np.float16 if device == "warpgroups" else np.float32, names, causal=True)


@pytest.mark.parametrize("names", [("softcap", "alibi"), ("relative", "sink"), ("pair bias", "function"),
                                   ("shift", "alibi")], ids="-".join)
def test_compiled(rng, small, names):
    """As the PTX says."""
    on_device(rng, HOPPER, np.float32, names, mask=na.Window(30, 9))


def test_a_derivative_beside_both_sums(rng, small):
    score = [PARTS[name](rng, np.float16) for name in ("softcap", "alibi")]
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1), rng, score=score, causal=True, deterministic=False)


@pytest.mark.parametrize(("lead", "heads_k", "d"), [*((lead, 1, 24) for lead in LEADS), ((2,), 2, 40), ((), 2, 80)])
def test_slopes_of_all_heads_or_some(rng, sizes, lead, heads_k, d):
    """Their gradient comes with dQ, of a kernel that keeps queries, or keys."""
    sizes(2, 2, 70, 90)
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=heads_k, d=d, e=d), rng, score=[na.Sink(random(rng, 2, np.float16)),
              na.Alibi(random(rng, lead, np.float16) / 50)], mask=na.Window(60, 40))  # fmt: skip


@pytest.mark.parametrize(("device", "dtype"), [(HOPPER, np.float16), (TURING, np.float32)], ids=["Hopper", "any GPU"])
def test_entries_far_from_the_diagonal(rng, sizes, device, dtype):
    """Tiles of which all elements are added the first entry of the table, or the last one."""
    sizes(1, 1, 140, 140)
    with on(device):
        score = na.RelativeBias(random(rng, 9, dtype), offset=10)
        check(*scores.qkv(rng, dtype, heads_k=1, d=8, e=8), rng, score=score)


def test_a_table_of_all_batches(rng, sizes):
    """A block has several diagonals of tiles."""
    sizes(2, 2, 140, 150)
    with on(HOPPER._replace(multiprocessors=1)):
        score = [na.Sink(random(rng, 2, np.float16)), na.RelativeBias(random(rng, (2, 61), np.float16))]
        check(*scores.qkv(rng, np.float16, heads_k=1, d=8, e=8), rng, score=score, mask=na.Window(60, 100))


@pytest.mark.parametrize(("device", "dtype", "part", "offset"), [
    (TURING, np.float32, "alibi", [[30, -20]]), (HOPPER, np.float16, "alibi", [[30, -20]]),
    (HOPPER, np.float16, "relative", [[30, -20]]),
], ids=["slopes", "slopes with dQ", "table"])  # fmt: skip
def test_offsets(rng, small, device, dtype, part, offset):
    """One of each matrix."""
    array = random(rng, (2,) if part == "alibi" else (1, 9), dtype) / 20
    kind = na.Alibi if part == "alibi" else na.RelativeBias
    with on(device):
        check(*scores.qkv(rng, dtype, heads_k=1), rng, score=kind(array, offset=np.array(offset)))


@pytest.mark.parametrize("kind", ["segments", "blocks"])
def test_gradients_where_tiles_are_empty(rng, sizes, kind):
    sizes(1, 1, 140, 140)
    blocks = na.BlockSparse(np.array([[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]], bool), (64, 64))
    mask = na.Segments(np.array([0, 50, 60, 140])) if kind == "segments" else blocks
    with on(TURING):
        check(*scores.qkv(rng, np.float32, heads_k=1, d=8, e=8), rng, mask=mask, score=[
            na.RelativeBias(random(rng, 9, np.float32)), na.Bias(random(rng, (140, 1), np.float32)),
            na.Bias(random(rng, (140, 140), np.float32))])  # fmt: skip


def half_squared(s, batch, head, i, j):
    return s * s / 2


@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 1)], ids=["", "dropout"])
def test_a_derivative_may_be_negative(rng, small, dropout):
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1), rng, score=na.Score(half_squared), dropout=dropout)


@pytest.mark.parametrize(("names", "d", "deterministic"), [
    (BOXED[0], 64, False), (BOXED[1], 128, True), (BOXED[3], 80, False), (BOXED[0], 256, False),
], ids=["sums", "deterministic", "wide", "bias not by TMA in the backward pass"])  # fmt: skip
def test_biases_that_tma_loads(rng, sizes, names, d, deterministic):
    """Rows of 16 bytes; elements of a batch that share a bias, and a head that two others share."""
    sizes(1 if d > 64 and not deterministic else 2, 2, 70, 136)
    score = [PARTS[name](rng, np.float16) for name in names]
    with on(HOPPER):
        check(*scores.qkv(rng, np.float16, heads_k=1, d=d, e=d), rng, score=score, causal=True,
              deterministic=deterministic)  # fmt: skip


@simulated_only
def test_biases_that_tma_loads_simulated(rng, sizes):
    """No tile is read before it is there, nor loaded before the last one has been read."""
    sizes(2, 1, 150, 136)
    with on(HOPPER):
        score = na.Bias(random(rng, (150, 136), np.float16))
        check(*scores.qkv(rng, np.float16, heads_k=1, d=16, e=16), rng, score=score)


@simulated_only
def test_biases_in_stages_that_are_filled_again(rng, sizes):
    sizes(1, 1, 70, 528)
    with on(HOPPER):
        q, k, v = scores.qkv(rng, np.float16, heads_k=1, d=8, e=8)
        score = na.Bias(random(rng, (70, 528), np.float16))
        o = na.attention(q, k, v, score=score)
    np.testing.assert_allclose(o, na.attention(q, k, v, score=score), rtol=2e-3, atol=2e-3)


@simulated_only
def test_a_function_sees_the_element_of_the_batch(rng):
    """Also where strides do not allow one launch for all of it."""
    q = random(rng, (2, 3, 1, 5, 8), np.float32)
    k, v = q[:, :1], q[:1].swapaxes(0, 1)[:1]
    score = na.Score(lambda s, batch, head, i, j, x: s * x[batch] + batch, arrays=[rng.random(6)])
    with on(TURING):
        check(q, k, v, rng, score=score)


def test_functions_of_too_many_places_are_refused():
    """Which are no float32 any more."""
    q, k = np.zeros((1, 8), np.float16), np.broadcast_to(np.float16(0), (2**24 + 1, 8))
    with on(HOPPER), pytest.raises(NotImplementedError, match="1 queries and 16777217 keys, at most 16777216 on a GPU"):
        na.attention(q, k, k, score=na.Score(lambda s, batch, head, i, j: s))


@pytest.mark.parametrize(("device", "dtype", "name"), [
    (TURING, np.float32, "bias of queries"), (AMPERE, np.float64, "function"), (HOPPER, np.float16, "bias of queries"),
    (HOPPER, np.float16, "function"), (HOPPER, np.float16, "softcap behind"), (HOPPER, np.float32, "all"),
    (AMPERE, np.float32, "softcap behind"),
], ids=lambda x: x if isinstance(x, str) else x.__name__ if isinstance(x, type) else str(x.cc))  # fmt: skip
def test_scores_of_minus_infinity(rng, small, device, dtype, name):
    with on(device):
        check_corner(rng, name, dtype)


@pytest.mark.parametrize(("device", "dtype"), [(HOPPER, ml_dtypes.bfloat16), (TURING, np.float32)],
                         ids=["Hopper", "any GPU"])  # fmt: skip
def test_scores_at_the_ends(rng, small, device, dtype):
    with on(device):
        scores.check_lowest(rng, np.dtype(dtype))
        scores.check_large_scores(rng, np.dtype(dtype))


@pytest.mark.parametrize(("dtype", "d"), [(np.float32, 160), (np.float64, 72)])
def test_gradients_of_columns_where_head_dims_are_large(rng, sizes, dtype, d):
    """Several warps share the rows of tiles there, but for sums along them."""
    sizes(1, 1, 20, 40)
    with on(HOPPER):
        q, k, v = scores.qkv(rng, dtype, d=d, e=8)
        check(q, k, v, rng, score=[na.Alibi(random(rng, 1, dtype) / 50), na.Bias(random(rng, (20, 1), dtype))])


@pytest.mark.parametrize("seqlen_k", [1, 30])
def test_slopes_of_a_single_query(rng, seqlen_k):
    """Of no axes, of inputs with two."""
    with on(TURING):
        q, k = random(rng, (1, 8), np.float32), random(rng, (seqlen_k, 8), np.float32)
        check(q, k, k, rng, score=[na.Alibi(np.float32(0.1)), na.Bias(random(rng, seqlen_k, np.float32))], bits=ONE_KEY)


def test_a_row_of_which_all_is_dropped(rng):
    """Gives no gradient at all, not even by rounding."""
    q, k, v, do = random(rng, (4, 2, 48, 32), np.float16)
    dropout = na.Dropout(0.9, seed=3)
    with on(HOPPER):
        o, saved = na.attention_forward(q, k[:, :8], v[:, :8], dropout=dropout)
        dq, *_ = na.attention_backward(do, saved)
    dropped = ~na.dropout_mask(dropout, (2, 48, 8)).any(-1)
    assert dropped.any()
    assert (o[dropped] == 0).all()
    assert (dq[dropped] == 0).all()


@pytest.mark.parametrize("score", [None, na.Softcap(5.0)])
def test_keys_of_length_0_may_be_nan(rng, score):
    q, k = random(rng, (2, 20, 8), np.float16), np.full((1, 30, 8), np.nan, np.float16)
    with on(HOPPER) as gpu:
        o, backprop = na.attention_vjp(q, k, k, mask=na.Lengths(keys=0), score=score)
        results = o, *backprop(o)
    assert not gpu.programs                                     # nothing is compiled, nothing launched
    assert all((x == 0).all() for x in results)


def hides(s, batch, head, i, j):
    return i >= j


def unruly(s, batch, head, i, j):
    return 2 * s.real


def test_a_derivative_is_only_asked_for_in_the_backward_pass(rng, small):
    """Of a function of which none can be found; and a mask is refused at once."""
    q, k, v = scores.qkv(rng, np.float32, heads_k=1, d=8)
    with on(TURING):
        o, saved = na.attention_forward(q, k, v, score=na.Score(unruly))
        np.testing.assert_allclose(o, na.reference.attention_forward(2 * q, k, v)[0], rtol=1e-4, atol=1e-5)
        message = r"derivative of unruly, line .*\nattribute 'real' of type Dual.* has no rule here\n.*derivative="
        with pytest.raises(TypeError, match=message), naming(unruly):
            na.attention_backward(o, saved)
        with pytest.raises(TypeError, match=r"hides, line .* returns True or False, as a mask does"), naming(hides):
            na.attention(q, k, v, score=na.Score(hides))


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_minus_infinity_on_a_gpu(rng, name, dtype):
    check_corner(rng, name, dtype, xp=cupy, bits=16 if dtype == np.float64 else 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (64, True), (128, False), (256, False)])
@pytest.mark.parametrize("name", PARTS)
def test_head_dims(rng, name, d, deterministic):
    score = PARTS[name](rng, np.float16)
    check(*scores.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, score=score, causal=True,
          deterministic=deterministic)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "dtype"), [*(("window", dtype) for dtype in DTYPES), ("dense", DTYPES[0])], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_parts(rng, name, mask, dtype):
    check(*scores.qkv(rng, dtype), rng, cupy, score=PARTS[name](rng, dtype), mask=MASKS[mask](rng),
          bits=16 if dtype == np.float64 else 4)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "names"), list(enumerate(PAIRS)), ids=str)
def test_parts_in_order(rng, number, names):
    dtype = (np.float32, ml_dtypes.bfloat16)[number % 2]
    score = [PARTS[name](rng, dtype) for name in names]
    check(*scores.qkv(rng, dtype, heads_k=2), rng, cupy, score=score, causal=True, dropout=na.Dropout(0.2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, 1)], ids=["", "dropout"])
def test_a_derivative_may_be_negative_on_a_gpu(rng, d, dropout):
    check(*scores.qkv(rng, np.float16, heads_k=2, d=d, e=d), rng, cupy, score=na.Score(half_squared), dropout=dropout)


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "names"), list(enumerate(BOXED)), ids=str)
@pytest.mark.parametrize(("d", "deterministic"), [(24, False), (64, False), (64, True), (128, False), (128, True),
                                                  (192, False), (256, False)])  # fmt: skip
def test_biases_that_tma_loads_on_a_gpu(rng, monkeypatch, number, names, d, deterministic):
    monkeypatch.setattr(scores, "N", 272)
    dtype, mask = (np.float16, ml_dtypes.bfloat16)[number % 2], (None, na.Causal(), MASKS["window"](rng))[number % 3]
    score = [PARTS[name](rng, dtype) for name in names]
    check(*scores.qkv(rng, dtype, heads_k=2, d=d, e=d), rng, cupy, score=score, mask=mask, deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("m", "n", "mask"), [
    (1000, 1000, None), (300, 2500, na.Causal()), (1000, 1000, na.Window(600, 100)), (600, 2100, na.Causal(1000)),
    (1000, 1000, na.Segments(np.array([0, 7, 600, 600, 990])) & na.Causal()),
], ids=["full", "causal", "window", "offset", "segments"])  # fmt: skip
def test_far_from_the_diagonal(rng, m, n, mask, d):
    dtype = (np.float16, ml_dtypes.bfloat16)[d // 64 % 2]
    q, k, v = (random(rng, (2, 2, size, d), dtype) for size in (m, n, n))
    slopes = np.array([-1 / 70, 3], ml_dtypes.bfloat16)        # float16 ends before their gradients
    for part in (na.Alibi(slopes), na.RelativeBias(random(rng, (2, 41), dtype))):
        check(q, k, v, rng, cupy, score=[part, na.Sink(random(rng, 2, dtype))], mask=mask, bits=ONE_KEY)


SHAPES = [(1, 1, 1, 1), (3, 1, 1), (2, 1, 70, 1), (1, 3, 1, 90), (90,), (2, 3, 70, 90), (70, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(2,), (4, 2), (2, 1, 2)])
def test_bias_broadcasts_as_in_numpy(rng, shape, batch):
    q, k, v = (random(rng, (*batch, 3, n, 16), np.float16) for n in (70, 90, 90))
    check(q, k, v, rng, cupy, score=na.Bias(random(rng, shape, np.float16)))


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(4, 1, 3), (1, 2, 3), (4, 2, 1), ()])
def test_tables_broadcast_over_several_axes(rng, lead):
    for entries, dtype in zip((1, 9, 801), (np.float32, np.float16, np.float32)):
        q, k, v = (random(rng, (4, 2, 3, n, 16), dtype) for n in (70, 290, 290))
        check(q, k, v, rng, cupy, score=[na.RelativeBias(random(rng, (*lead, entries), dtype)),
                                         na.Alibi(random(rng, lead, dtype) / 50)])  # fmt: skip


@pytest.mark.gpu
def test_gradients_are_equal_bit_for_bit(rng):
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 300, 64), np.float16)) for _ in range(4))
    score = [PARTS[name](rng, np.float32) for name in ("sink", "alibi")]
    score += [na.Bias(random(rng, (4, 300, 300), np.float32)), na.RelativeBias(random(rng, (4, 41), np.float32))]
    _, saved = na.attention_forward(q, k, v, score=score)
    first = na.attention_backward(do, saved, deterministic=True)
    for _ in range(10):
        again = na.attention_backward(do, saved, deterministic=True)
        for one, other in zip((*first, *first.score), (*again, *again.score)):
            assert_equal(one, other)


@pytest.mark.gpu
def test_what_is_masked_may_be_nan(rng):
    q, k, v, do = (cupy.asarray(random(rng, (3, 200, 64), np.float16)) for _ in range(4))
    visible, bias = rng.random((3, 200, 200)) < 0.3, random(rng, (3, 200, 200), np.float32)
    results = []
    for hidden in (0, np.nan, np.inf):
        score = [na.Bias(np.where(visible, bias, hidden).astype(np.float32)), na.Softcap(5.0)]
        o, saved = na.attention_forward(q, k, v, mask=visible, score=score)
        grads = na.attention_backward(do, saved, deterministic=True)
        results.append((o, saved.lse, *grads, *grads.score))
        assert (grads.score[0].get()[~visible] == 0).all()
    for one in results[1:]:
        for x, want in zip(one, results[0]):
            assert_equal(x, want)


@pytest.mark.gpu
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_a_sink_of_any_size(rng, logit):
    q, k, v = (cupy.asarray(random(rng, (2, 20, 64), np.float16)) for _ in range(3))
    o, saved = na.attention_forward(q, k, v, score=na.Sink(np.float32(logit)))
    want, lse = na.attention_forward(q, k, v) if logit < 0 else (0 * q, None)
    np.testing.assert_allclose(o.get(), want.get(), rtol=2e-3, atol=1e-4)
    wanted = np.float32(logit) if lse is None else lse.lse.get()
    np.testing.assert_allclose(saved.lse.get(), np.broadcast_to(wanted, saved.lse.shape), rtol=1e-5)


@pytest.mark.gpu
def test_functions_that_numba_cannot_compile_are_named():
    def strange(s, batch, head, i, j):
        return s.nothing

    q = cupy.zeros((2, 40, 64), np.float16)
    with pytest.raises(TypeError, match=r"score: Numba cannot compile .*strange, line"):
        na.attention(q, q, q, score=na.Score(strange))


@pytest.mark.gpu
def test_a_changed_cap_compiles_nothing(rng, tmp_path, monkeypatch):
    q = cupy.asarray(random(rng, (2, 40, 64), np.float16))
    na.attention(q, q, q, score=na.Softcap(3.0))
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    na.attention(q, q, q, score=na.Softcap(4.0))
    assert not list(tmp_path.rglob("*.cubin*"))


@pytest.mark.gpu
def test_in_a_graph(rng):
    q, k, v, do = (cupy.asarray(random(rng, (2, 4, 100, 64), np.float16)) for _ in range(4))
    slopes, bias, logits = (cupy.ones(shape, np.float32) for shape in (4, (4, 1, 100), 4))
    score = [na.Alibi(slopes), na.Bias(bias), na.Sink(logits)]

    def run():
        o, saved = na.attention_forward(q, k, v, score=score)
        grads = na.attention_backward(do, saved, deterministic=True)
        return o, *grads, *grads.score

    want = run()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        run()
        stream.begin_capture()
        got = run()
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    for one, other in zip(got, want):
        assert_equal(one, other)

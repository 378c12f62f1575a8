"""The whole CUDA backend without a GPU: kernels simulated, or compiled and interpreted. See tests/tools/device.py."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.hopper.forward_tiles import LONG, USUAL
from numbattn.cuda.plan import tier
from tests.tools.device import AMPERE, BY_UNIT, HOPPER, TURING, execute, on, planned
from tests.tools.launch import compiled_only, mostly_simulated, simulated_only

from ..accuracy import assert_accurate, check, exact, plain, random

DEVICES = {"CUDA cores": TURING, "tensor cores": HOPPER}


both_worlds = pytest.mark.usefixtures("world")
slow = pytest.mark.slow  # what compiles long, of code that other tests compile, too


@pytest.fixture(params=DEVICES)
def device(request):
    with on(DEVICES[request.param]):
        yield


@pytest.fixture
def hopper():
    """For what does not depend on who multiplies."""
    with on(HOPPER):
        yield


def qkv(rng, dtype=np.float32, batch=(1,), heads=2, heads_k=1, m=40, n=70, d=24, e=40):
    return (random(rng, (*batch, heads, m, d), dtype), random(rng, (*batch, heads_k, n, d), dtype),
            random(rng, (*batch, heads_k, n, e), dtype))  # fmt: skip


def check_forward(q, k, v, **options):
    """As `check`, for o and lse alone."""
    o, saved = na.attention_forward(q, k, v, **options)
    wants, others = (formula(np.zeros_like(o), q, k, v, **options) for formula in (exact, plain))
    for name, got, want, other in zip(("o", "lse"), (o, saved.lse), wants, others):
        assert_accurate(name, got, want, other, got.dtype)


@slow
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_dtypes_on_cuda_cores(rng, dtype):
    """Others, and those by tensor cores: test_masks, test_masks_together, hopper/test_linear_bias."""
    with on(TURING):
        check(*qkv(rng, dtype), rng, causal=True, dropout=na.Dropout(0.2, seed=5))


@slow
@compiled_only
@pytest.mark.parametrize(("dtype", "d", "e"), [
    ("float32", 250, 192), ("float64", 100, 128),
])  # fmt: skip
def test_large_head_dims_of_words(rng, hopper, dtype, d, e):
    """Warps share the rows of dQ, dK and dV."""
    check(*qkv(rng, np.dtype(dtype), heads=1, d=d, e=e), rng, causal=True)


@pytest.mark.parametrize(("dtype", "n", "d", "e"), [
    ("bfloat16", 150, 50, 130),
    *(pytest.param("float16", *which, marks=slow) for which in ((100, 64, 64), (300, 200, 250))),
])  # fmt: skip
def test_blocks_of_several_tiles(rng, dtype, n, d, e):
    """A single block does them all: what one leaves in shared memory and barriers, the next one finds."""
    with on(HOPPER._replace(multiprocessors=1)):
        check_forward(*qkv(rng, np.dtype(dtype), m=200, n=n, d=d, e=e), causal=True)


@pytest.mark.parametrize(("d", "deterministic"), [
    (64, False), (128, True), *(pytest.param(*which, marks=slow) for which in ((64, True), (128, False))),
])  # fmt: skip
def test_a_block_of_several_tiles_of_keys(rng, d, deterministic):
    """The same in the backward pass, where heads of a group see different keys."""
    q, k, v = qkv(rng, np.float16, m=150, n=300, d=d, e=d)
    with on(HOPPER._replace(multiprocessors=1)):
        check(q, k, v, rng, mask=na.Lengths(np.array([[300, 120]])), causal=True, deterministic=deterministic)


BOTH_FORWARDS = pytest.mark.parametrize(
    "dtype", [pytest.param(np.float32, id="warps", marks=compiled_only), pytest.param(np.float16, id="warpgroups")]
)
B, M, N = 1, 66, 70
MASKS = {
    "causal offsets": lambda rng: na.Causal(offset=rng.integers(-M, N, (1, 2))),
    "window": lambda rng: na.Window(30, 9),
    "lengths": lambda rng: na.Lengths(np.array([[33]]), np.array([[0, 65]])),
    "edges in int32": lambda rng: na.Lengths(np.array([[33]], "i4"), np.array([[0, 65]], "i4"))
    & na.Window(40, 9, offset=rng.integers(-M, N, (1, 2)).astype("i4")),
    "two edges of a side": lambda rng: na.Lengths(np.array([[33]], "i4"), np.array([[0, 65]], "i4"))
    & na.Causal(np.array([[5, 30]], "i4")) & na.Window(40, 0, offset=np.array([[20, 10]], "i4")),
    "far edges": lambda rng: na.Lengths(np.array([[N]], "i4"), np.array([[M, 65]], "i4"))
    & na.Causal(np.array([[2**31 - 1, -(2**31)]], "i4"))
    & na.Window(2**40, 2**40, offset=np.array([[-(2**31), 2**31 - 1]], "i4")),
    "dense": lambda rng: na.Dense(rng.random((1, 1, M, N)) < 0.3),
    "booleans by key": lambda rng: rng.random(N) < 0.7,
    "bits": lambda rng: na.Bits.pack(rng.random((1, 2, M, N)) < 0.5),
    "tail": lambda rng: na.Tail(rng.random((B, 2, M, M)) < 0.5),
    "blocks": lambda rng: na.BlockSparse(rng.random((1, 2, 5, 5)) < 0.5, block_size=(16, 17)),
    "two grids of blocks": lambda rng: na.BlockSparse(rng.random((1, 1, 2, 2)) < 0.7, (64, 64))
    & na.BlockSparse(rng.random((1, 2, M, 24)) < 0.9, (1, 3)),
}

IN_OTHERS = "causal offsets", "lengths", "blocks", "bits", "tail"  # edges in int32, two grids of blocks; decode


@compiled_only
@both_worlds
@pytest.mark.parametrize(("kind", "unit"), [
    pytest.param("window", "warpgroups", marks=slow),
    *(pytest.param(kind, "warps", marks=slow) for kind in IN_OTHERS),
    *((kind, "warps") for kind in MASKS if kind not in ("window", *IN_OTHERS)),
])  # fmt: skip
def test_masks(rng, hopper, kind, unit):
    """What is visible is looked up by the same steps whoever multiplies: each kind once, but see test_masks_together
    and, for lengths, test_gradients_by_warpgroups.

    Those in int32 and far ones are the same kernels: all four sides have edges.
    """
    arrays = qkv(rng, np.float32 if unit == "warps" else np.float16, (B,), m=M, n=N, d=32, e=8)
    check(*arrays, rng, mask=MASKS[kind](rng), dropout=na.Dropout(0.3, seed=9))


@simulated_only
@both_worlds
@pytest.mark.parametrize("kind", MASKS)
def test_masks_simulated(rng, hopper, kind):
    """Gradients by warpgroups are left to kernels/hopper/test_backward: they take long."""
    arrays = qkv(rng, np.float16, (B,), m=M, n=N, d=32, e=8)
    check_forward(*arrays, mask=MASKS[kind](rng), dropout=na.Dropout(0.3, seed=9))


@both_worlds
@pytest.mark.parametrize("device", [
    *(pytest.param(name, marks=simulated_only) for name in DEVICES),
    pytest.param("tensor cores", marks=[compiled_only, slow], id="warpgroups"),
], indirect=True)  # fmt: skip
def test_masks_together(rng, device):
    mask = MASKS["lengths"](rng) & MASKS["dense"](rng) & MASKS["bits"](rng) & MASKS["blocks"](rng)
    check(*qkv(rng, np.float16, (B,), m=M, n=N), rng, mask=mask, causal=True)


@pytest.mark.parametrize(("poison", "dtype"), [(np.inf, np.float32), (np.nan, np.float16)],
                         ids=["inf-warps", "nan-warpgroups"])  # fmt: skip
def test_beyond_lengths_nothing_leaks(rng, hopper, poison, dtype):
    """By the kernels of test_masks, or of test_gradients_by_warpgroups; hopper/test_backward simulates these."""
    by_warps = dtype == np.float32
    sizes = {"m": M, "n": N, "d": 32, "e": 8} if by_warps else {"m": 150, "n": 200, "d": 64, "e": 64}
    q, k, v = qkv(rng, dtype, heads_k=2, **sizes)
    keys, queries = np.array([[17, 70]]), np.array([[0, 33]])
    for h in range(2):
        k[0, h, keys[0, h] :] = v[0, h, keys[0, h] :] = poison
        q[0, h, queries[0, h] :] = poison
    check(q, k, v, rng, mask=na.Lengths(keys, queries) & na.Window(40, 9), deterministic=not by_warps,
          dropout=na.Dropout(0.3, seed=9) if by_warps else None)  # fmt: skip


@slow
@BOTH_FORWARDS
def test_beyond_one_length_for_all_nothing_leaks(rng, hopper, dtype):
    q, k, v = qkv(rng, dtype, m=M, n=N)
    k[..., 33:, :] = v[..., 33:, :] = np.nan
    check(q, k, v, rng, mask=na.Lengths(keys=np.array(33)))


PIECES = (2, 1, 2, 5, 8), (2, 1, 7, 8), (1, 2, 1, 7, 3)


@both_worlds
@pytest.mark.parametrize(("q_shape", "k_shape", "v_shape", "dtype"), [
    *(pytest.param(*shapes, dtype, marks=simulated_only, id=name) for name, dtype, *shapes in (
        ("5x7", np.float16, (5, 8), (7, 8), (7, 3)),
        ("1x1", np.float32, (1, 1), (1, 1), (1, 1)),
        ("no features", np.float32, (3, 0), (4, 0), (4, 2)),    # all keys weigh the same
        ("no features, halves", np.float16, (5, 0), (7, 0), (7, 2)),
        ("no features of v", np.float32, (3, 2), (4, 2), (4, 0)),
        ("no queries", np.float16, (0, 2), (4, 2), (4, 2)),
        ("no keys", np.float32, (3, 2), (0, 2), (0, 2)),
        ("pieces", np.float32, *PIECES),                        # gradients are summed
        ("no batch", np.float32, (0, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 3)),
    )),
    pytest.param(*PIECES, np.float16, marks=[compiled_only, slow], id="pieces, halves"),
])  # fmt: skip
def test_shapes(rng, hopper, q_shape, k_shape, v_shape, dtype):
    q, k, v = (random(rng, shape, dtype) for shape in (q_shape, k_shape, v_shape))
    check(q, k, v, rng, causal=True, dropout=na.Dropout(0.2, seed=5))


@both_worlds
@pytest.mark.parametrize(("device", "dtype", "m", "n"), [
    pytest.param("warpgroups", np.float16, 70, 70, marks=simulated_only),
    pytest.param("tensor cores", np.float16, 70, 70, marks=mostly_simulated),
    pytest.param("warpgroups", np.float16, 70, 70, marks=[compiled_only, slow]),
    *(pytest.param(*which, marks=slow) for which in (
        ("tensor cores", np.float32, 70, 70), ("CUDA cores", np.float16, 70, 70), ("tensor cores", np.float32, 30, 30),
        ("warpgroups", np.float16, 2, 70), ("tensor cores", np.float32, 2, 70),
    )),
])  # fmt: skip
def test_lse_alone(rng, device, dtype, m, n):
    """Of v without features it is the same, bit for bit, but for small matrices, whose exponentials are compiled into
    other instructions."""
    q, k, v = qkv(rng, dtype, m=m, n=n)
    small = m == n == 30
    k[..., 25:, :] = v[..., 25:, :] = np.nan
    options = {"mask": na.Lengths(keys=np.array(25)), "score": na.Sink(np.ones(2, np.float32)),
               "dropout": na.Dropout(0.2, seed=5)}  # fmt: skip
    with on(BY_UNIT[device], small=small):
        o, saved = na.attention_forward(q, k, v[..., :0], **options)
        _, with_v = na.attention_forward(q, k, v, **options)
    assert (o.shape, o.dtype) == ((1, 2, q.shape[-2], 0), dtype)
    np.testing.assert_allclose(saved.lse, with_v.lse, rtol=1e-6 if small else 0)


BANDS = {
    "m": st.integers(1, 130), "n": st.integers(1, 100), "offset": st.integers(-150, 150),
    "left": st.none() | st.integers(-5, 80), "right": st.none() | st.integers(5, 80),
}  # fmt: skip
SOME = settings(
    max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SOME
@given(**BANDS)
def test_bands_of_any_size(hopper, m, n, offset, left, right):
    rng = np.random.default_rng(0)
    mask = na.Window(left, right, offset)
    assume((mask.dense(m, n).sum(1) != 1).any())                # of a single key dS is 0, and no digit of ours is right
    check(*qkv(rng, heads=1, m=m, n=n), rng, mask=mask)


@slow
@SOME
@given(**BANDS)
def test_bands_of_any_size_by_warpgroups(hopper, m, n, offset, left, right):
    rng = np.random.default_rng(0)
    check_forward(*qkv(rng, np.float16, heads=1, m=m, n=n), mask=na.Window(left, right, offset))


VIEWS = {
    "sequence before heads": lambda x: x.swapaxes(-2, -3).copy().swapaxes(-2, -3),
    "reversed": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "every other feature": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_strides(rng, hopper, view, dtype):
    check(*map(VIEWS[view], qkv(rng, dtype)), rng, causal=True)


def test_dropout_is_numbattns(rng, device):
    """With v the unit matrix o is P, dropped."""
    dropout, n = na.Dropout(0.4, seed=123456789, offset=3), 80
    q, k = np.zeros((2, 2, 1, n, 8), np.float32)
    o = na.attention(q, k, np.broadcast_to(np.eye(n, dtype=np.float32), (2, 1, n, n)), dropout=dropout)
    np.testing.assert_array_equal(o != 0, na.dropout_mask(dropout, (2, 1, n, n)))


@BOTH_FORWARDS
@pytest.mark.parametrize("e", [40, 37])
def test_out(rng, hopper, dtype, e):
    q, k, v = qkv(rng, dtype, e=e)
    out = np.full((1, 40, 2, e), np.nan, dtype).swapaxes(1, 2)
    o, saved = na.attention_forward(q, k, v, out=out)
    assert o is out
    np.testing.assert_array_equal(out, na.attention(q, k, v))


@BOTH_FORWARDS
def test_saved_or_not(rng, hopper, dtype):
    """The same problem again and again, with lse and without, with dlse and without."""
    q, k, v = qkv(rng, dtype)
    o = na.attention(q, k, v)
    other, saved = na.attention_forward(q, k, v)
    np.testing.assert_array_equal(other, o)
    np.testing.assert_array_equal(na.attention(q, k, v), o)
    dq, _, _ = na.attention_backward(o, saved)
    other, _, _ = na.attention_backward(o, saved, dlse=np.zeros_like(saved.lse))
    np.testing.assert_array_equal(other, dq)


@compiled_only
@pytest.mark.parametrize(("d", "e", "deterministic"), [
    (128, 100, False), (64, 64, True),
    *(pytest.param(*which, marks=slow) for which in ((100, 128, True), (64, 128, False), (190, 64, False))),
])  # fmt: skip
def test_gradients_by_warpgroups(rng, hopper, d, e, deterministic):
    """Each kernel of the backward pass, more tiles than stages, edges and whole tiles."""
    lengths = na.Lengths(np.array([[170, 33]]), np.array([[150, 140]]))
    options = {"causal": True, "mask": lengths, "dropout": na.Dropout(0.3, seed=1) if d > 128 else None}
    check(*qkv(rng, np.float16, m=150, n=200, d=d, e=e), rng, deterministic=deterministic, **options)


@pytest.mark.parametrize(("device", "d", "e", "options"), [
    (AMPERE, 60, 64, {"dropout": na.Dropout(0.3, seed=1)}),
    pytest.param(HOPPER, 64, 32, {"mask": na.Lengths(33, 20)}, marks=slow),
    (AMPERE, 100, 128, {"deterministic": True}),
], ids=["dropout", "forced", "deterministic"])  # fmt: skip
def test_gradients_by_warps(rng, device, d, e, options):
    """Of half precision, on GPUs before Hopper, or where they are asked for."""
    with on(device), tier("mma"):
        check(*qkv(rng, np.float16, d=d, e=e), rng, causal=True, **options)


def test_rows_that_are_alone_may_have_any_stride(rng, hopper):
    q, k, v = qkv(rng, np.float16, batch=(2,), m=8, n=8, d=68, e=64)
    check(q[:, :, :1, :64], k[..., :1, :64], v[..., :1, :], rng, deterministic=True)  # by kernels of other tests


@pytest.mark.parametrize(("m", "heads", "heads_k"), [(1, 8, 2), (60, 4, 1), (100, 4, 2), (130, 6, 3)])
def test_heads_of_a_group_side_by_side(rng, m, heads, heads_k):
    """Where a work tile has room for all queries of several heads, they share tiles of K and V."""
    q, k, v = qkv(rng, np.float16, heads=heads, heads_k=heads_k, m=m, n=150, d=40, e=24)
    for options in ({"dropout": na.Dropout(0.3, seed=1)}, {"causal": True}):
        with on(HOPPER._replace(multiprocessors=1)):
            check_forward(q, k, v, **options)


@pytest.mark.parametrize("tiles", ["weww-eew", "eew-wwew", "-e-wwwe-"])
def test_whole_tiles_and_others_in_turn(rng, tiles):
    """A tile of keys is whole, has edges or is empty; the kernel walks over runs of whole ones without a test."""
    blocks = {"w": np.ones((2, 2), bool), "e": np.eye(2, dtype=bool), "-": np.zeros((2, 2), bool)}
    mask = na.BlockSparse(np.hstack([blocks[tile] for tile in tiles])[None, None], (64, 64))
    q, k, v = qkv(rng, np.float16, heads=1, m=128, n=128 * len(tiles), d=64, e=64)
    with on(HOPPER):
        check_forward(q, k, v, mask=mask)


AT_LENGTH = {"dropout": {"dropout": na.Dropout(0.3, seed=1)}, "window": {"mask": na.Window(70, 0)},
             "causal": {"causal": True}}  # fmt: skip


@pytest.mark.parametrize(("head_dim", "kind"), [
    (64, "window"), (64, "dropout"), (128, "causal"),
    *(pytest.param(*which, marks=slow) for which in ((64, "causal"), (128, "window"), (128, "dropout"))),
])  # fmt: skip
def test_tiles_for_long_sequences(rng, monkeypatch, head_dim, kind):
    """One block does them all, and the consumers of a tile see different keys. Dropout has tiles of its own."""
    monkeypatch.setitem(USUAL, head_dim, LONG[head_dim])
    q, k, v = qkv(rng, np.float16, heads=1, m=400, n=300, d=head_dim, e=64)
    with on(HOPPER._replace(multiprocessors=1)):
        check_forward(q, k, v, **AT_LENGTH[kind])


@pytest.mark.parametrize("score", [None, na.Softcap(5.0)])
def test_keys_of_length_0_may_be_nan(rng, score):
    q, k = random(rng, (2, 20, 8), np.float16), np.full((1, 30, 8), np.nan, np.float16)
    with on(HOPPER) as gpu:
        o, backprop = na.attention_vjp(q, k, k, mask=na.Lengths(keys=0), score=score)
        results = o, *backprop(o)
    assert not gpu.programs                                     # nothing is compiled, nothing launched
    assert all((x == 0).all() for x in results)


def tangents_of(rng, *arrays, lead=()):
    return [random(rng, (*lead, *x.shape), x.dtype) for x in arrays]


ALONE, OF_A_BATCH = ((2, 8, 8), (1, 9, 8), (1, 9, 8)), ((2, 1, 1, 8, 8), (1, 9, 8), (2, 1, 9, 8))


@both_worlds
@simulated_only
@pytest.mark.parametrize(("shapes", "options", "launches"), [
    (ALONE, {"score": na.Softcap(2)}, 2), (ALONE, {"causal": True}, 1),
    (ALONE, {"dropout": na.Dropout(0.3, seed=1)}, 2),
    (OF_A_BATCH, {"causal": True}, 4), (OF_A_BATCH, {"mask": na.Lengths(np.array([[[5]], [[9]]]))}, 4),
], ids=["score", "a batch", "dropout", "pieces", "lengths"])  # fmt: skip
def test_several_tangents_are_as_each_alone(rng, shapes, options, launches):
    """They are one more axis of the batch where nothing tells its elements apart; with `causal` those of gradients,
    too."""
    arrays = q, k, v = [random(rng, shape, np.float32) for shape in shapes]
    tq, tk, tv = tangents_of(rng, q, k, v, lead=(2,))
    executed = []
    with on(TURING, lambda *launched: executed.append(execute(*launched))):
        o, to, saved, tsaved = na.attention_forward_jvp(*arrays, tq, tk[..., ::-1, :], tv, **options)
        assert len(executed) == launches
        tgrads = na.attention_backward_jvp(o, saved, tsaved)[1] if "causal" in options else ()
        for number in range(2):
            reversed_rows = tk[number][..., ::-1, :].copy()  # and so of other strides
            alone = na.attention_forward_jvp(*arrays, tq[number], reversed_rows, tv[number], **options)
            np.testing.assert_array_equal(to[number], alone[1])
            np.testing.assert_array_equal(tsaved.tlse[number], alone[3].tlse)
            np.testing.assert_array_equal(o, alone[0])
            others = na.attention_backward_jvp(o, *alone[2:])[1] if tgrads else ()
            for x, want in zip(tgrads, others, strict=True):
                np.testing.assert_array_equal(x[number], want)


def test_planned_calls_take_the_kernels_of_launched_ones(rng):
    launched, arrays = {}, qkv(rng, m=8, n=9, d=8, e=8)

    def call():
        o, saved = na.attention_forward(*arrays, causal=True)
        return na.attention_backward(o, saved).dq

    with on(HOPPER, lambda key, *_: launched.update({key: None}), small=True):
        call()
    with planned(HOPPER) as keys:
        assert not call().any()
    assert keys == launched


@compiled_only
def test_no_tangents(rng):
    q, k, v = arrays = qkv(rng, m=8, n=9, d=8, e=8)
    with on(TURING):
        o, to = na.attention_jvp(*arrays, *tangents_of(rng, q, k, v, lead=(0,)))
        np.testing.assert_array_equal(o, na.attention(*arrays))
    assert to.shape == (0, *o.shape)


@pytest.mark.parametrize("length", [0, None], ids=["no length", "no keys"])
def test_tangents_are_zero_where_nobody_sees_anything(rng, length):
    arrays, mask = qkv(rng, n=9 if length == 0 else 0), na.Lengths(keys=length)
    with on(TURING) as gpu:
        o, to, saved, tsaved = na.attention_forward_jvp(*arrays, *tangents_of(rng, *arrays), mask=mask)
        _, tgrads = na.attention_backward_jvp(o, saved, tsaved)
    assert not gpu.programs
    assert all((x == 0).all() for x in (o, to, tsaved.tlse, *tgrads))
    assert np.isneginf(saved.lse).all()


CACHED = {
    "edges": lambda rng: {"mask": na.Causal() & na.Window(40, 9)},
    "intervals": lambda rng: {"mask": na.Prefix(2) & (na.Window(9, 0) | na.Prefix(5))},
    "bits": lambda rng: {"mask": na.Tail(rng.random((5, 5)) < 0.5)},
    "scores": lambda rng: {"score": [na.Alibi(0.1), na.RelativeBias(random(rng, (2, 21), np.float32))]},
}


@compiled_only
@pytest.mark.parametrize(("device", "kind"), [
    ("CUDA cores", "edges"), ("CUDA cores", "bits"),            # by others: kernels/any/test_decode.py
    *(pytest.param(*which, marks=slow) for which in (
        ("tensor cores", "intervals"), ("tensor cores", "edges"), ("tensor cores", "bits"), ("CUDA cores", "intervals"),
        ("CUDA cores", "scores"), ("tensor cores", "scores"),
    )),
], indirect=["device"])  # fmt: skip
def test_caches(rng, device, kind):
    """Masks and scores are aligned with the lengths, which are on the device; what lies beyond them is NaN."""
    q, k, v = qkv(rng, batch=(3,), m=5)
    lengths = np.array([70, 3, 0], np.int32)
    for x in (k, v):
        for held, length in zip(x, lengths):
            held[:, length:] = np.nan
    options = CACHED[kind](rng)
    o, saved = na.attention_forward(q, na.KVCache(k, v, lengths), **options)
    want, want_lse = reference.attention_forward(q, na.KVCache(k, v, lengths), **options)
    np.testing.assert_allclose(o, want, atol=1e-5)
    np.testing.assert_allclose(saved.lse, want_lse, atol=1e-5)


FAULTS = {
    "cuda/kernels/any/test_particle_laplacian.py::test_as_the_plain_formula": {
        "if not (jo.size and self.launch(": "if not (self.launch(",
    },
    "cuda/test_origin.py::test_wide": {
        "o = gpu.empty(problem.out_shape, problem.result_dtype)": "o = gpu.empty(problem.out_shape, problem.dtype)",
        "call/passes.py": {"(problem.shapes[1], problem.result_dtype)": "(problem.shapes[1], problem.dtype)"},
    },
    "cuda/test_origin.py::test_keys_that_nobody_sees_add_nothing": {
        "if onto is None:": "if True:",
    },
    (
        "test_saved_or_not[warps]",
        "test_beyond_one_length_for_all_nothing_leaks[warpgroups]",
        "test_masks[compiled-edges in int32-warps]",
        "test_masks[compiled-two edges of a side-warps]",
        "test_shapes[simulated-pieces]",
    ): {
        "x in given.values()]) if given else save": "x in given.values()]) if given else True",
        "sum_to(whole[..., : given.shape[-1]], given.shape)": "whole[..., : given.shape[-1]][:1]",
        "cuda/words/numbers.py": {"scale * LOG2_E": "scale"},
    },
    ("test_several_tangents_are_as_each_alone", "test_no_tangents"): {
        'x[number, ...] if name.startswith("t")': 'x[0, ...] if name.startswith("t")',
        "(slice(None), *[None] * (axes": "(slice(None), *[None] * (axes - 1",
        "not (problem.dropout or inputs.score or inputs.mask": "not (inputs.score or inputs.mask",
        "if not tangents.count and": "if False and",
        "strides = *given, *[x.strides for x in given.values()]": "strides = *given,",
        "shape if name in once else lead + shape": "lead + shape",
    },
    "test_tangents_are_zero_where_nobody_sees_anything": {
        "arrays, strides, deterministic, *how, **options):\n            fill(results)":
            "arrays, strides, deterministic, *how, **options):\n            pass",
        "NOTHING.get(name, 0)": "0",
    },
    "cuda/kernels/any/test_tangent.py::test_scores": {
        "tscore, of_tangents, tat = lower_parts(tparts": "tscore, of_tangents, tat = lower_parts(()",
        "numbered(number), problem)": "number, problem)",
    },
    "cuda/words/test_tiers.py": {
        "misaligned, tier, kind[0]": "misaligned, kind[0]",
        "score, tier, whole, tscore, kind[0])": "score)",
        "score, latest.get(), True, tscore)": "score)",
    },
}

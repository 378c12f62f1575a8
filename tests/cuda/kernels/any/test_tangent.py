"""In tiles of 16 queries and keys; and by plans, on all kinds of cores."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.cuda.kernels.any.tangent import tangent
from numbattn.cuda.kernels.tables import Tiles
from tests.accuracy import assert_accurate, exact, plain, plain_tangents, random
from tests.tools.device import AMPERE, HOPPER, TURING, on
from tests.tools.launch import compiled_only, launch, mostly_simulated, poisoned, simulated, simulated_only

from ..calls import call

TILE_N = 16
NAMES = "to", "tlse"


def tangents_by(work, q, k, v, *tangents, **options):
    """to and tlse by the plain formula, in long doubles or, if `work` is None, rounded as ours."""
    do = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    return plain_tangents(do, q, k, v, *tangents, work=work, **options)[:2]


def tangents_of(rng, arrays, given="qkv"):
    return [random(rng, x.shape, x.dtype) if name in given else None for name, x in zip("qkv", arrays)]


def check_small(
    rng, unit="fma", threads=32, tile_m=16, *, m, n, batch=1, heads=1, given="qkv", poison=None, dtype=np.float32,
    **options,
):  # fmt: skip
    """The kernel in small tiles."""
    case = call(rng, dtype, poison=poison, m=m, n=n, batch=batch, heads=heads, **options)
    arrays, dtype = (case.q, case.k, case.v), case.q.dtype
    tangents = tangents_of(rng, arrays, given)
    if poison is not None:
        for x, of in zip(tangents, arrays):
            x[np.isnan(of).all(-1)] = poison
    source = tangent(
        dtype=dtype.name, out_dtypes=(dtype.name,) * 2, head_dim=16, head_dim_v=16 if unit == "mma" else 8,
        tiles=Tiles(unit, tile_m, TILE_N, threads, 4), tangents=tuple(given), mask=case.kinds,
        score=(), tscore=(), dropout=case.kept_scale != 1, nbytes=0,
    )  # fmt: skip
    o, to, lse, low, tlse = (poisoned(x.shape, x.dtype) for x in (case.do, case.do, *[case.lse] * 3))
    launch(
        source.function, (batch * heads * -(-m // tile_m), 1, 1), threads, source.shared, *arrays,
        *[() if x is None else (x,) for x in tangents], o, to, (), lse, low, tlse, case.mask_of("q", tile_m, TILE_N),
        (), (), case.drops, case.group_size, case.scale, case.scale_log2, case.kept_scale,
    )  # fmt: skip
    wanted, others = (tangents_by(work, *arrays, *tangents, **options) for work in (np.longdouble, None))
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)
    for name, got, want, other in zip(NAMES, (to, tlse), wanted, others):
        assert_accurate(name, got, want, other, got.dtype)


@pytest.mark.parametrize(("unit", "tile_m", "dtype"), [
    ("fma", 16, np.float32), ("mma", 32, np.float32), ("mma", 32, np.float16), ("mma", 32, np.float64),
])  # fmt: skip
@simulated_only
def test_two_warps(rng, unit, tile_m, dtype):
    """They share tiles of K and V."""
    check_small(rng, unit, 64, tile_m, m=16, n=40, dtype=dtype)


MASKS = {
    "causal": {"causal": True},
    "lengths": {"mask": na.Lengths(np.array([[16, 33]]), np.array([[19, 0]])) & na.Window(20, 9), "poison": np.nan},
    "one length": {"mask": na.Lengths(19, 17), "poison": np.nan},
    "blocks": {"mask": na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (8, 11))},
}


@simulated_only
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    check_small(rng, heads=2, m=20, n=35, **MASKS[mask])


@simulated_only
@pytest.mark.parametrize("unit", ["fma", "mma"])
def test_dropout(rng, unit):
    check_small(rng, unit, batch=2, heads=2, m=16, n=16, dropout=na.Dropout(0.3, seed=5))


@simulated_only
@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "qv", "kv", ""])
def test_tangents_that_are_not_given_are_zero(rng, given):
    check_small(rng, m=16, n=20, given=given)


def check(rng, dtype, *, batch=(1,), heads=2, heads_k=1, m=40, n=70, d=24, e=40, given="qkv", count=None, **options):
    """A call of numbattn."""
    dtype = np.dtype(dtype)
    arrays = [random(rng, (*batch, *shape), dtype) for shape in ((heads, m, d), (heads_k, n, d), (heads_k, n, e))]
    lead = () if count is None else (count,)
    tangents = [random(rng, (*lead, *x.shape), dtype) if name in given else None for name, x in zip("qkv", arrays)]
    o, to, saved, tsaved = na.attention_forward_jvp(*arrays, *tangents, **options)
    wanted, others = (formula(np.zeros_like(o), *arrays, **options) for formula in (exact, plain))
    for name, got, want, other in zip(("o", "lse"), (o, saved.lse), wanted, others):
        assert_accurate(name, got, want, other, got.dtype)
    for number in range(count or 1):
        along = [x if x is None or count is None else x[number] for x in tangents]
        found = (to, tsaved.tlse) if count is None else (to[number], tsaved.tlse[number])
        wanted, others = (tangents_by(work, *arrays, *along, **options) for work in (np.longdouble, None))
        for name, got, want, other in zip(NAMES, found, wanted, others):
            assert_accurate(name, got, want, other, got.dtype)


@pytest.mark.parametrize(("device", "dtype", "options"), [
    (AMPERE, "float16", {"d": 100, "e": 128}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (TURING, "float32", {"count": 2}), (AMPERE, "bfloat16", {"causal": True}),
        (HOPPER, "float64", {"causal": True}), (TURING, "float16", {}),
        (TURING, "float64", {"d": 70}), (AMPERE, "float32", {"d": 70, "e": 100}),
    )),
    *(pytest.param(AMPERE, dtype, {"d": 200}, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32", "float64")),
])  # fmt: skip
@compiled_only
def test_calls(rng, device, dtype, options):
    """Each table of tiles."""
    with on(device):
        check(rng, dtype, **options)


OPTIONS = {
    "packed": {"mask": na.Segments([0, 20, 20, 40], [0, 33, 60, 70]), "causal": True},
    "intervals": {"mask": na.Prefix(3) | na.Window(9, 0)},
    "grids": {"mask": (np.indices((40, 70)).sum(0) % 3 > 0), "dropout": na.Dropout(0.3, seed=5)},
    "pieces": {"batch": (2, 1), "heads": 4, "heads_k": 2},
}


@pytest.mark.parametrize("options", [
    pytest.param(options, id=name, marks=[compiled_only, pytest.mark.slow] if name == "pieces" else mostly_simulated)
    for name, options in OPTIONS.items()
])  # fmt: skip
def test_options(rng, options):
    with on(AMPERE):
        check(rng, "float32", d=16, e=16, **options)


M, N, HEADS = 40, 70, 2
SCORES = {
    "softcap": lambda rng: na.Softcap(2.0),
    "sink": lambda rng: na.Sink(random(rng, HEADS, np.float32)),
    "bias": lambda rng: na.Bias(random(rng, (HEADS, M, N), np.float32)),
    "alibi": lambda rng: na.Alibi(random(rng, HEADS, np.float32) / 8),
    "alibi of queries": lambda rng: na.Alibi(random(rng, (1, HEADS), np.float32) / 8, offset=np.array([[3, -5]])),
    "relative": lambda rng: na.RelativeBias(random(rng, (HEADS, 31), np.float32)),
    "function": lambda rng: na.Score(lambda s, b, h, i, j: s + 0.25 * s * s),
}


@pytest.mark.parametrize(("names", "given"), [
    pytest.param(*which, marks=mostly_simulated) for which in (
        (["bias", "softcap"], "q"), (["relative", "function", "alibi of queries"], "kv"), (["softcap"], "qkv"),
        (["sink"], "qkv"), (["alibi", "sink"], ""),
    )
], ids=lambda x: "-".join(x) if isinstance(x, list) else x)  # fmt: skip
@pytest.mark.parametrize("device", [
    pytest.param(TURING, marks=simulated_only, id="CUDA cores"), pytest.param(AMPERE, marks=compiled_only, id="mma"),
])  # fmt: skip
def test_scores(rng, device, names, given):
    """With tangents of their arrays, and, simulated, without."""
    shapes = (1, HEADS, M, 24), (1, 1, N, 24), (1, 1, N, 40)
    arrays, score = [random(rng, shape, np.float32) for shape in shapes], [SCORES[name](rng) for name in names]
    tangents, options = tangents_of(rng, arrays, given), {"score": score, "mask": na.Window(30, 9)}
    weights = [x for part in score for x in part._weights]
    for tscore in [[random(rng, x.shape, x.dtype) for x in weights], *[[None] * len(weights)] * simulated()]:
        with on(device):
            _, to, _, tsaved = na.attention_forward_jvp(*arrays, *tangents, tscore=tscore, **options)
        for got, want in zip((to, tsaved.tlse), reference.attention_jvp(*arrays, *tangents, tscore=tscore, **options)):
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


HIDDEN, FEW = 5, 40  # a key, of so many


@pytest.mark.parametrize(("device", "dtype", "d", "e", "given", "names", "options"), [
    *(pytest.param(*case, marks=simulated_only) for case in (
        (TURING, "float32", 8, 8, "q", ["softcap"], {"mask": np.arange(FEW) != HIDDEN}),
        (TURING, "float32", 8, 8, "qkv", [], {"dropout": na.Dropout(0.3, seed=5)}),
        (AMPERE, "float16", 8, 8, "kv", [], {}), (TURING, "float32", 8, 8, "v", [], {}),
        (AMPERE, "float64", 8, 8, "qk", ["alibi", "softcap", "sink"], {"causal": True}),
        (AMPERE, "float32", 8, 8, "qkv", ["relative", "function", "softcap"], {}),
    )),
    *(pytest.param(*case, marks=[compiled_only, pytest.mark.slow]) for case in (
        (AMPERE, "float32", 24, 16, "qkv", ["softcap"], {}), (HOPPER, "float16", 100, 128, "qkv", [], {}),
    )),
])  # fmt: skip
def test_laplacians(rng, device, dtype, d, e, given, names, options):
    """The sum of second derivatives of O along tangents."""
    m = 10 if simulated() else 20
    shapes, score = ((1, HEADS, m, d), (1, 1, FEW, d), (1, 1, FEW, e)), [SCORES[name](rng) for name in names]
    arrays = [random(rng, shape, np.dtype(dtype)) for shape in shapes]
    arrays[1][..., HIDDEN, :] = np.nan if "mask" in options else 1
    tangents = [random(rng, (2, *x.shape), x.dtype) if name in given else None for name, x in zip("qkv", arrays)]
    call = *arrays, *tangents, *tangents_of(rng, arrays, "qv")
    jscore = [random(rng, (2, *x.shape), x.dtype) for part in score for x in part._weights]
    options |= {"score": score, "jscore": jscore, "lscore": [x[0] for x in jscore]}
    with on(device):
        found = na.attention_laplacian(*call, **options)
    error = {"float16": 3e-3, "float32": 1e-5, "float64": 1e-13}[dtype]
    for got, want in zip(found, reference.attention_laplacian(*call, **options)):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, atol=error * np.abs(want).max())


FAULTS = {
    ("test_two_warps", "test_masks"): {
        "wait_copies()\n        sync_threads()\n": "sync_threads()\n",
        "        sync_threads()\n        while": "        while",
        "wait_copies()\n            sync_threads()                                      # V":
            "sync_threads()                                      # V",
        "sync_threads()                                      # V": "pass  # V",
        "wait_copies()\n            sync_threads()                                      # K":
            "sync_threads()                                      # K",
        "sync_threads()                                      # K": "pass  # K",
        "sees(mask, band, batch, head, m0, n0)": "sees(mask, band, batch, head, n0, m0)",
        "mTV[0][batch, head_k][key:seen_k]": "mTV[0][batch, head_k][key:]",
        "tl * alpha": "tl",
        "tO * alpha": "tO",
        "- O * tlse": "- O",
    },
    "test_dropout": {
        "drops, batch, head, m0": "drops, head, batch, m0",
        "tO * (over_l * kept_scale)": "tO * over_l",
        "P = drop(P, drops": "_ = drop(P, drops",
    },
    "test_tangents_that_are_not_given_are_zero": {
        "if HAS_TV:\n                tO": "if HAS_TV and HAS_TQ:\n                tO",
        "(False, True): with_tk": "(False, True): without",
        "(True, False): with_tq": "(True, False): with_tk",
    },
    "test_scores": {
        'f"t{name}" for name in tangents': 'f"t{name}" for name in "qkv"',
        "query + m0, key + n0": "m0, key + n0 + 1",
        "HAS_TQ or HAS_TK or parts_of(of_parts)": "HAS_TQ or HAS_TK",
        "tlse = with_tsink(": "with_tsink(",
        "cuda/kernels/scores/sink.py": {"* reciprocal(total) * tangent": "* tangent"},
        "cuda/kernels/scores/score.py": {"if each[0]": "if True", "tangent_of_part(number), *each": "number, *each"},
    },
    "test_laplacians": {
        "tS = where(visible, tS, ZERO)": "tS = tS",
        "S2 = where(visible, S2, ZERO)": "S2 = S2",
        "S2 = product(stQ, stK) * TWO": "S2 = product(stQ, stK)",
        "tS * tS) * HALF": "tS) * HALF",
        "P2 = left_second(P * S2)": "P2 = left_second(S2)",
        "l2 * alpha": "l2",
        "O2 * alpha": "O2",
        "O2 = dot(O2, PtS, stV)": "O2 = dot(O2, P_left, stV)",
        "cuda/kernels/scores/tangent.py": {"slope + before * tslope": "slope + tS * tslope"},
        "- O * (row_sum(l2) * over_l)": "",
        "call/passes.py": {"lo += more": "pass", "lo -= bent": "lo += bent"},
    },
    "test_options": {
        "mTO[batch, head][query:end_query]": "mTO[batch, head][query:]",
    },
    "test_calls": {
        "tS + product(sQ, stK)": "tS",
    },
}

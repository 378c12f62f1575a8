"""Products of bfloat16 by instructions for pairs, as this CPU has them, and attention with them. All else: test_api."""

import itertools

import ml_dtypes
import numba
import numpy as np
import pytest

import numbattn as na
from numbattn.cpu import bfloat16, product, target
from numbattn.cpu.bfloat16 import HAS_AMX, HAS_BFLOAT16, PAIRS, has_pairs, pairs_of
from tests.accuracy import check, random
from tests.tools.process import printed

DTYPE = ml_dtypes.bfloat16
WAYS = {
    "amx": pytest.param(bfloat16.product_by_amx,
                        marks=pytest.mark.skipif(not HAS_AMX or not has_pairs(), reason="a CPU without AMX")),
    "dots": pytest.param(bfloat16.product_by_dots,
                         marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="a CPU without AVX512-BF16")),
}  # fmt: skip
needs_pairs = pytest.mark.skipif(not has_pairs(), reason="a CPU without instructions for pairs")


@pytest.mark.parametrize("multiply", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_products(rng, multiply, dtype):
    """Of operands in bfloat16 and in float32, of any sizes; a transpose of a's words is b of a^T."""

    @numba.njit
    def multiplied(out, a, b, alpha, add, buffers):
        bfloat16.begin(1)
        rows, pairs = bfloat16.rows_in(buffers[0], a), bfloat16.pairs_in(buffers[1], b)
        multiply(out, rows, pairs, alpha, add)
        bfloat16.end(1)

    @numba.njit
    def multiplied_turned(out, a, b, alpha, add, buffers):
        bfloat16.begin(1)
        rows = bfloat16.turned_in(buffers[2], bfloat16.pairs_in(buffers[0], a.T.copy()))
        pairs = bfloat16.turned_in(buffers[3], bfloat16.rows_in(buffers[1], b.T.copy()))
        multiply(out, rows, pairs, alpha, add)
        bfloat16.end(1)

    for rows, cols, depth in itertools.product([1, 31, 40], [1, 16, 75], [0, 1, 2, 33, 64]):
        a, b = (np.hstack([rng.standard_normal(size), np.full((size[0], 3), np.nan)]).astype(DTYPE)[:, : size[1]]
                for size in ((rows, depth), (depth, cols)))  # fmt: skip
        want = a.astype(float) @ b.astype(float)
        a, b = (x.view(np.uint16) if dtype == np.uint16 else np.ascontiguousarray(x.astype(dtype)) for x in (a, b))
        for function in multiplied, multiplied_turned:
            around = np.full((rows + 2, cols + 5), 7, np.float32)
            out = around[1:-1, 2:-3]
            out[...] = 1
            function(out, a, b, np.float32(2), True, np.full((4, 128 * 128), np.nan, np.float32))
            np.testing.assert_allclose(out, 2 * want + 1, rtol=1e-5, atol=1e-5)
            out[...] = np.nan
            function(out, a, b, np.float32(1), False, np.full((4, 128 * 128), np.nan, np.float32))
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
            out[...] = 7
            assert (around == 7).all()  # nothing is written beside it


@pytest.mark.skipif(not HAS_BFLOAT16, reason="a CPU without AVX512-BF16")
def test_rounding(rng):
    """To nearest, ties to even, infinities and NaN kept; what is subnormal becomes 0."""
    x = np.concatenate([rng.standard_normal(100) * 10.0 ** rng.integers(-35, 38, 100),
                        1 + np.arange(8) / 256, [np.inf, -np.inf, np.nan, 3.4e38, 0, -0.0, 1e-40]])  # fmt: skip
    x, buffer = x.astype(np.float32)[None], np.zeros(1000, np.float32)
    words = numba.njit(lambda buffer, x: bfloat16.rows_in(buffer, x))(buffer, x)
    got = words.view(DTYPE)[0, : x.size]
    np.testing.assert_array_equal(got[:-1].astype(float), x.astype(DTYPE)[0, :-1].astype(float))
    assert got[-1] == 0


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_row_dots(rng, dtype):
    a, b = rng.standard_normal((2, 37, 30)).astype(DTYPE)
    given = [x.view(np.uint16) if dtype == np.uint16 else x.astype(dtype) for x in (a, b)]
    out = np.zeros(37, np.float32)
    numba.njit(lambda *args: product.row_dots(*args))(out, *given)
    np.testing.assert_allclose(out, (a.astype(float) * b.astype(float)).sum(axis=1), rtol=1e-5, atol=1e-5)


CASES = {
    "one feature": ((2, 40, 1), (2, 300, 1), {}),
    "odd": ((2, 131, 33), (2, 257, 33), {"causal": True}),
    "groups, broadcast": ((2, 4, 65, 64), (2, 129, 64), {"mask": na.Window(40, 3)}),
    "few keys": ((1, 200, 72), (1, 3, 72), {}),
    "dropout": ((2, 150, 20), (2, 200, 20), {"dropout": na.Dropout(0.3, 5), "causal": True}),
    "segments": ((2, 150, 64), (2, 150, 64), {"mask": na.Segments([0, 40, 41, 150])}),
    "function": ((2, 70, 48), (2, 190, 48), {"mask": na.Where(lambda batch, head, i, j: j % 3 != i % 2)}),
    "scores": ((3, 100, 129), (3, 140, 129), {"score": [na.Softcap(20.0), na.Alibi(np.array([0.1, 0.2, 0.3], DTYPE))]}),
}  # fmt: skip


@needs_pairs
@pytest.mark.parametrize("case", CASES)
def test_attention(rng, case):
    size_q, size_k, options = CASES[case]
    q, k, v = (random(rng, size, DTYPE) for size in (size_q, size_k, (*size_k[:-1], size_k[-1] + 5)))
    check(q, k, v, rng, **options)


@needs_pairs
def test_values_without_features(rng):
    """As for attention_weights."""
    q, k = random(rng, (2, 2, 150, 16), DTYPE)
    np.testing.assert_allclose(na.attention_weights(q, k).astype(float).sum(-1), 1, atol=0.03)


@needs_pairs
def test_any_strides(rng):
    x = random(rng, (2, 100, 3, 2, 40), DTYPE)
    q, k, v = (x[:, ::-1, i].swapaxes(1, 2) for i in range(3))
    check(q, k, v, rng)
    np.testing.assert_array_equal(na.attention(q, k, v), na.attention(*(x.copy() for x in (q, k, v))))


@needs_pairs
def test_what_is_computed_in_pairs(rng):
    """Calls in bfloat16 whose keys are not in a cache."""
    q, k, v = random(rng, (3, 2, 40, 8), DTYPE)
    _, saved = na.attention_forward(q, k, v)
    assert pairs_of(saved.problem, q, k, v) is PAIRS
    assert pairs_of(saved.problem, q, k, v, q.astype(np.float32)) is not PAIRS
    cache = na.KVCache.zeros(1, 2, 50, 8, like=q)
    cache.append(k[None], v[None])
    assert pairs_of(na.attention_forward(q[None], cache)[1].problem, q, k, v) is not PAIRS


COMPILED = """
import numba, numpy as np
from numba import types
from numbattn.cpu import bfloat16
for multiply in bfloat16.product_by_dots, bfloat16.product_by_amx:
    function = numba.njit(lambda out, a, b: multiply(out, a, b, np.float32(1), False))
    words = types.uint32[:, ::1]
    function.compile((types.float32[:, ::1], words, words))
    code, = function.inspect_asm().values()
    print("vdpbf16ps" in code, "tdpbf16ps" in code)
"""
FEATURES = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16,+fma,+f16c,+amx-tile,+amx-bf16"


def test_code_for_other_cpus():
    """LLVM has the instructions everywhere."""
    setting = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": FEATURES}
    assert printed(COMPILED, **setting) == ["True False", "False True"]


DOTS = """
import ml_dtypes, numpy as np
from numbattn.cpu import bfloat16
from tests.accuracy import check, random
rng = np.random.default_rng(0)
check(*(random(rng, (2, 100, 33), ml_dtypes.bfloat16) for _ in range(3)), rng, causal=True)
print(bfloat16.HAS_AMX, bfloat16.HAS_DOTS)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BFLOAT16, reason="a CPU without AVX512-BF16")
def test_attention_by_dot_products():
    features = ",".join(x for x in target.TARGET.split(",") if "amx" not in x)
    assert printed(DOTS, NUMBA_CPU_NAME="znver4", NUMBA_CPU_FEATURES=features) == ["False True"]


FAULTS = {
    "test_products": {
        "store(ir.Constant(ir.VectorType(SHORT, SIDE), None), builder.sub(words, LONG(SIDE // 2)))": "pass",
        "unit.splat(builder.sext(there, INT))": "unit.splat(INT(-1))",
        "[builder.select(add, width, zero) for width in widths]": "widths",
        "builder.select(builder.icmp_signed(\"<\", left, size), left, size)": "size",
    },
    "test_any_strides": {
        "x.place.row_stride // 2": "x.place.row_stride",
    },
    "test_attention[dropout]": {
        "rows_in(scratch.rows, a), b, factor, False)": "rows_in(scratch.rows, a), b, np.float32(1), False)",
    },
}

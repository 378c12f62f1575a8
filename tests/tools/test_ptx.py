"""The interpreter of PTX on a few lines of it."""

from itertools import chain

import numpy as np
import pytest

from .ptx import AccessError, interpret


def kernel(body, scalars=()):
    """A kernel of one vector, its address in %rd1 + 4 tid, and of scalars."""
    names = ["p0", "p1", "p2", "p3", "data", "size", "stride"]
    parameters = [f".param .u64 {name}" for name in names] + [f".param .{kind} {name}" for kind, name in scalars]
    lines = ",\n".join(parameters)
    return f"""
.visible .entry kernel(
{lines}
)
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<40>;
    .reg .f32 %f<40>;
    .reg .f64 %fd<40>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [data];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
{body}
    ret;
}}
"""


def run(body, x, shared=0, threads=32, scalars=()):
    return interpret(kernel(body, [s[:2] for s in scalars]), (1, 1, 1), threads, shared, x, *[s[2] for s in scalars])


def test_arithmetic_and_predicates():
    x = np.arange(32, dtype=np.float32)
    run("""
        ld.param.f32 %f9, [scale];
        ld.global.f32 %f1, [%rd3];
        fma.rn.f32 %f2, %f1, %f9, 0f3F800000;
        setp.gt.u32 %p1, %r1, 7;
        selp.f32 %f3, %f2, %f1, %p1;
        @%p1 st.global.f32 [%rd3], %f3;
        """, x, scalars=[("f32", "scale", np.float32(3))])  # fmt: skip
    i = np.arange(32)
    np.testing.assert_array_equal(x, np.where(i > 7, 3 * i + 1, i))


def test_threads_part_and_meet_again():
    x = np.zeros(32, np.uint32)
    run("""
        mov.u32 %r2, 0;
        mov.u32 %r3, 0;
    $loop:
        setp.ge.u32 %p1, %r3, %r1;
        @%p1 bra $done;
        add.s32 %r2, %r2, %r3;
        add.s32 %r3, %r3, 1;
        bra.uni $loop;
    $done:
        shfl.sync.bfly.b32 %r4, %r2, 1, 0x1f, -1;
        st.global.u32 [%rd3], %r4;
        """, x)  # fmt: skip
    i = np.arange(32) ^ 1
    np.testing.assert_array_equal(x, i * (i - 1) // 2)


def test_64_bit_products_and_byte_shuffles():
    x = np.full(32, 0xDEADBEEF, np.uint32)
    run("""
        ld.global.u32 %r2, [%rd3];
        mul.hi.u32 %r3, %r2, 0xCAFEBABE;
        prmt.b32 %r4, %r2, %r3, 0x5410;
        st.global.u32 [%rd3], %r4;
        """, x)  # fmt: skip
    high = 0xDEADBEEF * 0xCAFEBABE >> 32
    assert (x == (0xBEEF | (high & 0xFFFF) << 16)).all()


def test_tf32_is_rounded_to_the_nearest_ties_away():
    ulp = np.float32(2**-10)
    given = [1, 1 + ulp / 2, 1 + 0.49 * ulp, -1 - ulp / 2, 1 + 1.5 * ulp, 0, np.inf, np.nan]
    want = [1, 1 + ulp, 1, -1 - ulp, 1 + 2 * ulp, 0, np.inf, np.nan]
    x = np.tile(np.float32(given), 4)
    run("""
        ld.global.f32 %f1, [%rd3];
        cvt.rna.tf32.f32 %r2, %f1;
        st.global.b32 [%rd3], %r2;
        """, x)  # fmt: skip
    np.testing.assert_array_equal(x, np.tile(np.float32(want), 4))


def multiply_tf32(a, b, c):
    """c + a b of 16x8, 8x8 and 16x8 elements by one instruction, registers dealt out as the manual says."""
    g, t = np.divmod(np.arange(32), 4)
    parts = a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4], b[t, g], b[t + 4, g]
    parts += c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]
    x = np.concatenate(parts).astype(np.float32)
    loads = "".join(f"ld.global.f32 %f{i + 1}, [%rd3+{128 * i}];\nmov.b32 %r{i + 2}, %f{i + 1};\n" for i in range(10))
    stores = "".join(f"st.global.f32 [%rd3+{128 * i}], %f{i + 11};\n" for i in range(4))
    operands = "{%f11, %f12, %f13, %f14}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f7, %f8, %f9, %f10}"
    run(f"""
        {loads}
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {operands};
        {stores}
        """, x)  # fmt: skip
    d = np.empty((16, 8), np.float32)
    for i, (row, col) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        d[g + row, 2 * t + col] = x[32 * i : 32 * i + 32]
    return d


def test_products_of_tf32():
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    np.testing.assert_array_equal(multiply_tf32(a, b, c), a @ b + c)


def test_products_of_tf32_see_10_bits_and_cut_off():
    a, b = np.zeros((16, 8), np.float32), np.eye(8, dtype=np.float32)
    a[:8], c = 1 + 2**-10 + 2**-11, np.zeros((16, 8), np.float32)
    a[8:], c[8:] = 2**-24 + 2**-26, 1  # more than half of the last bit
    want = np.repeat(np.float32([1 + 2**-10, 1]), 8)[:, None]
    np.testing.assert_array_equal(multiply_tf32(a, b, c), np.broadcast_to(want, (16, 8)))
    np.testing.assert_array_equal(multiply_tf32(-a, b, -c), np.broadcast_to(-want, (16, 8)))


def multiply_f64(a, b, c):
    """c + a b of 16x8, 8x8 and 16x8 elements, or of 8x4, 4x8 and 8x8, dealt out as the manual says."""
    g, t = np.divmod(np.arange(32), 4)
    height, depth = a.shape
    ks = range(0, depth, 4)
    places = [(g + row, 2 * t + col) for row in range(0, height, 8) for col in range(2)]
    parts = [[a[g + row, t + k] for k in ks for row in range(0, height, 8)], [b[t + k, g] for k in ks]]
    parts.append([c[place] for place in places])
    x = np.concatenate([*chain(*parts)]).astype(np.float64)
    n = len(x) // 32
    names = iter(f"%fd{i}" for i in range(n + len(places)))
    vectors = ["{" + ", ".join(next(names) for _ in part) + "}" for part in (*parts, places)]
    loads = "".join(f"ld.global.f64 %fd{i}, [%rd3+{256 * i}];\n" for i in range(n))
    stores = "".join(f"st.global.f64 [%rd3+{256 * i}], %fd{n + i};\n" for i in range(len(places)))
    run(f"""
        add.s64 %rd3, %rd3, %rd2;
        {loads}
        mma.sync.aligned.m{height}n8k{depth}.row.col.f64.f64.f64.f64 {", ".join(vectors[-1:] + vectors[:-1])};
        {stores}
        """, x)  # fmt: skip
    d = np.empty((height, 8))
    for i, place in enumerate(places):
        d[place] = x[32 * i : 32 * i + 32]
    return d


@pytest.mark.parametrize(("height", "depth"), [(16, 8), (8, 4)])
def test_products_of_f64(height, depth):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-(2**20), 2**20, shape) for shape in ((height, depth), (depth, 8), (height, 8)))
    np.testing.assert_array_equal(multiply_f64(a, b, c), a @ b + c)


def test_sums_of_f64_are_rounded_to_the_nearest():
    tail = np.full((16, 8), 2**-53 + 2**-55)  # more than half of the last bit of 1
    np.testing.assert_array_equal(multiply_f64(tail, np.eye(8), np.ones((16, 8))), 1 + 2**-52)


def test_an_address_outside():
    with pytest.raises(AccessError, match="outside of all arrays"):
        run("ld.global.f32 %f1, [%rd3+4];", np.zeros(32, np.float32))


def test_the_holes_of_a_strided_array_are_outside():
    with pytest.raises(AccessError, match="outside of all arrays"):
        run("ld.global.f32 %f1, [%rd3];", np.zeros(64, np.float32)[::2])


def test_a_misaligned_address():
    with pytest.raises(AccessError, match="misaligned"):
        run("ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];", np.zeros(64, np.float32))


def test_shared_memory_that_nobody_wrote():
    with pytest.raises(AccessError, match="nobody has written"):
        run("mov.u32 %r2, numbattn_shared;\nld.shared.f32 %f1, [%r2];", np.zeros(32, np.float32), shared=64)


def test_a_register_that_nobody_wrote():
    with pytest.raises(AccessError, match="%f1 is read before it is written"):
        run("st.global.f32 [%rd3], %f1;", np.zeros(32, np.float32))
    with pytest.raises(AccessError, match="%f1 is read before it is written"):
        run("""
            setp.gt.u32 %p1, %r1, 7;
            @%p1 mov.f32 %f1, 0f00000000;
            st.global.f32 [%rd3], %f1;
            """, np.zeros(32, np.float32))  # fmt: skip


def test_a_shuffle_that_some_lanes_miss():
    with pytest.raises(RuntimeError, match="not all lanes"):
        run("setp.gt.u32 %p1, %r1, 7;\n@%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 0x1f, -1;", np.zeros(32, np.float32))


@pytest.mark.parametrize(("words", "conflicts"), [(1, 0), (2, 1), (32, 31), (33, 0)])
def test_bank_conflicts(words, conflicts):
    body = f"""
        mov.u32 %r2, numbattn_shared;
        mad.lo.s32 %r3, %r1, {4 * words}, %r2;
        st.shared.u32 [%r3], %r1;
    """
    found = run(body, np.zeros(32, np.float32), shared=32 * 4 * words)
    assert found.conflicts["st.shared.u32"] == conflicts


def test_unknown_instructions_are_refused():
    with pytest.raises(AttributeError, match="op_sin"):
        run("sin.approx.f32 %f1, 0f00000000;", np.zeros(32, np.float32))

"""The interpreter of PTX on a few lines of it."""

from itertools import chain

import ml_dtypes
import numpy as np
import pytest

from .ptx import AccessError, DeadlockError, TensorMap, interpret


def kernel(body, scalars=(), maps=0):
    """A kernel of one vector, its address in %rd1 + 4 tid, of scalars and of tensor maps."""
    names = ["p0", "p1", "p2", "p3", "data", "size", "stride"]
    parameters = [f".param .u64 {name}" for name in names] + [f".param .{kind} {name}" for kind, name in scalars]
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    lines = ",\n".join(parameters)
    return f"""
.visible .entry kernel(
{lines}
)
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<40>;
    .reg .f32 %f<400>;
    .reg .f64 %fd<40>;
    .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [data];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
{body}
    ret;
}}
"""


def run(body, x, shared=0, threads=32, scalars=(), maps=()):
    text, numbers = kernel(body, [s[:2] for s in scalars], len(maps)), [s[2] for s in scalars]
    return interpret(text, (1, 1, 1), threads, shared, x, *numbers, *maps)


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


def test_arrays_share_memory():
    """What is stored in one is loaded from the other, whose elements lie around it."""
    whole = np.zeros(5, np.float32)
    text = kernel(
        """ld.param.u64 %rd4, [pointer]; mov.f32 %f1, 0f40400000; st.global.f32 [%rd3], %f1;
        ld.global.f32 %f2, [%rd4+8]; st.global.f32 [%rd4], %f2;""",
        [("u64", name) for name in ("p4", "p5", "count", "nbytes", "pointer", "length", "step")],
    )
    interpret(text, (1, 1, 1), 1, 0, whole[2:4], whole)
    np.testing.assert_array_equal(whole, [3, 0, 3, 0, 0])


def test_a_misaligned_address():
    with pytest.raises(AccessError, match="misaligned"):
        run("ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];", np.zeros(64, np.float32))


def test_shared_memory_that_nobody_wrote():
    with pytest.raises(AccessError, match="nobody has written"):
        run("mov.u32 %r2, numbattn_shared;\nld.shared.f32 %f1, [%r2];", np.zeros(32, np.float32), shared=64)


PAIR = """mov.u32 %r2, numbattn_shared; mad.lo.u32 %r2, %r1, 8, %r2; mov.f32 %f1, 0f3F800000;
st.shared.f32 [%r2], %f1; ld.shared.v2.f32 {%f2, %f3}, [%r2];"""


def test_a_vector_may_have_a_part_that_nobody_wrote():
    x = np.zeros(32, np.float32)
    run(PAIR + "st.global.f32 [%rd3], %f2;", x, shared=256)
    assert (x == 1).all()
    with pytest.raises(AccessError, match="%f3 is read before it is written"):
        run(PAIR + "st.global.f32 [%rd3], %f3;", x, shared=256)


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
    with pytest.raises(RuntimeError, match="not all 32 threads"):
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


# ------------------------------------------------------------------------------------------------------------- Hopper
def test_names_between_braces_are_their_own():
    x = np.zeros(32, np.uint32)
    count = """{
        .reg .pred over; .reg .b32 n, i;
        mov.u32 n, 0; mov.u32 i, 0;
    again:
        setp.ge.u32 over, i, %r1;
        @over bra done;
        add.u32 n, n, i; add.u32 i, i, 1; { .reg .b32 n; mov.u32 n, 99; }
        bra again;
    done:
        mov.u32 %r2, n;
    }"""
    run(f"""
        {count}
        mov.u32 %r3, %r2;
        {count}
        add.u32 %r2, %r2, %r3;
        st.global.u32 [%rd3], %r2;
        """, x)  # fmt: skip
    i = np.arange(32)
    np.testing.assert_array_equal(x, i * (i - 1))


def test_lanes_by_number():
    x = np.zeros(64, np.uint32)
    run("shfl.sync.idx.b32 %r2, %r1, 5, 0x1f, -1;\nst.global.u32 [%rd3], %r2;", x, threads=64)
    np.testing.assert_array_equal(x, np.repeat([5, 37], 32))


def test_threads_count():
    x = np.zeros(64, np.uint32)
    run("""
        atom.global.add.u32 %r2, [%rd1], 3;
        atom.global.inc.u32 %r3, [%rd1+4], 9;
        red.global.max.u32 [%rd1+8], %r1;
        membar.gl;
        setp.gt.u32 %p1, %r1, 2;
        @%p1 st.global.u32 [%rd3], %r2;
        """, x, threads=64)  # fmt: skip
    np.testing.assert_array_equal(x, [192, 4, 63, *range(9, 192, 3)])


def test_a_wait_that_is_not_repeated_is_no_wait():
    wait = waiting().replace("@!over bra again;", "")
    with pytest.raises(AccessError, match="nobody has written"):
        run(f"""
            {opened(32)}
            @!%p1 bra $write;
            {wait}
            ld.shared.u32 %r2, [%r8+8];
            bra $end;
        $write:
            st.shared.u32 [%r8+8], 5;
            {ARRIVE}
        $end:
            """, np.zeros(64, np.uint32), 64, 64)  # fmt: skip


WARPS = """
    shr.u32 %r9, %r1, 5;
    setp.eq.u32 %p1, %r9, 0;
    setp.eq.u32 %p2, %r1, 0;
    mov.u32 %r8, numbattn_shared;
"""


def opened(count):
    return f"{WARPS} @%p2 mbarrier.init.shared::cta.b64 [%r8], {count}; bar.sync 0;"


def waiting(parity=0, barrier="%r8"):
    return f"""{{ .reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [{barrier}], {parity};
        @!over bra again; }}"""


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r8];"


def test_threads_wait_for_a_phase():
    """Warp 0, which comes first, sees what warp 1 has written; of both phases."""
    x = np.zeros(64, np.uint32)
    run(f"""
        {opened(32)}
        @!%p1 bra $write;
        {waiting(0)}
        ld.shared.u32 %r2, [%r8+8];
        bar.sync 1, 64;
        {waiting(1)}
        ld.shared.u32 %r3, [%r8+8];
        mad.lo.u32 %r2, %r2, 10, %r3;
        st.global.u32 [%rd3], %r2;
        bra $end;
    $write:
        st.shared.u32 [%r8+8], 5;
        {ARRIVE}
        bar.sync 1, 64;
        st.shared.u32 [%r8+8], 6;
        {ARRIVE}
    $end:
        """, x, 64, 64)  # fmt: skip
    np.testing.assert_array_equal(x, np.repeat([56, 0], 32))


@pytest.mark.parametrize("form", ["", ".trans"])
def test_matrices_are_stored_as_they_are_or_transposed(form):
    """Element (i, j) of 8x8 is 8 i + j: the lane has two in a row."""
    x = np.zeros(32, np.uint32)
    run(f"""
        mov.u32 %r8, numbattn_shared;
        shl.b32 %r2, %r1, 17;
        shl.b32 %r3, %r1, 1;
        add.u32 %r2, %r2, %r3;
        add.u32 %r2, %r2, 65536;
        shl.b32 %r3, %r1, 4;
        add.u32 %r4, %r8, %r3;
        stmatrix.sync.aligned.m8n8.x4{form}.shared.b16 [%r4], {{%r2, %r2, %r2, %r2}};
        shl.b32 %r3, %r1, 2;
        add.u32 %r4, %r8, %r3;
        ld.shared.u32 %r5, [%r4];
        st.global.u32 [%rd3], %r5;
        """, x, 512)  # fmt: skip
    stored = np.arange(64).reshape(8, 8)
    np.testing.assert_array_equal(x.view(np.uint16).reshape(8, 8), stored.T if form else stored)


@pytest.mark.parametrize(("body", "error", "text"), [
    (f"{opened(33)} @!%p1 {ARRIVE} @%p1 bra $wait; bra $end; $wait: {waiting()} $end:", DeadlockError,
     r"threads 0-31 wait for the mbarrier at 0x\w+, byte 0: phase 0 lacks 1 of 33 arrivals and 0 bytes"),
    (f"{opened(1)} @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 64; {waiting()}", DeadlockError,
     r"threads 0-63 wait .* lacks 0 of 1 arrivals and 64 bytes"),
    (f"{opened(40)} @%p2 {ARRIVE[:-1]}, 41;", AccessError, "more arrive"),
    (f"{WARPS} {ARRIVE}", AccessError, "no mbarrier has been initialised"),
    (f"{opened(1)} st.shared.u32 [%r8+4], %r1;", AccessError, "overwrites shared memory that a barrier"),
    (f"{WARPS} @%p1 bar.sync 3, 64; @!%p1 bar.sync 4, 64;", DeadlockError,
     r"threads 0-31 wait at barrier 3, where 32 of 64 have arrived\n.*threads 32-63 wait at barrier 4"),
    (f"{WARPS} bar.arrive 3, 64;", RuntimeError, "barrier 3: 64 threads have arrived, nobody waits"),
    (f"{WARPS} @%p1 bar.arrive 3, 64; @!%p1 bar.sync 3, 32;", RuntimeError, "barrier 3 of 64 threads"),
    (f"{WARPS} @%p2 bar.sync 3, 64;", RuntimeError, "not all 32 threads"),
    ("setmaxnreg.dec.sync.aligned.u32 40;", RuntimeError, "not all 128 threads"),
], ids=range(10))  # fmt: skip
def test_faults_of_waiting(body, error, text):
    with pytest.raises(error, match=text):
        run(body, np.zeros(64, np.uint32), 64, 64)


def test_some_threads_arrive_and_others_wait():
    x = np.zeros(64, np.uint32)
    run(f"""
        {WARPS}
        add.u32 %r2, %r9, 3;
        @!%p1 bra $write;
        bar.sync %r2, 64;
        ld.shared.u32 %r3, [%r8];
        st.global.u32 [%rd3], %r3;
        bra $end;
    $write:
        st.shared.u32 [%r8], 5;
        sub.u32 %r2, %r2, 1;
        bar.arrive %r2, 64;
    $end:
        """, x, 64, 64)  # fmt: skip
    np.testing.assert_array_equal(x, np.repeat([5, 0], 32))


@pytest.mark.parametrize("count", [16, 28, 264])
def test_counts_of_registers(count):
    run("setmaxnreg.inc.sync.aligned.u32 240;", np.zeros(128, np.uint32), threads=128)
    with pytest.raises(RuntimeError, match=f"setmaxnreg: got {count}"):
        run(f"setmaxnreg.dec.sync.aligned.u32 {count};", np.zeros(128, np.uint32), threads=128)


LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
BARRIER = 48 << 10  # after all boxes


def filled(*boxes, wait=True):
    """Boxes (map, byte in shared memory, row, column) that thread 0 loads and all wait for."""
    loads = "".join(
        f"{{ .reg .b64 %a; mov.b64 %a, map{i}; cvta.param.u64 %rd5, %a; }} @%p2 {LOAD} "
        f"[%r8+{at}], [%rd5, {{{column}, {row}, 0, 0}}], [%r7];"
        for i, at, row, column in boxes
    )  # fmt: skip
    return f"""
        {WARPS}
        add.u32 %r7, %r8, {BARRIER};
        @%p2 mbarrier.init.shared::cta.b64 [%r7], 1; fence.mbarrier_init.release.cluster;
        bar.sync 0;
        @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], {8192 * len(boxes)};
        {loads}
        {waiting(0, "%r7") if wait else ""}
    """


def sent(at, row, column, wait="cp.async.bulk.wait_group.read 0;"):
    return f"""
        mov.b64 %rd6, map1; cvta.param.u64 %rd6, %rd6;
        @%p2 {STORE} [%rd6, {{{column}, {row}, 0, 0}}], [%r8+{at}]; @%p2 cp.async.bulk.commit_group; @%p2 {wait}
    """


def matrix(rows, cols, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, (1, 1, rows, cols)).astype(np.float16)


def boxes(body, *arrays, rows=64, x=None):
    maps = [TensorMap(a, (1, 1, rows, 64)) for a in arrays]
    return run(body, np.zeros(128, np.float32) if x is None else x, BARRIER + 64, 128, maps=maps)


def test_boxes_are_filled_with_zeros_and_cut_off():
    a, b = matrix(70, 96), np.full((1, 1, 40, 104), np.nan, np.float16)[..., :72]
    boxes(filled((0, 0, 32, 64)) + sent(0, -30, 40), a, b)
    want = np.full((40, 72), np.nan)
    want[:34, 40:] = 0
    want[:8, 40:] = a[0, 0, 62:, 64:]
    np.testing.assert_array_equal(b[0, 0], want)


def test_boxes_are_swizzled():
    a, x = matrix(64, 64), np.zeros(64 * 32, np.uint32)
    step = "".join(f"ld.shared.u32 %r3, [%r4+{512 * i}]; st.global.u32 [%rd3+{512 * i}], %r3;" for i in range(16))
    boxes(f"{filled((0, 1024, 0, 0))} mad.lo.u32 %r4, %r1, 4, %r8; add.u32 %r4, %r4, 1024; {step}", a, x=x)
    chunks = x.view(np.float16).reshape(64, 8, 8)
    for r in range(64):
        np.testing.assert_array_equal(chunks[r, np.arange(8) ^ r % 8].reshape(-1), a[0, 0, r])


def test_a_matrix_that_is_broadcast():
    a, b = np.broadcast_to(matrix(1, 64)[:, :, :1], (1, 1, 64, 64)), np.zeros((1, 1, 64, 64), np.float16)
    boxes(filled((0, 0, 0, 0)) + sent(0, 0, 0), a, b)
    np.testing.assert_array_equal(a, b)


PUT = "mad.lo.u32 %r4, %r1, 4, %r8; st.shared.u32 [%r4+4096], %r1;"
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"


@pytest.mark.parametrize(("body", "error", "text"), [
    (filled((0, 512, 0, 0)), AccessError, r"a box at 0x\w+, which is no multiple of 1024"),
    (filled((0, 0, 0, 0), wait=False) + "ld.shared.u32 %r3, [%r8];", AccessError, "nobody has written"),
    (filled((0, 0, 0, 0), wait=False), AccessError, "ends while boxes are on their way"),
    (filled((0, 0, 0, 0)).replace("8192", "8208"), DeadlockError, "lacks 0 of 1 arrivals and 16 bytes"),
    (filled((0, 47 << 10, 0, 0)), AccessError, "outside of all arrays"),
    (filled((0, 0, 0, 0)) + PUT + "bar.sync 0;" + sent(0, 0, 0), AccessError,
     "touches what thread 127 stored without a fence.proxy.async since"),
    (filled((0, 0, 0, 0)) + "@%p2 bra $on;" + PUT + "$on:" + FENCE.replace("fence", "@%p1 fence") + sent(0, 0, 0),
     AccessError, "touches what thread 127 stored without"),
    (filled((0, 0, 0, 0)) + sent(0, 0, 0, "mov.u32 %r3, 0;") + PUT, AccessError, "a copy on its way uses"),
    (WARPS + "mov.u64 %rd5, %rd1;" + sent(0, 0, 0).replace("cvta.param.u64 %rd6, %rd6", "mov.u64 %rd6, %rd5"),
     AccessError, "no tensor map at"),
    (WARPS + sent(0, 0, 0), AccessError, "nobody has written"),
    (filled((0, 0, 0, 0)).replace("fence.mbarrier_init.release.cluster;", ""), AccessError,
     "without a fence.mbarrier_init"),
], ids=range(11))  # fmt: skip
def test_faults_of_boxes(body, error, text):
    with pytest.raises(error, match=text):
        boxes(body, matrix(64, 64), matrix(64, 64))


def test_stores_that_are_fenced_are_sent():
    b = np.zeros((1, 1, 64, 64), np.float16)
    boxes(filled((0, 0, 0, 0)) + PUT + FENCE + sent(0, 0, 0) + PUT, matrix(64, 64), b)
    assert (b[0, 0, 32, :2].view(np.uint16) == 0).all()  # what thread 0 put at 4096
    assert set(range(128)) <= set(b.view(np.uint16).flat)


@pytest.mark.parametrize(("array", "box", "text"), [
    (np.zeros((1, 1, 8, 70), np.float16), (1, 1, 8, 64), "strides"),
    (np.zeros((1, 1, 8, 128), np.float16)[..., ::2], (1, 1, 8, 64), "the last axis has stride 4"),
    (np.zeros((1, 1, 8, 128), np.float16)[..., 1:65], (1, 1, 8, 64), "address"),
    (np.zeros((1, 1, 8, 64), np.float16)[:, :, ::-1], (1, 1, 8, 64), "strides"),
    (np.zeros((1, 1, 8, 64), np.float32), (1, 1, 8, 64), "rows of 256 bytes for a swizzle of 128"),
    (np.zeros((1, 1, 8, 64), np.float16), (1, 1, 257, 64), "no box"),
    (np.zeros((1, 1, 8, 64), np.float16), (8, 64), "no box"),
], ids=range(7))  # fmt: skip
def test_arrays_that_no_tensor_map_takes(array, box, text):
    with pytest.raises(AccessError, match=text):
        TensorMap(array, box)


COLS = 128
SUMS = [f"%f{i}" for i in range(COLS // 2)]
WAIT = "wgmma.wait_group.sync.aligned 0;"


def described(name, at, lead=1):
    """A descriptor of the tile at a byte of shared memory."""
    return (f"shr.u32 %r10, %r8, 4; add.u32 %r10, %r10, {(lead >> 4 << 16) + (at >> 4)}; "
            f"mov.b64 {name}, {{%r10, {1 << 30 | 64}}};")  # fmt: skip


def product(left, right, add, turned, kind="f16", commit="wgmma.commit_group.sync.aligned;", sums=SUMS):
    return f"""
        setp.ne.b32 %p3, {add}, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k16.f32.{kind}.{kind} {{{", ".join(sums)}}}, {left}, {right},
            %p3, 1, 1, {turned};
        {commit}
    """


STORES = "".join(f"st.global.f32 [%rd3+{512 * i}], {name};" for i, name in enumerate(SUMS))


def stored(x, cols=COLS):
    """The sums that 128 threads have stored, where they belong."""
    out, t = np.empty((64, cols)), np.arange(128)
    for i, column in enumerate(x.reshape(-1, 128)[: cols // 2]):
        out[16 * (t // 32) + t % 32 // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (t % 4) + (i & 1)] = column
    return out


@pytest.mark.parametrize(("a_turned", "b_turned"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_products_of_a_warpgroup(a_turned, b_turned):
    """64 x 128 sums over 32 of k, from a tile of A and two of B: rows, or boxes of 64 columns if turned."""
    a, b = matrix(64, 64), matrix(128, 64, 1)
    x = np.zeros(128 * len(SUMS), np.float32)
    # B as 128 rows of k, or as two boxes of 64 rows of k each
    loads = filled((0, 0, 0, 0), (1, 8192, 0, 0), (1, 16384, 64, 0))
    steps = ""
    for i in range(2):
        at_a, at_b = ((2048 if turned else 32) * i for turned in (a_turned, b_turned))
        steps += described("%rd7", at_a, 8192) + described("%rd8", 8192 + at_b, 8192)
        steps += product("%rd7", "%rd8", i, f"{a_turned}, {b_turned}")
    boxes(loads + steps + WAIT + STORES, a, b, x=x)
    a, b = a[0, 0].astype(float), b[0, 0].astype(float)
    left = a[:32].T if a_turned else a[:, :32]
    right = np.concatenate([b[:32], b[64:96]], 1) if b_turned else b[:, :32].T
    np.testing.assert_array_equal(stored(x), left @ right)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_left_operand_in_registers(kind):
    """Lane 9 of each warp has 1 in the first half of registers 0 and 3: in rows 2 and 10, at k 2 and 10."""
    b, x = matrix(128, 64), np.zeros(128 * len(SUMS), np.float32)
    if kind == "bf16":
        b = b.astype(np.float32).astype(ml_dtypes.bfloat16)
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    registers = f"""
        and.b32 %r2, %r1, 31;
        setp.eq.u32 %p4, %r2, 9;
        selp.b32 %r11, {one}, 0, %p4;
        mov.u32 %r12, 0;
        mov.u32 %r13, 0;
        selp.b32 %r14, {one}, 0, %p4;
    """
    loads = filled((0, 0, 0, 0), (0, 8192, 64, 0)) + described("%rd8", 0)
    boxes(loads + registers + product("{%r11, %r12, %r13, %r14}", "%rd8", 0, "0", kind) + WAIT + STORES, b, x=x)
    want = np.zeros((64, COLS))
    want[2::16], want[10::16] = b[0, 0, :, 2], b[0, 0, :, 10]
    np.testing.assert_array_equal(stored(x), want)


READY = filled((0, 0, 0, 0), (0, 8192, 64, 0)) + described("%rd7", 0)
ONCE = product("%rd7", "%rd7", 0, "0, 0")
LEFT = "".join(f"mov.u32 %r{i}, 0;" for i in range(11, 15))
FROM_REGISTERS = LEFT + product("{%r11, %r12, %r13, %r14}", "%rd7", 0, "0")


@pytest.mark.parametrize("body", [
    ONCE + ONCE.replace("setp.ne.b32 %p3, 0", "setp.ne.b32 %p3, 1") + WAIT + STORES,
    ONCE + "mov.f32 %f200, %f0;" + WAIT + "add.f32 %f201, %f200, %f0;",
    ONCE + product("%rd7", "%rd7", 0, "0, 0", sums=[f"%f{i}" for i in range(100, 108)]) + WAIT.replace(" 0", " 1")
    + STORES,
    ONCE + WAIT + "st.shared.u32 [%r8], %r1;",
    FROM_REGISTERS + "mov.u32 %r20, %r11;" + WAIT + "mov.u32 %r11, 1;",
    f"@%p1 bra $late; bra $on; $back: bra $on; $late: bra $back; $on: {ONCE + WAIT} {STORES}",
], ids=range(6))  # fmt: skip
def test_products_on_their_way(body):
    boxes(READY + body, matrix(128, 64), x=np.zeros(128 * len(SUMS), np.float32))


@pytest.mark.parametrize(("body", "error", "text"), [
    (ONCE + STORES, AccessError, "%f0 is read while a product"),
    (ONCE + "mov.f32 %f200, %f0; add.f32 %f201, %f200, %f200;", AccessError, "%f200 is read while a product"),
    (ONCE + WAIT.replace(" 0", " 1") + STORES, AccessError, "%f0 is read while a product"),
    (ONCE.replace("wgmma.commit", "//") + WAIT + STORES, AccessError, "%f0 is read while a product"),
    (ONCE + "mov.f32 %f0, 0f00000000;", AccessError, "%f0 is overwritten while a product"),
    (FROM_REGISTERS + "mov.u32 %r11, 1;", AccessError, "%r11 is overwritten while a product"),
    (ONCE + "st.shared.u32 [%r8], %r1;", AccessError, "overwrites shared memory that .* a product"),
    (product("%rd7", "%rd7", 1, "0, 0"), AccessError, "%f0 is read before it is written"),
    ("st.shared.u32 [%r8], %r1; bar.sync 0;" + ONCE, AccessError, "stored without a fence.proxy.async since"),
    (described("%rd7", 1024 + 128) + ONCE, AccessError, "not in the first row"),
    (described("%rd7", 16384) + ONCE, AccessError, "nobody has written"),
    (f"mov.b64 %rd7, {{%r8, 64}}; {ONCE}", NotImplementedError, "not swizzled"),
    (f"@%p1 bra $on; {ONCE} $on:", DeadlockError, "threads 32-127 wait for their warpgroup"),
    (f"@%p2 bra $on; {ONCE} $on:", RuntimeError, "not all 32 threads"),
    (ONCE.replace("wgmma.fence.sync.aligned;", "") + WAIT, AccessError, "without a wgmma.fence"),
], ids=range(15))  # fmt: skip
def test_faults_of_products(body, error, text):
    with pytest.raises(error, match=text):
        boxes(READY + body, matrix(128, 64), x=np.zeros(128 * len(SUMS), np.float32))

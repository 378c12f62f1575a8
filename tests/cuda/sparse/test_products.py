"""The kernels of products with block-sparse matrices, by device: warpgroups, tensor cores, CUDA cores."""

import sys
from types import SimpleNamespace

import ml_dtypes  # noqa: F401, the name of a dtype
import numpy as np
import pytest

import numbattn as na
from numbattn import sparse
from numbattn.base import backends
from numbattn.cuda import kernel
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.sparse import hopper, products
from numbattn.cuda.sparse.products import SparseBackend, SparseCall
from numbattn.cuda.views import without_memory
from tests.sparse.test_product import assert_right, drawn
from tests.tools.device import AMPERE, GPU, HOPPER, TURING
from tests.tools.launch import mostly_simulated, simulated_only

pytestmark = pytest.mark.usefixtures("world")


def check(rng, device, dtype, block_size, *, rows=70, shape=(2, 3), multiprocessors=4, share=0.4):
    """All three products of a call."""
    x, w, dy, pattern = drawn(rng, dtype, shape, block_size, lead=(rows,), share=share)
    gpu = GPU(device._replace(multiprocessors=multiprocessors))
    by = SparseBackend(lambda: gpu)
    found = by.forward(x, w, pattern), by.backward_x(dy, w, pattern), by.backward_w(x, dy, pattern)
    assert_right(found, (x, w, dy), pattern)
    assert not gpu.counts.any()


@pytest.mark.parametrize(("device", "dtype", "block_size"), [
    pytest.param(AMPERE, "float16", (16, 32)), pytest.param(AMPERE, "float32", (32, 16)),
    pytest.param(AMPERE, "float64", (16, 32), marks=simulated_only),
    pytest.param(TURING, "float32", (16, 32), marks=simulated_only),
])  # fmt: skip
def test_by_warps(rng, device, dtype, block_size):
    check(rng, device, np.dtype(dtype), block_size)


@mostly_simulated
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_by_warpgroups(rng, block_size):
    check(rng, HOPPER, np.dtype(np.float16), block_size, rows=100, multiprocessors=2, share=0.8)


@simulated_only
def test_stages_in_turn(rng, monkeypatch):
    """Several consumers, and fewer stages than a tile takes."""
    monkeypatch.setattr(SparseCall, "consumers", lambda self, rows, columns, width: 2)
    monkeypatch.setattr(hopper, "stages_of", lambda nbytes, stage: 2)
    for name in ("product", "gradient"):
        monkeypatch.setattr(hopper, name, getattr(hopper, name).__wrapped__)  # not those that are kept
    check(rng, HOPPER, np.dtype(np.float16), (64, 64), rows=170, shape=(4, 2), multiprocessors=1, share=0.8)


def test_more_rows_have_more_consumers():
    by = SparseCall(GPU(HOPPER._replace(multiprocessors=132)))
    assert [by.consumers(rows, 32, 64) for rows in (512, 528, 1056)] == [1, 2, 4]
    assert [by.consumers(rows, 32, 128) for rows in (100, 100_000)] == [1, 3]


def test_parts_keep_all_multiprocessors_busy():
    by = SparseCall(GPU(HOPPER._replace(multiprocessors=132)))
    assert by.parts(256, 59) == 2                               # 118 tiles
    assert by.parts(1, 59) == 1
    assert by.parts(256, 1) == 32
    assert all(-(-steps // by.parts(steps, 7)) * (by.parts(steps, 7) - 1) < steps for steps in range(1, 60))


@simulated_only
@pytest.mark.parametrize(("device", "dtype", "size"), [
    (HOPPER, "float16", 128),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (HOPPER, "float16", 64), (HOPPER, "float64", 128), (AMPERE, "float32", 128), (TURING, "float64", 128))),
])  # fmt: skip
def test_registers(monkeypatch, device, dtype, size):
    """No kernel spills, and none needs more shared memory than there is."""
    found = []

    def assembled(gpu, function, grid, threads, shared_bytes, arguments):
        (step,) = kernel.plan_of(gpu.device, function, grid, threads, shared_bytes, arguments).steps
        found.append(assemble(compile_ptx(step.key.given, step.key.cc, step.key.name), step.key.cc)[1])
        assert shared_bytes <= device.shared
        return SimpleNamespace(launch=lambda *_: None)

    monkeypatch.setattr(products, "loaded", assembled)
    gpu, pattern = GPU(device), sparse.Pattern(na.BlockSparse(np.ones((2, 2), bool), (size, size)))
    monkeypatch.setattr(gpu, "empty", without_memory)
    x, w = (without_memory(shape, np.dtype(dtype)) for shape in ((200_000, 2 * size), (4, size, size)))
    by = SparseBackend(lambda: gpu)
    for call, other in ((by.forward, w), (by.backward_x, w), (by.backward_w, x)):
        call(x, other, pattern)
    assert len(found) == 4
    assert all(report.spills == report.stack == 0 and not report.losses for report in found)


@simulated_only
@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=["mma", "wgmma"])
@pytest.mark.parametrize("blocks", [(2, 3), (0, 3), (2, 0)], ids=str)
def test_no_blocks_launch_nothing(monkeypatch, device, blocks):
    monkeypatch.setitem(backends.SPARSE, "numpy", "simulated")
    monkeypatch.setitem(sys.modules, "simulated", SparseBackend(lambda: GPU(device)))
    pattern = sparse.Pattern(na.BlockSparse(np.zeros(blocks, bool), (64, 64)))
    x, dy = (np.ones((5, features), np.float16) for features in pattern.shape)
    w = pattern.values(np.ones(pattern.shape, np.float16))
    y, backprop = sparse.product_vjp(x, w, pattern)
    dx, dw = backprop(dy)
    assert [a.shape for a in (y, dx, dw)] == [a.shape for a in (dy, x, w)]
    assert not any(a.any() for a in (y, dx, pattern.dense(w)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_rows(rng, dtype):
    """Tiles of four consumers, more of them than multiprocessors."""
    import cupy

    *given, pattern = drawn(rng, np.dtype(dtype), (8, 8), (128, 128), lead=(9001,))
    x, w, dy = map(cupy.asarray, given)
    y, backprop = sparse.product_vjp(x, w, pattern)
    assert_right((y, *backprop(dy)), given, pattern)


FAULTS = {
    "-(-steps // count) + SUMS_IN_CHUNKS": "SUMS_IN_CHUNKS",
    "test_no_blocks_launch_nothing": {
        "sparse/product.py": {" and math.prod(shape)": ""},
    },
    "test_by_warps": {
        "cuda/sparse/any.py": {
            "swapaxes(1, 2) if transposed": "swapaxes(1, 2) if not transposed",
            "// (count * chunk)) * chunk": "// (count * chunk))",
            "            wait_copies()\n": "",
            "            sync_threads()  ": "            pass  ",
            "entries[entry, 1]": "entries[entry, 0]",
            "step // CHUNKS, step % CHUNKS": "step % CHUNKS, step // CHUNKS",
            "range(1, parts)": "range(1, parts - 1)",
        },
    },
    "cuda/sparse/hopper.py": {
        "test_stages_in_turn": {
            "            sync_warpgroup()                                    # nobody": "            pass  # nobody",
            "readers=consumers)\n    TILE_PIPELINE": "readers=1)\n    TILE_PIPELINE",
            "            tma_store_wait()                                    # the": "            pass  # the",
            "            release(W)\n            X, W": "            X, W",
            "            sync_warpgroup()                                    # all": "            pass  # all",
        },
        "test_by_warpgroups": {
            "if steps > 0:": "if True:",
            "        finish(counters, grid_size())\n": "",
            "                        commit(S)  ": "                        pass  ",
            "groups[group, 1 + 2 * member]": "groups[group, 1]",
        },
    },
}

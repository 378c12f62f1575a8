"""Kernels of a user's own: one function on NumPy arrays, compiled for a GPU, and on CuPy arrays."""

import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from numbattn.cuda import kernel as own
from numbattn.cuda.build import GivenSource, Source, build
from numbattn.cuda.kernel import TensorMap, launch, type_of
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.tile import (
    INDEX,
    Pipeline,
    SharedMemory,
    allocate,
    block_index,
    device,
    fence_async_proxy,
    get,
    init_pipelines,
    load,
    put,
    save,
    simt,
    stage,
    sync_threads,
    thread_index,
    tma_load,
    wait,
    wgmma,
)
from tests.tools.device import GPU

EXAMPLES = Path(__file__).parents[2] / "examples"
TILE = simt(8, 16, 32, 4, 1)


class Line(NamedTuple):
    slope: Any
    offset: Any


def line(x, y, about, first):
    m0 = 8 * block_index() + first
    save(y, load(x, TILE, m0) * about.slope + about.offset, m0)


shared = SharedMemory()
PIPELINE, ROWS = Pipeline.within(shared, shared.boxes(64, 64, np.float16, 1), readers=1), wgmma(64)


def turned(x, y):
    """By TMA."""
    init_pipelines(PIPELINE)
    fence_async_proxy()
    sync_threads()
    X = stage(PIPELINE, 0)
    if thread_index() == 0:
        tma_load(X, x, 0, 1, 64 * block_index())
    wait(X)
    save(y, get(X.tile, ROWS), 64 * block_index())


@pytest.fixture(params=["NumPy", "a GPU's PTX", pytest.param("CuPy", marks=pytest.mark.gpu)])
def run(request):
    """launch on NumPy arrays, whatever computes."""

    def on_a_gpu(function, grid, threads, shared_bytes, *arguments):
        import cupy

        moved = [TensorMap(cupy.asarray(x.array), *x[1:]) if isinstance(x, TensorMap)
                 else cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments]  # fmt: skip
        launch(function, grid, threads, shared_bytes, *moved)
        for x, y in zip(arguments, moved):
            if isinstance(x, np.ndarray):
                x[...] = y.get()

    return {"NumPy": launch, "a GPU's PTX": interpreted_by(GPU(DEVICES[9, 0])), "CuPy": on_a_gpu}[request.param]


def interpreted_by(gpu):
    """launch, but its kernels run as a GPU's PTX."""

    def interpreted(function, grid, threads, shared_bytes, *arguments):
        grid = (grid, 1, 1) if isinstance(grid, int) else grid
        own.run(gpu, function, grid, threads, shared_bytes, arguments)

    return interpreted


def test_arrays_numbers_and_tuples(run, rng):
    x = rng.standard_normal((20, 16)).astype(np.float32)
    y = np.full_like(x, np.nan)
    run(line, 2, TILE.threads, 0, x, y, Line(np.float32(2), 1.5), np.int32(8))
    assert np.isnan(y[:8]).all()
    np.testing.assert_allclose(y[8:], 2 * x[8:] + 1.5, rtol=1e-6)


def test_tensor_maps_and_shared_memory(run, rng):
    x = rng.standard_normal((1, 2, 100, 64)).astype(np.float16)
    y = np.full((100, 64), np.nan, np.float16)
    run(turned, (2, 1, 1), 128, shared.nbytes, TensorMap(x, PIPELINE.tile.box), y)
    np.testing.assert_array_equal(y, x[0, 1])


def test_programs_are_those_of_layouts_numbers_and_boxes(rng):
    gpu, x = GPU(DEVICES[8, 0]), rng.standard_normal((16, 32)).astype(np.float32)
    for given, slope in ((x[:, ::2], 2.0), (x[:, 16:], 2.0), (x[:, 16:], 3.0), (x[:, 16:], 3.0)):
        y = np.full((16, 16), np.nan, np.float32)
        own.run(gpu, line, (2, 1, 1), TILE.threads, 0, (given, y, Line(slope, 0.0), np.int32(0)))
        np.testing.assert_allclose(y, slope * given, rtol=1e-6)
    assert len(gpu.programs) == 3


def test_arguments_are_freed_at_once(gc_off):
    """Memory of a CUDA graph that is freed after its capture is memory that the graph has not freed."""
    x = np.zeros((8, 16), np.float32)
    kept = weakref.ref(x)
    own.Described.of((x, (x, 1.0), TensorMap(x, (8, 16))))
    del x
    assert kept() is None


@pytest.fixture
def gc_off():
    gc.disable()
    yield
    gc.enable()


def test_a_binary_is_kept_on_disk_by_its_ptx(cache_dir, monkeypatch):
    x = np.zeros((8, 16), np.float32)
    source = Source(line, own.types.void(*map(type_of, (x, x, Line(np.float32(2), 1.5), np.int32(0)))), TILE.threads)
    first = build(GivenSource(source, (8, 0)))
    monkeypatch.setattr("numbattn.cuda.build.assemble", None)
    assert build(GivenSource(source, (8, 0))) == first
    assert len([*cache_dir.iterdir()]) == 1


def test_types():
    import ml_dtypes

    assert type_of(np.int32(1)) == INDEX
    assert str(type_of(np.zeros((2, 2), ml_dtypes.bfloat16)).dtype) == "uint16"
    assert str(type_of(2.0)) == "float64"


X = np.zeros((8, 16), np.float32)
WRONG = {
    "no array": (line, 1, 32, 0, 1.0), "no block": (line, 0, 32, 0, X), "threads": (line, 1, 2000, 0, X),
    "a list": (line, 1, 32, 0, [1]), "four axes": (line, (1, 1, 1, 1), 32, 0, X),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case):
    with pytest.raises((TypeError, ValueError), match="got"):
        launch(*WRONG[case])


PLACES = SharedMemory()
PLACE, WIDE = PLACES.tile(8, 16, np.float32), simt(8, 16, 64, 8, 1)
BOXES = Pipeline.within(PLACES, PLACES.boxes(8, 64, np.float16, stages=2), readers=1)


@device
def doubled(x):
    return 2 * load(x, WIDE, 0)


def in_wide_tiles(x):
    save(x, doubled(x), 0)


def in_place(x):
    put(allocate(PLACE), load(x, TILE, 0))


def in_boxes(x):
    init_pipelines(BOXES)


@pytest.mark.parametrize(("kernel", "threads", "nbytes", "words"), [
    (in_wide_tiles, 32, 0, "threads: got 32, expected 64 or more, to which the layout fma 8x16 in 1x2 registers deals"),
    (in_place, 32, 639, "shared_bytes: got 639, expected 640 or more, where float32 8x16 at 0 ends"),
    (in_boxes, 32, PLACES.nbytes - 8, f"shared_bytes: got .*, expected {PLACES.nbytes} or more, where pipeline of 2"),
])  # fmt: skip
def test_a_block_that_is_too_small(kernel, threads, nbytes, words):
    with pytest.raises(ValueError, match=words):
        launch(kernel, 1, threads, nbytes, X)


def test_a_block_that_is_large_enough():
    x = np.ones((8, 16), np.float32)
    launch(in_wide_tiles, 1, 64, 0, x)
    launch(in_place, 1, 32, 640, x)
    assert (x == 2).all()


@pytest.mark.parametrize("x", [np.zeros((1, 1, 8, 12), np.float16), np.zeros((1, 1, 8, 16), np.float16)[..., ::2]])
def test_what_tma_cannot_move(x):
    with pytest.raises(ValueError, match="TensorMap: got an array of shape"):
        own.run(GPU(DEVICES[9, 0]), turned, (1, 1, 1), 128, shared.nbytes, (TensorMap(x, (1, 1, 64, 64)), X))


# ----------------------------------------------------------------------------------------------------------- examples
@pytest.fixture
def example(request, monkeypatch):
    """An example's module, whose launches run as a GPU's PTX."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / request.param)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.xp, module.gpu = np, GPU(DEVICES[9, 0])
    monkeypatch.setattr(module, "launch", interpreted_by(module.gpu))
    return module


@pytest.mark.parametrize("example", ["03_own_attention.py"], indirect=True)
def test_an_attention_of_your_own(example, rng):
    q, k, v = (rng.standard_normal((1, 2, seqlen, 64), dtype=np.float32) for seqlen in (70, 50, 50))
    np.testing.assert_allclose(example.softcapped_attention(10 * q, k, v), example.formula(10 * q, k, v), atol=1e-5)


@pytest.mark.parametrize("example", ["09_matrix_product.py"], indirect=True)
def test_a_matrix_product(example, rng):
    a, b = (rng.standard_normal((rows, 192)).astype(np.float16) for rows in (100, 304))
    wanted = a.astype(np.float64) @ b.T.astype(np.float64)
    np.testing.assert_allclose(example.product(a, b, 2), wanted, atol=2e-3 * abs(wanted).max())
    (program,) = example.gpu.programs.values()
    report = build(program.plan.steps[0].key).report
    assert not report.spills
    assert not report.losses


FAULTS = {
    "return kind, *box, x.shape, x.strides, x.dtype": "return kind, *box, x.shape, x.dtype",
    'At(f"argument {i}", _view': 'At("argument 0", _view',
    "INDEX if isinstance(x, np.int32) else": "",
    "if isinstance(x, TensorMap) and not fits_tensor_map(": "if False and not fits_tensor_map(",
    "x.holders > threads": "False",
    "x.end > shared_bytes": "False",
    "yield from captured(x, known)": "pass",
}

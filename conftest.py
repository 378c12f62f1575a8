import gc
import os
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

# what needs the packages of the extras cu12 and cu13 is collected where they are
HAS_CUDA = find_spec("numba_cuda") and find_spec("cupy")
collect_ignore_glob = [] if HAS_CUDA else ["numbattn/cuda/*", "tests/cuda/*", "tests/tools/*"]
# and each module of numbattn.interop where its framework is
collect_ignore_glob += [f"numbattn/interop/{x}.py" for x in ("torch", "autograd", "thinc") if not find_spec(x)]
collect_ignore_glob += ["numbattn/interop/jax/*"]  # by a process of its own: see tests/interop/test_jax.py

SHARED_BYTES = 1 << 14  # of the kernels of examples


def pytest_configure(config):
    """With a worker for each core, more threads for NumPy's products would stand in each other's way, here and in the
    processes that tests start."""
    if hasattr(config, "workerinput"):
        threadpool_limits(1, "blas")
        os.environ["OPENBLAS_NUM_THREADS"] = "1"


def pytest_collection_finish():
    """What is imported stays, and most of what Numba types: to look through it for garbage, again and again, takes a
    tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def compare_flags_at_once(module):
    """Numba looks up functions by its flags, too, and compares them option by option: 6 % of a run that compiles. Flags
    that are set alike are equal."""
    config = import_module(module).TargetConfig
    by_option = config.__eq__
    config.__eq__ = lambda one, other: one._values == getattr(other, "_values", None) or by_option(one, other)


if HAS_CUDA:
    import_module("numbattn.cuda.compiler")  # before anything of numba.cuda
for _module in ["numba.core.targetconfig", *["numba.cuda.core.targetconfig"] * bool(HAS_CUDA)]:
    compare_flags_at_once(_module)


@pytest.fixture(autouse=True)
def names_of_examples(request, doctest_namespace):
    """What the examples of the tile language say without making it: see numbattn/cuda/tile/__init__.py."""
    if not request.node.name.startswith("numbattn.cuda.tile"):
        return
    from numbattn.cuda import tile
    from numbattn.cuda.tile.global_memory import places

    TILE = tile.simt(2, 4, 32, 4, 1)
    ARRAY = np.arange(8, dtype=np.float32).reshape(2, 4)
    shared = tile.SharedMemory()
    PLACE, BOXES = shared.tile(2, 4, np.float32), shared.boxes(8, 64, np.float16)
    RING = tile.Pipeline.within(shared, shared.tile(1, 4, np.int32, stages=2), readers=1)

    def run(kernel, *arrays, threads=32):
        tile.simulate(kernel, (1, 1, 1), threads, SHARED_BYTES, *arrays)
        return arrays[-1]

    def show(function, layout=TILE):
        tiles = []

        def kernel():
            found = function(tile.load(ARRAY, layout, 0))
            tiles.append((found, places(found.layout)))

        tile.simulate(kernel, (1, 1, 1), 32, SHARED_BYTES)
        first = tiles[0][0]
        out = np.empty(first.layout.shape, first.dtype)
        for found, at in tiles:
            out[at] = found.registers
        return out

    doctest_namespace.update({name: getattr(tile, name) for name in tile.__all__})
    doctest_namespace.update(np=np, TILE=TILE, ARRAY=ARRAY, PLACE=PLACE, BOXES=BOXES, RING=RING, run=run, show=show)

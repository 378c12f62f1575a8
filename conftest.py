import gc
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
from llvmlite.binding import ffi
from threadpoolctl import threadpool_limits

FRAMEWORKS = "torch", "autograd", "thinc", "transformers"

# what needs the packages of the extras cu12 and cu13 is collected where they are
HAS_CUDA = find_spec("numba_cuda") and find_spec("cupy")
collect_ignore_glob = [] if HAS_CUDA else ["numbattn/cuda/*", "tests/cuda/*", "tests/tools/*"]
# and each module of numbattn.interop where its framework is
collect_ignore_glob += [f"numbattn/interop/{x}*" for x in FRAMEWORKS if not find_spec(x)]
# what imports JAX runs in a process of its own: see tests/interop/test_jax.py
collect_ignore_glob += ["numbattn/interop/jax/*", "tests/interop/in_*.py"]
# and what adapts packages that may be missing holds no tests
collect_ignore_glob += ["tests/conformance/onnx_attention.py", "tests/conformance/plugins/*", "examples/site/*"]

SHARED_BYTES = 1 << 14  # of the kernels of examples

# what is imported stays, and most of what Numba types: to look through it for garbage, again and again, takes a tenth
# of the time, and a fifth of that of imports
gc.set_threshold(100_000, 20, 100)


def pytest_configure(config):
    """With a worker for each core, more threads for NumPy's products would stand in each other's way, here and in the
    processes that tests start."""
    if hasattr(config, "workerinput"):
        threadpool_limits(1, "blas")
        os.environ["OPENBLAS_NUM_THREADS"] = "1"


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """pytest looks through all there is five times more, for objects whose end raises an error: once does."""
    gc.collect()
    gc.freeze()


def keep_no_records(package):
    """For each pass over a function Numba writes down its flags and types, for profiles that nobody asks for here, and
    it compares flags option by option wherever it looks up a function, and for each finds again what a list of passes
    depends on: together an eighth of a run that compiles."""
    config, machinery = (import_module(f"{package}.{name}") for name in ("targetconfig", "compiler_machinery"))
    flags, by_option = config.TargetConfig, config.TargetConfig.__eq__
    flags.__eq__ = lambda one, other: one._values == getattr(other, "_values", None) or by_option(one, other)
    flags.values = lambda self: defaults(type(self)) | self._values
    machinery.str = Unsaid
    of_passes, analysis = {}, machinery.PassManager.dependency_analysis

    def dependency_analysis(self):
        passes = tuple([kind for kind, _ in self.passes])
        if passes not in of_passes:
            of_passes[passes] = analysis(self)
        return of_passes[passes]

    machinery.PassManager.dependency_analysis = dependency_analysis


class Text(str):
    """A module of LLVM in words, which take a tenth of the memory, once nothing changes in it any more."""

    functions = ()


def texts(library):
    """The modules of a library and of those that it calls, each once."""
    every = dict.fromkeys(libraries(library))
    for each in every:
        module, each._module = each._module, Text(each._module)
        for function in module.functions:  # whose parts know each other, and would wait for the garbage collector
            for block in function.blocks:
                block.instructions.clear()
            function.blocks.clear()
    return [each._module for each in every]


def libraries(library):
    yield library
    for called in library._linking_libraries:
        yield from libraries(called)


class Unsaid(str):
    """The text of nothing."""

    def __new__(cls, _):
        return super().__new__(cls)


@cache
def defaults(flags):
    return {name: option.default for name, option in flags.options.items()}


if HAS_CUDA:
    import_module("numbattn.cuda.compiler")  # before anything of numba.cuda
    # to verify what is compiled next, which finds the same, takes a tenth of the time of that
    import_module("numba.cuda.cudadrv.nvvm").CompilationUnit.verify = lambda unit: None
    import_module("numba.cuda.codegen").CUDACodeLibrary.llvm_strs = property(texts)
    import_module("numba.cuda.core.annotations.type_annotations").TypeAnnotation = lambda **about: None
for _package in ["numba.core", *["numba.cuda.core"] * bool(HAS_CUDA)]:
    keep_no_records(_package)
import_module("numba.core.base")  # which has each call of LLVM recorded
ffi.lib._lock._cblist.clear()


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

    def run(kernel, *arrays, threads=32, cluster=1):
        tile.simulate(kernel, (cluster, 1, 1), threads, SHARED_BYTES, *arrays, cluster=cluster)
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

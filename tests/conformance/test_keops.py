"""KeOps' own tests of kernel products, on numbattn.points; those of torch tensors where torch is installed, too.

The other files of its suite are of formulas that are no kernels of a distance, of torch.func, and of complex numbers.
"""

import inspect
import runpy
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from .suites import Counts

FILES = {
    "test_contiguous_numpy": 1, "test_chunks": 1, "test_chunks_ranges": 1, "test_finalchunks": 1,
    "test_finalchunks_ranges": 1, "test_gpu_cpu": 1, "test_lazytensor_gaussian_batch": 2,
    "test_lazytensor_gaussian_cpu": 3, "test_lazytensor_gaussian_fromhost": 1, "test_lazytensor_gaussian_inplace": 1,
    "test_transpose": 1,
}  # fmt: skip  # and how many tests are in each, without those that need a GPU


@pytest.mark.parametrize("name", FILES)
def test_kernel_products(name, monkeypatch, count):
    if not (package := find_spec("pykeops")):
        pytest.skip("pykeops is not installed")
    if name != "test_contiguous_numpy":
        pytest.importorskip("torch")
    from .keops import LazyTensor

    for module in ("pykeops", "pykeops.numpy", "pykeops.torch"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        sys.modules[module].LazyTensor = LazyTensor
    tests = runpy.run_path(str(Path(package.origin).parent / "test" / f"{name}.py"))
    cases = [case for case in tests.values() if inspect.isclass(case) and case.__module__ == "<run_path>"]
    methods = [getattr(case(), test) for case in cases for test in vars(case) if test.startswith("test_")]
    functions = [test for name, test in tests.items() if name.startswith("test_")]
    here = [test for test in functions + methods if not getattr(test, "pytestmark", [])]
    assert len(here) == FILES[name]
    for test in here:
        test()
    count("KeOps", f"pykeops {version('pykeops')}", Counts(len(here), 0))

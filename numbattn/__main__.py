"""python -m numbattn: what this machine can run, checked against the reference."""

import argparse
import os
import platform
import sys
import textwrap
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import numpy as np

import numbattn as na
from numbattn import cache, reference
from numbattn.problem import DTYPES

PACKAGES = "numpy", "numba", "ml_dtypes", "numba-cuda", "cuda-core", "cupy-cuda12x", "cupy-cuda13x"
NEEDED = {"cupy": "CuPy", "numba_cuda": "numba-cuda", "cuda": "cuda-core"}  # for a GPU: modules, packages
HEAD_DIMS = 40, 24  # of the problem that is checked
CORES = {"mma": "tensor cores", "fma": "ordinary cores"}
TOLERANCES = dict(zip(DTYPES, (4e-3, 3e-2, 2e-5, 1e-12)))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m numbattn", description=__doc__.partition(": ")[2])
    parser.add_argument("--clear-cache", action="store_true", help="remove the compiled code that is kept on disk")
    if parser.parse_args(arguments).clear_cache:
        _say(f"removed: {_kept()}")
        cache.clear()
        return 0
    return check()


def check():
    """0 if all results of this machine are right."""
    _say(f"numbattn {na.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        _say(f"  {name:13}{_version(name)}")
    _say(f"CPU: {_cpu()}, {os.cpu_count()} cores")
    why_not = _why_no_gpu()
    for line in [f"none: {why_not}"] if why_not else _gpus():
        _say(f"GPU: {line}")
    print("\ntier   dtype     pass      error    allowed")
    tiers, wrong = {"cpu": np} if why_not else {"cpu": np, "cuda": import_module("cupy")}, 0
    for tier, xp in tiers.items():
        for dtype, allowed in TOLERANCES.items():
            for name, error in _errors(xp, dtype).items():
                right = error <= allowed  # False for NaN
                wrong += not right
                by = f"  {_unit(name, dtype)}" if tier == "cuda" else ""
                print(f"{tier:6} {dtype.name:9} {name:8} {error:7.0e} {allowed:10.0e}{by}{'' if right else '  WRONG'}")
    if why_not:
        print("cuda   not checked: there is no GPU to check")
    print()
    _say(f"cache: {_kept()}")
    print(f"\n{wrong} results are wrong" if wrong else "\nall results agree with the reference in float64")
    return 1 if wrong else 0


def _say(text):
    print(textwrap.fill(text, 80, subsequent_indent="    "))


def _errors(xp, dtype):
    """The largest error of each pass, relative to the largest value, on a small problem with all a kernel can do."""
    (d, e), rng = HEAD_DIMS, np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype)
                   for shape in ((2, 4, 300, d), (2, 2, 270, d), (2, 2, 270, e), (2, 4, 300, e)))
    options = {
        "mask": na.Window(200, 60) & na.Lengths(keys=np.array([[270], [150]])) & (rng.random((1, 4, 300, 270)) < 0.9),
        "dropout": na.Dropout(0.1, seed=1),
    }
    o, saved = na.attention_forward(*map(xp.asarray, (q, k, v)), **options)
    grads = na.attention_backward(xp.asarray(do), saved)
    o_exact, _ = reference.attention_forward(q, k, v, **options)
    exact = reference.attention_backward(do, q, k, v, **options)
    return {"forward": _error(o, o_exact), "backward": max(map(_error, grads, exact))}


def _error(got, exact):
    got = got if isinstance(got, np.ndarray) else got.get()
    return np.abs(got.astype(np.float64) - exact).max() / np.abs(exact).max()


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _why_no_gpu():
    """Why CuPy arrays cannot be computed with here; None where they can."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        return (f"{' and '.join(missing)} not installed; pip install 'numbattn[cu13]', "
                "or 'numbattn[cu12]' for a driver of CUDA 12")
    cuda = import_module("cupy").cuda.runtime
    try:
        count = cuda.getDeviceCount()
    except cuda.CUDARuntimeError as error:  # no driver, or one that is too old, or no device
        return str(error)
    return None if count else "CuPy finds no device"


def _gpus():
    cuda = import_module("cupy").cuda.runtime
    for i in range(cuda.getDeviceCount()):
        about = cuda.getDeviceProperties(i)
        yield (f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}, "
               f"{about['totalGlobalMem'] / 2**30:.0f} GiB, "
               f"{about['sharedMemPerBlockOptin'] >> 10} KB of shared memory for a block")


def _unit(name, dtype):
    """Which cores compute a pass of `_errors` on the current GPU."""
    from numbattn.cuda.launch import current_device
    from numbattn.cuda.plan import PASSES, rounded, tiles_of

    device, head_dims = current_device(), [rounded("head_dim", d) for d in HEAD_DIMS]
    factories = [factory for factory in PASSES if factory.startswith(name)]
    units = {tiles_of(factory, device, dtype.name, *head_dims, crowded=True).unit for factory in factories}
    return " and ".join(CORES[unit] for unit in sorted(units, reverse=True))


def _kept():
    """Where compiled code is kept, and how much."""
    kept = (f"{len(sizes)} for the {kind}, {sum(sizes) / 1e6:.1f} MB"
            for kind, sizes in zip(("CPU", "GPU"), cache.sizes().values()))  # fmt: skip
    return f"{cache.cache_dir()}, kernels: {'; '.join(kept)}"


if __name__ == "__main__":
    sys.exit(main())

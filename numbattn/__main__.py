"""python -m numbattn: what this machine can run, checked against the reference."""

import importlib
import os
import platform
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.problem import DTYPES

PACKAGES = "numpy", "numba", "scipy", "ml_dtypes", "numba-cuda", "cuda-core", "cupy-cuda12x", "cupy-cuda13x"
TOLERANCES = dict(zip(DTYPES, (4e-3, 3e-2, 2e-5, 1e-12)))


def main():
    _say(f"numbattn {na.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        _say(f"  {name:13}{_version(name)}")
    _say(f"CPU: {_cpu()}, {os.cpu_count()} cores")
    for line in _gpus():
        _say(f"GPU: {line}")
    print("\ntier   dtype     pass      error    allowed")
    wrong = 0
    for dtype, allowed in TOLERANCES.items():
        for name, error in _errors(dtype).items():
            right = error <= allowed  # False for NaN
            wrong += not right
            print(f"cpu    {dtype.name:9} {name:8} {error:7.0e} {allowed:10.0e}{'' if right else '  WRONG'}")
    print("cuda   not in this version: CuPy arrays are refused")
    print(f"\n{wrong} results are wrong" if wrong else "\nall results agree with the reference in float64")
    return 1 if wrong else 0


def _say(text):
    print(textwrap.fill(text, 80, subsequent_indent="    "))


def _errors(dtype):
    """The largest error of each pass, relative to the largest value, on a small problem with all a kernel can do."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype)
                   for shape in ((2, 4, 300, 40), (2, 2, 270, 40), (2, 2, 270, 24), (2, 4, 300, 24)))
    options = {
        "mask": na.Window(200, 60) & na.Lengths(keys=np.array([[270], [150]])) & (rng.random((1, 4, 300, 270)) < 0.9),
        "dropout": na.Dropout(0.1, seed=1),
    }
    o, saved = na.attention_forward(q, k, v, **options)
    grads = na.attention_backward(do, saved)
    o_exact, _ = reference.attention_forward(q, k, v, **options)
    exact = reference.attention_backward(do, q, k, v, **options)
    return {"forward": _error(o, o_exact), "backward": max(map(_error, grads, exact))}


def _error(got, exact):
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


def _gpus():
    try:
        cuda = importlib.import_module("cupy").cuda.runtime
        count = cuda.getDeviceCount()
    except ImportError:
        return ["none that CuPy could use: CuPy is not installed"]
    except Exception as error:  # CuPy's own error class, from a driver that is missing or too old
        return [f"none: {error}"]
    found = []
    for i in range(count):
        about = cuda.getDeviceProperties(i)
        found.append(f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}, "
                     f"{about['totalGlobalMem'] / 2**30:.0f} GiB")
    return found


if __name__ == "__main__":
    sys.exit(main())

import signal
import subprocess
import sys

import numpy as np

from .layouts import guarded, laid


def test_who_reads_beyond_the_end_crashes():
    assert guarded(5)[-1] == 255
    code = "import ctypes; from tests.tools.layouts import guarded; x = guarded(5); ctypes.string_at(x.ctypes.data, 6)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGSEGV


def test_values_stay(rng):
    for _ in range(300):
        shape = rng.integers(0, 4, rng.integers(4))
        own = [1 if chance < 0.3 else n for n, chance in zip(shape, rng.random(4))]
        x = np.broadcast_to(rng.integers(-9, 9, own), shape).astype(np.float32)
        for options in ({}, {"dtypes": (np.float16, np.uint8, np.int64)}, {"is_written": True}):
            y = laid(rng, x, **options)
            np.testing.assert_array_equal(y.astype(x.dtype), x)
            assert y.flags.writeable or not options.get("is_written")

"""Two meanings of one function, in one process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numbattn.cuda.tile import block_index, device, exp2, full, load, save, simt, simulate
from tests.tools.assembler import compile_ptx
from tests.tools.launch import simulated_only
from tests.tools.ptx import interpret

ROOT = Path(__file__).parents[3]
TILE = simt(8, 16, 32, 4, 1)


@pytest.mark.parametrize("module", ["numbattn", "numbattn.cuda"])
def test_nothing_is_imported_before_a_kernel_is_wanted(module, world):
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ, capture_output=True, check=True)
    early = done.stdout.decode().split()
    assert not [name for name in early if name.startswith(("numba.cuda", "numbattn.cuda.tile"))]


@device
def halved_power(x):
    return exp2(x) * 0.5


def kernel(x, y):
    m0 = block_index() * 8
    save(y, halved_power(load(x, TILE, m0)) + full(TILE, np.float32(1)), m0)


def test_one_function_is_simulated_and_compiled(rng, world):
    x = rng.standard_normal((16, 16), dtype=np.float32)
    simulated, compiled = np.full_like(x, np.nan), np.full_like(x, np.nan)
    simulate(kernel, (2, 1, 1), TILE.threads, 0, x, simulated)
    interpret(compile_ptx(kernel, (x, compiled), TILE.threads), (2, 1, 1), TILE.threads, 0, x, compiled)
    np.testing.assert_allclose(simulated, np.exp2(x) / 2 + 1, rtol=1e-6)
    np.testing.assert_allclose(compiled, simulated, rtol=1e-6)


def times(factor):
    @device
    def scaled(x):
        return x * factor

    return scaled


@simulated_only
@pytest.mark.parametrize(("factor", "others"), [
    (2, [2.0, np.float32(2), True, 3]), (0.0, [-0.0, 0]), (np.float32(0), [np.float32(-0.0), 0.0]),
    ((1, times(2)), [(1.0, times(2)), (1, times(2.0)), (True, times(2))]),
])  # fmt: skip
def test_functions_of_equal_values_are_one(factor, others):
    """Those of values that are compiled into other code are not, equal though they be."""
    assert times(factor) is times(factor)
    assert len({times(x) for x in (factor, *others)}) == 1 + len(others)


@simulated_only
@pytest.mark.parametrize("source", [
    "def f(x): return x * FACTOR", "def f(x, *, n=FACTOR): return x * n", "def f(x): return (lambda: x * FACTOR)()",
])  # fmt: skip
def test_a_definition_that_is_repeated_takes_what_it_reads_now(source):
    """As a cell of a notebook that runs again."""
    for factor in (2, 3):
        exec(source, {"FACTOR": factor, "__name__": "user"}, found := {})
        assert device(found["f"])(5) == 5 * factor


@simulated_only
def test_functions_of_what_may_change_are_not_shared():
    def counted(calls):
        @device
        def count(x):
            calls.append(x)

        return count

    def called_before(change):
        @device
        def early(x):
            return late(x) + 1

        def late(x):
            return x + change

        return early

    assert counted([]) is not counted([])
    assert [called_before(x)(5) for x in (1, 2)] == [7, 8]


FAULTS = {
    "test_functions_of_equal_values_are_one": {
        "type(x), tuple(map(_typed, x))": "type(x), x",
        "type(x), repr(x)": "repr(x)",
        "isinstance(x, (float, np.floating))": "isinstance(x, float)",
    },
    "test_a_definition_that_is_repeated_takes_what_it_reads_now": {
        "_typed(cells), _typed(read)": "_typed(cells)",
        "chain(code.co_names, chain.from_iterable(within))": "code.co_names",
        "tuple((function.__kwdefaults__ or {}).items())": "()",
    },
    "test_functions_of_what_may_change_are_not_shared": {
        "except (TypeError, ValueError)": "except ValueError",
    },
}

import numba
import numpy as np
from numba.core import codegen

import numbattn as na
from numbattn.functions.compiled.linked import linked
from numbattn.functions.compiled.strict import compiled


@linked
def doubled(x):
    for i in range(x.size):
        x[i] += one_of(x[i])


@linked
def one_of(x):
    return x


def test_what_is_linked_is_optimised_once_and_has_no_address(monkeypatch):
    optimised, optimise = [], codegen.CPUCodeLibrary._optimize_final_module
    monkeypatch.setattr(
        codegen.CPUCodeLibrary, "_optimize_final_module", lambda self: optimised.append(self.name) or optimise(self)
    )
    function, x = numba.njit(lambda x: doubled(x)), np.arange(3.0)
    function(x)
    assert x.tolist() == [0, 2, 4]
    (compiled,) = function.overloads.values()
    assert any("lambda" in name for name in optimised)
    assert not [name for name in optimised if "doubled" in name or "one_of" in name]
    own = [x.name for x in compiled.library._final_module.functions if "doubled" in x.name]
    assert all(compiled.library.get_pointer_to_function(name) == 0 for name in own)


def even(n):
    if n == 0:
        return 1.0
    return odd(n - 1)


def odd(n):
    if n == 0:
        return 0.0
    return even(n - 1)


def test_functions_that_call_each_other_have_addresses():
    """By which they do."""
    q = np.zeros((1, 5, 4))
    weights = na.attention_weights(q, q, score=na.Score(lambda s, batch, head, i, j: s + even(j)))[0, 0]
    want = np.exp((np.arange(5) % 2 == 0).astype(float))
    np.testing.assert_allclose(weights, want / want.sum())


def test_what_python_calls_has_an_entry():
    """Beside what is linked, which has none."""
    half = compiled(lambda x: x / 2)
    twice = compiled(lambda x: half(x) + half(x))
    assert (twice(3), half(3), twice(5.0)) == (3, 1.5, 5)


FAULTS = {
    "functions/compiled/derivative.py": {"has_address=function.calls_itself": "has_address=False"},
    "    def _optimize_final_module(self):\n        pass\n\n": "",
    "state.flags.no_compile = self.library(": "_ = self.library(",
}

import numba
import numpy as np
from numba.core import codegen

from numbattn.cpu.linked import linked


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


FAULTS = {
    "    def _optimize_final_module(self):\n        pass\n\n": "",
    "state.flags.no_compile = Library(": "_ = Library(",
}

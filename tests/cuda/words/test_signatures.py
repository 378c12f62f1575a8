"""Signatures follow from the arguments of a Spec: as many, of their types, numbers by their names."""

import numpy as np
import pytest

from numbattn.cuda.compiler import types
from numbattn.cuda.kernels import ROUTES
from numbattn.cuda.kernels.shared.visibility import MASK
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.tile import INDEX
from numbattn.cuda.words.arguments import COUNTERS, O_BEFORE, Matrix, RaggedMatrix, Statistic, TmaMatrix
from numbattn.cuda.words.signatures import array_type, several, signature_of
from tests.cuda.works import work

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
MATRIX, FLOATS = array_type(HALF, 4), array_type(FLOAT, 4)
WORKS = {
    "ampere": work(device=DEVICES[8, 0]), "ampere, bit for bit": work(device=DEVICES[8, 0], deterministic=True),
    "float32": work("float32", device=DEVICES[8, 0]), "turing": work(device=DEVICES[7, 5]),
    "hopper": work(), "hopper, goes on": work(resumes=True), "wide": work("bfloat16", 256, 256),
    "hopper, bit for bit": work(deterministic=True), "one query": work(seqlen_q=1),
    "one query, float32": work("float32", seqlen_q=1, device=DEVICES[8, 0]),
    "all keys": work("float32", seqlen_q=100, seqlen_k=100),
    "small": work("float32", seqlen_q=16, seqlen_k=16)._replace(whole=True),
    "small, with delta": work("float32", seqlen_q=16, seqlen_k=16),
}  # fmt: skip


def types_of(*arguments, **about):
    """Of a kernel that has a parameter for each, numbers by their names."""
    names = [x if isinstance(x, str) else f"x{i}" for i, x in enumerate(arguments)]
    kernel = eval(f"lambda {', '.join(names)}: None")
    return signature_of(kernel, arguments, HALF, np.float32, **about).args


def test_types():
    assert types_of(Matrix("q"), Statistic("lse"), "group_size", "scale_log2", "seqlen_q", COUNTERS) == (
        MATRIX, array_type(FLOAT, 3), INDEX, types.float32, INDEX, array_type(np.uint32, 1),
    )  # fmt: skip
    assert signature_of(lambda scale: None, ["scale"], np.float64, np.float64).args == (types.float64,)
    assert signature_of(lambda mask: None, [MASK], mask=("lo",)).args[0][4] == several(array_type(np.int32, 2), 1)


def test_what_a_result_is_rounded_to():
    """A tensor map is of the dtype of tiles in shared memory: a result of another one is an array."""
    given = Matrix("k"), Matrix("dk"), TmaMatrix("q"), TmaMatrix("o")
    assert types_of(*given) == (MATRIX, MATRIX, types.uint64, types.uint64)
    wide = {"dk": "float32", "o": "float32"}
    assert types_of(*given, dtypes=wide) == (MATRIX, FLOATS, types.uint64, FLOATS)


def test_what_there_may_be_is_a_tuple():
    optional = O_BEFORE, RaggedMatrix("o")
    assert types_of(*optional, resumes=False, is_packed=True) == (types.Tuple(()), several(MATRIX, 1))
    assert types_of(*optional, resumes=True, is_packed=False) == (several(FLOATS, 1), types.Tuple(()))
    assert types_of((Matrix("q"), Matrix("o")), ()) == (several(MATRIX, 2), types.Tuple(()))


@pytest.mark.parametrize("arguments", [
    [Matrix("q")], [Matrix("q"), "scale", "group_size"], [Matrix("q"), "scale_log2"],
], ids=["too few", "too many", "another name"])  # fmt: skip
def test_a_kernel_has_a_parameter_for_each(arguments):
    with pytest.raises(TypeError, match=r"got parameters mQ, scale, expected one for each of Matrix\(name='q'"):
        signature_of(lambda mQ, scale: None, arguments, HALF, np.float32)


@pytest.mark.parametrize("name", WORKS)
def test_specs_and_their_factories_agree(name):
    """Some Specs differ in what they give for a parameter."""
    found = WORKS[name]
    for routes in (ROUTES["forward"], ROUTES["backward"]):
        for spec in next(route.specs for route in routes if route.takes(found)):
            source = spec.factory(**spec.parameters(found, spec.fitting(found)))
            assert len(source.signature.args) == len(spec.arguments), spec.name


FAULTS = {
    "len(names) != len(numbers) or ": "",
    "number not in (False, name)": "number is None",
    "if NUMBERS.get(argument) is float else INDEX": "",
    "types.UniTuple(kind, int(count)) if count else types.Tuple(())": "types.UniTuple(kind, 1)",
    "self.dtypes.get(name, self.dtype)": "self.dtype",
}

"""ONNX' own test cases of its operator Attention: one node, inputs and outputs.

The fourth output, qk_matmul_output, is a matrix of scores to look at, which numbattn does not keep: it is left out.
"""

import inspect
import warnings

import numpy as np
import pytest

from .suites import Counts

onnx = pytest.importorskip("onnx")
TOLERANCES = {"float16": (2e-3, 1e-3), "bfloat16": (1.6e-2, 8e-3)}  # of results that are rounded once


@pytest.fixture(scope="module")
def cases():
    """All of opset 23 to 25, of one node each."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # cases of other operators are made, too
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return [case for case in found if [node.op_type for node in case.model.graph.node] == ["Attention"]]


def test_attention(cases, xp, count):
    wrong = {case.name: why for case in cases if (why := differences(case, xp))}
    found = Counts(len(cases) - len(wrong), len(wrong))
    count("ONNX", f"onnx {onnx.__version__}", found, "CPU" if xp is np else "GPU")
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong}"
    assert len(cases) >= 93


def differences(case, xp):
    """What is wrong with the outputs of a case, in words."""
    from .onnx_attention import attention

    def arrays(values):
        for x in values:
            yield xp.asarray(onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x)

    (node,), ((given, expected),) = case.model.graph.node, case.data_sets
    expected = dict(zip(filter(None, node.output), arrays(expected)))
    for name, got in zip(node.output, attention(node, arrays(given))):
        if name:
            want = expected[name]
            if (got.dtype, got.shape) != (want.dtype, want.shape):
                return f"{name}: got {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
            rtol, atol = np.maximum((case.rtol, case.atol), TOLERANCES.get(str(got.dtype), (0, 0)))
            got, want = (x.astype(np.float64) for x in (got, want))
            if not xp.allclose(got, want, rtol, atol):
                return f"{name}: wrong by {abs(got - want).max()}"
    return ""


class AsCupy(np.ndarray):
    """An array whose functions take the arguments that CuPy's take."""

    def __array_function__(self, function, types, arguments, options):
        inspect.signature(getattr(pytest.importorskip("cupy"), function.__name__)).bind(*arguments, **options)
        plain = [x.view(np.ndarray) if isinstance(x, AsCupy) else x for x in arguments]
        return function(*plain, **options).view(AsCupy)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_masks_of_cupy(dtype):
    from .onnx_attention import taken_apart

    visible, bias = taken_apart(np.ones((3, 4), dtype).view(AsCupy), (3, 6))
    assert visible.tolist() == [[True] * 4 + [False] * 2] * 3
    assert (bias is None) == (dtype == "bool")

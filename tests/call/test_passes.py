"""The passes as values: how their kernels are found, and what array operations add. All else: test_api, test_jets."""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

import numbattn as na
from numbattn.call.passes import ARRAYS, PASSES, QKV, Pass, run_pass
from numbattn.call.problem import describe
from tests.tools.device import AMPERE, on
from tests.tools.launch import world_of


def test_a_pass_is_found_by_its_name_on_cpus(rng):
    """In the file of its name, which need not be known anywhere else."""

    def doubled(problem, inputs, given, tangents):
        return {"o": 2 * inputs.v + given["o"]}

    pass_, x = Pass("doubled", takes=(*QKV, "o"), gives=("o",)), rng.standard_normal((4, 3))
    with patch.dict(sys.modules, {"numbattn.cpu.doubled": SimpleNamespace(doubled=doubled)}):
        found = run_pass(pass_, *describe(x, x, x), {"o": x})
    np.testing.assert_array_equal(found["o"], 3 * x)


def test_a_pass_is_found_by_its_name_on_gpus(rng):
    """Its results are allocated; what there is no room for in ARRAYS is not made."""
    any_forward = pytest.importorskip("numbattn.cuda.kernels.any.forward", exc_type=ImportError)
    pass_, (q, k, v) = Pass("again", takes=QKV, gives=("o", "lse")), rng.standard_normal((3, 5, 4))
    module = SimpleNamespace(SPEC=any_forward.SPEC)
    with patch.dict(sys.modules, {"numbattn.cuda.kernels.any.again": module}), world_of("simulated"), on(AMPERE):
        found = run_pass(pass_, *describe(q, k, v, mask=na.Causal()), {})
    o, saved = na.attention_forward(q, k, v, mask=na.Causal())
    np.testing.assert_allclose(found["o"], o, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["lse"], saved.lse, rtol=1e-12)


def test_the_arrays_of_all_passes_are_described(rng):
    x = rng.standard_normal((2, 3, 4))
    problem, inputs = describe(x, x, x)
    for pass_ in PASSES.values():
        for name in pass_.gives:
            shape, dtype = ARRAYS[name](problem)
            assert shape in ((2, 3, 4), (2, 3))
            assert dtype == np.float64


@pytest.mark.parametrize("dlse", [None, np.array([1.0, np.nan, 2.0])], ids=["o", "o and lse"])
def test_a_sink_has_gradients_where_something_is_seen(rng, dlse):
    """And their tangents: kernels leave them to array operations."""
    q, k, v, do, tq = rng.standard_normal((5, 3, 4))
    options = {"mask": np.array([[True], [False], [True]]), "score": na.Sink(0.5)}
    _, _, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, None, None, tscore=[np.array(1.0)], **options)
    grads, tgrads = na.attention_backward_jvp(do, saved, tsaved, dlse=dlse)
    h, found = 1e-6, []
    for step in (h, -h):
        score = na.Sink(0.5 + step)
        _, backprop = na.attention_vjp(q + step * tq, k, v, mask=options["mask"], score=score)
        found.append(backprop(do, dlse).score[0])
    np.testing.assert_allclose(tgrads.score[0], (found[0] - found[1]) / (2 * h), atol=1e-8)
    np.testing.assert_allclose(grads.score[0], sum(found) / 2, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_the_gradient_of_lse_by_scores(rng, dtype):
    """Each number of them, also on a GPU, where they are simulated."""
    q, k = rng.standard_normal((2, 2, 5, 4)).astype(dtype)
    options = {"mask": na.Window(2, 0), "score": [na.Softcap(2.0), na.Sink(np.ones(2, dtype))], "scale": 0.7,
               "dropout": na.Dropout(0.4, 3)}  # fmt: skip
    S = 2 * np.tanh(0.7 * q.astype(float) @ k.astype(float).swapaxes(-2, -1) / 2)
    E = np.where(options["mask"].dense(5, 5), np.exp(S), 0)
    want = E / (E.sum(-1, keepdims=True) + np.e) * na.dropout_mask(options["dropout"], S.shape)
    want *= options["dropout"].scale
    found = [na.attention_weights(q, k, **options)]
    with world_of("simulated"), on(AMPERE):
        found.append(na.attention_weights(q, k, **options))
    for P in found:
        assert P.dtype == dtype
        np.testing.assert_allclose(P, want, rtol=20 * np.finfo(dtype).eps)


FAULTS = {
    "inputs.dropout.scale, P.dtype": "1, P.dtype",
    "np.isfinite(lse), D, 0": "lse == lse, D, 0",
    "part._asking((False,) * len(part._weights)) for part": "part for part",
    "tD = rowsum(do, to[which])": "tD = 0 * rowsum(do, to[which])",
    "(logits - given": "(-given",
    "cpu/__init__.py": {'f"{__name__}.{name}"), name': 'f"{__name__}.forward"), "forward"'},
    "cuda/kernels/__init__.py": {'f".any.{pass_.name}"': '".any.forward_again"'},
    "test_jets.py": {
        "tD += rowsum(tdo[which], o)": "pass",
        'tD -= given["tdlse"][which]': "pass",
        'D -= given["dlse"]': "pass",
    },
}

"""What bench/cpu.py times is the same for all peers, and is reported."""

import cpu
import numpy as np
import pytest


def test_other_sizes_with_and_without_a_bias(monkeypatch):
    """It checks itself that the peers agree, also in the gradient of the bias."""
    size = cpu.Size(3, 2, 16, 8)
    monkeypatch.setattr(cpu, "SIZES", [size, size._replace(pair_bias=True),
                                       size._replace(pair_bias=True, gradient=False)])
    rows = cpu.sizes(rounds=1)
    assert [(row["pair_bias"], row["gradient"], row["pass"]) for row in rows] == [
        (*bias, of) for bias in ((False, True), (True, True), (True, False)) for of in cpu.PASSES]  # fmt: skip
    assert all(row["numpy / numbattn"] == row["numpy"] / row["numbattn"] > 0 for row in rows)


def test_a_wrong_gradient_of_the_bias_is_not_timed(monkeypatch):
    def wrong(*args, **options):
        o, backprop = cpu.numpy_vjp(*args, **options)
        return o, lambda do: (*backprop(do)[:-1], 2 * backprop(do)[-1])

    q, k, v, do = cpu.inputs(16, "float32")
    with pytest.raises(AssertionError, match="dbias of wrong"):
        cpu.check({"numpy": cpu.numpy_vjp, "wrong": wrong}, q, k, v, do, bias=q[0] @ k[0].mT)


@pytest.mark.parametrize("shape", [(2, 5, 4), (3, 2, 5, 4)])
def test_small_calls_of_all_peers_agree(shape):
    for call, runs in cpu.small_calls(shape).items():
        expected = runs["numpy"]()
        results = [run() for name, run in runs.items() if name != "numpy"]
        if call.startswith("forward"):
            expected, results = expected[:1], [(x if isinstance(x, np.ndarray) else x[0],) for x in results]
        assert len(expected) == {"forward": 1, "both": 3}.get(call.partition(",")[0]) + ("its gradient" in call)
        for result in results:
            for x, y in zip(result, expected, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5)

"""What bench/cpu.py times is the same for all peers, and is told."""

import cpu
import pytest


def test_other_sizes_with_and_without_a_bias(monkeypatch):
    """That the peers agree it checks itself, the gradient of the bias included."""
    monkeypatch.setattr(cpu, "SIZES", [cpu.Size(3, 2, 16, 8), cpu.Size(3, 2, 16, 8, pair_bias=True)])
    rows = cpu.sizes(rounds=1)
    assert [(row["pair_bias"], row["pass"]) for row in rows] == [
        (False, "forward"), (False, "backward"), (True, "forward"), (True, "backward")]  # fmt: skip
    assert all(row["numpy / numbattn"] == row["numpy"] / row["numbattn"] > 0 for row in rows)


def test_a_wrong_gradient_of_the_bias_is_not_timed(monkeypatch):
    def wrong(*args, **options):
        o, backprop = cpu.numpy_vjp(*args, **options)
        return o, lambda do: (*backprop(do)[:-1], 2 * backprop(do)[-1])

    q, k, v, do = cpu.inputs(16, "float32")
    with pytest.raises(AssertionError, match="dbias of wrong"):
        cpu.check({"numpy": cpu.numpy_vjp, "wrong": wrong}, q, k, v, do, bias=q[0] @ k[0].mT)

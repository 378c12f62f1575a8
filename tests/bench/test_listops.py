"""ListOps, learnt: values, gradients, learning, checkpoints."""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from paper import encoder, expressions, listops
from paper.attentions import ATTENTIONS
from paper.listops import SMALL, Learner

OPERATORS = {expressions.MIN: min, expressions.MAX: max, expressions.MED: lambda x: int(statistics.median(x)),
             expressions.SM: lambda x: sum(x) % 10}  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def value(tokens):
    """The value of the expression that an iterator's tokens begin with, by recursion."""
    token = next(tokens)
    return OPERATORS[token](list(iter(lambda: value(tokens), expressions.CLOSE))) if token in OPERATORS else token


def test_values_of_expressions(rng):
    tokens, offsets, values = expressions.sample(rng, 10000, 20, 80)
    lengths = np.diff(offsets)
    assert lengths.min() > 20
    assert 70 < lengths.max() < 80
    assert 10000 - 80 <= offsets[-1] < 10000
    assert set(tokens) == set(range(expressions.SYMBOLS))
    for start, end, expected in zip(offsets, offsets[1:], values):
        left = iter(tokens[start:end].tolist())
        assert value(left) == expected
        assert not list(left)  # it is one expression, of all tokens
    assert not tokens[offsets[-1] :].any()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients(rng, name):
    """In float64, compared with differences."""
    size, offsets, longest, tokens = SMALL.size, np.array([0, 7, 12, 13], np.int32), 7, rng.integers(0, 5, 16)
    position = np.array([*range(7), *range(5), 0, 0, 0, 0])
    shapes = size.shapes(5, 3)
    learnt = encoder.Encoder(size, encoder.sinusoids(longest, size.width), np.float64)
    w, direction = rng.standard_normal((2, sum(map(np.prod, shapes.values()))))
    w *= 0.3
    dlogits = rng.standard_normal((3, 3))

    def run(w):
        return learnt(tokens, offsets, position, ATTENTIONS[name](np, offsets, longest), encoder.views(w, shapes))

    grad = np.full_like(w, np.nan)
    run(w)[1](dlogits, encoder.views(grad, shapes))
    for part, d in encoder.views(direction, shapes).items():
        step = np.zeros_like(w)
        encoder.views(step, shapes)[part][:] = 1e-6 * d
        found = ((run(w + step)[0] - run(w - step)[0]) * dlogits).sum() / 2
        assert found == pytest.approx((grad * step).sum(), rel=1e-6), part


def test_gradient_of_cross_entropy(rng):
    x, targets = rng.standard_normal((4, 5)), np.array([0, 4, 2, 2])
    (_, grad), step = encoder.cross_entropy(x, targets), 1e-6 * rng.standard_normal((4, 5))
    found = encoder.cross_entropy(x + step, targets)[0] - encoder.cross_entropy(x - step, targets)[0]
    assert found / 2 == pytest.approx((grad * step).sum(), rel=1e-6)


def test_who_is_stopped_continues_bit_for_bit(pool, tmp_path):
    path = tmp_path / "checkpoints" / "numbattn.npz"
    whole, stopped, continued = (Learner(np, SMALL, "numbattn") for _ in range(3))
    want = listops.train(whole, SMALL.steps, pool)

    def step(batch, learn=stopped.step):
        if stopped.steps > SMALL.every:
            raise KeyboardInterrupt
        return learn(batch)

    stopped.step = step
    with pytest.raises(KeyboardInterrupt):
        listops.train(stopped, SMALL.steps, pool, path)
    assert continued.steps == 0
    found = listops.train(continued, SMALL.steps, pool, path)
    assert [{**x, "seconds": None} for x in found] == [{**x, "seconds": None} for x in want]
    assert (continued.state == whole.state).all()


def test_script(tmp_path, monkeypatch):
    """Both attentions learn, and the same."""
    monkeypatch.setattr(listops, "cupy", None)
    path = tmp_path / "listops.json"
    for steps in (20, 40):  # the second time, from checkpoints
        options = "--small", "--checkpoints", str(tmp_path / "new" / "folder"), "--json", str(path)
        listops.main([*options, "--numbattn", str(steps), "--standard", str(steps)])
        results = json.loads(path.read_text())
        ours, standard = results["records"]
        assert [ours["attention"], standard["attention"]] == [*ATTENTIONS]
        for record in ours, standard:
            assert record["steps"] == steps
            assert [x["steps"] for x in record["curve"]] == [*range(20, steps + 1, 20)]
            right, count = record["held_out"]
            assert 0 <= right <= 1
            assert count > 50
    losses = [x["loss"] for x in ours["curve"]]
    assert losses[1] < losses[0] - 0.1
    assert [x["loss"] for x in standard["curve"]] == pytest.approx(losses, abs=0.01)
    listops.main(["--small", "--json", str(path), "--numbattn", "0"])
    assert [x["attention"] for x in json.loads(path.read_text())["records"]] == ["standard"]

"""bench/kernels.py up to what needs a GPU or other libraries: what is measured, that all are right, what is shown."""

import math
from types import SimpleNamespace

import kernels
import numpy as np
import pairs
import pytest
import small
import timing

PRODUCT = kernels.Product("float32", 70, 12, 2)
SINKHORN = kernels.Sinkhorn("float32", 50, 12, iterations=3)
NEAREST = kernels.Nearest("float32", 66, 40, 12, k=2)
CASES = PRODUCT, SINKHORN, NEAREST


@pytest.fixture
def on_numpy(monkeypatch):
    """NumPy's arrays instead of CuPy's, no other library, and a clock that does not run."""
    for module in (kernels, small):
        monkeypatch.setattr(module, "release", lambda: None)
    monkeypatch.setattr(kernels, "cupy", np)
    monkeypatch.setattr(pairs, "torch", None)
    monkeypatch.setattr(pairs, "find_spec", lambda name: None)
    monkeypatch.setattr(small, "SETTLE_SECONDS", 0)
    for module in (small, timing):
        monkeypatch.setattr(module, "event_seconds", lambda run, repetitions=1: 2.0)


def arguments(*options, cpu=False):
    return kernels.parse([*options, *["--cpu"] * cpu])


# ---------------------------------------------------------------------------------------------------------------- cases
def test_the_goals_are_measured():
    args = arguments()
    found = {part: cases(args) for part, (cases, _) in kernels.PARTS.items()}
    assert kernels.Product("float32", 10**6, 3, 1) in found["products"]
    assert kernels.Product("float64", 10**5, 512, 64) in found["products"]
    assert len({*found["products"]}) == 16
    assert kernels.Sinkhorn("float32", 50_000, 64, iterations=10) in found["sinkhorn"]
    assert {case.n for case in found["nearest"] if case[1] == 10**6} == {1000, 4096, 32768}
    assert {(case.of, case[-2:]) for case in found["errors"]} > {("product", (0.1, 1e3)), ("sinkhorn", (0.001, 1))}


def test_what_is_asked_for_is_run():
    args = arguments("--dtype", "float64", "--features", "7")
    assert [case[:3] for case in kernels.products(args)] == [("float64", 10**5, 7)] * 2
    assert kernels.sinkhorns(args) == kernels.neighbours(args) == []
    for cases, _ in kernels.PARTS.values():
        assert len(cases(arguments("--quick"))) <= len(cases(arguments()))
        assert max(case[1] for case in cases(arguments(cpu=True))) <= 10_000


def test_peers_take_the_dtype(monkeypatch):
    monkeypatch.setattr(pairs, "find_spec", lambda name: name)
    monkeypatch.setattr(pairs, "torch", SimpleNamespace())
    everywhere = {pairs.OURS, pairs.FORMULA, pairs.TORCH}
    assert {*pairs.available("nearest", "float16", False)} == everywhere | {pairs.FLASH_KMEANS}
    assert {*pairs.available("nearest", "float32", False)} == everywhere | {pairs.KEOPS}
    assert {*pairs.available("product", "float64", True)} == everywhere | {pairs.KEOPS}
    assert {*pairs.available("sinkhorn", "bfloat16", False)} == {*pairs.PEERS} - {pairs.FLASH_KMEANS}
    monkeypatch.setattr(pairs, "torch", None)
    assert pairs.available("sinkhorn", "float32", False) == [pairs.OURS, pairs.FORMULA]
    assert pairs.available("sinkhorn", "float32", True) == [pairs.OURS, pairs.FORMULA, pairs.KEOPS]


def test_kernels_are_compiled_once(monkeypatch):
    """Those that take long."""
    tasks = []
    monkeypatch.setattr(kernels, "available", lambda *given: pairs.PEERS[:-1])
    monkeypatch.setattr(kernels, "in_processes", lambda most, function, found: tasks.extend(found))
    kernels.prepare([SINKHORN, SINKHORN._replace(n=60, epsilon=0.01, dtype="bfloat16")], None)
    assert [name for _, name in tasks] == [pairs.FLASH_SINKHORN, pairs.TF32, pairs.OURS, pairs.OURS]
    cases = [PRODUCT, PRODUCT._replace(length=3.0, offset=1e3)]
    assert len({kernels.alike(case, pairs.OURS) for case in cases}) == 1
    assert kernels.alike(NEAREST, pairs.OURS) == NEAREST
    assert kernels.alike(SINKHORN, pairs.OURS).iterations == 1


# ---------------------------------------------------------------------------------------------------------------- peers
@pytest.mark.parametrize("case", [*CASES, PRODUCT._replace(features=3, length=0.5), NEAREST._replace(k=1)], ids=str)
@pytest.mark.parametrize("name", [pairs.OURS, pairs.FORMULA])
def test_all_are_right(monkeypatch, case, name):
    monkeypatch.setitem(pairs.PAIRS, "numpy", 300)  # blocks of some rows
    given = case.arguments(np)
    result = pairs.MAKERS[case.of][name](*given)()
    assert case.error(result, case.expected(*given)) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of)
def test_others_are_right(case):
    """Those that are installed."""
    others = {*pairs.available(case.of, case.dtype, True)} - {pairs.OURS, pairs.FORMULA}
    if not others:
        pytest.skip("neither torch nor KeOps is installed")
    given = case.arguments(np)
    for name in others:
        assert case.error(pairs.MAKERS[case.of][name](*given)(), case.expected(*given)) < 1e-5


def test_the_formula_is_not_run_for_minutes():
    x = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (10**6, 3), (0, 4))
    with pytest.raises(TimeoutError, match=r"more than 1e\+11 pairs"):
        pairs.MAKERS["product"][pairs.FORMULA](x, x, x[:, :1], 1.0)()


def test_neighbours_that_are_wrong():
    """Another point, one twice."""
    given = NEAREST.arguments(np)
    expected, j = NEAREST.expected(*given), pairs.MAKERS["nearest"][pairs.OURS](*given)()
    assert NEAREST.error(j[:, ::-1], expected) < 1e-12
    assert NEAREST.error((j + 1) % NEAREST.n, expected) > 0.1
    assert NEAREST.error(j[:, [0, 0]], expected) == math.inf


def test_far_off_points():
    """Float64 is of the points as they were rounded."""
    case = PRODUCT._replace(features=3, offset=1e3)
    x, y, b, length = case.arguments(np)
    squares = ((x[:64, None].astype(np.float64) - y) ** 2).sum(-1)
    np.testing.assert_allclose(case.expected(x, y, b, length), np.exp(-squares / 2) @ b, rtol=1e-9)


# ------------------------------------------------------------------------------------------------------------- measured
@pytest.mark.parametrize("cpu", [False, True])
def test_speeds(on_numpy, cpu):
    records = [*kernels.speeds(CASES, arguments(cpu=cpu))]
    for record in records:
        assert record["seconds"].keys() == record["errors"].keys() == {pairs.OURS, pairs.FORMULA}
        assert all(seconds == 2.0 or cpu for seconds in record["seconds"].values())
        assert record["failed"] == {}
        assert max(record["errors"].values()) < 1e-5


@pytest.mark.parametrize("cpu", [False, True])
def test_who_is_wrong_is_not_timed(on_numpy, monkeypatch, cpu):
    monkeypatch.setitem(pairs.MAKERS["product"], pairs.OURS, lambda x, y, b, length: lambda: b[:, :1] + x[:, :2])
    (record,) = kernels.speeds([PRODUCT], arguments(cpu=cpu))
    assert record["seconds"].keys() == {pairs.FORMULA}
    assert "wrong by" in record["failed"][pairs.OURS]
    monkeypatch.setitem(kernels.PARTS, "products", (None, kernels.speeds))
    assert kernels.finish("products", [PRODUCT], arguments(cpu=cpu), {}) == 1


def test_accuracies(on_numpy):
    """Far off the formula has no digits, and what is no number is a failure."""
    cases = [PRODUCT._replace(features=3, length=0.3, offset=1e4), SINKHORN._replace(epsilon=0.01, iterations=1)]
    product, sinkhorn = kernels.accuracies(cases, arguments(cpu=True))
    assert product["errors"][pairs.OURS] < 1e-5
    assert not product["errors"].get(pairs.FORMULA, math.inf) < 0.01
    assert max(sinkhorn["errors"].values()) < 1e-4
    assert (product["of"], sinkhorn["epsilon"]) == ("product", 0.01)


def test_a_call(monkeypatch):
    monkeypatch.setattr(kernels, "growth", lambda run: run().nbytes)
    first, later, nbytes = kernels.call(PRODUCT, arguments(cpu=True))
    assert first > 0 < later
    assert nbytes == 70 * 2 * 4


def test_memory_is_measured():
    assert kernels.growth(lambda: np.ones(4 << 20)) >= 30 << 20


# ---------------------------------------------------------------------------------------------------------------- shown
def test_shown(capsys):
    record = {**PRODUCT._asdict(), "seconds": {pairs.OURS: 2.0, pairs.KEOPS: 5.0}, "errors": {},
              "failed": {pairs.FORMULA: "why not"}}  # fmt: skip
    kernels.show_records("products", [record])
    shown = capsys.readouterr().out
    assert "2.5" in shown.splitlines()[5].split()
    assert "standard was not measured, dtype float32, n 70, features 12" in shown

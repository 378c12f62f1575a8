"""bench/second.py up to what needs a GPU: which calls it makes, that the formula is right, and what it shows."""

import numpy as np
import pytest
import second
import small
import timing

CASE = second.Case("float64", 4, False, 8, 2, 3, 3)


@pytest.fixture
def on_numpy(monkeypatch):
    """Tiny NumPy arrays instead of CuPy's, numbattn's passes by the reference, and a clock that does not run."""
    for module in (second, small):
        monkeypatch.setattr(module, "release", lambda: None)
    monkeypatch.setattr(second, "cupy", np)
    monkeypatch.setattr(second, "find_spec", lambda name: None)
    monkeypatch.setattr(second, "ours", by_reference)
    monkeypatch.setattr(second, "MAKERS", second.MAKERS | {second.OURS: by_reference})
    monkeypatch.setattr(small, "SETTLE_SECONDS", 0)
    for module in (small, timing):
        monkeypatch.setattr(module, "event_seconds", lambda run, repetitions=1: 2.0)


def by_reference(of, x, causal):
    return lambda: second.exact(x, causal)[of]


# ---------------------------------------------------------------------------------------------------------------- cases
def test_tokens_are_constant():
    chosen = second.cases_of("speed", second.parse([]))
    assert {(case.dtype, case.batch * case.seqlen, case.heads * case.head_dim) for case in chosen} == {
        ("bfloat16", 16384, 2048), ("float32", 16384, 512)}  # fmt: skip
    assert len(chosen) == 2 * 2 * 2 * 5


def test_small_problems_are_thousands_of_the_same_bytes():
    for case in second.cases_of("small", second.parse([])):
        assert case.batch * case.heads >= 512
        nbytes = case.batch * case.heads * case.seqlen * case.head_dim * second.DTYPE[case.dtype].itemsize
        assert nbytes == second.NBYTES


def test_what_is_asked_for_is_run():
    args = second.parse(["--dtype", "float32", "--head-dim", "32", "--seqlen", "100", "200", "--causal"])
    assert [case[:4] for case in second.cases_of("speed", args)] == [("float32", 32, True, n) for n in (100, 200)]
    quick = second.parse(["--quick"])
    for part in ("speed", "small", "cpu"):
        assert len(second.cases_of(part, quick)) < len(second.cases_of(part, second.parse([])))
    assert second.parse(["--cpu"]).parts == ["cpu"]


def test_kernels_of_all_passes_are_compiled_first():
    planner = pytest.importorskip("numbattn.cuda.plan.planner", exc_type=ImportError)
    case = second.Case("bfloat16", 64, True, 1024, 2, 2, 2)
    keys = second.kernels(planner.DEVICES[9, 0], [case])
    assert len({*keys}) == len(keys)
    names = [key.name for key in keys]
    assert {"hopper_forward", "mma_forward", "delta"} <= {*names}
    assert any("tangent" in name for name in names)


def test_peers_are_for_half_precision(monkeypatch):
    monkeypatch.setattr(second, "find_spec", lambda name: name == "jvp_flash_attention")
    half = second.runs_of(CASE._replace(dtype="bfloat16"), second.PEERS)
    assert ("tangent", second.JVP_FLASH) in half
    assert ("backward_tangent", second.JVP_FLASH) not in half
    assert ("backward", second.MMA) in half
    assert not any(name == second.FA4_JAX for _, name in half)
    assert {name for _, name in second.runs_of(CASE, second.PEERS)} == {second.OURS, second.FORMULA}


# -------------------------------------------------------------------------------------------------------------- formula
@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_is_right(on_numpy, causal):
    x = second.arrays_of(CASE, np)
    expected = second.exact(x, causal)
    for of in second.BASE:
        result = second.formula(of, x, causal)()
        for got, want in zip(result, expected[of], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)


def test_the_formula_that_does_not_fit_is_not_tried(monkeypatch):
    x = second.arrays_of(CASE, np)
    monkeypatch.setattr(second, "bytes_here", lambda x: 8 * 2 * 3 * 8 * 8 * 8 - 1)
    with pytest.raises(MemoryError, match="the formula keeps 0 GB"):
        second.formula("tangent", x, False)
    monkeypatch.setattr(second, "bytes_here", lambda x: 8 * 2 * 3 * 8 * 8 * 8)
    assert len(second.formula("tangent", x, False)()) == 2


# ------------------------------------------------------------------------------------------------------------- measured
def test_measured(on_numpy):
    """A record for each pass, checked in the first head, with its rate by the products that it takes."""
    records = second.measured([CASE], second.PEERS, rounds=1)
    assert [record["pass"] for record in records] == [*second.PRODUCTS]
    for record in records:
        names = {second.OURS} | ({second.FORMULA} if record["pass"] in second.BASE else set())
        assert record["seconds"] == dict.fromkeys(names, 2.0)
        assert record["failed"] == {}
        assert max(record["errors"].values()) < 1e-12
        tflop = second.PRODUCTS[record["pass"]] * 2e-12 * 2 * 3 * 8 * 8 * 4
        assert record["tflops"][second.OURS] == float(f"{tflop / 2:.4g}")


@pytest.mark.parametrize("of", [*second.PRODUCTS])
def test_who_is_wrong_is_not_timed(on_numpy, monkeypatch, of):
    def spoilt(pass_, x, causal):
        return lambda: [(1 + 1e-8 * (pass_ == of)) * array for array in second.exact(x, causal)[pass_]]

    monkeypatch.setattr(second, "MAKERS", second.MAKERS | {second.OURS: spoilt})
    for record in second.measured([CASE], second.PEERS, rounds=1):
        assert (second.OURS in record["failed"]) == (record["pass"] == of)
        assert (second.OURS in record["seconds"]) == (record["pass"] != of)
    with pytest.raises(ArithmeticError, match=f"{of} of numbattn is wrong"):
        second.on_cpu([CASE], rounds=1)


def test_on_cpu(on_numpy):
    records = second.on_cpu([CASE], rounds=1)
    assert [{*record["seconds"]} for record in records] == [{second.OURS}] * 2 + [{second.OURS, second.NUMPY}] * 2
    assert all(seconds > 0 for record in records for seconds in record["seconds"].values())


# ---------------------------------------------------------------------------------------------------------------- shown
def test_ratios_are_of_rates(capsys):
    """2 products in 2 s against 6 in 3 s: the tangent runs at twice the forward pass's rate."""
    seconds = {("forward", second.OURS): 2.0, ("tangent", second.OURS): 3.0, ("tangent", second.FORMULA): 12.0}
    second.show_records(second.records_of(CASE, seconds, {}, {("backward", second.OURS): "why not"}))
    shown = capsys.readouterr().out
    row = shown.partition("float64, tangent")[2].splitlines()[4].split()
    assert row[-2:] == ["2.00", "4.00"]
    assert "numbattn was not timed in 1 cells, first float64, 2 x 8 x 4, backward: why not" in shown


"""bench/small.py up to what needs a GPU: which calls it makes, what is right, and that nothing wrong is timed."""

from types import SimpleNamespace

import numpy as np
import pytest
import small
import timing
from common import standard_vjp

from numbattn import reference


@pytest.fixture
def on_numpy(monkeypatch):
    """Tiny NumPy arrays instead of CuPy's, and a clock that does not run."""
    monkeypatch.setattr(small, "cupy", np)
    monkeypatch.setattr(small, "NBYTES", 1 << 14)
    monkeypatch.setattr(small, "release", lambda: None)
    monkeypatch.setattr(small, "available", lambda dtype, peers: [])
    monkeypatch.setattr(small, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(timing, "array_of", lambda x: x)
    for module in (small, timing):
        monkeypatch.setattr(module, "event_seconds", lambda run, repetitions=1: 2.0)


def cases(*options):
    args = small.parse(options)
    return {part: [*small.cases_of(part, args)] for part in args.parts}


# --------------------------------------------------------------------------------------------------------------- cases
def test_arrays_have_the_same_bytes():
    chosen = cases()["cells"]
    assert small.Case("float32", 4096, 32, 32) in chosen
    assert small.Case("bfloat16", 512, 256, 64) in chosen
    assert {(case.seqlen, case.head_dim) for case in chosen} == set(small.SIZES)
    for case in chosen:
        nbytes = np.prod(case.shape) * small.DTYPE[case.dtype].itemsize
        assert 0.99 * small.NBYTES < nbytes <= small.NBYTES


def test_what_is_asked_for_is_run():
    found = cases("--size", "20x16", "--dtype", "float64", "--parts", "batches", "cells")
    assert found == {"batches": [small.Case("float64", batch, 20, 16) for batch in small.BATCHES],
                     "cells": [small.full_case("float64", 20, 16)]}
    assert len(cases("--quick")["cells"]) < len(cases()["cells"])


def test_kernels_of_all_calls_are_compiled_first():
    pytest.importorskip("numba_cuda")
    from numbattn.cuda.plan.planner import DEVICES

    chosen = cases("--size", "32x16", "--dtype", "float32")
    keys = small.kernels(DEVICES[9, 0], chosen)
    assert len({*keys}) == len(keys)
    fewer = small.kernels(DEVICES[9, 0], {"cells": chosen["cells"]})
    assert {*fewer} < {*keys}


def test_a_compiler_that_dies_takes_its_share_alone(monkeypatch, capsys):
    class Process:
        def __init__(self, target, args, daemon):
            self.target, self.args, self.exitcode, self.join = target, args, 0, lambda: None

        def start(self):
            try:
                self.target(*self.args)
            except MemoryError:
                self.exitcode = -9

    def called(number):
        if number == 4:
            raise MemoryError
        done.append(number)

    done, context = [], SimpleNamespace(Process=Process, RawValue=lambda kind: SimpleNamespace(value=0))
    monkeypatch.setattr(small, "get_context", lambda how: context)
    monkeypatch.setattr(small.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(small.faulthandler, "enable", lambda: None)
    small.in_processes(8, called, [(number,) for number in range(9)])
    assert sorted(done) == [0, 1, 2, 3, 5, 6, 8]
    assert capsys.readouterr().out == "called(4,): the process ended with -9\n"


# -------------------------------------------------------------------------------------------------------------- checks
def test_what_is_right_by_parts_of_the_batch(monkeypatch):
    monkeypatch.setattr(small, "MOST_SCORES", 2 * 2 * 5 * 5)  # two problems at once, of five
    rng = np.random.default_rng(0)
    q, k, v, do = arrays = rng.standard_normal((4, 5, 2, 5, 3))
    for bias in (None, rng.standard_normal((1, 2, 5, 5))):
        o, backprop = standard_vjp(q, k, v, bias=bias)
        *grads, dS = backprop(do, with_dS=True)
        expected = o, *grads, *([] if bias is None else [dS.sum(axis=0, keepdims=True)])
        for x, y in zip(small.exact(arrays, bias), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-13)


def test_first_problems_do_not_depend_on_the_others():
    """So a few of them are enough to check a variant."""
    case = small.Case("float32", 5, 8, 4)
    for name, variant in small.variants_of(case, np).items():
        shape = case.packed_shape if variant.tokens else case.shape
        q, do = np.random.default_rng(0).standard_normal((2, *shape))
        k, v = np.random.default_rng(1).standard_normal((2, shape[0], variant.heads_k, *shape[2:]))
        whole, few = variant.options(2 * case.batch), variant.options(small.CHECKED)
        of_first = [variant.first(x) for x in (do, q, k, v)]
        assert of_first[1].shape != q.shape
        pairs = [(reference.attention_forward(q, k, v, **whole)[0],
                  reference.attention_forward(*of_first[1:], **few)[0])]  # fmt: skip
        pairs += zip(reference.attention_backward(do, q, k, v, **whole), reference.attention_backward(*of_first, **few))
        for x, expected in pairs:
            assert not np.isnan(expected).any()
            np.testing.assert_allclose(variant.first(x), expected, atol=1e-13, err_msg=name)


def test_segments_are_of_half_a_length_to_one():
    case = small.Case("float32", 50, 32, 4)
    offsets = small.variants_of(case, np)["Segments"].options(2 * case.batch)["mask"].queries
    assert offsets[-1] == 50 * 32
    lengths = np.diff(offsets)
    assert 16 <= lengths[:-1].min() < lengths.max() <= 32


# --------------------------------------------------------------------------------------------------------------- timed
def test_cells(on_numpy):
    """The formula, compared with float64 and a copy; the bias's gradient is checked, too."""
    case = small.Case("float32", 3, 8, 4)
    records = small.cells([case], ["cupy"], rounds=1)
    assert [(record["bias"], record["pass"]) for record in records] == [
        (bias, of) for bias, passes in small.RUNS.items() for of in passes]  # fmt: skip
    for record in records:
        assert record["seconds"] == {"cupy": 2.0, "copy": 2.0}
        assert 0 < record["errors"]["cupy"] < 1e-5
        assert not record["failed"]
        assert record["bytes"] == {"forward": 4, "backward": 7}[record["pass"]] * 3 * 8 * 8 * 4 * 4


@pytest.mark.parametrize(("wrong", "of"), [(0, "forward"), (2, "backward"), (3, "backward")])
@pytest.mark.parametrize("value", [1.001, np.nan])
def test_who_is_wrong_is_not_timed(on_numpy, monkeypatch, wrong, of, value):
    def spoilt(name, pass_, arrays, kind, bias):
        def run():
            result = [*right(name, pass_, arrays, kind, bias)()]
            if pass_ == of and wrong < len(result):
                result[wrong] = result[wrong] * value
            return result

        return run

    right = small.prepare
    monkeypatch.setattr(small, "prepare", spoilt)
    records = small.cells([small.Case("float32", 2, 8, 4)], ["cupy"], rounds=1)
    failed = [record for record in records if record["failed"]]
    assert {record["pass"] for record in failed} == {of}
    assert all("wrong by" in record["failed"]["cupy"] for record in failed)
    assert all(set(record["seconds"]) == {"copy"} for record in failed)
    assert all(set(record["seconds"]) == {"copy", "cupy"} for record in records if record not in failed)


def test_variants(on_numpy, monkeypatch):
    """All of them run, and the first problems of each are compared with float64, which is what runs here."""
    case, spoilt = small.Case("float32", 5, 8, 4), []

    def prepare(of, arrays, options):
        q, k, v, do = arrays
        o, _ = reference.attention_forward(q, k, v, **options)
        result = (o,) if of == "forward" else tuple(reference.attention_backward(do, q, k, v, **options))
        return lambda: [1.001 * x for x in result] if spoilt else result

    monkeypatch.setattr(small, "prepare_variant", prepare)
    names = {*small.variants_of(case, np)}
    assert {"plain", "Lengths", "Bits", "Segments", "Dropout"} < names
    for record in small.variants([case], rounds=1):
        assert record["seconds"] == dict.fromkeys(names, 2.0)
        assert max(record["errors"].values()) < 1e-7
    spoilt.append(True)
    for record in small.variants([case], rounds=1):
        assert {*record["failed"]} == names


def test_a_call_of_a_graph_is_timed(on_numpy, monkeypatch):
    monkeypatch.setattr(small, "Replay", lambda run: run)
    seconds, _, _ = small.timed({"a": lambda: tuple}, lambda name, result: None, 0, rounds=1, graph=True)
    assert seconds == {"a": 2.0 / small.CALLS}


def test_a_long_run_is_timed_once(on_numpy, monkeypatch):
    taken = iter([1.0])
    monkeypatch.setattr(small, "event_seconds", lambda run, repetitions=1: next(taken))
    seconds, _, _ = small.timed({"a": lambda: tuple}, lambda name, result: None, 0, rounds=3)
    assert seconds == {"a": 1.0}


def test_a_gradient_that_is_missing_is_an_error(on_numpy):
    with pytest.raises(ValueError, match="longer"):
        small.error_of([np.ones(1)], [np.ones(1), np.ones(1)])


def test_numbattn_may_not_fail():
    peers, ours, variant = ({"failed": {name: "why"}} for name in ("efficient", "numbattn", "Lengths"))
    fine = {"failed": {}}
    assert small.failures({"cells": [fine, peers, ours], "variants": [fine, variant]}) == [ours, variant]


def test_what_did_not_run_is_said(capsys):
    about = {"dtype": "float32", "batch": 2, "seqlen": 8, "head_dim": 4}
    forward = {**about, "pass": "forward", "seconds": {"plain": 1e-5, "Bits": 2e-5}, "failed": {}}
    backward = {**about, "pass": "backward", "seconds": {"Bits": 2e-5}, "failed": {"plain": "out of memory"}}
    small.show_variants([forward, backward])
    out = capsys.readouterr().out
    assert [line.split()[-2:] for line in out.splitlines() if "float32 " in line] == [["10.0", "2.00"], ["nan", "nan"]]
    assert "plain was not timed in 1 cells, first float32, 2 x 8 x 4, backward: out of memory" in out
    seconds = {"numbattn": 3e-6, "cupy": 4e-6, "copy": 2e-6}
    small.show_cells([{**forward, "bias": "none", "graph": False, "seconds": seconds}])
    assert capsys.readouterr().out.split()[-5:] == ["3.0", "4.0", "2.0", "1.50", "0.75"]

"""What the papers claim: the number next to it comes from the results, or there is a reason why there is none."""

import re

import pytest
import report
from paper import answers, claims

from .. import synthetic

ANSWERED = [claim for claim in claims.listed() if claim.found]


def made(claim):
    return {name: synthetic.results(name) for name in claim.runs}


def test_every_claim_is_answered_or_says_why_not():
    for claim in claims.listed():
        assert claim.text
        assert re.match("(paper|chapter|notes), .", claim.source), claim
        assert claim.claimed, claim
        assert claim.found or (claim.why_not and not claim.runs), claim
        assert report.RUNS.keys() >= {*claim.runs}, claim
    texts = [(claim.text, claim.source) for claim in claims.listed()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("claim", ANSWERED, ids=lambda claim: claim.text)
def test_what_is_reproduced_has_a_number(claim):
    said = claims.reproduced(claim, made(claim))
    assert re.search(r"\d", said), said
    assert "nan" not in said.lower().replace("nan in", "")


@pytest.mark.parametrize("claim", [claim for claim in ANSWERED if claim.runs], ids=lambda claim: claim.text)
def test_without_results_nothing_is_reproduced(claim):
    assert claims.reproduced(claim, {}) == claims.NOT_MEASURED


@pytest.mark.parametrize(("found", "run", "expected"), [
    (answers.faster_attention, "figure2", "8.3 times as fast, forward and backward"),
    (answers.fewer_bytes, "figure2", "26.0 times fewer bytes of DRAM (predicted)"),
    (answers.backward_flops, "figure2", "10 N²d"),
    (answers.bytes_by_block, "figure2", "16.0 times fewer bytes with blocks 16 times as large (predicted)"),
    (answers.faster_than_standard, "figure3", "2.5 times as fast as in CuPy, at 128 to 256"),
    (answers.several_gpus, "ring", "91 to 94% of perfect scaling on 2 GPUs, at 65536"),
    (answers.rabe_staats, "figure3",
     "2.67 times as long for Rabe and Staats as for the standard formula, at 128 to 256"),
    (answers.memory_of("linformer"), "figure3", "3.0 times as much for Linformer, at 128 to 512"),
    (answers.best_when_short, "figure3", "fastest at 3 of 3 lengths, least memory at 3 of 3 lengths"),
    (answers.best_sparse, "figure3", "faster than all others at 0 of 3 lengths"),
    (answers.matrix_saved, "costs", "34 MB for a head at 32768, forward and backward, 1/127 of a matrix"),
])  # fmt: skip
def test_numbers_are_those_of_the_results(found, run, expected):
    assert found(synthetic.results(run)) == expected


def test_approximations_are_faster_from_where_they_stay_faster():
    """Not from a length at which they are faster by chance."""
    results = synthetic.results("figure3", seqlens=(128, 256, 512, 1024))
    times = {128: 2, 256: 0.5, 512: 2, 1024: 0.5}  # linformer's over numbattn's
    for record in results["records"]:
        if record["peer"] == "linformer":
            ours = next(x for x in results["records"] if (x["peer"], x["setting"], x["seqlen"]) == (
                "numbattn", record["setting"], record["seqlen"]))  # fmt: skip
            record["seconds"] = {"both": times[record["seqlen"]] * ours["seconds"]["both"]}
        elif record["peer"] == "linear" and record["setting"] == "dropout+padding":
            record["failed"] = "ValueError: linear attention has no matrix P to drop from"
    assert answers.overtaken(results) == "Linformer from 1024 on; linear attention at no length up to 1024"


def test_the_formula_is_torchs_too():
    results = synthetic.results("figure3")
    results["records"] += [x | {"peer": "math"} for x in results["records"] if x["peer"] == "rabe-staats"]
    expected = "2.5 times as fast as in CuPy, 6.7 times as fast as in PyTorch, at 128 to 256"
    assert answers.faster_than_standard(results) == expected


def test_ranks_that_take_turns_are_not_several_gpus():
    results = synthetic.results("ring")
    for record in results["speed"]:
        record["at once"] = 1
    assert answers.several_gpus(results) is None


def test_a_second_backward_kernel_costs_time():
    one, two = synthetic.results("speed"), synthetic.results("deterministic")
    for record in two["speed"]:
        record["tflops"]["numbattn"] *= 0.8
    found = answers.one_backward_kernel(synthetic.results("figure2"), one, two)
    assert found == "10 N²d; with a second kernel 0.80 of the speed"


@pytest.mark.parametrize("found", [answers.faster_than_standard, answers.rabe_staats, answers.memory_of("standard")])
def test_a_peer_that_has_not_run_reproduces_nothing(found):
    results = synthetic.results("figure3")
    results["records"] = [x for x in results["records"] if x["peer"] != "standard"]
    assert found(results) is None


def test_bytes_are_measured_if_all_of_them_are():
    results = synthetic.results("figure2")
    standard, ours = (record for record in results["records"] if record["part"] == "left")
    ours["measured"] = {"dram": 2e9}
    assert answers.fewer_bytes(results) == "26.0 times fewer bytes of DRAM (predicted)"
    standard["measured"] = {"dram": 60e9}
    assert answers.fewer_bytes(results) == "30.0 times fewer bytes of DRAM (measured)"


def test_examples_are_as_printed():
    computed = {claim.claimed: claim.found() for claim in ANSWERED if not claim.runs}
    for claimed in ("[0.0347, 0.6964, 0.0128, 0.2562]", "[0.4421, 0.5579]", "1.442695"):
        assert computed[claimed] == claimed
    assert computed["[1.0, 0.0], [0.449, 0.551]"] == "[1.000, 0.000], [0.449, 0.551]"
    assert computed["exp(90) = inf, exp(85 - 90) = 0.0067"] == "0.0067"
    assert computed["8 KB for n=256"] == "8 KB"


def test_the_page_links_to_what_was_measured():
    text, _ = report.page({"figure3": synthetic.results("figure3")})
    said = text.partition("\n## What the papers claim\n")[2].partition("\n## Not measured\n")[0]
    assert "[The paper's Figure 3](#the-papers-figure-3)" in said
    assert "\n## The paper's Figure 3\n" in text
    assert "| not measured on this machine | `figure2` |" in said
    assert {len(line.split(" | ")) for line in said.splitlines() if line.startswith("|")} == {5}

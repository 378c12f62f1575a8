import json

import pytest
import ring_model
from ring_model import Model

from numbattn import distributed as nad
from numbattn.distributed.pieces import pieces_of

FLOPS = {"forward": ([1], [700e12]), "backward": ([1], [700e12])}
MODEL = Model(1 << 20, 32, 32, 128, 8, 278e9, 50e9, 0.0, FLOPS)


def test_work_and_messages_are_those_of_the_plan():
    """A step's scores, and the keys that arrive for it at the rank that needs most."""
    ranks = 4
    pieces = pieces_of(MODEL.seqlen, ranks, nad.Simulated(ranks).order)
    tokens = MODEL.seqlen // ranks
    for step in range(1, ranks):
        needed = []
        for rank in range(ranks):
            seen = [(a, b) for a in pieces[rank] for b in pieces[rank - step] if b.first < a.end]
            assert sum(a.length * b.length for a, b in seen) == tokens**2 / 2
            needed.append(sum(b.length for b in {b for _, b in seen}))
        assert max(needed) == tokens
    k_and_v, of_gradients = 2 * 32 * 128 * tokens * 2, 2 * 32 * 128 * tokens * 4
    assert MODEL.message("forward", tokens) == k_and_v
    assert MODEL.message("backward", tokens) == k_and_v + of_gradients
    assert MODEL.kernel("forward", tokens, 32) == pytest.approx(4 * 32 * 128 * tokens**2 / 2 / 700e12)
    assert MODEL.one_gpu("backward") == pytest.approx(2.5 * 4 * 32 * 128 * MODEL.seqlen**2 / 2 / 700e12)


def test_from_which_length_a_step_hides():
    """2 F / B by the heads of keys, 1.2 times that in backward; with two levels, for a node's GPUs together."""
    assert MODEL.hides_from("forward", 50e9) == pytest.approx(2 * 700e12 / 50e9)
    assert MODEL.hides_from("backward", 50e9) == pytest.approx(1.2 * MODEL.hides_from("forward", 50e9))
    grouped = MODEL._replace(heads_k=8)
    assert grouped.hides_from("forward", 50e9) == pytest.approx(MODEL.hides_from("forward", 50e9) / 4)
    for scheme, node, hidden in ((Model.ring, 1, 28000), (Model.two_levels, 8, 28000 / 8)):
        for over, whole in ((1.01, True), (0.9, False)):
            model = MODEL._replace(seqlen=64 * hidden * over, within=1e15)
            share = model.one_gpu("forward") / (64 * scheme(model, "forward", 64))
            assert (share == pytest.approx(1)) == whole, (scheme, node, over)


def test_one_node_and_one_gpu():
    for of in ring_model.PRODUCTS:
        assert MODEL.two_levels(of, 8) == MODEL.ring(of, 8)
        for scheme in ring_model.SCHEMES.values():
            assert scheme(MODEL, of, 1) == pytest.approx(MODEL.one_gpu(of))


def test_what_ulysses_exchanges():
    model = MODEL._replace(heads_k=8, between=1e15)
    rows = 32 + 8 + 8 + 32  # q, k, v, o
    seconds = 7 / 8 * rows * 128 * 2 * (model.seqlen / 64) / 278e9
    assert model.ulysses("forward", 64) - model.one_gpu("forward") / 64 == pytest.approx(seconds)


def test_script(tmp_path, capsys):
    path = tmp_path / "model.json"
    ring_model.main(["--gpus", "8", "1024", "--json", str(path)])
    assert "A model: 1048576 causal tokens" in capsys.readouterr().out
    found = json.loads(path.read_text())
    shares = {(x["gpus"], x["scheme"]): x["share"] for x in found["records"] if x["pass"] == "forward"}
    assert shares[8, "ring"] > 0.95
    assert shares[1024, "ring"] < shares[1024, "two levels"] < shares[1024, "Ulysses in a node"] < 1
    assert [round(x["tokens"], -2) for x in found["hides"]] == pytest.approx([1300, 7000, 1300, 7100], rel=0.1)
    for arguments, message in ((["--heads-k", "4"], "--heads-k: got 4"), (["--gpus", "12"], "--gpus: got 12"),
                               (["--head-dim", "80"], "--head-dim: got 80")):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            ring_model.main(arguments)
        assert message in f"{error.value}{capsys.readouterr().err}"

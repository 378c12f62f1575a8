"""Long-range tasks: what the generators say is right, and the script."""

import json
import statistics
from itertools import product

import numpy as np
import pytest
from paper import figure3, long_range, tasks
from paper.figure3 import OUT_OF_MEMORY, Clock
from paper.long_range import Learner

OPERATORS = {tasks.MIN: min, tasks.MAX: max, tasks.MED: lambda digits: int(statistics.median(digits)),
             tasks.SM: lambda digits: sum(digits) % 10}  # fmt: skip
MAKE = {"listops": tasks.listops, "pathfinder": tasks.pathfinder, "documents": tasks.documents}
SIZES = [("listops", 50), ("pathfinder", 16), ("documents", 40)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_samples(name, size):
    task = MAKE[name](size)
    assert task.seqlen == (size**2 if name == "pathfinder" else size)
    tokens, labels = task.sample(np.random.default_rng(5), 60)
    assert tokens.shape == (60, task.seqlen)
    assert labels.shape == (60,)
    assert 0 <= tokens.min() <= tokens.max() < task.symbols
    assert 0 <= labels.min() < labels.max() < task.classes
    for seed, same in ((5, True), (6, False)):
        again = task.sample(np.random.default_rng(seed), 60)
        assert np.array_equal(again[0], tokens) == same
        assert np.array_equal(again[1], labels) == same


# ------------------------------------------------------------------------------------------------------------ ListOps
def value(tokens):
    """The value of the expression that an iterator's tokens begin with, by recursion."""
    token = next(tokens)
    return OPERATORS[token](list(iter(lambda: value(tokens), tasks.CLOSE))) if token in OPERATORS else token


@pytest.mark.parametrize("seqlen", [1, 3, 4, 20, 300])
def test_values_of_expressions(seqlen):
    tokens, labels = tasks.listops(seqlen).sample(np.random.default_rng(0), 100)
    for expression, label in zip(tokens.tolist(), labels):
        left = iter(expression)
        assert value(left) == label
        assert not list(left)  # it is one expression, of all tokens
    if seqlen == 300:
        assert set(tokens.ravel().tolist()) == set(range(15))
        assert np.bincount(labels).max() < 30  # of 100


# --------------------------------------------------------------------------------------------------------- Pathfinder
def connected(image):
    """Whether one can walk from dot to dot in steps of at most REACH pixels."""
    start, end = (tuple(dot) for dot in np.argwhere(image == 2).tolist())
    seen, todo, steps = {start}, [start], range(-tasks.REACH, tasks.REACH + 1)
    while todo:
        y, x = todo.pop()
        for dy, dx in product(steps, steps):
            near = y + dy, x + dx
            if near not in seen and all(0 <= at < len(image) for at in near) and image[near]:
                seen.add(near)
                todo.append(near)
    return end in seen


@pytest.mark.parametrize("side", [12, 16, 32, 128])
def test_dots_are_connected_or_not(side):
    images, labels = tasks.pathfinder(side).sample(np.random.default_rng(0), 40)
    for image, label in zip(images.reshape(-1, side, side), labels):
        assert connected(image) == label


def test_the_distance_of_the_dots_does_not_tell_the_label():
    images, labels = tasks.pathfinder(32).sample(np.random.default_rng(0), 1000)
    dots = (np.argwhere(image == 2) for image in images.reshape(-1, 32, 32))
    distances = np.array([np.hypot(*(first - second)) for first, second in dots])
    within = [(low <= distances) & (distances < high) for low in range(30) for high in range(low, 30)]
    assert max(np.mean(guess == labels) for guess in within) < 0.57


# ---------------------------------------------------------------------------------------------------------- documents
@pytest.mark.parametrize("held_out", [False, True])
def test_documents_are_of_their_package(held_out):
    texts = [parts[held_out].tobytes() for parts in tasks.packages().values()]
    others = [parts[not held_out].tobytes() for parts in tasks.packages().values()]
    tokens, labels = tasks.documents(2000).sample(np.random.default_rng(0), 10, held_out=held_out)
    for document, label in zip(tokens, labels):
        assert document.tobytes() in texts[label]
        assert document.tobytes() not in others[label]


# ------------------------------------------------------------------------------------------------------------- script
def args_of(*options):
    small = ["--sides", "12", "--contexts", "32", "--tokens", "160", "--minutes", "0", *options]
    return long_range.parse(small, on_gpu=False)


def test_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure3, "cupy", None)
    path = tmp_path / "long_range.json"
    options = ["--sides", "12", "--contexts", "32", "--tokens", "160", "--minutes", "0.01", "--json", str(path)]
    long_range.main(options)
    assert "accuracy" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert {"machine", "arguments", "records"} <= results.keys()
    records = results["records"]
    assert {(x["part"], x["task"], x["seqlen"], x["attention"]) for x in records} == {
        *(("steps", "pathfinder", 144, name) for name in long_range.ATTENTIONS),
        *(("tasks", task, n, name) for task, n in (("listops", 32), ("pathfinder", 144))
          for name in ("numbattn", "standard")), ("documents", "documents", 32, "numbattn")}  # fmt: skip
    for record in records:
        assert record["seconds"] > 0
        if record["part"] == "steps":
            assert record["bytes"] > 0
            continue
        seconds, steps, accuracies = np.transpose(record["curve"])
        assert (np.diff(steps) > 0).all()
        assert (np.diff(seconds) > 0).all()
        assert ((accuracies >= 0) & (accuracies <= 1)).all()
        assert 1 / record["classes"] <= record["guess"] <= 1


def test_a_learner_learns():
    """An expression of one token is its own value."""
    learner = Learner(np, "numbattn", tasks.listops(1), args_of("--lr", "0.01"))
    held_out = tasks.listops(1).sample(np.random.default_rng(1), 50)
    assert learner.accuracy(*held_out) < 0.5
    for _ in range(30):
        learner.step(learner.next())
    assert learner.accuracy(*held_out) == 1


def test_who_has_no_memory_left_is_told(monkeypatch):
    def full(q, k, v):
        raise MemoryError

    monkeypatch.setattr(long_range.model, "standard_attention", full)
    records = long_range.records_of(Clock(), args_of("--parts", "steps"))
    failed = {record["attention"]: record["failed"] for record in records}
    assert failed == {"numbattn": None, "block-sparse": None, "standard": OUT_OF_MEMORY}
    assert long_range.row_of(records[-1])["failed"] == OUT_OF_MEMORY


def test_parts_of_the_paper():
    """Path-X has 128 x 128 pixels; Long Range Arena's ListOps has sequences of 2048, documents have up to 16k."""
    runs = long_range.runs_of(long_range.parse([], on_gpu=True))
    seqlens = {part: {run.make_task().seqlen for run in runs if run.part == part} for part in long_range.PARTS}
    assert seqlens == {"steps": {1024, 4096, 16384, 65536}, "tasks": {2048, 1024},
                       "documents": {512, 1024, 2048, 4096, 8192, 16384}}  # fmt: skip

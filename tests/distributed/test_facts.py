"""A rank that differs is an error on all ranks, not a hang."""

import pickle

import numpy as np
import pytest

import numbattn as na
from numbattn.distributed.facts import Agreed, agreed, failure, value
from numbattn.distributed.messages import Gather, Near
from numbattn.distributed.pieces import RankPlace
from numbattn.distributed.rank import forward
from numbattn.distributed.share import RingOptions

X = np.zeros((2, 32, 8))
SAME = RingOptions(False, None, None, None, None)


def errors(*by_rank, orders=("contiguous",) * 3):
    """The error of each rank, which is given its own (q, k, v, call)."""
    running = [forward(RankPlace(rank, len(by_rank), order), *own)
               for rank, (own, order) in enumerate(zip(by_rank, orders))]  # fmt: skip
    answer = None
    while True:
        messages = []
        found = []
        for generator in running:
            try:
                message = generator.send(answer)
                messages.append(generator.send(message.values) if isinstance(message, Near) else message)
            except Agreed as agreed:
                found.append(f"{type(agreed.error).__name__} {agreed.error}")
        if found:
            assert not messages, "some ranks go on"
            return found
        assert all(isinstance(message, Gather) for message in messages)
        answer = [message.value for message in messages]


@pytest.mark.parametrize(("other", "message"), [
    ((X[..., :7], X[..., :7], X, SAME), "q: got float64 of numpy, (2, ..., 8) on ranks 0, 2, float64 of numpy, "
                                        "(2, ..., 7) on rank 1, expected the same on all ranks"),
    ((*[X.astype(np.float32)] * 3, SAME), "q: got float64 of numpy, (2, ..., 8) on ranks 0, 2, float32"),
    ((X, X, X[0], SAME), "v: got float64 of numpy, (2, ..., 8) on ranks 0, 2, float64 of numpy, (..., 8) on rank 1"),
    ((X, X, X, SAME._replace(causal=True)), "mask: got All() on ranks 0, 2, All(Causal(None)) on rank 1"),
    ((X, X, X, SAME._replace(scale=2.0)), "scale: got 0.35355339059327373 on ranks 0, 2, 2.0 on rank 1"),
    ((X, X, X, SAME._replace(dropout=na.Dropout(0.1, 1))), "dropout: got None on ranks 0, 2, Dropout(p=0.1, seed=1"),
    ((X, X, X, SAME._replace(plan="ring")), "plan: got None on ranks 0, 2, ring on rank 1"),
    ((X, X, X, SAME._replace(score=na.Softcap(2.0))), "score: part 0: got None on ranks 0, 2, Softcap(2.0) on rank 1"),
])  # fmt: skip
def test_differences(other, message):
    same = X, X, X, SAME
    found = errors(same, other, same)
    assert len(set(found)) == 1
    assert found[0].startswith(f"ValueError {message}")


def test_orders_are_compared():
    """Of parts that have the same lengths in either."""
    found = errors(*[(X, X, X, SAME)] * 2, orders=("contiguous", "zigzag"))
    assert found == ["ValueError order: got contiguous on rank 0, zigzag on rank 1, expected the same on all ranks"] * 2


def test_what_decides_what_travels_is_compared_by_value():
    calls = [(X, X, X, SAME._replace(mask=na.Segments([0, end, 64]))) for end in (10, 11)]
    first, second = errors(*calls)
    assert first == second
    assert first.startswith("ValueError mask: got Segments(<int64 array (3,)> of checksum")


def test_a_function_is_what_it_does():
    """Not where it lies, which differs from process to process."""
    def score(slope):
        def function(s, batch, head, i, j, table):
            return s - slope * abs(i - j) + table[i]

        return na.Score(function, arrays=[np.zeros(9)])

    assert value(score(1.0)) == value(score(1.0))
    assert value(score(1.0)) != value(score(2.0))
    assert " at 0x" not in value(score(1.0))
    assert "<float64 array (9,)>" in value(score(1.0))


def test_rows_of_their_own_are_no_difference():
    """Here of one row more than there are queries: an error, but that of the rank alone."""
    calls = [(X, X, X, SAME._replace(mask=np.ones((rows, 64), bool))) for rows in (32, 33)]
    text = "mask: Dense: got 33 rows for queries, expected 64, all of them, or 32, those of this rank"
    assert errors(*calls) == [f"ValueError rank 1: {text}", f"ValueError {text}"]


def test_an_error_of_one_rank_names_it_on_all_others():
    found = errors((X, X, X, SAME), (X, X, X[:, 1:], SAME))
    assert found == ["ValueError rank 1: v: got 31 rows, expected 32, one for each row of k",
                     "ValueError v: got 31 rows, expected 32, one for each row of k"]  # fmt: skip


@pytest.mark.parametrize(("error", "raised"), [
    (failure(ValueError("q: no")), "ValueError('rank 1: q: no')"),
    (failure(KeyError("an alarm")), "KeyError('an alarm')"),
    (pickle.loads(pickle.dumps(failure(ValueError("q: no")))), "ValueError('rank 1: q: no')"),
    (pickle.loads(pickle.dumps(failure(KeyError("an alarm")))), 'RuntimeError("rank 1: KeyError(\'an alarm\')")'),
], ids=["of an argument", "another", "of an argument elsewhere", "another elsewhere"])  # fmt: skip
def test_an_error_of_another_rank(error, raised):
    """It is the error itself if it is none of an argument and this process has it: a signal handler's, say."""
    asks = agreed(RankPlace(0, 2, "zigzag"), {})
    next(asks)
    with pytest.raises(Agreed) as found:
        asks.send([{}, error])
    assert repr(found.value.error) == raised


FAULTS = {
    '{"order": place.order, **own}': "own",
    "if isinstance(found, Failure)": "if False",
    "if gathered.count(gathered[0]) == len(gathered):": "if True:",
    "if values.count(values[0]) < len(values):": "if values.count(values[0]) < len(values) - 1:",
    "isinstance(x, Mask) and isinstance(held, np.ndarray)": "False",
    '"rows" if number == held.ndim + axis else str(n)': "str(n)",
    "distributed/test_driver.py": {
        "except Exception as error:": "except ValueError as error:",
        "if isinstance(error, TypeError | ValueError)": "if isinstance(error, TypeError)",
    },
}

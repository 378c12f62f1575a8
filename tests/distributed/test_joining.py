import numpy as np
import pytest

from numbattn import distributed as nad
from numbattn.distributed.joining import join

WHOLE = np.random.default_rng(0).random((2, 100, 8))


def by_ranks(ring, parts, axis=-2):
    """As where each rank is a process."""
    (found,) = ring._run(one_result(join), {"parts": parts}, axis)
    return found


def one_result(work):
    def working(*given):
        return ((yield from work(*given)),)

    return working


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_on_every_rank(order, axis):
    ring = nad.Simulated(3, order)
    parts = ring.split(WHOLE, axis)
    for found in (ring.join(parts, axis), *by_ranks(ring, parts, axis)):
        np.testing.assert_array_equal(found, WHOLE)


@pytest.mark.parametrize("joined", [lambda ring, *given: ring.join(*given), by_ranks])
@pytest.mark.parametrize(("change", "axis", "message"), [
    (lambda one, other: (other, one), -2, r"parts: got 64 of 100 tokens on rank 0, expected 36: what `split` gives it"),
    (lambda one, other: (one, other[0]), -2, r"parts: got float64 of numpy, \(2, \.\.\., 8\) on rank 0, .* on rank 1"),
    (lambda one, other: (one, other.astype("float32")), -2, "parts: got float64 .* on rank 0, float32 .* on rank 1"),
    (lambda one, other: (one, [3]), -2, "parts: got list, expected arrays of NumPy or CuPy"),
    (lambda one, other: (one, other), 3, "axis: got 3, allowed -3 to 2"),
    (lambda one, other: (one, other), "rows", "axis: got 'rows', expected an integer"),
])  # fmt: skip
def test_what_does_not_fit(joined, change, axis, message):
    ring = nad.Simulated(2)
    parts = list(change(*ring.split(WHOLE)))
    with pytest.raises((TypeError, ValueError), match=message):
        joined(ring, parts, axis)
    np.testing.assert_array_equal(ring.join(ring.split(WHOLE)), WHOLE)


FAULTS = {
    '        pieces_by_rank("parts", lengths, place)': "        pass",
    '    pieces_by_rank("parts", lengths_in(facts), RankPlace(0, len(parts), order))': "    pass",
    "    check_same(facts)": "    pass",
    '"..." if number == axis else str(n)': "str(n)",
    "distributed/test_nccl.py::test_as_on_one_device": {
        "lengths[source], *part.shape[axis + 1 :]": "part.shape[axis], *part.shape[axis + 1 :]",
    },
}

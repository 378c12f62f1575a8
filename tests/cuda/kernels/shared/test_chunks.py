"""Chunks of keys: one after the other, the same ones in sequences of any length."""

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.chunks import (
    ENDS,
    SIZES,
    chunks_between,
    count_of_chunks,
    first_key,
    longest_steps,
)
from numbattn.cuda.kernels.shared.visibility import MaskArgs
from numbattn.cuda.tile import SharedMemory, thread_index
from tests.tools.launch import launch

SHORT, LONG, MANY = SIZES[0], SIZES[-1], ENDS[-1]
STARTS = [start for run in map(range, (0, *ENDS), (*ENDS, MANY + 4 * LONG), SIZES) for start in run]
AT_ENDS = [*ENDS, *np.add(ENDS, 1), *np.add(ENDS, SIZES[1:])]


def test_chunks_begin_where_those_before_end():
    def kernel(found):
        if thread_index() < found.shape[0]:
            found[thread_index()] = first_key(thread_index())

    found = np.zeros(len(STARTS), np.int32)
    launch(kernel, (1, 1, 1), 256, 0, found)
    assert found.tolist() == STARTS


@pytest.mark.parametrize("keys", [0, 1, SHORT, SHORT + 1, *AT_ENDS, MANY + LONG + 5])
def test_a_sequence_has_the_chunks_that_begin_in_it(keys):
    assert count_of_chunks(keys) == sum(start < keys for start in STARTS)


def test_keys_lie_in_chunks():
    def kernel(first, end, found):
        i = thread_index()
        if i < first.shape[0]:
            found[i, 0], found[i, 1] = chunks_between(first[i], end[i])

    ranges = [(0, 1), (0, SHORT), (SHORT - 1, SHORT + 1), (5, MANY), (7, 7), (9, 3), (MANY + LONG, MANY + 2 * LONG)]
    ranges += [(end + x, end + y) for end, size in zip(ENDS, SIZES[1:]) for x, y in ((-1, 1), (0, size))]
    first, end = np.array(ranges, np.int32).T.copy()
    found = np.zeros((len(ranges), 2), np.int32)
    launch(kernel, (1, 1, 1), 32, 0, first, end, found)
    ends = [*STARTS[1:], np.inf]
    for (low, high), (begin, after) in zip(ranges, found.tolist()):
        wanted = [i for i, (start, stop) in enumerate(zip(STARTS, ends)) if start < high and low < stop]
        assert list(range(begin, after)) == (wanted if low < high else [])


@pytest.mark.parametrize("lengths", [[5], [0], [3, SHORT + 1, -7], [2 * SHORT + 9, *range(40)], [2**30, 2]])
@pytest.mark.parametrize("by_head", [False, True])
def test_the_longest_sequence(lengths, by_head):
    """Its chunks, no more than the arrays have, which are taken where heads may have lengths of their own."""
    shared, keys = SharedMemory(), 10 * SHORT
    count_chunks, counted = longest_steps(shared, ("keys",), by_head)

    def kernel(lengths, found):
        count_chunks(MaskArgs(0, 0, 1, keys, (lengths,)))
        if thread_index() == 0:
            found[0] = counted(np.int32(11))

    found = np.zeros(1, np.int32)
    launch(kernel, (1, 1, 1), 32, shared.nbytes, np.array(lengths, np.int32)[:, None], found)
    assert found[0] == (11 if by_head else count_of_chunks(min(max(lengths), keys)))


FAULTS = {
    "chunk_of(keys - 1)) + 1": "chunk_of(keys))",
    "chunk_of(end - 1) + 1)": "chunk_of(end))",
    "maximum(chunk * C - FROM_C, chunk * D - FROM_D)": "chunk * C - FROM_C",
    "(key + FROM_B) // B": "key // B",
    "FROM_D = 2 * FROM_C": "FROM_D = FROM_C",
    "row_max(load(lengths, LENGTHS, first), longest)": "row_max(load(lengths, LENGTHS, first))",
    'if "keys" not in mask or by_head:': 'if "keys" not in mask:',
    ", mask.keys))[1]": ", 2**30))[1]",
}

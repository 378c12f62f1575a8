"""Numbers by which blocks wait for others."""

import numpy as np
import pytest

from numbattn.cuda.tile import WARP, DeadlockError, block_index, post, thread_index, wait_for_post
from tests.tools.launch import MISUSED, launch, simulated
from tests.tools.ptx import DeadlockError as InterpretedDeadlock


def take_turns(turns, y):
    """Warps of a block in turn, the last one first."""
    if thread_index() % WARP == 0:
        warp = block_index() * 4 + 3 - thread_index() // WARP
        wait_for_post(turns, 0, warp)
        y[warp] = turns[0]
        post(turns, 0, warp + 1)


def test_turns():
    """Also those of blocks that run one after the other."""
    turns, y = np.zeros(1, np.uint32), np.zeros(8)
    launch(take_turns, (2, 1, 1), 4 * WARP, 0, turns, y)
    assert turns[0] == 8
    np.testing.assert_array_equal(y, np.arange(8))


def test_more_is_enough():
    turns, y = np.array([7], np.uint32), np.zeros(1)

    def kernel(turns, y):
        wait_for_post(turns, 0, 5)
        y[0] = turns[0]

    launch(kernel, (1, 1, 1), 1, 0, turns, y)
    assert y[0] == 7


def test_nobody_posts():
    def kernel(turns):
        if thread_index() == 0:
            wait_for_post(turns, 0, 1)

    error, text = (DeadlockError, "threads 0 wait for a post") if simulated() else (
        InterpretedDeadlock, "threads 0 wait for a number in global memory")  # fmt: skip
    with pytest.raises(error, match=text):
        launch(kernel, (1, 1, 1), WARP, 0, np.zeros(1, np.uint32))


@pytest.mark.parametrize("turns", [np.zeros(1, np.int32), np.zeros((1, 1), np.uint32)])
def test_posts_are_a_line_of_uint32(turns):
    def kernel(turns):
        post(turns, 0, 1)

    with pytest.raises(MISUSED, match=r"post: got .*, expected uint32 of 1"):
        launch(kernel, (1, 1, 1), WARP, 0, turns)


FAULTS = {
    "while array[index] < number:": "if False:",
    "    simulator.block().ready.extend(_waiting())\n": "",
    "setp.ge.u32": "setp.gt.u32",
}

import numpy as np
import pytest

from numbattn.cuda.kernels.shared.warps import warp_specialised
from numbattn.cuda.tile import WARP, WARPGROUP, device, simulate, thread_index


@device
def nothing():
    pass


@pytest.mark.parametrize(("consumers", "registers", "blocks", "allowed"), [
    (2, (24, 240), 1, True), (2, (32, 240), 1, False), (3, (32, 160), 1, True), (4, (24, 120), 1, False),
    (4, (32, 112), 1, True), (1, (24, 232), 2, True), (1, (32, 232), 2, False),
])  # fmt: skip
def test_registers_that_a_block_is_launched_with(consumers, registers, blocks, allowed):
    """On a GPU, and nowhere else, whoever asks for more waits for ever."""
    if allowed:
        warp_specialised((), consumers, registers, nothing, blocks=blocks)
        return
    with pytest.raises(ValueError, match="registers: got {0} and {2} times {1}, at most".format(*registers, consumers)):
        warp_specialised((), consumers, registers, nothing, blocks=blocks)


def test_who_does_what():
    """A warpgroup consumes, then a thread of each of two warps produces, and the next warp helps."""

    @device
    def mark(y, number):
        y[thread_index()] = number

    @device
    def help_with(number, y):
        y[thread_index()] = 4 + number

    begin, take_roles = warp_specialised((), 1, (24, 232), mark, mark, mark, helpers=(1, help_with))

    def kernel(y):
        begin()
        take_roles((y, 1), ((y, 2), (y, 3), (y,)))

    y = np.zeros(2 * WARPGROUP)
    simulate(kernel, (1, 1, 1), 2 * WARPGROUP, 0, y)
    rest = np.zeros(WARPGROUP)
    rest[[0, WARP]] = 2, 3
    rest[2 * WARP : 3 * WARP] = 4
    np.testing.assert_array_equal(y, [*np.ones(WARPGROUP), *rest])


FAULTS = {
    "first + producers, producers": "first, producers",
    "0 <= number < COUNT": "0 <= number",
    "wanted > given": "wanted > given + 8",
    "// 8 * 8 * groups": "* groups",
    "REGISTERS // blocks //": "REGISTERS //",
}

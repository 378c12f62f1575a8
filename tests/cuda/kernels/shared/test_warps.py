import pytest

from numbattn.cuda.kernels.shared.warps import warp_specialised
from numbattn.cuda.tile import device


@device
def nothing():
    pass


@pytest.mark.parametrize(("consumers", "registers", "allowed"), [
    (2, (24, 240), True), (2, (32, 240), False), (3, (32, 160), True), (4, (24, 120), False), (4, (32, 112), True),
])  # fmt: skip
def test_registers_that_a_block_is_launched_with(consumers, registers, allowed):
    """On a GPU, and nowhere else, whoever asks for more waits for ever."""
    if allowed:
        warp_specialised((), consumers, registers, nothing)
        return
    with pytest.raises(ValueError, match="registers: got {0} and {2} times {1}, at most".format(*registers, consumers)):
        warp_specialised((), consumers, registers, nothing)


FAULTS = {
    "wanted > given": "wanted > given + 8",
    "// 8 * 8 * groups": "* groups",
}

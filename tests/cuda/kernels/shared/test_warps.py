import pytest

from numbattn.cuda.kernels.shared.warps import warp_specialised
from numbattn.cuda.tile import device


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


FAULTS = {
    "wanted > given": "wanted > given + 8",
    "// 8 * 8 * groups": "* groups",
    "REGISTERS // blocks //": "REGISTERS //",
}

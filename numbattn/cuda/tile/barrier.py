"""Where threads wait for each other. The barrier of the whole block is Numba's: cuda.syncthreads()."""

from numba.cuda import types

from .emit import VOID, asm
from .simulator import sync_lanes
from .world import primitive


@primitive
def sync_warp():
    """What the lanes of this warp have written to shared memory is now seen by all of them."""
    sync_lanes()


@sync_warp.lowering
def sync_warp():
    def generate(b):
        asm(b, "bar.warp.sync 0xffffffff;", VOID, effect=True)

    return types.void(), generate

"""Where threads wait for each other, and what warpgroups settle among themselves.

The barrier of the whole block is Numba's: cuda.syncthreads(). Of the 16 barriers that a block has, it is number 0;
the turns take the next ones, then comes one for each warpgroup.
"""

from numba.cuda import types

from .emit import I32, VOID, asm, thread_index
from .simulator import sync_lanes
from .world import primitive

WARPGROUP_BITS = 7
WARPGROUP = 1 << WARPGROUP_BITS  # threads
FIRST_TURN, FIRST_OF_WARPGROUPS = 1, 8


@primitive
def sync_warp():
    """What the lanes of this warp have written to shared memory is now seen by all of them."""
    sync_lanes()


@sync_warp.lowering
def sync_warp():
    def generate(b):
        asm(b, "bar.warp.sync 0xffffffff;", VOID, effect=True)

    return types.void(), generate


def emit_warpgroup(b):
    return b.lshr(thread_index(b), I32(WARPGROUP_BITS))


@primitive
def warpgroup_index():
    """Which warpgroup of the block this thread belongs to, as int32."""
    raise NotImplementedError


@warpgroup_index.lowering
def warpgroup_index():
    return types.int32(), emit_warpgroup


@primitive
def sync_warpgroup():
    """What the threads of this warpgroup have written to shared memory is now seen by all of them."""
    raise NotImplementedError


@sync_warpgroup.lowering
def sync_warpgroup():
    def generate(b):
        barrier = b.add(emit_warpgroup(b), I32(FIRST_OF_WARPGROUPS))
        asm(b, f"bar.sync $0, {WARPGROUP};", VOID, barrier, effect=True)

    return types.void(), generate


@primitive
def take_turn(count):
    """Wait until it is this warpgroup's turn, of the block's first `count` ones. The first turn has to be passed, too.

    A count of 1 waits for nobody.
    """
    raise NotImplementedError


@primitive
def pass_turn(count):
    """The next warpgroup's turn, of the block's first `count` ones; after the last one it is the first one's."""
    raise NotImplementedError


def _lower_turn(instruction, steps):
    def lower(count):
        if not isinstance(count, types.IntegerLiteral):
            return None
        n = count.literal_value

        def generate(b, _):
            if n > 1:
                turn = b.urem(b.add(emit_warpgroup(b), I32(steps)), I32(n))
                asm(b, f"{instruction} $0, {2 * WARPGROUP};", VOID, b.add(turn, I32(FIRST_TURN)), effect=True)

        return types.void(count), generate

    return lower


take_turn = take_turn.lowering(_lower_turn("bar.sync", 0))
pass_turn = pass_turn.lowering(_lower_turn("bar.arrive", 1))


@primitive
def give_registers(left):
    """Each thread of this warpgroup gives back registers, so that it has `left` of them."""


@primitive
def take_registers(count):
    """Each thread of this warpgroup gets registers, so that it has `count` of them, once others have given so many."""


def _lower_registers(how):
    def lower(count):
        if not isinstance(count, types.IntegerLiteral):
            return None
        text = f"setmaxnreg.{how}.sync.aligned.u32 {count.literal_value};"
        return types.void(count), lambda b, _: asm(b, text, VOID, effect=True)

    return lower


give_registers = give_registers.lowering(_lower_registers("dec"))
take_registers = take_registers.lowering(_lower_registers("inc"))

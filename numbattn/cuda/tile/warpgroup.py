"""Products by a warpgroup on Hopper's tensor cores, which run while the warpgroup does something else.

`dot` starts one of two tiles in shared memory, or of an `operand` in registers and a tile; `wgmma_wait` waits for it.
Until then the sum must not be touched and the tiles must not change.

    >>> shared, SUMS, ROWS = SharedMemory(), wgmma(64), simt(64, 64, 128, 16, 4)
    >>> X, Y = (shared.boxes(64, 64, np.float16) for _ in range(2))
    >>> def kernel(x, z):
    ...     put(allocate(X), load(x, ROWS, 0))
    ...     put(allocate(Y), load(x, ROWS, 0))
    ...     fence_async_proxy()
    ...     sync_warpgroup()
    ...     S = wgmma_wait(dot(SUMS, allocate(X), allocate(Y).T), 0)
    ...     save(z, wgmma_wait(dot(SUMS, operand(S, Y), allocate(Y)), 0), 0)
    >>> x = np.eye(64, dtype=np.float16) * 2
    >>> run(kernel, x, np.zeros((64, 64)), threads=128)[:2, :3]
    array([[8., 0., 0.],
           [0., 8., 0.]])
"""

from dataclasses import dataclass

import numpy as np

from ..compiler import TypingError, held_as_llvm, ir, types
from .boxes import ALIGNMENT, CHUNK_BYTES, ROW_BYTES, Boxes
from .conversion import HALVES, left_pairs, round_to
from .elementwise import maximum
from .emit import I32, VOID, asm, asm_in_place
from .fragment import HALF_FLOATS, Fragment, check_dtype, check_tile, element_type, name_of
from .fragment import fragment as pack
from .fragment import registers as unpack
from .global_memory import places
from .layout import WARPGROUP, WARPGROUP_ROWS, Layout, wgmma
from .races import RaceError
from .simulator import Barrier, barrier, of_block, shared_memory, thread_index
from .synchronisation import demand_literal, warpgroup_of
from .world import primitive

DEPTH = 16  # of k, in one instruction
SWIZZLE_128 = 1 << 30  # in the upper half of a descriptor


@dataclass(frozen=True)
class Operand:
    """What `operand` returns in plain Python: only `dot` takes it."""

    layout: Layout
    registers: np.ndarray

    @property
    def dtype(self):
        return self.registers.dtype


@held_as_llvm
class OperandType(types.Type):
    """A tile in registers as a left operand: neighbours in a row, rounded, in pairs."""

    def __init__(self, layout, dtype):
        self.layout, self.dtype = layout, dtype
        super().__init__(f"Operand({dtype} {layout})")

    @property
    def key(self):
        return self.layout, self.dtype

    @property
    def llvm(self):
        rows, cols = self.layout.slots
        return ir.ArrayType(I32, rows * cols // 2)


@primitive
def operand(tile, plan):
    """A tile of sums, rounded to the dtype of `plan`, as the left operand of products there. See `warpgroup`.

    >>> Y, SUMS = SharedMemory().boxes(64, 64, np.float16), wgmma(64)
    >>> def kernel(y, z):
    ...     put(allocate(Y), load(y, SUMS, 0))
    ...     fence_async_proxy()
    ...     sync_warpgroup()
    ...     S = full(SUMS, np.float32(1 / 3))
    ...     save(z, wgmma_wait(dot(SUMS, operand(S, Y), allocate(Y)), 0), 0)
    >>> run(kernel, np.eye(64, dtype=np.float16), np.zeros((1, 2)), threads=128)
    array([[0.33325195, 0.33325195]])
    """
    _check_operand(tile, plan)
    return Operand(tile.layout, round_to(plan.dtype, tile.registers))


@primitive
def positive_operand(tile, plan):
    """Like `operand`, with 0 for negative sums: it takes no extra time.

    >>> Y, SUMS = SharedMemory().boxes(64, 64, np.float16), wgmma(64)
    >>> def kernel(y, z):
    ...     put(allocate(Y), load(y, SUMS, 0))
    ...     fence_async_proxy()
    ...     sync_warpgroup()
    ...     S = full(SUMS, convert(col_index(SUMS, -2), np.float32))  # rows of -2, -1, 0, 1...
    ...     save(z, wgmma_wait(dot(SUMS, positive_operand(S, Y), allocate(Y)), 0), 0)
    >>> run(kernel, np.eye(64, dtype=np.float16), np.zeros((1, 6)), threads=128)
    array([[0., 0., 0., 1., 2., 3.]])
    """
    return operand(maximum(tile, 0), plan)


def _lower_operand(relu):
    def lower(tile, plan):
        _check_operand(tile, plan.value)
        out = OperandType(tile.layout, element_type(plan.value.dtype))

        def generate(b, value, _):
            found = ir.Constant(ir.ArrayType(I32, tile.layout.rows.slots * tile.layout.cols.slots // 2), ir.Undefined)
            if not plan.value.cols:                             # products there read nothing
                return found
            for i, pair in enumerate(left_pairs(b, out.dtype, unpack(b, tile, value), relu)):
                found = b.insert_value(found, pair, i)
            return found

        return out(tile, plan), generate

    return lower


@primitive
def operand_columns(operand, part, parts):
    """Some columns of an operand, one of `parts` parts, both literals: a multiple of 16. See `warpgroup`.

    >>> Y, SUMS = SharedMemory().boxes(16, 64, np.float16), wgmma(64)
    >>> def kernel(x, y, z):
    ...     put(allocate(Y), load(y, wgmma(64), 0))
    ...     fence_async_proxy()
    ...     sync_warpgroup()
    ...     left = operand_columns(operand(load(x, SUMS, 0), Y), 3, 4)
    ...     save(z, wgmma_wait(dot(SUMS, left, allocate(Y)), 0), 0)
    """
    layout = part_of_layout(operand.layout, parts)
    slots = layout.cols.slots
    return Operand(layout, operand.registers[:, part * slots : (part + 1) * slots])


@operand_columns.lowering
def operand_columns(operand, part, parts):
    if not (isinstance(part, types.IntegerLiteral) and isinstance(parts, types.IntegerLiteral)):
        return None
    layout = part_of_layout(operand.layout, parts.literal_value)
    out, first = OperandType(layout, operand.dtype), part.literal_value * layout.cols.slots

    def generate(b, value, *_):
        found = ir.Constant(out.llvm, ir.Undefined)
        for i in range(layout.cols.slots):                      # rows of slots are two, pairs are of two columns
            found = b.insert_value(found, b.extract_value(value, first + i), i)
        return found

    return out(operand, part, parts), generate


def part_of_layout(layout, parts):
    """The layout of one of several parts of the columns of a tile of sums."""
    cols = layout.shape[1]
    if cols % (parts * DEPTH):
        raise TypingError(f"operand_columns: {layout} has no {parts} parts of a multiple of {DEPTH} columns")
    return wgmma(cols // parts)


operand = operand.lowering(_lower_operand(relu=False))
positive_operand = positive_operand.lowering(_lower_operand(relu=True))


def _check_operand(tile, plan):
    check_tile("operand", tile, {"float32"})
    check_dtype("operand", plan.dtype, HALF_FLOATS)
    if tile.layout.unit != "wgmma":
        raise TypingError(f"operand: {tile.layout} is no tile of sums of a warpgroup")


class InFlight(Fragment):
    """The sum of a product in plain Python that is not there yet: only `dot` and `wgmma_wait` take it."""

    __slots__ = ("sums", "work")

    def __init__(self, layout, sums, work):
        self.layout, self.sums, self.work = layout, sums, work

    @property
    def dtype(self):
        return self.sums.dtype

    @property
    def registers(self):
        raise RaceError("the sum of a product is used before `wgmma_wait`")


class Products(Barrier):
    """The barrier at which a warpgroup's threads meet for each product: there have been as many products as phases."""

    def __init__(self, what, count):
        super().__init__(what, count)
        self.of = None  # the next product: the layout of its sum, operands in shared memory
        self.shares, self.lefts = [], []  # what threads bring: shares of the sum, and of a left operand in registers
        self.sums = None  # those of the last product
        first = thread_index() // WARPGROUP * WARPGROUP
        self.threads = slice(first, first + WARPGROUP)

    def meet(self, shared):
        """All have done their share: after `wgmma_wait` a thread knows that of all, and that none of them waits for
        anything earlier. Otherwise it orders nothing."""
        shared.merge_waits(self.threads)


def _products():
    return barrier(f"a product of warpgroup {warpgroup_of()}", WARPGROUP, Products)


def start_product(acc, x, y):
    """acc + x @ y, in flight, in plain Python: each thread brings its registers, and the last to come multiplies for
    all.

    The product is a piece of background work, see races.SharedMemory.
    """
    products, at, tile = _products(), places(acc.layout), None if isinstance(x, Operand) else x
    work = shared_memory().unit(of_block(products.what)), products.phases + 1
    if products.shares and products.of != (acc.layout, tile, y):
        raise ValueError("dot: the threads of a warpgroup multiply different tiles")
    products.of = acc.layout, tile, y
    products.shares.append((at, acc.sums if isinstance(acc, InFlight) else acc.registers))
    if not tile:
        products.lefts.append((places(x.layout), x.registers))
    if len(products.shares) == WARPGROUP:
        whole, together = (slice(None), slice(None)), (work, products.threads)
        right = y.read(*whole, *together)
        left = tile.read(*whole, *together) if tile else _whole(
            (WARPGROUP_ROWS, len(right)), right.dtype, products.lefts)  # fmt: skip
        sums = _whole(acc.layout.shape, acc.dtype, products.shares)
        products.sums = sums + left.astype(acc.dtype) @ right.astype(acc.dtype)
        products.shares, products.lefts = [], []
    products.sync()
    return InFlight(acc.layout, products.sums[at], work)


def _whole(shape, dtype, shares):
    """The matrix that threads have these shares of."""
    whole = np.empty(shape, dtype)
    for at, registers in shares:
        whole[at] = registers
    return whole


@primitive
def wgmma_wait(tile, later):
    """The sum of a product, once all products that were started are there, except for the last `later` ones.

    It stays in flight if it is one of those itself; then what earlier ones have read is free.
    ptxas moves the wait up, before everything that does not need it to be over. `later` is a literal. See `warpgroup`.

    >>> X, SUMS = SharedMemory().boxes(64, 64, np.float16), wgmma(64)
    >>> def kernel(x, y, z):
    ...     put(allocate(X), load(x, SUMS, 0))
    ...     fence_async_proxy()
    ...     sync_warpgroup()
    ...     S = dot(SUMS, allocate(X), allocate(X))
    ...     T = dot(SUMS, allocate(X), allocate(X).T)
    ...     save(y, wgmma_wait(S, 1), 0)  # T may still be in flight
    ...     save(z, wgmma_wait(T, 0), 0)
    >>> run(kernel, np.eye(64, dtype=np.float16), np.zeros((64, 64)), np.zeros((1, 2)), threads=128)
    array([[1., 0.]])
    """
    _check_wait(tile)
    demand_literal("wgmma_wait", later)
    if not isinstance(tile, InFlight):
        return tile
    unit, number = tile.work
    over = _products().phases - later
    shared_memory().note_end(unit, over)
    return tile if number > over else Fragment(tile.layout, tile.sums)


@wgmma_wait.lowering
def wgmma_wait(tile, later):
    _check_wait(tile)
    if not isinstance(later, types.IntegerLiteral):
        return None
    text = f"wgmma.wait_group.sync.aligned {later.literal_value};"

    def generate(b, value, _):
        if not tile.layout.cols.size:
            asm(b, text, VOID, effect=True)
            return value
        return pack(b, tile, by_rows(asm_in_place(b, text, in_order(unpack(b, tile, value)))))

    return tile(tile, later), generate


def _check_wait(tile):
    check_tile("wgmma_wait", tile, {"float32"})
    if tile.layout.unit != "wgmma":
        raise TypingError(f"wgmma_wait: {tile.layout} is no tile of sums of a warpgroup")


def check_wgmma(layout, total, x, right):
    """Check a product, in both worlds. layout, total: the sum's; x: the left operand; right: the right one's place."""
    (rows, cols), depth = layout.shape, right.shape[0]
    in_registers = isinstance(x, Operand | OperandType)
    if not in_registers and not hasattr(x, "plan"):
        raise TypingError("dot: a warpgroup takes a tile in registers as an `operand`")
    dtypes = {name_of(x.dtype if in_registers else x.plan.dtype), name_of(right.dtype)}
    if len(dtypes) > 1 or not dtypes <= HALF_FLOATS or total != "float32":
        raise TypingError("dot: a warpgroup multiplies float16 or bfloat16 and adds in float32")
    if in_registers and x.layout.rows != layout.rows:
        raise TypingError(f"dot: {x.layout} is no left operand of {layout}")
    for place in (right,) if in_registers else (x.plan, right):
        if not isinstance(place, Boxes):
            raise TypingError(f"dot: {place} is no tile of boxes")
    if rows != WARPGROUP_ROWS or cols > 256 or depth % DEPTH:
        raise TypingError(f"dot: a warpgroup takes {WARPGROUP_ROWS} rows, up to 256 columns, multiples of {DEPTH} of k")


def emit_wgmma(acc, x, y):
    """generate(builder, registers or None, left, right), which starts a product and returns the sum's registers."""
    (rows, cols), depth, in_registers = acc.layout.shape, y.plan.shape[0], isinstance(x, OperandType)

    def generate(b, value, left, right):
        sums = [None] * (rows * cols // 128) if value is None else in_order(unpack(b, acc, value))
        ys = InShared(b, y.plan, right, k_axis=0)
        xs = None if in_registers else InShared(b, x.plan, left, k_axis=1)
        asm(b, "wgmma.fence.sync.aligned;", VOID, effect=True)
        for k in range(0, depth if cols else 0, DEPTH):         # of no columns an empty group: waits count groups
            a = InRegisters([b.extract_value(left, k // 4 + i) for i in range(4)]) if in_registers else xs.at(k)
            sums = multiply(b, HALVES[y.dtype], cols, sums, a, ys.at(k))
        asm(b, "wgmma.commit_group.sync.aligned;", VOID, effect=True)
        return pack(b, acc, by_rows(sums))

    return generate


def in_order(rows):
    """Registers in the instruction's order: two of a row, two of the row 8 below, then the next 8 columns."""
    upper, lower = rows
    return [register for c in range(0, len(upper), 2) for register in (*upper[c : c + 2], *lower[c : c + 2])]


def by_rows(sums):
    return [[sums[i + j] for i in range(first, len(sums), 4) for j in range(2)] for first in (0, 2)]


def multiply(b, kind, cols, sums, left, right):
    """sums + left @ right, for 16 of k; None as sums is zeros."""
    names = [f"${i}" for i in range(len(sums) + len(left.operands) + len(right.operands))]
    d, x, y = names[: len(sums)], names[len(sums) : -len(right.operands)], names[-len(right.operands) :]
    text = (
        f"{{ .reg .pred p; .reg .b32 at; .reg .b64 x, y; {left.describe('x', *x)} {right.describe('y', *y)} "
        f"setp.ne.b32 p, {int(sums[0] is not None)}, 0; wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{kind}.{kind} "
        f"{{{', '.join(d)}}}, {left.name('x', *x)}, {right.name('y', *y)}, p, 1, 1{left.turned}{right.turned}; }}"
    )
    return asm_in_place(b, text, sums, *left.operands, *right.operands)


class InRegisters:
    """A left operand in registers, 16 of k at a time."""

    turned = ""

    def __init__(self, registers):
        self.operands = registers

    def describe(self, variable, *names):
        return ""

    def name(self, variable, *names):
        return "{" + ", ".join(names) + "}"


class InShared:
    """An operand in shared memory, 16 of k at a time, as the descriptor that wgmma takes.

    Its rows are contiguous along k, or it is turned: contiguous along the other axis. Constants go into the
    instruction: in registers, ptxas would keep a descriptor for each k across a loop.
    """

    def __init__(self, b, plan, pointer, k_axis, k=0):
        self.b, self.plan, self.pointer, self.k_axis = b, plan, pointer, k_axis
        is_turned = plan.transposed == bool(k_axis)
        self.turned = f", {int(is_turned)}"
        if is_turned:
            nbytes = k * ROW_BYTES
        else:
            box, col = divmod(k, plan.width)
            nbytes = box * plan.box_bytes + col * plan.dtype.itemsize
        # from box to box of a turned operand; otherwise ignored
        lead = plan.box_bytes if is_turned else CHUNK_BYTES
        self.low = (lead >> 4 << 16) + (nbytes >> 4)
        self.high = SWIZZLE_128 | ALIGNMENT >> 4  # from 8 rows to the next 8
        # 14 bits; in a cluster there are more, which say whose memory it is
        self.operands = [b.and_(b.lshr(b.ptrtoint(pointer, I32), I32(4)), I32(0x3FFF))]

    def at(self, k):
        return InShared(self.b, self.plan, self.pointer, self.k_axis, k)

    def describe(self, variable, start):
        return f"add.u32 at, {start}, {self.low}; mov.b64 {variable}, {{at, {self.high}}};"

    def name(self, variable, start):
        return variable

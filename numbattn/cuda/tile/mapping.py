"""Any function of numbers, applied to each element of a tile, or to its place.

The function is compiled by Numba and sees floats and integers, as it would elsewhere. Row and column of an element are
passed as a Place, an integer that is also a float: converting each would take as long as an exponential.
"""

import math
import operator
from functools import partial

import numpy as np

from ...functions.compiled.dual import FUNCTIONS, Dual
from ...functions.compiled.elementary import ELEMENTARY
from ...functions.compiled.numpy_functions import logaddexp
from ..compiler import TypingError, extend, extend_by_conversion, held_as_llvm, ir, lower_cast, types
from .elementwise import emit_minimum
from .emit import F32, F64, I1, I32, base, call, in_own_block
from .fragment import FLOATS, LLVM, Fragment, FragmentType, check_tile, fragment, registers
from .global_memory import places as places_of
from .integers import COMPARISONS, INDEX, Counting, IndexType, resized
from .world import primitive

FREE = ("nsz",)  # integers have a single 0
AT_ONCE = 32  # elements that look something up together: see global_memory.FEW
SMALL = 2**24  # a Place plus a constant up to this is a Place; larger ones may exceed float32, or many of them int32


@held_as_llvm
class PlaceType(Counting):
    """The position of an element. Sums and differences of positions, and with small constants, are positions again;
    with other integers they have 64 bits.

    It is an int32 and, as a float, exact below 2**24, the sum of a part that depends on the thread and a constant that
    the compiler knows: the difference of two takes one addition for each element, and no vector is kept.
    """

    def __init__(self, real):
        self.real = real
        super().__init__(f"Place({real})")

    @property
    def llvm(self):
        return ir.LiteralStructType([I32, LLVM[self.real], LLVM[self.real]])

    def unify(self, typingctx, other):
        """The type of a variable that has two types, on two paths to a line."""
        if isinstance(other, types.Integer):
            return types.int64
        return other if isinstance(other, types.Float | Dual) else None


def place(b, *parts):
    value = ir.Constant(ir.LiteralStructType([part.type for part in parts]), ir.Undefined)
    for i, part in enumerate(parts):
        value = b.insert_value(value, part, i)
    return value


def parts_of(b, x):
    return [b.extract_value(x, i) for i in range(3)]


def real_of(b, x):
    _, start, offset = parts_of(b, x)
    return b.fadd(start, offset, flags=FREE)


# -------------------------------------------------------------------------------------------------------- conversions
@lower_cast(types.IntegerLiteral, PlaceType)
def from_literal(context, b, source, target, x):
    real = context.get_value_type(target.real)
    return place(b, I32(source.literal_value), ir.Constant(real, 0.0), ir.Constant(real, float(source.literal_value)))


@lower_cast(PlaceType, types.Integer)
def to_integer(context, b, source, target, x):
    return resized(b, b.extract_value(x, 0), target.bitwidth, signed=True)


@lower_cast(PlaceType, types.Boolean)
def to_truth(context, b, source, target, x):
    return b.icmp_signed("!=", b.extract_value(x, 0), I32(0))


@lower_cast(PlaceType, types.Float)
def to_float(context, b, source, target, x):
    return context.cast(b, real_of(b, x), source.real, target)


@lower_cast(PlaceType, Dual)
def to_dual(context, b, source, target, x):
    return context.cast(b, context.cast(b, real_of(b, x), source.real, target.dtype), target.dtype, target)


# ---------------------------------------------------------------------------------------------------------- operators
def emit_sum(name):
    """Emit "add" or "sub"."""

    def emit(b, x, y):
        (one, *ones), (other, *others) = parts_of(b, x), parts_of(b, y)
        reals = [getattr(b, f"f{name}")(*two, flags=FREE) for two in zip(ones, others)]
        return place(b, getattr(b, name)(one, other), *reals)

    return emit


def emit_chosen(sign):
    def emit(b, x, y):
        first = b.icmp_signed(sign, b.extract_value(x, 0), b.extract_value(y, 0))
        return b.select(first, collapsed(b, x), collapsed(b, y))

    return emit


def emit_negative(b, x):
    whole, start, offset = parts_of(b, x)
    return place(b, b.neg(whole), *[b.fsub(ir.Constant(part.type, -0.0), part) for part in (start, offset)])


def emit_abs(b, x):
    whole, real, nothing = parts_of(b, collapsed(b, x))
    size = b.select(b.icmp_signed("<", whole, I32(0)), b.neg(whole), whole)
    return place(b, size, call(b, "__nv_fabsf" if real.type == F32 else "__nv_fabs", real.type, real), nothing)


def collapsed(b, x):
    """The value x with its two parts added."""
    real = real_of(b, x)
    return place(b, b.extract_value(x, 0), real, ir.Constant(real.type, 0.0))


KEPT = {  # operations on Places and integers that give a Place again
    operator.add: emit_sum("add"), operator.sub: emit_sum("sub"),
    operator.neg: emit_negative, operator.pos: lambda b, x: x, abs: emit_abs,
    min: emit_chosen("<"), max: emit_chosen(">"),
}  # fmt: skip
OTHERS = (
    operator.mul, operator.floordiv, operator.mod, operator.pow, operator.and_, operator.or_, operator.xor,
    operator.lshift, operator.rshift, operator.invert, operator.not_, divmod, pow, bool, *COMPARISONS
)  # fmt: skip
MODULES = math, np
OF_TWO = "atan2", "hypot", "copysign", "pow"
OF_FLOATS = {operator.truediv, operator.itruediv, float, round, math.floor, math.ceil, math.trunc}
OF_FLOATS |= {getattr(module, name) for module in MODULES for name in FUNCTIONS if hasattr(module, name)}
OF_FLOATS |= {getattr(math, name) for name in (*OF_TWO, "isnan", "isinf", "isfinite")}
OF_FLOATS |= {logaddexp, *ELEMENTARY.values()}


def first_place(kinds):
    """The first type of a Place among these, if there is one."""
    return next((x for x in kinds if isinstance(x, PlaceType)), None)


def is_small(x):
    return isinstance(x, types.IntegerLiteral) and abs(x.literal_value) <= SMALL


def _define(function, kept=None):
    """Define a function of Places: as of integers, or as of floats if it takes floats or another argument is one."""

    def lowering(*args):
        found = first_place(args)
        if found and all(isinstance(x, PlaceType) or is_small(x) for x in args):
            return found(*[found] * len(args)), kept
        return None

    def converted(*args):
        found = first_place(args)
        if not found or (kept and lowering(*args)):
            return None
        real = function in OF_FLOATS or any(isinstance(x, Dual | types.Float) for x in args)
        plain = found.real if real else types.int64
        return tuple([plain if isinstance(x, PlaceType) else x for x in args])

    if kept:
        extend(function, lowering, (PlaceType,), (PlaceType, PlaceType))
    extend_by_conversion(function, converted)


for _function in (*KEPT, *OTHERS, *OF_FLOATS, int):
    _define(_function, KEPT.get(_function))
for _function in operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow:
    _define(getattr(operator, f"i{_function.__name__}"), KEPT.get(_function))


# ------------------------------------------------------------------------------------------------------------ the word
@primitive
def map_elements(function, x, row, col, shape, others):
    """function(element, i, j, *others) for each element of a tile of floats that starts at (row, column).

    The function is a device function, or any other that Numba compiles, of numbers: i and j, and indices among the
    others, are integers. Elements beyond the matrix of this shape may be given an i and j within it, so what the
    function looks up exists. Its result is converted to the tile's dtype.

    >>> @device
    ... def above(s, i, j, shift):
    ...     return s if j > i + shift else -1
    >>> show(lambda x: map_elements(above, x, 0, 0, (2, 4), (1,)))
    array([[-1., -1.,  2.,  3.],
           [-1., -1., -1.,  7.]], dtype=float32)
    """
    check_tile("map_elements", x, FLOATS)
    found = [function(s, i, j, *others) for s, i, j, others in elements((x,), row, col, shape, others)]
    return Fragment(x.layout, np.array(found, x.dtype).reshape(x.layout.slots))


def elements(tiles, row, col, shape, others):
    """For each element of tiles of one layout: the elements, its place, and others, as functions are given them."""
    layout = tiles[0].layout
    whole = [np.minimum(places, size - 1) for places, size in zip(places_of(layout.indices, row, col), shape)]
    others = [int(other) if isinstance(other, np.int32) else other for other in others]
    for *found, i, j in zip(*[x.registers.flat for x in tiles], *[x.flat for x in np.broadcast_arrays(*whole)]):
        yield *found, int(i), int(j), others


@map_elements.calling
def map_elements(context, function, x, row, col, shape, others):
    check_tile("map_elements", x, FLOATS)
    where, plain = PlaceType(x.dtype), as_given(others)
    called = context.resolve_function_type(function, (x.dtype, where, where, *plain), {})
    if not isinstance(called.return_type, types.Number | types.Boolean | PlaceType):
        raise TypingError(f"map_elements: got a function that returns {called.return_type}, expected a number")

    def generate(context, b, _, tile, row, col, shape, given):
        call, given = context.get_function(function, called), cast_each(context, b, given, others, plain)
        rows, cols = places_in(context, b, x, row, col, shape, others)
        found = [
            [context.cast(b, call(b, [s, i, j, *given]), called.return_type, x.dtype) for s, j in zip(elements, cols)]
            for elements, i in zip(registers(b, x, tile), rows)
        ]
        return fragment(b, x, found)

    return x(function, x, INDEX, INDEX, types.UniTuple(INDEX, 2), others), generate


@primitive
def fold_elements(function, carried, tiles, row, col, shape, others):
    """carried = function(carried, *elements, i, j, *others) for each element of tiles of one layout, one after the
    other, of all that this thread holds; carried is a tuple of numbers, the last one is returned. See `map_elements`.

    >>> LAYOUT = simt(2, 64, 32, 16, 2)
    >>> @device
    ... def added(carried, s, i, j, factor):
    ...     return (carried[0] + factor * s,)
    >>> def kernel(x, y):
    ...     tile = load(x, LAYOUT, 0)
    ...     (total,) = fold_elements(added, (np.float32(0),), (tile,), 0, 0, (2, 64), (10,))
    ...     save(y, full(LAYOUT, np.float32(total)), 0)
    >>> run(kernel, np.ones((2, 64), np.float32), np.zeros((1, 2)))
    array([[40., 40.]])
    """
    check_folded(tiles)
    for *found, i, j, given in elements(tiles, row, col, shape, others):
        carried = function(carried, *found, i, j, *given)
    return carried


@fold_elements.calling
def fold_elements(context, function, carried, tiles, row, col, shape, others):
    check_folded(tiles)
    x, plain = tiles[0], as_given(others)
    kinds = types.Tuple([types.unliteral(kind) for kind in carried])
    where = PlaceType(x.dtype)
    called = context.resolve_function_type(
        function, (kinds, *[tile.dtype for tile in tiles], where, where, *plain), {}
    )

    def generate(context, b, _, found, values, row, col, shape, given):
        call, given = context.get_function(function, called), cast_each(context, b, given, others, plain)
        rows, cols = places_in(context, b, x, row, col, shape, others)
        found = context.cast(b, found, carried, kinds)
        every = [registers(b, tile, b.extract_value(values, n)) for n, tile in enumerate(tiles)]
        for *each, i in zip(*every, rows):
            for *elements, j in zip(*each, cols):
                found = context.cast(b, call(b, [found, *elements, i, j, *given]), called.return_type, kinds)
        return found

    return kinds(function, carried, tiles, INDEX, INDEX, types.UniTuple(INDEX, 2), others), generate


@primitive
def map_tiles(function, tiles, others):
    """The tiles of the numbers that function(*elements, *others) returns, a tuple, for all elements of tiles of one
    layout; their dtype is that of the first tile. See `map_elements`: elements of int32 are integers.

    >>> @device
    ... def both(s, i, factor):
    ...     return s + i, factor * s
    >>> show(lambda x: map_tiles(both, (x, full(TILE, np.int32(1))), (10,))[1])
    array([[ 0., 10., 20., 30.],
           [40., 50., 60., 70.]], dtype=float32)
    """
    x = check_mapped(tiles)
    others = [int(other) if isinstance(other, np.int32) else other for other in others]
    numbers = [tile.registers.flat if tile.dtype.kind == "f" else map(int, tile.registers.flat) for tile in tiles]
    found = zip(*[function(*each, *others) for each in zip(*numbers)])
    return tuple([Fragment(x.layout, np.array(values, x.dtype).reshape(x.layout.slots)) for values in found])


@map_tiles.calling
def map_tiles(context, function, tiles, others):
    x, plain = check_mapped(tiles), as_given(others)
    kinds = [types.int64 if tile.dtype == types.int32 else tile.dtype for tile in tiles]
    called = context.resolve_function_type(function, (*kinds, *plain), {})
    out = types.UniTuple(x, len(called.return_type))

    def generate(context, b, _, values, given):
        call, given = context.get_function(function, called), cast_each(context, b, given, others, plain)
        every = [registers(b, tile, b.extract_value(values, n)) for n, tile in enumerate(tiles)]
        found = [[[None] * x.layout.slots[1] for _ in range(x.layout.slots[0])] for _ in range(out.count)]
        for r, c in np.ndindex(*x.layout.slots):
            elements = [context.cast(b, tile[r][c], of.dtype, kind) for tile, of, kind in zip(every, tiles, kinds)]
            results = call(b, [*elements, *given])
            for n, kind in enumerate(called.return_type):
                found[n][r][c] = context.cast(b, b.extract_value(results, n), kind, x.dtype)
        whole = ir.Constant(context.get_value_type(out), ir.Undefined)
        for n, tile in enumerate(found):
            whole = b.insert_value(whole, fragment(b, x, tile), n)
        return whole

    return out(function, types.Tuple([*tiles]), others), generate


def check_mapped(tiles):
    """The first tile."""
    x = tiles[0]
    check_tile("map_tiles", x, FLOATS)
    for tile in tiles:
        check_tile("map_tiles", tile, {*FLOATS, "int32"})
        if tile.layout != x.layout:
            raise TypingError(f"map_tiles: got {tile.layout}, expected {x.layout}, that of the first tile")
    return x


def check_folded(tiles):
    for x in tiles:
        check_tile("fold_elements", x, FLOATS)
        if x.layout != tiles[0].layout or x.layout.idle_bits():
            raise TypingError(f"fold_elements: got {x.layout}, expected that of all tiles, without copies")


def as_given(others):
    """The types of the arguments that are the same for all elements."""
    return [types.Tuple(as_given(kind)) if isinstance(kind, types.Tuple | types.UniTuple)
            else types.int64 if isinstance(kind, IndexType) else types.unliteral(kind) for kind in others]


def cast_each(context, b, values, kinds, plain):
    return [context.cast(b, b.extract_value(values, n), ty, to) for n, (ty, to) in enumerate(zip(kinds, plain))]


def places_in(context, b, x, row, col, shape, others):
    """The Places of the rows and of the columns of a tile of this type."""
    axes, real = (x.layout.rows.within, x.layout.cols), context.get_value_type(x.dtype)
    ends = [b.extract_value(shape, axis) for axis in range(2)]
    return [positions(b, *about, real, has_arrays(others)) for about in zip(axes, (row, col), ends)]


@primitive
def holds(function, layout, row, col, shape, others):
    """Whether function(i, j, *others) is true for each element of a tile of this layout that starts at (row, column).

    As of `map_elements`, but that a float which is made of i or j is a float64. A truth takes one bit of a register.

    >>> @device
    ... def above(i, j, shift):
    ...     return j > i + shift
    >>> show(lambda x: holds(above, TILE, 0, 0, (2, 4), (1,)))
    array([[False, False,  True,  True],
           [False, False, False,  True]])
    """
    tile = Fragment(layout, np.zeros(layout.slots))
    found = [function(i, j, *others) for _, i, j, others in elements((tile,), row, col, shape, others)]
    return Fragment(layout, np.array(found, bool).reshape(layout.slots))


@holds.calling
def holds(context, function, layout, row, col, shape, others):
    where, plain, out = PlaceType(types.float64), as_given(others), FragmentType(layout.value, types.boolean)
    called = context.resolve_function_type(function, (where, where, *plain), {})
    if not isinstance(called.return_type, types.Boolean):
        raise TypingError(f"holds: got a function that returns {called.return_type}, expected a truth")

    def generate(context, b, _, __, row, col, shape, given):
        call, given = context.get_function(function, called), cast_each(context, b, given, others, plain)
        slots = out.layout.slots
        axes, ends = (out.layout.rows.within, out.layout.cols), [b.extract_value(shape, axis) for axis in range(2)]
        at = [position_on(b, *about, F64, has_arrays(others)) for about in zip(axes, (row, col), ends)]

        def test_one(*slots):
            i, j = (not_negative(b, position(axis.offsets[slot])) for position, axis, slot in zip(at, axes, slots))
            return b.trunc(call(b, [i, j, *given]), I1)

        def test(few):
            bits = I32(0)
            for n, slots in enumerate(few):
                bits = b.or_(bits, b.shl(b.zext(test_one(*slots), I32), I32(n)))
            return [bits]

        if not has_arrays(others):  # nothing is loaded, and what is compared takes no registers
            return fragment(b, out, [[test_one(r, c) for c in range(slots[1])] for r in range(slots[0])])
        tile = [[None] * slots[1] for _ in range(slots[0])]
        order = [(r, c) for c in range(slots[1]) for r in range(slots[0])]
        for first in range(0, len(order), AT_ONCE):
            few = order[first : first + AT_ONCE]
            (bits,) = in_own_block(b, [I32(0)], partial(test, few))
            for n, (r, c) in enumerate(few):
                tile[r][c] = b.trunc(b.lshr(bits, I32(n)), I1)
        return fragment(b, out, tile)

    return out(function, layout, INDEX, INDEX, types.UniTuple(INDEX, 2), others), generate


def has_arrays(kinds):
    return any(isinstance(x, types.Array) or (isinstance(x, types.BaseTuple) and has_arrays(x)) for x in kinds)


def not_negative(b, x):
    """A Place that the compiler can see is not negative: then no index counts from the end of an array."""
    whole, *reals = parts_of(b, x)
    return place(b, b.and_(whole, I32(2**31 - 1)), *reals)


def positions(b, axis, first, size, real, both):
    """The positions of this thread's elements on an axis, as Places. Their integers are less than the size; their
    floats, too, if both have to be, since what is looked up may follow from either."""
    return list(map(position_on(b, axis, first, size, real, both), axis.offsets))


def position_on(b, axis, first, size, real, both):
    """The function (offset) that emits one of these."""
    start, last = b.add(first, base(b, axis)), b.sub(size, I32(1))
    start_real, last_real = b.sitofp(start, real), b.sitofp(last, real)

    def at(offset):
        whole, constant = emit_minimum(b, types.int32, b.add(start, I32(offset)), last), ir.Constant(real, offset)
        if not both:
            return place(b, whole, start_real, constant)
        value = call(b, "__nv_fminf" if real == F32 else "__nv_fmin", real, b.fadd(start_real, constant), last_real)
        return place(b, whole, value, ir.Constant(real, 0.0))

    return at

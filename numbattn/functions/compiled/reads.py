"""Derivatives of a user's function by the elements that it reads from its arrays.

The function is called with arrays that count reads. One read, whose number is given, yields a dual number of slope 1,
so that the function's result has its derivative by the element read there; which element that was is recorded. So the
function is called once for each read, whatever branches and loops lead to it.

If the elements have tangents, reads yield dual numbers of dual numbers, of the element and its tangent, whose slope is
1 or 0 as before. Then the function's result has its tangent, and its derivative has one, too. If every read yields its
tangent as a slope, the result has its second derivative along the tangents.
"""

import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaError, TypingError
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, models, overload, overload_attribute, register_model
from numba.np.numpy_support import as_dtype

from ..frozen import ORDERS
from .derivative import compiled_of, differentiated
from .dual import Dual, dual, like, slope_of, value_of
from .element import order_given, refuse_failing
from .errors import PART_OF_COUNTED, naming, number_of
from .nothrow import arguments_used
from .strict import compiled
from .wide import emit_widened, widened

INT64, READS = ir.IntType(64), types.CPointer(types.int64)
# of READS: reads so far; which of them yields a slope; the element that it reads, and its index along the last axis
COUNT, NUMBER, ELEMENT, LAST = range(4)
NO_READ, EVERY_READ = -1, -2  # its number


class Counted(types.Type):
    """An array that counts reads, which yield Duals of two numbers of type `real`, or, if it moves, of two Duals of
    these.

    last: the axis that is the last one of the whole array, of which it may be a part; -1 if its index is known.
    """

    def __init__(self, array, real, moves, last):
        self.array, self.real, self.moves, self.last = array, real, moves, last
        self.entry = Dual(Dual(real)) if moves else Dual(real)
        super().__init__(f"Counted({array}, {real}, {moves}, {last})")

    def part(self, array):
        """The part of this array at an index of the first axes."""
        return Counted(array, self.real, self.moves, max(self.last - self.array.ndim + array.ndim, -1))

    def transposed(self, array):
        return Counted(array, self.real, self.moves, -1 if self.last < 0 else array.ndim - 1 - self.last)


class Common(NamedTuple):
    """What all Counted arrays of a call have in common."""

    reads: Any
    tangents: Any  # of all elements: the address, and the bytes from one to the next; used where arrays move
    step: Any


@register_model(Counted)
class CountedModel(models.StructModel):
    def __init__(self, manager, kind):
        strides, tangents = types.UniTuple(types.int64, kind.array.ndim), types.CPointer(kind.real)
        own = ("array", kind.array), ("first", types.int64), ("strides", strides), ("index", types.int64)
        common = ("reads", READS), ("tangents", tangents), ("step", types.int64)
        # first, strides: which elements of all arrays are its own; index: along the last axis, if it is known
        super().__init__(manager, kind, [*own, *common])


def counted(context, builder, kind, array, first, strides, index, common):
    made = cgutils.create_struct_proxy(kind)(context, builder)
    made.array, made.first, made.index = array, first, index
    made.reads, made.tangents, made.step = common
    made.strides = cgutils.pack_array(builder, strides, INT64)
    return made._getvalue()


def fields_of(context, builder, kind, x):
    """An array, its shape, first element, strides and last index; what all have in Common."""
    x = cgutils.create_struct_proxy(kind)(context, builder, x)
    shape = context.make_array(kind.array)(context, builder, x.array).shape
    shape, strides = (cgutils.unpack_tuple(builder, each) for each in (shape, x.strides))
    return x.array, shape, x.first, strides, x.index, Common(x.reads, x.tangents, x.step)


@intrinsic
def array_of(typingctx, x):
    def generate(context, builder, signature, args):
        return impl_ret_borrowed(context, builder, x.array, fields_of(context, builder, x, *args)[0])

    return x.array(x), generate


# ------------------------------------------------------------------------------------------------------------- entries
@intrinsic
def counted_part(typingctx, x, part, place):
    """The part or entry at a place of an array, counted if it is an array, else as a Dual."""
    is_array, places = isinstance(part, types.Array), tuple(place) if isinstance(place, types.BaseTuple) else (place,)
    out = x.part(part) if is_array else x.entry

    def generate(context, builder, signature, args):
        _, found, at = args
        _, shape, element, strides, last, common = fields_of(context, builder, x, args[0])
        at = cgutils.unpack_tuple(builder, at) if isinstance(place, types.BaseTuple) else [at]
        for axis, (index, kind, size, stride) in enumerate(zip(at, places, shape, strides)):
            index = context.cast(builder, index, kind, types.int64)
            index = builder.select(builder.icmp_signed("<", index, INT64(0)), builder.add(index, size), index)
            element = builder.add(element, builder.mul(index, stride))
            last = index if axis == x.last else last
        if is_array:
            made = counted(context, builder, out, found, element, strides[len(places) :], last, common)
            return impl_ret_borrowed(context, builder, out, made)
        made = cgutils.create_struct_proxy(out)(context, builder)
        slope = builder.uitofp(is_the_read(builder, common.reads, element, last), ir.DoubleType())
        slope = context.cast(builder, slope, types.float64, out.dtype)
        entry = context.cast(builder, found, part, x.real)
        if x.moves:
            number = builder.load(builder.gep(common.reads, [INT64(NUMBER)]))
            every, zero = builder.icmp_signed("==", number, INT64(EVERY_READ)), context.get_constant(x.real, 0)
            entry, along = moving(context, builder, out.dtype, entry, zero, common, element)
            slope = builder.select(every, along, slope)
        made.value, made.slope = entry, slope
        return made._getvalue()

    return out(x, part, place), generate


def moving(context, builder, kind, entry, zero, common, element):
    """A Dual of the entry that this element is, and of its tangent; and one of this, which is constant."""
    address = builder.add(builder.ptrtoint(common.tangents, INT64), builder.mul(element, common.step))
    tangent = builder.load(builder.inttoptr(address, common.tangents.type))
    for parts in (entry, tangent), (tangent, zero):
        made = cgutils.create_struct_proxy(kind)(context, builder)
        made.value, made.slope = parts
        yield made._getvalue()


def is_the_read(builder, reads, element, last):
    """Count a read; whether it is the one that yields a slope."""
    count, number, *known = (builder.load(builder.gep(reads, [INT64(which)])) for which in range(4))
    found = builder.icmp_signed("==", count, number)
    builder.store(builder.add(count, INT64(1)), builder.gep(reads, [INT64(COUNT)]))
    for which, x, before in zip((ELEMENT, LAST), (element, last), known):
        builder.store(builder.select(found, x, before), builder.gep(reads, [INT64(which)]))
    return found


@overload(operator.getitem)
def _getitem(x, place):
    if isinstance(x, Counted):
        places = place if isinstance(place, types.BaseTuple) else [place]
        if any(isinstance(each, types.SliceType | types.EllipsisType) for each in places):
            raise TypingError(PART_OF_COUNTED)
        return lambda x, place: counted_part(x, array_of(x)[place], place)


@overload(len)
def _len(x):
    if isinstance(x, Counted):
        return lambda x: len(array_of(x))


overload_attribute(Counted, "shape")(lambda x: lambda x: array_of(x).shape)
overload_attribute(Counted, "ndim")(lambda x: lambda x: array_of(x).ndim)
overload_attribute(Counted, "size")(lambda x: lambda x: array_of(x).size)
overload_attribute(Counted, "T")(lambda x: lambda x: transposed(x, array_of(x).T))


@intrinsic
def transposed(typingctx, x, array):
    out = x.transposed(array)

    def generate(context, builder, signature, args):
        _, _, first, strides, last, common = fields_of(context, builder, x, args[0])
        made = counted(context, builder, out, args[1], first, strides[::-1], last, common)
        return impl_ret_borrowed(context, builder, out, made)

    return out(x, array), generate


# --------------------------------------------------------------------------------------------------------------- reads
@intrinsic
def reads_from(typingctx, number):
    """READS in memory of this call, before any read."""

    def generate(context, builder, signature, args):
        reads = cgutils.alloca_once(builder, INT64, size=4)
        for which in COUNT, NUMBER, ELEMENT, LAST:
            builder.store(args[0] if which == NUMBER else INT64(0), builder.gep(reads, [INT64(which)]))
        return reads

    return READS(types.int64), generate


@intrinsic
def read_of(typingctx, reads, which):
    return types.int64(reads, types.int64), lambda context, builder, signature, args: builder.load(
        builder.gep(args[0], [args[1]])
    )


def counting(wanted):
    """The function (arrays, reads, others) -> the arrays as the user's function sees them. Those wanted are counted,
    and their elements are numbered one array after the other. others: a number of the type to compute with, or an array
    of the tangents of the elements."""

    @intrinsic
    def all_of_them(typingctx, arrays, reads, others):
        moves = isinstance(others, types.Array)
        is_wide = any(kind.dtype == types.float64 for kind, is_wanted in zip(arrays, wanted) if is_wanted)
        real = others.dtype if moves else types.float64 if is_wide else others
        seen = zip(map(widened, arrays), wanted)
        out = types.Tuple([Counted(kind, real, moves, kind.ndim - 1) if counts else kind for kind, counts in seen])

        def generate(context, builder, signature, args):
            made, first = [], INT64(0)
            if moves:
                tangents = context.make_array(others)(context, builder, args[2])
                common = Common(args[1], tangents.data, *cgutils.unpack_tuple(builder, tangents.strides))
            else:
                common = Common(args[1], cgutils.get_null_value(context.get_value_type(real).as_pointer()), INT64(0))
            for kind, to, x in zip(arrays, out, cgutils.unpack_tuple(builder, args[0], len(arrays))):
                if isinstance(to, Counted):
                    shape, strides = context.make_array(kind)(context, builder, x).shape, [INT64(1)]
                    for size in reversed(cgutils.unpack_tuple(builder, shape)):
                        strides.insert(0, builder.mul(strides[0], size))
                    made.append(counted(context, builder, to, x, first, strides[1:], INT64(0), common))
                    first = builder.add(first, strides[0])
                else:
                    made.append(emit_widened(context, builder, kind, x))
            return impl_ret_borrowed(context, builder, out, context.make_tuple(builder, out, made))

        return out(arrays, reads, others), generate

    return all_of_them


@lru_cache(maxsize=256)
def by_read(function, wanted):
    """The function (s, batch, head, i, j, arrays, number) for a Frozen: its derivative by the element that it reads as
    number `number`, which element that is, and how many it reads. wanted: of which arrays."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, batch, head, i, j, arrays, number):
        reads = reads_from(number)
        found = of_user(s, batch, head, i, j, *counting_arrays(arrays, reads, s))
        return slope_of(number_of(found)), read_of(reads, ELEMENT), read_of(reads, COUNT)

    return derivative


@lru_cache(maxsize=256)
def by_last_index(function, wanted):
    """`by_read` for the first read, (s, batch, head, i, j, arrays), with the index along the last axis apart:
    derivative, element at index 0 there, index, count."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, batch, head, i, j, arrays):
        reads = reads_from(0)
        slope = slope_of(number_of(of_user(s, batch, head, i, j, *counting_arrays(arrays, reads, s))))
        last = read_of(reads, LAST)
        return slope, read_of(reads, ELEMENT) - last, last, read_of(reads, COUNT)

    return derivative


@lru_cache(maxsize=256)
def along(identity, wanted, order=0):
    """The function (s, batch, head, i, j, arrays, tangents) for a function.Identity: the tangent of its function, or of
    its derivative of this order, along tangents of the elements of the arrays wanted, s being constant."""
    of_user, counting_arrays = differentiated(identity, order), counting(wanted)

    @compiled
    def of_given(s, batch, head, i, j, arrays, tangents):
        moved = counting_arrays(arrays, reads_from(NO_READ), tangents)
        return slope_of(value_of(number_of(of_user(s, batch, head, i, j, *moved))))

    @compiled
    def of_derived(s, batch, head, i, j, arrays, tangents):
        moved = counting_arrays(arrays, reads_from(NO_READ), tangents)
        return slope_of(number_of(of_user(changing(s, 0, tangents), batch, head, i, j, *moved)))

    return of_derived if identity.key[order] is None else of_given


@lru_cache(maxsize=256)
def twice_along(function, wanted):
    """The function (s, batch, head, i, j, arrays, tangents) for a Frozen: its second derivative along tangents of the
    elements of the arrays wanted, s being constant."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, batch, head, i, j, arrays, tangents):
        moved = counting_arrays(arrays, reads_from(EVERY_READ), tangents)
        return slope_of(slope_of(number_of(of_user(s, batch, head, i, j, *moved))))

    return derivative


@lru_cache(maxsize=256)
def by_read_along(function, wanted):
    """The function (s, ts, batch, head, i, j, arrays, tangents, number) for a Frozen: as `by_read`, but the derivative
    and its tangent, where s also changes, by ts."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, ts, batch, head, i, j, arrays, tangents, number):
        reads, moved = reads_from(number), changing(s, ts, tangents)
        arrays_moved = counting_arrays(arrays, reads, tangents)
        found = slope_of(number_of(of_user(dual(moved, like(moved, 0)), batch, head, i, j, *arrays_moved)))
        return value_of(found), slope_of(found), read_of(reads, ELEMENT), read_of(reads, COUNT)

    return derivative


@intrinsic
def changing(typingctx, s, ts, tangents):
    """The Dual of s and ts, in the type of tangents."""
    out = Dual(tangents.dtype)

    def generate(context, builder, signature, args):
        made = cgutils.create_struct_proxy(out)(context, builder)
        made.value, made.slope = (context.cast(builder, x, kind, out.dtype) for x, kind in zip(args, (s, ts)))
        return made._getvalue()

    return out(s, ts, tangents), generate


@lru_cache(maxsize=256)
def check(function, wanted, real, kinds):
    """Raise a TypeError if the derivatives of a Frozen by what it reads cannot be computed, for s of this type and
    arrays of these types."""
    arguments = real, *[types.int64] * 4, types.Tuple(kinds), types.int64
    _refuse(by_read(function, wanted), arguments, function, "Score function")


@lru_cache(maxsize=256)
def check_along(identity, wanted, real, kinds, tangents, order=0):
    """`check` for `along` of a function.Identity. tangents: the type of their array."""
    given = order_given(identity, order)
    arguments = real, *[types.int64] * 4, types.Tuple(kinds), tangents
    _refuse(along(identity, wanted, order), arguments, identity.key[given], f"Score {ORDERS[given]}")


@lru_cache(maxsize=256)
def check_twice_along(function, wanted, real, kinds, tangents):
    """`check` for `twice_along` of a Frozen."""
    arguments = real, *[types.int64] * 4, types.Tuple(kinds), tangents
    _refuse(twice_along(function, wanted), arguments, function, "Score function")


@lru_cache(maxsize=256)
def check_by_read_along(function, wanted, real, kinds, tangents):
    """`check` for `by_read_along` of a Frozen."""
    arguments = real, real, *[types.int64] * 4, types.Tuple(kinds), tangents, types.int64
    _refuse(by_read_along(function, wanted), arguments, function, "Score function")


def _refuse(derivative, arguments, function, words):
    """Raise a TypeError if this derivative of a Frozen, `words` in the message, cannot be compiled or may fail."""
    with naming(function.python, of="gradient"):
        derivative.compile(arguments)
    refuse_failing(derivative.overloads[arguments], words, function)


@lru_cache(maxsize=256)
def has_steady_slope(function, wanted, real, kinds):
    """Whether the derivative by the first element read is the same constant for all elements, by the optimised code."""
    derivative, arguments = by_last_index(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds))

    @compiled
    def slope(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays)[0]

    return not _used_by(slope, arguments)


@lru_cache(maxsize=256)
def is_by_class(function, wanted, real, kinds):
    """Whether each element of S reads one element of the arrays whose index along the last axis, a class, follows from
    the key, while the others, and the derivative, follow from the query, as in w[kind[i], kind[j]]: the optimised code
    uses nothing else. real, kinds: as for `check`."""
    check(function, wanted, real, kinds)
    derivative, arguments = by_last_index(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds))

    @compiled
    def of_query(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays)[:2]

    @compiled
    def of_key(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays)[2]

    @compiled
    def count(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays)[3]

    by_query, by_key, by_all = (_used_by(each, arguments) for each in (of_query, of_key, count))
    if by_all or by_query & {"s", "j"} or by_key & {"s", "i", "j"} != {"j"}:
        return False
    return _reads_once(count, kinds)


@lru_cache(maxsize=256)
def is_by_distance(function, wanted, real, kinds):
    """Whether each element of S reads one element of the arrays, and which one, and the derivative by it, follow from
    batch, head and i - j: as table[min(abs(i - j), 31), head]. As `is_by_class`."""
    check(function, wanted, real, kinds)
    derivative, arguments = by_read(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds))

    @compiled
    def of_distance(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i + j, j, arrays, 0)[:2]

    @compiled
    def count(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays, 0)[2]

    by_distance, by_all = (_used_by(each, arguments) for each in (of_distance, count))
    return not by_all and not by_distance & {"s", "j"} and _reads_once(count, kinds)


def _used_by(function, arguments):
    """The names of the arguments, of these types, that the optimised code of a compiled function uses."""
    function.compile(arguments)
    return arguments_used(function.overloads[arguments])


def _reads_once(count, kinds):
    """Whether a count that follows from nothing is 1."""
    nowhere = tuple([np.zeros((1,) * kind.ndim, as_dtype(kind.dtype)) for kind in kinds])
    return count(0.0, 0, 0, 0, 0, nowhere) == 1


def in_python(identity: Any, wanted: tuple[bool, ...], arrays: Any) -> Any:
    """(s, batch, head, i, j) -> element and derivative of each read, for NumPy arrays."""
    return _in_python(identity, by_read(identity.function, wanted), arrays)


def in_python_along(identity: Any, wanted: tuple[bool, ...], arrays: Any, tangents: Any) -> Any:
    """(s, ts, batch, head, i, j) -> element, derivative and its tangent of each read, for NumPy arrays."""
    return _in_python(identity, by_read_along(identity.function, wanted), arrays, tangents)


def _in_python(identity: Any, derivative: Any, *given: Any) -> Any:
    def of_each(*element):
        number, count = 0, 1
        while number < count:
            try:
                *slopes, at, count = derivative(*element, *given, number)
            except NumbaError:
                with naming(identity.function.python, of="gradient"):
                    raise
            if count:
                yield at, *slopes
            number += 1

    return of_each

"""Derivatives of a user's function by what it reads of its arrays.

The function is called with arrays that count what is read of them. One read, whose number is given, yields a dual
number of slope 1, so that what the function returns has its derivative by the element that was read there; and it is
noted which element that was. So the function is called once for each read, whatever branches and loops lead to it.

Where the elements have tangents, what is read are dual numbers of dual numbers: of the element and its tangent, whose
slope is 1 or 0 as before. What the function returns then has its tangent, and its derivative that of its own.
"""

import operator
from functools import lru_cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaError, TypingError
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, models, overload, overload_attribute, register_model

from ..frozen import ORDERS
from .derivative import compiled_of, differentiated
from .dual import Dual, dual, like, slope_of, value_of
from .element import order_given, refuse_failing
from .errors import PART_OF_COUNTED, naming, number_of
from .strict import compiled
from .wide import emit_widened, widened

INT64, READS = ir.IntType(64), types.CPointer(types.int64)
COUNT, NUMBER, ELEMENT = range(3)  # of READS: reads so far; which of them yields a slope; the element that it reads
NO_READ = -1  # its number


class Counted(types.Type):
    """An array that counts what is read of it; what is read are Duals of two numbers of type `real`, or, if it moves,
    of two Duals of these."""

    def __init__(self, array, real, moves):
        self.array, self.real, self.moves = array, real, moves
        self.entry = Dual(Dual(real)) if moves else Dual(real)
        super().__init__(f"Counted({array}, {real}, {moves})")

    def of(self, array):
        return Counted(array, self.real, self.moves)


class Common(NamedTuple):
    """What all Counted arrays of a call share."""

    reads: Any
    tangents: Any  # of all elements: the address, and the bytes from one to the next; used where arrays move
    step: Any


@register_model(Counted)
class CountedModel(models.StructModel):
    def __init__(self, manager, kind):
        strides, tangents = types.UniTuple(types.int64, kind.array.ndim), types.CPointer(kind.real)
        own = ("array", kind.array), ("first", types.int64), ("strides", strides)
        common = ("reads", READS), ("tangents", tangents), ("step", types.int64)
        super().__init__(manager, kind, [*own, *common])  # first, strides: which elements of all arrays are its own


def counted(context, builder, kind, array, first, strides, common):
    made = cgutils.create_struct_proxy(kind)(context, builder)
    made.array, made.first = array, first
    made.reads, made.tangents, made.step = common
    made.strides = cgutils.pack_array(builder, strides, INT64)
    return made._getvalue()


def fields_of(context, builder, kind, x):
    """An array, its shape, first element and strides; what all have in Common."""
    x = cgutils.create_struct_proxy(kind)(context, builder, x)
    shape = context.make_array(kind.array)(context, builder, x.array).shape
    common = Common(x.reads, x.tangents, x.step)
    return x.array, cgutils.unpack_tuple(builder, shape), x.first, cgutils.unpack_tuple(builder, x.strides), common


@intrinsic
def array_of(typingctx, x):
    def generate(context, builder, signature, args):
        return impl_ret_borrowed(context, builder, x.array, fields_of(context, builder, x, *args)[0])

    return x.array(x), generate


# ------------------------------------------------------------------------------------------------------------- entries
@intrinsic
def counted_part(typingctx, x, part, place):
    """What is found at a place of an array, part: as counted, if it is an array, or as a Dual."""
    is_array, places = isinstance(part, types.Array), tuple(place) if isinstance(place, types.BaseTuple) else (place,)
    out = x.of(part) if is_array else x.entry

    def generate(context, builder, signature, args):
        _, found, at = args
        _, shape, element, strides, common = fields_of(context, builder, x, args[0])
        at = cgutils.unpack_tuple(builder, at) if isinstance(place, types.BaseTuple) else [at]
        for index, kind, size, stride in zip(at, places, shape, strides):
            index = context.cast(builder, index, kind, types.int64)
            index = builder.select(builder.icmp_signed("<", index, INT64(0)), builder.add(index, size), index)
            element = builder.add(element, builder.mul(index, stride))
        if is_array:
            made = counted(context, builder, out, found, element, strides[len(places) :], common)
            return impl_ret_borrowed(context, builder, out, made)
        made = cgutils.create_struct_proxy(out)(context, builder)
        slope = builder.uitofp(is_the_read(builder, common.reads, element), ir.DoubleType())
        entry = context.cast(builder, found, part, x.real)
        made.value = moving(context, builder, out.dtype, entry, common, element) if x.moves else entry
        made.slope = context.cast(builder, slope, types.float64, out.dtype)
        return made._getvalue()

    return out(x, part, place), generate


def moving(context, builder, kind, entry, common, element):
    """A Dual of the entry that this element is, and of its tangent."""
    address = builder.add(builder.ptrtoint(common.tangents, INT64), builder.mul(element, common.step))
    made = cgutils.create_struct_proxy(kind)(context, builder)
    made.value, made.slope = entry, builder.load(builder.inttoptr(address, common.tangents.type))
    return made._getvalue()


def is_the_read(builder, reads, element):
    """Count a read; whether it is the one that yields a slope."""
    count, number, known = (builder.load(builder.gep(reads, [INT64(which)])) for which in (COUNT, NUMBER, ELEMENT))
    found = builder.icmp_signed("==", count, number)
    builder.store(builder.add(count, INT64(1)), builder.gep(reads, [INT64(COUNT)]))
    builder.store(builder.select(found, element, known), builder.gep(reads, [INT64(ELEMENT)]))
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
    out = x.of(array)

    def generate(context, builder, signature, args):
        _, _, first, strides, common = fields_of(context, builder, x, args[0])
        made = counted(context, builder, out, args[1], first, strides[::-1], common)
        return impl_ret_borrowed(context, builder, out, made)

    return out(x, array), generate


# --------------------------------------------------------------------------------------------------------------- reads
@intrinsic
def reads_from(typingctx, number):
    """READS in memory of this call, before any read."""

    def generate(context, builder, signature, args):
        reads = cgutils.alloca_once(builder, INT64, size=3)
        for which, x in (COUNT, INT64(0)), (NUMBER, args[0]), (ELEMENT, INT64(0)):
            builder.store(x, builder.gep(reads, [INT64(which)]))
        return reads

    return READS(types.int64), generate


@intrinsic
def read_of(typingctx, reads, which):
    return types.int64(reads, types.int64), lambda context, builder, signature, args: builder.load(
        builder.gep(args[0], [args[1]])
    )


def counting(wanted):
    """The function (arrays, reads, others) -> the arrays as the function sees them, those wanted counted, in whose
    elements these are numbered, one array after the other. others: what else there is to be calculated with, a number;
    or the tangents of the elements, in an array."""

    @intrinsic
    def all_of_them(typingctx, arrays, reads, others):
        moves = isinstance(others, types.Array)
        is_wide = any(kind.dtype == types.float64 for kind, is_wanted in zip(arrays, wanted) if is_wanted)
        real = others.dtype if moves else types.float64 if is_wide else others
        seen = [widened(kind) for kind in arrays]
        out = types.Tuple([Counted(kind, real, moves) if is_wanted else kind for kind, is_wanted in zip(seen, wanted)])

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
                    made.append(counted(context, builder, to, x, first, strides[1:], common))
                    first = builder.add(first, strides[0])
                else:
                    made.append(emit_widened(context, builder, kind, x))
            return impl_ret_borrowed(context, builder, out, context.make_tuple(builder, out, made))

        return out(arrays, reads, others), generate

    return all_of_them


@lru_cache(maxsize=256)
def by_read(function, wanted):
    """(s, batch, head, i, j, arrays, number) of a Frozen: its derivative by the element of the arrays that it reads as
    number `number`, which element that is, and how many it reads. wanted: of which arrays."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, batch, head, i, j, arrays, number):
        reads = reads_from(number)
        found = of_user(s, batch, head, i, j, *counting_arrays(arrays, reads, s))
        return slope_of(number_of(found)), read_of(reads, ELEMENT), read_of(reads, COUNT)

    return derivative


@lru_cache(maxsize=256)
def along(identity, wanted, order=0):
    """(s, batch, head, i, j, arrays, tangents) of a function.Identity: the tangent of its function, or of the
    derivative of this order, where the elements of the arrays wanted change by their tangents, s does not."""
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
def by_read_along(function, wanted):
    """(s, ts, batch, head, i, j, arrays, tangents, number) of a Frozen: as `by_read`, but the derivative and its
    tangent, where s changes by ts, too."""
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
    """A TypeError where the derivatives of a Frozen by what it reads cannot be found, for s of this type and arrays of
    these types."""
    arguments = real, *[types.int64] * 4, types.Tuple(kinds), types.int64
    _refuse(by_read(function, wanted), arguments, function, "Score function")


@lru_cache(maxsize=256)
def check_along(identity, wanted, real, kinds, tangents, order=0):
    """The same of what `along` makes of a function.Identity; tangents: the type of their array."""
    given = order_given(identity, order)
    arguments = real, *[types.int64] * 4, types.Tuple(kinds), tangents
    _refuse(along(identity, wanted, order), arguments, identity.key[given], f"Score {ORDERS[given]}")


@lru_cache(maxsize=256)
def check_by_read_along(function, wanted, real, kinds, tangents):
    """The same of what `by_read_along` makes of a Frozen."""
    arguments = real, real, *[types.int64] * 4, types.Tuple(kinds), tangents, types.int64
    _refuse(by_read_along(function, wanted), arguments, function, "Score function")


def _refuse(derivative, arguments, function, words):
    """Raise a TypeError where what is made of a Frozen, which is `words`, cannot be compiled, or may fail."""
    with naming(function.python, of="gradient"):
        derivative.compile(arguments)
    refuse_failing(derivative.overloads[arguments], words, function)


def in_python(identity: Any, wanted: tuple[bool, ...], arrays: Any) -> Any:
    """(s, batch, head, i, j) -> element and derivative of each read, for arrays of NumPy's."""
    return _in_python(identity, by_read(identity.function, wanted), arrays)


def in_python_along(identity: Any, wanted: tuple[bool, ...], arrays: Any, tangents: Any) -> Any:
    """(s, ts, batch, head, i, j) -> element, derivative and its tangent of each read, for arrays of NumPy's."""
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

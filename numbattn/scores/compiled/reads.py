"""Derivatives of a user's function by what it reads of its arrays.

The function is called with arrays that count what is read of them. One read, whose number is given, yields a dual
number of slope 1, so that what the function returns has its derivative by the element that was read there; and it is
noted which element that was. So the function is called once for each read, whatever branches and loops lead to it.
"""

import operator
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaError, TypingError
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, models, overload, overload_attribute, register_model
from numba.np.numpy_support import as_dtype

from .derivative import compiled_of
from .dual import Dual, slope_of
from .element import refuse_failing
from .errors import PART_OF_COUNTED, naming, number_of
from .nothrow import arguments_used
from .strict import compiled
from .wide import emit_widened, widened

INT64, READS = ir.IntType(64), types.CPointer(types.int64)
# of READS: reads so far; which of them yields a slope; the element that it reads, and its index along the last axis
COUNT, NUMBER, ELEMENT, LAST = range(4)


class Counted(types.Type):
    """An array that counts what is read of it; what is read are Duals of two numbers of type `real`.

    last: which axis is the last one of the array of which it is a part; -1 if its index is known.
    """

    def __init__(self, array, real, last):
        self.array, self.real, self.last = array, real, last
        super().__init__(f"Counted({array}, {real}, {last})")

    def part(self, array):
        """Of this array, the part at an index of the first axes."""
        return Counted(array, self.real, max(self.last - self.array.ndim + array.ndim, -1))

    def transposed(self, array):
        return Counted(array, self.real, -1 if self.last < 0 else array.ndim - 1 - self.last)


@register_model(Counted)
class CountedModel(models.StructModel):
    def __init__(self, manager, kind):
        strides = types.UniTuple(types.int64, kind.array.ndim)
        members = ("array", kind.array), ("first", types.int64), ("strides", strides), ("last", types.int64)
        # first, strides: which elements of all arrays are its own; last: the index along the last axis, if it is known
        super().__init__(manager, kind, [*members, ("reads", READS)])


def counted(context, builder, kind, array, first, strides, last, reads):
    made = cgutils.create_struct_proxy(kind)(context, builder)
    made.array, made.first, made.last, made.reads = array, first, last, reads
    made.strides = cgutils.pack_array(builder, strides, INT64)
    return made._getvalue()


def fields_of(context, builder, kind, x):
    """An array, its shape, first element, strides, last index and reads."""
    x = cgutils.create_struct_proxy(kind)(context, builder, x)
    shape = context.make_array(kind.array)(context, builder, x.array).shape
    shape, strides = (cgutils.unpack_tuple(builder, each) for each in (shape, x.strides))
    return x.array, shape, x.first, strides, x.last, x.reads


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
    out = x.part(part) if is_array else Dual(x.real)

    def generate(context, builder, signature, args):
        _, found, at = args
        _, shape, element, strides, last, reads = fields_of(context, builder, x, args[0])
        at = cgutils.unpack_tuple(builder, at) if isinstance(place, types.BaseTuple) else [at]
        for axis, (index, kind, size, stride) in enumerate(zip(at, places, shape, strides)):
            index = context.cast(builder, index, kind, types.int64)
            index = builder.select(builder.icmp_signed("<", index, INT64(0)), builder.add(index, size), index)
            element = builder.add(element, builder.mul(index, stride))
            last = index if axis == x.last else last
        if is_array:
            made = counted(context, builder, out, found, element, strides[len(places) :], last, reads)
            return impl_ret_borrowed(context, builder, out, made)
        made = cgutils.create_struct_proxy(out)(context, builder)
        slope = builder.uitofp(is_the_read(builder, reads, element, last), ir.DoubleType())
        made.value = context.cast(builder, found, part, x.real)
        made.slope = context.cast(builder, slope, types.float64, x.real)
        return made._getvalue()

    return out(x, part, place), generate


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
        _, _, first, strides, last, reads = fields_of(context, builder, x, args[0])
        made = counted(context, builder, out, args[1], first, strides[::-1], last, reads)
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
    """The function (arrays, reads, s) -> the arrays as the function sees them, those wanted counted, in whose elements
    these are numbered, one array after the other. s: what else there is to be calculated with."""

    @intrinsic
    def all_of_them(typingctx, arrays, reads, s):
        is_wide = any(kind.dtype == types.float64 for kind, is_wanted in zip(arrays, wanted) if is_wanted)
        real = types.float64 if is_wide else s
        seen = zip(map(widened, arrays), wanted)
        out = types.Tuple([Counted(kind, real, kind.ndim - 1) if is_wanted else kind for kind, is_wanted in seen])

        def generate(context, builder, signature, args):
            made, first = [], INT64(0)
            for kind, to, x in zip(arrays, out, cgutils.unpack_tuple(builder, args[0], len(arrays))):
                if isinstance(to, Counted):
                    shape, strides = context.make_array(kind)(context, builder, x).shape, [INT64(1)]
                    for size in reversed(cgutils.unpack_tuple(builder, shape)):
                        strides.insert(0, builder.mul(strides[0], size))
                    made.append(counted(context, builder, to, x, first, strides[1:], INT64(0), args[1]))
                    first = builder.add(first, strides[0])
                else:
                    made.append(emit_widened(context, builder, kind, x))
            return impl_ret_borrowed(context, builder, out, context.make_tuple(builder, out, made))

        return out(arrays, reads, s), generate

    return all_of_them


@lru_cache(maxsize=256)
def by_read(function, wanted):
    """(s, batch, head, i, j, arrays, number) of a Frozen: its derivative by the element of the arrays that it reads as
    number `number`, which element that is, its index along the last axis of its array, and how many it reads. wanted:
    of which arrays."""
    of_user, counting_arrays = compiled_of(function), counting(wanted)

    @compiled
    def derivative(s, batch, head, i, j, arrays, number):
        reads = reads_from(number)
        found = of_user(s, batch, head, i, j, *counting_arrays(arrays, reads, s))
        return slope_of(number_of(found)), read_of(reads, ELEMENT), read_of(reads, LAST), read_of(reads, COUNT)

    return derivative


@lru_cache(maxsize=256)
def check(function, wanted, real, kinds):
    """A TypeError where the derivatives of a Frozen by what it reads cannot be found, for s of this type and arrays of
    these types."""
    derivative, arguments = by_read(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds), types.int64)
    with naming(function.python, of="gradient"):
        derivative.compile(arguments)
    refuse_failing(derivative.overloads[arguments], "Score function", function)


@lru_cache(maxsize=256)
def has_steady_slope(function, wanted, real, kinds):
    """Whether the derivative by the first element that is read is a number, the same for all, as the optimised code
    tells."""
    derivative, arguments = by_read(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds))

    @compiled
    def slope(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays, 0)[0]

    slope.compile(arguments)
    return not arguments_used(slope.overloads[arguments])


@lru_cache(maxsize=256)
def is_by_class(function, wanted, real, kinds):
    """Whether each element of S reads one element of the arrays, whose index along the last axis follows from the key,
    its class, but whose others, and the derivative, from the query: as w[kind[i], kind[j]]. The optimised code tells,
    which looks at nothing else. real, kinds: as of `check`."""
    check(function, wanted, real, kinds)
    derivative, arguments = by_read(function, wanted), (real, *[types.int64] * 4, types.Tuple(kinds))

    @compiled
    def of_query(s, batch, head, i, j, arrays):
        slope, element, last, _ = derivative(s, batch, head, i, j, arrays, 0)
        return slope, element - last

    @compiled
    def of_key(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays, 0)[2]

    @compiled
    def count(s, batch, head, i, j, arrays):
        return derivative(s, batch, head, i, j, arrays, 0)[3]

    for each in of_query, of_key, count:
        each.compile(arguments)
    by_query, by_key, by_all = (arguments_used(each.overloads[arguments]) for each in (of_query, of_key, count))
    if by_all or by_query & {"s", "j"} or by_key & {"s", "i", "j"} != {"j"}:
        return False
    nowhere = tuple([np.zeros((1,) * kind.ndim, as_dtype(kind.dtype)) for kind in kinds])
    return count(0.0, 0, 0, 0, 0, nowhere) == 1


def in_python(identity: Any, wanted: tuple[bool, ...], arrays: Any) -> Any:
    """(s, batch, head, i, j) -> element and derivative of each read, for arrays of NumPy's."""
    derivative = by_read(identity.function, wanted)

    def of_each(*element):
        number, count = 0, 1
        while number < count:
            try:
                slope, at, _, count = derivative(*element, arrays, number)
            except NumbaError:
                with naming(identity.function.python, of="gradient"):
                    raise
            if count:
                yield at, slope
            number += 1

    return of_each

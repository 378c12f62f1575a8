"""Arrays as a user's compiled function sees them, on CPUs and GPUs: read-only, and integers of 8 to 32 bits are read as
int64. In Numba the difference of two uint8 would be uint64."""

import operator

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing import signature
from numba.extending import (
    NativeValue,
    intrinsic,
    lower_builtin,
    models,
    overload,
    overload_attribute,
    register_model,
    typeof_impl,
    unbox,
)

from ..entries import Entries, entries_of


class Wide(types.IterableType):
    """An array of integers whose entries are int64. In plain Python the same is `entries.Entries`."""

    def __init__(self, array):
        self.array = array
        super().__init__(f"int64 of {array}")

    @property
    def iterator_type(self):
        return WideIterator(self.array.iterator_type)


class WideIterator(types.SimpleIteratorType):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(f"int64 of {inner}", widened(inner.yield_type))


@register_model(Wide)
class WideModel(models.StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [("array", kind.array)])


@typeof_impl.register(Entries)
def typeof_entries(entries, context):
    """A simulated kernel may call a compiled derivative."""
    return Wide(typeof_impl(entries._array, context).copy(readonly=True))


@unbox(Wide)
def unbox_entries(kind, entries, c):
    array = c.pyapi.object_getattr_string(entries, "_array")
    unboxed = c.unbox(kind.array, array)
    c.pyapi.decref(array)
    made = cgutils.create_struct_proxy(kind)(c.context, c.builder)
    made.array = unboxed.value
    return NativeValue(made._getvalue(), is_error=unboxed.is_error, cleanup=unboxed.cleanup)


@register_model(WideIterator)
class WideIteratorModel(models.StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [("inner", kind.inner)])


def widened(kind):
    """The type that a function sees of an array, a part of it, or an entry."""
    if isinstance(kind, types.Array):
        read_only = kind.copy(readonly=True)
        return Wide(read_only) if _is_narrow(kind.dtype) else read_only
    return types.int64 if _is_narrow(kind) else kind


def _is_narrow(kind):
    return isinstance(kind, types.Integer) and kind.bitwidth < types.int64.bitwidth


def emit_widened(context, builder, kind, x):
    out = widened(kind)
    if not isinstance(out, Wide):
        return context.cast(builder, x, kind, out) if out == types.int64 else x
    made = cgutils.create_struct_proxy(out)(context, builder)
    made.array = x
    return made._getvalue()


@intrinsic
def widen(typingctx, x):
    """A part of an array, or an entry, as the function sees it."""
    out = widened(x)

    def generate(context, builder, signature, args):
        return impl_ret_borrowed(context, builder, out, emit_widened(context, builder, x, *args))

    return out(x), generate


@intrinsic
def array_of(typingctx, x):
    """The array of a Wide."""

    def generate(context, builder, signature, args):
        array = cgutils.create_struct_proxy(x)(context, builder, args[0]).array
        return impl_ret_borrowed(context, builder, x.array, array)

    return x.array(x), generate


def seen(arrays):
    """A tuple of arrays, as the function sees them."""
    return tuple(map(entries_of, arrays))


@overload(seen)
def _seen(arrays):
    @intrinsic
    def all_of_them(typingctx, arrays):
        out = types.Tuple([widened(kind) for kind in arrays])

        def generate(context, builder, signature, args):
            parts = cgutils.unpack_tuple(builder, args[0], len(arrays))
            made = [emit_widened(context, builder, *each) for each in zip(arrays, parts)]
            return impl_ret_borrowed(context, builder, out, context.make_tuple(builder, out, made))

        return out(arrays), generate

    return lambda arrays: all_of_them(arrays)


# ------------------------------------------------------------------------------------------------------------- entries
@overload(operator.getitem)
def _getitem(x, place):
    if isinstance(x, Wide):
        return lambda x, place: widen(array_of(x)[place])


@overload(len)
def _len(x):
    if isinstance(x, Wide):
        return lambda x: len(array_of(x))


overload_attribute(Wide, "shape")(lambda x: lambda x: array_of(x).shape)
overload_attribute(Wide, "ndim")(lambda x: lambda x: array_of(x).ndim)
overload_attribute(Wide, "size")(lambda x: lambda x: array_of(x).size)
overload_attribute(Wide, "T")(lambda x: lambda x: widen(array_of(x).T))


@lower_builtin("getiter", Wide)
def getiter(context, builder, sig, args):
    (kind,), out = sig.args, sig.return_type
    array = cgutils.create_struct_proxy(kind)(context, builder, args[0]).array
    made = cgutils.create_struct_proxy(out)(context, builder)
    made.inner = context.get_function("getiter", signature(out.inner, kind.array))(builder, [array])
    return made._getvalue()


@lower_builtin("iternext", WideIterator)
def iternext(context, builder, sig, args):
    inner, found = sig.args[0].inner, types.Pair(sig.args[0].inner.yield_type, types.boolean)
    iterator = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).inner
    pair = context.get_function("iternext", signature(found, inner))(builder, [iterator])
    out = context.make_helper(builder, sig.return_type)
    out.first = emit_widened(context, builder, found.first_type, context.pair_first(builder, pair, found))
    out.second = context.pair_second(builder, pair, found)
    return out._getvalue()

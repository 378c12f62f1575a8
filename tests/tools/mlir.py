"""numbattn.cuda.compiler on numba-cuda-mlir, an experiment: importing this puts it in the other's place.

Import it before any kernel, in a process of its own. CONTRIBUTING says what it can and cannot do.
"""

import functools
import inspect
import re
import sys

import numpy as np
from llvmlite import ir as llvmlite_ir
from numba_cuda_mlir import cuda, extending, mlir_lowering, tools
from numba_cuda_mlir._mlir import ir as mlir
from numba_cuda_mlir._mlir.dialects import arith, memref
from numba_cuda_mlir.models import PrimitiveModel, register_model
from numba_cuda_mlir.numba_cuda import types
from numba_cuda_mlir.numba_cuda.core import ir as numba_ir
from numba_cuda_mlir.numba_cuda.core.errors import TypingError
from numba_cuda_mlir.numba_cuda.np.numpy_support import as_dtype, from_dtype
from numba_cuda_mlir.numba_cuda.typing.templates import AbstractTemplate, AttributeTemplate, make_intrinsic_template

import numbattn.cuda

from .mlir_llvm import F32, F64, I1, I8, I64, Builder, Value, computed_if, ir, loop, mlir_type, raw

__all__ = ["TypingError", "computed_if", "from_dtype", "ir", "loop"]


# -------------------------------------------------------------------------------------------------------------- types
def held_as_llvm(cls):
    @register_model(cls)
    class Model(PrimitiveModel):
        def __init__(self, manager, ty):
            super().__init__(manager, ty, mlir_type(ty.llvm))

    return cls


def known_when_compiled(cls):
    """A value is a byte that nobody reads: with none, functions that take one and return several are not lowered."""
    cls.llvm = I8
    constants.append(cls)
    return held_as_llvm(cls)


constants = []


def captured_as(cls, kind):
    extending.typeof_impl.register(cls)(lambda value, context: kind(value))


def llvm_of(ty):
    """The type of values of a type of numba-cuda-mlir's, if it is held as one of LLVM's."""
    ty = types.unliteral(ty)
    if isinstance(ty, types.Integer):
        return llvmlite_ir.IntType(ty.bitwidth)
    known = {types.boolean: I1, types.float32: F32, types.float64: F64}
    return getattr(ty, "llvm", known.get(ty))


def wrapped(value, ty):
    """What numba-cuda-mlir has of a variable, as a lowering takes it."""
    if isinstance(ty, types.BaseTuple):
        return tuple(wrapped(x, kind) for x, kind in zip(value, ty))
    known = llvm_of(ty)
    if known is None:
        return value
    if isinstance(value, int | float | np.generic):
        return llvmlite_ir.Constant(known, np.asarray(value).item())
    return Value(value, known)


def unwrapped(x, ty):
    if isinstance(ty, types.BaseTuple):
        return tuple(unwrapped(Builder(None).extract_value(x, i), kind) for i, kind in enumerate(ty))
    return raw(x) if isinstance(x, Value | llvmlite_ir.Constant) else x


# ----------------------------------------------------------------------------------------------------------- meanings
class Context:
    """What lowerings use of numba-cuda's context."""

    def __init__(self, lower):
        self.lower, self.get_value_type = lower, llvm_of

    def cast(self, b, value, source, target):
        if source == target:
            return value
        return wrapped(self.lower.lower_cast(source, target, unwrapped(value, source)), target)


def emit_call(lower, target, args, signature, emit):
    """Emit what a call does: arguments are converted to the types of the signature first."""
    values = []
    for arg, kind in zip(args, signature.args):
        if isinstance(kind, types.StarArgTuple):  # the arguments from here on
            values.append(None)  # which all are constants
            break
        actual, value = lower.get_numba_type(arg.name), lower.load_var(arg)
        values.append(wrapped(value if actual == kind else lower.lower_cast(actual, kind, value), kind))
    found = emit(Context(lower), Builder(lower), *values)
    if signature.return_type == types.none:
        found = mlir.NoneType.get()
    lower.store_var(target, unwrapped(found, signature.return_type))


def define(function, lowering):
    parameters = [*inspect.signature(lowering).parameters.values()][1:]

    def definition(context, *kinds):
        found = lowering(context, *kinds)
        return found and (found[0], generate)

    def generate(lower, target, args, kwargs):
        kinds = [lower.get_numba_type(arg.name) for arg in args]
        signature, emit = lowering(lower.context.typing_context, *kinds)
        several = any(x.kind == x.VAR_POSITIONAL for x in parameters)
        left = [] if several else zip(parameters[len(args) :], signature.args[len(args) :])
        defaults = [wrapped(x.default, kind) for x, kind in left]
        emit_call(lower, target, args, signature, lambda context, b, *values: emit(context, b, *values, *defaults))

    functools.update_wrapper(definition, function)
    del definition.__wrapped__
    definition.__signature__ = inspect.signature(lowering)
    template = make_intrinsic_template(function, definition, function.__name__)
    extending.typing_registry.register(template)
    extending.typing_registry.register_global(function, types.Function(template))
    extending.lowering_registry.lower(function, types.VarArg(types.Any))(generate)


extended = {}  # function: (its lowerings, the classes of types that they are for)


def extend(function, lowering, *inputs):
    @extending.typing_registry.register_global(function)
    class Calls(AbstractTemplate):
        prefer_literal = True

        def generic(self, args, kws):
            found = lowering(*args)
            return found and found[0]

    def generate(lower, target, args, kwargs):
        kinds = [lower.get_numba_type(arg.name) for arg in args]
        signature, emit = next(filter(None, (known(*kinds) for known in lowerings)))
        emit_call(lower, target, args, signature, lambda context, *values: emit(*values))

    lowerings, classes = extended.setdefault(function, ([], []))
    lowerings.append(lowering)
    for kinds in inputs:  # what a call does is looked up by the types of its arguments as they are: all mixtures
        for cls in {x if isinstance(x, type) else type(x) for x in kinds} - {type(types.Any)}:
            if len(kinds) == 1:
                extending.lowering_registry.lower(function, cls)(generate)
            else:
                others = [types.Any, cls, *classes]
                for pair in {*((cls, x) for x in others), *((x, cls) for x in others)}:
                    extending.lowering_registry.lower(function, *pair)(generate)
                classes.append(cls)


def extend_by_conversion(function, converted):
    @extending.typing_registry.register_global(function)
    class Calls(AbstractTemplate):
        prefer_literal = True

        def generic(self, args, kws):
            found = converted(*args)
            return found and self.context.resolve_function_type(function, found, {})

    def generate(lower, target, args, kwargs):
        kinds, given = converted(*[lower.get_numba_type(arg.name) for arg in args]), []
        for arg, kind in zip(args, kinds):
            variable = numba_ir.Var(arg.scope, f"$converted_{len(lower.fndesc.typemap)}", arg.loc)
            lower.fndesc.typemap[variable.name] = kind
            lower.store_var(variable, lower.lower_cast(lower.get_numba_type(arg.name), kind, lower.load_var(arg)))
            given.append(variable)
        result = types.none if target is None else lower.get_numba_type(target.name)
        lower.get_registered_builder(function, result(*kinds))(lower, target, given, kwargs)

    if function is not slice:  # what is there takes anything
        extending.lowering_registry.lower(function, types.VarArg(types.Any))(generate)


def define_attribute(cls, name, lowering):
    @extending.typing_registry.register_attr
    class Attribute(AttributeTemplate):
        key = cls

        def generic_resolve(self, ty, attribute):
            return lowering(ty)[0] if attribute == name else None

    @extending.lowering_registry.lower_getattr(cls, name)
    def generate(context, lower, target, variable):
        ty = lower.get_numba_type(variable.name)
        kind, emit = lowering(ty)
        lower.store_var(target, unwrapped(emit(Builder(lower), wrapped(lower.load_var(variable), ty)), kind))


def lower_cast(source, target):
    def decorate(emit):
        def cast(context, lower, source, target, value):
            return unwrapped(emit(Context(lower), Builder(lower), source, target, wrapped(value, source)), target)

        extending.lower_cast(source, target)(cast)
        return emit

    return decorate


def inlined(function):
    return extending.register_jitable(function, typing_registry=extending.typing_registry)


# ----------------------------------------------------------------------------------------------- what a lowering asks
def array_part(b, ty, array, name):
    def number(x):
        return Value(arith.index_cast(mlir_type(I64), x), I64)

    size, (_, offset, *parts) = I64(as_dtype(ty.dtype).itemsize), memref.extract_strided_metadata(array)
    if name == "data":
        start = number(memref.extract_aligned_pointer_as_index(array))
        return b.inttoptr(b.add(start, b.mul(number(offset), size)), llvmlite_ir.PointerType(I8))
    if name == "shape":
        return tuple(map(number, parts[: ty.ndim]))
    return tuple(b.mul(number(x), size) for x in parts[ty.ndim :])  # MLIR counts elements


def capability():
    return tools._cached_cc


# ---------------------------------------------------------------------------------------------------------------- PTX
def to_ptx(function, signature, cc, threads, blocks):
    tools._cached_cc = cc[:2]  # it would ask a GPU
    extending.refresh_registries()
    ptx, _ = cuda.compile(
        function, signature, device=False, abi="numba", cc=cc, launch_bounds=(threads, blocks), output="ptx"
    )
    return without_functions(ptx)


def without_functions(ptx):
    """The kernel alone: device functions are inlined, and stay in the text."""
    head, entry = ptx.split(".visible .entry")
    depth = 0
    for brace in re.finditer("[{}]", entry):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return f"{head.partition('.visible .func')[0]}.visible .entry{entry[: brace.end()]}\n"


# ------------------------------------------------------------------------------- what numba-cuda-mlir 0.6 does not have
def named_tuple(lower, target, args, kwargs):
    """Make a named tuple."""
    kinds = zip(args, lower.get_numba_type(target.name))
    values = [lower.lower_cast(lower.get_numba_type(arg.name), kind, lower.load_var(arg)) for arg, kind in kinds]
    lower.store_var(target, tuple(values))


def with_named_tuples(known):
    def builder_of(self, fn, signature):
        kind = isinstance(fn, numba_ir.Var) and self.get_numba_type(fn.name)
        return named_tuple if isinstance(kind, types.NamedTupleClass) else known(self, fn, signature)

    return builder_of


def is_constant(kind):
    several = isinstance(kind, types.BaseTuple)
    return any(map(is_constant, kind)) if several else isinstance(kind, tuple(constants))


def with_constants(known):
    def assign(self, target, source):
        kind = self.get_numba_type(target.name)
        if is_constant(kind):
            self.store_var(target, token(kind, source.value))
        else:
            known(self, target, source)

    return assign


def token(kind, value):
    if isinstance(kind, types.BaseTuple):
        return tuple(map(token, kind, value))
    return raw(llvmlite_ir.Constant(I8, 0)) if is_constant(kind) else value


LOWER = mlir_lowering.MLIRLower
LOWER._get_registered_builder = with_named_tuples(LOWER._get_registered_builder)
LOWER.lower_free_var_assign = with_constants(LOWER.lower_free_var_assign)
LOWER.lower_global_assign = with_constants(LOWER.lower_global_assign)
sys.modules["numbattn.cuda.compiler"] = numbattn.cuda.compiler = sys.modules[__name__]

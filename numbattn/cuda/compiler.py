"""The compiler for GPUs, numba-cuda: all that numbattn uses of it is here, and no other module imports any of it.

| | |
|---|---|
| types, from_dtype, as_dtype | types of arguments and variables, such as `types.int32`, and NumPy's dtypes as types |
| held_as_llvm, known_when_compiled | types of our own: what their values are made of |
| captured_as | the type of objects that kernels capture |
| TypingError | what a word raises where it is not used as it can be |
| ir | LLVM: types, constants, and the builder with which a lowering emits code |
| define | what a call of a function of ours compiles to |
| extend, extend_by_conversion | the same of functions and operators that the compiler knows, for types of our own |
| define_attribute, lower_cast | the same of attributes, and of conversions |
| inlined | a Python function that kernels may call |
| array_part, capability | what a lowering asks for: of an array, and of the GPU |
| computed_if, loop | branches in a lowering, beside those of `b.if_then` |
| to_ptx | a kernel in Python -> PTX |

A lowering takes the types of the arguments and returns the signature and emit(builder, *values), which emits code and
returns the LLVM value of the result. `define` and `lower_cast` hand over numba-cuda's contexts, too. Used of these are
`resolve_function_type` and `get_function`, to call a function that is an argument; `cast`; `get_value_type`.

numba-cuda 0.30 is older than the newest NumPy. It defines np.row_stack for kernels, which NumPy 2.5 no longer has, and
makes a timedelta without a unit, about which NumPy 2.5 warns; the former in a module that it imports when it first
compiles.
"""

import functools
import inspect
import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from threading import get_ident
from types import SimpleNamespace

import numpy as np
from llvmlite import ir

from .missing import missing

if find_spec("numba_cuda") is None:  # then numba.cuda is an old part of Numba itself
    raise missing("numba-cuda")


@contextmanager
def numpy_with_row_stack():
    """While numba.cuda is imported."""
    if hasattr(np, "row_stack"):
        yield
        return
    np.row_stack = np.vstack  # noqa: NPY201
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The 'generic' unit for NumPy timedelta", DeprecationWarning)
            yield
            import_module("numba.cuda.np.arrayobj")
    finally:
        del np.row_stack  # noqa: NPY201


with numpy_with_row_stack():
    from cuda.pathfinder import DynamicLibNotFoundError
    from numba import cuda
    from numba.cuda import dispatcher, types
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.core.errors import TypingError
    from numba.cuda.core.targetconfig import ConfigStack
    from numba.cuda.datamodel import default_manager
    from numba.cuda.extending import (
        core_models,
        intrinsic,
        lower_builtin,
        lower_cast,
        overload_attribute,
        register_jitable,
        register_model,
        typeof_impl,
    )
    from numba.cuda.models import cuda_data_manager
    from numba.cuda.np.numpy_support import as_dtype, from_dtype
    from numba.cuda.typing.templates import AbstractTemplate, infer, infer_global, make_intrinsic_template

__all__ = [
    "TypingError", "array_part", "as_dtype", "capability", "captured_as", "computed_if", "define", "define_attribute",
    "extend", "extend_by_conversion", "from_dtype", "held_as_llvm", "inlined", "ir", "known_when_compiled", "loop",
    "lower_cast", "to_ptx", "types",
]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- types
def held_as_llvm(cls):
    """Decorate a class of types: a value of one is an LLVM value of the LLVM type that is its `llvm`."""

    @register_model(cls)
    class Model(core_models.PrimitiveModel):
        def __init__(self, manager, ty):
            super().__init__(manager, ty, ty.llvm)

    return cls


def known_when_compiled(cls):
    """Decorate a class of types: the compiler knows all of a value, so that nothing is held when a kernel runs."""
    register_model(cls)(core_models.OpaqueModel)
    return cls


def captured_as(cls, kind):
    """Let kernels capture objects of a class: kind(object) is the type of one."""
    typeof_impl.register(cls)(lambda value, context: kind(value))


# ----------------------------------------------------------------------------------------------------------- meanings
def define(function, lowering):
    """Let kernels call a Python function: lowering(context, *types) -> signature, emit(context, builder, *values), or
    None for types that it does not take. A call may leave out arguments with a default there."""

    def definition(context, *kinds):
        found = lowering(context, *kinds)
        if found is None:
            return None
        signature, emit = found

        def generate(context, builder, signature, values):
            result = emit(context, builder, *values)
            return context.get_dummy_value() if result is None else result

        return signature, generate

    functools.update_wrapper(definition, function)
    del definition.__wrapped__
    definition.__signature__ = inspect.signature(lowering)
    template = make_intrinsic_template(function, definition, function.__name__, kwargs={"target": "cuda"})
    infer(template)
    infer_global(function, types.Function(template))


def extend(function, lowering, *inputs):
    """Let a known function or operator take more types: lowering(*types) -> signature, emit(builder, *values), or None.

    inputs: tuples of the types, or classes of types, that the arguments may have once they are converted.
    """

    @infer_global(function)
    class Calls(AbstractTemplate):
        prefer_literal = True  # the type of a constant is first its value's, then any number's

        def generic(self, args, kws):
            found = lowering(*args)
            return found and found[0]

    for kinds in inputs:
        lower_builtin(function, *kinds)(lambda context, b, signature, values: lowering(*signature.args)[1](b, *values))


def extend_by_conversion(function, converted):
    """Let a known function or operator take more types: those that converted(*types) returns take their place."""

    @infer_global(function)
    class Calls(AbstractTemplate):
        prefer_literal = True

        def generic(self, args, kws):
            found = converted(*args)
            if found is None:
                return None
            signature = self.context.resolve_function_type(function, found, {})
            self.implementation = self.context.resolve_value_type(function).get_impl_key(signature)
            return signature

        def get_impl_key(self, signature):
            return self.implementation


def define_attribute(cls, name, lowering):
    """Give the values of a class of types an attribute: lowering(type) -> its type, emit(builder, value)."""

    @intrinsic
    def get(context, value):
        kind, emit = lowering(value)
        return kind(value), lambda context, b, signature, values: emit(b, *values)

    @overload_attribute(cls, name)
    def attribute(value):
        return lambda value: get(value)


inlined = register_jitable(forceinline=True)


# ----------------------------------------------------------------------------------------------- what a lowering asks
_models = cuda_data_manager.chain(default_manager)


def array_part(b, ty, array, name):
    """An array's "data", "shape" or "strides"."""
    return _models.lookup(ty).get(b, array, name)


def capability():
    """The compute capability that code is compiled for."""
    return ConfigStack().top().compute_capability


# -------------------------------------------------------------------------------------------- branches in a lowering
I32 = ir.IntType(32)


def computed_if(b, condition, values, compute):
    """compute(), which returns values like `values`, if the condition holds, else `values`: a branch."""
    before, body, after = b.block, b.append_basic_block("computed"), b.append_basic_block("computed_end")
    b.cbranch(condition, body, after)
    b.position_at_end(body)
    computed, body = compute(), b.block
    b.branch(after)
    b.position_at_end(after)
    merged = []
    for value, other in zip(computed, values):
        merged.append(b.phi(value.type))
        merged[-1].add_incoming(other, before)
        merged[-1].add_incoming(value, body)
    return merged


def loop(b, ks, registers, turn):
    """for k in ks: registers = turn(k, registers), for rows of registers. Not unrolled."""
    before, body, after = b.block, b.append_basic_block("dot"), b.append_basic_block("dot_end")
    b.branch(body)
    b.position_at_end(body)
    k = b.phi(I32)
    k.add_incoming(I32(ks.start), before)
    phis = [[b.phi(register.type) for register in row] for row in registers]
    ends = turn(k, [list(row) for row in phis])
    following = b.add(k, I32(ks.step))
    k.add_incoming(following, b.block)
    for phi, start, end in zip(*map(chain.from_iterable, (phis, registers, ends))):
        phi.add_incoming(start, before)
        phi.add_incoming(end, b.block)
    b.cbranch(b.icmp_signed("<", following, I32(ks.stop)), body, after)
    b.position_at_end(after)
    return ends


# ---------------------------------------------------------------------------------------------------------------- PTX
def to_ptx(function, signature, cc, threads, blocks):
    """The PTX of a kernel for a compute capability. threads: of a block; blocks: the fewest a multiprocessor should
    hold."""
    from numba.cuda.cudadrv.error import NvvmSupportError  # which Numba's simulator of CUDA does not have

    try:
        with _device_of(cc):
            ptx, _ = cuda.compile(
                function, signature, device=False, abi="numba", cc=cc, launch_bounds=(threads, blocks), output="ptx"
            )
    except (NvvmSupportError, DynamicLibNotFoundError) as error:
        raise missing("libnvvm or libnvrtc") from error
    return ptx


@contextmanager
def _device_of(cc):
    """Numba asks for the current device while it compiles nested functions: answer for it, in this thread only."""
    device, here = SimpleNamespace(compute_capability=cc[:2]), get_ident()
    with global_compiler_lock:  # no other thread of ours may patch or restore meanwhile
        ask = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: device if get_ident() == here else ask()
        try:
            yield
        finally:
            dispatcher.get_current_device = ask

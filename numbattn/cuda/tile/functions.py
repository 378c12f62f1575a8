"""Functions of a tile of floats, element by element.

In float32 they use the GPU's fast instructions, which treat numbers below 1.2e-38 as 0; in float64 libdevice.
"""

from functools import wraps

import numpy as np

from ..compiler import ir
from .emit import F32, F64, asm, call
from .fragment import FLOATS, Operation
from .world import primitive


def function(plain, emit):
    """Decorate a stub whose docstring describes a function of one tile of floats."""

    def decorate(described):
        operation = Operation(described.__name__, plain, emit, FLOATS)

        @primitive
        @wraps(described)
        def meaning(x):
            return operation(x)

        return meaning.lowering(lambda x: operation.lower(x))

    return decorate


def emit_instruction(name):
    """Emit the fast instruction in float32, libdevice's function in float64, of these two names."""

    def emit(b, dtype, x):
        ptx, libdevice = name
        return asm(b, f"{ptx}.approx.ftz.f32 $0, $1;", F32, x) if x.type == F32 else call(b, libdevice, F64, x)

    return emit


emit_exp2, emit_log2 = emit_instruction(("ex2", "__nv_exp2")), emit_instruction(("lg2", "__nv_log2"))


def emit_exp(b, dtype, x):
    return emit_exp2(b, dtype, b.fmul(x, F32(np.log2(np.e)))) if x.type == F32 else call(b, "__nv_exp", F64, x)


def emit_log(b, dtype, x):
    return b.fmul(emit_log2(b, dtype, x), F32(np.log(2))) if x.type == F32 else call(b, "__nv_log", F64, x)


def emit_tanh(b, dtype, x):
    return call(b, "__nv_tanhf" if x.type == F32 else "__nv_tanh", x.type, x)


def emit_reciprocal(b, dtype, x):
    y = asm(b, "rcp.approx.ftz.f32 $0, $1;", F32, x) if x.type == F32 else b.fdiv(ir.Constant(F64, 1.0), x)
    zero = ir.Constant(x.type, 0.0)
    return b.select(b.fcmp_ordered("==", x, zero), zero, y)


@function(np.exp2, emit_exp2)
def exp2(x):
    """2**x. In float32 to 2e-7, relative.

    >>> show(lambda x: exp2(x))
    array([[  1.,   2.,   4.,   8.],
           [ 16.,  32.,  64., 128.]], dtype=float32)
    """


@function(np.exp, emit_exp)
def exp(x):
    """e**x. In float32 to (2 + abs(x)) * 1e-7, relative: `exp2` is faster, and exact to 2e-7.

    >>> show(lambda x: exp(x / 2))[0].round(4)
    array([1.    , 1.6487, 2.7183, 4.4817], dtype=float32)
    """


@function(np.log2, emit_log2)
def log2(x):
    """The base-2 logarithm; -inf of 0. In float32 to 2e-7 where abs(x - 1) < 1/2, absolute; else relative.

    >>> show(lambda x: log2(x + 1))[0].round(4)
    array([0.   , 1.   , 1.585, 2.   ], dtype=float32)
    """


@function(np.log, emit_log)
def log(x):
    """The natural logarithm; -inf of 0. As exact as `log2`, whose product with ln 2 it is in float32.

    >>> show(lambda x: log(x))[0].round(4)
    array([  -inf, 0.    , 0.6931, 1.0986], dtype=float32)
    """


@function(np.tanh, emit_tanh)
def tanh(x):
    """The hyperbolic tangent. In float32 to 2e-7, relative, for large and small x alike.

    >>> show(lambda x: tanh(x))[0].round(4)
    array([0.    , 0.7616, 0.964 , 0.9951], dtype=float32)
    """


@function(np.sqrt, emit_instruction(("sqrt", "__nv_sqrt")))
def sqrt(x):
    """The square root. In float32 to 2e-7, relative.

    >>> show(lambda x: sqrt(x))[0].round(4)
    array([0.    , 1.    , 1.4142, 1.7321], dtype=float32)
    """


@function(lambda x: np.where(x == 0, x.dtype.type(0), 1 / x), emit_reciprocal)
def reciprocal(x):
    """1/x, and 0 where x is 0. In float32 to 2e-7, relative, a tenth of the work of `/`.

    >>> show(lambda x: reciprocal(x))[0].round(4)
    array([0.    , 1.    , 0.5   , 0.3333], dtype=float32)
    """

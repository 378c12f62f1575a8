"""Numba's compiler for a user's own functions: whatever would differ from Python is mended or refused.

- float ** int raises an error of its own where it divides by zero, whatever the error model: the exponent becomes a
  float
- so does round(x, n): it becomes a function that does not
- int ** int is an integer even where the exponent is negative: refused; of constants it may be beyond int64: refused
- ~True is False: refused
- float32 and a number that is written down, as in 2 * s, make float64: the number becomes a float32, as in NumPy
"""

import math
import operator
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import ir
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError
from numba.core.ir_utils import find_const, get_definition, guard, mk_unique_var
from numba.core.registry import CPUDispatcher
from numba.core.untyped_passes import InlineClosureLikes, MakeFunctionToJitFunction
from numba.extending import overload, register_jitable

from ...base.forks import cached_property
from ...base.interrupts import uninterrupted
from ..frozen import has_float32
from .linked import NO_WRAPPERS, OptimisedLowering, linking

NO_POWER = "has int ** int, which is a float if the exponent is negative: write float(x) ** y"
NEGATIVE_POWER = "has a negative integer as an exponent: write x ** -1.0"
NO_COMPLEMENT = "has ~ of True or False, which is -2 or -1 in Python: write not x, or ~int(x)"
LARGE_POWER = "has a power that int64 cannot hold: write 2.0 ** 70"
POWERS = operator.pow, operator.ipow
KNOWN_TO_LLVM = -1, 0.5, 1, 2  # powers that are a product, a quotient or a root
REFUSED = NO_POWER, NEGATIVE_POWER, NO_COMPLEMENT, LARGE_POWER


def power(x, y):
    return x**y


@overload(power)
def _power(x, y):
    if getattr(x, "is_dual", False) or getattr(y, "is_dual", False):
        return None  # its rule is in `dual`
    if isinstance(y, types.Integer):
        if isinstance(x, types.Integer | types.Boolean):
            raise TypingError(NO_POWER)
        return lambda x, y: x ** float(y)
    return lambda x, y: x**y


def round_to(x, digits):
    return round(x, digits)


@overload(round_to)
def _round_to(x, digits):
    """round(x, digits) as in CPython, in float64."""
    if isinstance(x, types.Integer | types.Boolean):
        return lambda x, digits: round(x, digits)
    if isinstance(x, types.Float):
        kind = x

        def of_float(x, digits):
            small, large = 10.0 ** float(min(abs(digits), 22)), 10.0 ** float(max(abs(digits) - 22, 0))
            if digits < 0:
                y = whole(x / small / large)
                return kind(y * small * large if y != 0 else y)     # large may be inf
            y = x * large * small
            return kind(whole(y) / small / large) if math.isfinite(y) else x

        return of_float


@register_jitable
def whole(x):
    return float(round(x)) if abs(x) < 2.0**52 else float(x)


def complement(x):
    return ~x


@overload(complement)
def _complement(x):
    if isinstance(x, types.Boolean):
        raise TypingError(NO_COMPLEMENT)
    return lambda x: ~x


def beside(number, x):
    return number


@overload(beside)
def _beside(number, x):
    """A number that float32 holds, in an operation with x, which may be a dual number."""
    while getattr(x, "is_dual", False):
        x = x.dtype
    return (lambda number, x: np.float32(number)) if x == types.float32 else (lambda number, x: number)


@register_pass(mutates_CFG=False, analysis_only=False)
class Replacing(FunctionPass):
    """Replace operators, and numbers in them, by the functions above."""

    _name = "numbattn_replaces_operators"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        changed = False
        for block in state.func_ir.blocks.values():
            body = []
            for statement in block.body:
                if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
                    changed |= _replace(statement, Inserting(state.func_ir, block.scope, statement.loc, body))
                body.append(statement)
            block.body = body
        return changed


class Inserting(NamedTuple):
    """Where statements are inserted."""

    func_ir: Any
    scope: Any
    loc: Any
    body: list[Any]

    def assign(self, name, value):
        """A new variable of this value."""
        made = ir.Var(self.scope, mk_unique_var(name), self.loc)
        self.func_ir._definitions[made.name].append(value)
        self.body.append(ir.Assign(value, made, self.loc))
        return made

    def call(self, function, arguments):
        """A call as an expression."""
        name = function.__name__
        return ir.Expr.call(self.assign(name, ir.Global(name, function, self.loc)), arguments, (), self.loc)


def _replace(statement, inserting):
    """Replace what is assigned, or operands of it, if need be; whether that was done."""
    value, func_ir = statement.value, inserting.func_ir
    found = _instead_of(value, func_ir)
    if found:
        statement.value = inserting.call(*found)
        return True
    if value.op not in ("binop", "inplace_binop") or value.fn in POWERS:
        return False
    operands = {"lhs": value.rhs, "rhs": value.lhs}
    written = {name: other for name, other in operands.items() if _is_written(getattr(value, name), func_ir)}
    for name, other in written.items() if len(written) == 1 else ():
        call = inserting.call(beside, [getattr(value, name), other])
        value._kws[name] = inserting.assign(beside.__name__, call)
    return len(written) == 1


def _is_written(operand, func_ir):
    """Whether it is a number that is written down, and that float32 can stand for."""
    number = guard(find_const, func_ir, operand)
    return (type(number) is int and abs(number) <= 2**24) or (type(number) is float and has_float32(number))


def _instead_of(value, func_ir):
    """The function above that replaces an operation, and its arguments; None for anything else."""
    if value.op == "unary" and value.fn is operator.invert:
        return complement, [value.value]
    if value.op == "call" and len(value.args) == 2:
        called = guard(get_definition, func_ir, value.func)
        return (round_to, value.args) if getattr(called, "value", None) is round else None
    if value.op not in ("binop", "inplace_binop") or value.fn not in POWERS:
        return None
    exponent = guard(find_const, func_ir, value.rhs)
    if isinstance(exponent, float | np.floating) and exponent in KNOWN_TO_LLVM:
        return None
    if not isinstance(exponent, int):
        return power, [value.lhs, value.rhs]
    if exponent < 0:
        raise TypingError(NEGATIVE_POWER, value.loc)
    base = guard(find_const, func_ir, value.lhs)
    if isinstance(base, int) and abs(base) > 1 and exponent * math.log2(abs(base)) >= 63:
        raise TypingError(LARGE_POWER, value.loc)
    return None


@register_pass(mutates_CFG=False, analysis_only=False)
class Recompiling(FunctionPass):
    """Let this compiler also compile inner functions that are passed on, which Numba has compiled."""

    _name = "numbattn_compiles_inner_functions"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        changed = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                is_global = isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Global)
                made = statement.value.value if is_global else None
                if isinstance(made, Dispatcher) and "error_model" not in made.targetoptions:
                    statement.value = ir.Global(made.py_func.__name__, compiled(made.py_func), statement.loc)
                    changed = True
        return changed


class Compiler(CompilerBase):
    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(Replacing, InlineClosureLikes)  # of inner functions that are called, too
        passes.add_pass_after(Recompiling, MakeFunctionToJitFunction)
        passes.finalize()
        return [passes]


OPTIONS = {"nopython": True, "boundscheck": None, "error_model": "numpy", "forceinline": True}


class LinkedCompiler(Compiler):
    def define_pipelines(self):
        return [linking(passes, OptimisedLowering) for passes in super().define_pipelines()]


class Called(CPUDispatcher):
    """A function that Python calls, compiled then."""

    compile = uninterrupted(CPUDispatcher.compile)
    _compile_for_args = uninterrupted(CPUDispatcher._compile_for_args)


class Compiled(Called):
    """A function that is compiled when it is called, if not before, and linked into the one that calls it."""

    @cached_property
    def entry(self):
        def entry(*arguments):
            return self(*arguments)

        return Called(entry, targetoptions=OPTIONS)

    def __call__(self, *arguments):
        """From Python."""
        return self.entry(*arguments)


def compiled(function, has_address=False):
    """has_address: as functions need that call themselves; they are not linked."""
    compiler = Compiler if has_address else LinkedCompiler
    return Compiled(function, targetoptions=OPTIONS | NO_WRAPPERS, pipeline_class=compiler)

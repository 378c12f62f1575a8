"""Subnormal numbers are flushed to 0 while a kernel runs: many CPUs take over a hundred cycles for an operation on one.

The thread's setting is restored before the kernel returns, and nothing in a kernel raises.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .target import TRIPLE
from .tile import INT64

INT32, POINTER = ir.IntType(32), ir.IntType(8).as_pointer()
FTZ_DAZ = 1 << 15 | 1 << 6  # of MXCSR: results, and operands
FZ = 1 << 24  # of FPCR: both
MACHINE = TRIPLE.split("-")[0]  # of this process: Windows on Arm runs those of x86, too


class Mxcsr:
    """The control register of x86."""

    flush = FTZ_DAZ

    @staticmethod
    def read(builder):
        place = cgutils.alloca_once(builder, INT32)
        call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), builder.bitcast(place, POINTER))
        return builder.zext(builder.load(place), INT64)

    @staticmethod
    def write(builder, state):
        place = cgutils.alloca_once(builder, INT32)
        builder.store(builder.trunc(state, INT32), place)
        call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), builder.bitcast(place, POINTER))


class Fpcr:
    """The control register of 64-bit ARM."""

    flush = FZ

    @staticmethod
    def read(builder):
        return call(builder, "llvm.aarch64.get.fpcr", INT64)

    @staticmethod
    def write(builder, state):
        call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), state)


class Unknown:
    """A CPU whose setting is not changed."""

    flush = 0

    @staticmethod
    def read(builder):
        return INT64(0)

    @staticmethod
    def write(builder, state):
        pass


CONTROL = {"x86_64": Mxcsr, "aarch64": Fpcr, "arm64": Fpcr}.get(MACHINE, Unknown)


def call(builder, name, result, *operands):
    function = ir.FunctionType(result, [x.type for x in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)


@intrinsic
def flush_subnormals(typingctx):
    """Flush subnormal numbers to 0 from here on. Returns the setting before."""

    def generate(context, builder, signature, args):
        before = CONTROL.read(builder)
        CONTROL.write(builder, builder.or_(before, INT64(CONTROL.flush)))
        return before

    return types.int64(), generate


@intrinsic
def restore(typingctx, before):
    """Restore the setting."""

    def generate(context, builder, signature, args):
        CONTROL.write(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate

"""Stages that threads fill themselves: with integers, or with what a warpgroup has put there. See `pipeline`."""

import numpy as np

from ..compiler import TypingError, ir, types
from . import simulator
from .emit import I32, load_vector, store_vector
from .integers import INDEX, INTEGERS, resized
from .layout import WARPGROUP
from .pipeline import emit_arrival, emit_arrival_of_group, unpack
from .shared_memory import emit_stage
from .world import primitive


@primitive
def commit(stage, numbers=None):
    """Fill a stage of int32 with these integers, by one thread; consumers `read` them.

    Without numbers this warpgroup has put its part into the stage: as in `release`, what its first thread knows counts.

    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     S = stage(RING, 0)
    ...     if thread_index() == 0:
    ...         commit(S, (3, 4, 5, 6))
    ...     wait(S)
    ...     y[0], y[1], y[2], y[3] = read(S)
    >>> run(kernel, np.zeros(4))
    array([3., 4., 5., 6.])
    """
    if numbers is not None:
        _check_numbers(stage.pipeline.tile, numbers, int | np.integer | np.bool_)
        stage.next_round()
        stage.tile.write(0, np.arange(len(numbers)), np.array(numbers, np.int32))
    elif simulator.thread_index() % WARPGROUP:
        return
    else:
        stage.next_round()
    stage.barrier(free=False).arrive()


@commit.lowering
def commit(stage, numbers=None):
    if not isinstance(numbers, types.BaseTuple):
        return types.void(stage, types.none), lambda b, value, *_: emit_arrival_of_group(b, stage, value, False)
    _check_numbers(stage.pipeline.tile, numbers, INTEGERS)

    def generate(b, value, values):
        index, _ = unpack(b, value)
        start = emit_stage(b, stage.pipeline.tile, index)
        for i in range(len(numbers)):
            store_vector(b, [resized(b, b.extract_value(values, i), 32, signed=True)], b.gep(start, [I32(i)]))
        emit_arrival(b, stage.pipeline, index, False)

    return types.void(stage, numbers), generate


def _check_records(word, plan):
    if plan.dtype != np.int32:
        raise TypingError(f"{word}: {plan} holds no int32")


def _check_numbers(plan, numbers, integers):
    _check_records("commit", plan)
    if len(numbers) != plan.cols or not all(isinstance(x, integers) for x in numbers):
        raise TypingError(f"commit: got {numbers}, expected a tuple of {plan.cols} integers")


@primitive
def read(stage):
    """The integers in a stage: see `commit`.

    >>> def kernel(y):
    ...     init_pipelines(RING)
    ...     sync_threads()
    ...     if thread_index() == 0:
    ...         commit(stage(RING, 0), (3, 4, 5, 6))
    ...     wait(stage(RING, 0))
    ...     a, b, c, d = read(stage(RING, 0))
    ...     y[0] = a * b + c * d
    >>> run(kernel, np.zeros(1))
    array([42.])
    """
    _check_records("read", stage.pipeline.tile)
    return tuple(stage.tile.read(0, np.arange(stage.pipeline.tile.cols)))


@read.lowering
def read(stage):
    plan = stage.pipeline.tile
    _check_records("read", plan)
    out = types.UniTuple(INDEX, plan.cols)

    def generate(b, value):
        start = emit_stage(b, plan, unpack(b, value)[0])
        numbers = ir.Constant(ir.ArrayType(I32, plan.cols), ir.Undefined)
        for i in range(plan.cols):
            (number,) = load_vector(b, b.gep(start, [I32(i)]), 1)
            numbers = b.insert_value(numbers, number, i)
        return numbers

    return out(stage), generate

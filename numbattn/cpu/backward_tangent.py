"""The tangent of the gradients on the CPU: the kernel of `backward` along several directions.

Blocks, and the order of all sums, are those of `backward`.
"""

from functools import lru_cache

import numpy as np

from ..base.gradients import sum_to
from ..base.values import put
from ..call.tangents import parts_of
from .backward import gradients_of_score, operands_of, planned, run
from .backward_tile import ARRAYS as BACKWARD
from .operands import ROWS_ALONG, TANGENT, Operands
from .score import kept_in, nonlinear_in, options_of
from .score_tangents import tangents_of_steps
from .scratch import Lent, scratch_of
from .tangent import AT_ONCE

ARRAYS = Operands(
    tq=TANGENT, tk=TANGENT, tv=TANGENT, to=TANGENT, tdo=TANGENT, tlse=ROWS_ALONG, tdlse=ROWS_ALONG
)  # of BackwardDirections


def backward_tangent(problem, inputs, given, tangents):
    """The tangents of dq, dk, dv and of gradients of parts of the score, by name, with an axis of directions in front;
    given: arrays by name."""
    if tangents.count <= AT_ONCE:
        return along(problem, inputs, given, tangents)
    found = []
    for first in range(0, tangents.count, AT_ONCE):
        end = first + AT_ONCE
        some = {name: x if x is None or name[0] != "t" else x[first:end] for name, x in given.items()}
        found.append(along(problem, inputs, some, tangents.some(first, end)))
    return {name: np.concatenate([x[name] for x in found]) for name in found[0]}


def along(problem, inputs, given, tangents):
    """The results of `backward_tangent` for at most AT_ONCE directions."""
    count, lent = tangents.count, Lent()
    tparts = [parts_of(inputs, tangents, number, backward=True) for number in range(count)]
    directions = ARRAYS.record(problem, given, lent.new), tangents_of_steps(problem, inputs, tparts, order=2)
    arrays, layouts = operands_of(problem, inputs, given, lent.new)
    given = BACKWARD.described(problem, layouts), *options_of(problem, inputs, order=2)
    scratch = scratch_for(problem, count, nonlinear_in(inputs.score), kept_in(inputs.score))
    cost = count * (6 * problem.head_dim + 4 * problem.head_dim_v)
    call = planned(problem, inputs, given, scratch, cost, directions, count)
    tdq, tdk, tdv, of_score = run(problem, call, arrays, count, lent.new)
    of = (tdq, inputs.q), (tdk, inputs.k), (tdv, inputs.v)
    grads = [joined([sum_to(x, like.shape) for x in each], like.shape, problem.result_dtype) for each, like in of]
    lent.give_back()
    return dict(zip(("tdq", "tdk", "tdv"), grads)) | gradients_of_score(inputs.score, map(np.array, of_score), (count,))


@lru_cache(maxsize=64)
def scratch_for(problem, count, nonlinear, kept):
    """The scratch of a call along `count` directions. nonlinear, kept: how many parts of the score are not linear, and
    how many need S before them."""
    return scratch_of(
        problem, S=1, dP=1, dS=1, tS=1, tdP=1, slopes=2 * (nonlinear + kept), bends=nonlinear, QT=1,
        dOT=1, tQT=count, tdOT=count, vectors=3, tD=count + 1,
    )  # fmt: skip


@np.errstate(under="ignore")
def joined(found, shape, dtype):
    """Arrays of this shape as one with an axis in front."""
    out = np.empty((len(found), *shape), dtype)
    for number, x in enumerate(found):
        put(out[number, ...], x)
    return out

"""The tangent of attention on the CPU, and its second derivatives: the kernel of `forward` along directions."""

import numpy as np

from ..base.values import rounded
from ..call.tangents import parts_of
from .arguments import record_of_tiles
from .bfloat16 import NO_PAIRS
from .forward import call_of
from .launch import launch
from .operands import RESULT, RESULT_ALONG, ROWS_ALONG, TANGENT, Operands, operands_of, record_of
from .score import kept_in, nonlinear_in, options_of, sinks_of
from .score_tangents import tangents_of_sinks, tangents_of_steps
from .scratch import TILE_M, Lent

AT_ONCE = 4  # directions: more would drive tiles out of the cache
ARRAYS = Operands(to=RESULT_ALONG, tlse=ROWS_ALONG, o2=RESULT, tq=TANGENT, tk=TANGENT, tv=TANGENT)  # of Directions


def tangent(problem, inputs, given, tangents, bends=False):
    """o, lse, its low part, and the tangents of o and lse, by name; with `bends` o2, too, a sum of second derivatives
    of o for each AT_ONCE directions."""
    starts, dtype = range(0, max(tangents.count, 1), AT_ONCE), problem.sum_dtype
    lent = Lent()
    new = np.empty if problem.result_dtype == dtype else lent.new
    o, lse = new(problem.out_shape, dtype), np.empty((2, *problem.lse_shape), dtype)
    to, tlse = new((tangents.count, *o.shape), dtype), np.empty((tangents.count, *problem.lse_shape), dtype)
    o2, along = np.empty((len(starts) * bends, *o.shape), dtype), {"to": to, "tlse": tlse}
    options = *options_of(problem, inputs, order=1 + bends), sinks_of(problem, inputs.score)
    arrays, layouts = operands_of(problem, inputs, lent.new, widened=True)
    operands, tiles = record_of(problem, layouts, True), record_of_tiles(problem, inputs.mask, TILE_M)
    slopes = (nonlinear_in(inputs.score) + kept_in(inputs.score)) * (1 + bends)
    for number, first in enumerate(starts):
        count = min(AT_ONCE, tangents.count - first)
        tparts = [parts_of(inputs, tangents, first + t) for t in range(count)]
        own = {name: x if x is None else x[first : first + count] for name, x in (given | along).items()}
        if bends:
            own["o2"] = o2[number]
        of_score = tangents_of_steps(problem, inputs, tparts), tangents_of_sinks(problem, tparts)
        directions = ARRAYS.record(problem, own, lent.new), *of_score
        call = call_of(problem, (operands, *options), *tiles, NO_PAIRS, directions, count, int(bends), slopes)
        launch(*call, (*arrays, o, lse))
    o, to = rounded(o, problem.result_dtype), rounded(to, problem.result_dtype)
    lent.give_back()
    return {"o": o, "lse": lse[0], "lse_low": lse[1], "to": to, "tlse": tlse, "o2": o2}

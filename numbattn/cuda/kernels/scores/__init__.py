"""Scores: what a call's parts do to S = scale Q K^T before the mask, and what dS is multiplied by. See numbattn.scores.

Only the kinds of the parts are compiled in; their numbers and arrays are arguments. Without a score nothing is. Slopes
are added to Q K^T, in its unit: the multiplication by scale stays where it is, in the exponent, and takes no time. The
first part of another kind takes scale Q K^T, and what kernels call scale_log2 is log2(e) then.
"""

from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from ...plan.arguments import Word
from ...plan.steps import OFFSETS, array_of_function, array_of_offset, array_of_part
from ...tile import (
    INDEX,
    Alignment,
    aligned,
    always,
    column_halves,
    convert,
    device,
    diagonal_index,
    exp2,
    full,
    get,
    index,
    load,
    maximum,
    minimum,
    opaque,
    part_sum,
    reciprocal,
    shape,
    take,
    where,
)
from ..shared.layouts import DTYPES, array_type, places_of, sum_type
from ..shared.softmax import LOG2_E
from ..shared.visibility import EDGE, LINE, is_looked_up
from .function import (
    FUNCTION,
    SHIFT,
    arrays_of,
    function,
    function_types,
    has_matrices,
    nothing_ahead,
    shift,
    value,
)

CURVED = "softcap", FUNCTION  # kinds with a derivative that is not 1
SINK_PART = "sink"
OF_DISTANCE = "alibi", "relative"  # kinds of what depends on a key's distance from a query's own, i + offset
BY_MATRIX, BY_SEGMENT, BY_QUERY = "matrix", "segment", "query"  # the offset, if it is not a number for all
COLS_AT_ONCE = 32  # of dS, for the gradient of slopes


class Scores(NamedTuple):
    """A score, as kernels take it."""

    scale: Any
    inverse_scale: Any
    parts: Any  # of each but a sink what its kind needs: see `part_types`
    logits: Any  # (batch, heads), where there is a sink


def kind_of(part):
    """What is compiled in of a part is a string: its kind; of a bias dtype and alignment, too; of slopes and tables
    what their offset depends on; for functions of the user's own see `function`."""
    return part.partition(" ")[0]


def looks_up(score):
    """Whether a part looks up a number for each element, or row."""
    kinds = "bias", "relative", FUNCTION
    return any(kind_of(part) in kinds or has_matrices(part) or offset_kind(part) == BY_QUERY for part in score)


def parts_of(score):
    return [part for part in score if part != SINK_PART]


def place_of_part(score, number):
    """Which of Scores.parts it is: sinks are not among them."""
    return len(parts_of(score[:number]))


def part_types(part, number):
    """The types of what a part needs."""
    kind, *about = part.split()
    if kind == "softcap":
        return number, number                                           # the cap, and 1 / cap
    if kind == "alibi":
        return array_type(np.dtype(number.name), 2), offset_type(part)  # slopes
    if kind == "relative":
        return array_type(np.dtype(number.name), 3), offset_type(part)  # the table
    if kind in (FUNCTION, SHIFT):
        return function_types(part)
    return (array_type(DTYPES[about[0]], 4),)                           # the bias


def offset_kind(part):
    """Of slopes and tables: how the own key of query 0 is given."""
    return part.partition(" ")[2] if kind_of(part) in OF_DISTANCE else None


def offset_type(part):
    return {BY_MATRIX: EDGE, BY_QUERY: LINE}.get(offset_kind(part), INDEX)


OWN_AXES = {"alibi": 0, "relative": 1, "bias": 2, SINK_PART: 0}  # of a part's array, beside those of the batch


class ScoreWord(Word):
    """The fields of Scores; nothing without a score."""

    def flat(self, planner, work):
        parts = sorted(enumerate(work.score), key=lambda x: x[1] == SINK_PART)
        if parts:
            yield from ("scale", "inverse_scale")
        for number, part in parts:
            yield from arrays_of_part(planner, work, number, part)
            yield from planner.call.score[number].numbers


SCORE = ScoreWord()


def arrays_of_part(planner, work, number, part):
    """What part number `number` of a score passes, without its numbers."""
    if kind_of(part) in OWN_AXES:
        yield planner.at(array_of_part(number), own=OWN_AXES[kind_of(part)])
    if offset_kind(part) == BY_MATRIX:
        yield planner.at(array_of_offset(number), own=0)
    elif offset_kind(part) == BY_SEGMENT:
        yield 0                                             # kernels know it
    elif offset_kind(part) == BY_QUERY:
        yield planner.at(OFFSETS, own=1)
    elif kind_of(part) in (FUNCTION, SHIFT):
        yield from ("first_batch", work.problem.seqlen_q, work.problem.seqlen_k)
        yield from (planner.whole(array_of_function(number, which)) for which in range(len(arrays_of(part))))


def scores_type(score, dtype):
    """The type of Scores with these parts, or of nothing."""
    if not score:
        return types.Tuple(())
    number = getattr(types, sum_type(dtype).__name__)
    parts = types.Tuple([types.Tuple(part_types(part, number)) for part in parts_of(score)])
    logits = types.Tuple([array_type(sum_type(dtype), 2)] * (SINK_PART in score))
    return types.NamedTuple([number, number, parts, logits], Scores)


def is_curved(score):
    """Whether a part has a derivative that is not 1."""
    return any(kind_of(part) in CURVED for part in score)


def is_natural(score):
    """Whether S behind all parts is an exponent of e, else it is Q K^T plus slopes."""
    return any(kind_of(part) != "alibi" for part in parts_of(score))


def may_be_far(score):
    """Whether a mask of finfo.min may be among the parts: of float32 or what has its exponents, and behind the last
    Softcap, which ends them."""
    kinds = [part.split() for part in parts_of(score)]
    caps = [number for number, (kind, *_) in enumerate(kinds) if kind == "softcap"]
    behind = kinds[caps[-1] + 1 :] if caps else kinds
    return any(kind in (FUNCTION, SHIFT) or (kind == "bias" and about[0] != "float16") for kind, *about in behind)


def score_steps(score, layout, ACC, transposed=False, behind=-1):
    """Device functions for tiles of S = Q K^T: (S, scores, batch, head, m0, n0) -> S behind all parts, and F;
    (dS, F) -> dS F; (scale) -> what S is multiplied by to be an exponent of 2.

    F is the derivative of what the parts behind number `behind` do, by what they are given; with behind=len(score),
    in the forward pass, there is none. The tile's rows are queries, or keys if it is transposed.
    """
    look_up, apply, *others = score_steps_ahead(score, layout, ACC, transposed, behind)

    @device
    def look_up_and_apply(S, scores, batch, head, m0, n0):
        return apply(S, look_up(scores, (), batch, head, m0, n0), scores, batch, head, m0, n0)

    return look_up_and_apply, *others


def boxed_bias(work):
    """The number of the bias whose tiles TMA loads on Hopper, or None: one of two bytes an element, with rows that a
    tensor map takes, where nothing else is looked up."""
    looking_up = [number for number, part in enumerate(work.score) if looks_up([part])]
    boxed = [number for number, part in enumerate(work.score) if part.endswith("boxes")]
    alone = looking_up == boxed and not (is_looked_up(work.mask) or work.problem.dropout)
    return boxed[0] if alone and len(boxed) == 1 else None


def dtype_of_part(work, number):
    """The name of that of a bias; nothing for None."""
    return "" if number is None else work.score[number].split()[1]


def boxed_dtype(work):
    return dtype_of_part(work, boxed_bias(work))


def score_steps_ahead(score, layout, ACC, transposed=False, behind=-1, has_room=True, is_boxed=False):
    """As `score_steps`, where arrays are loaded while S is still computed: the first device function, (scores, tile,
    batch, head, m0, n0), starts the loads, and what it returns is an argument of the second one, behind S.

    has_room: whether there are registers for that; else the second one loads them. is_boxed: whether the bias is in
    `tile`, in shared memory; else that is ().
    """
    if not has_room:
        look_up_and_apply, *others = score_steps(score, layout, ACC, transposed, behind)

        @device
        def apply_late(S, found, scores, batch, head, m0, n0):
            return look_up_and_apply(S, scores, batch, head, m0, n0)

        return nothing_ahead, apply_late, *others

    parts = parts_of(score)
    curved = [number for number, part in enumerate(parts) if kind_of(part) in CURVED]
    if not parts:
        return nothing_ahead, as_it_is, linear, to_log2_of(score, ACC)

    makers = STEPS | {"bias": boxed} if is_boxed else STEPS
    makers = [makers if number > behind else makers | {FUNCTION: value} for number in range(len(parts))]
    steps = [
        make[kind_of(part)](part, number, units(parts[:number], part), layout, ACC, transposed)
        for number, (part, make) in enumerate(zip(parts, makers))
    ]
    if behind >= 0:  # the derivatives of those before are not asked for
        steps[: behind + 1] = map(without_derivative, steps[: behind + 1])
    (look_up, every_step), ONE = reduce(then, steps), ACC(1)

    @device
    def apply(S, found, scores, batch, head, m0, n0):
        return every_step(S, full(layout, ONE), found, scores, batch, head, m0, n0)

    return look_up, apply, times if any(number > behind for number in curved) else linear, to_log2_of(score, ACC)


def softmax_score_steps(score, layout, ACC, has_levels=True, is_boxed=False):
    """As `score_steps_ahead`, for the forward pass; but the second device function returns S, level and factor. Behind
    all parts S is factor S + level, or as it is where they are None: the softmax multiplies and adds anyway. Not if
    has_levels is False, nor where no tile has a level."""
    *before, last = parts_of(score) or [""]
    if not has_levels or kind_of(last) != "relative" or offset_kind(last) == BY_QUERY:
        look_up, apply, *_ = score_steps_ahead(score, layout, ACC, behind=len(score), is_boxed=is_boxed)

        @device
        def apply_all(S, found, scores, batch, head, m0, n0):
            S, _ = apply(S, found, scores, batch, head, m0, n0)
            return S, None, None

        return look_up, apply_all

    look_up, apply, *_ = score_steps_ahead(before, layout, ACC, behind=len(before))
    (unit, number), ZERO, ONE = (units(before, last), len(before)), ACC(0), ACC(1)
    by_element, shared_entry = relative_steps(last, number, unit, layout, ACC)
    _, natural = unit

    @device
    def apply_but_level(S, found, scores, batch, head, m0, n0):
        S, _ = apply(S, found, scores, batch, head, m0, n0)
        (table, _), (is_shared, entry) = scores.parts[number], shared_entry(scores, batch, head, m0, n0)
        if is_shared:
            return S, table[batch, head, entry], natural(ONE, scores)
        return by_element(S, scores, batch, head, m0, n0), ZERO, ONE

    return look_up, apply_but_level


def units(before, part):
    """Device functions (x, scores) of a part behind these: a number, in the unit in which it is added; S's factor."""

    @device
    def same(x, scores):
        return x

    @device
    def divided(x, scores):
        return x * scores.inverse_scale

    @device
    def multiplied(x, scores):
        return x * scores.scale

    if is_natural(before):
        return same, same
    return (same, multiplied) if is_natural([part]) else (divided, same)


def to_log2_of(score, ACC):
    """The device function (scale): what S behind all parts is multiplied by to be an exponent of 2."""
    LOG2E = ACC(LOG2_E)

    @device
    def of_natural(scale):
        return LOG2E

    @device
    def of_raw(scale):
        return scale * LOG2E

    return of_natural if is_natural(score) else of_raw


@device
def as_it_is(S, found, scores, batch, head, m0, n0):
    return S, S


@device
def linear(dS, F):
    return dS


@device
def times(dS, F):
    return dS * F


def then(one, other):
    (look_up_one, apply_one), (look_up_other, apply_other) = one, other

    @device
    def look_up(scores, tile, batch, head, m0, n0):
        return look_up_one(scores, tile, batch, head, m0, n0), look_up_other(scores, tile, batch, head, m0, n0)

    @device
    def both(S, F, found, scores, batch, head, m0, n0):
        S, F = apply_one(S, F, found[0], scores, batch, head, m0, n0)
        return apply_other(S, F, found[1], scores, batch, head, m0, n0)

    return look_up, both


def without_derivative(steps):
    look_up, apply = steps

    @device
    def value(S, F, found, scores, batch, head, m0, n0):
        S, _ = apply(S, F, found, scores, batch, head, m0, n0)
        return S, F

    return look_up, value


# --------------------------------------------------------------------------------------------------------- the parts
# Of each two device functions: what is looked up ahead (scores, tile, batch, head, m0, n0), and the step itself.
def softcap(part, number, unit, layout, ACC, transposed):
    (_, natural), TWO_LOG2E = unit, ACC(2 * LOG2_E)

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        """tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1), and its derivative 4 r (1 - r): off by 1e-7, absolute."""
        cap, inverse = scores.parts[number]
        r = reciprocal(exp2(S * natural(inverse * TWO_LOG2E, scores)) + 1)
        return cap - 2 * cap * r, F * (4 * r * (1 - r))

    return nothing_ahead, step


def alibi(part, number, unit, layout, ACC, transposed):
    (own, _), (own_key, distance) = unit, distance_steps(part, number, layout, ACC, transposed)

    @device
    def look_up(scores, tile, batch, head, m0, n0):
        slopes, _ = scores.parts[number]
        return own(slopes[batch, head], scores)

    @device
    def step(S, F, slope, scores, batch, head, m0, n0):
        key, offsets = own_key(scores, batch, head, m0)
        return S - distance(key, offsets, n0) * slope, F

    return look_up, step


def own_key_step(part, number):
    """The device function (scores, batch, head, m0): the own key of query m0, and nothing; or m0, where each query has
    an offset, and all of these."""

    @device
    def by_number(scores, batch, head, m0):
        _, offset = scores.parts[number]
        return m0 + offset, ()

    @device
    def by_matrix(scores, batch, head, m0):
        _, offsets = scores.parts[number]
        return m0 + index(offsets[batch, head]), ()

    @device
    def by_query(scores, batch, head, m0):
        _, offsets = scores.parts[number]
        return m0, offsets[batch, head]

    return {BY_MATRIX: by_matrix, BY_QUERY: by_query}.get(offset_kind(part), by_number)


def offsets_step(layout, transposed):
    """The device function (offsets, m0): those of a tile's queries from m0 on."""
    places = places_of(transposed)

    @device
    def of_queries(offsets, m0):
        (seqlen_q,), (i, _) = shape(offsets), places(layout, m0, 0)
        return take(offsets, minimum(i, seqlen_q - 1))

    return of_queries


def distance_steps(part, number, layout, ACC, transposed=False):
    """As `own_key_step`; and (key, offsets, n0): how far the keys of a tile from n0 on are from the queries' own."""
    SIGN, of_queries = -1 if transposed else 1, offsets_step(layout, transposed)

    @device
    def from_key(key, nothing, n0):
        return abs(diagonal_index(layout, convert(SIGN * (n0 - key), ACC)))

    @device
    def from_keys(m0, offsets, n0):
        apart = convert(of_queries(offsets, m0) * SIGN, ACC)
        return abs(diagonal_index(layout, convert(SIGN * (n0 - m0), ACC)) - apart)

    return own_key_step(part, number), from_keys if offset_kind(part) == BY_QUERY else from_key


def within_segment(score):
    """The device function (scores, segment): the Scores in a segment of packed arrays, from which offsets follow."""
    parts = [with_offset if offset_kind(part) == BY_SEGMENT else with_part for part in parts_of(score)]
    if with_offset not in parts:
        return same_scores
    within = reduce(lambda before, part: part[1](part[0], before), enumerate(parts), no_parts)

    @device
    def scores_of(scores, segment):
        own, query = segment.first_key + segment.keys, segment.first_query + segment.queries    # behind its last ones
        return Scores(scores.scale, scores.inverse_scale, within(scores.parts, own - query), scores.logits)

    return scores_of


@device
def same_scores(scores, segment):
    return scores


@device
def no_parts(parts, offset):
    return ()


def with_part(number, before):
    @device
    def parts_to(parts, offset):
        return (*before(parts, offset), parts[number])

    return parts_to


def with_offset(number, before):
    @device
    def parts_to(parts, offset):
        return (*before(parts, offset), (parts[number][0], offset))

    return parts_to


def slopes_steps(number, score, layout, ACC, transposed=False):
    """Device functions for the gradient of the slopes of this part: () -> sums, for each row; (sums, dS, scores, batch,
    head, m0, n0) -> sums. Without a number there are none."""
    ZERO, PARTS = ACC(0), layout.row_parts()

    @device
    def start():
        return full(PARTS, ZERO)

    @device
    def start_none():
        return ()

    @device
    def add_none(sums, dS, scores, batch, head, m0, n0):
        return sums

    if number is None:
        return start_none, add_none

    part = parts_of(score)[number]
    own_key, add_tile = own_key_step(part, number), slopes_step(part, number, layout, ACC, transposed)

    @device
    def add(sums, dS, scores, batch, head, m0, n0):
        key, offsets = own_key(scores, batch, head, m0)
        return add_tile(sums, dS, key, offsets, n0)

    return start, add


def slopes_step(part, number, layout, ACC, transposed):
    """The device function (sums, dS, key, offsets, n0) -> sums.

    By parts of the tile, each a basic block: else ptxas keeps the distances of a whole one in registers, and spills.
    """
    if layout.shape[1] <= COLS_AT_ONCE:
        _, distance = distance_steps(part, number, layout, ACC, transposed)

        @device
        def add_part(sums, dS, key, offsets, n0):
            if always():
                sums = part_sum(-(dS * distance(opaque(key), offsets, n0)), sums)   # computed anew, not kept since S
            return sums

        return add_part

    HALF = replace(layout, cols=layout.cols.half())
    DOWN, RIGHT = (HALF.shape[1], 0) if transposed else (0, HALF.shape[1])  # from one half to the other
    add_half = slopes_step(part, number, HALF, ACC, transposed)

    @device
    def add_halves(sums, dS, key, offsets, n0):
        left, right = column_halves(dS)
        return add_half(add_half(sums, left, key, offsets, n0), right, key + DOWN, offsets, n0 + RIGHT)

    return add_halves


def entry_steps(part, number, layout, transposed=False):
    """As `own_key_step`; and (key, offsets, n0, table): which entries the elements of a tile from n0 on take."""
    SIGN, of_queries = -1 if transposed else 1, offsets_step(layout, transposed)

    @device
    def from_key(key, nothing, n0, table):
        return entry_of(diagonal_index(layout, SIGN * (n0 - key)) * SIGN, table)

    @device
    def from_keys(m0, offsets, n0, table):
        return entry_of(diagonal_index(layout, SIGN * (n0 - m0)) * SIGN - of_queries(offsets, m0), table)

    return own_key_step(part, number), from_keys if offset_kind(part) == BY_QUERY else from_key


@device
def entry_of(ahead, table):
    """That of keys so far ahead of their query's own."""
    _, _, count = shape(table)
    reach = count // 2
    return maximum(minimum(ahead, reach), -reach) + reach


def relative(part, number, unit, layout, ACC, transposed):
    (_, natural), ONE = unit, ACC(1)
    by_element, shared_entry = relative_steps(part, number, unit, layout, ACC, transposed)

    @device
    def one_by_one(S, F, found, scores, batch, head, m0, n0):
        return by_element(S, scores, batch, head, m0, n0), F

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        (table, _), (is_shared, entry) = scores.parts[number], shared_entry(scores, batch, head, m0, n0)
        if is_shared:
            return S * natural(ONE, scores) + table[batch, head, entry], F
        return by_element(S, scores, batch, head, m0, n0), F

    return nothing_ahead, one_by_one if offset_kind(part) == BY_QUERY else step


def relative_steps(part, number, unit, layout, ACC, transposed=False):
    """Device functions (S, scores, batch, head, m0, n0) -> S with the entry of each element; and (scores, batch, head,
    m0, n0): whether all of the tile share one, as far from the diagonal, and which."""
    (_, natural), (own_key, entries), ONE = unit, entry_steps(part, number, layout, transposed), ACC(1)
    LAST_ROW, LAST_COL = (size - 1 for size in layout.shape)
    BEFORE, AHEAD = (LAST_COL, LAST_ROW) if transposed else (LAST_ROW, LAST_COL)    # its last query, its last key

    @device
    def by_element(S, scores, batch, head, m0, n0):
        (table, _), (key, offsets) = scores.parts[number], own_key(scores, batch, head, m0)
        return S * natural(ONE, scores) + take(table[batch, head], entries(key, offsets, n0, table))

    @device
    def shared_entry(scores, batch, head, m0, n0):
        (table, _), (key, _) = scores.parts[number], own_key(scores, batch, head, m0)
        least, most = entry_of(n0 - key - BEFORE, table), entry_of(n0 - key + AHEAD, table)
        return least == most, least

    return by_element, shared_entry


def bias(part, number, unit, layout, ACC, transposed):
    (_, natural), ONE = unit, ACC(1)
    ROWS_OF = Alignment(0 if transposed else int(part.split()[2]))

    @device
    def queries_by_keys(matrix, m0, n0):
        return load(aligned(matrix[:, n0:], ROWS_OF), layout, m0)

    @device
    def keys_by_queries(matrix, m0, n0):
        return load(matrix[m0:].T, layout, n0)

    tile_of = keys_by_queries if transposed else queries_by_keys

    @device
    def look_up(scores, tile, batch, head, m0, n0):
        (biases,) = scores.parts[number]
        return tile_of(biases[batch, head], m0, n0)

    @device
    def step(S, F, found, scores, batch, head, m0, n0):
        return S * natural(ONE, scores) + convert(found, ACC), F

    return look_up, step


def boxed(part, number, unit, layout, ACC, transposed):
    _, step = bias(part, number, unit, layout, ACC, transposed)

    @device
    def look_up(scores, tile, batch, head, m0, n0):
        return get(tile, layout)

    return look_up, step


STEPS = {"softcap": softcap, "alibi": alibi, "relative": relative, "bias": bias, FUNCTION: function, SHIFT: shift}


# ---------------------------------------------------------------------------------------------------------- the sink
def sink_steps(score, ACC):
    """Device functions of a row's end: (m, total, scores, batch, head) -> m and total with the sink's logit, and alpha,
    which rescales O; (total, alpha) -> what O is multiplied by. m is natural here; total stays 0 where nothing is
    seen."""
    LOG2E = ACC(LOG2_E)

    @device
    def without(m, total, scores, batch, head):
        return m, total, total

    @device
    def inverse(total, alpha):
        return reciprocal(total)

    @device
    def with_sink(m, total, scores, batch, head):
        logit, seen = scores.logits[0][batch, head], total > 0
        largest = maximum(m, logit)
        alpha = where(seen, exp2((m - largest) * LOG2E), 0)
        return largest, total * alpha + where(seen, exp2((logit - largest) * LOG2E), 0), alpha

    @device
    def rescaled_inverse(total, alpha):
        return alpha * reciprocal(total)

    return (with_sink, rescaled_inverse) if SINK_PART in score else (without, inverse)

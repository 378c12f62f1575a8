"""Scores: the steps of a call's parts on S = scale Q K^T before the mask, and the factor of dS. See numbattn.scores.

Only the kinds of the parts are compiled in; their numbers and arrays are arguments. Slopes are added to Q K^T, in its
own unit: the multiplication by scale stays in the exponent, where it takes no time. The first part of another kind
takes scale Q K^T, and then scale_log2, as kernels call it, is log2(e).
"""

from functools import reduce
from typing import Any, NamedTuple

from ...compiler import types
from ...tile import device, full
from ...words.arguments import Argument
from ...words.numbers import LOG2_E
from ...words.signatures import array_type
from ...words.steps import tangent_of_part
from ..shared.layouts import sum_type
from .kind import ValueAndSlope, nothing_ahead
from .traits import is_scaled, parts_of


class Scores(NamedTuple):
    """A score, as kernels take it."""

    scale: Any
    inverse_scale: Any
    parts: Any  # the arguments of each part but a sink: see ScoreKind.types
    logits: Any  # (batch, heads), if there is a sink


class ScoreArgument(Argument):
    """The fields of Scores; nothing without a score."""

    def flat(self, planner, work):
        numbered = [(number, *each) for number, each in enumerate(zip(work.score, planner.call.score))]
        return self.fields(planner, work, numbered)

    def type(self, about):
        return scores_type(about.score, about.dtype)

    @staticmethod
    def fields(planner, work, parts):
        """The fields; parts: of each its number in names of arrays, its kind, and the LoweredPart."""
        if parts:
            yield from ("scale", "inverse_scale")
        for number, part, lowered in sorted(parts, key=lambda x: not x[1].has_step):
            yield from part.flat(planner, work, number)
            yield from lowered.numbers


class ScoreTangents(ScoreArgument):
    """The fields of Scores for the parts that have a tangent, with the tangents in place of their arrays."""

    def flat(self, planner, work):
        parts = enumerate(zip(work.tscore, planner.call.tscore))
        return self.fields(planner, work, [(tangent_of_part(number), *each) for number, each in parts if each[0]])

    def type(self, about):
        return scores_type(tuple(filter(None, about.tscore)), about.dtype)


SCORE, TSCORE = ScoreArgument(), ScoreTangents()


def scores_type(score, dtype):
    """The type of Scores with these parts, or of nothing."""
    if not score:
        return types.Tuple(())
    number, parts = getattr(types, sum_type(dtype).__name__), parts_of(score)
    logits = types.Tuple([array_type(sum_type(dtype), 2)] * (len(score) - len(parts)))
    return types.NamedTuple([number, number, types.Tuple([types.Tuple(x.types(number)) for x in parts]), logits],
                            Scores)  # fmt: skip


def score_steps(score, layout, ACC, transposed=False, after=-1):
    """Device functions for tiles of S = Q K^T: (S, scores, batch, head, m0, n0) -> S after all parts, and F; (dS, F) ->
    dS F; (scale) -> the factor that makes S an exponent of 2.

    F is the derivative of the parts after number `after`; with after=len(score), in the forward pass, there is none.
    The tile's rows are queries, or keys if it is transposed.
    """
    look_up, apply, *others = score_steps_ahead(score, layout, ACC, transposed, after)

    @device
    def look_up_and_apply(S, scores, batch, head, m0, n0):
        return apply(S, look_up(scores, (), batch, head, m0, n0), scores, batch, head, m0, n0)

    return look_up_and_apply, *others


def score_steps_ahead(score, layout, ACC, transposed=False, after=-1, has_room=True, by_tma=False):
    """The steps of `score_steps` with arrays loaded while S is still computed: another device function in front,
    (scores, tile, batch, head, m0, n0), starts the loads, and its result is the second argument of the next one.

    has_room: whether there are registers for that; else the latter loads them. by_tma: whether the bias is in `tile`,
    in shared memory; else that is ().
    """
    if not has_room:
        look_up_and_apply, *others = score_steps(score, layout, ACC, transposed, after)

        @device
        def apply_late(S, found, scores, batch, head, m0, n0):
            return look_up_and_apply(S, scores, batch, head, m0, n0)

        return nothing_ahead, apply_late, *others

    parts = parts_of(score)
    nonlinear = [number for number, part in enumerate(parts) if part.is_nonlinear]
    if not parts:
        return nothing_ahead, as_it_is, linear, to_log2_of(score, ACC)

    steps = []
    for at, part in enumerate(parts):
        scaling, has_derivative = scaling_steps(parts[:at], part), at > after
        steps.append(part.steps(at, scaling, layout, ACC, transposed, by_tma, has_derivative))
    if after >= 0:  # derivatives of earlier parts are not needed
        steps[: after + 1] = map(without_derivative, steps[: after + 1])
    (look_up, every_step), ONE = reduce(then, steps), ACC(1)

    @device
    def apply(S, found, scores, batch, head, m0, n0):
        return every_step(S, full(layout, ONE), found, scores, batch, head, m0, n0)

    return look_up, apply, times if any(number > after for number in nonlinear) else linear, to_log2_of(score, ACC)


def softmax_score_steps(score, layout, ACC, has_levels=True, by_tma=False):
    """The first two device functions of `score_steps_ahead`, for the forward pass; the second returns S, level and
    factor. S after all parts is factor S + level, or S itself if they are None: the softmax multiplies and adds anyway.
    They are None if has_levels is False or no tile has a level."""
    *before, last = parts_of(score) or [None]
    with_level = None
    if last is not None and has_levels:
        with_level = last.constant_on_tile(len(before), scaling_steps(before, last), layout, ACC)
    if with_level is None:
        look_up, apply, *_ = score_steps_ahead(score, layout, ACC, after=len(score), by_tma=by_tma)

        @device
        def apply_all(S, found, scores, batch, head, m0, n0):
            S, _ = apply(S, found, scores, batch, head, m0, n0)
            return S, None, None

        return look_up, apply_all

    look_up, apply, *_ = score_steps_ahead(before, layout, ACC, after=len(before))

    @device
    def apply_but_level(S, found, scores, batch, head, m0, n0):
        S, _ = apply(S, found, scores, batch, head, m0, n0)
        return with_level(S, scores, batch, head, m0, n0)

    return look_up, apply_but_level


def scaling_steps(before, part):
    """Device functions (x, scores) for a part after these: x as it is added to S; x times what scales S."""

    @device
    def same(x, scores):
        return x

    @device
    def divided(x, scores):
        return x * scores.inverse_scale

    @device
    def multiplied(x, scores):
        return x * scores.scale

    if is_scaled(before):
        return same, same
    return (same, multiplied) if is_scaled([part]) else (divided, same)


def to_log2_of(score, ACC):
    """The device function (scale) -> the factor that makes S after all parts an exponent of 2."""
    LOG2E = ACC(LOG2_E)

    @device
    def of_scaled(scale):
        return LOG2E

    @device
    def of_raw(scale):
        return scale * LOG2E

    return of_scaled if is_scaled(score) else of_raw


@device
def as_it_is(S, found, scores, batch, head, m0, n0):
    return ValueAndSlope(S, S)


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
        return ValueAndSlope(S, F)

    return look_up, value

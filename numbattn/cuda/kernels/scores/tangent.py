"""Tangents of scores: the steps of parts on S and its tangent tS, and how gradients and their tangents go back.

A part S -> f(S, A) with an array A turns tS into f' tS + (df / dA) tA. Parts that only add are linear in A, too: they
do the same to tS, with tA in place of A; for functions see `function_tangent`. F is the product of all f', and tF its
tangent; the tangent of f' is f'' tS + (df' / dA) tA.
"""

from functools import reduce
from itertools import zip_longest

from ...tile import device
from .score import scaling_steps
from .traits import parts_of


def tangent_steps(score, tangents, layout, ACC, transposed=False, after=-1, bends=False):
    """Device functions for tiles of S = Q K^T and of tS: (S, tS, scores, tscores, batch, head, m0, n0) -> S, tS after
    all parts, and F, tF; (dS, tdS, F, tF) -> dS F, tdS F + dS tF.

    tangents: for each part its kind with the tangent in place of its array, or None if that is zero; tscores: the
    Scores of those that are not. tS has the unit of S, see `score_steps`: tS after all parts, times the factor that
    makes S an exponent of 2, and times ln 2, is the tangent of an exponent of e. F and tF belong to the parts after
    number `after`; with after=len(score), in the forward pass, there are none, and no second derivatives are needed.

    With `bends` there is one function, (S, tS, S2, scores, tscores, batch, head, m0, n0) -> all three after all parts:
    S2 is the second derivative along the same direction, in the unit of S, along which no function's arrays move.
    """
    steps, before, given, counted = [], [], [], 0
    for part, tangent in zip_longest(score, tangents, fillvalue=None):
        if part.has_step:
            about = scaling_steps(before, part), layout, ACC, transposed
            if part.is_nonlinear:
                is_counted = len(before) > after
                of_arrays = tangent, len(parts_of(given))
                steps.append(nonlinear_step(part, len(before), counted if is_counted else None, *of_arrays, *about))
                counted += is_counted and not bends
            else:
                steps.append(linear_step(part, len(before), tangent, len(parts_of(given)), *about))
            if bends:
                steps.append(bending_step(steps.pop(), part.is_nonlinear, *about[::2]))
            before.append(part)
        given += [tangent] * bool(tangent)
    every_step = reduce(then, steps, as_they_are)
    if bends:
        return every_step

    @device
    def apply(S, tS, scores, tscores, batch, head, m0, n0):
        return every_step(S, tS, (), scores, tscores, batch, head, m0, n0)

    @device
    def apply_linear(S, tS, scores, tscores, batch, head, m0, n0):
        S, tS, _ = every_step(S, tS, (), scores, tscores, batch, head, m0, n0)
        return S, tS, (S, tS)

    return (apply, times) if counted else (apply_linear, linear)


def linear_step(part, at, tangent, at_tangent, scaling, layout, ACC, transposed):
    """The step of a part that only adds: (S, tS, FF, scores, tscores, batch, head, m0, n0) -> S, tS, FF.

    tangent: the same part with the tangent of its array, or None; at_tangent: its place in the parts of tscores.
    """
    look_up, apply = part.steps(at, scaling, layout, ACC, transposed, has_derivative=False)
    (_, to_scaled), ONE = scaling, ACC(1)

    @device
    def of_constant(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, _ = apply(S, S, look_up(scores, (), batch, head, m0, n0), scores, batch, head, m0, n0)
        return S, tS * to_scaled(ONE, scores), FF

    if not tangent or tangent.is_zero:
        return of_constant

    about = scaling, layout, ACC, transposed
    look_up_tangent, add_tangent = tangent.steps(at_tangent, *about, has_derivative=False)

    @device
    def of_variable(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, _ = apply(S, S, look_up(scores, (), batch, head, m0, n0), scores, batch, head, m0, n0)
        found = look_up_tangent(tscores, (), batch, head, m0, n0)
        tS, _ = add_tangent(tS, tS, found, tscores, batch, head, m0, n0)
        return S, tS, FF

    return of_variable


def nonlinear_step(part, at, counted, tangent, at_tangent, scaling, layout, ACC, transposed):
    """The step of a part that does more than add. counted: how many earlier parts are in F, which is () without any;
    None if this part does not go into F. All else is as for a `linear_step`."""
    derivatives = part.derivatives(at, scaling, layout, ACC, transposed, order=1 if counted is None else 2)
    (_, to_scaled), ONE = scaling, ACC(1)

    @device
    def forward(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, slope = derivatives(S, scores, batch, head, m0, n0)
        return S, tS * to_scaled(ONE, scores) * slope, FF

    @device
    def first(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, slope, bend = derivatives(S, scores, batch, head, m0, n0)
        tS = tS * to_scaled(ONE, scores)
        return S, tS * slope, (slope, tS * bend)

    step = forward if counted is None else first
    if tangent and not tangent.is_zero:
        step = moving_step(step, tangent, at_tangent, counted is not None, scaling, layout, ACC, transposed)

    @device
    def following(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, tS, (slope, tslope) = step(S, tS, (), scores, tscores, batch, head, m0, n0)
        F, tF = FF
        return S, tS, (F * slope, tF * slope + F * tslope)

    return following if counted else step


def bending_step(step, is_nonlinear, scaling, ACC):
    """Such a step with S2 in place of FF, from one in which only this part is in F."""
    (_, to_scaled), ONE = scaling, ACC(1)

    @device
    def linear(S, tS, S2, scores, tscores, batch, head, m0, n0):
        S, tS, _ = step(S, tS, (), scores, tscores, batch, head, m0, n0)
        return S, tS, S2 * to_scaled(ONE, scores)

    @device
    def nonlinear(S, tS, S2, scores, tscores, batch, head, m0, n0):
        before = tS * to_scaled(ONE, scores)
        S, tS, (slope, tslope) = step(S, tS, (), scores, tscores, batch, head, m0, n0)
        return S, tS, S2 * to_scaled(ONE, scores) * slope + before * tslope

    return nonlinear if is_nonlinear else linear


def moving_step(step, tangent, at, has_bend, scaling, layout, ACC, transposed):
    """The step of a function whose arrays have tangents, from the step without them. has_bend: whether there is an F,
    of this function alone."""
    (_, to_scaled), ONE, about = scaling, ACC(1), (at, layout, ACC, transposed)
    of_value = tangent.moves(0, *about)
    of_slope = tangent.moves(1, *about) if has_bend else None

    @device
    def forward(S, tS, FF, scores, tscores, batch, head, m0, n0):
        value, tS, FF = step(S, tS, FF, scores, tscores, batch, head, m0, n0)
        return value, tS + of_value(S * to_scaled(ONE, scores), value, tscores, batch, head, m0, n0), FF

    @device
    def with_bend(S, tS, FF, scores, tscores, batch, head, m0, n0):
        value, tS, (slope, tslope) = forward(S, tS, FF, scores, tscores, batch, head, m0, n0)
        bend = of_slope(S * to_scaled(ONE, scores), value, tscores, batch, head, m0, n0)
        return value, tS, (slope, tslope + bend)

    return with_bend if has_bend else forward


def then(one, other):
    @device
    def both(S, tS, FF, scores, tscores, batch, head, m0, n0):
        S, tS, FF = one(S, tS, FF, scores, tscores, batch, head, m0, n0)
        return other(S, tS, FF, scores, tscores, batch, head, m0, n0)

    return both


@device
def as_they_are(S, tS, FF, scores, tscores, batch, head, m0, n0):
    return S, tS, FF


@device
def linear(dS, tdS, F, tF):
    return dS, tdS


@device
def times(dS, tdS, F, tF):
    return dS * F, tdS * F + dS * tF

"""Sums over pairs of points with products of kernels, where each factor has a squared distance or a product of its own,
by array operations, block by block.

If f_k(t_k) are the factors, kappa = prod_k f_k, and A_k and A_kl are the derivatives of kappa by t_k and t_l, then

    sums       o_i  = sum_j kappa_ij b_j                    move by  sum_jk A_k tt_k b_j
    gradient   dx_i = sum_j A_k <c_i, b_j> D_k              move by  sum_j <c_i, b_j> (sum_l A_kl tt_l D_k + A_k tD_k)

where D_k = 2 (x_i - y_j) or y_j, of the features of factor k. Points that move have their tangents as further features.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ..base.values import rowsum
from ..call.problem import Inputs, Problem
from .formula import PAIRS, PairBlock, apart, blocks, displaced, distances, quiet, zeros
from .kinds import ARRAYS, DIFFERENCES, NEAR, Kind, Times

SHARE = 32  # of the pairs of a block: there are many arrays of these, which are quicker where they stay in a cache


class Factor(NamedTuple):
    """A factor of the weights of pairs in a block."""

    kind: Kind
    block: PairBlock  # of its features
    moved: PairBlock  # of their tangents
    features: slice
    orders: list[Any]  # its value, derivative and curvature
    tt: Any


@quiet
def sums(problem: Problem, inputs: Inputs, kind: Times, rows: Any = None, columns: Any = None) -> Any:
    o = zeros(inputs, (*problem.batch, problem.seqlen_q, problem.head_dim_v), problem.sum_dtype)
    for block, factors, is_moving in _factors(problem, inputs, kind, 0):
        kappa = _along(factors) if is_moving else _derivative(factors)
        o[..., block.i, :] += block.only_visible(kappa) @ block.b
    return o


@quiet
def gradient(problem: Problem, inputs: Inputs, kind: Times, c: Any, rows: Any = None, columns: Any = None) -> Any:
    dx = zeros(inputs, (*problem.batch, problem.seqlen_q, kind.features), problem.sum_dtype)
    for block, factors, is_moving in _factors(problem, inputs, kind, 1):
        product = c[..., block.i, :].astype(problem.sum_dtype, copy=False) @ block.b.swapaxes(-2, -1)
        for k, one in enumerate(factors):
            found, weights = dx[..., block.i, one.features], block.only_visible(_derivative(factors, k) * product)
            if is_moving:
                found += displaced(one.moved, one.kind, weights)
                weights = block.only_visible(_along(factors, k) * product)
            found += displaced(one.block, one.kind, weights)
    return dx


def _factors(problem: Problem, inputs: Inputs, kind: Times, order: int) -> Any:
    """Blocks, their factors with derivatives of this order and, if points move, one more, and whether they do."""
    is_moving = problem.head_dim > kind.features
    for block in blocks(problem, inputs, PAIRS // SHARE):
        found, first = list[Factor](), 0
        for of_factor, count in kind.factors:
            at, further = (slice(start, start + count) for start in (first, kind.features + first))
            own, moved = (block._replace(x=block.x[..., some], y=block.y[..., some]) for some in (at, further))
            exponent, *functions = of_factor.formula(ARRAYS)
            t, number = _t(own, of_factor), of_factor.number
            E = () if exponent is None else np.exp(exponent(t, number))
            orders = [function(t, E, number) for function in functions[: order + is_moving + 1]]
            found.append(Factor(of_factor, own, moved, at, orders, _moves(own, moved, of_factor) if is_moving else 0))
            first += count
        yield block, found, is_moving


def _derivative(factors: list[Factor], *by: int) -> Any:
    """That of the product of all factors by the t of some."""
    return reduce(mul, [one.orders[by.count(at)] for at, one in enumerate(factors)])


def _along(factors: list[Factor], *by: int) -> Any:
    """The tangent of this derivative."""
    return sum(_derivative(factors, *by, at) * one.tt for at, one in enumerate(factors))


def _t(block: PairBlock, kind: Kind) -> Any:
    """Squared distances, of near points from their differences, or products."""
    t, x, y = distances(block, kind), block.x, block.y
    if x.shape[-1] > DIFFERENCES and not kind.is_of_product:
        *at, i, j = np.nonzero(t < NEAR * (rowsum(x, x)[..., None] + rowsum(y, y)[..., None, :]))
        t[(*at, i, j)] = sum((x[..., f][(*at, i)] - y[..., f][(*at, j)]) ** 2 for f in range(x.shape[-1]))
    return t


def _moves(block: PairBlock, moved: PairBlock, kind: Kind) -> Any:
    """tt"""
    (x, y), (tx, ty) = ((one.x, one.y.swapaxes(-2, -1)) for one in (block, moved))
    if kind.is_of_product:
        return x @ ty + tx @ y
    if x.shape[-1] > DIFFERENCES:
        return 2 * (rowsum(x, tx)[..., None] + (y * ty).sum(axis=-2)[..., None, :] - x @ ty - tx @ y)
    return sum((2 * apart(block, f) * apart(moved, f) for f in range(x.shape[-1])), start=0 * (x @ y))

"""The arithmetic of one edge, written once: for numbers in compiled loops, for tiles on GPUs, for NumPy's arrays.

S is the score of an edge and P its weight: exp(S - lse), a softmax over the edges of a query, or S itself. The edge
adds factor P (v + v_edge) to o. With dP = do . (v + v_edge) and D = do . o - dlse, or 0 without a softmax,
differentiation gives

    dS = P' (factor dP - D),    P' = P, or 1 without a softmax,

and in a direction in which arrays move by tangents, with what moves S - lse, tS - tlse,

    tP = P' (tS - tlse),    tP' = P'' (tS - tlse),    P'' = P, or 0,
    tdS = tP' (factor dP - D) + P' (tfactor dP + factor tdP - tD).

All gradients are products of these: dq = sum of scale dS (k + k_edge), dv = sum of factor P do, dfactor = P dP.

The second derivative of o in that direction, in which S has the second derivative S2, and v + v_edge the tangent tv, is

    O2 = sum of (factor P2 + 2 tfactor P' tS) (v + v_edge) + 2 (factor P' tS + tfactor P) tv,
    P2 = P' S2 + P'' tS^2,    S2 = 2 scale tq . (tk + tk_edge) before any score,

less 2 tlse tO + rowsum(P2) O with a softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Edge(NamedTuple):
    """Where an edge is, and its number: kernels' `at`."""

    batch: Any
    head: Any
    i: Any
    j: Any
    number: Any


def gradients(P: Any, slope: Any, factor: Any, dP: Any, D: Any) -> tuple[Any, Any, Any]:
    """factor P, dS, and the gradient of factor. slope: P'."""
    return factor * P, slope * (factor * dP - D), P * dP


def tangents(
    P: Any, slope: Any, bend: Any, factor: Any, tfactor: Any, dP: Any, tdP: Any, D: Any, tD: Any, moves: Any
) -> tuple[Any, Any, Any]:
    """The tangents of the three. bend: P''; moves: tS - tlse."""
    tP, tdW = slope * moves, tfactor * dP + factor * tdP
    return (tfactor * P + factor * tP, bend * moves * (factor * dP - D) + slope * (tdW - tD), tP * dP + P * tdP)


def second(P: Any, slope: Any, bend: Any, factor: Any, tfactor: Any, tS: Any, S2: Any) -> tuple[Any, Any, Any]:
    """P2, and what v + v_edge and tv are multiplied by in O2."""
    P2, tP = slope * S2 + bend * (tS * tS), slope * tS
    half, cross = tfactor * tP, factor * tP + tfactor * P
    return P2, factor * P2 + (half + half), cross + cross

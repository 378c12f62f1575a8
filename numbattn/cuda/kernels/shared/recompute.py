"""P in the backward pass, recomputed from S and lse: lines 12 and 13 of Algorithm 4.

lse is in base 2, and +inf where nothing is seen, so that P is 0 there. Unlike in the paper MASK follows the
exponential: masked elements may be NaN.
"""

from ...tile import capped, device, exp2, where
from .softmax import LN_2
from .visibility import element_test


@device
def recompute(S, lse, scale_log2):
    return exp2(S * scale_log2 - lse)                           # line 13: P = exp(S - lse)


@device
def recompute_capped(S, lse, scale_log2):
    """The same, but at most 1: if lse is not padded, P of rows beyond the queries has to stay finite."""
    return exp2(capped(S * scale_log2 - lse, 0))


def mask_step(mask, layout, transposed=False):
    """The device function (P, F, mask, band, batch, head, m0, n0) -> both, with 0 where they are masked, in the tile
    from there on. F may also be the tangent of P.
    """
    sees = element_test(mask, layout, transposed)

    @device
    def masked(P, F, mask, band, batch, head, m0, n0):
        visible = sees(mask, band, batch, head, m0, n0)
        return where(visible, P, 0), where(visible, F, 0)       # line 12: MASK

    return masked


def mask_step_with_dp(mask, layout, transposed=False):
    """The same for P, F and dP, if tiles are not cleared beyond a sequence's length: 0 * NaN is NaN."""
    sees = element_test(mask, layout, transposed)

    @device
    def masked(P, F, dP, mask, band, batch, head, m0, n0):
        visible = sees(mask, band, batch, head, m0, n0)
        return where(visible, P, 0), where(visible, F, 0), where(visible, dP, 0)

    return masked


@device
def recompute_tangents(S, tS, lse, tlse, scale_log2):
    """P and its tangent. tlse is in base e."""
    P = recompute(S, lse, scale_log2)
    return P, P * (tS * (scale_log2 * LN_2) - tlse)             # tP = P (tS - tlse)


@device
def clear_tangents(P, dP, tdP, F, tF):
    """dP, F and their tangents, with 0 where P is 0: masked elements may be NaN."""
    hidden = P == 0
    return where(hidden, 0, dP), where(hidden, 0, tdP), where(hidden, 0, F), where(hidden, 0, tF)


@device
def tangents_of_ds(P, tP, dP, tdP):
    """dS and its tangent, from P and tP, and from dP and tdP less D and tD."""
    return P * dP, tP * dP + P * tdP

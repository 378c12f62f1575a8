"""P in the backward pass, recomputed from S and lse: lines 12 and 13 of Algorithm 4.

lse is in base 2, and +inf where nothing is seen, so that P is 0 there. Unlike in the paper MASK follows the
exponential: masked elements may be NaN.
"""

from ...tile import capped, device, exp2, index, shape, where
from .softmax import LN_2
from .visibility import band_test, element_test, in_band, is_looked_up, looked_up_test


@device
def recompute(S, lse, scale_log2):
    return exp2(S * scale_log2 - lse)                           # line 13: P = exp(S - lse)


def low_steps(dtype):
    """Device functions: (mLse) -> where low begins in the lines of lse, see `words.arguments.LSE_LOG2`; (S, lse, low,
    scale_log2) -> P, and P that is at most 1: if lse is not padded, P of rows beyond the queries has to stay finite. In
    half precision there is no low, and nothing is read for it."""
    HAS_LOW = dtype.itemsize > 2

    @device
    def first_low(mLse):
        return shape(mLse)[2] // 2 if HAS_LOW else index(0)

    @device
    def recompute_with_low(S, lse, low, scale_log2):
        return exp2(S * scale_log2 - lse - low if HAS_LOW else S * scale_log2 - lse)

    @device
    def recompute_capped(S, lse, low, scale_log2):
        return exp2(capped(S * scale_log2 - lse - low if HAS_LOW else S * scale_log2 - lse, 0))

    return first_low, recompute_with_low, recompute_capped


def mask_step(mask, layout, transposed=False):
    """The device function (P, F, mask, band, batch, head, m0, n0) -> both, with 0 where they are masked, in the tile
    from there on. F may also be the tangent of P.
    """
    sees = element_test(mask, layout, transposed)

    @device
    def masked(P, F, mask, band, batch, head, m0, n0):
        visible = sees(mask, band, batch, head, m0, n0)
        return where(visible, P, 0), where(visible, F, 0)       # line 12: MASK

    if not is_looked_up(mask):
        return masked
    seen_in_band, looked_up = band_test(layout, transposed), looked_up_test(mask, layout, transposed)
    rows, cols = layout.rows.size, layout.cols.size
    TILE_M, TILE_N = (cols, rows) if transposed else (rows, cols)

    @device
    def masked_apart(P, F, mask, band, batch, head, m0, n0):
        if not in_band(band, m0, m0 + TILE_M, n0, n0 + TILE_N):     # rarely
            visible = seen_in_band(band, m0, n0)
            P, F = where(visible, P, 0), where(visible, F, 0)
        visible = looked_up(mask, band, batch, head, m0, n0)
        return where(visible, P, 0), where(visible, F, 0)

    return masked_apart


def mask_step_with_dp(mask, layout, transposed=False):
    """`mask_step` for P, F and dP, if tiles are not cleared beyond a sequence's length: 0 * NaN is NaN."""
    sees = element_test(mask, layout, transposed)

    @device
    def masked(P, F, dP, mask, band, batch, head, m0, n0):
        visible = sees(mask, band, batch, head, m0, n0)
        return where(visible, P, 0), where(visible, F, 0), where(visible, dP, 0)

    return masked


@device
def tangent_of_p(P, tS, tlse, scale_log2):
    """tlse is in base e."""
    return P * (tS * (scale_log2 * LN_2) - tlse)                # tP = P (tS - tlse)


@device
def clear_tangents(P, dP, tdP, F, tF):
    """dP, F and their tangents, with 0 where P is 0: masked elements may be NaN."""
    hidden = P == 0
    return where(hidden, 0, dP), where(hidden, 0, tdP), where(hidden, 0, F), where(hidden, 0, tF)


@device
def tangents_of_ds(P, tP, dP, tdP):
    """dS and its tangent, from P and tP, and from dP and tdP less D and tD."""
    return P * dP, tP * dP + P * tdP

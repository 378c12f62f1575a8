"""What the consumers of `hopper_tangent` pass from step to step, and parts of these steps."""

from typing import Any, NamedTuple

from ...tile import device, maximum, operand, positive_operand
from ..scores import tangent_steps, within_segment
from ..shared.dropout import dropout_steps
from ..shared.segments import mask_within_step
from .forward_tiles import ROWS
from .walk import place_of


class TangentArguments(NamedTuple):
    """What consumers need of the kernel's arguments."""

    by_rows: Any  # O and tO, where TMA does not store all of them
    mLse: Any
    mTLse: Any
    mask: Any
    scores: Any
    tscores: Any
    drops: Any
    scale_log2: Any
    kept_scale: Any
    heads_per_tile: Any


class TangentAccumulators(NamedTuple):
    """What a consumer carries from tile to tile."""

    O: Any
    tO: Any
    m: Any
    l: Any
    tl: Any


def within_step(mask, score, tscore):
    """The device function (args, tile) -> the arguments with the mask and scores of the tile's segment."""
    mask_of, scores_of = mask_within_step(mask, ROWS), within_segment(score)
    tscores_of = within_segment(tuple(filter(None, tscore)))

    @device
    def within(args, tile):
        at = tile.segment
        return TangentArguments(
            args.by_rows, args.mLse, args.mTLse, mask_of(args.mask, at), scores_of(args.scores, at),
            tscores_of(args.tscores, at), args.drops, args.scale_log2, args.kept_scale, args.heads_per_tile,
        )  # fmt: skip

    return within


def scored_step(score, tscore, layout, tile_n, ACC):
    """The device function (S, tS, tile, scores, tscores, n_block) -> both after all parts of the score."""
    apply, _ = tangent_steps(score, tscore, layout, ACC, after=len(score))
    TILE_N = tile_n

    @device
    def apply_score(S, tS, tile, scores, tscores, n_block):
        m0, n0 = place_of(tile, n_block * TILE_N)
        S, tS, _ = apply(S, tS, scores, tscores, tile.batch, tile.head, m0, n0)
        return S, tS

    return apply_score


def drop_steps(layout, dropout, SHARED_V):
    """Device functions: `sign_dropped`, see `dropout_steps`; from the P that it returns, Z P as the left operand of
    products with V; and P and Z P, the factors of tS. Z is 0 or 1 here."""
    sign_dropped, _ = dropout_steps(layout, dropout)

    @device
    def left(P):
        return operand(P, SHARED_V)

    @device
    def factors(P):
        return P, P

    @device
    def left_of_signed(P):
        return positive_operand(P, SHARED_V)

    @device
    def factors_of_signed(P):
        return abs(P), maximum(P, 0)

    return (sign_dropped, left_of_signed, factors_of_signed) if dropout else (sign_dropped, left, factors)

"""What the backward kernels on Hopper share (wgmma, TMA): Algorithm 4, warp-specialised.

Two kernels keep a tile of keys and loop over the queries that see it, for dK and dV. `hopper_backward_kv` can also add
up dQ, in global memory, together with all other blocks; `round_dq` then rounds the sums. In `hopper_backward_wide` a
consumer has registers for only one of the accumulators, since head_dim is large, or a score has a derivative and much
else is looked up: the first consumer computes P and dV, the second dS and dK. `hopper_backward_q` keeps a tile of
queries and loops over the keys, for dQ without sums between blocks, bitwise reproducible.

One thread of the last warpgroup, or two, are the producer, which TMA-loads tiles into pipelines; the other warpgroups
are consumers, and other warps of the last one may help them: see `distance_sums` and `dq_turns`. Where keys are kept,
S, P, dP and dS are transposed, so that a row is a key and the registers of P and dS are the left operands for dV and dK
as they are. At the end of a step S of the next tile is already in flight.

As in `backward` MASK follows the exponential. lse is in base 2, and +inf where nothing is seen, so that P is 0 there.
Rows beyond a sequence's length may be NaN, and 0 * NaN is NaN: tiles are cleared there before they are multiplied.
"""

from typing import Any, NamedTuple

import numpy as np

from ...tile import (
    WARPGROUP,
    Pipeline,
    operand,
    positive_operand,
    sync_warpgroup,
)
from ...words.arguments import Matrix, Statistic, TmaBias, TmaMatrix
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..scores import SCORE, dtype_of_part, number_of_tma_bias
from ..shared.dropout import DROPOUT
from ..shared.layouts import save_sums_step
from ..shared.schedule import at_once
from ..shared.visibility import MASK
from ..shared.warps import source_of
from ..tables import dtypes_of
from .forward_tiles import ROWS, head_dims, parameters

PART = 64  # rows and columns of a part of dQ
CONSUMERS = 2
REGISTERS = {1: (24, 232), 2: (24, 240)}  # {consumers: of a thread of the producer, of a consumer}
MORE_FOR_PRODUCER = 40, 232  # the same where two consumers need fewer: 5 % faster at head_dim 64, and room for helpers
ZERO = np.float32(0)


class BackwardArguments(NamedTuple):
    """What consumers need of the kernel's arguments."""

    mask: Any
    scores: Any
    drops: Any
    scale_log2: Any
    kept_scale: Any
    delta_scale: Any
    reads: Any  # gradients of the arrays that a function reads, if wanted


# -------------------------------------------------------------------------------------------------- what they share
def kept_operand(dropout):
    """The primitive (P, place): P Z as an operand, where the sign of P says what is dropped, see `dropout_steps`."""
    return positive_operand if dropout else operand


def save_step(dtype, out, cols, nbytes):
    """`layouts.save_sums_step` for a consumer's accumulator."""
    return save_sums_step(dtype, out, ROWS, cols, WARPGROUP, nbytes, sync_warpgroup)


def pipelines_within(shared, Q, K, V, dO, consumers=CONSUMERS):
    """The pipelines of these tiles, and the places of lse and delta, which fill a stage together with Q."""
    lse, delta = (shared.tile(1, Q.rows, np.float32, Q.stages) for _ in range(2))
    K, V = Pipeline.within(shared, K, readers=1), Pipeline.within(shared, V, readers=1)
    Q, dO = Pipeline.within(shared, Q, consumers, fills=3), Pipeline.within(shared, dO, consumers)
    return Q, K, V, dO, lse, delta


# --------------------------------------------------------------------------------------------------------- arguments
GIVEN = TmaMatrix("q"), TmaMatrix("k", "k"), TmaMatrix("v", "k"), TmaMatrix("do")
LARGEST_WITH_TMA_BIAS = 128  # head_dim: beyond, shared memory has no room for tiles of a bias


def number_of_bias(work):
    """The number of the bias that TMA loads, or None."""
    return number_of_tma_bias(work) if size_of(work) <= LARGEST_WITH_TMA_BIAS else None


def dtype_of_bias(work):
    return dtype_of_part(work, number_of_bias(work))


BIAS = TmaBias(number_of_bias)
STATISTICS_AND_NUMBERS = (
    Statistic("lse_log2", padded=True), Statistic("delta", padded=True), MASK, SCORE, DROPOUT, "group_size", "ds_scale",
    "scale_log2", "kept_scale", "at_once", "delta_scale",
)  # fmt: skip


def source(kernel, arguments, shared, tiles, dtype, dtypes, consumers=CONSUMERS, blocks=1, **about):
    """The Source of a kernel. tiles: of its inputs; dtypes: of its results."""
    signature = signature_of(kernel, arguments, dtype, np.float32, dtypes, **about)
    return source_of(kernel, signature, consumers, shared, tiles, blocks)


# ------------------------------------------------------------------------------------------------------------- tiles
class WgmmaTiles(NamedTuple):
    """A row: tiles of tile_m queries and tile_n keys."""

    tile_m: int
    tile_n: int
    stages: Any  # of the tiles that the loop loads
    blocks: int = 1  # per multiprocessor: with several, each of one consumer and with its own list of tiles

    unit = "wgmma"


def size_of(work):
    return max(head_dims(work.problem))


def parameters_of(*results):
    """As Spec.parameters: those of all factories here, for these results."""
    return lambda work, tiles: parameters(work, tiles) | dtypes_of(work, *results) | {"nbytes": work.nbytes}


def same_tiles(work, tiles):
    return tiles


def keys_spec(factory, row, parameters, given, sums=((), ()), states=same_tiles, **more):
    """The Spec of a kernel that keeps keys. row: (work) -> the row of its table; sums: for dQ, and of what is read."""
    return Spec(
        factory,
        (*given, Matrix("dk", "k"), Matrix("dv", "k"), *sums, *STATISTICS_AND_NUMBERS),
        tiles=lambda work: (row(work),),
        parameters=parameters,
        numbers=at_once,
        states=states,
        keeps="k",
        packs=True,
        blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * n_blocks,
        arch="a",
        **more,
    )

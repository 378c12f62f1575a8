"""dQ from the sums that all blocks of a backward kernel have added up in global memory."""

from typing import NamedTuple

import numpy as np

from ...build import Source
from ...tile import (
    SharedMemory,
    allocate,
    block_index,
    full,
    load_lines,
    load_registers,
    mma,
    shape,
)
from ...words.arguments import Matrix, MatrixSums, Turns
from ...words.signatures import signature_of
from ...words.spec import PADDED, Spec
from ..shared.layouts import DTYPES, save_sums_step
from ..shared.schedule import overlap_launches, place
from ..shared.segments import queries_of, slot_step
from ..shared.visibility import PACKING, packing_of
from ..tables import dtypes_of


class DqPart(NamedTuple):
    """The part that a block rounds: sums in the layout of mma, in lines or else in register order: see
    tile.accumulation."""

    tile_m: int
    tile_n: int  # columns, not keys
    threads: int
    across: int
    in_lines: bool = False
    transposed: bool = False  # whether the sums are those of the transpose
    turn: int = 0  # queries of a tile that blocks have added to in turn: if none has, its sums are not there


def round_dq(
    *, dtype, out_dtypes, col_parts, tile_m, tile_n, threads, across, in_lines, nbytes, mask, transposed=False, turn=0
):  # fmt: skip
    """The kernel. col_parts: how many parts the columns of the sums are split into."""
    TILE_M, TILE_N, COL_PARTS, PARTS_A_SLOT = tile_m, tile_n, col_parts, PADDED // tile_m
    LAYOUT = mma(*((tile_n, tile_m) if transposed else (tile_m, tile_n)), threads, across)
    segment_of, shared, TURN, ZERO = slot_step(mask, "q", PADDED), SharedMemory(), turn, np.float32(0)
    held = DTYPES[out_dtypes[0] if transposed else dtype]
    PLACE, load_part = shared.tile(tile_m, tile_n, held), load_lines if in_lines else load_registers
    save_part = save_sums_step(held, *out_dtypes, tile_m, tile_n, threads, nbytes, transposed=transposed)

    def kernel(mSums, mTurns, mDQ, ds_scale, packing):
        overlap_launches()
        batches, heads, seqlen_q, _ = shape(mDQ)
        part, batch, head = place(block_index(), batches * heads, heads)
        down, col = part // COL_PARTS, part % COL_PARTS * TILE_N
        segment, slot = segment_of(packing, batch, down // PARTS_A_SLOT, seqlen_q)
        m0 = slot * PADDED + down % PARTS_A_SLOT * TILE_M
        if m0 < segment.queries:
            dQ = load_part(mSums[batch, head], part, LAYOUT)
            if TURN and mTurns[batch, head][down * TILE_M // TURN] == 0:
                dQ = full(LAYOUT, ZERO)
            first, end = queries_of(segment)
            save_part(mDQ[batch, head][first:end, col : col + TILE_N], dQ * ds_scale, allocate(PLACE), m0)     # line 24

    given = arguments(DQ_SUMS, DQ_TURNS if turn else ())
    signature = signature_of(kernel, given, DTYPES[dtype], np.float32, {"dq": out_dtypes[0]}, mask=mask)
    return Source(kernel, signature, threads, shared=shared.nbytes, overlaps=True)


DQ_SUMS = MatrixSums("sums of dq")
SUMS_IN_TURN, DQ_TURNS = MatrixSums("sums of dq", is_zero=False), Turns()


def arguments(sums, turns, name="dq"):
    return sums, turns, Matrix(name), "ds_scale", PACKING


def col_parts(work, part):
    return max(-(-work.problem.head_dim // part.tile_n), 1)


def round_spec(part_of, sums=DQ_SUMS, turns=(), name="dq"):
    """The Spec of this kernel after one that adds up dQ, or a tangent of this name, in parts of this kind:
    part_of(work) is a DqPart."""
    return Spec(
        round_dq,
        arguments(sums, turns, name),
        tiles=lambda work: (part_of(work),),
        parameters=lambda work, part: {
            "dtype": work.problem.dtype.name, **dtypes_of(work, name), "nbytes": work.nbytes,
            "col_parts": col_parts(work, part), "mask": packing_of(work.mask), **part._asdict(),
        },
        blocks=lambda work, part, m_blocks, n_blocks: (
            work.problem.heads * (work.padded_length // part.tile_m) * col_parts(work, part)
        ),
        packs=True,
    )  # fmt: skip

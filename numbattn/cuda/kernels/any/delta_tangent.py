"""The tangent of delta, tD = rowsum(dO * tO + tdO * O) - tdlse, and tlse, as the kernels of the backward pass's tangent
take them.

Both are 0 where a query sees nothing, and padded, as lse and delta are: see `delta`.
"""

from ...build import Source
from ...tile import Alignment, aligned, block_index, convert, device, load, row_sum, save, shape, simt, where
from ...words.arguments import Matrix, Statistic
from ...words.signatures import signature_of
from ...words.spec import PADDED, Spec
from ..shared.layouts import DTYPES, sum_type, vector
from ..shared.schedule import overlap_launches, place
from ..shared.segments import slot_step
from ..shared.visibility import PACKING, packing_of
from ..tables import dtypes_of, rounded
from .delta import LANES, THREADS, blocks_of_slots, tiles_of


def delta_tangent(*, dtype, out_dtypes, tile_m, head_dim_v, tdo, tdlse, nbytes, mask=()):
    """The kernel. out_dtypes: of O and tO; tdo, tdlse: whether dO, and the gradient of lse, have a tangent."""
    dtype, ACC = DTYPES[dtype], sum_type(DTYPES[dtype])
    TILE_M, ROWS_OF = tile_m, Alignment(nbytes)
    TILE = simt(tile_m, head_dim_v, THREADS, LANES, vector(dtype))
    ROWS, INFINITE, HAS_TDO, HAS_TDLSE = TILE.row_vector(), ACC(float("inf")), tdo, tdlse
    TILES_A_SLOT, segment_of = PADDED // TILE_M, slot_step(mask, "q", PADDED)

    @device
    def row_sums(mX, mY, batch, head, first, end, m0):
        X = convert(load(aligned(mX[batch, head][first:end], ROWS_OF), TILE, m0), ACC)
        Y = convert(load(aligned(mY[batch, head][first:end], ROWS_OF), TILE, m0), ACC)
        return row_sum(X * Y)

    def kernel(mDO, mTDO, mO, mTO, mLse, mTLse, mTDLse, mTDelta, mPadded, packing):
        overlap_launches()
        batches, heads, seqlen_q = shape(mLse)
        tile, batch, head = place(block_index(), batches * heads, heads)
        segment, slot = segment_of(packing, batch, tile // TILES_A_SLOT, seqlen_q)
        m0 = slot * PADDED + tile % TILES_A_SLOT * TILE_M
        first, padded_row = segment.first_query, segment.first_padded_row + m0
        if slot * PADDED < segment.queries:
            end = first + segment.queries
            tD = row_sums(mDO, mTO, batch, head, first, end, m0)
            if HAS_TDO:
                tD = tD + row_sums(mTDO[0], mO, batch, head, first, end, m0)
            if HAS_TDLSE:
                tD = tD - load(mTDLse[batch, head][first:end], ROWS, m0)
            lse, tlse = load(mLse[batch, head][first:end], ROWS, m0), load(mTLse[batch, head][first:end], ROWS, m0)
            sees = lse != -INFINITE                             # beyond the last query all are 0
            save(mTDelta[batch, head], where(sees, tD, 0), padded_row)
            save(mPadded[batch, head], where(sees, tlse, 0), padded_row)

    dtypes, given = dict.fromkeys(("o", "to"), out_dtypes[0]), ["tdo"] * tdo
    signature = signature_of(kernel, SPEC.arguments, dtype, ACC, dtypes, mask=mask, given=given)
    return Source(kernel, signature, THREADS, overlaps=True)


SPEC = Spec(
    delta_tangent,
    (Matrix("do"), Matrix("tdo", optional=True), Matrix("o"), Matrix("to"), Statistic("lse"), Statistic("tlse"),
     Statistic("tdlse"), Statistic("tdelta", padded=True), Statistic("padded tlse", padded=True), PACKING),
    tiles=tiles_of,
    parameters=lambda work, tiles: {
        "dtype": work.problem.dtype.name, **dtypes_of(work, "o"), "tile_m": tiles.tile_m, "tdo": "tdo" in work.dtypes,
        "tdlse": "tdlse" in work.dtypes, "nbytes": work.nbytes, "mask": packing_of(work.mask),
        "head_dim_v": rounded("head_dim_v", work.problem.head_dim_v),
    },
    blocks=blocks_of_slots,
    packs=True,
)  # fmt: skip

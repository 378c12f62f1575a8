"""Attention backward of many small matrices: Algorithm 3 in one kernel, with all of S and dP in registers.

P is recomputed with the maximum and sum of its own rows, and D = rowsum(P dP), without lse and O. If these are also
over other keys, or another kernel needs delta anyway, lse and delta are given. P and dS take turns in one tile of
shared memory, as left operands for dV and dK. A place is refilled as soon as all have read it: V of the next matrix is
in flight while dS is computed, dO and K while dK is. No two blocks add to the same gradient.

The gradient of what a score adds to S, such as a bias that all matrices of a head share, is summed where dS is
computed: a block keeps the sum over its matrices in registers.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ....call.order import gradient_of_part
from ...build import Source
from ...tile import (
    Alignment,
    SharedMemory,
    allocate,
    block_index,
    commit_copies,
    device,
    dot,
    full,
    grid_size,
    index,
    load,
    mma,
    put,
    row_sum,
    rows_between,
    save,
    shape,
    wait_copies,
    where,
)
from ...words.arguments import LSE_LOG2, Argument, Matrix, Statistic
from ...words.signatures import several, signature_of
from ...words.spec import BY_HEAD, SHARED, Spec
from ...words.steps import SUMS_OF_DS, partial_sums
from ..scores import SCORE, may_be_far, sink_steps, within_segment
from ..shared.dropout import DROPOUT, drop_step
from ..shared.layouts import DTYPES, sum_type
from ..shared.recompute import low_steps
from ..shared.schedule import split
from ..shared.segments import keys_of, mask_within_step, queries_of
from ..shared.softmax import LN_2, softmax_steps
from ..shared.visibility import MASK, PACKED, band_of
from ..tables import dtypes_of
from .steps import (
    SmallTiles,
    barrier_of,
    heads_apart,
    mask_steps,
    matrices_steps,
    parameters,
    place_steps,
    resident,
    rows_of,
    score_steps_of_block,
    takes,
)


class KeyMatrix(NamedTuple):
    """The matrix that a block computes."""

    number: Any  # of its keys: none is left from the number of Matrices on
    batch: Any
    head: Any
    head_k: Any
    is_last: Any  # whether it is the last head that shares these keys
    segment: Any


def small_backward(
    *, dtype, out_dtypes, head_dim, head_dim_v, tiles, mask, score, dropout, nbytes, grouped, statistics, sums
):  # fmt: skip
    """The kernel for these SmallTiles and head_dims rounded up to head_dim and head_dim_v.

    grouped: whether heads share keys. statistics: the names of those that are given: lse_log2 and delta, or dlse if lse
    has a gradient, or none. sums: whether dS is summed.
    """
    dtype, ACC, (threads, blocks, _, keeps_score, size, *_) = DTYPES[dtype], sum_type(DTYPES[dtype]), tiles
    given, dlse = "delta" in statistics, "dlse" in statistics
    S_TILE, Q_TILE, V_TILE = (mma(size, cols, threads) for cols in (size, head_dim, head_dim_v))
    shared, sync = SharedMemory(), barrier_of(threads)
    (SHARED_Q, fetch_q), (SHARED_K, fetch_k), (SHARED_V, fetch_v), (SHARED_DO, fetch_do) = place_steps(
        shared, dtype, threads, size, (head_dim, head_dim, head_dim_v, head_dim_v), nbytes
    )
    SHARED_P = shared.tile(size, size, dtype)                   # then dS
    ROWS_OF, ZERO = Alignment(nbytes), ACC(0)
    NO_SCORE = ACC(-np.inf)
    band_at, (look_up, hide) = band_of(mask), mask_steps(mask, S_TILE)
    keep_score, apply, pull_back = score_steps_of_block(shared, score, S_TILE, ACC, keeps_score)
    matrices_of, next_matrix = matrices_steps(mask, tiles)
    drop_both, matrix_after = drop_both_step(S_TILE, dropout), walk_step(next_matrix, grouped)
    mask_of, scores_of, keys_of_rows = mask_within_step(mask), within_segment(score), rows_of_keys_step(mask)
    add_k, add_v = (sum_step(TILE, grouped) for TILE in (Q_TILE, V_TILE))
    first_sum, add_sum, save_sum = sum_of_dS_steps(S_TILE, sums)
    P_of, D_of = given_steps(S_TILE, dtype) if given else row_steps(S_TILE, ACC, score, dlse)

    @device
    def band_within(at, mask):
        return band_at(mask_of(mask, at.segment), at.batch, at.head)

    @device
    def fetch_queries(copy, array, at, matrices, mask):
        if at.number < matrices.count:
            copy(array, at.batch, at.head, at.segment.first_query, band_within(at, mask)[2])
        commit_copies()

    @device
    def fetch_keys(copy, array, at, matrices, mask):
        if at.number < matrices.count:
            copy(array, at.batch, at.head_k, at.segment.first_key, band_within(at, mask)[3])
        commit_copies()

    def kernel(
        mQ, mK, mV, mDO, mDQ, mDK, mDV, mSums, statistics, mask, scores, drops, group_size, scale, scale_log2,
        kept_scale,
    ):  # fmt: skip
        (batches, _, queries, _), (_, heads_k, keys, _) = shape(mQ), shape(mK)
        matrices, turn = matrices_of(batches, heads_k, queries, keys, mask), index(0)
        sQ, sK, sV, sdO = allocate(SHARED_Q), allocate(SHARED_K), allocate(SHARED_V), allocate(SHARED_DO)
        sP, dK, dV = allocate(SHARED_P), full(Q_TILE, ZERO), full(V_TILE, ZERO)
        sum_dS = first_sum(mSums)
        at = matrix_after(block_index() - grid_size(), turn, matrices, group_size, mask)
        keep_score(scores, at.head)
        fetch_keys(fetch_v, mV, at, matrices, mask)
        fetch_queries(fetch_do, mDO, at, matrices, mask)
        fetch_keys(fetch_k, mK, at, matrices, mask)
        fetch_queries(fetch_q, mQ, at, matrices, mask)
        while at.number < matrices.count:
            turn += 1
            number, batch, head, head_k, is_last, segment = at
            (first, end), (first_key, end_key), band = queries_of(segment), keys_of_rows(segment), band_within(at, mask)
            at = matrix_after(number, turn, matrices, group_size, mask)
            wait_copies(2)
            sync()                                              # V and dO have arrived
            dP = dot(S_TILE, sdO, sV.T)                         # Alg. 3 line 2: dP = dO V^T
            shown = look_up(mask, band, batch, head)
            wait_copies()
            sync()                                              # Q and K have arrived, all have read V
            fetch_keys(fetch_v, mV, at, matrices, mask)
            S = dot(S_TILE, sQ, sK.T)
            S, F = apply(S, scores_of(scores, segment), batch, head, first, first_key)
            S, F = hide(S, NO_SCORE, shown, band), hide(F, 0, shown, band)
            P, seen = P_of(S, statistics, first, end, scores, batch, head, scale_log2)
            PZ, dP = drop_both(P, dP, drops, batch, head, kept_scale)
            put(sP, PZ)
            D = D_of(P, dP, seen, statistics, first, end, batch, head)
            dS = pull_back(P * (dP - D), F)                     # line 3: dS = P (dP - D)
            sum_dS = add_sum(sum_dS, dS)
            sync()                                              # P is there
            dV = add_v(dV, sP.T, sdO)                           # line 1: dV = P^T dO
            if is_last:
                save(rows_between(mDV, batch, head_k, first_key, end_key, ROWS_OF), dV, 0)
                dV = full(V_TILE, ZERO)
            dQ = dot(Q_TILE, dS, sK)                            # line 4: dQ = scale dS K
            save(rows_between(mDQ, batch, head, first, end, ROWS_OF), dQ * scale, 0)
            sync()                                              # all have read P, dO and K
            fetch_queries(fetch_do, mDO, at, matrices, mask)
            fetch_keys(fetch_k, mK, at, matrices, mask)
            put(sP, dS)
            sync()                                              # dS is there
            dK = add_k(dK, sP.T, sQ)                            # line 5: dK = scale dS^T Q
            if is_last:
                save(rows_between(mDK, batch, head_k, first_key, end_key, ROWS_OF), dK * scale, 0)
                dK = full(Q_TILE, ZERO)
            sync()                                              # all have read Q and dS
            fetch_queries(fetch_q, mQ, at, matrices, mask)
        save_sum(sum_dS, mSums)

    arguments, dtypes = (SPEC_GIVEN if given else SPEC).arguments, dict(zip(("dq", "dk", "dv"), out_dtypes))
    signature = signature_of(kernel, arguments, dtype, ACC, dtypes, mask=mask, score=score, dlse=dlse, sums_dS=sums)
    return Source(kernel, signature, threads, blocks, shared.nbytes)


def walk_step(next_matrix, grouped):
    """The device function (number, turn, matrices, group_size, mask) -> the KeyMatrix that a block computes in turn
    number `turn`, after that of this number."""

    @device
    def of_group(number, turn, matrices, group_size, mask):
        group, member = split(turn, group_size)
        number, batch, head_k, segment = next_matrix(block_index() + group * grid_size(), matrices, mask)
        return KeyMatrix(number, batch, head_k * group_size + member, head_k, member == group_size - 1, segment)

    @device
    def of_one(number, turn, matrices, group_size, mask):
        number, batch, head, segment = next_matrix(number + grid_size(), matrices, mask)
        return KeyMatrix(number, batch, head, head, True, segment)

    return of_group if grouped else of_one


def rows_of_keys_step(mask):
    """The device function (segment) -> the rows of K and V that belong to it. In packed arrays they are those of Q: the
    tokens in no segment see nothing, and have gradients."""
    return queries_of if PACKED in mask else keys_of


def sum_step(TILE, grouped):
    """The device function (total, x, y) -> total + x y if heads share keys, else x y."""

    @device
    def added(total, x, y):
        return dot(total, x, y)

    @device
    def alone(total, x, y):
        return dot(TILE, x, y)

    return added if grouped else alone


def drop_both_step(S_TILE, dropout):
    """The device function (P, dP, drops, batch, head, kept_scale) -> both, dropped and scaled."""
    drop = drop_step(S_TILE, dropout)

    @device
    def drop_both(P, dP, drops, batch, head, kept_scale):
        Z = drop(full(S_TILE, kept_scale), drops, batch, head, 0, 0)
        return P * Z, dP * Z

    @device
    def keep_both(P, dP, drops, batch, head, kept_scale):
        return P, dP

    return drop_both if dropout else keep_both


def sum_of_dS_steps(S_TILE, sums):
    """Device functions: (mSums) -> a block's sum of dS; (sum, dS) -> the sum with dS added; (sum, mSums) saves it."""

    @device
    def place(mSums):
        _, heads, _, _ = shape(mSums[0])
        return split(block_index(), heads)

    @device
    def load_sum(mSums):
        block, head = place(mSums)
        return load(mSums[0][block, head], S_TILE, 0)

    @device
    def add(total, dS):
        return total + dS

    @device
    def save_sum(total, mSums):
        block, head = place(mSums)
        save(mSums[0][block, head], total, 0)

    @device
    def nothing(mSums):
        return ()

    @device
    def ignore(total, dS):
        return total

    @device
    def done(total, mSums):
        pass

    return (load_sum, add, save_sum) if sums else (nothing, ignore, done)


def row_steps(S_TILE, ACC, score, dlse):
    """Device functions: (S, statistics, first, end, scores, batch, head, scale_log2) -> P, by the softmax of each row,
    and which rows see something; (P, dP, seen, statistics, first, end, batch, head) -> D = rowsum(P dP), less dlse."""
    (no_max, softmax_step), (with_sink, inverse) = softmax_steps(ACC, may_be_far(score)), sink_steps(score, ACC)
    ROWS, PARTS, ZERO, LN2, HAS_DLSE = S_TILE.row_vector(), S_TILE.row_parts(), ACC(0), ACC(LN_2), dlse

    @device
    def P_of(S, statistics, first, end, scores, batch, head, scale_log2):
        P, m, l, _ = softmax_step(S, full(ROWS, no_max(scale_log2)), full(PARTS, ZERO), scale_log2)
        total = row_sum(l)
        _, whole, alpha = with_sink(m * (scale_log2 * LN2), total, scores, batch, head)
        return P * inverse(whole, alpha), total > 0

    @device
    def D_of(P, dP, seen, statistics, first, end, batch, head):
        D = row_sum(P * dP)
        if HAS_DLSE:
            D = D - where(seen, load(statistics[0][batch, head][first:end], ROWS, 0), 0)
        return D

    return P_of, D_of


def given_steps(S_TILE, dtype):
    """`row_steps` from lse in base 2 and delta, which are padded and not read after the queries; not of packed arrays.
    """
    ROWS, (first_low, _, recompute) = S_TILE.row_vector(), low_steps(dtype)

    @device
    def P_of(S, statistics, first, end, scores, batch, head, scale_log2):
        line, at = statistics[0][batch, head], first_low(statistics[0])
        return recompute(S, load(line[:end], ROWS, 0), load(line[: at + end], ROWS, at), scale_log2), None

    @device
    def D_of(P, dP, seen, statistics, first, end, batch, head):
        return load(statistics[1][batch, head][:end], ROWS, 0)

    return P_of, D_of


# --------------------------------------------------------------------------------------------------------- its plan
class PartialSums(Argument):
    """Sums of dS, a matrix for each block, which all launches of a pass add to: (blocks of a head, heads, seqlen_q,
    seqlen_k), or with one head for all. Nothing if they are not wanted."""

    def find(self, planner, work):
        if sums_dS(work):
            problem, heads = work.problem, heads_apart(work.score_gradients, work)
            blocks = min(SPEC.most_blocks(work, SPEC.fitting(work)), math.prod(problem.matrices))
            sizes = problem.seqlen_q, problem.seqlen_k
            number, *others = planner.wanted
            name, is_matrix = gradient_of_part(number), planner.score[number].own_axes == 2
            if others or not is_matrix or math.prod(planner.layouts[name].shape) != heads * math.prod(sizes):
                name, lead = SUMS_OF_DS, [1] * len(problem.batch)   # not the gradient, but what it is made of
                lead[-1:] = [heads] * bool(lead)
                planner.add_temporary(name, (*lead, *sizes), problem.sum_dtype)
            shape = heads, blocks // heads, *sizes
            planner.add_temporary(partial_sums(name), shape, problem.sum_dtype, is_zero=True)

    def flat(self, planner, work):
        if sums_dS(work):
            name = SUMS_OF_DS if SUMS_OF_DS in planner.temporaries else gradient_of_part(planner.wanted[0])
            at = planner.whole(partial_sums(name))
            (heads, blocks, *sizes), (by_head, by_block, *others) = at.view.shape, at.view.strides
            view = at.view._replace(shape=(blocks, heads, *sizes), strides=(by_block, by_head, *others))
            yield at._replace(view=view)

    def type(self, about):
        return several(about.sums_of(4), about.sums_dS)


class Dlse(Statistic):
    """dlse, if there is one."""

    def flat(self, planner, work):
        if self.name in work.dtypes:
            yield from super().flat(planner, work)

    def type(self, about):
        return several(super().type(about), about.dlse)


def is_grouped(work):
    return work.problem.group_size > 1


def sums_dS(work):
    """Whether the gradients of the score follow from sums of dS by head, which this kernel computes."""
    return work.score_gradients in (SHARED, BY_HEAD) and not is_grouped(work)


def is_alone(work):
    """Whether lse is over this call's keys and nothing else needs lse and delta; if arrays are packed, also whether all
    heads have keys of their own."""
    fits = PACKED not in work.mask or not is_grouped(work)
    return fits and work.whole and work.sink is None and (not work.score_gradients or sums_dS(work))


def parameters_of(given):
    def found(work, tiles):
        common = parameters(work, tiles, is_grouped(work)) | dtypes_of(work, "dq", "dk", "dv")
        statistics = ("lse_log2", "delta") if given else ("dlse",) if "dlse" in work.dtypes else ()
        return common | {"grouped": is_grouped(work), "statistics": statistics, "sums": sums_dS(work)}

    return found


PARTIAL_SUMS = PartialSums()
# {(bytes of an element, size of the tile): {largest head_dim: row}}. Time over that of a copy of seven arrays, alone
# and with a bias by head and its gradient (as in `forward`):
#            tiles of 16   32           64           64, 64       128          128, 64
# float32    1.12, 1.16    1.10, 1.18   1.51, 1.74   1.53, 1.63
# float64    1.08, -       1.09, 1.12   1.26, 1.79   1.42, 1.67
# bfloat16   1.13, 1.19    1.11, 1.16   1.12, 1.31   1.25, 1.30   2.15, 2.48   1.78, 2.22
TILES = {
    (2, 16): {32: SmallTiles(32, 16), 64: SmallTiles(32, 12)},
    (2, 32): {32: SmallTiles(64, 8), 64: SmallTiles(64, 6), 128: SmallTiles(32, 8)},
    (2, 64): {64: SmallTiles(128, 3), 128: SmallTiles(128, 2)},
    (2, 128): {64: SmallTiles(256, 1)},
    (4, 16): {32: SmallTiles(32, 16), 64: SmallTiles(32, 8)},
    (4, 32): {32: SmallTiles(64, 8), 64: SmallTiles(64, 6), 128: SmallTiles(64, 4)},
    (4, 64): {32: SmallTiles(128, 3), 64: SmallTiles(128, 2), 128: SmallTiles(128, 1, keeps_score=False)},
    (8, 16): {64: SmallTiles(32, 8)},
    (8, 32): {64: SmallTiles(64, 4), 128: SmallTiles(64, 2)},
    (8, 64): {32: SmallTiles(128, 2, keeps_score=False), 64: SmallTiles(128, 1)},
}
MATRICES = (
    Matrix("q"), Matrix("k", "k"), Matrix("v", "k"), Matrix("do"), Matrix("dq"), Matrix("dk", "k"), Matrix("dv", "k"),
)  # fmt: skip
GIVEN_STATISTICS = LSE_LOG2, Statistic("delta", padded=True)  # one parameter
NUMBERS = MASK, SCORE, DROPOUT, "group_size", "scale", "scale_log2", "kept_scale"
SPEC = Spec(
    small_backward,
    (*MATRICES, PARTIAL_SUMS, Dlse("dlse"), *NUMBERS),
    tiles=lambda work: rows_of(TILES, work),
    parameters=parameters_of(given=False),
    persistent=True,
    resident=lambda work, tiles: resident(SPEC, work, tiles),
    multiple=lambda work: max(heads_apart(x, work) for x in (work.score_added, work.score_gradients)),
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads_k * m_blocks,
    packs=True,
)
SPEC_GIVEN = replace(
    SPEC,
    packs=False,
    arguments=(*MATRICES, PARTIAL_SUMS, GIVEN_STATISTICS, *NUMBERS),
    parameters=parameters_of(given=True),
)


def takes_given(work):
    return PACKED not in work.mask and takes(SPEC_GIVEN)(work)

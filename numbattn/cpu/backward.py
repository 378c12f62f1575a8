"""Attention backward on the CPU: Algorithm 4, P recomputed from lse."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..base.gradients import sum_to
from ..base.values import rounded
from ..call.passes import gradient_of_part
from .arguments import kept, known, tiles_of
from .backward_directions import BackwardDirections, add_tile_along, load_directions
from .backward_tile import BackwardGiven, BackwardWork, add_tile, arrays_of, keys_of, load_queries, queries_of
from .bfloat16 import NO_PAIRS, PAIRS, begin, end, pairs_of
from .compile import Kernel
from .forward import EXPONENTIAL, NO_DIRECTIONS
from .launch import launch
from .record import Later, Record, data_address
from .score import kept_in, nonlinear_in, options_of
from .score_gradients import merged, shape_of, shapes_of, shares_of, sums_for
from .scratch import TILE_M, TILE_N, Lent, scratch_of
from .subnormals import flush_subnormals, restore
from .tile import EMPTY, clear, inline, is_set, matrix, prefetch

SUMMED = 2**25  # elements of sums that all blocks together may have
NO_ADDRESSES = np.zeros(0, np.int64)  # of sums
BLOCKS = 16  # at least, even for few heads: a constant, so that gradients do not depend on the number of threads


def backward(problem, inputs, given, tangents=None):
    """dq, dk, dv, and gradients of parts of the score, by name; given: arrays by name."""
    pairs = pairs_of(problem, inputs.q, inputs.k, inputs.v, given["do"], given["o"])
    lent = Lent()
    arrays, layouts = operands_of(problem, inputs, given, lent.new, pairs)
    new = np.empty if problem.result_dtype == problem.sum_dtype else lent.new
    *found, of_score = run(problem, call_of(problem, inputs, layouts, pairs), arrays, new=new)
    dq, dk, dv = [rounded(sum_to(dx[0], x.shape), problem.result_dtype) for dx, x in zip(found, inputs)]
    lent.give_back()
    return {"dq": dq, "dk": dk, "dv": dv, **gradients_of_score(inputs.score, [dx for (dx,) in of_score])}


def operands_of(problem, inputs, given, new, pairs=NO_PAIRS):
    """The arrays of BackwardGiven that there are, as kernels read them, and the layouts of all; given: by name; new:
    allocates copies."""
    return arrays_of(pairs).found(problem, {"q": inputs.q, "k": inputs.k, "v": inputs.v, **given}, new)


@known
def call_of(problem, inputs, layouts, pairs):
    """The BackwardCall."""
    given = arrays_of(pairs).described(problem, layouts), *options_of(problem, inputs, order=1, sums=True)
    scratch = scratch_for(problem, nonlinear_in(inputs.score) + kept_in(inputs.score), pairs is PAIRS)
    cost = 2 * problem.head_dim + problem.head_dim_v
    return planned(problem, inputs, given, scratch, cost, pairs=pairs)


@lru_cache(maxsize=64)
def scratch_for(problem, slopes, in_pairs):
    """The scratch of a call; slopes: tiles of derivatives and of S."""
    return scratch_of(problem, in_pairs=in_pairs, S=1, dP=1, slopes=slopes, QT=1, dOT=1, vectors=3)


class BackwardCall(NamedTuple):
    """What calls with a problem, options and layouts have in common."""

    plan: Any  # the BackwardPlan
    launched: tuple  # the Call, without addresses, its blocks, work and memory


def planned(problem, inputs, given, scratch, cost, directions=NO_DIRECTIONS, count=1, pairs=NO_PAIRS):
    """The BackwardCall. given, directions: the Records of BackwardGiven and BackwardDirections; cost: of a pair, in
    multiplications, beside P; scratch: as from scratch_of; count: of directions."""
    plan = plan_of(problem, inputs.mask, shapes_of(inputs.score), count)
    scratch, nbytes = scratch
    cost = plan.pairs * (problem.head_dim + problem.head_dim_v + EXPONENTIAL + cost)
    call = backward_kernel.given(scratch, *given, *directions, *pairs, plan.work)
    return BackwardCall(plan, (call, plan.blocks, cost, nbytes))


def run(problem, call, arrays, count=1, new=np.empty):
    """Run the kernel. Returns dq, dk and dv, each with an axis of directions in front, and for each array of the score
    its gradients along these. arrays: those of BackwardGiven; count: of directions; new: allocates dq, dk and dv."""
    plan = call.plan
    of_dq, of_dk, of_dv = plan.shapes
    sums = [[np.zeros(*layout) for layout in plan.sums] for _ in range(count)]
    addresses = np.array([[*map(data_address, own)] for own in sums], np.int64) if plan.sums else NO_ADDRESSES
    lent, in_parts, dtype = Lent(), of_dq[1] > 1, problem.sum_dtype
    dq, dk, dv = (lent.new if in_parts else new)(of_dq, dtype), new(of_dk, dtype), new(of_dv, dtype)
    if plan.adds:
        for dx in (dq, dk, dv):
            dx.fill(0)  # of np.zeros the system would map each page twice, to read it and to write it
    launch(*call.launched, (*arrays, addresses, dq, dk, dv))
    dq = dq.sum(axis=1, out=new((*of_dq[:1], *of_dq[2:]), dtype)) if in_parts else dq[:, 0]
    lent.give_back()
    return dq, dk, dv, [[merged(own[number], firsts) for own in sums] for number, firsts in enumerate(plan.firsts)]


class BackwardPlan(NamedTuple):
    """What calls with a problem, a mask and the shapes of a score's arrays have in common."""

    pairs: int  # of a query and a key
    blocks: int
    work: Record  # the BackwardWork, but for sums and gradients, which are filled in later
    shapes: list  # of dq, in parts, dk and dv
    adds: bool  # whether blocks add to these, or have gradients of their own, and clear them
    sums: list  # shape and dtype of the sums for each wanted gradient
    firsts: tuple  # as in Shares


@kept
def plan_of(problem, mask, shapes, count):
    """The BackwardPlan. shapes: of the arrays of steps, as from shapes_of; count: of directions."""
    tiles, shares, (batches, heads) = tiles_of(problem, mask, TILE_M), shares_of(problem, shapes), problem.matrices
    n_blocks, longest = -(-problem.seqlen_k // TILE_N), -(-tiles.longest // TILE_N)
    chunks = max(1, min(n_blocks, BLOCKS // max(len(shares.starts) - 1, 1)))
    largest = max([shape[-1] for shape in shapes if shape is not None and shape[-2] == 1], default=1)
    chunks = max(1, min(chunks, SUMMED // max(largest, 1)))  # each chunk has its own sums for a function's arrays
    if tiles.by_head:
        chunks = 1  # the heads of a group divide their keys differently: no two blocks may add to one dK
    parts = max(1, min(chunks, longest))
    sizes = [((count, parts), (heads, problem.seqlen_q, problem.head_dim)),
             ((count,), (problem.heads_k, problem.seqlen_k, problem.head_dim)),
             ((count,), (problem.heads_k, problem.seqlen_k, problem.head_dim_v))]  # fmt: skip
    grads = [Later((*first, batches, *size), problem.sum_dtype) for first, size in sizes]
    sums, layouts = sums_for(problem, shapes, shares, chunks, count)
    record = Record(tiles.table, tiles.starts, shares.order, shares.starts, chunks, sums, *grads)
    shapes = [(*first, *problem.batch[:-1], *size) for first, size in sizes]
    return BackwardPlan(
        tiles.pairs, (len(shares.starts) - 1) * chunks, record, shapes, chunks > 1, layouts, shares.firsts
    )  # fmt: skip


def gradients_of_score(parts, summed, lead=()):
    """The gradients of parts of the score that have a step, by name; summed: by kernels; lead: axes in front."""
    found, summed = {}, iter(summed)
    for number, part in enumerate(parts):
        if part._wants_gradient and part._has_step:
            x = next(summed)
            x = x if x.size else np.zeros((*lead, *shape_of(part)), x.dtype)  # without any scores
            found[gradient_of_part(number)] = x
    return found


@Kernel
def backward_kernel(
    first_block, end_block, stop, scratch, given: BackwardGiven, directions: BackwardDirections, pairs,
    work: BackwardWork,
):
    """Blocks [first_block, end_block). directions: or None, for which the kernel is compiled apart; along directions
    `work` has the tangents of gradients."""
    before, heads_k, matrices = flush_subnormals(), work.dk.shape[2], work.pairs
    begin(pairs)
    for block in range(first_block, end_block):
        chunk, share = block % work.chunks, block // work.chunks
        for number in range(work.shares[share], work.shares[share + 1]):
            if directions is None and pairs is None and number + 1 < len(matrices):
                prefetch_inputs(given, matrices[number + 1], heads_k)
            batch, head_k = matrices[number] // heads_k, matrices[number] % heads_k
            add_gradients(batch, head_k, chunk, stop, scratch, given, directions, pairs, work)
    end(pairs)
    restore(before)


@inline
def prefetch_inputs(given, pair, heads_k):
    """Prefetch the inputs of a pair's first head, if they are few."""
    heads = given.lse.shape[1]
    batch, head, dtype = pair // heads_k, pair % heads_k * (heads // heads_k), given.lse.dtype
    if given.q.rows <= TILE_M and given.k.rows <= TILE_N:
        for x in (given.q, given.k, given.v, given.do, given.o):
            prefetch(matrix(x, batch, head, dtype))


@inline
def add_gradients(batch, head_k, chunk, stop, scratch, given, directions, pairs, work):
    """Add the gradients of every chunks-th tile of keys of a (batch, key head).

    Each part of a segment's tiles of keys has its own dq. Unlike in the paper queries are the outer loop: Q and dO are
    transposed once for all keys.
    """
    starts, chunks, (count, _, _, heads, _, _) = work.starts, work.chunks, work.dq.shape
    group_size = heads // work.dk.shape[2]
    for t in range(count if chunks == 1 else 0):
        clear(work.dk[t, batch, head_k])
        clear(work.dv[t, batch, head_k])
    for head in range(head_k * group_size, (head_k + 1) * group_size):
        number = batch * heads + head
        for t in range(count if chunks == 1 else 0):
            clear(work.dq[t, 0, batch, head])
        for row in range(starts[number], starts[number + 1]):               # Alg. 4 line 9
            at = queries_of(scratch, given, work.tiles[row], pairs)
            part = (chunk - at.segment // TILE_N) % chunks                  # a segment has tiles of keys 0, 1, ...
            n_block = (at.first - at.segment) // TILE_N
            n_first = at.segment + (n_block + (part - n_block) % chunks) * TILE_N
            if max(n_first, at.first) >= at.end:
                continue
            load_queries(at, given, scratch)                                # line 10
            if directions is not None:
                load_directions(at, given, directions, scratch)
            for n_tile in range(n_first, at.end, chunks * TILE_N):          # line 6
                if is_set(stop):
                    return
                n0, n_end = max(n_tile, at.first), min(n_tile + TILE_N, at.end)
                keys = keys_of(n0, n_end, head_k, chunk, part, at, given)
                if keys.state == EMPTY:
                    continue
                if directions is None:
                    add_tile(keys, at, scratch, given, work)
                else:
                    add_tile_along(keys, at, scratch, given, directions, work)

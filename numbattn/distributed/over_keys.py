"""Few queries over many keys, as in decoding: each rank has all queries, and computes with the keys that it holds.

Results travel, o and lse in the dtype of sums, and each rank merges them in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.origin import FAR, Crop
from ..call import passes
from ..call.fitting import check_mask, check_part
from ..call.problem import Inputs, Problem, describe, mask_of
from ..masks import Mask, cropped
from ..scores import Part, as_parts, names, sink_of, steps_of
from .facts import LENGTHS, Facts, agreed, agreed_fit
from .heads import all_to_all
from .messages import Like
from .pieces import RankPlace, TokenRange
from .ring import Messages
from .share import RingOptions, Share, _facts, by_rows, near_by, pieces_by_rank
from .totals import Output


def over_keys(place: RankPlace, q: Any, k: Any, v: Any, call: RingOptions) -> Messages:
    """o, in a tuple."""
    own: Facts | Exception
    try:
        mask, score = by_rows(mask_of(call.causal, call.mask), as_parts(call.score))
        problem, inputs = describe(q, k, v, scale=call.scale)
        if inputs.cache is not None:
            if inputs.cache._ring is not None:
                raise ValueError("k: got a rolling KVCache, expected one that has all tokens of its rank")
            check_beside_cache(problem, mask, score)
        kind = "arrays" if inputs.cache is None else "a KVCache"
        own = {"call": "over_keys", "k and v": kind, "seqlen_q": problem.seqlen_q,
               **_facts(problem, mask, inputs.scale, None, score)}  # fmt: skip
    except Exception as error:
        own = error
    facts = yield from agreed(place, own)
    mask, score = yield from near_by(mask, score)
    lengths = None
    if inputs.cache is not None and (mask._leaves or any(part._needs_positions for part in score)):
        lengths = yield from gathered(place, [inputs.cache.lengths])

    def blocks_of() -> list[tuple[Problem, Inputs]]:
        if inputs.cache is None:
            return blocks_of_arrays(place, problem, inputs, mask, score, facts)
        return [block_of_cache(place, problem, inputs, mask, score, lengths)]

    blocks = yield from agreed_fit(place, facts, blocks_of)
    queries, part, whole = slice(0, problem.seqlen_q), Output(problem, q), Output(problem, q)
    for block, given in blocks:
        o, saved = passes.forward(block, given)
        part.add(queries, o, saved.lse)
    part.settle()
    for o, lse in (yield from gathered(place, [part.whole, part.lse])):
        whole.add(queries, o, lse)
    whole.add_sink(sink_of(score))
    return (whole.result(problem.dtype),)


def gathered(place: RankPlace, arrays: list[Any]) -> Messages:
    """The arrays of each rank, which are of one kind on all."""
    return (yield from all_to_all(place, lambda to: arrays, lambda source: [Like(x.shape, x.dtype) for x in arrays]))


def blocks_of_arrays(
    place: RankPlace, problem: Problem, inputs: Inputs, mask: Mask, score: tuple[Part, ...], facts: list[Facts]
) -> list[tuple[Problem, Inputs]]:
    """The calls of all queries with each of the rank's pieces of keys that they may see."""
    keys = pieces_by_rank("k and v", tuple([found[LENGTHS][1] for found in facts]), place)
    queries = ((TokenRange(0, problem.seqlen_q, 0),) if problem.seqlen_q else (),) * place.ranks
    share = Share(place, problem, inputs, mask, score, queries, keys, facts)
    share.check()
    return [share.call(block, inputs.k[..., block.keys, :], inputs.v[..., block.keys, :])
            for block in share.between(place.rank, place.rank).blocks]  # fmt: skip


def block_of_cache(
    place: RankPlace, problem: Problem, inputs: Inputs, mask: Mask, score: tuple[Part, ...], lengths: Any
) -> tuple[Problem, Inputs]:
    """The call with the rank's cache. Its tokens of each sequence come after those of earlier ranks. lengths: of all
    ranks, or None if they do not matter."""
    q, parts = inputs.q, steps_of(score)
    if lengths is not None:
        counts = [of_rank[:, None].astype(np.int64) for (of_rank,) in lengths]
        first, seqlen_k = (sum(some, np.zeros_like(counts[0])) for some in (counts[: place.rank], counts))
        crop = Crop(0, problem.seqlen_q, first, problem.seqlen_k, problem.seqlen_q, seqlen_k, 0, problem.seqlen_q)
        mask = cropped(mask._like(q), crop)
        parts = [part._like(q)._cropped(crop, None) for part in parts]
    return describe(q, inputs.cache, None, mask=mask, scale=inputs.scale, score=parts, wide=True)


def check_beside_cache(problem: Problem, mask: Mask, score: tuple[Part, ...]) -> None:
    """Refuse what does not fit, and what has columns for keys, since these differ between sequences."""
    shape = *problem.batch, problem.seqlen_q, FAR
    for leaf in mask._leaves:
        if not leaf._crops_by_sequence:
            raise ValueError(f"mask: got {leaf} with KVCaches of several ranks, expected masks such as Causal, Window, "
                             "Lengths, First, Prefix and Tail, or what & and | make of them")
        check_mask(leaf._fit(shape), shape, problem.xp)
    for part in score:
        if not part._crops_by_sequence:
            allowed = ", ".join(names(lambda kind: kind._crops_by_sequence))
            raise ValueError(f"score: got {part} with KVCaches of several ranks, expected {allowed}")
        check_part(part, shape, problem.xp)


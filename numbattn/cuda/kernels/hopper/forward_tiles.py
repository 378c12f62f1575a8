"""The tiles of the forward kernel on Hopper: tables of measured rows, and which table is for which work."""

import math
from typing import NamedTuple

from ....masks import Causal
from ...tile import WARPGROUP_ROWS
from ..any.decode import has_few_queries
from ..scores import ENTRIES, looks_up, number_of_tma_bias, parts_of
from ..shared.schedule import scattered
from ..shared.visibility import PACKED, has_band, has_boxes, has_functions, is_looked_up
from ..tables import compiled_in, is_wide
from .choice import Case, first_of, words_of

ROWS = WARPGROUP_ROWS  # queries of a consumer


class Warpgroups(NamedTuple):
    """A row: tiles of tile_n keys, and consumers of 64 queries each."""

    tile_n: int
    consumers: int
    stages: int  # of K and of V
    q_stages: int  # of Q, and of O staged in its buffers
    blocks: int = 1  # per multiprocessor: with several, each of one consumer and with its own list of tiles

    unit = "wgmma"

    @property
    def tile_m(self):
        return ROWS * self.consumers


# share of the tensor cores' peak, by bench/rows.py on an H200: seqlen 512, 16384
USUAL = {  # by the larger head_dim
    64: Warpgroups(64, 4, 6, 5),                                    # 46, 57 %
    128: Warpgroups(128, 2, 2, 5),                                  # 65, 81 %
    192: Warpgroups(96, 2, 2, 3),                                   # 57, 95 %; 64 keys 59, 90
    256: Warpgroups(64, 2, 2, 3),                                   # 63, 96 %; 80 keys 57, 95
}
LONG = {  # instead, where a query sees MANY keys or more
    64: Warpgroups(128, 3, 3, 5),                                   # 44, 62 %; 96 keys 37, 57
    128: Warpgroups(80, 3, 3, 5),                                   # 57, 87 %
}
MANY = 2048
GAIN = 1.07  # how much faster than the usual rows they are, at least, if no tile is partly empty
NARROW = {  # instead, for bands narrower than seqlen_k, and short causal ones: smaller tiles waste less at their edges
    128: Warpgroups(64, 3, 5, 4),       # 6 % faster than 128 keys with Window(1023, 0), 4 % with Causal() of 512 tokens
}
SHORT = 512  # causal 1024 is 5 % slower
CELLS = {  # for grids: 128 queries and a power of two of keys, so that a tile lies within a block of usual size
    64: Warpgroups(128, 2, 4, 4),                                   # random 10%, 16384: 42 %; 64 keys 30
    128: Warpgroups(128, 2, 2, 5),                                  # 65 %; 64 keys 51
    192: Warpgroups(64, 2, 2, 4),
    256: Warpgroups(64, 2, 2, 3),
}
BLOCKS = CELLS | {  # for masks of small blocks
    64: Warpgroups(64, 1, 4, 2, blocks=2),
    128: Warpgroups(64, 1, 2, 2, blocks=2),
}
FUNCTIONS = CELLS | {  # for functions, where each consumer has states of its own: ms on an H100, seqlen 8192
    64: Warpgroups(64, 4, 6, 5),                                    # causal, documents: .56, .30; row of CELLS .62, .35
    128: Warpgroups(64, 3, 5, 4),                                   # .83, .37; row of CELLS .81, .40
}
CELLS_AND_DROPOUT = CELLS | {128: Warpgroups(64, 2, 4, 4), 256: Warpgroups(32, 2, 2, 4)}
LOOKED_UP = CELLS_AND_DROPOUT | {64: Warpgroups(64, 2, 4, 4)}  # for a score's arrays

OF_TABLE = USUAL | LONG  # for a RelativeBias alone: far from the diagonal, a tile has one number

TMA_BIAS = {  # for a bias whose tiles come with those of K
    64: Warpgroups(128, 2, 3, 4),
    128: Warpgroups(64, 2, 3, 4),
    192: Warpgroups(64, 2, 2, 3),
    256: Warpgroups(64, 2, 2, 2),
}

MOST = max(USUAL)  # columns of O that a consumer has registers for
WIDE = {  # by head_dim, where Q takes most of the shared memory, for any mask
    320: Warpgroups(64, 2, 2, 2),
    384: Warpgroups(32, 2, 2, 2),
    448: Warpgroups(32, 2, 2, 2),
    512: Warpgroups(32, 2, 2, 2),
    576: Warpgroups(16, 2, 3, 2),
}

CHOICES = (
    Case("tma-bias", TMA_BIAS),
    Case("score-lookups table-alone", OF_TABLE),
    Case("score-lookups", LOOKED_UP),
    Case("dropout cells", CELLS_AND_DROPOUT),
    Case("dropout", CELLS),               # at 4096 26.3 % at head_dim 64, 41.6 at 128; the others 25.5, 39.4
    Case("small-blocks", BLOCKS),
    Case("boxes", CELLS),                 # ms on an H200, windows of 80 x 80, strided ones: 14.9, 8.8, else 14.6, 12.6
    Case("functions", FUNCTIONS),
    Case("cells", CELLS),
    Case("packed many-keys", USUAL | LONG),
    Case("packed", USUAL | {64: LONG[64]}),   # long sequences take the most time, however many short ones there are
    Case("many-keys", USUAL | LONG),
    Case("narrow", USUAL | NARROW),
    Case("short-causal", USUAL | NARROW),
    Case("", USUAL),
)


REGISTERS = {"tma-bias", "score-lookups", "dropout", "cells"}  # traits that take registers, or shared memory


def traits(work):
    """The traits of some work that CHOICES ask for."""
    problem, lengths = work.problem, (work.problem.seqlen_q, work.keys)
    found = {
        "tma-bias": number_of_tma_bias(work) is not None,
        "score-lookups": looks_up(work.score),
        "table-alone": is_table(work.score) and not (problem.dropout or work.mask),
        "dropout": problem.dropout,
        "small-blocks": has_small_blocks(work),
        "boxes": has_boxes(work.mask),
        "functions": has_functions(work.mask),
        "cells": is_looked_up(work.mask),
        "packed": PACKED in work.mask,
        "many-keys": work.keys >= MANY,
        "narrow": work.keys < problem.seqlen_k,
        "short-causal": Causal in problem.mask_kinds and all(SHORT // 2 < n <= SHORT for n in lengths),
    }
    return words_of(found)


def is_table(score):
    """Whether the score only adds a table's entries, with one offset for all matrices."""
    parts = parts_of(score)
    return len(parts) == 1 and parts[0].gradient == ENTRIES and not parts[0].offset


def warpgroups(work):
    """The row for this work, or the usual one if that packs more heads into a work tile, or wastes less."""
    size, found = max(dims_of_launch(work.problem)), traits(work)
    if size in WIDE:
        return WIDE[size]
    row, usual = first_of(CHOICES, found)[size], USUAL[size]
    if found & REGISTERS:
        return row
    return max((row, usual), key=lambda x: (heads_per_tile(x, work), busy(x, work) * (GAIN if x is row else 1)))


def rows(work):
    """The row for this work, and one with fewer stages of Q, for when a linear bias leaves no room for them."""
    row = warpgroups(work)
    return row, row._replace(q_stages=row.consumers)


def heads_per_tile(row, work):
    """How many query heads of a group are packed into a work tile: as many as fit, if all see the same keys."""
    if work.mask:
        return 1
    group_size, seqlen_q = work.problem.group_size, work.problem.seqlen_q
    divisors = (n for n in range(1, row.consumers + 1) if row.consumers % n == group_size % n == 0)
    return max(n for n in divisors if n == 1 or n * seqlen_q <= row.tile_m)


def busy(row, work):
    """The share of the multiprocessors' time that is spent on queries, if all work tiles take equally long: some wait
    for the last wave, and some rows are beyond the queries."""
    if is_uneven(work):
        return 1
    matrices, seqlen_q, all_at_once = math.prod(work.problem.batch), work.problem.seqlen_q, work.device.multiprocessors
    tiles = matrices * -(-seqlen_q // row.tile_m)
    return matrices * seqlen_q / (-(-tiles // all_at_once) * all_at_once * row.tile_m)


def is_uneven(work):
    """Whether some tiles of queries see more keys than others."""
    may_be = has_band(work.problem) or has_functions(work.mask)
    return may_be and (work.keys >= work.problem.seqlen_k or PACKED in work.mask)


def matrices_in_l2(work):
    """How many matrices to compute at a time: enough for heavy and light work tiles to mix, and few enough for the L2
    cache. Grids read blocks of keys in no order, so that all keys and values must stay there; with functions neighbours
    usually see the same keys."""
    most = 64 if work.problem.head_dim <= 64 else 32
    if has_boxes(work.mask):
        return 1                          # neighbours see the same keys: strided 8.8 ms, with 32 at a time 9.8
    if not work.cells or has_functions(work.mask):
        return most
    return min(scattered(work) * work.problem.group_size, most)


def head_dims(problem):
    """Both head_dims, rounded up to multiples of 64."""
    return tuple(max(64, -(-size // 64) * 64) for size in (problem.head_dim, problem.head_dim_v))


def slices_of(*head_dims):
    """How many slices of columns results have, for each of which a launch computes S anew; 1 for usual head_dims."""
    return -(-max(head_dims) // MOST)


def own_columns(head_dim, number, slices):
    """The first column of a slice, and how many it has: a multiple of 64, and in the last one perhaps fewer."""
    width = -(-head_dim // (64 * slices)) * 64
    return number * width, min(width, head_dim - number * width)


def by_columns(**results):
    """What the Spec of a kernel has for larger head_dims: `columns` and `of_slice`, whose parameter `own` says which
    columns a launch computes. results: for each the number of its head_dim."""

    def of_slice(work, number):
        dims = [head_dims(work.problem)[which] for which in results.values()]
        slices = slices_of(*dims)
        return {"own": tuple([own_columns(dim, number, slices) for dim in dims])} if slices > 1 else {}

    def columns(work):
        own = of_slice(work, 0).get("own", ())
        return {name: count for name, (_, count) in zip(results, own)}

    return {"slices": True, "columns": columns, "of_slice": of_slice}


def dims_of_launch(problem):
    """As `head_dims`, where a launch takes a slice of the columns of V and O."""
    head_dim, head_dim_v = head_dims(problem)
    return head_dim, own_columns(head_dim_v, 0, slices_of(head_dim_v))[1]


def parameters(work, tiles):
    """Those of all factories of kernels that compute S."""
    return compiled_in(work, tiles, head_dims(work.problem))


def has_small_blocks(work):
    """Whether a mask's blocks are smaller than the usual tiles. Those of functions do not count."""
    return any(min(sizes) < 2 * ROWS for sizes in work.cells) and not has_functions(work.mask)


def tiles_of_states(work, tiles):
    """The tiles that have states: with functions in the mask those of a single consumer."""
    return tiles._replace(consumers=1) if has_functions(work.mask) else tiles


def is_for_hopper(work):
    """Whether the kernels that use wgmma and TMA, named hopper_..., take this work."""
    return has_wgmma(work) and max(head_dims(work.problem)) <= MOST


def has_wgmma(work):
    return work.device.cc == (9, 0) and work.problem.dtype.itemsize == 2


def takes_wide(work):
    """Whether the forward kernel takes this work with larger head_dims, if its tiles fit; not where queries are few."""
    is_for_it = has_wgmma(work) and is_wide(work.problem) and not has_few_queries(work)
    return is_for_it and head_dims(work.problem)[0] <= max(WIDE)


def numbers(work, tiles):
    """at_once, heads_per_tile and ascending: see `hopper_forward`."""
    together = heads_per_tile(tiles, work)
    at_once = matrices_in_l2(work) if has_band(work.problem) or is_looked_up(work.mask) else 1
    at_once = -(-max(at_once, work.problem.group_size) // together)
    return {"at_once": at_once, "heads_per_tile": together, "ascending": int(not is_uneven(work))}

"""Sums of dS over a batch, added up where a backward kernel computes dS: the gradient of what all of a head share, such
as a bias. A block keeps its head, and adds to a matrix of its own; `sum_parts` adds these up. No atomics."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....call.order import gradient_of_part
from ...tile import block_index, device, load, minimum, save, shape, sync_threads, wait_copies
from ...words.arguments import Argument
from ...words.signatures import several
from ...words.spec import BY_HEAD, SHARED, heads_apart
from ...words.steps import SUMS_OF_DS, partial_sums
from .schedule import place, split


def is_grouped(work):
    return work.problem.group_size > 1


def sums_dS(work):
    """Whether the gradients of the score follow from sums of dS by head, which a kernel whose heads have keys of their
    own can add up."""
    return work.score_gradients in (SHARED, BY_HEAD) and not is_grouped(work)


@dataclass(frozen=True)
class PartialSums(Argument):
    """Sums of dS, a matrix for each block, which all launches of a pass add to: (blocks of a head, heads, seqlen_q,
    seqlen_k), or with one head for all. Nothing if they are not wanted."""

    wanted: Callable  # (work) -> whether the kernel computes them
    count: Callable  # (work) -> of how many blocks

    def find(self, planner, work):
        if self.wanted(work):
            problem, heads = work.problem, heads_apart(work.score_gradients, work)
            sizes = problem.seqlen_q, problem.seqlen_k
            number, *others = planner.wanted
            name, is_matrix = gradient_of_part(number), planner.score[number].own_axes == 2
            if others or not is_matrix or math.prod(planner.layouts[name].shape) != heads * math.prod(sizes):
                name, lead = SUMS_OF_DS, [1] * len(problem.batch)   # not the gradient, but what it is made of
                lead[-1:] = [heads] * bool(lead)
                planner.add_temporary(name, (*lead, *sizes), problem.sum_dtype)
            shape = heads, self.count(work) // heads, *sizes
            planner.add_temporary(partial_sums(name), shape, problem.sum_dtype, is_zero=True)

    def flat(self, planner, work):
        if self.wanted(work):
            name = SUMS_OF_DS if SUMS_OF_DS in planner.temporaries else gradient_of_part(planner.wanted[0])
            at = planner.whole(partial_sums(name))
            (heads, blocks, *sizes), (by_head, by_block, *others) = at.view.shape, at.view.strides
            view = at.view._replace(shape=(blocks, heads, *sizes), strides=(by_block, by_head, *others))
            yield at._replace(view=view)

    def type(self, about):
        return several(about.sums_of(4), about.sums_dS)


@device
def own_sum(mSums, number):
    """Where the matrix is that block number `number`, of those that have one, adds to."""
    _, heads, _, _ = shape(mSums[0])
    return split(number, heads)


class Turn(NamedTuple):
    """One of the elements of the batch that a block takes in turn."""

    tile: Any
    batch: Any
    head: Any
    sum_dS: Any  # a matrix


@device
def part_of_block(mSums, batches, heads):
    """A block's part of the batch, a range; its tile; its head; and where the matrix is that it adds to."""
    blocks, own_heads, _, _ = shape(mSums[0])
    parts = minimum(blocks * own_heads // heads, batches)
    tile, first, head = place(block_index(), parts * heads, heads)
    return range(first, batches, parts), tile, head, own_sum(mSums, first * heads + head)


def sum_steps(S_TILE, sums):
    """Device functions: (number, batches, heads, turn) -> a block's tile, its element of the batch, and its head;
    (turn, dS, row, col) adds a tile to the sum. sums: whether dS is summed, over many a Turn; else turn is ()."""

    @device
    def place_alone(number, batches, heads, turn):
        return place(number, batches * heads, heads)

    @device
    def ignore(turn, dS, row, col):
        pass

    @device
    def place_in_turn(number, batches, heads, turn):
        wait_copies()
        sync_threads()                                          # all have read the tiles of the element before
        return turn.tile, turn.batch, turn.head

    @device
    def add(turn, dS, row, col):
        """The same thread loads and saves an element, each time."""
        to = turn.sum_dS[:, col:]
        save(to, load(to, S_TILE, row) + dS, row)

    return (place_in_turn, add) if sums else (place_alone, ignore)

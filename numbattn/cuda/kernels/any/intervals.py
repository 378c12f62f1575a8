"""The keys [first, end) that each query sees by a mask's segments, prefixes and intervals. See `numbattn.masks`.

`visibility` uses them to test elements, `tile_states` to test tiles. Only the kinds of the parts are compiled in, each
a word of KINDS, followed by the names of those of its values that are arrays.

"(" and ")" enclose an `|` of two masks, with "|" between the parts of one and those of the other. Together they are one
interval again, except for the gap between them, which is written, too.
"""

from functools import reduce
from typing import Any, NamedTuple

from ....masks import First, Intervals, Prefix
from ....masks.rolling import Turns
from ...build import Source
from ...compiler import types
from ...tile import (
    INDEX,
    block_index,
    device,
    index,
    maximum,
    minimum,
    shape,
    thread_index,
)
from ...words.arguments import Argument
from ...words.numbers import SIDES
from ...words.signatures import several, signature_of
from ...words.spec import Spec
from ...words.steps import END, FIRST, OFFSETS, array_of_mask
from ..scores import takes_offsets
from ..shared.schedule import overlap_launches, place
from ..shared.segments import inside
from ..shared.visibility import BY_INTERVALS, EDGE, LINE

SEGMENTS, POSITIONS = "segments queries keys", "positions"
OPEN, OR, CLOSE = "(", "|", ")"
QUERIES = 128  # of a block, one a thread


class Parts(NamedTuple):
    """The parts of a mask that give intervals, and the arrays that these are written to."""

    first: Any  # int32 (batch, heads, seqlen_q): what the kernel writes
    end: Any
    lo: Any  # for windows aligned within segments: query i sees key j only if lo <= j - (its own key) <= hi
    hi: Any
    gaps: Any  # int32 (batch, heads, seqlen_q): first and end of each `|`'s gap; end <= first where there is none
    offsets: Any  # likewise, if a score needs it: how far the query's own key is from the query
    parts: Any  # what the kind of each part needs: see `part_types`


class QuerySegment(NamedTuple):
    """A query's segment: its keys [first, end), and the query's own key. The last query's own key is the last one."""

    first: Any
    end: Any
    own: Any


class IntervalsArgument(Argument):
    """The fields of Parts."""

    def flat(self, planner, work):
        yield from (planner.at(FIRST, own=1), planner.at(END, own=1), "own_lo", "own_hi")
        yield from (planner.at(name, own=1) for name in planner.names_of_gaps())
        if has_offsets(work):
            yield planner.at(OFFSETS, own=1)
        for number, part in enumerate(planner.call.mask.intervals):
            for which, x in enumerate(part.numbers):
                kind = kind_of(part.kind)
                own = int(kind.names[which] in kind.rows)
                yield planner.at(array_of_mask(number, which), own=own) if x is None else x

    def type(self, about):
        return parts_type(about.parts, about.offsets)


INTERVALS = IntervalsArgument()


class IntervalKind(NamedTuple):
    """A kind of part."""

    names: tuple = ()  # of its values: numbers, or arrays over the batch axes
    step: Any = None  # (number of the part, names of arrays) -> the device function (mask, batch, head, i, segment) of
    # the keys [first, end) that it shows
    rows: tuple = ()  # names of values that are arrays with one more axis after those of the batch
    of: Any = None  # the class of masks that are lowered to it
    is_within: bool = False  # whether this holds for masks aligned within segments, or for those that are not
    lower: Any = None  # (mask, own) -> its values; own(): the own key of query 0


def kind_of(part):
    return KINDS[part.split()[0]]


def lowered(mask, own, is_within=False):
    """The name of the kind of a mask, and its values by name; None for a mask without one."""
    if (name := BY_MASK.get((type(mask), is_within))) is None:
        return None
    return name, dict(zip(KINDS[name].names, KINDS[name].lower(mask, own), strict=True))


def part_types(part):
    """The types of what a part needs."""
    kind, arrays = kind_of(part), part.split()[1:]
    return tuple(LINE if name in kind.rows else EDGE if name in arrays else INDEX for name in kind.names)


def number_of_positions(parts):
    """The number of the part that gives positions; None without one."""
    return next((number for number, part in enumerate(parts) if part.split()[0] == POSITIONS), None)


def count_of_gaps(parts):
    return parts.count(CLOSE)


def segments_of(mask, parts, layouts):
    """How many segments arrays are packed of, where a mask of these kinds, whose intervals are of these, is nothing
    else and all heads have the same ones; else 0."""
    if mask != (BY_INTERVALS,) or parts != [SEGMENTS]:
        return 0
    shapes = [layouts[array_of_mask(0, which)].shape for which in range(2)]
    by_head = any(len(shape) > 1 and shape[-2] > 1 for shape in shapes)
    return 0 if by_head else shapes[0][-1] + 1


def parts_type(parts, offsets):
    every = types.Tuple([types.Tuple(part_types(part)) for part in parts])
    gaps = several(LINE, 2 * count_of_gaps(parts))
    return types.NamedTuple([LINE, LINE, INDEX, INDEX, gaps, several(LINE, offsets), every], Parts)


def has_offsets(work):
    """Whether a score needs each query's offset of its own key."""
    return takes_offsets(work.score)


def intervals(*, parts, offsets):
    """The kernel, with a thread for each query."""
    HAS_OFFSETS = offsets
    segment_of = segments(parts.index(SEGMENTS)) if SEGMENTS in parts else whole_matrix
    if (number := number_of_positions(parts)) is not None:
        segment_of = positions(number, parts[number].split()[1:])
    seen = reduce(both, steps_of(parts), all_of_segment)

    def kernel(mask, seqlen_q, seqlen_k):
        overlap_launches()
        batches, heads, _ = shape(mask.first)
        tile, batch, head = place(block_index(), batches * heads, heads)
        i = tile * QUERIES + thread_index()
        if i < seqlen_q:
            segment = segment_of(mask, batch, head, i, seqlen_q, seqlen_k)
            first, end = seen(mask, batch, head, i, segment)
            some = first < end
            mask.first[batch, head, i] = first if some else seqlen_k
            mask.end[batch, head, i] = end if some else 0
            if HAS_OFFSETS:
                mask.offsets[0][batch, head, i] = segment.own - i

    signature = signature_of(kernel, SPEC.arguments, parts=parts, offsets=offsets)
    return Source(kernel, signature, QUERIES, overlaps=True)


def steps_of(parts):
    """The steps of all parts but segments; an `|` is one step."""
    steps, unions, outside = [], 0, None
    for number, (kind, *arrays) in enumerate(map(str.split, parts)):
        if kind == OPEN:
            outside, steps = steps, []
        elif kind == OR:
            one, steps = reduce(both, steps), []
        elif kind == CLOSE:
            steps = [*outside, either(unions, one, reduce(both, steps))]
            unions += 1
        elif kind not in ("segments", POSITIONS):
            steps.append(KINDS[kind].step(number, arrays))
    return steps


# ----------------------------------------------------------------------------------------------------------- segments
@device
def whole_matrix(mask, batch, head, i, seqlen_q, seqlen_k):
    return QuerySegment(index(0), seqlen_k, i + seqlen_k - seqlen_q)


def segments(number):
    """The device function (mask, batch, head, i, seqlen_q, seqlen_k) -> the QuerySegment, empty for a query in none."""

    @device
    def segment_of(mask, batch, head, i, seqlen_q, seqlen_k):
        queries, keys = mask.parts[number][0][batch, head], mask.parts[number][1][batch, head]
        (count,) = shape(queries)
        low, high = index(0), count                             # will be the number of offsets up to i
        while low < high:
            middle = (low + high) // 2
            if queries[middle] <= i:
                low = middle + 1
            else:
                high = middle
        at, after = maximum(low - 1, 0), minimum(low, count - 1)   # the same where there is no segment
        first, end = inside(keys[at], seqlen_k), inside(keys[after], seqlen_k)
        own = i + end - inside(queries[after], seqlen_q)
        return QuerySegment(first, end, own)

    return segment_of


def positions(number, arrays):
    """The same of a whole sequence whose last queries have positions, as their own keys have."""
    keys_of, queries_of = number_of("keys" in arrays), number_of("queries" in arrays)

    @device
    def segment_of(mask, batch, head, i, seqlen_q, seqlen_k):
        depths, keys, queries = mask.parts[number]
        end = inside(keys_of(keys, batch, head), seqlen_k)
        return QuerySegment(index(0), end, end - queries_of(queries, batch, head) + depths[batch, head, i])

    return segment_of


# ------------------------------------------------------------------------- what else there is, (first, end) of a query
@device
def all_of_segment(mask, batch, head, i, segment):
    return maximum(segment.first, segment.own + mask.lo), minimum(segment.end, segment.own + mask.hi + 1)


def both(one, other):
    @device
    def seen(mask, batch, head, i, segment):
        first, end = one(mask, batch, head, i, segment)
        other_first, other_end = other(mask, batch, head, i, segment)
        return maximum(first, other_first), minimum(end, other_end)

    return seen


def either(number, one, other):
    @device
    def seen(mask, batch, head, i, segment):
        first, end = one(mask, batch, head, i, segment)
        other_first, other_end = other(mask, batch, head, i, segment)
        gap, gap_end = index(0), index(0)
        if end <= first:
            first, end = other_first, other_end
        elif other_first < other_end:
            gap, gap_end = minimum(end, other_end), maximum(first, other_first)
            first, end = minimum(first, other_first), maximum(end, other_end)
        mask.gaps[2 * number][batch, head, i] = gap
        mask.gaps[2 * number + 1][batch, head, i] = gap_end
        return first, end

    return seen


def given(number, arrays):
    @device
    def seen(mask, batch, head, i, segment):
        first, end = mask.parts[number]
        return maximum(first[batch, head, i], 0), end[batch, head, i]

    return seen


def prefix(number, arrays):
    length_of, offset_of = number_of("length" in arrays), number_of("offset" in arrays)

    @device
    def seen(mask, batch, head, i, segment):
        length, offset = mask.parts[number]
        return index(0), maximum(length_of(length, batch, head), i + offset_of(offset, batch, head) + 1)

    return seen


def within(number, arrays):
    length_of = number_of("length" in arrays)

    @device
    def seen(mask, batch, head, i, segment):
        (length,) = mask.parts[number]
        return index(0), maximum(segment.first + length_of(length, batch, head), segment.own + 1)

    return seen


def turns(number, arrays):
    keys_of, queries_of = number_of("keys" in arrays), number_of("queries" in arrays)

    @device
    def seen(mask, batch, head, i, segment):
        keys, queries, first, size, window, which = mask.parts[number]
        after = i + 1 + keys_of(keys, batch, head) - queries_of(queries, batch, head)
        hidden = after if after < first else first + (after - first) % size
        end = hidden + size - window
        begins_again = end > first + size
        if which == 0:
            return index(0), first if begins_again else hidden
        return end - size if begins_again else end, hidden if begins_again else first + size

    return seen


def first_keys(number, arrays):
    n_of = number_of("n" in arrays)

    @device
    def seen(mask, batch, head, i, segment):
        (n,) = mask.parts[number]
        return index(0), segment.first + inside(n_of(n, batch, head), segment.end - segment.first)

    return seen


def band(number, arrays):
    lo_of, hi_of, queries_of, keys_of = (number_of(name in arrays) for name in SIDES)

    @device
    def seen(mask, batch, head, i, segment):
        lo, hi, queries, keys = mask.parts[number]
        end = minimum(i + hi_of(hi, batch, head) + 1, keys_of(keys, batch, head))
        return maximum(i + lo_of(lo, batch, head), 0), end if i < queries_of(queries, batch, head) else 0

    return seen


def window(number, arrays):
    @device
    def seen(mask, batch, head, i, segment):
        lo, hi = mask.parts[number]
        return maximum(segment.first, segment.own + lo), minimum(segment.end, segment.own + hi + 1)

    return seen


def number_of(is_array):
    @device
    def of_array(x, batch, head):
        return x[batch, head]

    @device
    def of_all(x, batch, head):
        return x

    return of_array if is_array else of_all


KINDS = {
    "segments": IntervalKind(("queries", "keys"), rows=("queries", "keys")),
    POSITIONS: IntervalKind(("depths", "keys", "queries"), rows=("depths",)),
    "intervals": IntervalKind(("first", "end"), given, ("first", "end"), Intervals, lower=lambda mask, own: (
        mask.first, mask.end
    )),
    "prefix": IntervalKind(("length", "offset"), prefix, of=Prefix, lower=lambda mask, own: (
        mask.lengths, own() if mask.offset is None else mask.offset
    )),
    "within": IntervalKind(("length",), within, of=Prefix, is_within=True, lower=lambda mask, own: (mask.lengths,)),
    "turns": IntervalKind(("keys", "queries", "first", "size", "window", "which"), turns, of=Turns,
                          lower=lambda mask, own: (mask.keys, mask.queries, *mask.ring, mask.number)),
    "first": IntervalKind(("n",), first_keys, of=First, is_within=True, lower=lambda mask, own: (mask.n,)),
    "band": IntervalKind(SIDES, band),  # within an `|`
    "window": IntervalKind(SIDES[:2], window),  # the same, aligned within segments
    **dict.fromkeys((OPEN, OR, CLOSE), IntervalKind()),
}  # fmt: skip
BY_MASK = {(kind.of, kind.is_within): name for name, kind in KINDS.items()}
SPEC = Spec(
    intervals,
    (INTERVALS, "seqlen_q", "seqlen_k"),
    tiles=None,
    parameters=lambda work, tiles: {"parts": work.intervals, "offsets": has_offsets(work)},
    blocks=lambda work, tiles, m_blocks, n_blocks: work.problem.heads * -(-work.problem.seqlen_q // QUERIES),
)  # fmt: skip

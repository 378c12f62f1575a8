"""Masks lowered: numbers, grids, and parts that give each query an interval of keys, with their arrays by name."""

from functools import lru_cache

import numpy as np

from ...base.values import clip
from ...masks import AnyOf, Window, band_of
from ..kernels.any.intervals import CLOSE, OPEN, OR, POSITIONS, lowered
from ..kernels.shared.visibility import FARTHEST, FARTHEST_PLACE, GRIDS, lowered_function
from ..kernels.small.steps import fitted
from ..words.numbers import SIDES, MaskNumbers
from ..words.steps import LoweredGrid, LoweredMask, LoweredPart, array_of_grid, array_of_mask
from .known import KNOWN, lower_and_keep

EVERYWHERE = -FARTHEST, FARTHEST  # lo and hi


def lowered_mask(mask, seqlen_q, seqlen_k):
    """A LoweredMask, its arrays by name, and their layouts."""
    if not mask._holds_arrays:
        return without_arrays(mask, seqlen_q, seqlen_k)
    key = seqlen_q, seqlen_k
    return KNOWN.get(mask, key) or lower_and_keep(mask, key, mask_and_arrays, own_arrays)


@lru_cache(maxsize=1024)
def without_arrays(mask, seqlen_q, seqlen_k):
    """The LoweredMask of a mask without arrays, which does not change."""
    return *mask_and_arrays(mask, seqlen_q, seqlen_k), ()


def own_arrays(mask):
    states = [leaf._states for leaf in mask._leaves if leaf._is_function]
    return [*mask._all_arrays, *states] if mask._is_reusable else None


def mask_and_arrays(mask, seqlen_q, seqlen_k):
    """A LoweredMask, and its arrays by name: of edges of the band, of grids, of intervals."""
    sizes = seqlen_q, seqlen_k
    edges, arrays, shifts = mask._edges(*sizes), {}, {"lo": 0, "hi": 0}
    band = band_of([edge for edge in edges if isinstance(edge.at, int)], *sizes)
    for side in SIDES:
        found = [edge for edge in edges if edge.side == side and not isinstance(edge.at, int)]
        if len(found) == 1 and found[0].at.dtype == np.int32:       # the kernel reads it as it is
            ((_, arrays[side], shift),) = found
            shifts[side] = max(-FARTHEST, min(shift, FARTHEST))
        elif found:
            arrays[side] = getattr(band_of(found, *sizes), side).astype(np.int32)
    own, intervals, of_intervals = intervals_and_arrays(mask, *sizes)
    keys = seqlen_k if arrays else max(min(seqlen_k, band.hi - band.lo + 1), 0)
    last_key = seqlen_k if "keys" in arrays else band.keys
    grids, of_grids = grids_and_arrays(mask, *sizes)
    arrays |= of_grids | of_intervals
    last_query = seqlen_q if "queries" in arrays else band.queries
    numbers = MaskNumbers(*band, shifts["lo"], shifts["hi"], *own)
    longest = None if mask._segments is None else mask._segments._longest
    tile = 0 if longest is None else fitted(longest) or 0
    return LoweredMask(numbers, keys, last_key, grids, last_query, intervals, tile), arrays


def grids_and_arrays(mask, seqlen_q, seqlen_k):
    """A LoweredGrid for each grid of a mask, and their arrays by name."""
    found, arrays = [], {}
    for part in mask._parts:
        for grid in part._grids():
            arrays[f"cells {len(found)}"] = grid.cells
            if grid.function is None:
                found.append(LoweredGrid(GRIDS[type(part)], grid.rows, grid.cols))
                continue
            if max(seqlen_q, seqlen_k) > FARTHEST_PLACE:
                raise NotImplementedError(f"mask: got a Where of {seqlen_q} queries and {seqlen_k} keys, at most "
                                          f"{FARTHEST_PLACE} on a GPU")
            arrays |= {array_of_grid(len(found), which): x for which, x in enumerate(grid.function.arrays)}
            found.append(lowered_function(grid))
    return tuple(found), arrays


def intervals_and_arrays(mask, seqlen_q, seqlen_k):
    """lo and hi of windows aligned within segments; a LoweredPart for each part of a mask that gives intervals; and
    their arrays by name, as kernels take them."""
    parts = IntervalParts(seqlen_q, seqlen_k)
    if (segments := mask._segments) is not None:
        keys = segments.queries if segments.keys is None else segments.keys
        parts.add("segments", queries=segments.queries, keys=keys)
    own = parts.add_all(mask)
    if (parts.found or own != EVERYWHERE) and (frame := mask._placing) is not None:
        keys, queries = frame._counts(seqlen_q, seqlen_k)
        parts.add(POSITIONS, depths=frame.depths, keys=keys, queries=queries)
    return own, tuple(parts.found), parts.arrays


class IntervalParts:
    """The parts of a mask that give intervals. (Functions that call each other would keep the arrays: in a capture of a
    CUDA graph memory that is freed later is memory that the graph has not freed.)"""

    def __init__(self, seqlen_q, seqlen_k):
        self.sizes, self.found, self.arrays = (seqlen_q, seqlen_k), [], {}

    def add(self, kind, **values):
        """Add a part. Its kind names those of its values that are arrays."""
        numbers = []
        for which, (name, x) in enumerate(values.items()):
            is_int32 = not isinstance(x, int) and x.dtype == np.int32       # the kernel reads it as it is
            x = x if is_int32 else clip(x, -FARTHEST, FARTHEST)
            numbers.append(x if isinstance(x, int) else None)
            if not isinstance(x, int):
                kind += f" {name}"
                self.arrays[array_of_mask(len(self.found), which)] = x.astype(np.int32, copy=False)
        self.found.append(LoweredPart(kind, tuple(numbers)))

    def add_lowered(self, part, own, is_within=False):
        """Add a mask that is a part as it is. Returns whether it is one."""
        kind, values = lowered(part, own, is_within) or ("", {})
        if kind:
            self.add(kind, **values)
        return bool(kind)

    def add_all(self, mask):
        """Add all parts but segments, bands and windows within segments. Returns lo and hi of the latter."""
        seqlen_q, seqlen_k = self.sizes
        for part in mask._others:
            if isinstance(part, AnyOf):
                for sign, alternative in zip((OPEN, OR), part.of, strict=True):
                    self.add(sign)
                    self.add_alternative(alternative)
                self.add(CLOSE)
            else:
                self.add_lowered(part, lambda: mask._keys_to_last(seqlen_q, seqlen_k) - seqlen_q)
        return own_band([part for part in mask._within if not self.add_lowered(part, None, is_within=True)])

    def add_alternative(self, mask):
        self.add("band", **mask._band(*self.sizes)._asdict())
        lo, hi = self.add_all(mask)
        if (lo, hi) != EVERYWHERE:
            self.add("window", lo=lo, hi=hi)


def own_band(windows):
    """lo and hi of the intersection of windows: how far from its own key a query sees."""
    pairs = [(part.left, part.right) if isinstance(part, Window) else (None, 0) for part in windows]
    lo = max((-left for left, _ in pairs if left is not None), default=-FARTHEST)
    hi = min((right for _, right in pairs if right is not None), default=FARTHEST)
    return clip(lo, -FARTHEST, FARTHEST), clip(hi, -FARTHEST, FARTHEST)

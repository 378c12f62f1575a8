"""The windows of a grid's tokens: as a mask, and in the order of boxes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from ..base.kept import kept
from ..base.values import moved
from ..masks.where import Where
from ..scores.function import Score
from .axis import Numbers, Part, Sizes
from .bias import Turns, biased, columns_of, lines_of, of_lines, steps_of
from .bits import bits_of
from .boxes import BLOCK, Boxes, boxes_of, states_in_rows
from .offsets import is_summed
from .visibility import PADDING, function_of, words_of, wraps


class OrderedWindows(NamedTuple):
    """Tokens in the order of boxes, with arrays of one library."""

    windows: Windows
    boxes: Boxes
    given: Any  # the token at each place of the order; beside padding any one
    place: Any  # of each token
    mask: Where  # of tokens in that order

    def bias(self, score: Score, windows: Windows) -> Score:
        """A score of `Windows.bias` in that order."""
        table, like = cast(Any, score.arrays[0]), self.given

        def of_zeros() -> Score | None:
            if (turns := Turns.of(windows.parts, like)) is None:
                return None
            lines = [moved(x, like)[self.given] for x in lines_of(windows.parts, turns.entries)]
            has_extra, sizes = windows.has_extra, self.boxes_along(windows)
            arrays = [np.zeros((1, 1), like=like), *lines, moved(steps_of(sizes, turns.entries), like)]
            return Score(of_lines(has_extra), arrays=arrays)._with(_boxes=(has_extra, sizes), _turns=turns)

        made = kept(("lines", windows, self.windows, self.sizes), like, of_zeros)
        if made is None:
            columns, key = windows.columns(like), ("ordered", windows, self.windows, self.sizes)
            ordered = kept(key, like, lambda: [x[..., self.given] for x in columns])
            return score._with(arrays=(table, *ordered), _of=None)
        arrays = made._in_order_of(table), *made.arrays[1:]
        return made._again(arrays, (score._wanted[0], *made._wanted[1:]))

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        """Those of the boxes of each grid."""
        return tuple([part.sizes for part in self.boxes.parts])

    def boxes_along(self, windows: Windows) -> Sizes:
        """The sizes of boxes, if all are of one size and the windows of a bias are of the same tokens."""
        own, others = ([part.tokens_along for part in x.parts] for x in (self.windows, windows))
        first, *rest = self.sizes
        return first if own == others and all(x == first for x in rest) and is_summed(first) else ()


class Windows(NamedTuple):
    """Of the tokens of grids, one after the other."""

    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def mask(self) -> Where:
        return _mask(self)

    @property
    def has_extra(self) -> bool:
        return any(part.extra for part in self.parts)

    def bias(self, table: Any) -> Score:
        """The score that adds a table's entry by offset."""
        function = biased(len(self.parts[0].axes), wraps(self.parts), self.has_extra)
        score = Score(function, arrays=[table, *self.columns(table)], gradient=[True, False, False])
        return score._with(_of=(None if table.shape[0] == 1 else table.shape[0], self))

    def in_order(self, array: Any, summed: bool = False) -> OrderedWindows | None:
        """The tokens in the order of boxes, for calls on arrays of the library of `array`; None if there is none.
        summed: see `boxes_of`."""
        boxes = boxes_of(self.parts, summed)
        if boxes is None:
            return None
        is_other = summed and boxes is not boxes_of(self.parts)
        return kept(("order", self, is_other), array, lambda: _in_order(self, boxes, array))

    def columns(self, array: Any) -> list[Any]:
        """What a bias by offset reads of each token, in the library of `array`."""
        return kept(("columns", self), array, lambda: [moved(x, array) for x in columns_of(self.parts)])


@lru_cache(maxsize=64)
def _mask(windows: Windows) -> Where:
    mask = mask_of(windows, np.arange(windows.tokens))
    return mask._with(_windows=windows, _cells=states_in_rows(windows.parts))


def mask_of(windows: Windows, order: Numbers, *bits: Any) -> Where:
    """The mask of the tokens in this order. bits: of a BoxBits."""
    words, function = words_of(windows.parts, order), function_of(windows.parts, bool(bits))
    words.flags.writeable = False                                       # it is that of other masks, too
    return Where(function, arrays=[words, *bits], block_size=BLOCK)._with(_is_private=True)


def _in_order(windows: Windows, boxes: Boxes, array: Any) -> OrderedWindows:
    tokens, bits = boxes.tokens, bits_of(boxes)
    is_there, place = tokens != PADDING, np.empty(windows.tokens, np.int64)
    place[tokens[is_there]] = np.flatnonzero(is_there)
    mask = mask_of(windows, tokens, *bits or ())._like(array)
    on_tiles = f"boxes={bits.boxes.shape[1]}" if bits else ""
    mask = mask._with(_on_tiles=on_tiles, _cells=moved(boxes.states, array))
    return OrderedWindows(windows, boxes, moved(np.maximum(tokens, 0), array), moved(place, array), mask)

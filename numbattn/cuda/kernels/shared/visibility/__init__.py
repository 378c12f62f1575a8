"""Which queries see which keys: the tiles that a block visits, which of them need a test per element, and that test.

A mask is a band, an interval of keys for each query, and grids, see `numbattn.masks`. A block keeps one tile of
queries, or of keys, and loops over the tiles of the other side. The keys, or queries, "visible" to its tile are the
range that the band allows: where the loop starts and ends. Within it intervals and grids of blocks skip tiles by their
states, one bit each, which the kernel `tile_states` has computed (Algorithm 5); there `kept` is the number of the
block's own tile.

Only the kinds of a mask are compiled in: "lo", "hi", "queries" and "keys" if that edge of the band is an array, then
"dense", "bits", "blocks", "tail" or "where ..." for each grid, "intervals", "gap" for each gap in these, and "placed"
if these are of positions; or only "packed", for segments with tiles of their own, see `segments`.
"""

from .args import (
    BAND,
    BY_INTERVALS,
    EDGE,
    FARTHEST,
    GAP,
    GRIDS,
    LINE,
    MASK,
    PACKED,
    PACKING,
    PLACED,
    Cells,
    MaskArgs,
    Packing,
    band_kinds,
    grids_of,
    has_band,
    has_blocks,
    has_functions,
    has_key_lengths,
    has_query_lengths,
    has_states,
    is_looked_up,
    mask_type,
    packing_of,
    packing_type,
    sides_of,
)
from .band import (
    band_of,
    band_test,
    in_band,
    visible_keys,
    visible_queries,
)
from .boxes import has_boxes
from .cells import element_test, first_of_tail, looked_up_test
from .function import FARTHEST_PLACE, Function, function_type, is_function, lowered_function, pair_test
from .states import (
    NO_WORDS,
    WORD,
    is_shown,
    kept_tile,
    needs_test,
    needs_test_of_full,
    next_tile,
    steps_to_next,
    word_steps,
)

__all__ = [
    "BAND",
    "BY_INTERVALS",
    "EDGE",
    "FARTHEST",
    "FARTHEST_PLACE",
    "GAP",
    "GRIDS",
    "LINE",
    "MASK",
    "NO_WORDS",
    "PACKED",
    "PACKING",
    "PLACED",
    "WORD",
    "Cells",
    "Function",
    "MaskArgs",
    "Packing",
    "band_kinds",
    "band_of",
    "band_test",
    "element_test",
    "first_of_tail",
    "function_type",
    "grids_of",
    "has_band",
    "has_blocks",
    "has_boxes",
    "has_functions",
    "has_key_lengths",
    "has_query_lengths",
    "has_states",
    "in_band",
    "is_function",
    "is_looked_up",
    "is_shown",
    "kept_tile",
    "looked_up_test",
    "lowered_function",
    "mask_type",
    "needs_test",
    "needs_test_of_full",
    "next_tile",
    "packing_of",
    "packing_type",
    "pair_test",
    "sides_of",
    "steps_to_next",
    "visible_keys",
    "visible_queries",
    "word_steps",
]  # fmt: skip

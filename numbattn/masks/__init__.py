"""Masks: who sees whom. True = visible.

Every mask consists of a band, an interval of keys for each query, gaps in it, and grids; `&` joins them:

- a `Band` holds the pairs with ``i + lo <= j <= i + hi``, ``i < queries`` and ``j < keys``. Causal, Window, Lengths
  and First are bands, and two bands intersect in a band. These four numbers say which keys a tile has to visit, and
  which of its elements need a test: `bands`;
- an `Interval` holds the pairs with ``first[i] <= j < end[i]``: Segments in `segments`, Prefix and Intervals in
  `intervals`, and Causal, Window and First within Segments;
- a gap is an `Interval` of hidden keys: the `|` of two intervals is the one from the first key of either to the last,
  except for the gap between them: `logic`;
- a `Grid` is an array of cells laid over the score matrix, each cell of rows x cols elements: Dense (1 x 1) and Bits
  (1 x 8, one bit an element) in `dense`, BlockSparse (any size) in `block_sparse`; that of a Tail covers the last keys.
  The grid of a Where, in `where`, has the states of its blocks.

What they have in common is in `base`. Two masks are equal if their numbers are equal and they hold the same arrays, so
that a pickled copy of a mask with arrays is another mask.

The arrays in a mask are NumPy's or CuPy's (NumPy's functions pass CuPy's arrays on to CuPy); `_like` brings them to one
library, which bands, intervals and grids expect. Device memory is never read, except by `Bits.tree` and for offsets or
lengths that have no axes. Members with an underscore are private to the package.
"""

from .bands import Cached, Causal, First, Lengths, Window
from .base import Band, Edge, Grid, Interval, Mask, QuerySegments, band_of, interval_of
from .block_sparse import BlockSparse
from .dense import Bits, Dense
from .intervals import Intervals, Prefix
from .logic import All, AnyOf, any_of, as_mask, cropped, materialised, visible
from .positions import Positions, apart, drawn, placed, takers
from .rolling import Ring
from .segments import Segments, pack, unpack
from .tail import Tail
from .where import Where

__all__ = [
    "All",
    "AnyOf",
    "Band",
    "Bits",
    "BlockSparse",
    "Cached",
    "Causal",
    "Dense",
    "Edge",
    "First",
    "Grid",
    "Interval",
    "Intervals",
    "Lengths",
    "Mask",
    "Positions",
    "Prefix",
    "QuerySegments",
    "Ring",
    "Segments",
    "Tail",
    "Where",
    "Window",
    "any_of",
    "apart",
    "as_mask",
    "band_of",
    "cropped",
    "drawn",
    "interval_of",
    "materialised",
    "pack",
    "placed",
    "takers",
    "unpack",
    "visible",
]

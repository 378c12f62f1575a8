"""In which parts an array travels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MOST, LARGE = 64, 1 << 18  # how many matrices, of how many bytes each, travel one by one


def parts_of(x: Any) -> list[Any]:
    """Arrays that x consists of, as many for all arrays of its shape: large matrices travel one by one, since some rows
    of each are contiguous, and need no copy that packs them."""
    count = math.prod(x.shape[:-2])
    return [x[at] for at in np.ndindex(x.shape[:-2])] if 0 < count <= MOST and x.nbytes >= LARGE * count else [x]

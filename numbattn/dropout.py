"""Dropout as a value: which elements of P are dropped depends only on (p, seed, offset) and their positions.

Philox is written once, with operators only, and serves NumPy arrays, Numba's CPU code and CUDA device code alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base.checks import integer, number, shape_of, words_for
from .base.forks import cached_property

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
M0, M1 = MULTIPLIERS
W0, W1 = WEYL
ROUNDS = 7  # the fewest that pass BigCrush; they are most of what dropout costs


def wide_product(word: Any, factor: Any) -> tuple[Any, Any]:
    """The high and the low word of a product."""
    product = factor * word
    return product >> HALF, product & LOW


def round_by(product: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., tuple[Any, ...]]:
    """A round of Philox4x32: the next counter and the next key. product is `wide_product` for the words' type."""

    def philox_round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, ...]:
        (x_high, x_low), (y_high, y_low) = product(c0, M0), product(c2, M1)
        return y_high ^ c1 ^ k0, y_low, x_high ^ c3 ^ k1, x_low, (k0 + W0) & LOW, (k1 + W1) & LOW

    return philox_round


philox_round = round_by(wide_product)


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-7 of Random123 (Salmon et al., SC 2011): four 32-bit words from a counter of four and a key of two.

    All arguments and results are unsigned 64-bit numbers below 2**32, scalars or arrays.
    """
    for _ in range(ROUNDS):
        c0, c1, c2, c3, k0, k1 = philox_round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Dropout:
    """Drop each element of P with probability `p`; scale the kept ones so that the mean stays the same.

    A value, not a state: equal values drop equal elements, whatever the backend, dtype, tile size or memory layout,
    and the backward pass regenerates what the forward pass dropped. Change `offset` (or `seed`) from call to call.

    Parameters
    ----------
    p : float
        Probability of dropping, 0 <= p < 1, in steps of 1/65536: an element is kept iff its 16-bit random number is
        at least ``round(65536 * p)``. A p that is rounded to 0 without being 0, or to 1, is refused.
    seed : int
        0 <= seed < 2**64: the key of the generator.
    offset : int, optional
        0 <= offset < 2**32: one word of the generator's counter, for instance the number of the training step.

    Raises
    ------
    TypeError, ValueError
        For anything but numbers, and for numbers outside these bounds.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Dropout(0.25, seed=7)
    Dropout(p=0.25, seed=7, offset=0)
    """

    p: float
    seed: int
    offset: int = 0

    def __post_init__(self) -> None:
        p = number("Dropout p", self.p)
        if not 0 <= p < 1:
            raise ValueError(f"Dropout p: got {self.p!r}, allowed 0 <= p < 1")
        if p > 0 and not 0 < round(65536 * p) < 65536:
            raise ValueError(f"Dropout p: got {self.p!r}, which is rounded to {round(65536 * p) // 65536}: "
                             "p comes in steps of 1/65536")
        object.__setattr__(self, "p", p)
        object.__setattr__(self, "seed", integer("Dropout seed", self.seed, 0, 2**64 - 1))
        object.__setattr__(self, "offset", integer("Dropout offset", self.offset, 0, 2**32 - 1))

    @property
    def threshold(self) -> int:
        """An element is kept iff its 16-bit number is at least this."""
        return round(65536 * self.p)

    @cached_property
    def scale(self) -> float:
        """What kept elements are multiplied by: 1 / (1 - p), with p as it was rounded."""
        return 65536 / (65536 - self.threshold)

    @cached_property
    def _numbers(self) -> tuple[int, int, int, int]:
        """What kernels are given: threshold, offset and key."""
        return self.threshold, self.offset, *self.key

    @property
    def key(self) -> tuple[int, int]:
        """The generator's key: the low and the high word of the seed."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32


def dropout_mask(dropout: Dropout, shape: Iterable[int]) -> NDArray[np.bool_]:
    """Show what a Dropout keeps.

    Parameters
    ----------
    dropout : Dropout
    shape : tuple of int
        Shape of P: (..., seqlen_q, seqlen_k), with the leading axes of the attention output, heads included.

    Returns
    -------
    numpy.ndarray of bool, of that shape
        True = kept.

    Raises
    ------
    TypeError, ValueError
        For anything but a Dropout and a shape.

    Notes
    -----
    Element (i, j) of matrix b (in C order) takes the 16-bit number 4*((i//8)%2) + 2*((j//8)%2) + j%2 of the eight that
    Philox4x32-7 makes from the counter (4*(j//16) + (j//2)%4, 8*(i//16) + i%8, b, offset) and the seed; number 2w is
    the low half of word w. So one call serves the eight elements of a 16 x 16 block that one thread of a tensor-core
    accumulator holds.

    Examples
    --------
    >>> import numbattn as na
    >>> na.dropout_mask(na.Dropout(0.5, seed=1), (3, 4)).shape
    (3, 4)
    """
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout: got {words_for(dropout)}, expected a numbattn.Dropout(p, seed)")
    *batch, m, n = shape = shape_of("shape", shape)
    matrices = math.prod(batch)
    i, j = np.arange(-(-m // 16) * 16, dtype=np.uint64), np.arange(-(-n // 16) * 16, dtype=np.uint64)
    rows = i[(i // 8) % 2 == 0]             # one counter for rows i and i + 8 ...
    cols = j[((j // 8) % 2 == 0) & (j % 2 == 0)]    # ... and columns j, j + 1, j + 8, j + 9
    words = philox4x32(
        (4 * (cols // 16) + (cols // 2) % 4)[None, None, :],
        (8 * (rows // 16) + rows % 8)[None, :, None],
        np.arange(matrices, dtype=np.uint64)[:, None, None],
        np.uint64(dropout.offset),
        *map(np.uint64, dropout.key),
    )
    kept = np.empty((matrices, i.size, j.size), bool)
    for w, word in enumerate(words):
        for half in range(2):
            number = (word >> np.uint64(16 * half)) & np.uint64(0xFFFF)
            at = np.ix_(range(matrices), (rows + 8 * (w // 2)).astype(int), (cols + 8 * (w % 2) + half).astype(int))
            kept[at] = number >= dropout.threshold
    return kept[:, :m, :n].reshape(shape)

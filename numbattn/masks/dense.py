"""Masks of elements: Dense, a boolean for each, and Bits, a bit for each."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import numpy as np

from ..base.checks import Array, check_array, integer_array
from ..base.forks import cached_property
from ..base.origin import Crop
from ..base.values import Held, moved
from .base import Grid, Mask, broadcast


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Key j is visible to query i iff ``visible[..., i, j]``.

    Parameters
    ----------
    visible : array of bool, (..., seqlen_q, seqlen_k)
        It broadcasts as in NumPy, axes of size 1 and missing axes included, against the batch axes, heads included, and
        (seqlen_q, seqlen_k). A boolean array given as a mask becomes a Dense.
    """

    visible: Array

    _is_interval = False
    _axis_of_queries = -2
    _depths: Any = None
    _examples = (("dense", lambda m, n: Dense(np.broadcast_to(True, (1, 1, m, n)))),)

    def __post_init__(self) -> None:
        check_array("Dense visible", self.visible, np.bool_, ndim=1)

    def _fit(self, shape: tuple[int, ...]) -> Dense:
        visible = broadcast("booleans", self.visible, shape, 2)
        return self if visible is self.visible else Dense(visible)

    def _grids(self) -> tuple[Grid, ...]:
        return (Grid(cast(Any, self.visible).view(np.uint8), 1, 1),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return (Held("visible", self.visible, (seqlen_q, seqlen_k)),)

    def _transposed(self, seqlen_q: int, seqlen_k: int, frame: Any = None) -> Dense:
        return Dense(np.swapaxes(cast(Any, self.visible), -2, -1))

    def _cropped(self, crop: Crop) -> Dense:
        return Dense(crop.of_keys("mask: Dense", crop.of_queries("mask: Dense", self.visible)))


@dataclass(frozen=True, eq=False, repr=False)
class Bits(Mask):
    """Key j is visible to query i iff bit ``j % 32`` of ``words[..., i, j // 32]`` is set.

    Parameters
    ----------
    words : array of uint32, (..., seqlen_q, ceil(seqlen_k / 32))
        All axes but the last broadcast as in NumPy, axes of size 1 and missing axes included, against the batch axes,
        heads included, and seqlen_q.

    See Also
    --------
    Bits.pack : from a boolean array.
    Bits.tree : from the parents of a tree of tokens.
    """

    words: Array
    _is_tree: bool = field(init=False, default=False)

    _is_interval = False
    _axis_of_queries = -2
    _examples = (("bits", lambda m, n: Bits(np.broadcast_to(np.uint32(1), (1, 1, m, -(-n // 32))))),)

    def __post_init__(self) -> None:
        check_array("Bits words", self.words, np.uint32)

    @classmethod
    def pack(cls, visible: Array) -> Bits:
        """Pack a boolean array.

        Parameters
        ----------
        visible : array of bool, (..., seqlen_q, seqlen_k)

        Returns
        -------
        Bits

        Raises
        ------
        TypeError, ValueError
            For anything but an array of booleans with at least two axes.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> na.Bits.pack(np.array([[True, False, True]])).words
        array([[5]], dtype=uint32)
        """
        check_array("Bits.pack visible", visible, np.bool_)
        *batch, n = visible.shape
        padded = np.zeros((*batch, -(-n // 32) * 32), bool, like=cast(Any, visible))
        padded[..., :n] = cast(Any, visible).view(np.uint8) != 0  # any byte but 0 is True, as in NumPy
        bits = (padded[..., bit::8].view(np.uint8) << np.uint8(bit) for bit in range(8))
        return cls(reduce(operator.or_, bits).view("<u4").astype(np.uint32, copy=False))

    @classmethod
    def tree(cls, parents: Sequence[int] | Array) -> Bits:
        """The mask of a tree of tokens: a node sees itself and its ancestors, as in speculative decoding.

        Its nodes are rows; in a `Tail` their positions are their depths, roots 0.

        Parameters
        ----------
        parents : integer array, (..., nodes)
            The index of each node's parent, -1 at a root. A CuPy array is copied to the host and read there.

        Returns
        -------
        Bits, (..., nodes, nodes), of the library of `parents`

        Raises
        ------
        TypeError
            For parents that are not integers.
        ValueError
            For a parent that is not a node, and for a node that is its own ancestor.

        Examples
        --------
        >>> import numbattn as na
        >>> na.Bits.tree([-1, 0, 0, 1]).dense(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])
        """
        given = integer_array("Bits.tree parents", parents, "(..., nodes)")
        parent = moved(given, np.empty(0))
        nodes = parent.shape[-1]
        if parent.size and not -1 <= parent.min() <= parent.max() < nodes:
            raise ValueError(f"Bits.tree parents: got values from {parent.min()} to {parent.max()}, "
                             f"allowed -1 to {nodes - 1}")
        flat = parent.reshape(math.prod(parent.shape[:-1]), nodes)
        visible = np.zeros((len(flat), nodes, nodes), bool)
        node = np.broadcast_to(np.arange(nodes), flat.shape)  # an ancestor of each node, one generation a turn
        for _ in range(nodes):
            tree, at = np.nonzero(node >= 0)
            if not tree.size:
                break
            visible[tree, at, node[tree, at]] = True
            node = np.where(node >= 0, np.take_along_axis(flat, np.maximum(node, 0), axis=1), -1)
        if (node >= 0).any():
            raise ValueError("Bits.tree parents: a node is its own ancestor, so this is not a tree")
        found = cls.pack(visible.reshape(*parent.shape, nodes))
        found._set(_is_tree=True)
        return found._like(given)

    def _arrays(self) -> dict[str, Any]:
        return {"words": self.words}

    @cached_property
    def _depths(self) -> Any:
        """The depths of a tree's nodes, int32 (..., nodes): each sees itself and its ancestors."""
        if not self._is_tree:
            return None
        words: Any = self.words
        bits = words[..., None] >> np.arange(32, dtype=np.uint32, like=words) & np.uint32(1)
        return (bits.sum(axis=(-2, -1)) - 1).astype(np.int32)

    def _fit(self, shape: tuple[int, ...]) -> Bits:
        count, wanted = self.words.shape[-1], -(-shape[-1] // 32)
        if count != wanted:  # one word, too, is not broadcast: it is for its own keys
            raise ValueError(f"mask: Bits words: got {count} words a row, expected {wanted}, for {shape[-1]} keys")
        words = broadcast("Bits words", self.words, (*shape[:-1], wanted), 2)
        return self if words is self.words else Bits(words)

    def _grids(self) -> tuple[Grid, ...]:
        given: Any = self.words
        words = given if given.strides[-1] == given.itemsize else np.ascontiguousarray(given, like=given)
        return (Grid(words.astype("<u4", copy=False).view(np.uint8), 1, 8, True),)

    def _held(self, seqlen_q: int, seqlen_k: int) -> tuple[Held, ...]:
        return (Held("words", self.words, (seqlen_q, -(-seqlen_k // 32))),)

    def _cropped(self, crop: Crop) -> Bits:
        """The bits of keys from a multiple of 32 on."""
        if self.words.shape[-1] != -(-crop.seqlen_k // 32):
            raise ValueError(f"mask: Bits words: got {self.words.shape[-1]} words a row, expected "
                             f"{-(-crop.seqlen_k // 32)}, for {crop.seqlen_k} keys")
        first = crop.first_key // 32
        return Bits(crop.of_queries("mask: Bits words", self.words)[..., first : first + -(-crop.keys // 32)])


Mask._kind_materialised = Bits

"""Tangents of sums over pairs of points and of their gradients, composed of such sums.

If points move by tx and ty, the squared distance of two of them moves by

    tt_ij = 2 <x_i - y_j, tx_i - ty_j> = <phi_i, psi_j>,

a product of features: phi_i = 2 (<x_i, tx_i>, -tx_i, 1, -x_i) and psi_j = (1, y_j, <y_j, ty_j>, ty_j). Then

    sums move by      sum_j kappa'_ij tt_ij b_j + kappa_ij tb_j,
    a gradient by     sum_j (kappa''_ij tt_ij w_ij + kappa'_ij tw_ij) 2 (x_i - y_j) + kappa'_ij w_ij 2 (tx_i - ty_j),

where w_ij = <c_i, b_j>: sums and gradients again, with b and c multiplied by features, of a kind and of its derivative.
The products of features have an error of a rounding of |x|, with x from the centre and in lengths. Kernels for CPUs
take tangents instead, and compute tt from the differences of near points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import library
from ..base.forks import cached_property
from ..base.values import rounded, sum_broadcast
from . import kinds
from .checks import check_result
from .formula import quiet
from .kernels import dots
from .pairs import Pairs, Term

WIDEST = 256  # most features of a sum: kernels for GPUs hold no more


@dataclass(frozen=True, eq=False)
class Moving:
    """A Term whose points move by tangents, those of the points as given, in the dtype of sums; None for points that
    stay."""

    term: Term
    tx: Any
    ty: Any

    @cached_property
    def exchanged(self) -> Moving:
        """The Moving with the roles of x and y exchanged."""
        return Moving(self.term.exchanged, self.ty, self.tx)

    @cached_property
    @quiet
    def unit(self) -> list[Any]:
        """The tangents of points of unit length, or None."""
        pairs, along = self.term.pairs, self.term.kernel._along
        given = enumerate(zip(self.term.moved, (self.tx, self.ty)))
        return [None if tangent is None else pairs.only_seen(side, along(points, tangent))
                for side, (points, tangent) in given]  # fmt: skip

    @cached_property
    def own(self) -> tuple[Any, Any] | None:
        """The tangents of points of unit length for kernels of CPUs and `factors`, which take them; 0 for None."""
        is_taken = library(self.term.pairs.x) == "numpy" or isinstance(self.term.kind, kinds.Times)
        if not is_taken or self.term.has_no_pairs or self.tx is self.ty is None:
            return None
        pairs = self.term.pairs
        given = zip(self.unit, self.term.units)
        tx, ty = (np.zeros_like(points) if tangent is None else tangent for tangent, points in given)
        return pairs.broadcast(tx), pairs.broadcast(ty)

    @cached_property
    @quiet
    def features(self) -> list[Any]:
        """phi and psi."""
        pairs, is_of_product, (tx, ty) = self.term.pairs, self.term.kind.is_of_product, self.unit
        x, y = (pairs.only_seen(side, points) for side, points in enumerate((self.term.x, self.term.y)))
        found = [(x[..., :0], y[..., :0])]
        if tx is not None:
            found += [(tx, y)] if is_of_product else [(2 * dots(x, tx), _ones(y)), (-2 * tx, y)]
        if ty is not None:
            found += [(x, ty)] if is_of_product else [(2 * _ones(x), dots(y, ty)), (-2 * x, ty)]
        return [_beside(pairs, *of_points) for of_points in zip(*found)]

    @quiet
    def sums(self, b: Any, tb: Any = None, rows: Any = None, columns: Any = None) -> Any:
        """The tangent of `term.sums`."""
        if self.own is not None:
            found = self.term.sums(b, rows, columns, tangents=self.own)
            return found if tb is None else found + self.term.sums(tb, rows, columns)
        phi, psi = self.features
        found = np.zeros_like(phi, shape=(*phi.shape[:-1], b.shape[-1]))
        if tb is not None:
            found += self.term.sums(tb, rows, columns)
        for some, moments in self._moments(b, psi, rows, columns):
            found[..., some] += (phi[..., None] * moments).sum(axis=-2)  # CUDA graphs do not capture cuBLAS
        return found

    @quiet
    def gradient(self, b: Any, c: Any, tb: Any = None, tc: Any = None, rows: Any = None, columns: Any = None) -> Any:
        """The tangent of the gradient of points x as given: of the kernel's `_of_points` applied to `term.gradient`."""
        term, kernel, (x, _) = self.term, self.term.kernel, self.term.moved
        if self.own is None:
            found = self._displaced(b, c, rows, columns) + self._bent(b, c, rows, columns)
        else:
            found = term.gradient(b, c, rows, columns, tangents=self.own)
        moving = [pair for pair in ((tb, c), (b, tc)) if pair[0] is not None and pair[1] is not None]
        if moving:
            of_b, of_c = (_beside(term.pairs, *given) for given in zip(*moving))
            found = found + term.gradient(of_b, of_c, rows, columns)
        found = kernel._of_points(x, found)
        if not kernel._is_linear and self.tx is not None:
            found = found + kernel._of_moved_points(x, self.tx, term.gradient(b, c, rows, columns))
        return sum_broadcast(found, term.pairs.x.shape)

    def _bent(self, b: Any, c: Any, rows: Any, columns: Any) -> Any:
        """sum_j kappa''_ij tt_ij w_ij 2 (x_i - y_j)"""
        phi, psi = self.features
        found = np.zeros_like(self.term.x)
        for some in [] if self.term.kind == kinds.LINEAR else _columns(b, psi):
            of_b, of_c = _times(psi, b[..., some]), _times(phi, c[..., some])
            found = found + self.term.slopes.gradient(of_b, of_c, rows, columns)
        return found

    def _displaced(self, b: Any, c: Any, rows: Any, columns: Any) -> Any:
        """sum_j kappa'_ij w_ij 2 (tx_i - ty_j)"""
        pairs, (tx, ty), d = self.term.pairs, self.unit, self.term.x.shape[-1]
        psi = _beside(pairs, _ones(self.term.y), *([] if ty is None else [ty]))
        total = np.zeros_like(psi, shape=(*pairs.batch, pairs.sizes[0], 1 + d))
        c = pairs.only_seen(0, c)
        if tx is not None or ty is not None:
            for some, moments in self._moments(b, psi, rows, columns):
                total[..., : psi.shape[-1]] += (c[..., None, some] * moments).sum(axis=-1)
        of_y = total[..., 1:]
        if not self.term.kind.is_of_product:
            of_y = 2 * ((0 if tx is None else tx * total[..., :1]) - of_y)
        return sum_broadcast(of_y, self.term.x.shape)

    def _moments(self, b: Any, psi: Any, rows: Any, columns: Any) -> Iterator[tuple[slice, Any]]:
        """Some columns of b, and sum_j kappa'_ij psi_j b_j of them, (..., m, k, columns)."""
        pairs = self.term.pairs
        for some in _columns(b, psi):
            products = _times(psi, b[..., some])
            if self.term.has_no_pairs:  # kappa' is 1
                shape = *pairs.batch, pairs.sizes[0], products.shape[-1]
                sums = np.broadcast_to(products.sum(axis=-2, keepdims=True), shape)
            else:
                sums = self.term.slopes.sums(products, rows, columns)
            count = products.shape[-1] // psi.shape[-1]
            yield some, sums.reshape(*sums.shape[:-1], psi.shape[-1], count)


def tangents_of(pairs: Pairs, tx: Any, ty: Any) -> tuple[Any, Any]:
    """Tangents of points, checked and in the dtype of sums."""
    return checked(pairs, "tx", tx, pairs.x, "x"), checked(pairs, "ty", ty, pairs.y, "y")


def checked(pairs: Any, name: str, tangent: Any, array: Any, of: str) -> Any:
    """The tangent of an array, likewise; None stays None. pairs: whatever has the dtype of sums."""
    if array is None and tangent is not None:
        raise ValueError(f"{name}: got the tangent of a {of} that is None")
    if tangent is None:
        return None
    check_result(name, tangent, of, array.shape, array)
    return rounded(tangent, pairs.dtype)


def _columns(b: Any, psi: Any) -> list[slice]:
    """Slices of the columns of b, each as many as there is room for products with features."""
    features, count = psi.shape[-1], b.shape[-1]
    step = max(WIDEST // max(features, 1), 1)
    return [slice(first, first + step) for first in range(0, count if features else 0, step)]


def _times(features: Any, b: Any) -> Any:
    """All products of a feature and a column of b."""
    products = features[..., :, None] * b[..., None, :]
    return products.reshape(*products.shape[:-2], features.shape[-1] * b.shape[-1])


def _beside(pairs: Pairs, *arrays: Any) -> Any:
    """Columns side by side, with all batch axes."""
    return np.concatenate([pairs.broadcast(array) for array in arrays], axis=-1)


def _ones(points: Any) -> Any:
    return np.ones_like(points, shape=(*points.shape[:-1], 1))

"""Losses over pairs of points whose scores are products, for many features: a block of scores is in memory at a time.

Blocks are columns of all scores, as a rule with all rows. Matrix products make a block of scores, and of its gradient
that of x, to which each block adds, and that of its y. See `blocks` for what is between these products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.backends import loss_steps
from ..base.checks import dtype_of_sums, library
from ..base.values import put, rounded
from .blocks import Given, Statistics, Weights, is_target, probabilities, scores
from .checks import check_result
from .formula import quiet
from .gradients import LogsumexpGradients
from .kernels import Linear
from .tangents import WIDEST, checked

MULTIPLE = 64  # of columns of a block
LARGEST = 2.0**12  # of gradients in float16


def takes(x: Any, y: Any, w: Any, kernel: Any, mask: Any) -> bool:
    """Whether a logsumexp is computed here: of many features, or of digits so few that tensor cores multiply them."""
    is_plain = isinstance(kernel, Linear) and mask is None and y.ndim == 2 and (w is None or w.ndim == 1)
    return is_plain and (x.shape[-1] > WIDEST or (library(x) == "cupy" and x.dtype.itemsize == 2))


class Element(NamedTuple):
    """All x as rows of a matrix, y, and vectors."""

    x: Any
    y: Any
    given: Given
    steps: Any

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Columns, and for each of them rows."""
        (m, d), n, most = self.x.shape, len(self.y), self.steps.BYTES // self.given.a.itemsize
        columns = max(most // max(min(m, math.isqrt(most)), d, 1) // MULTIPLE, 1) * MULTIPLE
        rows = max(most // min(columns, max(n, 1)), 1)
        for j in range(0, n, columns):
            for i in range(0, m, rows):
                yield slice(i, min(i + rows, m)), slice(j, min(j + columns, n))

    def products(self, i: slice, j: slice, *pairs: tuple[Any, Any]) -> Any:
        """Sums of products of rows i and j of pairs of matrices, R if none are given. The array is part of one whose
        rows are multiples of 16 bytes, whatever the dtype."""
        shape, cols = (i.stop - i.start, -(-(j.stop - j.start) // 8) * 8), j.stop - j.start
        R = np.empty_like(self.given.a, shape=shape)[:, :cols]
        for at, (x, y) in enumerate(pairs or [(self.x, self.y)]):
            self.steps.product(R, x[i], y[j].T, add=at > 0)
        return R

    @quiet
    def statistics(self) -> tuple[Any, Any, Any]:
        """f, what rounding took from it, and the score of the target."""
        a = self.given.a
        known = Statistics(np.full_like(a, np.finfo(a.dtype).min), np.zeros_like(a), np.zeros_like(a))
        for i, j in self.blocks():
            self.steps.absorb(self.products(i, j), self.given.of(i, j), Statistics(*[x[i] for x in known]))
        highest, total, chosen = known
        if self.given.sigmoid:
            return total, 0 * total, chosen
        log = np.log(total)
        f = highest + log
        return f, np.where(np.isneginf(f), 0, (highest - f) + log), chosen

    def gradients(self, weights: Weights, dw: Any, store: Callable[[slice, Any], None]) -> Any:
        """The gradient of x. Those of blocks of y are stored, that of w is added to dw."""
        gx, gy, unit = np.zeros_like(self.x, dtype=self.given.a.dtype, order="C"), None, None
        if self.x.dtype == np.float16 and len(gx):  # which has few exponents
            largest = np.abs(weights.c * self.given.a).max()
            unit = np.where(largest > 0, LARGEST / largest, 1).astype(gx.dtype)
            weights = weights._replace(c=weights.c * unit)
        for i, j in self.blocks():
            gy = np.empty_like(gx, shape=(j.stop - j.start, gx.shape[1])) if i.start == 0 else gy
            R = self.products(i, j)
            dR = self.steps.room_for_gradient(R, self.x.dtype)
            self.steps.gradient(dR, R, self.given.of(i, j), Weights(*[x[i] for x in weights]), dw[j])
            del R
            self.steps.product(gx[i], dR, self.y[j], add=True)
            self.steps.product(gy, dR.T, self.x[i], add=i.start > 0)
            del dR
            if i.stop == len(gx):
                store(j, gy if unit is None else gy / unit)
                gy = None
        if unit is None:
            return gx
        dw /= unit
        return gx / unit

    # of points of unit length, whose a and b are 1: tx and ty are their tangents
    def moved(self, i: slice, j: slice, weights: Weights, tx: Any, ty: Any, tw: Any) -> tuple[Any, ...]:
        """P, P less the targets, and the tangent of T, of a block."""
        given, own = self.given.of(i, j), Weights(*[x[i] for x in weights])
        T = scores(self.products(i, j), given)
        P = probabilities(T, given, own)
        return P, P - is_target(T, given), self.products(i, j, (tx, self.y), (self.x, ty)) + tw[j]

    def tangents(self, weights: Weights, *moving: Any) -> tuple[Any, Any]:
        """The tangents of f, and of f less the target's score."""
        tf, tloss = (np.zeros_like(weights.f) for _ in range(2))
        for i, j in self.blocks():
            P, slopes, tT = self.moved(i, j, weights, *moving)
            tf[i] += (P * tT).sum(axis=1)
            tloss[i] += (slopes * tT).sum(axis=1)
        return tf, tloss

    def second(self, weights: Weights, tc: Any, tx: Any, ty: Any, tw: Any) -> list[Any]:
        """The gradients of x and y, and the tangents of the gradients of x, y and w."""
        tf, _ = self.tangents(weights, tx, ty, tw)
        gx, tgx, gy, tgy, tgw = (np.zeros_like(z, order="C") for z in (tx, tx, ty, ty, tw))
        for i, j in self.blocks():
            P, slopes, tT = self.moved(i, j, weights, tx, ty, tw)
            bent = P * (tT * (1 - P) if self.given.sigmoid else tT - tf[i, None])
            G, tG = weights.c[i, None] * slopes, weights.c[i, None] * bent + tc[i, None] * slopes
            tgw[j] += tG.sum(axis=0)
            for g, of_G, z in ((gx[i], G, self.y[j]), (tgx[i], tG, self.y[j]), (tgx[i], G, ty[j]),
                               (gy[j], G.T, self.x[i]), (tgy[j], tG.T, self.x[i]), (tgy[j], G.T, tx[i])):  # fmt: skip
                self.steps.product(g, of_G, z, add=True)
        return [gx, gy, tgx, tgy, tgw]


class ScoresCall(NamedTuple):
    """A call that is checked, of one y for all x, and its result f, like a `LogsumexpCall`: without targets it is the
    logsumexp."""

    x: Any
    y: Any
    w: Any
    kernel: Linear
    targets: Any
    sigmoid: bool
    weights: Any = None  # with c of ones, or zeros for rows that do not count
    f: Any = None
    low: Any = None  # what rounding took from f

    @classmethod
    @quiet
    def of(cls, x: Any, y: Any, w: Any, kernel: Linear, targets: Any = None, sigmoid: bool = False) -> ScoresCall:
        call = cls(x, y, w, kernel, targets, sigmoid)
        element = call.element()
        f, low, chosen = element.statistics()
        weights, own = Weights(np.where(np.isneginf(f), math.inf, f), low, ~np.isneginf(f)), element.given.targets
        if targets is not None:
            counts, has_weight = (own >= 0) & (own < len(y)), ~np.isneginf(chosen)
            weights = weights._replace(c=counts & has_weight)
            f = np.where(counts, np.where(has_weight, f - chosen, math.inf), 0)
        f, low = (z.reshape(x.shape[:-1]) for z in (f, low))
        return call._replace(weights=weights, f=f, low=low)

    @property
    def dtype(self) -> Any:
        return dtype_of_sums(self.x.dtype)

    def element(self, of_unit_length: bool = False) -> Element:
        kernel, dtype = self.kernel, self.dtype
        x, y = (z.reshape(math.prod(z.shape[:-1]), z.shape[-1]) for z in (self.x, self.y))
        if of_unit_length:
            (x, a), (y, b) = ((kernel._unit(z.astype(dtype, copy=False)), None) for z in (x, y))
        else:
            (x, a), (y, b) = map(kernel._factored, (x, y))
        a, b = (np.ones_like(z, dtype=dtype, shape=(len(z),)) if of is None else of for z, of in ((x, a), (y, b)))
        a = a if of_unit_length else a * dtype.type(kernel.scale)
        w = np.zeros_like(b) if self.w is None else rounded(self.w, dtype)
        targets = np.full_like(a, -1, dtype=np.int32) if self.targets is None else self.targets.reshape(len(x))
        return Element(x, y, Given(a, b, w, targets, self.sigmoid), loss_steps(str(library(x))))

    def weighted(self, name: str, df: Any) -> Weights:
        """The weights with a gradient of f, which is checked."""
        check_result(name, df, "f", self.f.shape, self.f)
        c = np.where(self.weights.c, rounded(df, self.dtype).reshape(self.weights.c.shape), 0)
        return self.weights._replace(c=c)

    @quiet
    def backprop(self, df: Any) -> LogsumexpGradients:
        element, kernel, (dx, dy) = self.element(), self.kernel, (np.zeros_like(z) for z in (self.x, self.y))
        dw = np.zeros_like(element.given.w)

        def store(j: slice, g: Any) -> None:
            put(dy[j], kernel._of_factored(self.y[j], g))

        g = element.gradients(self.weighted("df", df), dw, store)
        scale = (rounded(element.x, self.dtype) * g).sum(dtype=np.float64) / kernel.scale
        put(dx, kernel._of_factored(self.x, g.reshape(self.x.shape)))
        dw = None if self.w is None else rounded(dw, self.w.dtype)
        return LogsumexpGradients(dx, dy, dw, kernel=np.asarray(scale, self.dtype, like=dx))

    def moving(self, tx: Any, ty: Any) -> Any:
        return checked(self, "tx", tx, self.x, "x"), checked(self, "ty", ty, self.y, "y")

    def tangent_of_w(self, tw: Any) -> Any:
        return checked(self, "tw", tw, self.w, "w")

    def moved(self, moving: Any, tw: Any) -> tuple[Element, list[Any]]:
        """The element of points of unit length, and their tangents and those of w, or zeros."""
        element, found = self.element(of_unit_length=True), []
        for z, tz, unit in zip((self.x, self.y), moving, (element.x, element.y)):
            tz = None if tz is None else self.kernel._of_points(z.astype(self.dtype), tz)
            found.append(np.zeros_like(unit) if tz is None else tz.reshape(unit.shape))
        return element, [*found, np.zeros_like(element.given.w) if tw is None else tw]

    @quiet
    def tangent(self, moving: Any, tw: Any) -> Any:
        element, moved = self.moved(moving, tw)
        return np.where(self.weights.c, element.tangents(self.weights, *moved)[1], 0).reshape(self.f.shape)

    @quiet
    def tangent_of_gradients(self, df: Any, tdf: Any, moving: Any, tw: Any) -> LogsumexpGradients:
        tc = self.weighted("tdf", np.zeros_like(self.f) if tdf is None else tdf).c
        element, moved = self.moved(moving, tw)
        *first, tgx, tgy, tgw = element.second(self.weighted("df", df), tc, *moved)
        grads: list[Any] = []
        for z, tz, g, tg in zip((self.x, self.y), moving, first, (tgx, tgy)):
            own = z.astype(self.dtype)
            tg = self.kernel._of_points(own, tg.reshape(z.shape))
            if tz is not None and not self.kernel._is_linear:
                tg = tg + self.kernel._of_moved_points(own, tz, g.reshape(z.shape))
            grads.append(rounded(tg, z.dtype))
        return LogsumexpGradients(*grads, None if self.w is None else rounded(tgw, self.w.dtype))

"""Losses over all pairs of many features, whose scores are products: a block of scores is in memory at a time.

Blocks are columns of all scores, as a rule with all rows: matrix products make a block of scores, and of its gradient
those of x, to which each block adds, and of its y. See `blocks` for what is between the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.backends import loss_steps
from ..base.checks import dtype_of_sums, library
from ..base.values import put, rounded, sum_broadcast
from .blocks import Factors, Statistics, Weights, at_targets, gradient_of_scores, probabilities, quiet, scores
from .checks import batch_of, check_result
from .gradients import LogsumexpGradients
from .kernels import Linear
from .tangents import WIDEST, checked

SOFTMAX, SYMMETRIC, SIGMOID = "softmax", "symmetric", "sigmoid"
MULTIPLE = 64  # of columns of a block, if it can
LARGEST_HALF = 2.0**12  # of c times the scale, in gradients of float16


def takes(x: Any, kernel: Any, mask: Any) -> bool:
    """Whether a logsumexp is computed here: where its points have many features, or cuBLAS few digits to multiply."""
    in_half = library(x) == "cupy" and x.dtype.itemsize == 2
    return isinstance(kernel, Linear) and mask is None and (x.shape[-1] > WIDEST or in_half)


class Element(NamedTuple):
    """Matrices and vectors of one element of the batch."""

    x: Any
    y: Any
    factors: Factors

    @property
    def dtype(self) -> Any:
        return self.factors.scale.dtype

    @property
    def exchanged(self) -> Element:
        """x and y with their roles exchanged, without w and targets."""
        scale, a, b, *_ = self.factors
        return Element(self.y, self.x, Factors(scale, b, a, None, None, False))

    def slices(self, steps: Any) -> tuple[list[slice], list[slice]]:
        """Rows and columns of blocks."""
        (m, d), (n, _) = self.x.shape, self.y.shape
        most = steps.BYTES // self.dtype.itemsize
        columns = most // max(min(m, math.isqrt(most)), d, 1)
        columns = min(max(columns // MULTIPLE * MULTIPLE, MULTIPLE), max(n, 1))
        rows = max(most // columns, 1)
        return [[slice(at, min(at + step, size)) for at in range(0, size, step)]
                for size, step in ((m, rows), (n, columns))]  # type: ignore[return-value]  # fmt: skip

    def block(self, steps: Any, i: slice, j: slice) -> Any:
        """R; it and its rows are part of an array whose rows are multiples of 16 bytes, whatever the dtype."""
        columns = j.stop - j.start
        R = np.empty_like(self.x, dtype=self.dtype, shape=(i.stop - i.start, -(-columns // 8) * 8))[:, :columns]
        steps.product(R, self.x[i], self.y[j].T)
        return R

    @quiet
    def statistics(self, steps: Any) -> tuple[Any, Any, Any]:
        """f, what rounding took from it, and the score of the target."""
        known = Statistics(*[np.full_like(self.x, start, dtype=self.dtype, shape=len(self.x))
                             for start in (np.finfo(self.dtype).min, 0, 0)])  # fmt: skip
        rows, columns = self.slices(steps)
        for j in columns:
            for i in rows:
                steps.absorb(self.block(steps, i, j), self.factors.of(i, j), Statistics(*[x[i] for x in known]))
        highest, total, chosen = known
        if self.factors.sigmoid:
            return total, np.zeros_like(total), chosen
        log = np.log(total)
        f = highest + log
        return f, np.where(np.isneginf(f), 0, (highest - f) + log), chosen

    def gradients(self, steps: Any, weights: Weights, dw: Any) -> Iterator[tuple[slice | None, Any]]:
        """The gradient of each block of y, and last, with None, that of x. dw: where that of w is put, or None."""
        gx = np.zeros_like(self.x, dtype=self.dtype)
        rows, columns = self.slices(steps)
        for j in columns:
            gy = np.zeros_like(gx, shape=(j.stop - j.start, gx.shape[1]))
            for i in rows:
                R = self.block(steps, i, j)
                dR = steps.room_for_gradient(R, self.x.dtype)
                steps.gradient(dR, R, self.factors.of(i, j), weights.of(i, j), None if dw is None else dw[j])
                del R
                steps.product(gx[i], dR, self.y[j], add=True)
                steps.product(gy, dR.T, self.x[i], add=i.start > 0)
                del dR
            yield j, gy
        yield None, gx


class MovingElement(NamedTuple):
    """An Element of points of unit length, whose a and b are 1, that moves: tangents, or None."""

    element: Element
    tx: Any
    ty: Any
    tw: Any

    def blocks(self, steps: Any) -> Iterator[tuple[slice, slice, Factors, Any, Any]]:
        """i, j and the factors of each block, its scores T and their tangents."""
        x, y, factors = self.element
        rows, columns = self.element.slices(steps)
        for j in columns:
            for i in rows:
                own, tT = factors.of(i, j), np.zeros_like(x, shape=(i.stop - i.start, j.stop - j.start))
                if self.tx is not None:
                    steps.product(tT, self.tx[i], y[j].T, add=True)
                if self.ty is not None:
                    steps.product(tT, x[i], self.ty[j].T, add=True)
                if self.tw is not None:
                    tT += self.tw[j]
                yield i, j, own, scores(self.element.block(steps, i, j), own), tT

    def tangents(self, steps: Any, weights: Weights) -> tuple[Any, Any, Any]:
        """Those of f, of f of columns, and of the score of the target."""
        (x, y, _), is_symmetric = self.element, weights.f_columns is not None
        tf, tf_columns, chosen = (np.zeros_like(x, shape=n) for n in (len(x), len(y), len(x)))
        for i, j, factors, T, tT in self.blocks(steps):
            P, of_columns = probabilities(T, factors, weights.of(i, j))
            tf[i] += (P * tT).sum(axis=1)
            if is_symmetric:
                tf_columns[j] += (of_columns * tT).sum(axis=0)
            if factors.targets is not None:
                chosen[i] += np.where(at_targets(tT, factors.targets), tT, 0).sum(axis=1)
        return tf, tf_columns, chosen

    def gradients(self, steps: Any, weights: Weights, tc: Any) -> list[Any]:
        """The gradients of x and y, their tangents, and that of the gradient of w."""
        x, y, _ = self.element
        tf, tf_columns, _ = self.tangents(steps, weights)
        tangents = weights._replace(c=tc, of_target=tc)
        if weights.f_columns is not None:
            tangents = tangents._replace(of_target=2 * tc, c_columns=tc)
        gx, tgx, gy, tgy, tgw = (np.zeros_like(z) for z in (x, x, y, y, y[:, :1]))
        for i, j, factors, T, tT in self.blocks(steps):
            own = weights.of(i, j)
            G = gradient_of_scores(T, factors, own)
            tG = gradient_of_scores(T, factors, tangents.of(i, j))
            P, of_columns = probabilities(T, factors, own)
            tG += own.c[:, None] * P * (tT * (1 - P) if factors.sigmoid else tT - tf[i, None])
            if of_columns is not None:
                tG += own.c_columns * of_columns * (tT - tf_columns[j])
            tgw[j, 0] += tG.sum(axis=0)
            for g, of_G, by in ((gx[i], G, y[j]), (tgx[i], tG, y[j]), (gy[j], G.T, x[i]), (tgy[j], tG.T, x[i])):
                steps.product(g, of_G, by, add=True)
            for g, of_G, t, at in ((tgx[i], G, self.ty, j), (tgy[j], G.T, self.tx, i)):
                if t is not None:
                    steps.product(g, of_G, t[at], add=True)
        return [gx, gy, tgx, tgy, tgw[:, 0]]


class ScoresCall(NamedTuple):
    """A call that is checked, and its result f, like a `LogsumexpCall`: without targets it is the logsumexp."""

    x: Any
    y: Any
    w: Any
    kernel: Linear
    targets: Any  # or None
    loss: str
    batch: tuple[int, ...]
    weights: Any  # of each element, for c of ones
    f: Any
    low: Any  # what rounding took from f

    @classmethod
    @quiet
    def of(cls, x: Any, y: Any, w: Any, kernel: Linear, targets: Any = None, loss: str = SOFTMAX) -> ScoresCall:
        batches = {"x": (x, 2), "y": (y, 2), "w": (w, 1), "targets": (targets, 1)}
        batch = batch_of(**{name: z.shape[: z.ndim - axes] for name, (z, axes) in batches.items() if z is not None})
        call = cls(x, y, w, kernel, targets, loss, batch, [], None, None)
        f, low = (call.results() for _ in range(2))
        for at, element in enumerate(call.elements()):
            found, lost, chosen = element.statistics(call.steps)
            seen = ~np.isneginf(found)
            weights = Weights(np.where(seen, found, math.inf), lost, None, None)
            if loss == SYMMETRIC:
                g, lost_too, _ = element.exchanged.statistics(call.steps)
                g = g if w is None else g + element.factors.w
                weights = weights._replace(f_columns=g, low_columns=lost_too)
                found, lost, chosen = found + g, lost + lost_too, 2 * chosen
            if targets is not None:
                seen = (element.factors.targets >= 0) & (element.factors.targets < len(element.y))
                found = np.where(seen, found - chosen, 0)
            f[at], low[at] = found, lost
            call.weights.append(weights._replace(c=seen.astype(call.dtype)))
        return call._replace(f=call.by_batch(f), low=call.by_batch(low))

    # ------------------------------------------------------------------------------------------------------- the batch
    @property
    def dtype(self) -> Any:
        return dtype_of_sums(self.x.dtype)

    @property
    def steps(self) -> Any:
        return loss_steps(str(library(self.x)))

    @property
    def is_folded(self) -> bool:
        """Whether all elements have the same y: then their x are the rows of one element."""
        others = math.prod(self.y.shape[:-2]), 1 if self.w is None else math.prod(self.w.shape[:-1])
        return self.loss != SYMMETRIC and others == (1, 1)

    @property
    def elements_count(self) -> int:
        return 1 if self.is_folded else math.prod(self.batch)

    def of_rows(self, z: Any, axes: int) -> Any:
        """An array of x's kind, an element for each Element."""
        own = z.shape[z.ndim - axes :]
        rows = own[0] * (math.prod(self.batch) if self.is_folded else 1)
        return np.broadcast_to(z, (*self.batch, *own)).reshape(self.elements_count, rows, *own[1:])

    def of_columns(self, z: Any, axes: int) -> Any:
        """An array of y's kind, likewise."""
        own = z.shape[z.ndim - axes :]
        return (z if self.is_folded else np.broadcast_to(z, (*self.batch, *own))).reshape(self.elements_count, *own)

    def results(self) -> Any:
        rows = self.x.shape[-2] * (math.prod(self.batch) if self.is_folded else 1)
        return np.empty_like(self.x, dtype=self.dtype, shape=(self.elements_count, rows))

    def by_batch(self, f: Any) -> Any:
        return f.reshape(*self.batch, self.x.shape[-2])

    def vectors(self) -> Iterator[tuple[Any, Any]]:
        """w and targets of each element, or None."""
        w = None if self.w is None else self.of_columns(rounded(self.w, self.dtype), 1)
        targets = None if self.targets is None else self.of_rows(self.targets, 1)
        for at in range(self.elements_count):
            yield None if w is None else w[at], None if targets is None else targets[at]

    def elements(self) -> Iterator[Element]:
        (X, a), (Y, b) = (self.kernel._factored(z) for z in (self.of_rows(self.x, 2), self.of_columns(self.y, 2)))
        for at, (w, targets) in enumerate(self.vectors()):
            own_a, own_b = (None if z is None else z[at] for z in (a, b))
            yield Element(X[at], Y[at], Factors(self.scale, own_a, own_b, w, targets, self.loss == SIGMOID))

    @property
    def scale(self) -> Any:
        return self.dtype.type(self.kernel.scale)

    # --------------------------------------------------------------------------------------------------- its gradients
    def weighted(self, name: str, df: Any) -> list[Weights]:
        """The weights with a gradient of f, which is checked."""
        check_result(name, df, "f", self.f.shape, self.f)
        found = []
        for weights, own in zip(self.weights, self.of_rows(rounded(df, self.dtype), 1)):
            c = np.where(weights.c > 0, own, 0)
            found.append(weights._replace(c=c, of_target=c))
            if self.loss == SYMMETRIC:
                found[-1] = found[-1]._replace(of_target=2 * c, c_columns=c)
        return found

    @quiet
    def backprop(self, df: Any) -> LogsumexpGradients:
        x, y = self.of_rows(self.x, 2), self.of_columns(self.y, 2)
        dx, dy = self.room(self.x, x), self.room(self.y, y)
        dw, scale = np.zeros_like(y, dtype=self.dtype, shape=y.shape[:-1]), np.zeros_like(x, dtype=np.float64, shape=())
        for at, (element, weights) in enumerate(zip(self.elements(), self.weighted("df", df))):
            _, a, b, *_ = element.factors
            unit = None
            if self.x.dtype == np.float16 and element.x.size:  # which has few exponents
                largest = np.abs(weights.of_target).max() * self.kernel.scale
                unit = np.where(largest > 0, LARGEST_HALF / largest, 1).astype(self.dtype)
                c, of_target, of_columns = (None if z is None else z * unit for z in (*weights[2:4], weights.c_columns))
                weights = weights._replace(c=c, of_target=of_target, c_columns=of_columns)
            for j, g in element.gradients(self.steps, weights, None if self.w is None else dw[at]):
                g = g if unit is None else g / unit
                if j is None:
                    scale += (rounded(element.x, self.dtype) * g).sum(dtype=np.float64)
                    put(dx[at], self.kernel._of_factored(x[at], a, g))
                else:
                    put(dy[at, j], self.kernel._of_factored(y[at, j], None if b is None else b[j], g))
            if unit is not None:
                dw[at] /= unit
        dw = None if self.w is None else rounded(self.of_own_shape(dw, self.w), self.w.dtype)
        dx, dy = (rounded(self.of_own_shape(g, z), z.dtype) for g, z in ((dx, self.x), (dy, self.y)))
        return LogsumexpGradients(dx, dy, dw, kernel=(scale / self.kernel.scale).astype(self.dtype)[...])

    def room(self, z: Any, by_element: Any) -> Any:
        """For a gradient, which is rounded once."""
        return np.empty_like(by_element, dtype=z.dtype if by_element.size == z.size else self.dtype)

    def of_own_shape(self, gradient: Any, z: Any) -> Any:
        if gradient.size == z.size:
            return gradient.reshape(z.shape)
        return sum_broadcast(gradient.reshape(*self.batch, *z.shape[z.ndim + 1 - gradient.ndim :]), z.shape)

    # ------------------------------------------------------------------------------------------------------- tangents
    def moving(self, tx: Any, ty: Any) -> Any:
        return checked(self, "tx", tx, self.x, "x"), checked(self, "ty", ty, self.y, "y")

    def tangent_of_w(self, tw: Any) -> Any:
        return checked(self, "tw", tw, self.w, "w")

    def moved(self, moving: tuple[Any, Any], tw: Any) -> Iterator[MovingElement]:
        """Elements of points of unit length."""
        points = []
        for z, tz, by_element in zip((self.x, self.y), moving, (self.of_rows, self.of_columns)):
            z = z.astype(self.dtype, copy=False)
            of_points = (self.kernel._unit(z), None if tz is None else self.kernel._of_points(z, tz))
            points.append([[None] * self.elements_count if u is None else by_element(u, 2) for u in of_points])
        tw = [None] * self.elements_count if tw is None else self.of_columns(tw, 1)
        for x, tx, y, ty, own_tw, (w, targets) in zip(*points[0], *points[1], tw, self.vectors()):
            factors = Factors(self.dtype.type(1), None, None, w, targets, self.loss == SIGMOID)
            yield MovingElement(Element(x, y, factors), tx, ty, own_tw)

    @quiet
    def tangent(self, moving: tuple[Any, Any], tw: Any) -> Any:
        t = self.results()
        for at, (element, weights) in enumerate(zip(self.moved(moving, tw), self.weights)):
            tf, of_columns, chosen = element.tangents(self.steps, weights)
            along = tf - chosen if weights.f_columns is None else tf + of_columns - 2 * chosen
            t[at] = np.where(weights.c > 0, along, 0)
        return self.by_batch(t)

    @quiet
    def tangent_of_gradients(self, df: Any, tdf: Any, moving: tuple[Any, Any], tw: Any) -> LogsumexpGradients:
        weights = self.weighted("df", df)
        tc = [z.c for z in self.weighted("tdf", np.zeros_like(self.f) if tdf is None else tdf)]
        sides = self.of_rows, self.of_columns
        units = [by_element(z.astype(self.dtype, copy=False), 2) for z, by_element in zip((self.x, self.y), sides)]
        gx, tgx, gy, tgy = (np.zeros_like(units[at]) for at in (0, 0, 1, 1))
        tgw = np.zeros_like(gy, shape=gy.shape[:-1])
        for at, element in enumerate(self.moved(moving, tw)):
            gx[at], gy[at], tgx[at], tgy[at], tgw[at] = element.gradients(self.steps, weights[at], tc[at])
        grads = []
        for z, tz, own, g, tg, by_element in zip((self.x, self.y), moving, units, (gx, gy), (tgx, tgy), sides):
            found = self.kernel._of_points(own, tg)
            if tz is not None and not self.kernel._is_linear:
                found = found + self.kernel._of_moved_points(own, by_element(tz, 2), g)
            grads.append(rounded(self.of_own_shape(found, z), z.dtype))
        tdw = None if self.w is None else rounded(self.of_own_shape(tgw, self.w), self.w.dtype)
        return LogsumexpGradients(*grads, tdw)

"""Random problems of points: clouds with outliers, points that coincide, any origin, batch axes, masks and layouts.

    python -m tests.points.problems 7 12 hopper     # problem 12 of seed 7, on a simulated device; or cpu, gpu

Results are compared with the plain formula in float64, up to what rounding explains. Where a pair's difference is taken
that is a rounding of the difference; elsewhere of both points, as far as they are from the median of all.
"""

import sys
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import numpy as np

import numbattn as na
from numbattn import points
from numbattn.base import backends
from numbattn.base.checks import dtype_of_sums
from numbattn.base.values import sum_broadcast
from numbattn.points.kinds import DIFFERENCES, NEAR

from ..accuracy import to_numpy
from ..problems import Draw
from . import plain

KERNELS = [
    points.Gaussian(1.5), points.Laplacian(2.0), points.Matern(1.5, 2.0), points.Cauchy(0.7), points.Polynomial(2),
    points.Linear(), points.Cost(2, 0.7), points.Cost(1, 0.5),
]  # fmt: skip
SINGULAR = KERNELS[1], KERNELS[7]  # their slopes have no limit at 0
FEATURES = 1, 2, 3, 8, 9, 20
FAR = {2: 30.0, 4: 1e3, 8: 1e6}  # by bytes of an element: how far away outliers and origins are
ROUNDINGS = 64  # results may be off by so many roundings of the terms


class Problem(Draw):
    """A call of `product_vjp` with its tangents, of `logsumexp_vjp` if the kernel has one, and of `nearest`."""

    def __init__(self, seed, number, xp=np, on_cpu=True):
        draws = [np.random.default_rng([seed, number, which]) for which in range(3)]
        self.kind, self.rng, self.layouts = draws
        self.xp, self.on_cpu, self.is_short = xp, on_cpu, False
        self.kernel, self.d = KERNELS[self.kind.integers(len(KERNELS))], self.one_of(*FEATURES)
        self.dtype = np.dtype(self.one_of("f4", "f4", "f8", "f2"))
        self.m, self.n, e = self.one_of(0, 1, 7, 20, 33), self.one_of(0, 1, 9, 17, 40), self.one_of(1, 2, 5)
        batch, sizes = self.rng.integers(1, 4, self.one_of(0, 0, 1, 2)).tolist(), ((self.m, self.d), (self.n, self.d))
        x, y, b = (self.wide(*self.broadcast(*batch), *size) for size in (*sizes, (self.n, e)))
        self.move(x, y)
        self.batch = np.broadcast_shapes(*(z.shape[:-2] for z in (x, y, b)))
        given = [z.astype(self.dtype) for z in (x, y, b, self.wide(*self.batch, self.m, e))]
        self.mask = self.drawn_mask()
        self.visible = np.ones((*self.batch, self.m, self.n), bool)
        self.visible &= True if self.mask is None else self.mask.dense(self.m, self.n)
        self.directions = [self.wide(*z.shape).astype(self.dtype) for z in given]
        self.exact = [z.astype(np.float64) for z in given]
        if isinstance(self.mask, na.Lengths):  # beyond them there is NaN
            for z, end in zip(given, (self.mask.queries, self.mask.keys, self.mask.keys, self.mask.queries)):
                z[..., end:, :] = np.nan
        self.given, self.moving = ([*map(self.placed, some)] for some in (given, self.directions))
        self.w, self.df = (self.placed(z[..., 0]) for z in given[2:])
        self.share()
        self.prepare()

    def wide(self, *shape):
        return self.rng.standard_normal(shape)

    def move(self, x, y):
        """To any origin; some points far away, some on top of each other."""
        far = FAR[self.dtype.itemsize]
        origin = self.one_of(0, 0, far, far / 30) * self.wide(self.d)
        for z in (x, y):
            is_far = self.rng.random(z.shape[-2]) < self.one_of(0, 0, 0.1)
            z[..., is_far, :] += self.one_of(far, far / 30) * self.wide(self.d)
            z += origin
        count = self.one_of(0, 0, min(self.m, self.n, 5))
        if x.shape[:-2] == y.shape[:-2]:
            y[..., :count, :] = x[..., :count, :]

    def share(self):
        """Sometimes y is x, or all rows of an array are one in memory."""
        if isinstance(self.mask, na.Lengths) or self.rng.random() < 0.7:
            return
        if self.given[0].shape == self.given[1].shape:
            self.given[1], self.exact[1] = self.given[0], self.exact[0]
        which = int(self.rng.integers(2, 4))
        for some, broadcast in ((self.given, self.xp.broadcast_to), (self.exact, np.broadcast_to)):
            some[which] = broadcast(some[which][..., :1, :], some[which].shape)
        self.w, self.df = (z[..., 0] for z in self.given[2:])

    def drawn_mask(self):
        m, n = self.m, self.n
        segments = [np.sort(self.rng.integers(0, size + 1, 4)) for size in (m, n)]
        for side, size in zip(segments, (m, n)):
            side[0], side[-1] = 0, size
        return self.one_of(
            None, None, na.Causal(), na.Dense(self.rng.random((m, n)) < 0.5), na.Segments(*segments),
            na.Lengths(int(self.rng.integers(n + 1)), int(self.rng.integers(m + 1))),
        )  # fmt: skip

    def __repr__(self):
        shapes = ", ".join(f"{name} {z.shape} {z.strides}" for name, z in zip(("x", "y", "b", "ds"), self.given))
        return f"{self.kernel} of {self.dtype}, {shapes}, mask {self.mask}"

    # ----------------------------------------------------------------------------------------------------- the formula
    def prepare(self):
        """t of pairs of points of unit length, its derivatives by both, and what rounding may make of them."""
        self.of_pairs, self.eps = self.kernel._kind, float(np.finfo(dtype_of_sums(self.dtype)).eps)
        self.length = getattr(self.kernel, "length", self.kernel._one_length or 1.0)
        x, y = self.exact[:2]
        self.by_points = [D / self.length for D in self.displacements(x, y)]
        if self.of_pairs.is_of_product:
            self.t, of_x, of_y = x @ plain.T(y) / self.length**2, *(norms(z) / self.length for z in (x, y))
            self.off, self.places = of_x * plain.T(of_y) + abs(self.t), of_x + plain.T(of_y)
            self.least, self.most = self.t, self.t
            return
        t, off, self.places = self.distances()
        self.t, self.off, self.places = t / self.length**2, off / self.length**2, self.places / self.length
        change = ROUNDINGS * self.eps * self.off
        self.least, self.most = np.maximum(self.t - change, np.where(self.off > 0, 1e-30, 0)), self.t + change

    def distances(self):
        """Squared distances of points as given, how many roundings these are off by, and the differences of points."""
        x, y = self.exact[:2]
        rows = np.concatenate([z.reshape(-1, self.d) for z in (x, y)])
        middle = np.median(rows, axis=0) if len(rows) else 0.0
        sizes = [norms(z - middle) for z in (x, y)]
        if self.dtype.itemsize == 2:  # these may stay where they are
            sizes = [np.maximum(size, norms(z)) for size, z in zip(sizes, (x, y))]
        of_x, of_y = sizes[0], plain.T(sizes[1])
        t, far = plain.squares(x, y, 1), of_x + of_y
        if self.d <= DIFFERENCES:
            return t, t if self.on_cpu else t + far * np.sqrt(t), far * (not self.on_cpu)
        is_near = t < NEAR / 2 * (of_x**2 + of_y**2)
        off = np.where(is_near & (self.on_cpu or self.kernel in SINGULAR), t, t + of_x**2 + of_y**2)
        return t, off, np.where(is_near & self.on_cpu, 0, far)

    def only(self, x):
        """What visible pairs have, and 0 elsewhere."""
        return np.where(self.visible, x, 0)

    def displacements(self, x, y):
        """dt / dx_i and dt / dy_j."""
        x, y = x[..., :, None, :], y[..., None, :, :]
        return (y, x) if self.of_pairs.is_of_product else (2 * (x - y), 2 * (y - x))

    def sums(self, b, c, value, by_x, by_y):
        """Of c_i value_ij b_j: the sums over j, and the gradients by x, y and b, with those of the values."""
        W = (c @ plain.T(b))[..., None]
        x, y, of_b = (z.shape for z in self.exact[:3])
        dx, dy, db = (W * by_x).sum(axis=-2) / self.length, (W * by_y).sum(axis=-3) / self.length, plain.T(value) @ c
        return [value @ b, *map(sum_broadcast, (dx, dy, db), (x, y, (*of_b[:-1], c.shape[-1])))]

    def exactly(self, b, c, value, slope):
        """The same, of slopes by t."""
        return self.sums(b, c, value, *[slope[..., None] * D for D in self.by_points])

    def bounds(self, b, c, value, slope, off):
        """How many roundings they may be off by: values by `value`, slopes, which are about `slope`, by `off`."""
        each = [off[..., None] * abs(D) + 2 * (slope * self.places)[..., None] for D in self.by_points]
        return self.sums(abs(b), abs(c), value, *each)

    def product(self):
        """s, dx, dy, db."""
        kind, (_, _, b, ds) = self.of_pairs, self.exact
        return self.exactly(b, ds, self.only(kind.value(self.t)), self.only(kind.derivative(self.t)))

    def off_product(self):
        (_, _, b, ds), (_, S, _), (of_K, of_S, _) = self.exact, self.sizes(), self.off_each()
        return self.bounds(b, ds, of_K, S, of_S)

    def sizes(self):
        """Of values, slopes and curvatures."""
        kind = self.of_pairs
        return [abs(self.only(f(self.least))) for f in (kind.value, kind.derivative, kind.curvature)]

    def off_each(self):
        """How many roundings these are off by."""
        (K, S, C), ends = self.sizes(), (self.least, self.most)
        change = abs(np.subtract(*[self.only(self.of_pairs.curvature(t)) for t in ends])) / (ROUNDINGS * self.eps)
        return K + S * self.off, S + C * self.off, C + change

    def tangents(self):
        """ts, tdx, tdy, tdb, and how many roundings they may be off by."""
        kind, (_, _, b, c) = self.of_pairs, self.exact
        tx, ty, tb, tc = (z.astype(np.float64) for z in self.directions)
        tx, ty = tx / self.length, ty / self.length
        K, S, C = (self.only(f(self.t)) for f in (kind.value, kind.derivative, kind.curvature))
        D, tD = self.by_points, self.displacements(tx, ty)
        tt = sum((by * z).sum(axis=-1) for by, z in zip(D, (tx[..., :, None, :], ty[..., None, :, :])))
        moved = [(C * tt)[..., None] * by + S[..., None] * tby for by, tby in zip(D, tD)]
        exact = [self.sums(b, c, S * tt, *moved), self.exactly(tb, c, K, S), self.exactly(b, tc, K, S)]

        (_, S, C), (of_K, of_S, of_C) = self.sizes(), self.off_each()
        step, most = norms(tx) + plain.T(norms(ty)), sum(np.linalg.norm(by, axis=-1) for by in D)
        off = (most + 2 * self.places) * step
        each = [((of_C * most * step + C * off)[..., None] * abs(by)
                 + (2 * C * most * step * self.places + 2 * of_S * step)[..., None]) for by in D]  # fmt: skip
        bounds = [self.sums(abs(b), abs(c), of_S * most * step + S * off, *each),
                  self.bounds(tb, c, of_K, S, of_S), self.bounds(b, tc, of_K, S, of_S)]  # fmt: skip
        return [[one[0] + two[0], one[1] + two[1] + three[1], one[2] + two[2] + three[2], one[3] + three[3]]
                for one, two, three in (exact, bounds)]  # fmt: skip

    def logsumexp(self):
        """f, dx, dy, dw, and how many roundings they may be off by."""
        kind, (_, _, b, ds) = self.of_pairs, self.exact
        w, t, one = plain.T(b[..., :1]), self.t, np.ones((self.n, 1))
        L = np.where(self.visible, kind.logarithm(t) + w, -np.inf)
        f = np.logaddexp.reduce(L, axis=-1, keepdims=True, initial=-np.inf)
        some, df = np.where(np.isfinite(f), f, 0), np.where(np.isfinite(f), ds[..., :1], 0)
        P, (S, C) = np.exp(L - some), map(abs, map(self.only, of_logarithm(kind, self.least)))
        high = self.only(np.minimum(np.exp(kind.logarithm(self.least) + w - some), 1))
        off = np.where(high > 1e-9, S * self.off, 0).max(axis=-1, initial=0, keepdims=True) + abs(some) + 1
        off += abs(w).max(axis=-1, initial=0, keepdims=True)
        _, *exact = self.exactly(one, df, P, P * self.only(of_logarithm(kind, t)[0]))
        of_P = S * self.off + off
        _, *bounds = self.bounds(one, df, high * of_P, high * S, high * (C * self.off + S * (1 + of_P)))
        return [f, *exact], [off, *bounds]

    # --------------------------------------------------------------------------------------------------------- results
    def wrong(self):
        """What is wrong with results, in words."""
        with np.errstate(all="ignore"):
            yield from self.wrong_products()
            if self.of_pairs.is_exponential:
                yield from self.wrong_logarithms()
            yield from self.wrong_neighbours()

    def compared(self, names, found, exact, off):
        is_half = self.dtype.itemsize == 2
        for name, got, want, bound in zip(names, map(to_numpy, found), exact, off):
            got, allowed = got.astype(np.float64).reshape(want.shape), ROUNDINGS * self.eps * bound + 1e-30
            allowed = allowed + is_half * (1e-3 * abs(want) + 1e-7)
            right = (abs(got - want) <= allowed) | (got == want) | ~(bound < np.inf) | (is_half & (abs(want) > 6e4))
            for at in map(tuple, np.argwhere(~right)[:1]):
                yield f"{name}{[*map(int, at)]}: got {got[at]}, expected {want[at]} up to {allowed[at]}"

    def wrong_products(self):
        x, y, b, ds = self.given
        s, backprop = points.product_vjp(x, y, b, self.kernel, mask=self.mask)
        found = s, *backprop(ds)
        yield from self.compared(("s", "dx", "dy", "db"), found, self.product(), self.off_product())
        *tangents, tds = self.moving
        _, ts = points.product_jvp(x, y, b, self.kernel, *tangents, mask=self.mask)
        tgrads = backprop.hvp(ds, *tangents, tds=tds)
        yield from self.compared(("ts", "tdx", "tdy", "tdb"), (ts, *tgrads), *self.tangents())

    def wrong_logarithms(self):
        x, y, *_ = self.given
        f, backprop = points.logsumexp_vjp(x, y, self.w, self.kernel, mask=self.mask)
        yield from self.compared(("f", "dx of f", "dy of f", "dw"), (f, *backprop(self.df)), *self.logsumexp())

    def wrong_neighbours(self):
        x, y, *_ = self.given
        distances, indices = map(to_numpy, points.nearest(x, y, 3, mask=self.mask))
        t, off, _ = self.distances()
        hidden, beyond = ~self.visible[(0,) * len(self.batch)], np.full((*t.shape[:-1], 3), np.inf)
        t, off = (np.concatenate([np.where(hidden, np.inf, z), beyond], axis=-1) for z in (t, off))
        found, right = np.where(indices < 0, self.n, indices), np.argsort(t, axis=-1)[..., :3]
        own, least = (np.take_along_axis(t, which, -1) for which in (found, right))
        most = np.maximum(*(np.take_along_axis(off, which, -1) for which in (found, right)))
        is_rough = self.dtype.itemsize == 2 and self.d > DIFFERENCES and not self.on_cpu  # else from the differences
        yield from self.compared(("neighbours",), (own,), (least,), (most,))
        own = own if is_rough else np.sqrt(own)
        yield from self.compared(("distances",), (distances ** (1 + is_rough),), (own,), (most if is_rough else own,))


def of_logarithm(kind, t):
    """The derivative and the curvature of the logarithm of an exponential, whose value is 1 with this shift."""
    value, slope, curvature = (f(t, -kind.logarithm(t)) for f in (kind.value, kind.derivative, kind.curvature))
    return slope / value, curvature / value - (slope / value) ** 2


def norms(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


@contextmanager
def on_device(name):
    """Inside, numbattn computes on this device: gpu and cpu do, others are simulated. Yields the library of arrays."""
    if name in ("cpu", "gpu"):
        yield np if name == "cpu" else import_module("cupy")
        return
    from numbattn.cuda.points import PointsBackend  # numba-cuda may be missing

    from ..tools import device
    from ..tools.launch import world_of

    gpu = device.GPU(getattr(device, name.upper()))
    simulated = patch.dict(sys.modules, simulated=PointsBackend(lambda: gpu))
    with ExitStack() as stack:
        for one in world_of("simulated"), simulated, patch.dict(backends.POINTS, numpy="simulated"):
            stack.enter_context(one)
        for name in "nearest", "pairs", "tangents":  # which prepare points for GPUs in another way
            stack.enter_context(patch.object(sys.modules[f"numbattn.points.{name}"], "library", lambda x: "cupy"))
        yield np


def wrong(seed, number, device="cpu"):
    """What is wrong with a problem, and how to repeat it."""
    with on_device(device) as xp:
        problem = Problem(seed, number, xp, device == "cpu")
        found = list(problem.wrong())
    return found and [f"python -m tests.points.problems {seed} {number} {device}", repr(problem), *found]


if __name__ == "__main__":
    _, seed, number, device = sys.argv
    print(*wrong(int(seed), int(number), device) or ["OK"], sep="\n")

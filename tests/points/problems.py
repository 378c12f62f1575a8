"""Random problems of points: clouds with outliers, points that coincide, any origin, batch axes, masks and layouts.

    python -m tests.points.problems 7 12 hopper     # problem 12 of seed 7, on a simulated device; or cpu, gpu

Results are compared with the plain formula in float64, up to what rounding explains: coordinates are rounded as far as
`reach` goes, the largest distance from the middle, and with them squared distances and all that depends on these.
"""

import sys
from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import numpy as np

import numbattn as na
from numbattn import backends, points
from numbattn.checks import dtype_of_sums
from numbattn.points.kinds import DIFFERENCES
from numbattn.values import sum_broadcast

from ..accuracy import to_numpy
from ..problems import Draw
from . import plain

KERNELS = [
    points.Gaussian(1.5), points.Laplacian(2.0), points.Matern(1.5, 2.0), points.Cauchy(0.7), points.Polynomial(2),
    points.Linear(), points.Cost(2, 0.7), points.Cost(1, 0.5),
]  # fmt: skip
SMOOTH, SINGULAR = [*KERNELS[:1], *KERNELS[3:6]], [KERNELS[1], KERNELS[7]]  # the slopes of these have no limit at 0
FEATURES = 1, 2, 3, 8, 9, 20
FAR = {2: 30.0, 4: 1e3, 8: 1e6}  # by bytes of an element: how far away outliers and origins are
ROUNDINGS, FEW = 64, 20  # results may be off by so many roundings of the terms; jets are compared where reach is small
STEP = 1e-5  # of the differences that tangents are compared with


class Problem(Draw):
    """A call of `product_vjp` with its tangents, of `logsumexp_vjp` if the kernel has one, and of `nearest`."""

    def __init__(self, seed, number, xp=np):
        draws = [np.random.default_rng([seed, number, which]) for which in range(3)]
        self.kind, self.rng, self.layouts = draws
        self.xp, self.is_short = xp, False
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
        count = 0 if self.d > DIFFERENCES and self.kernel in SINGULAR else self.one_of(0, 0, min(self.m, self.n, 5))
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
        return f"{self.kernel} of {self.dtype}, {shapes}, mask {self.mask}, reach {self.reach:.3g}"

    # ----------------------------------------------------------------------------------------------------- the formula
    def prepare(self):
        """Squared distances, or products, of points of unit length, and what rounding may make of them."""
        self.of_pairs, self.eps = self.kernel._kind, float(np.finfo(dtype_of_sums(self.dtype)).eps)
        self.length = getattr(self.kernel, "length", self.kernel._one_length or 1.0)
        rows = np.concatenate([z.reshape(-1, self.d) for z in self.exact[:2]])
        self.middle = rows.mean(axis=0) if len(rows) and not self.of_pairs.is_of_product else 0.0
        x, y = self.units(*self.exact[:2])
        self.reach = max(np.linalg.norm(z, axis=-1).max(initial=0) for z in (x, y))
        t = self.squares(x, y)
        by_products = self.of_pairs.is_of_product or self.d > DIFFERENCES
        self.off = self.reach**2 + abs(t) if by_products else t + self.reach * np.sqrt(t)  # in roundings
        least = t - ROUNDINGS * self.eps * self.off
        self.least = t if self.of_pairs.is_of_product else np.maximum(least, np.where(self.off > 0, 1e-30, 0))

    def units(self, x, y):
        return (x - self.middle) / self.length, (y - self.middle) / self.length

    def squares(self, x, y):
        return x @ plain.T(y) if self.of_pairs.is_of_product else plain.squares(x, y, 1)

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

    def exactly(self, x, y, b, c, value, slope):
        """The same, of units x and y, and of slopes by t."""
        return self.sums(b, c, value, *[slope[..., None] * D for D in self.displacements(x, y)])

    def bounds(self, b, c, value, slope, off):
        """How many roundings they may be off by: values by `value`, slopes, which are about `slope`, by `off`."""
        each = [off[..., None] * abs(D) + 2 * slope[..., None] * self.reach
                for D in self.displacements(*self.units(*self.exact[:2]))]  # fmt: skip
        return self.sums(abs(b), abs(c), value, *each)

    def product(self, x, y, b, ds):
        """s, dx, dy, db."""
        x, y = self.units(x, y)
        t = self.squares(x, y)
        return self.exactly(x, y, b, ds, self.only(self.of_pairs.value(t)), self.only(self.of_pairs.derivative(t)))

    def off_product(self):
        kind, (_, _, b, ds) = self.of_pairs, self.exact
        K, S, C = (abs(self.only(f(self.least))) for f in (kind.value, kind.derivative, kind.curvature))
        return self.bounds(b, ds, K + S * self.off, S, S + C * self.off)

    def logsumexp(self):
        """f, dx, dy, dw, and how many roundings they may be off by."""
        kind, (x, y, b, ds) = self.of_pairs, self.exact
        w, (x, y), one = plain.T(b[..., :1]), self.units(x, y), np.ones((self.n, 1))
        t = self.squares(x, y)
        L = np.where(self.visible, kind.log_value(t) + w, -np.inf)
        f = np.logaddexp.reduce(L, axis=-1, keepdims=True, initial=-np.inf)
        some, df = np.where(np.isfinite(f), f, 0), np.where(np.isfinite(f), ds[..., :1], 0)
        P, S, C = np.exp(L - some), *(abs(self.only(g(self.least))) for g in (kind.log_derivative, kind.log_curvature))
        high = self.only(np.minimum(np.exp(kind.log_value(self.least) + w - some), 1))
        off = np.where(high > 1e-9, S * self.off, 0).max(axis=-1, initial=0, keepdims=True) + abs(some) + 1
        off += abs(w).max(axis=-1, initial=0, keepdims=True)
        _, *exact = self.exactly(x, y, one, df, P, P * self.only(kind.log_derivative(t)))
        of_P = S * self.off + off
        _, *bounds = self.bounds(one, df, high * of_P, high * S, high * (C * self.off + S * (1 + of_P)))
        return [f, *exact], [off, *bounds]

    def slopes(self):
        """Of `product` along the tangents, by differences, and how many roundings, of about all numbers, are off."""
        directions = [z.astype(np.float64) for z in self.directions]
        ends = [self.product(*(z + h * t for z, t in zip(self.exact, directions))) for h in (STEP, -STEP)]
        sizes = [1 + abs(z).max(initial=0) for z in (*self.exact[2:], *directions)]
        largest = (1 + self.reach) ** 4 * max(sizes) ** 3 * (1 + self.m + self.n)
        found = [(one - other) / (2 * STEP) for one, other in zip(*ends)]
        return found, [np.full(z.shape, (1 + STEP**2 / self.eps) * largest) for z in found]

    # --------------------------------------------------------------------------------------------------------- results
    def wrong(self):
        """What is wrong with results, in words."""
        with np.errstate(all="ignore"):
            yield from self.wrong_products()
            if self.of_pairs.is_exponential:
                yield from self.wrong_logarithms()
            if self.dtype.itemsize > 2 or self.d <= DIFFERENCES:
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
        yield from self.compared(("s", "dx", "dy", "db"), found, self.product(*self.exact), self.off_product())
        *tangents, tds = self.moving
        _, ts = points.product_jvp(x, y, b, self.kernel, *tangents, mask=self.mask)
        tgrads = backprop.hvp(ds, *tangents, tds=tds)
        if self.kernel in SMOOTH and self.reach < FEW:
            yield from self.compared(("ts", "tdx", "tdy", "tdb"), (ts, *tgrads), *self.slopes())

    def wrong_logarithms(self):
        x, y, *_ = self.given
        f, backprop = points.logsumexp_vjp(x, y, self.w, self.kernel, mask=self.mask)
        yield from self.compared(("f", "dx of f", "dy of f", "dw"), (f, *backprop(self.df)), *self.logsumexp())

    def wrong_neighbours(self):
        x, y, *_ = self.given
        distances, indices = map(to_numpy, points.nearest(x, y, 3, mask=self.mask))
        t = np.where(self.visible[(0,) * len(self.batch)], plain.squares(*self.exact[:2], 1), np.inf)
        t = np.concatenate([t, np.full((*t.shape[:-1], 3), np.inf)], axis=-1)
        own = np.take_along_axis(t, np.where(indices < 0, self.n, indices), -1)
        off = np.full(own.shape, (self.reach * self.length) ** 2) if self.d > DIFFERENCES else own
        names, least = ("distances", "neighbours"), np.sort(t, axis=-1)[..., :3]
        yield from self.compared(names, (distances, own), (np.sqrt(own), least), (np.sqrt(own), off))


@contextmanager
def on_device(name):
    """Inside, numbattn computes on this device: gpu and cpu do, others are simulated. Yields the library of arrays."""
    if name in ("cpu", "gpu"):
        yield np if name == "cpu" else import_module("cupy")
        return
    from numbattn.cuda.points import Points  # numba-cuda may be missing

    from ..tools import device
    from ..tools.launch import world_of

    gpu = device.GPU(getattr(device, name.upper()))
    simulated = patch.dict(sys.modules, simulated=Points(lambda: gpu))
    with world_of("simulated"), simulated, patch.dict(backends.POINTS, numpy="simulated"):
        yield np


def wrong(seed, number, device="cpu"):
    """What is wrong with a problem, and how to repeat it."""
    with on_device(device) as xp:
        problem = Problem(seed, number, xp)
        found = list(problem.wrong())
    return found and [f"python -m tests.points.problems {seed} {number} {device}", repr(problem), *found]


if __name__ == "__main__":
    _, seed, number, device = sys.argv
    print(*wrong(int(seed), int(number), device) or ["OK"], sep="\n")

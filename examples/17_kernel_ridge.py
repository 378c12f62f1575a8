"""Make a map of 100,000 scattered, noisy measurements: kernel ridge regression by conjugate gradients.

    python examples/17_kernel_ridge.py --plot terrain.png

A terrain is measured at random places. Kernel ridge regression, which is also the mean of a Gaussian process, solves
(K + ridge) w = heights, where K has the kernel of all pairs of places: 40 gigabytes in float32, of which
`points.operator` computes products alone. Conjugate gradients need few of them after a preconditioner, made of the
kernel of some places with all (Nystroem's approximation). A map is one more product, of its pixels with the places.
"""

import argparse
from importlib import import_module

import numpy as np
from tqdm import tqdm

from numbattn import points

KERNEL = points.Matern(2.5, length=0.15)
NOISE, RIDGE = 0.3, 0.1  # of heights, which spread over 1; what is added to the diagonal
WAVES, PIXELS, INDUCING = 60, 128, 600


def terrain(rng):
    """A function of places (n, 2): a sum of waves, longer ones being higher."""
    length = 1 / np.linspace(1.5, 9, WAVES)
    angle, phase = 2 * np.pi * rng.random((2, WAVES))
    direction = 2 * np.pi * np.stack([np.cos(angle), np.sin(angle)]) / length
    height = length * np.sqrt(2 / (length**2).sum())
    return lambda x: np.sin(x @ direction + phase) @ height


def preconditioner(x, rng):
    """What makes all eigenvalues of K + RIDGE alike, by those of K_xz K_zz^-1 K_zx, for some places z among x."""
    z = x[xp.asarray(rng.choice(len(x), min(INDUCING, len(x)), replace=False))]
    one = xp.eye(len(z), dtype=x.dtype)
    K_xz, K_zz = points.product(x, z, one, KERNEL), points.product(z, z, one, KERNEL)
    B = K_xz @ xp.linalg.inv(xp.linalg.cholesky(K_zz + 1e-4 * one)).T
    values, vectors = xp.linalg.eigh((B.T @ B).astype(np.float64))
    U = B @ (vectors / xp.sqrt(values)).astype(x.dtype)
    shrinkage = ((values[0] + RIDGE) / (values + RIDGE) - 1).astype(x.dtype)

    def solve(v):
        return v + U @ (shrinkage * (U.T @ v))

    return linalg.LinearOperator((len(x), len(x)), matvec=solve, dtype=x.dtype)


def plot(file, x, heights, found, truth):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    panels = figure.subplots(1, 3)
    shades = {"cmap": "terrain", "vmin": -3, "vmax": 3}
    shown = slice(0, 4000)
    panels[0].scatter(*x[shown].T, c=heights[shown], s=1, **shades)
    for axes, image in zip(panels[1:], (found, truth)):
        image = axes.imshow(image.reshape(PIXELS, PIXELS), origin="lower", extent=(0, 1, 0, 1), **shades)
    titles = "some of the measurements", "map", "terrain"
    for axes, title in zip(panels, titles):
        axes.set(aspect="equal", xticks=(), yticks=(), xlim=(0, 1), ylim=(0, 1))
        axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=panels, label="height", shrink=0.8)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100_000, help="measurements, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. terrain.png (needs matplotlib)")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)
    linalg = import_module("scipy.sparse.linalg" if xp is np else "cupyx.scipy.sparse.linalg")

    height_of = terrain(rng)
    places = rng.random((args.points, 2), dtype=np.float32)
    heights = (height_of(places) + NOISE * rng.standard_normal(args.points)).astype(np.float32)
    x, y = xp.asarray(places), xp.asarray(heights)

    A = points.operator(x, x, KERNEL, ridge=RIDGE)
    M = preconditioner(x, rng)
    with tqdm(unit=" iterations") as bar:
        weights, _ = linalg.cg(A, y, rtol=3e-3, maxiter=200, M=M, callback=lambda _: bar.update())
    side = (np.arange(PIXELS, dtype=np.float32) + 0.5) / PIXELS
    pixels = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    found = points.product(xp.asarray(pixels), x, weights[:, None].astype(x.dtype), KERNEL)[:, 0]
    found, truth = found if xp is np else found.get(), height_of(pixels)
    error = np.sqrt(np.mean((found - truth) ** 2))
    print(f"{args.points:,} measurements with an error of {NOISE}: after {bar.n} iterations a map with an error of "
          f"{error:.3f}")
    if args.plot:
        plot(args.plot, places, heights, found, truth)

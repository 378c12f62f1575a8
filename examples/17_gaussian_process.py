"""Make a map of 50,000 scattered, noisy measurements: a Gaussian process, whose kernel and noise are found by itself.

    python examples/17_gaussian_process.py --plot terrain.png

A terrain is measured at random places. Of a Gaussian process the marginal likelihood of the heights says which length
and factor of the kernel, and which noise, explain them best: some of the measurements are enough to find these, by the
gradient of a solution and of a determinant, which are `points.solve_vjp` and `points.log_determinant_vjp`. All
measurements make the map: (K + noise) w = heights, where K, the kernel of all pairs of places, would have 10 gigabytes
in float32, and a product of the pixels of the map with w.
"""

import argparse
from importlib import import_module

import numpy as np
from scipy.optimize import minimize

from numbattn import points

NOISE = 0.3  # of heights, which spread over 1
WAVES, PIXELS = 60, 128


def terrain(rng):
    """A function of places (n, 2): a sum of waves, longer ones being higher."""
    length = 1 / np.linspace(1.5, 9, WAVES)
    angle, phase = 2 * np.pi * rng.random((2, WAVES))
    direction = 2 * np.pi * np.stack([np.cos(angle), np.sin(angle)]) / length
    height = length * np.sqrt(2 / (length**2).sum())
    return lambda x: np.sin(x @ direction + phase) @ height


def likelihood(parameters, x, y):
    """Of a Gaussian process, minus the logarithm of the marginal likelihood, per point, and its gradient by the
    logarithms of length, factor and noise."""
    length, factor, noise = map(float, np.exp(parameters))
    kernel = factor * points.Matern(2.5, length)
    r, of_weights = points.solve_vjp(x, y, kernel, ridge=noise)
    logdet, of_logdet = points.log_determinant_vjp(x, kernel, ridge=noise)
    grads = of_weights(y / 2), of_logdet(0.5)
    value = (float((y * r.x).sum() + logdet) + len(y) * np.log(2 * np.pi)) / 2
    slopes = [float(g) for g in map(sum, zip(*[(g.kernel[0], g.factor[0], g.ridge) for g in grads]))]
    return value / len(y), np.exp(parameters) * slopes / len(y)


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
    parser.add_argument("--points", type=int, default=50_000, help="measurements, %(default)s unless given")
    parser.add_argument("--fitted", type=int, default=2_000, help="that choose the kernel, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. terrain.png (needs matplotlib)")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)

    height_of = terrain(rng)
    places = rng.random((args.points, 2), dtype=np.float32)
    heights = (height_of(places) + NOISE * rng.standard_normal(args.points)).astype(np.float32)
    x, y = xp.asarray(places), xp.asarray(heights[:, None])

    some = slice(0, args.fitted)
    start = np.log([0.5, 1.0, 1.0])
    found = minimize(likelihood, start, (x[some], y[some]), jac=True, method="L-BFGS-B", options={"maxiter": 20})
    length, factor, noise = map(float, np.exp(found.x))
    print(f"after {found.nfev} likelihoods: length {length:.2f}, factor {factor:.2f}, noise {noise**0.5:.2f}")

    kernel = factor * points.Matern(2.5, length)
    r = points.solve(x, y, kernel, ridge=noise, tol=1e-3)
    side = (np.arange(PIXELS, dtype=np.float32) + 0.5) / PIXELS
    pixels = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    found = points.product(xp.asarray(pixels), x, r.x, kernel)[:, 0]
    found, truth = found if xp is np else found.get(), height_of(pixels)
    error = np.sqrt(np.mean((found - truth) ** 2))
    print(f"{args.points:,} measurements with an error of {NOISE}: after {r.iterations} iterations a map with an error "
          f"of {error:.3f}")
    if args.plot:
        plot(args.plot, places, heights, found, truth)

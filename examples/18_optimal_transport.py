"""Move one word to where another one is: optimal transport between two clouds of points.

    python examples/18_optimal_transport.py --plot transport.png

Points are scattered over the letters of NumPy, and others over those of CuPy. Sinkhorn's algorithm finds the plan that
moves the one to the other with the least effort, but for an entropy. What the cost, half the squared distance, changes
by when a point moves is where the point has to go: x_i - dx_i / a_i is the mean of what it is matched with.
"""

import argparse
from importlib import import_module

import numpy as np
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from numbattn import points

WORDS, STEPS = ("NumPy", "CuPy"), 5
COST = points.Cost(power=2, epsilon=2e-3)  # of words that are about 1 high


def scattered(word, size, rng):
    """Points (size, 2) on the letters of a word, amid it."""
    path = TextPath((0, 0), word, size=1)
    low, high = path.get_extents().get_points()
    found = np.empty((0, 2))
    while len(found) < size:
        some = low + (high - low) * rng.random((size, 2))
        found = np.concatenate([found, some[path.contains_points(some)]])
    return (found[:size] - (low + high) / 2).astype(np.float32)


def plot(file, start, end):
    figure = Figure(figsize=(7.2, 0.9), layout="constrained")
    for axes, part in zip(figure.subplots(1, STEPS), np.linspace(0, 1, STEPS)):
        axes.scatter(*((1 - part) * start + part * end).T, c=start[:, 0], s=0.6, cmap="viridis", linewidths=0)
        axes.set(aspect="equal", xlim=(-1.8, 1.8), ylim=(-0.6, 0.6))
        axes.axis("off")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=3000, help="of each word, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. transport.png")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)
    x, y = (xp.asarray(scattered(word, args.points, rng)) for word in WORDS)
    a = xp.full(args.points, 1 / args.points, x.dtype)

    r, backprop = points.sinkhorn_vjp(x, y, a, a, COST, tol=3e-2, debias=True)
    moved = x - backprop().dx / a[:, None]

    distances, _ = points.nearest(y, moved)
    print(f"an effort of {float(r.cost):.4f}, found in {r.iterations} iterations; to where a point has to be, the "
          f"nearest that has come is {float(distances.mean()):.3f} away")
    if args.plot:
        start, end = (cloud if xp is np else cloud.get() for cloud in (x, moved))
        plot(args.plot, start, end)

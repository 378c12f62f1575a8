"""Learn to remove noise from a lattice of two phases, with attention within a window that goes on at the other side.

    python examples/21_lattice.py --plot lattice.png

A site of the lattice is +1 or -1, neighbours are mostly alike, and what is measured has noise as large as that. Each
site becomes the mean of the measurements in a window around it, weighted by a softmax. One model learns what a distance
weighs, a table; it can only blur. The other one also compares what lies around both sites, queries and keys, so that it
averages along a boundary and not across it.
"""

import argparse
from importlib import import_module

import numpy as np

import numbattn as na

NOISE, WIDTH, RATE = 1.0, 3.0, 0.02  # of the noise, and of a phase in sites
BATCH, FEATURES = 4, 8
AROUND = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]  # whose measurements a site is compared by


def draw(rng, shape):
    """Lattices and what is measured of them, (BATCH, sites)."""
    waves = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n) for n in shape), indexing="ij"))
    smooth = np.fft.fft2(rng.standard_normal((BATCH, *shape))) * np.exp(-2 * (np.pi * WIDTH * waves) ** 2)
    lattice = np.sign(np.fft.ifft2(smooth).real).reshape(BATCH, -1)
    measured = lattice + NOISE * rng.standard_normal(lattice.shape)
    return [xp.asarray(x.astype(np.float32)) for x in (lattice, measured)]


def estimate_vjp(measured, parameters):
    """The estimate of each site, (BATCH, sites), and a function from its gradient to those of the parameters."""
    queries, keys, table = parameters
    images = measured.reshape(-1, *grid.shape)
    around = xp.stack([xp.roll(images, at, axis=(-2, -1)) for at in AROUND], axis=-1).reshape(*measured.shape, -1)
    q, k = (x[:, None] for x in (around @ queries, around @ keys))      # one head
    score = grid.relative_bias(table, edges="periodic")
    o, backprop = na.attention_vjp(q, k, measured[:, None, :, None], mask=mask, score=score)

    def gradients(do):
        grads = backprop(do[:, None, :, None])
        dq, dk, _ = grads
        dqueries, dkeys = (xp.einsum("bsa,bsf->af", around, x[:, 0]) for x in (dq, dk))
        return [dqueries, dkeys, grads.score[0]]

    return o[:, 0, :, 0], gradients


def train(steps, learned, rng):
    """The parameters, of which those that are `learned` differ from where they started."""
    size = 2 * args.window - 1
    start = rng.standard_normal((2, len(AROUND), FEATURES)) if learned[0] else np.zeros((2, len(AROUND), FEATURES))
    parameters = [xp.asarray(x.astype(np.float32)) for x in (*(0.3 * start), np.zeros((1, size, size)))]
    moments = [(xp.zeros_like(x), xp.zeros_like(x)) for x in parameters]
    for step in range(1, steps + 1):
        lattice, measured = draw(rng, grid.shape)
        found, gradients = estimate_vjp(measured, parameters)
        grads = gradients(2 * (found - lattice) / lattice.size)
        for x, grad, (mean, square), is_learned in zip(parameters, grads, moments, learned):
            mean[...], square[...] = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad**2        # Adam
            change = RATE * mean / (1 - 0.9**step) / (xp.sqrt(square / (1 - 0.99**step)) + 1e-8)
            x -= is_learned * change
    return parameters


def wrong(found, lattice):
    """The share of sites on the wrong side."""
    return float((xp.sign(found) != lattice).mean())


def draw_plot(file, pictures):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(pictures), 2.9), layout="constrained")
    for axes, (title, x) in zip(figure.subplots(1, len(pictures)), pictures.items()):
        x = x if isinstance(x, np.ndarray) else x.get()
        axes.imshow(x, cmap="RdBu", vmin=-1.5, vmax=1.5) if x.shape == tuple(grid.shape) else axes.imshow(np.exp(x))
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps, %(default)s unless given")
    parser.add_argument("--size", type=int, default=48, help="sites along each side, %(default)s unless given")
    parser.add_argument("--window", type=int, default=9, help="of a site, along each side, %(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="draw a lattice and its estimates")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    args = parser.parse_args()
    xp, grid = import_module(args.xp), na.Grid((args.size, args.size))
    mask = grid.window(args.window, edges="periodic")
    models = {"by distance": (False, False, True), "by distance and contents": (True, True, True)}
    trained = {name: train(args.steps, learned, np.random.default_rng(0)) for name, learned in models.items()}
    lattice, measured = draw(np.random.default_rng(1), grid.shape)
    found = {"measured": measured, **{name: estimate_vjp(measured, x)[0] for name, x in trained.items()}}
    for name, x in found.items():
        error = float(((x - lattice) ** 2).mean())
        print(f"{name}: squared error {error:.3f}, {100 * wrong(x, lattice):.1f} % of sites on the wrong side")
    if args.plot:
        reach = args.window // 2                    # an odd window has as many neighbours before a site as behind it
        pictures, weights = {"lattice": lattice, **found}, trained["by distance"][-1][0, reach:-reach, reach:-reach]
        draw_plot(args.plot, {name: x[0].reshape(grid.shape) for name, x in pictures.items()}
                             | {"weights by distance": weights})  # fmt: skip

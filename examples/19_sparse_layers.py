"""A network with block-sparse weights beside one with dense weights: both learn how a chaotic field evolves.

    python examples/19_sparse_layers.py --plot chaos.png

The field u(x, t) obeys the equation of Kuramoto and Sivashinsky, u_t = -u u_x - u_xx - u_xxxx, on a ring of 256 sites,
with a force that differs from site to site. A network, u + tanh(u W1) W2, is to say what the field is a unit of time
later. That depends on the surroundings of each site, so W1 and W2 need only blocks of neighbouring sites, a fifth of
all. With these the network learns faster, and from fewer fields, than with all weights.
"""

import argparse
import time
from importlib import import_module

import numpy as np

import numbattn as na
from numbattn import sparse

SITES, SPACING, SIZE, FEATURES = 256, 0.5, 16, 8  # sites of a block; hidden features of a site
STEP, STEPS = 0.05, 20  # of time, in a step of the network
TIMES = 21  # that a field is observed at
BATCH, RATE = 256, 3e-3


# ----------------------------------------------------------------------------------------------------------- the field
def evolve(u, force):
    """Fields (batch, SITES) a unit of time later: linear terms implicitly, the others explicitly."""
    k = 2 * np.pi * np.fft.rfftfreq(SITES, SPACING)
    for _ in range(STEPS):
        change = np.fft.rfft(force) - 0.5j * k * np.fft.rfft(u * u)
        u = np.fft.irfft((np.fft.rfft(u) + STEP * change) / (1 - STEP * (k**2 - k**4)), SITES)
    return u


def observe(rng, force, count, times):
    """Fields (times, count, SITES), which have evolved for long enough to forget how they began."""
    u = rng.standard_normal((count, SITES))
    for _ in range(100):
        u = evolve(u, force)
    fields = [u]
    while len(fields) < times:
        fields.append(evolve(fields[-1], force))
    return xp.asarray(np.stack(fields), dtype=np.float32)


# ---------------------------------------------------------------------------------------------------------- the network
def neighbours(height, width):
    """The pattern of blocks of neighbouring sites, on a ring: so many rows and columns a block."""
    i = np.arange(SITES // SIZE)
    apart = (i[:, None] - i) % len(i)
    return sparse.Pattern(na.BlockSparse((apart <= 1) | (apart == len(i) - 1), (height, width)))


PATTERNS = neighbours(SIZE, SIZE * FEATURES), neighbours(SIZE * FEATURES, SIZE)


def dense_vjp(x, w, pattern):
    return x @ w, lambda dy: (dy @ w.T, x.T @ dy)


def network(u, weights, product_vjp):
    """Fields a unit of time later, and a function from the gradient of these to the weights'."""
    h, back_in = product_vjp(u, weights[0], PATTERNS[0])
    s = xp.tanh(h)
    y, back_out = product_vjp(s, weights[1], PATTERNS[1])

    def backprop(dy):
        ds, dw_out = back_out(dy)
        _, dw_in = back_in(ds * (1 - s * s))
        return dw_in, dw_out

    return u + y, backprop


def init_weights(rng):
    """The blocks that are there, and all weights: with either the network changes nothing at first."""
    blocks = [np.zeros((pattern.count, *pattern.block_size)) for pattern in PATTERNS]
    whole = [np.zeros(pattern.shape) for pattern in PATTERNS]
    for (inwards, _), inputs in ((blocks, 3 * SIZE), (whole, SITES)):
        inwards[:] = rng.standard_normal(inwards.shape) / np.sqrt(inputs)
    return [[xp.asarray(w, dtype=np.float32) for w in weights] for weights in (blocks, whole)]


def mean_square(x):
    return float((x * x).mean())


def train(weights, product_vjp, before, after, held_out, steps):
    """Train in place, by Adam. Returns steps, and mean square errors of fields held out after so many."""
    rng, moments = np.random.default_rng(1), [(xp.zeros_like(w), xp.zeros_like(w)) for w in weights]
    found = []
    for step in range(1, steps + 1):
        some = rng.integers(len(before), size=BATCH)
        y, backprop = network(before[some], weights, product_vjp)
        wrong = y - after[some]
        for w, grad, (mean, square) in zip(weights, backprop(2 / wrong.size * wrong), moments):
            mean += 0.1 * (grad - mean)
            square += 0.01 * (grad * grad - square)
            size = xp.sqrt(square / (1 - 0.99**step)) + 1e-8
            w -= RATE * min(1, 2 * (1 - step / steps)) / (1 - 0.9**step) * mean / size
        if step % max(1, steps // 40) == 0:
            y, _ = network(held_out[0], weights, product_vjp)
            found.append((step, mean_square(y - held_out[1])))
    return found


def plot(file, pictures, curves):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.8), layout="constrained")
    *panels, axes = figure.subplots(1, len(pictures) + 1, width_ratios=(*[1] * len(pictures), 1.4))
    for panel, (name, fields) in zip(panels, pictures.items()):
        panel.imshow(fields, origin="lower", aspect="auto", cmap="RdBu", vmin=-3, vmax=3)
        panel.set(title=name, xlabel="site", xticks=[0, 128, 256])
        panel.label_outer()
    panels[0].set_ylabel("time")
    for name, curve in curves.items():
        axes.plot(*zip(*curve), label=name)
    axes.set(title="mean square error", xlabel="training step", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(file, dpi=135)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fields", type=int, default=4000, help="to learn from, %(default)s unless given")
    parser.add_argument("--steps", type=int, default=400, help="training steps, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. chaos.png (needs matplotlib)")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)
    force = 0.1 * rng.standard_normal(SITES)
    fields, held_out = (observe(rng, force, count, TIMES) for count in (args.fields // (TIMES - 1), 50))
    before, after = (x.reshape(-1, SITES) for x in (fields[:-1], fields[1:]))
    blocks, whole = init_weights(rng)
    networks = {"sparse weights": (blocks, sparse.product_vjp), "dense weights": (whole, dense_vjp)}

    curves, pictures = {}, {"the field": held_out[:, 0]}
    for name, (weights, product_vjp) in networks.items():
        start = time.process_time()
        curves[name] = train(weights, product_vjp, before, after, held_out, args.steps)
        seconds, run = time.process_time() - start, [held_out[0, :1]]
        while len(run) < len(held_out):
            run.append(network(run[-1], weights, product_vjp)[0])
        pictures[name] = xp.concatenate(run)
        print(f"{sum(w.size for w in weights):,} {name}: after {args.steps} steps, {seconds:.1f} CPU seconds, a mean "
              f"square error of {curves[name][-1][1]:.4f}; the field changes by {mean_square(after - before):.4f}")
    if args.plot:
        plot(args.plot, {name: x if xp is np else x.get() for name, x in pictures.items()}, curves)

"""Learn who interacts with whom: a bias for each pair, from its gradient.

    python examples/10_pair_bias.py --plot bias.png

The sites of a chain, folded at random, exchange signals: each takes the mean of all, weighted by exp(-distance). All
that the model sees are signals and noisy answers. It is a single attention whose scores are nothing but a bias for
each pair of sites, shared by the whole batch, as in models of protein structures; it learns the map of distances.
"""

import argparse

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import numbattn as na

SITES, CHANNELS, BATCH = 48, 8, 32
NOISE, RATE = 0.05, 0.1


def fold(rng):
    """-distance (SITES, SITES) between the sites of a random walk in space with steps of length 1."""
    steps = rng.standard_normal((SITES, 3))
    places = np.cumsum(steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0)
    return -np.linalg.norm(places[:, None] - places, axis=-1)


def weights_of(bias):
    nothing = np.zeros((SITES, 1))  # q and k: scores are the bias alone
    return na.attention_weights(nothing, nothing, score=na.Bias(bias))


def train(hidden, steps, rng):
    """Learn the bias, float32 (SITES, SITES)."""
    nothing = np.zeros((BATCH, SITES, 1), np.float32)
    bias = np.zeros((SITES, SITES), np.float32)
    mean, square = np.zeros_like(bias), np.zeros_like(bias)
    bar = tqdm(range(1, steps + 1), unit=" steps")
    for step in bar:
        signals = rng.standard_normal((BATCH, SITES, CHANNELS), dtype=np.float32)
        answers = na.attention(nothing, nothing, signals, score=na.Bias(hidden.astype(np.float32)))
        answers += NOISE * rng.standard_normal(answers.shape, dtype=np.float32)
        o, backprop = na.attention_vjp(nothing, nothing, signals, score=na.Bias(bias))
        (dbias,) = backprop((o - answers) / BATCH).score
        mean, square = 0.9 * mean + 0.1 * dbias, 0.99 * square + 0.01 * dbias**2        # Adam
        step_size = RATE * min(1, 2 * (1 - step / steps))
        bias -= step_size * mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
        bar.set_postfix(loss=f"{np.mean((o - answers) ** 2):.4f}", noise=f"{NOISE**2:.4f}", refresh=False)
    return bias


def plot(file, hidden, learned):
    matplotlib.rcParams.update({"font.size": 8, "axes.titlesize": 8})
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, name, bias in zip(panels, ("hidden", "learned"), (hidden, learned)):
        image = axes.imshow(np.log10(weights_of(bias)), cmap="Blues", vmin=-3, vmax=0)
        axes.set(title=name, xlabel="site", ylabel="site")
        axes.label_outer()
    figure.colorbar(image, ax=panels, label="log$_{10}$ weight", shrink=0.8)
    figure.savefig(file, dpi=200)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="training steps, %(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", default="bias.png", help="where to draw, %(default)s unless given")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    hidden = fold(rng)
    learned = train(hidden, args.steps, rng)
    error = np.abs(weights_of(hidden) - weights_of(learned)).mean() * SITES
    print(f"a learned weight differs from the hidden one by {error:.2f} of the mean weight")
    plot(args.plot, hidden, learned)

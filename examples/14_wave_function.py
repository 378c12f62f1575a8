"""Find the ground state of a few fermions with a neural wave function: variational Monte Carlo.

    python examples/14_wave_function.py --plot energy.png

Fermions on a line, in a harmonic trap, push each other away by springs. The wave function is antisymmetric by the
product of all differences of positions; its logarithm also has a Gaussian's -a x^2 / 2 and what a layer of attention
makes of all positions, sum(a_i o_i), symmetric in the particles. Its mean energy is never below that of the ground
state, which is known for springs, and training lowers it. A local energy needs the Laplacian of log |psi| by all
positions: of the attention it comes from `attention_laplacian`, of the rest by hand.
"""

import argparse

import numpy as np
from tqdm import tqdm

import numbattn as na

SIZE, SPRING, HEADS, DIM, FEATURES = 4, -0.1875, 2, 4, 16
WALKERS, MOVES, REACH, RATE = 512, 8, 0.6, 0.01
FREQUENCY = np.sqrt(1 + SIZE * SPRING)  # of all motion relative to the centre
EXACT = 1 / 2 + FREQUENCY * (SIZE**2 - 1) / 2
GAUSSIAN = (FREQUENCY + 1 / FREQUENCY) / 4 + FREQUENCY * (SIZE**2 - 1) / 2  # the best without attention
JX = np.eye(SIZE)[:, None, :, None]  # the derivatives of the positions (walkers, SIZE, 1) by each of them


def init_weights(rng):
    def normal(*shape, std):
        return std * rng.standard_normal(shape)

    return {"a": np.ones(1), "in": normal(1, FEATURES, std=0.7), "shift": normal(FEATURES, std=0.5),
            "qkva": normal(FEATURES, 4 * HEADS * DIM, std=0.1)}  # fmt: skip


def split(y):
    """q, k, v and a, each (..., HEADS, SIZE, DIM)."""
    return np.moveaxis(y.reshape(*y.shape[:-1], 4, HEADS, DIM), (-3, -2), (0, -3))


def joined(parts):
    """What `split` splits."""
    y = np.moveaxis(np.stack(parts), (0, -3), (-3, -2))
    return y.reshape(*y.shape[:-3], 4 * HEADS * DIM)


def differences(x):
    """x_i - x_j; on the diagonal infinity, so that nothing comes of it."""
    return x - x.mT + np.diag(np.full(SIZE, np.inf))


def log_psi(x, w):
    """log |psi| of walkers, and a function from a factor for each to the gradients of their sum by the weights."""
    h = np.tanh(x @ w["in"] + w["shift"])
    q, k, v, a = split(h @ w["qkva"])
    o, attention_back = na.attention_vjp(q, k, v)
    pairs = np.log(np.abs(x - x.mT) + np.eye(SIZE)).sum(axis=(1, 2)) / 2

    def backprop(factor):
        c = factor[:, None, None, None]
        dy = joined([*attention_back(c * a), c * o])
        dz = (1 - h**2) * (dy @ w["qkva"].T)
        return {"a": -(factor @ (x**2).sum(axis=1) / 2), "in": (x.mT @ dz).sum(axis=0), "shift": dz.sum(axis=(0, 1)),
                "qkva": (h.mT @ dy).sum(axis=0)}  # fmt: skip

    return pairs - w["a"] * (x**2).sum(axis=(1, 2)) / 2 + (a * o).sum(axis=(1, 2, 3)), backprop


def local_energy(x, w):
    """-(laplacian psi) / (2 psi) + the potential, of each walker."""
    h = np.tanh(x @ w["in"] + w["shift"])
    jh = (1 - h**2) * (JX @ w["in"])                        # (SIZE, walkers, SIZE, FEATURES)
    lh = -2 * h * (1 - h**2) * w["in"] ** 2                 # the sum of second derivatives
    (q, k, v, a), (jq, jk, jv, ja), (lq, lk, lv, la) = (split(y @ w["qkva"]) for y in (h, jh, lh))
    o, jo, lo = na.attention_laplacian(q, k, v, jq, jk, jv, lq, lk, lv)
    slope = (ja * o + a * jo).sum(axis=(2, 3, 4)).T         # of the sum of a o: the product rule, once
    bend = (la * o + a * lo + 2 * (ja * jo).sum(axis=0)).sum(axis=(1, 2, 3))  # and twice
    inverse = 1 / differences(x)
    slope += inverse.sum(axis=-1) - w["a"] * x[..., 0]      # log |x_i - x_j| and the Gaussian
    bend -= (inverse**2).sum(axis=(1, 2)) + w["a"] * SIZE
    springs = SPRING * ((x - x.mT) ** 2).sum(axis=(1, 2)) / 4
    return -(bend + (slope**2).sum(axis=1)) / 2 + (x**2).sum(axis=(1, 2)) / 2 + springs


def moved(x, w, rng):
    """Walkers after Metropolis' moves: distributed as psi^2."""
    now, _ = log_psi(x, w)
    for _ in range(MOVES):
        there = x + REACH * rng.standard_normal(x.shape)
        then, _ = log_psi(there, w)
        taken = np.log(rng.random(len(x))) < 2 * (then - now)
        x, now = np.where(taken[:, None, None], there, x), np.where(taken, then, now)
    return x


def train(steps, rng):
    """The weights, and the mean and the spread of the local energy at each step."""
    w, x, history = init_weights(rng), rng.standard_normal((WALKERS, SIZE, 1)), []
    mean, square = ({name: np.zeros_like(weight) for name, weight in w.items()} for _ in range(2))
    for _ in range(10):
        x = moved(x, w, rng)
    for step in tqdm(range(1, steps + 1), unit=" steps"):
        x = moved(x, w, rng)
        energy = local_energy(x, w)
        history.append((energy.mean(), energy.std()))
        _, backprop = log_psi(x, w)
        grads = backprop(2 * (energy - energy.mean()) / WALKERS)  # of the mean energy
        for name, grad in grads.items():  # Adam
            mean[name] = 0.9 * mean[name] + 0.1 * grad
            square[name] = 0.99 * square[name] + 0.01 * grad**2
            size = np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8
            w[name] = w[name] - RATE * min(1, 2 * (1 - step / steps)) * mean[name] / (1 - 0.9**step) / size
    return w, x, np.array(history)


def plot(file, history):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    energy, spread = history.T
    axes.fill_between(range(len(energy)), energy - spread, energy + spread, color="C0", alpha=0.2, linewidth=0,
                      label="spread of local energies")  # fmt: skip
    axes.plot(energy, linewidth=0.8, label="mean energy")
    axes.axhline(GAUSSIAN, color="C1", linestyle="--", label="the best without attention")
    axes.axhline(EXACT, color="C3", linestyle="--", label="ground state")
    axes.set(xlabel="step", ylabel="energy", ylim=(EXACT - 0.5, EXACT + 1.5))
    axes.legend()
    figure.savefig(file, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps, %(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. energy.png (needs matplotlib)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    weights, x, history = train(args.steps, rng)
    found = []
    for _ in range(max(1, args.steps // 5)):
        x = moved(x, weights, rng)
        found.append(local_energy(x, weights))
    print(f"energy of {SIZE} fermions: {history[0, 0]:.3f} at first, {np.mean(found):.4f} after; exact {EXACT:.4f}, "
          f"without attention at best {GAUSSIAN:.4f}")
    print(f"local energies, which are all the same in the ground state, spread over {np.std(found):.3f}")
    if args.plot:
        plot(args.plot, history)


if __name__ == "__main__":
    main()

"""How a loss curves: the spectrum of its Hessian, by products with it, before and after training.

    python examples/15_curvature.py --plot spectrum.png

The model of example 02 in its smallest form, one layer of attention, predicts Python's documentation byte by byte. Each
array comes as a Dual, itself and its tangent, what it changes by along a direction in the space of weights. So the code
of the gradients also computes their tangents, which are the Hessian times the direction, at a few times the cost: the
product of Duals is the product rule, and attention has `attention_forward_jvp` and `attention_backward_jvp`. Lanczos'
method makes a spectrum of some such products; the matrix itself, 9,216 x 9,216, is never formed.
"""

import argparse
from importlib import import_module
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import numbattn as na

model = import_module("02_transformer")  # `import` takes no name that starts with a digit
WIDTH, HEADS, BATCH, SEQLEN = 16, 2, 8, 64


class Dual(NamedTuple):
    """An array and its tangent."""

    x: np.ndarray
    t: np.ndarray

    def __matmul__(self, other):
        return Dual(self.x @ other.x, self.t @ other.x + self.x @ other.t)

    def plus(self, other):
        return Dual(self.x + other.x, self.t + other.t)

    def each(self, linear):
        return Dual(linear(self.x), linear(self.t))

    @property
    def T(self):
        return self.each(np.transpose)


def heads(y):
    """(tokens, ... * width) to (..., batch, HEADS, SEQLEN, head_dim); one axis in front for each of q, k and v."""
    return np.moveaxis(y.reshape(BATCH, SEQLEN, -1, HEADS, WIDTH // HEADS), (2, 3), (0, 2))


def tokens(y):
    """What `heads` splits."""
    return np.moveaxis(y, (0, 2), (2, 3)).reshape(BATCH * SEQLEN, -1)


def attention_vjp(qkv):
    """Causal attention of the three parts of a Dual, and the function from do to dqkv."""
    o, to, saved, tsaved = na.attention_forward_jvp(*qkv.x, *qkv.t, causal=True)

    def backprop(do):
        grads, tangents = na.attention_backward_jvp(do.x, saved, tsaved, tdo=do.t)
        return Dual(np.stack(grads), np.stack(tangents))

    return Dual(o, to), backprop


def cross_entropy(logits, targets):
    """The mean loss, and its gradient by the logits."""
    p = np.exp(logits.x - logits.x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    tp = p * (logits.t - (p * logits.t).sum(axis=1, keepdims=True))
    at_targets = np.arange(len(p)), targets
    loss = -np.log(p[at_targets]).mean()
    p[at_targets] -= 1
    return loss, Dual(p / len(p), tp / len(p))


def gradients(weights, inputs, targets):
    """The loss, and its gradients by the weights, as Duals, too."""
    one_hot = Dual(np.eye(256)[inputs.ravel()], np.zeros((inputs.size, 256)))
    x = one_hot @ weights["embed"]
    o, attention_back = attention_vjp((x @ weights["qkv"]).each(heads))
    y = o.each(lambda o: tokens(o[None]))
    z = x.plus(y @ weights["out"])
    loss, dlogits = cross_entropy(z @ weights["head"], targets)
    dz = dlogits @ weights["head"].T
    do = (dz @ weights["out"].T).each(lambda do: heads(do)[0])
    dqkv = attention_back(do).each(tokens)
    dx = dz.plus(dqkv @ weights["qkv"].T)
    return loss, {"embed": one_hot.T @ dx, "qkv": x.T @ dqkv, "out": y.T @ dz, "head": z.T @ dlogits}


def init_weights(rng):
    std = WIDTH**-0.5
    shapes = {"embed": (256, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "head": (WIDTH, 256)}
    return {name: std * rng.standard_normal(shape) for name, shape in shapes.items()}


def train(weights, text, steps, rng):
    """Train in place; the direction is of no interest, and zero."""
    adam = model.Adam(weights, decay=0)
    for step in tqdm(range(steps), unit=" steps"):
        batch = model.windows(text, rng.integers(len(text) - SEQLEN, size=BATCH), SEQLEN)
        loss, grads = gradients({name: Dual(w, np.zeros_like(w)) for name, w in weights.items()}, *batch)
        adam.step(weights, {name: grad.x for name, grad in grads.items()}, 3e-2 * model.schedule((step + 0.5) / steps))
    return loss


def hessian(weights, batch):
    """The function that multiplies a vector, one number for each weight, by the Hessian of the loss of a batch."""
    ends = np.cumsum([w.size for w in weights.values()])

    def times(vector):
        parts = zip(weights.items(), np.split(vector, ends[:-1]))
        duals = {name: Dual(w, part.reshape(w.shape)) for (name, w), part in parts}
        _, grads = gradients(duals, *batch)
        return np.concatenate([grad.t.ravel() for grad in grads.values()])

    return times, ends[-1]


def lanczos(times, size, steps, rng):
    """Eigenvalues as Lanczos' method sees them from a random vector, and how much of the spectrum each stands for."""
    basis, diagonal, beside = np.zeros((steps, size)), np.zeros(steps), np.zeros(steps - 1)
    v = rng.standard_normal(size)
    for i in range(steps):
        basis[i] = v / np.linalg.norm(v)
        v = times(basis[i])
        diagonal[i] = basis[i] @ v
        for _ in range(2):  # orthogonal to all before, also after rounding
            v -= basis[: i + 1].T @ (basis[: i + 1] @ v)
        if i + 1 < steps:
            beside[i] = np.linalg.norm(v)
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return values, vectors[0] ** 2


def plot(file, spectra):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    for (name, (values, shares)), style in zip(spectra.items(), ("C1o", "C0s")):
        axes.vlines(values, 1e-7, shares, color=style[:2], linewidth=1)
        axes.plot(values, shares, style, markersize=3, label=name)
    axes.set(yscale="log", ylim=(1e-7, 2), xlabel="eigenvalue", ylabel="share of the spectrum")
    axes.legend()
    figure.savefig(file, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps, %(default)s unless given")
    parser.add_argument("--products", type=int, default=60, help="with the Hessian, %(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. spectrum.png (needs matplotlib)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    text, _ = model.read_text()
    weights, spectra = init_weights(rng), {}
    batch = model.windows(text, rng.integers(len(text) - SEQLEN, size=BATCH), SEQLEN)
    for name in ("before training", "after training"):
        if name == "after training":
            print(f"loss {train(weights, text, args.steps, rng) / np.log(2):.2f} bits per byte")
        times, size = hessian(weights, batch)
        u, v = rng.standard_normal((2, size))
        first, second = u @ times(v), v @ times(u)
        values, _ = spectra[name] = lanczos(times, size, args.products, rng)
        print(f"{name}: {size:,} eigenvalues from {values[0]:.3f} to {values[-1]:.3f}; u H v and v H u differ by "
              f"{abs(first - second) / abs(first):.0e}")
    if args.plot:
        plot(args.plot, spectra)


if __name__ == "__main__":
    main()

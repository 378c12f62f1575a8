"""Train a network with block-sparse weights beside dense ones: predict a byte of a text from the 16 before it.

    python examples/19_sparse_layers.py --plot sparse.png

Three networks of three layers each. The sparse one is as wide as the wide dense one, and has an eighth of its weights:
as many as the narrow dense one. Its products, and those of both its gradients, take the time of the blocks that are
there, which are drawn once, at random.
"""

import argparse
import math
import time
from importlib import import_module

import numpy as np

import numbattn as na
from numbattn import sparse

model = import_module("02_transformer")  # its text and its optimiser; `import` takes no name that starts with a digit
BYTES, CONTEXT, FEATURES, SIZE = 256, 16, 32, 32  # bytes, so many before, features of each; rows and columns of a block


class Linear:
    """A layer with dense weights."""

    def __init__(self, rng, rows, columns):
        self.shape = rows, columns
        self.count = rows * columns

    def weights(self, rng):
        rows, _ = self.shape
        return rng.standard_normal(self.shape) / math.sqrt(rows)

    def __call__(self, x, w):
        def backprop(dy):
            return dy @ w.T, x.T @ dy

        return x @ w, backprop


class SparseLinear:
    """A layer with a share of the blocks of its weights."""

    def __init__(self, rng, rows, columns, share):
        blocks = rng.random((rows // SIZE, columns // SIZE)).argsort(axis=0) < max(round(share * rows / SIZE), 1)
        self.pattern = sparse.Pattern(na.BlockSparse(blocks, (SIZE, SIZE)))
        self.count = self.pattern.count * SIZE**2

    def weights(self, rng):
        blocks_of_column = self.pattern.count / self.pattern.blocks.shape[1]
        return rng.standard_normal((self.pattern.count, SIZE, SIZE)) / math.sqrt(blocks_of_column * SIZE)

    def __call__(self, x, w):
        return sparse.product_vjp(x, w, self.pattern)


def layers_of(rng, width, share=None):
    sizes = CONTEXT * FEATURES, width, width, BYTES
    if share is None:
        return [Linear(rng, *shape) for shape in zip(sizes, sizes[1:])]
    return [SparseLinear(rng, *shape, share) for shape in zip(sizes, sizes[1:])]


def init_weights(rng, layers):
    weights = {"embed": rng.standard_normal((BYTES, FEATURES))}
    weights |= {f"layer {i}": layer.weights(rng) for i, layer in enumerate(layers)}
    weights[f"layer {len(layers) - 1}"] *= 0  # at first all bytes are equally likely
    return {name: xp.asarray(weight, dtype=np.float32) for name, weight in weights.items()}


def network(contexts, weights, layers):
    """Logits (batch, 256) of the byte after each of the contexts, (batch, CONTEXT)."""
    backs = []
    x, embed_back = model.embed(contexts.ravel(), weights["embed"])
    x = x.reshape(len(contexts), CONTEXT, FEATURES).swapaxes(1, 2).reshape(len(contexts), -1)
    for i, layer in enumerate(layers):
        if i:
            x, relu_back = model.squared_relu(x)
            x, norm_back = model.rmsnorm(x)
            backs += [relu_back, norm_back]
        x, layer_back = layer(x, weights[f"layer {i}"])
        backs.append(layer_back)

    def backprop(dx):
        grads = {}
        for i in reversed(range(len(layers))):
            dx, grads[f"layer {i}"] = backs.pop()(dx)
            if i:
                dx = backs.pop()(dx)
                dx = backs.pop()(dx)
        grads["embed"] = embed_back(dx.reshape(-1, FEATURES, CONTEXT).swapaxes(1, 2).reshape(-1, FEATURES))
        return grads

    return x, backprop


def examples(text, at):
    """Contexts, and the byte after each of them."""
    return (xp.asarray(x) for x in (text[at[:, None] + np.arange(CONTEXT)], text[at + CONTEXT]))


def train(name, layers, text, held_out, args):
    """Steps, and bits per byte of a held-out text after so many."""
    rng = np.random.default_rng(0)
    weights = init_weights(rng, layers)
    adam, found, seconds = model.Adam(weights, decay=0.1), [], 0.0
    contexts, targets = examples(held_out, np.arange(0, len(held_out) - CONTEXT, 5))
    for step in range(args.steps + 1):
        if step % max(1, args.steps // 20) == 0 or step == args.steps:
            logits, _ = network(contexts, weights, layers)
            loss, _ = model.cross_entropy(logits, targets)
            found.append((step, float(loss) / math.log(2)))
        start = time.process_time()
        logits, backprop = network(*(some := [*examples(text, rng.integers(len(text) - CONTEXT, size=args.batch))])[:1], weights, layers)
        loss, loss_back = model.cross_entropy(logits, some[1])
        adam.step(weights, backprop(loss_back()), args.lr * model.schedule((step + 0.5) / (args.steps + 1)))
        seconds += time.process_time() - start
    size = sum(layer.count for layer in layers)
    print(f"{name}: {size:,} weights in its layers, {found[-1][1]:.3f} bits per byte, {seconds / args.steps * 1e3:.1f} ms a step", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    args = parser.parse_args()
    model.xp = xp = import_module(args.xp)
    rng = np.random.default_rng(0)
    text, held_out = model.read_text()
    sparse_layers = layers_of(rng, args.width, 1 / 8)
    count = sum(l.count for l in sparse_layers)
    narrow = next(w for w in range(1, 4096) if (CONTEXT * FEATURES + w + BYTES) * w >= count)
    for name, layers in [("narrow", layers_of(rng, narrow)), ("sparse", sparse_layers), ("wide", layers_of(rng, args.width))][: 2]:
        train(name, layers, text, held_out, args)

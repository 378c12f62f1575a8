"""Train a transformer on Python's own documentation, byte by byte, with every gradient written out.

    python examples/02_transformer.py --plot loss.png
    python examples/02_transformer.py --packed

A layer is a function that returns its output and `backprop`, which takes the gradient of the loss with respect to that
output and returns those with respect to the layer's array arguments; dx is the gradient with respect to x.
"""

import argparse
import importlib
import math
import time
from pydoc_data.topics import topics

import ml_dtypes
import numpy as np
from tqdm import tqdm

import numbattn as na

xp = np  # the module of the arrays, numpy or cupy: see --xp
attention_vjp = na.attention_vjp  # or standard_vjp, see --attention
half = None  # the dtype of products, if not the weights': see --dtype


def narrow(x):
    return x if half is None else x.astype(half)


def wide(x):
    return x if half is None else x.astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- layers
# Activations are (tokens, width) matrices, tokens = batch * seqlen; only attention looks at the sequences.
def embed(tokens, table):
    def backprop(dy):
        one_hot = xp.eye(len(table), dtype=dy.dtype)[tokens]
        return one_hot.T @ dy  # sums the rows of equal tokens, much faster than add.at

    return table[tokens], backprop


def linear(x, weight):
    x, weight = narrow(x), narrow(weight)

    def backprop(dy):
        dy = narrow(dy)
        return wide(dy @ weight.T), wide(x.T @ dy)

    return wide(x @ weight), backprop


def rmsnorm(x):
    r = 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    y = r * x

    def backprop(dy):
        return r * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, backprop


def squared_relu(x):
    h = xp.maximum(x, 0)

    def backprop(dy):
        return 2 * h * dy

    return h * h, backprop


def cross_entropy(logits, targets):
    """The mean cross-entropy over all tokens, in nats."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    p = xp.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    p /= total
    at_targets = xp.arange(len(targets)), targets
    loss = (xp.log(total[:, 0]) - logits[at_targets]).mean()

    def backprop():
        dlogits = p / len(p)
        dlogits[at_targets] -= 1 / len(p)
        return dlogits

    return loss, backprop


def rotations(seqlen, head_dim, dtype):
    """Complex numbers (seqlen, 1, 1, head_dim / 2) of length 1, with angles position * frequency."""
    frequencies = 1000.0 ** -xp.linspace(0, 1, head_dim // 2)
    angles = xp.arange(seqlen)[:, None, None, None] * frequencies
    return xp.exp(1j * angles).astype(xp.result_type(dtype, xp.complex64))


def rotate(qkv, by):
    """Rotary positions, in place: pairs of features of q and k are complex numbers, turned by their position."""
    qk = qkv.view(by.dtype)[:, :, :2]
    qk *= by


def product(x, y):
    if half is None:
        return x @ y
    z = xp.empty((*x.shape[:-1], y.shape[-1]), half)
    for i in np.ndindex(x.shape[:-2]):  # CuPy does not multiply stacks of bfloat16 matrices
        z[i] = x[i] @ y[i]
    return z


def standard_vjp(q, k, v, causal=True, mask=None, dropout=None):
    """What numbattn computes, by the plain formula: the paper's Algorithms 0 and 3, which keep S and P."""
    S = q.shape[-1] ** -0.5 * wide(product(q, k.swapaxes(-1, -2)))
    S += xp.triu(xp.full(S.shape[-2:], -xp.inf, S.dtype), 1)
    P = xp.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)

    def backprop(do):
        dP = wide(product(do, v.swapaxes(-1, -2)))
        dS = narrow(q.shape[-1] ** -0.5 * P * (dP - (P * dP).sum(axis=-1, keepdims=True)))
        return product(dS, k), product(dS.swapaxes(-1, -2), q), product(narrow(P).swapaxes(-1, -2), do)

    return product(narrow(P), v), backprop


def attention(x, w_qkv, w_out, batch, heads, mask, dropout):
    tokens, width = x.shape
    seqlen, head_dim = tokens // batch, width // heads
    rotation = rotations(seqlen, head_dim, x.dtype)

    x, norm_back = rmsnorm(x)
    qkv, qkv_back = linear(x, w_qkv)
    qkv = qkv.reshape(batch, seqlen, 3, heads, head_dim)
    rotate(qkv, rotation)
    q, k, v = narrow(qkv).transpose(2, 0, 3, 1, 4)  # each (batch, heads, seqlen, head_dim); views will do
    o, attention_back = attention_vjp(q, k, v, causal=True, mask=mask, dropout=dropout)
    y, out_back = linear(wide(o).swapaxes(1, 2).reshape(tokens, width), w_out)

    def backprop(dy):
        do, dw_out = out_back(dy)
        dq, dk, dv = attention_back(narrow(do).reshape(batch, seqlen, heads, head_dim).swapaxes(1, 2))
        dqkv = xp.stack([wide(d).swapaxes(1, 2) for d in (dq, dk, dv)], axis=2)
        rotate(dqkv, rotation.conj())  # gradients are turned back
        dx, dw_qkv = qkv_back(dqkv.reshape(tokens, 3 * width))
        return norm_back(dx), dw_qkv, dw_out

    return y, backprop


def mlp(x, w_up, w_down):
    x, norm_back = rmsnorm(x)
    h, up_back = linear(x, w_up)
    h, relu_back = squared_relu(h)
    y, down_back = linear(h, w_down)

    def backprop(dy):
        dh, dw_down = down_back(dy)
        dx, dw_up = up_back(relu_back(dh))
        return norm_back(dx), dw_up, dw_down

    return y, backprop


# -------------------------------------------------------------------------------------------------------------- model
def init_weights(rng, width, layers, dtype=np.float32):
    """Weight matrices by name; those of the blocks have a leading axis of layers."""

    def normal(*shape, std):
        return xp.asarray(std * rng.standard_normal(shape), dtype=dtype)

    std = width**-0.5
    small = std / (2 * layers) ** 0.5  # so that the sum over all blocks keeps its size
    return {
        "embed": normal(256, width, std=1),
        "qkv": normal(layers, width, 3 * width, std=std),
        "out": normal(layers, width, width, std=small),
        "up": normal(layers, width, 4 * width, std=std),
        "down": normal(layers, 4 * width, width, std=small / 2),
        "head": normal(width, 256, std=0),  # at first all bytes are equally likely
    }


def transformer(tokens, weights, heads, mask=None, dropouts=None):
    """Logits (batch * seqlen, 256) of the byte after each of `tokens`, (batch, seqlen)."""
    layers = range(len(weights["qkv"]))
    dropouts = dropouts or [None for _ in layers]
    backs = []
    x, embed_back = embed(tokens.ravel(), weights["embed"])
    for i in layers:
        y, attention_back = attention(x, weights["qkv"][i], weights["out"][i], len(tokens), heads, mask, dropouts[i])
        x = x + y
        y, mlp_back = mlp(x, weights["up"][i], weights["down"][i])
        x = x + y
        backs.append((attention_back, mlp_back))
    x, norm_back = rmsnorm(x)
    logits, head_back = linear(x, weights["head"])

    def backprop(dlogits):
        grads = {name: xp.empty_like(weight) for name, weight in weights.items()}
        dx, grads["head"] = head_back(dlogits)
        dx = norm_back(dx)
        for i in reversed(layers):
            attention_back, mlp_back = backs[i]
            dy, grads["up"][i], grads["down"][i] = mlp_back(dx)
            dx += dy
            dy, grads["qkv"][i], grads["out"][i] = attention_back(dx)
            dx += dy
        grads["embed"] = embed_back(dx)
        return grads

    return logits, backprop


# ----------------------------------------------------------------------------------------------------------- training
class Adam:
    """Adam with decoupled weight decay (AdamW); updates the weights in place."""

    def __init__(self, weights, decay=1.0, beta1=0.9, beta2=0.99):
        self.decay, self.betas, self.steps = decay, (beta1, beta2), 0
        self.moments = {name: (xp.zeros_like(weight), xp.zeros_like(weight)) for name, weight in weights.items()}

    def step(self, weights, grads, lr):
        self.steps += 1
        beta1, beta2 = self.betas
        for name, weight in weights.items():
            grad, (mean, square) = grads[name], self.moments[name]
            mean += (1 - beta1) * (grad - mean)
            square += (1 - beta2) * (grad * grad - square)
            size = xp.sqrt(square / (1 - beta2**self.steps)) + 1e-8
            weight -= lr * (mean / (1 - beta1**self.steps) / size + self.decay * weight)


def schedule(done):
    """The factor of the learning rate: a linear warm-up in the first tenth of the training, then a cosine decay."""
    return min(1, 10 * done) * (1 + math.cos(math.pi * done)) / 2


def read_text():
    """The texts of Python's help(), as bytes; the last tenth is held out."""
    # some topics contain others: keep equal paragraphs once, or we would validate on what we train on
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
    text = np.frombuffer("\n\n".join(paragraphs).encode(), dtype=np.uint8).astype(int)
    return np.split(text, [len(text) * 9 // 10])


def windows(text, starts, seqlen):
    """Inputs, (len(starts), seqlen), and the byte after each of them, in one row."""
    window = xp.asarray(text[starts[:, None] + np.arange(seqlen + 1)])
    return window[:, :-1], window[:, 1:].ravel()


def paragraphs(text):
    """The text in pieces, each with the two line ends after it."""
    ends = np.flatnonzero((text[:-1] == ord("\n")) & (text[1:] == ord("\n"))) + 2
    return [piece for piece in np.split(text, ends) if len(piece) > 1]


def packed(documents, total, rng):
    """Random documents, one after the other: inputs, (1, total), the byte after each of them, in one row, and the mask
    that keeps documents apart. Rotary positions need not restart: only their differences matter."""
    chosen, lengths = [], []
    while sum(lengths) < total:
        document = documents[rng.integers(len(documents))]
        chosen.append(document[: total - sum(lengths) + 1])
        lengths.append(len(chosen[-1]) - 1)
    inputs, targets = (np.concatenate([x[at] for x in chosen]) for at in (slice(-1), slice(1, None)))
    return inputs[None], targets, na.Segments(np.cumsum([0, *lengths]))


def validate(weights, heads, text, seqlen):
    """Bits per byte of `text`, cut into windows that each start without context."""
    total, starts = 0.0, np.arange(0, len(text) - seqlen, seqlen)
    for some in np.array_split(starts, math.ceil(len(starts) / 16)):
        inputs, targets = windows(text, some, seqlen)
        logits, _ = transformer(inputs, weights, heads)
        loss, _ = cross_entropy(logits, targets)
        total += float(loss) * len(some)
    return total / len(starts) / math.log(2)


def bigram(train, text):
    """Bits per byte of `text` from a table of which byte follows which in `train`."""
    counts = np.bincount(256 * train[:-1] + train[1:], minlength=256 * 256).reshape(256, 256) + 0.1
    p = counts / counts.sum(axis=1, keepdims=True)
    return -np.log2(p[text[:-1], text[1:]]).mean()


def generate(weights, heads, prompt, count, seqlen, rng, temperature=0.8):
    text = list(prompt.encode())
    for _ in range(count):
        logits, _ = transformer(xp.asarray(text[-seqlen:])[None], weights, heads)
        noise = xp.asarray(rng.gumbel(size=256))  # argmax(logits + Gumbel noise) is a draw from softmax(logits)
        text.append(int((logits[-1] / temperature + noise).argmax()))
    return bytes(text).decode("ascii", "backslashreplace")


def plot(file, losses, validation, baseline):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(*zip(*validation), "o-", label="validation")
    axes.axhline(baseline, color="C3", linestyle="--", label="validation, table of byte pairs")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8.2))
    axes.legend()
    figure.savefig(file, dpi=150)


def parse_args():
    parser = argparse.ArgumentParser(
        description="Train a small transformer on Python's documentation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--seqlen", type=int, default=256, help="bytes in a sequence")
    parser.add_argument("--packed", action="store_true",
                        help="train on whole paragraphs, batch * seqlen bytes of them in a step; needs "
                             "--xp numpy, so far")
    parser.add_argument("--width", type=int, default=128, help="features of a byte; width / heads is even")
    parser.add_argument("--layers", type=int, default=4, help="blocks of attention and MLP")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout of attention")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches, dropout and the sample")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="where to compute: CPU or GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="dtype of products; weights and sums are float32")
    parser.add_argument("--attention", choices=["numbattn", "standard"], default="numbattn",
                        help="standard: the plain formula, for comparison; without dropout")
    parser.add_argument("--plot", metavar="FILE", help="save a plot of the losses, e.g. loss.png (needs matplotlib)")
    args = parser.parse_args()
    if args.dropout and args.attention == "standard":
        parser.error("--dropout needs --attention numbattn")
    if args.packed and (args.attention, args.xp) != ("numbattn", "numpy"):
        parser.error("--packed needs --attention numbattn and --xp numpy")
    return args


def main():
    global xp, attention_vjp, half
    args = parse_args()
    xp = importlib.import_module(args.xp)
    if args.dtype == "bfloat16":
        half = np.dtype(ml_dtypes.bfloat16)
    if args.attention == "standard":
        attention_vjp = standard_vjp
    rng = np.random.default_rng(args.seed)
    train, held_out = read_text()
    held_out = held_out[: (len(held_out) - 1) // args.seqlen * args.seqlen + 1]  # whole windows only
    documents = paragraphs(train)
    weights = init_weights(rng, args.width, args.layers)
    adam = Adam(weights)
    size = sum(weight.size for weight in weights.values())
    print(f"{size:,} weights, {len(train):,} bytes to train on, {len(held_out):,} held out")

    # nothing in a step waits for the GPU; now and then a loss is read
    losses, validation, speeds = xp.zeros(args.steps), [], []
    step_tokens, every = args.batch * args.seqlen, max(1, args.steps // 10)
    with tqdm(total=args.steps * step_tokens, unit=" tokens", unit_scale=True) as bar:
        for first in range(0, args.steps, every):
            validation.append((first, validate(weights, args.heads, held_out, args.seqlen)))
            steps, start = range(first, min(first + every, args.steps)), time.perf_counter()
            for step in steps:
                mask = dropouts = None
                if args.packed:
                    inputs, targets, mask = packed(documents, step_tokens, rng)
                else:
                    starts = rng.integers(len(train) - args.seqlen, size=args.batch)
                    inputs, targets = windows(train, starts, args.seqlen)
                if args.dropout:  # a new offset for each step and layer, or all would drop the same elements
                    offsets = range(step * args.layers, (step + 1) * args.layers)
                    dropouts = [na.Dropout(args.dropout, args.seed, offset) for offset in offsets]
                logits, transformer_back = transformer(inputs, weights, args.heads, mask, dropouts)
                loss, loss_back = cross_entropy(logits, targets)
                adam.step(weights, transformer_back(loss_back()), args.lr * schedule((step + 0.5) / args.steps))
                losses[step] = loss / math.log(2)
                if step % 10 == 9 or step == steps[-1]:
                    bar.set_postfix_str(f"{float(losses[max(0, step - 19) : step + 1].mean()):.2f} bits per byte")
                bar.update(step_tokens)
            float(losses[steps[-1]])  # waits for the GPU
            speeds.append(len(steps) * step_tokens / (time.perf_counter() - start))
    validation.append((args.steps, validate(weights, args.heads, held_out, args.seqlen)))
    baseline = bigram(train, held_out)

    print(f"validation: {validation[-1][1]:.3f} bits per byte; a table of byte pairs: {baseline:.3f}")
    print(f"training: {np.median(speeds):,.0f} tokens/s")
    print("-" * 80, generate(weights, args.heads, "The ", 400, args.seqlen, rng), sep="\n")
    if args.plot:
        plot(args.plot, losses.tolist(), validation, baseline)


if __name__ == "__main__":
    main()

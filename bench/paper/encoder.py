"""A transformer that classifies packed sequences, with its gradients written out, on NumPy's or CuPy's arrays.

A layer is a function that returns its output and `backprop`, which takes the gradient of the loss with respect to that
output and returns those with respect to the layer's array arguments. Activations are (tokens, width) float32 matrices;
only attention and the last layer, a mean over each sequence, know where sequences begin.
"""

import math
from typing import NamedTuple

import numpy as np
from peers import cupy

import numbattn as na


# ------------------------------------------------------------------------------------------------------------- layers
def module_of(x):
    return np if isinstance(x, np.ndarray) else cupy


def embed(tokens, table):
    # a product sums the rows of equal tokens, much faster than add.at
    return table[tokens], lambda dy: module_of(dy).eye(len(table), dtype=dy.dtype)[tokens].T @ dy


def linear(x, weight):
    return x @ weight, lambda dy: (dy @ weight.T, x.T @ dy)


def rmsnorm(x):
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    y = r * x
    return y, lambda dy: r * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def squared_relu(x):
    h = np.maximum(x, 0)
    return h * h, lambda dy: 2 * h * dy


def mean_pool(x, offsets):
    """The mean of each sequence, as a product with a matrix."""
    token, offsets = module_of(x).arange(len(x)), offsets[:, None]
    mean = ((offsets[:-1] <= token) & (token < offsets[1:])) / (offsets[1:] - offsets[:-1]).astype(x.dtype)
    return mean @ x, lambda dy: mean.T @ dy


def cross_entropy(logits, targets):
    """The mean in nats, and its gradient."""
    at_targets = module_of(logits).arange(len(logits)), targets
    logits = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    loss = (np.log(total[:, 0]) - logits[at_targets]).mean()
    p /= total
    p[at_targets] -= 1
    return loss, p / len(p)


def mlp(x, w_up, w_down):
    h, norm_back = rmsnorm(x)
    h, up_back = linear(h, w_up)
    h, relu_back = squared_relu(h)
    y, down_back = linear(h, w_down)

    def backprop(dy):
        dh, dw_down = down_back(dy)
        dh, dw_up = up_back(relu_back(dh))
        return dy + norm_back(dh), dw_up, dw_down

    return x + y, backprop


def attend(x, w_qkv, w_out, heads, position, attention, dtype):
    tokens, width = x.shape
    h, norm_back = rmsnorm(x)
    qkv, qkv_back = linear(h, w_qkv)
    qkv = qkv.astype(dtype).reshape(tokens, 3, heads, width // heads).transpose(1, 2, 0, 3)
    _, turn_back = na.rotary_vjp(qkv[:2], position, na.Rotary(), out=qkv[:2])
    o, attention_back = attention(*qkv)
    y, out_back = linear(o.swapaxes(0, 1).astype(x.dtype, order="C").reshape(tokens, width), w_out)

    def backprop(dy):
        do, dw_out = out_back(dy)
        do = do.astype(dtype).reshape(tokens, heads, width // heads).swapaxes(0, 1)
        dqkv = module_of(do).stack([*attention_back(do)])
        turn_back(dqkv[:2], out=dqkv[:2])
        dh, dw_qkv = qkv_back(dqkv.transpose(2, 0, 1, 3).astype(x.dtype, order="C").reshape(tokens, 3 * width))
        return dy + norm_back(dh), dw_qkv, dw_out

    return x + y, backprop


# -------------------------------------------------------------------------------------------------------------- model
class Size(NamedTuple):
    layers: int
    heads: int
    head_dim: int
    hidden: int  # features of an MLP

    @property
    def width(self):
        return self.heads * self.head_dim

    def shapes(self, symbols, classes):
        layers, width = self.layers, self.width
        return {"embed": (symbols, width), "qkv": (layers, width, 3 * width), "out": (layers, width, width),
                "up": (layers, width, self.hidden), "down": (layers, self.hidden, width),
                "head": (width, classes)}  # fmt: skip


def views(vector, shapes):
    """Arrays by name that share the vector."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), np.split(vector, ends[:-1]))}


def init_weights(size, shapes, seed=0):
    """A vector of all weights."""
    std = {"embed": 1, "qkv": size.width**-0.5, "up": size.width**-0.5, "head": 0,  # at first all classes are as likely
           "out": (2 * size.layers * size.width) ** -0.5, "down": (8 * size.layers * size.hidden) ** -0.5}  # fmt: skip
    rng = np.random.default_rng(seed)
    return np.concatenate([std[name] * rng.standard_normal(math.prod(shape), np.float32)
                           for name, shape in shapes.items()])  # fmt: skip


def sinusoids(longest, width):
    """(longest, width) features of positions."""
    angles = np.arange(longest)[:, None] * float(longest) ** -np.linspace(0, 1, width // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Encoder(NamedTuple):
    """encoder(tokens, offsets, position, attention, weights) returns the logits of each sequence, and a function that
    puts the gradients of weights, given that of the logits, into arrays like them."""

    size: Size
    features: np.ndarray  # (longest, width), of positions
    dtype: type           # of attention

    def __call__(self, tokens, offsets, position, attention, weights):
        size, backs, at = self.size, [], position.astype(np.float32)[None, None, :, None]
        x, embed_back = embed(tokens, weights["embed"])
        x += self.features[position]
        for i in range(size.layers):
            x, attend_back = attend(x, weights["qkv"][i], weights["out"][i], size.heads, at, attention, self.dtype)
            x, mlp_back = mlp(x, weights["up"][i], weights["down"][i])
            backs.append((attend_back, mlp_back))
        x, norm_back = rmsnorm(x)
        x, pool_back = mean_pool(x, offsets)
        logits, head_back = linear(x, weights["head"])

        def backprop(dlogits, grads):
            dx, grads["head"][:] = head_back(dlogits)
            dx = norm_back(pool_back(dx))
            for i in reversed(range(size.layers)):
                attend_back, mlp_back = backs.pop()
                dx, grads["up"][i], grads["down"][i] = mlp_back(dx)
                dx, grads["qkv"][i], grads["out"][i] = attend_back(dx)
            grads["embed"][:] = embed_back(dx)

        return logits, backprop

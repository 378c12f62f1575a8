"""A transformer with its gradients written out, on NumPy's or CuPy's arrays: what training.py and long_range.py train.

A layer is a function that returns its output and `backprop`, which takes the gradient of the loss with respect to that
output and returns those with respect to the layer's array arguments. Attention is passed in: attention(q, k, v) of
(batch, heads, seqlen, head_dim) arrays returns o and backprop(do), which returns dq, dk, dv.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

try:
    import cupy
except ImportError:
    cupy = None

LOSS_SCALE = 4096  # keeps gradients within float16's range; to Adam a factor makes no difference
WARM_UP = 30  # steps until the learning rate is reached


def module_of(x):
    return np if isinstance(x, np.ndarray) else cupy


def cast(x, dtype):
    return x.astype(dtype, copy=False)


# ---------------------------------------------------------------------------------------------------------- attention
def standard_attention(q, k, v, causal=False):
    """The paper's Algorithms 0 and 3, which store S and P, in place where possible."""
    xp, scale, seqlen = module_of(q), q.shape[-1] ** -0.5, q.shape[-2]
    P = product(scale * q, k.mT)
    if causal:
        P += xp.triu(xp.full((seqlen, seqlen), -np.inf, P.dtype), 1)
    P -= P.max(axis=-1, keepdims=True)
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    o = product(P, v)

    def backprop(do):
        dS = product(do, v.mT)
        dS -= (do * o).sum(axis=-1, keepdims=True)  # rowsum(P * dP), as Algorithm 4 has it
        dS *= P
        return scale * product(dS, k), product(dS.mT, scale * q), product(P.mT, do)

    return o, backprop


def product(a, b):
    """a @ b for stacks of matrices. CuPy 14.2 first converts float16 to float32, needlessly: cupy#10317."""
    if isinstance(a, np.ndarray) or a.dtype != np.float16:
        return a @ b
    from cupy.cuda import cublas, runtime

    c = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    *_, m, n, k = *c.shape, a.shape[-1]
    (a, *of_a), (b, *of_b) = _operand(a), _operand(b)
    one, zero = np.array([[1], [0]], np.float32)
    half = runtime.CUDA_R_16F
    cublas.gemmStridedBatchedEx(  # its matrices are stored column by column: it computes c^T = b^T a^T
        cupy.cuda.device.get_cublas_handle(), of_b[0], of_a[0], n, m, k, one.ctypes.data,
        b.data.ptr, half, of_b[1], k * n, a.data.ptr, half, of_a[1], m * k, zero.ctypes.data,
        c.data.ptr, half, n, m * n, c.size // (m * n), cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip
    return c


def _operand(x):
    """x in memory as a stack of contiguous matrices; whether these are transposed; the length of their rows."""
    if x.mT.flags.c_contiguous:
        return x, 1, x.shape[-2]
    return module_of(x).ascontiguousarray(x), 0, x.shape[-1]


# ------------------------------------------------------------------------------------------------------------- layers
# Activations are (tokens, width) matrices, tokens = batch * seqlen.
def embed(tokens, table):
    def backprop(dy):
        one_hot = module_of(dy).eye(len(table), dtype=dy.dtype)[tokens]
        return one_hot.T @ dy  # sums the rows of equal tokens, much faster than add.at

    return table[tokens], backprop


def linear(x, weight, dtype):
    """x @ weight, computed in the dtype, which may be narrower than x's."""
    wide, x, weight = x.dtype, cast(x, dtype), cast(weight, dtype)

    def backprop(dy):
        dy = cast(dy, dtype)
        return cast(dy @ weight.T, wide), cast(x.T @ dy, wide)

    return cast(x @ weight, wide), backprop


def rmsnorm(x):
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    y = r * x

    def backprop(dy):
        return r * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, backprop


def squared_relu(x):
    h = np.maximum(x, 0)

    def backprop(dy):
        return 2 * h * dy

    return h * h, backprop


def mean_pool(x, batch):
    """The mean of each sequence."""
    seqlen = len(x) // batch

    def backprop(dy):
        return (dy / seqlen).repeat(seqlen, axis=0)

    return x.reshape(batch, seqlen, -1).mean(axis=1), backprop


def cross_entropy(logits, targets, scale=1):
    """The mean cross-entropy in nats; backprop() returns its gradient times the scale."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    at_targets = module_of(p).arange(len(p)), targets
    loss = (np.log(total[:, 0]) - logits[at_targets]).mean()

    def backprop():
        dlogits = p / total
        dlogits[at_targets] -= 1
        return dlogits * (scale / len(p))

    return loss, backprop


def rotations(xp, coordinates, head_dim, dtype=np.complex64):
    """Rotary positions of (axes, seqlen) coordinates, a text's or an image's: complex numbers of length 1, one for each
    pair of features, which the axes share. The slowest ones turn by a radian over a whole axis."""
    axes, seqlen = coordinates.shape
    frequencies = (1.0 + np.ptp(coordinates, axis=1).max()) ** -np.linspace(0, 1, head_dim // 2 // axes)
    angles = coordinates.T[:, :, None] * frequencies
    return xp.asarray(np.exp(1j * angles).reshape(seqlen, 1, 1, head_dim // 2), dtype)


def rotate(qkv, by):
    """Rotary positions, in place: pairs of features of q and k are complex numbers, turned by their position."""
    qk = qkv.view(by.dtype)[:, :, :2]
    qk *= by


# -------------------------------------------------------------------------------------------------------------- model
class Size(NamedTuple):
    layers: int
    heads: int
    head_dim: int

    @property
    def width(self):
        return self.heads * self.head_dim


def init_weights(xp, size, symbols, outputs, dtype=np.float32, seed=0):
    """Weight matrices by name; those of the blocks have a leading axis of layers."""
    rng, (layers, width) = np.random.default_rng(seed), (size.layers, size.width)

    def normal(*shape, std):
        return xp.asarray(std * rng.standard_normal(shape, np.float32), dtype)

    std = width**-0.5
    small = std / (2 * layers) ** 0.5  # so that the sum over all blocks keeps its size
    return {
        "embed": normal(symbols, width, std=1),
        "qkv": normal(layers, width, 3 * width, std=std),
        "out": normal(layers, width, width, std=small),
        "up": normal(layers, width, 4 * width, std=std),
        "down": normal(layers, 4 * width, width, std=small / 2),
        "head": normal(width, outputs, std=0),  # at first all outputs are equally likely
    }


class Transformer(NamedTuple):
    """model(tokens, weights) returns logits and a function from their gradient to those of the weights. (batch, seqlen)
    tokens have logits (batch * seqlen, outputs) of the token after each, or (batch, outputs) of each sequence's class
    if the model is pooled."""

    attention: Callable
    heads: int
    rotation: Any
    pooled: bool = False
    dtype: Any = np.float32  # of products

    def __call__(self, tokens, weights):
        layers, backs = range(len(weights["qkv"])), []
        x, embed_back = embed(tokens.ravel(), weights["embed"])
        for i in layers:
            y, attend_back = self.attend(x, weights["qkv"][i], weights["out"][i], len(tokens))
            x = x + y
            y, mlp_back = self.mlp(x, weights["up"][i], weights["down"][i])
            x = x + y
            backs.append((attend_back, mlp_back))
        x, norm_back = rmsnorm(x)
        x, pool_back = mean_pool(x, len(tokens)) if self.pooled else (x, lambda dy: dy)
        logits, head_back = linear(x, weights["head"], self.dtype)

        def backprop(dlogits):
            grads = {name: module_of(weight).empty_like(weight) for name, weight in weights.items()}
            dx, grads["head"] = head_back(dlogits)
            dx = norm_back(pool_back(dx))
            for i in reversed(layers):
                attend_back, mlp_back = backs.pop()
                dy, grads["up"][i], grads["down"][i] = mlp_back(dx)
                dx += dy
                dy, grads["qkv"][i], grads["out"][i] = attend_back(dx)
                dx += dy
            grads["embed"] = embed_back(dx)
            return grads

        return logits, backprop

    def attend(self, x, w_qkv, w_out, batch):
        tokens, width = x.shape
        shape = batch, tokens // batch, 3, self.heads, width // self.heads
        x, norm_back = rmsnorm(x)
        qkv, qkv_back = linear(x, w_qkv, self.dtype)
        qkv = qkv.reshape(shape)
        rotate(qkv, self.rotation)
        o, attention_back = self.attention(*cast(qkv, self.dtype).transpose(2, 0, 3, 1, 4))
        y, out_back = linear(cast(o.swapaxes(1, 2).reshape(tokens, width), x.dtype), w_out, self.dtype)

        def backprop(dy):
            do, dw_out = out_back(dy)
            do = cast(do, self.dtype).reshape(shape[:2] + shape[3:]).swapaxes(1, 2)
            dqkv = module_of(dy).stack([cast(d.swapaxes(1, 2), dy.dtype) for d in attention_back(do)], axis=2)
            rotate(dqkv, self.rotation.conj())  # gradients are turned back
            dx, dw_qkv = qkv_back(dqkv.reshape(tokens, 3 * width))
            return norm_back(dx), dw_qkv, dw_out

        return y, backprop

    def mlp(self, x, w_up, w_down):
        x, norm_back = rmsnorm(x)
        h, up_back = linear(x, w_up, self.dtype)
        h, relu_back = squared_relu(h)
        y, down_back = linear(h, w_down, self.dtype)

        def backprop(dy):
            dh, dw_down = down_back(dy)
            dx, dw_up = up_back(relu_back(dh))
            return norm_back(dx), dw_up, dw_down

        return y, backprop


# ----------------------------------------------------------------------------------------------------------- training
class Adam:
    """Adam with decoupled weight decay (AdamW); updates the weights in place."""

    def __init__(self, weights, lr, decay=0.1, betas=(0.9, 0.98)):
        self.weights, self.lr, self.decay, self.betas, self.steps = weights, lr, decay, betas, 0
        self.moments = {name: (0 * weight, 0 * weight) for name, weight in weights.items()}

    def step(self, grads):
        self.steps += 1
        lr = self.lr * min(1, self.steps / WARM_UP)
        unbias, root = (1 - beta**self.steps for beta in self.betas)
        for name, weight in self.weights.items():
            grad, (mean, square) = grads[name], self.moments[name]
            for moment, beta, x in zip((mean, square), self.betas, (grad, grad * grad)):
                moment *= beta
                moment += (1 - beta) * x
            weight *= 1 - lr * self.decay
            weight -= lr / unbias * mean / (np.sqrt(square / root) + 1e-8)


def train(model, adam, tokens, targets):
    """Take a step; returns the loss in bits."""
    logits, backprop = model(tokens, adam.weights)
    loss, loss_back = cross_entropy(logits, targets, LOSS_SCALE)
    adam.step(backprop(loss_back()))
    return loss / math.log(2)

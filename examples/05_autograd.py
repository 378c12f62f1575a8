"""Attention in HIPS autograd: a kernel regression that learns its metric.

    python examples/05_autograd.py

The estimate at x is the mean of the observed y, weighted by Gaussians of the distance to their x. That is attention:
-|a - b|^2 / 2 = a.b - |b|^2 / 2 - |a|^2 / 2, and the last term, the same for all keys, drops out of the softmax.
"""

import autograd.numpy as np
from autograd import grad
from autograd.misc.optimizers import adam

from numbattn.interop.autograd import attention


def formula(q, k, v, scale):
    P = np.exp(scale * q @ k.T)
    return P / np.sum(P, axis=-1, keepdims=True) @ v


def estimate(attend, log_w, x, observed_x, observed_y):
    a, b = x * np.exp(log_w), observed_x * np.exp(log_w)
    q = np.hstack([a, np.ones((len(a), 1))])
    k = np.hstack([b, -np.sum(b * b, axis=1, keepdims=True) / 2])
    return attend(q, k, observed_y, scale=1.0)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (3000, 6))
    y = np.sin(3 * x[:, :1]) * x[:, 1:2] + 0.1 * rng.standard_normal((3000, 1))  # two of the six features matter

    def loss(log_w, step=None, attend=attention):  # adam passes the step
        return np.mean((estimate(attend, log_w, x[:1000], x[1000:], y[1000:]) - y[:1000]) ** 2)

    start = np.zeros(6)
    error = abs(grad(loss)(start) - grad(loss)(start, attend=formula)).max()
    print(f"largest difference from the gradient of the formula: {error:.1e}")
    found = adam(grad(loss), start, num_iters=100, step_size=0.05)
    print(f"mean squared error: {loss(start):.3f} at first, {loss(found):.3f} after 100 steps")
    print(f"weights of the features: {np.exp(found).round(2)}")

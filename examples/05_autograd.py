"""Attention as a primitive of HIPS autograd, in a kernel regression that learns its metric.

    python examples/05_autograd.py

The estimate at x is the mean of the observed y, weighted by Gaussians of the distance to their x. That is attention:
-|a - b|^2 / 2 = a.b - |b|^2 / 2 - |a|^2 / 2, and the last term, the same for all keys, drops out of the softmax.
"""

import autograd.numpy as np
from autograd import grad
from autograd.extend import defvjp_argnums, primitive
from autograd.misc.optimizers import adam

import numbattn as na


@primitive
def attention(q, k, v):
    """o, and lse, which has a gradient, too."""
    o, saved = na.attention_forward(q, k, v, scale=1.0)
    return o, saved.lse


@primitive  # it has no derivative: autograd raises a NotImplementedError if a second one is asked for
def backward(do, dlse, *saved):
    return tuple(na.attention_backward(do, na.Saved.of(*saved, scale=1.0), dlse=dlse))


def attention_vjp(argnums, ans, args, kwargs):
    def vjp(gradients):
        dq_dk_dv = backward(*gradients, *args, *ans)
        return [dq_dk_dv[i] for i in argnums]

    return vjp


defvjp_argnums(attention, attention_vjp)  # one backward pass for all three; defvjp would take a function for each


def formula(q, k, v):
    S = q @ k.T
    lse = np.log(np.sum(np.exp(S), axis=-1))
    return np.exp(S - lse[:, None]) @ v, lse


def estimate(attend, log_w, x, observed_x, observed_y):
    a, b = x * np.exp(log_w), observed_x * np.exp(log_w)
    q = np.hstack([a, np.ones((len(a), 1))])
    k = np.hstack([b, -np.sum(b * b, axis=1, keepdims=True) / 2])
    return attend(q, k, observed_y)[0]


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

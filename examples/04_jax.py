"""Attention in JAX: a bias of pairs is learned from what another attention returns.

    pip install 'numbattn[jax]' && python examples/04_jax.py

`numbattn.interop.jax.attention` works under `jit`, `grad`, `vmap` and most of what they are combined to: its module
says what. Arrays in scores have gradients, and scores are pytrees, as weights are.
"""

import jax
import jax.numpy as jnp

import numbattn as na
from numbattn.interop.jax import attention


def attend(bias, q, k, v):
    """Causal attention of one sequence, (heads, seqlen, head_dim)."""
    return attention(q, k, v, causal=True, score=bias)


def loss(bias, qkv, wanted):
    """Of a batch: vmap gives `attend` one more axis, and numbattn computes all sequences at once."""
    return ((jax.vmap(attend, (None, 0, 0, 0))(bias, *qkv) - wanted) ** 2).mean()


def formula(q, k, v):
    S = q @ k.mT * q.shape[-1] ** -0.5
    return jax.nn.softmax(S, where=jnp.tri(*S.shape[-2:], dtype=bool)) @ v


def hessian_times(function, q, k, v, t):
    """The Hessian of a sum of squares, by q, times t."""
    return jax.jvp(jax.grad(lambda q: (function(q, k, v) ** 2).sum()), (q,), (t,))[1]


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")  # for the formula: float32, not TF32, on a GPU
    *qkv, t = jax.random.normal(jax.random.key(0), (4, 32, 4, 30, 32))
    products = [hessian_times(function, *qkv, t) for function in (lambda *qkv: attention(*qkv, causal=True), formula)]
    print(f"Hessian times a vector: largest difference from the formula {abs(products[0] - products[1]).max():.1e}")

    hidden = na.Bias(jax.random.normal(jax.random.key(1), (4, 30, 30)))
    wanted, bias = jax.vmap(attend, (None, 0, 0, 0))(hidden, *qkv), jax.tree.map(jnp.zeros_like, hidden)
    gradient = jax.jit(jax.value_and_grad(loss))
    for number in range(301):
        error, grad = gradient(bias, qkv, wanted)
        bias = jax.tree.map(lambda x, dx: x - 500 * dx, bias, grad)
        if number % 100 == 0:
            print(f"step {number}: mean squared error {error:.1e}")

"""Attention with gradients in JAX: callbacks to the host, with their derivative given by `jax.custom_vjp`.

    pip install jax && python examples/04_jax.py

`attention` works under `jit`, `grad` and `vmap` and all combinations of them, except for second derivatives: a
callback has none, and JAX says so. On a GPU, JAX copies its arrays to the host and back.
"""

import jax
import jax.numpy as jnp
import numpy as np

import numbattn as na

# or a callback may wait forever for its arguments: https://github.com/jax-ml/jax/issues/24255
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_matmul_precision", "highest")  # for the formula: float32, not TF32, on a GPU


@jax.custom_vjp
def attention(q, k, v):
    """Causal attention of arrays (..., heads, seqlen, head_dim) with equal batch axes."""
    return forward(q, k, v)[0]


def forward(q, k, v):
    if len({(x.ndim, *x.shape[:-3]) for x in (q, k, v)}) > 1:  # vmap would put its axis in different places
        raise ValueError(f"q, k and v: got the shapes {q.shape}, {k.shape} and {v.shape}, expected equal batch axes")
    o = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], jnp.promote_types(q.dtype, jnp.float32))
    o, lse = jax.pure_callback(forward_on_host, (o, lse), q, k, v, vmap_method="broadcast_all")
    return o, (q, k, v, o, lse)  # JAX keeps arrays between the passes, not objects


def backward(residuals, do):
    like_qkv = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals[:3])
    return jax.pure_callback(backward_on_host, like_qkv, do, *residuals, vmap_method="broadcast_all")


attention.defvjp(forward, backward)


def forward_on_host(*qkv):
    o, saved = na.attention_forward(*map(np.asarray, qkv), causal=True)
    return o, saved.lse


def backward_on_host(*arrays):
    do, *residuals = map(np.asarray, arrays)
    return na.attention_backward(do, na.Saved.of(*residuals, causal=True))


def formula(q, k, v):
    S = q @ k.mT * q.shape[-1] ** -0.5
    return jax.nn.softmax(S, where=jnp.tri(*S.shape[-2:], dtype=bool)) @ v


if __name__ == "__main__":
    q, k, v, do = jax.random.normal(jax.random.key(0), (4, 2, 8, 500, 64))

    def loss(attend, *qkv):
        return (attend(*qkv) * do).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    for name, x, y in zip(("dq", "dk", "dv"), gradients(attention, q, k, v), gradients(formula, q, k, v)):
        error = abs(x - y).max()
        print(f"{name} {x.shape} {x.dtype}, largest difference from the gradient of the formula: {error:.1e}")

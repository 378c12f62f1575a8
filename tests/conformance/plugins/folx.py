"""A plugin of pytest for folx' tests of its attention, in which numbattn is what Pallas is to folx.

What had to be bent: masked queries average all values, and derivatives by masked coordinates are zero. Left out are
Laplacians by edges, a bias that depends on the coordinates: arrays in scores are constants there.
"""

import folx
import jax.numpy as jnp
from folx.api import FwdJacobian, FwdLaplArray
from folx.experimental.pallas import attention as of_folx
from folx.experimental.pallas.attention import forward_laplacian

import numbattn as na
from numbattn.interop.jax import attention

LEFT_OUT = "test_mhsea_forward_laplacian"


def by_numbattn(q, k, v, mask, score=None):
    """What folx asks Pallas for, of (batch, sequence, heads, features)."""
    q, k, v = (x.swapaxes(1, 2) for x in (jnp.where(mask[:, :, None, None], q, 0), k, v))
    visible = mask[:, None, None, :] | ~mask[:, None, :, None]
    return attention(q, k, v, mask=visible, scale=1.0, score=score).swapaxes(1, 2)


def mhsa(q, k, v, mask, input_mask, kernel, interpret):
    if kernel != "pallas":
        return others_mhsa(q, k, v, mask, input_mask, kernel, interpret)
    return by_numbattn(q, k, v, mask)


def mhsea(q, k, edges, v, mask, input_mask, kernel, interpret):
    if kernel != "pallas":
        return others_mhsea(q, k, edges, v, mask, input_mask, kernel, interpret)
    return by_numbattn(q, k, v, mask, na.Bias(edges.swapaxes(1, 2)))


def mhsa_forward_laplacian(args, kwargs, sparsity_threshold):
    if kwargs["kernel"] != "pallas":
        return others_laplacian(args, kwargs, sparsity_threshold)
    *qkv, mask, input_mask = args
    given = [FwdLaplArray(x.x, FwdJacobian(jnp.where(input_mask[..., None, None, None], x.dense_jacobian, 0)),
                          x.laplacian) for x in qkv]  # fmt: skip
    return folx.forward_laplacian(lambda q, k, v: by_numbattn(q, k, v, mask), sparsity_threshold)(*given)


others_mhsa, others_mhsea = of_folx.custom_vjp_mhsa, of_folx.custom_vjp_mhsea
others_laplacian = forward_laplacian.mhsa_forward_laplacian
of_folx.custom_vjp_mhsa, of_folx.custom_vjp_mhsea = mhsa, mhsea
forward_laplacian.mhsa_forward_laplacian = mhsa_forward_laplacian


def pytest_collection_modifyitems(config, items):
    left_out = [x for x in items if x.name.startswith(LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in left_out]

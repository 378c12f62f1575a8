"""A plugin of pytest for JAX's tests of dot_product_attention, in which numbattn is what cuDNN is to JAX.

The tests are told that there is a GPU that cuDNN runs on, since they compare cuDNN with JAX's own way there alone, and
that its call is in what XLA compiles. JAX's own way stops gradients by lse: so does this.
"""

import jax
from jax._src import test_util
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.nn import functions

import numbattn as na
from numbattn.interop.jax import attention
from numbattn.masks import as_mask

CAUSAL = MaskType.CAUSAL, MaskType.PADDING_CAUSAL


def by_numbattn(q, k, v, bias=None, mask=None, q_seqlen=None, kv_seqlen=None, *,
                scale, mask_type, sliding_window_length, return_residual):  # fmt: skip
    """What jax.nn asks cuDNN for, of (batch, sequence, heads, features)."""
    masks = [] if mask is None else [mask]
    if mask_type in CAUSAL:
        masks.append(na.Causal(0))
    if sliding_window_length is not None:
        masks.append(na.Window(sliding_window_length - 1, 0, 0))
    if q_seqlen is not None:
        masks.append(na.Lengths(kv_seqlen[:, None], q_seqlen[:, None]))
    visible = None
    for one in masks:
        visible = one if visible is None else as_mask(one) & visible
    score = None if bias is None else na.Bias(bias)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o, lse = attention(q, k, v, mask=visible, scale=scale, score=score, return_lse=True)
    o = o.swapaxes(1, 2)
    return (o, jax.lax.stop_gradient(lse)) if return_residual else o


functions.cudnn_dot_product_attention = by_numbattn
test_util.is_device_cuda = test_util.is_cuda_compute_capability_at_least = lambda *_: True
test_util.is_cuda_version_at_least = lambda *_: False  # of CUDA 13 the tests say that cuDNN has no plans


def pytest_itemcollected(item):
    item.module._check_cudnn_backend = lambda *_, **__: True

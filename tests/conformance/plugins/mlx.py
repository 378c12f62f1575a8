"""A plugin of pytest for MLX's test_fast_sdpa.py: its fast attention is numbattn's, on NumPy arrays.

The tests run that are for a GPU alone, since this is as fast. What had to be bent: sinks of another dtype than q, or
with other axes than the heads, are refused here, since MLX refuses them and numbattn does not.

Left out are masks of 32 heads x 512 x 66048, whose reference takes 4 GB, and what environment variables do to MLX's
kernels.
"""

import ml_dtypes
import mlx.core as mx
import numpy as np

import numbattn as na

LEFT_OUT = "long_masked_sequence", "env_override"


def scaled_dot_product_attention(q, k, v, *, scale, mask=None, sinks=None):
    if sinks is not None and (sinks.dtype, sinks.ndim) != (q.dtype, 1):
        raise ValueError("sinks: one for each head, of the dtype of q")
    options = {"scale": scale, "mask": None, "score": [] if sinks is None else [na.Sink(to_numpy(sinks))]}
    if isinstance(mask, str):
        options["mask"] = na.Causal()
    elif mask is not None and mask.dtype == mx.bool_:
        options["mask"] = np.atleast_2d(to_numpy(mask))
    elif mask is not None:
        options["score"].append(na.Bias(np.atleast_2d(to_numpy(mask)), gradient=False))

    @mx.custom_function
    def attention(*qkv):
        return to_mlx(na.attention(*map(to_numpy, qkv), **options))

    @attention.vjp
    def backward(qkv, do, _):
        _, backprop = na.attention_vjp(*map(to_numpy, qkv), **options)
        return tuple(map(to_mlx, tuple(backprop(to_numpy(do)))[:3]))

    return attention(q, k, v)


def to_numpy(x):
    if x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(x)


def to_mlx(x):
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x)


mx.fast.scaled_dot_product_attention = scaled_dot_product_attention
mx.is_available = lambda _: True


def pytest_collection_modifyitems(config, items):
    left_out = [x for x in items if any(name in x.name for name in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in left_out]

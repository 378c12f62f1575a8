"""Attention with gradients in PyTorch: `torch.autograd.Function`s that share memory through DLPack.

    pip install torch && python examples/07_torch.py

`torch.func.grad` and `vmap` work, also combined, for per-sample gradients. Second derivatives and forward mode
raise a NotImplementedError.

CPU tensors are passed as NumPy arrays, GPU tensors as CuPy arrays, with both libraries on their default streams.
Dtypes are float16, float32 and float64: NumPy takes no bfloat16 through DLPack.
"""

from importlib import import_module
from importlib.util import find_spec

import torch

import numbattn as na


class Batched(torch.autograd.Function):
    """A function of tensors with equal numbers of axes: vmap's axis is one more batch axis of all of them."""

    @classmethod
    def vmap(cls, info, in_dims, *tensors):
        def batched(x, axis):
            return x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0)

        return cls.apply(*map(batched, tensors, in_dims)), 0


class Forward(Batched):
    """q, k, v -> o, lse."""

    @staticmethod
    def forward(*qkv):
        o, saved = na.attention_forward(*map(array, qkv), causal=True)
        return torch.from_dlpack(o), torch.from_dlpack(saved.lse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx, *gradients):
        return Backward.apply(*gradients, *ctx.saved_tensors)


class Backward(Batched):
    """do, dlse and what was saved -> dq, dk, dv: a function of its own, so that derivatives of these raise an error."""

    @staticmethod
    def forward(do, dlse, *saved):
        saved = na.Saved.of(*map(array, saved), causal=True)
        return tuple(map(torch.from_dlpack, na.attention_backward(array(do), saved, dlse=array(dlse))))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save nothing."""

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("numbattn's attention has no second derivatives")


class Attention(Forward):
    """Causal attention, `Attention.apply(q, k, v)`; axes broadcast as in numbattn."""

    @staticmethod
    def apply(*qkv):
        ndim = max(x.ndim for x in qkv)
        o, _ = Forward.apply(*(x[(None,) * (ndim - x.ndim)] for x in qkv))
        return o


def array(tensor):
    """A tensor's memory as an array."""
    xp = import_module("cupy" if tensor.is_cuda else "numpy")
    return xp.from_dlpack(tensor.detach())


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() and find_spec("cupy") else "cpu"
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 8, 500, 64, device=device, requires_grad=True)
    do = torch.randn(2, 8, 500, 64, device=device)

    (gradients,) = torch.autograd.grad(Attention.apply(*qkv), qkv, do)
    o = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    (expected,) = torch.autograd.grad(o, qkv, do)
    for name, x, y in zip(("dq", "dk", "dv"), gradients, expected):
        error = abs(x - y).max()
        print(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}, largest difference from torch's own: {error:.1e}")

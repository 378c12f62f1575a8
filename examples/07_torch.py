"""Attention with gradients in PyTorch: a `torch.autograd.Function` that shares memory through DLPack.

    pip install torch && python examples/07_torch.py

Tensors on the CPU are passed as NumPy arrays, those on a GPU as CuPy arrays, with both libraries on their default
streams. They are float16, float32 or float64: NumPy takes no bfloat16 through DLPack.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch.autograd.function import once_differentiable

import numbattn as na


class Attention(torch.autograd.Function):
    """Causal attention: `Attention.apply(q, k, v)`."""

    @staticmethod
    def forward(ctx, q, k, v):
        o, saved = na.attention_forward(*map(array, (q, k, v)), causal=True)
        o, lse = map(torch.from_dlpack, (o, saved.lse))
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        saved = na.Saved.of(*map(array, ctx.saved_tensors), causal=True)
        return tuple(map(torch.from_dlpack, na.attention_backward(array(do), saved)))


def array(tensor):
    """The same memory as an array."""
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

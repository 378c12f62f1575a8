"""Attention in PyTorch: `numbattn.interop.torch`, on tensors of a CPU or a GPU, compared with PyTorch's own.

    pip install torch && python examples/07_torch.py

The bias is a tensor, and gets its gradient. Then derivatives that PyTorch's own kernels do not have: the gradient of a
penalty on gradients, the same for each sample by `torch.func`, and a tangent.
"""

from importlib.util import find_spec

import torch
from torch import func

import numbattn as na
from numbattn.interop.torch import attention

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() and find_spec("cupy") else "cpu"
q, k, v = torch.randn(3, 2, 8, 500, 64, device=device).requires_grad_().unbind()
bias = torch.randn(8, 500, 500, device=device, requires_grad=True)
do = torch.randn_like(q)

gradients = torch.autograd.grad(attention(q, k, v, score=na.Bias(bias)), (q, k, v, bias), do)
o = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
for name, x, y in zip(("dq", "dk", "dv", "dbias"), gradients, torch.autograd.grad(o, (q, k, v, bias), do)):
    error = (x - y).abs().max()
    print(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}, largest difference from torch's own: {error:.1e}")


def penalty(q, k, v):
    """How fast the output's mean square changes with the queries."""
    return func.grad(lambda q: attention(q, k, v, causal=True).square().mean())(q).square().sum()


q, k, v = (x.detach() for x in (q, k, v))
each = func.vmap(func.grad(penalty, argnums=1))(q, k, v)
print(f"gradients of a penalty for each sample: {tuple(each.shape)}")
o, to = func.jvp(lambda q: attention(q, k, v, causal=True), (q,), (torch.randn_like(q),))
print(f"tangent of the output: {tuple(to.shape)}")

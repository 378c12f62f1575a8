"""Attention of PyTorch's tensors, with first and second derivatives.

`attention` works under autograd and `torch.func`, alone and composed: in reverse and in forward mode; reverse over
reverse, forward over reverse and reverse over forward, as in `torch.func.hessian`; and `vmap` around all of these.
Forward over forward, third derivatives and those by the arrays of a `Score` raise a NotImplementedError.

CPU tensors are passed as NumPy arrays, GPU tensors as CuPy arrays, without a copy. On a GPU all work is on torch's
current stream and all memory of torch's allocator.

`torch.compile` takes `attention` as one operation, without a break of the graph and with its gradients. Masks, scores
and dropout are constants there: another one compiles anew, and arrays in them have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch

from ..checks import Array, flag, words_for
from ..dropout import Dropout
from ..masks import Mask
from ..problem import refuse_cache
from ..scores import Scores
from . import torch_ops
from .options import taken_apart
from .torch_passes import Call, Forward


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """`numbattn.attention` of torch's tensors."""
    if torch.compiler.is_compiling():
        number = torch_ops.kept(causal, mask, scale, dropout, score, deterministic=deterministic)
        o, lse = torch_ops.forward(number, *autocast(q, k, v))
        return (o, lse) if return_lse else o
    for name, x in zip("qkv", (q, k, v)):
        if not isinstance(x, torch.Tensor):
            refuse_cache(x)
            raise TypeError(f"{name}: got {words_for(x)}, expected a torch.Tensor")
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name}: got a tensor on the device {x.device}, expected one of a CPU or of CUDA")
    flag("return_lse", return_lse)
    flag("deterministic", deterministic)
    if mask is None and score is None and type(scale) in (float, NoneType):
        call, tensors = call_without_arrays(causal, scale, dropout, deterministic), []
    else:
        call, tensors = Call.of(*taken_apart(causal, mask, scale, dropout, score), deterministic)
    o, lse = Forward.run(call, *autocast(q, k, v), *tensors)
    return (o, lse) if return_lse else o


def autocast(*qkv: Any) -> Sequence[Any]:
    """The same in the dtype of torch.autocast, if that is on."""
    device = qkv[0].device.type
    if not torch.is_autocast_enabled(device):
        return qkv
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in qkv]


@lru_cache(typed=True)
def call_without_arrays(causal: bool, scale: float | None, dropout: Dropout | None, deterministic: bool) -> Call:
    return Call(taken_apart(causal, None, scale, dropout)[0], (), deterministic)

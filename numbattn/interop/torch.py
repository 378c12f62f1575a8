"""Attention of PyTorch's tensors, with first and second derivatives.

`attention` works under autograd and `torch.func`, alone and composed: in reverse and in forward mode; reverse over
reverse, forward over reverse and reverse over forward, as in `torch.func.hessian`; and `vmap` around all of these.
Forward over forward, third derivatives and those by the arrays of a `Score` raise a NotImplementedError.

CPU tensors are passed as NumPy arrays, GPU tensors as CuPy arrays, without a copy. On a GPU all work is on torch's
current stream and all memory of torch's allocator.

`torch.compile` takes `attention` with its gradients as one operator, without a break of the graph, if the mask is None,
a boolean tensor or a constant, such as ``Window(100, 0) & First(4)``, and the score None or a Softcap. With anything else
the graph breaks, and attention is computed as without it. There are no second derivatives in compiled graphs, says torch.
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
    options = causal, mask, scale, dropout, score
    if torch.compiler.is_compiling():
        o, lse = compiled(q, k, v, options, deterministic)
    else:
        o, lse = eager(q, k, v, options, deterministic)
    return (o, lse) if flag("return_lse", return_lse) else o


def eager(q: Any, k: Any, v: Any, options: tuple[Any, ...], deterministic: bool) -> tuple[Any, Any]:
    """o and lse."""
    for name, x in zip("qkv", (q, k, v)):
        if not isinstance(x, torch.Tensor):
            refuse_cache(x)
            raise TypeError(f"{name}: got {words_for(x)}, expected a torch.Tensor")
        if not (x.is_cpu or x.is_cuda):
            raise TypeError(f"{name}: got a tensor on the device {x.device}, expected one of a CPU or of CUDA")
    flag("deterministic", deterministic)
    causal, mask, scale, dropout, score = options
    if mask is None and score is None and type(scale) in (float, NoneType):
        call, tensors = call_without_arrays(causal, scale, dropout, deterministic), []
    else:
        call, tensors = Call.of(*taken_apart(*options), deterministic)
    return Forward.run(call, *autocast(q, k, v), *tensors)


def compiled(q: Any, k: Any, v: Any, options: tuple[Any, ...], deterministic: bool) -> tuple[Any, Any]:
    """The same where torch.compile traces it."""
    causal, mask, scale, dropout, score = options
    visible = mask if isinstance(mask, torch.Tensor) else None
    mask = None if visible is not None else mask
    if not torch_ops.are_constants(mask, dropout, score):
        return outside(q, k, v, options, deterministic)
    number = torch_ops.kept(causal, mask, scale, dropout, score, deterministic, visible is not None)
    return torch_ops.forward(number, visible, *autocast(q, k, v))


outside = torch.compiler.disable(
    eager, reason="numbattn's dropout, and masks and scores with arrays, are not part of compiled graphs"
)


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

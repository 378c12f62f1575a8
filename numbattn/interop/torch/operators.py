"""Attention and its gradients as torch operators, for torch.compile, which does not trace them but knows the shapes of
the results. Operators take tensors and numbers: a call's options are kept here under a number."""

from __future__ import annotations

from typing import Any

import torch

from ...masks import Causal, First, Window
from ...scores.softcap import Softcap
from ..options import taken_apart
from .passes import Backward, Call, Forward

CALLS: list[tuple[Call, list[torch.Tensor]]] = []  # each with the tensors in its mask
CONSTANTS = Causal, Window, First, type(Causal() & First(1)), type(Causal() | First(1)), Softcap

try:
    from torch._library.opaque_object import register_custom_class
except ImportError:  # before torch 2.12
    CONSTANTS = ()
for kind in CONSTANTS:  # which compiled code may make; guards compare their values
    kind.__fx_repr__ = lambda value: (repr(value), {kind.__name__: kind for kind in CONSTANTS})
    register_custom_class(kind, typ="constant")


def are_constants(*options: Any) -> bool:
    """Whether torch.compile can treat everything that is not None as a constant; not Dropout, whose offset changes."""
    return all(x is None or isinstance(x, CONSTANTS) for x in options)


def kept(causal: Any, mask: Any, scale: Any, dropout: Any, score: Any, deterministic: Any, is_dense: bool) -> int:
    """The number of a call, when it is compiled. is_dense: whether the mask is a tensor, an argument of operators."""
    mask = torch.ones(1, 1, dtype=torch.bool) if is_dense else mask
    call, tensors = Call.of(*taken_apart(causal, mask, scale, dropout, score), deterministic)
    CALLS.append((call, tensors))
    return len(CALLS) - 1


kept._dynamo_marked_constant = True  # all that torch.compiler.assume_constant_result does after importing the compiler


@torch.library.custom_op("numbattn::forward", mutates_args=())
def forward(
    number: int, visible: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    call, tensors = call_of(number, visible)
    o, lse = Forward.forward(call, q, k, v, *tensors)
    return o, lse


@torch.library.custom_op("numbattn::backward", mutates_args=())
def backward(
    number: int,
    visible: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call, tensors = call_of(number, visible)
    dq, dk, dv, *_ = Backward.forward(call, q, k, v, *tensors, o, lse, do, dlse)
    return dq, dk, dv


@forward.register_fake
def _(number: int, visible: Any, q: Any, k: Any, v: Any) -> Any:
    rows = *batch_of(q, k, v), q.shape[-2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=dtype)


@backward.register_fake
def _(number: int, visible: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, dlse: Any) -> Any:
    return tuple([x.new_empty(x.shape) for x in (q, k, v)])


def call_of(number: int, visible: torch.Tensor | None) -> tuple[Call, list[torch.Tensor]]:
    """A call and the tensors in its mask."""
    call, tensors = CALLS[number]
    return call, tensors if visible is None else [visible]


def batch_of(*qkv: Any) -> tuple[Any, ...]:
    """The batch axes of o, the last one being the heads."""
    if all(x.ndim == 2 for x in qkv):
        return ()
    heads, heads_k, heads_v = (x.shape[-3] if x.ndim > 2 else 1 for x in qkv)
    heads_k = heads_v if heads_k == 1 else heads_k
    return *torch.broadcast_shapes(*[x.shape[:-3] for x in qkv]), heads_k if heads == 1 else heads


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.number, *tensors = inputs
    ctx.save_for_backward(*tensors, *output)


def gradients(ctx: Any, do: Any, dlse: Any) -> Any:
    return None, None, *backward(ctx.number, *ctx.saved_tensors, do, dlse)


forward.register_autograd(gradients, setup_context=setup_context)

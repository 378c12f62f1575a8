"""Attention and its gradients as operators of torch, for torch.compile: it does not look inside, and is told the shapes
of the results. An operator takes tensors and numbers: a call's options are kept here and go by a number."""

from __future__ import annotations

from typing import Any

import torch

from .options import taken_apart
from .torch_passes import Backward, Call, Forward

CALLS: list[tuple[Call, list[torch.Tensor]]] = []  # each with the tensors in its mask and score


@torch.compiler.assume_constant_result
def kept(*options: Any, deterministic: bool) -> int:
    """The number of a call, when it is compiled."""
    call, tensors = Call.of(*taken_apart(*options), deterministic)
    if any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "score: got a tensor that requires a gradient: under torch.compile it has none yet, and can be detached"
        )
    CALLS.append((call, tensors))
    return len(CALLS) - 1


@torch.library.custom_op("numbattn::forward", mutates_args=())
def forward(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    call, tensors = CALLS[number]
    o, lse = Forward.forward(call, q, k, v, *tensors)
    return o, lse


@torch.library.custom_op("numbattn::backward", mutates_args=())
def backward(
    number: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call, tensors = CALLS[number]
    dq, dk, dv, *_ = Backward.forward(call.wanting([False] * 3), q, k, v, *tensors, o, lse, do, dlse)
    return dq, dk, dv


@forward.register_fake
def _(number: int, q: Any, k: Any, v: Any) -> Any:
    rows = *batch_of(q, k, v), q.shape[-2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=dtype)


@backward.register_fake
def _(number: int, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, dlse: Any) -> Any:
    return tuple([x.new_empty(x.shape) for x in (q, k, v)])


def batch_of(*qkv: Any) -> tuple[Any, ...]:
    """The batch axes of o, of which the heads are the last."""
    if all(x.ndim == 2 for x in qkv):
        return ()
    heads, heads_k, heads_v = (x.shape[-3] if x.ndim > 2 else 1 for x in qkv)
    heads_k = heads_v if heads_k == 1 else heads_k
    return *torch.broadcast_shapes(*[x.shape[:-3] for x in qkv]), heads_k if heads == 1 else heads


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.number, *qkv = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*qkv, *output)


def gradients(ctx: Any, do: Any, dlse: Any) -> Any:
    return None, *backward(ctx.number, *ctx.saved_tensors, do, dlse)


forward.register_autograd(gradients, setup_context=setup_context)

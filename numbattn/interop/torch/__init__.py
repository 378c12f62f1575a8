"""Attention of PyTorch's tensors, with first and second derivatives.

`attention` works under autograd and `torch.func`, alone and composed: in reverse and in forward mode; reverse over
reverse, forward over reverse and reverse over forward, as in `torch.func.hessian`; and `vmap` around all of these.
Forward over forward, third derivatives, and those by arrays of a `Score` whose gradient is not wanted, raise a
NotImplementedError.

CPU tensors are passed as NumPy arrays, GPU tensors as CuPy arrays, without a copy. On a GPU all work is on torch's
current stream and all memory is from torch's allocator.

`torch.compile`, `torch.export`, `make_fx`, with it `torch.func.linearize`, and FakeTensorMode take `attention` and all
these derivatives as an operator, without a graph break. Masks, boolean tensors, scores and lists of them may be made
within what is compiled, of tensors, or outside; numbers in them may change, as other numbers in compiled functions may.
Only a `Score` and a `Where`, functions of your own, break the graph of torch.compile, and the others refuse them; so do
lists of numbers in place of tensors, and ``mask & tensor`` for ``mask & Dense(tensor)``, made within. aot_autograd has
no second derivatives of compiled functions, and says so: take them within. `torch.jit.trace` raises a
NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch

from ... import api
from ...base.checks import Array, flag, number
from ...base.keywords import knows_others
from ...dropout import Dropout
from ...graphs import Graph
from ...masks import Mask, as_mask
from ...scores import Scores, as_parts
from ..graphs import taken_apart_of_graph
from ..options import INSTEAD, taken_apart
from . import operators
from .arrays import TENSORS, array_of, arrays_of, check, on_device, tensors_of
from .pairs import points  # noqa: F401
from .passes import PROXY, TRACED, Forward, TorchCall, is_dual

FAKE = torch._C._TorchDispatchModeKey.FAKE
PLAIN = {bool, float, Dropout, NoneType}  # options of these types alone hold no arrays


@knows_others
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
    """`numbattn.attention` of torch's tensors.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score
        As in `numbattn.attention`, but k is not a cache. Arrays in masks and scores are tensors, or NumPy's or CuPy's.
        Tensors in a score have derivatives, too, unless it has ``gradient=False``. Under `torch.autocast` q, k and v
        are cast as for `torch.nn.functional.scaled_dot_product_attention`.
    return_lse : bool, optional
        Whether to return lse as well.
    deterministic : bool, optional
        As in `numbattn.attention_backward`, for all gradients; implied by `torch.use_deterministic_algorithms`.

    Returns
    -------
    o : torch.Tensor, (..., seqlen_q, head_dim_v), of the dtype of q
    lse : torch.Tensor, (..., seqlen_q), float32, or float64 for float64
        With return_lse: the natural logarithm of the sum of exponentials of the scores that each query sees.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.attention`.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import torch, numbattn as na
    >>> from numbattn.interop.torch import attention
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64, requires_grad=True)
    >>> slopes = torch.ones(8, requires_grad=True)
    >>> attention(q, k, v, causal=True, score=na.Alibi(slopes)).sum().backward()
    >>> slopes.grad.shape
    torch.Size([8])
    """
    options = causal, mask, scale, dropout, score
    run = traced if torch.compiler.is_compiling() or is_traced(q, k, v) else eager
    results = run(q, k, v, options, deterministic, flag("return_lse", return_lse))
    return results if return_lse else results[0]


def graph_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, graph: Graph, *, bias: torch.Tensor | None = None,
    k_edge: torch.Tensor | None = None, v_edge: torch.Tensor | None = None, factor: torch.Tensor | None = None,
    softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None, score: Scores = None,
) -> Any:  # fmt: skip
    """`numbattn.graphs.attention` of torch's tensors, with all derivatives that `attention` has.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score
        As in `numbattn.graphs.attention`; the graph has NumPy arrays, or CuPy arrays for tensors on a GPU. All tensors
        have gradients, those in the score if it wants them. It breaks the graph of torch.compile.

    Returns
    -------
    o : torch.Tensor, (..., queries, head_dim_v), of the dtype of q

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.graphs.attention`.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from numbattn.graphs import Graph
    >>> from numbattn.interop.torch import graph_attention
    >>> ring, x = Graph(np.arange(4), np.array([1, 2, 0])), torch.randn(3, 8)
    >>> bias = torch.zeros(3, requires_grad=True)
    >>> graph_attention(x, x, x, ring, bias=bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([3])
    """
    edges = {"bias": bias, "k_edge": k_edge, "v_edge": v_edge, "factor": factor}
    run = over_graph_outside if torch.compiler.is_compiling() else over_graph
    return run(q, k, v, (graph, softmax, scale, dropout, score), edges)


def over_graph(q: Any, k: Any, v: Any, options: tuple[Any, ...], edges: dict[str, Any]) -> Any:
    check(q=q, k=k, v=v, **{name: x for name, x in edges.items() if x is not None})
    call, tensors = TorchCall.of(*taken_apart_of_graph(*options, **edges), False)
    return Forward.run(call, q, k, v, *tensors)[0]


over_graph_outside = torch._disable_dynamo(over_graph)


def is_traced(*qkv: Any) -> bool:
    """Whether tensors have no elements yet, or a class of tensors says what functions do to them."""
    if torch._C._is_tracing():
        raise NotImplementedError(
            "attention cannot be traced by torch.jit.trace: torch.export, torch.compile and make_fx take it"
        )
    mode = torch._C._get_dispatch_mode
    if mode(PROXY) is not None or mode(FAKE) is not None:
        return True
    return not TENSORS.issuperset(map(type, qkv)) and all(isinstance(x, torch.Tensor) for x in qkv)


def eager(q: Any, k: Any, v: Any, options: tuple[Any, ...], deterministic: bool, lse: bool) -> Any:
    """o and lse; maybe without lse if that is not asked for."""
    check(q=q, k=k, v=v)
    flag("deterministic", deterministic)
    q, k, v = autocast(q, k, v)
    if not may_be_derived(q, k, v, options[-1]):
        return at_once(q, k, v, *options, lse)
    if PLAIN.issuperset(map(type, options)):
        call, tensors = call_without_arrays(deterministic, *options), []
    else:
        call, tensors = TorchCall.of(*taken_apart(*options), deterministic)
    return Forward.run(call, q, k, v, *tensors)


def may_be_derived(q: Any, k: Any, v: Any, score: Any) -> bool:
    """Whether anything may ask for derivatives."""
    if is_dual() or torch._C._are_functorch_transforms_active():
        return True
    if not torch.is_grad_enabled():
        return False
    held = [x for part in as_parts(score) for x in part._all_arrays if isinstance(x, torch.Tensor)]
    return any(x.requires_grad for x in (q, k, v, *held))


def at_once(q: Any, k: Any, v: Any, causal: Any, mask: Any, scale: Any, dropout: Any, score: Any, lse: bool) -> Any:
    """Attention without derivatives, on arrays from the start."""
    scale = None if scale is None else number("scale", scale, INSTEAD)
    with on_device(q):
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
            mask = array_of(mask)
        elif mask is not None:
            mask = as_mask(mask)._mapped(as_array)
        score = [part._mapped(as_array) for part in as_parts(score)]
        options = {"causal": causal, "mask": mask, "scale": scale, "dropout": dropout, "score": score}
        if not lse:
            return tensors_of([api.attention(*arrays_of((q, k, v)), **options)])
        o, saved = api.attention_forward(*arrays_of((q, k, v)), **options)
        return tensors_of([o, saved.lse])


def as_array(x: Any) -> Any:
    return array_of(x) if isinstance(x, torch.Tensor) else x


def traced(q: Any, k: Any, v: Any, options: tuple[Any, ...], deterministic: bool, lse: bool) -> Any:
    """Attention as torch.compile and others trace it."""
    check(q=q, k=k, v=v)
    apart = operators.TakenApart([], [], [], [])
    words = operators.words_of((*options, deterministic), apart)
    if apart.rest:
        if not torch.compiler.is_dynamo_compiling() and torch._C._get_dispatch_mode(PROXY) is not None:
            raise NotImplementedError(TRACED)
        return outside(q, k, v, options, deterministic, lse)
    if torch.compiler.is_dynamo_compiling():
        operators.put_run_in_graphs()
    return operators.run(words, apart.integers, apart.floats, apart.arrays, *autocast(q, k, v))


outside = torch._disable_dynamo(eager)  # torch.compiler.disable would import the compiler


def autocast(*qkv: Any) -> Sequence[Any]:
    """q, k and v in the dtype of torch.autocast, if that is on."""
    device = "cpu" if qkv[0].is_cpu else "cuda"
    if not torch.is_autocast_enabled(device):
        return qkv
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in qkv]


@lru_cache(typed=True)
def call_without_arrays(deterministic: bool, *options: Any) -> TorchCall:
    return TorchCall(taken_apart(*options)[0], (), deterministic)

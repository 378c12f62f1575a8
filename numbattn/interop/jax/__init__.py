"""Attention of JAX arrays: primitives whose derivatives are numbattn's own passes.

`attention` works outside and inside of `jax.jit`, and under

- `grad`, `value_and_grad`, `vjp`, `jacrev`: a backward pass;
- `jvp`, `linearize`, `jacfwd`: a forward pass and one with a tangent. Several tangents of one call, as in `jacfwd` and
  `hessian`, are one pass;
- `hessian`, `jacfwd` of `grad` and `grad` of `grad`: the tangent of the backward pass; `grad` of `jvp` likewise;
- `vmap`, also of derivatives: one more batch axis in front, and the same bits as without. With dropout, and with mapped
  arrays of a `Score`, a pass for each element: a Dropout counts (batch, head), so that each drops what it would drop
  alone;
- `checkpoint`, `scan`, `cond`; `linear_transpose` by v;
- `folx.forward_laplacian`, by `attention_laplacian`, over graphs too. Where folx' sparse Jacobians, which its
  `sparsity_threshold` asks for, say that each row of q, k and v depends on one particle, as in a first layer, by
  `attention_laplacian` with `particle`.

`jvp` of `jvp` and third derivatives raise NotImplementedError, as do derivatives by arrays of a `Score` whose
gradient is not wanted, `jax.experimental.jet`, and `jax.export`, which has no callbacks.

Masks, scores and `Gradients` are pytrees as soon as this module is imported: as arguments of a compiled function their
arrays are traced, and everything else is static. A changed array, seed or offset compiles nothing again.

On CPUs, outside of jit, arrays are read in place, and results are copied once, since JAX wants them at multiples of 64
bytes: 28 us more than numbattn's own call, 70 us with a `Bias`. JAX's own differentiation and mapping take 0.3 to 2 ms
there, so compile them. Inside of jit a pass is a callback that reads XLA's buffers in place and copies results into
XLA's: 12 us more. It calls no JAX function and so never waits for JAX: asynchronous dispatch may stay on. On a GPU the
same holds for CuPy arrays, which share memory with JAX's: inside of jit passes run on XLA's stream, and nothing waits
for them, except for a seed or an offset of `Dropout`, which the host reads. CuPy allocates its own memory: leave it
some, by ``XLA_PYTHON_CLIENT_MEM_FRACTION``.

With arrays on several devices, each device computes its own part inside of `jax.shard_map`; elsewhere in jit one device
computes everything.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ...base.checks import Integers, flag, words_for
from ...base.keywords import knows_others
from ...call.particles import checked_rows
from ...call.problem import refuse_cache
from ...dropout import Dropout
from ...graphs import Graph
from ...masks import Mask
from ...scores import Scores
from ..graphs import taken_apart_of_graph
from ..options import taken_apart
from . import primitives, pytrees  # noqa: F401  # which register what JAX has to know
from .folx import register_folx
from .operands import Directions, How, Operands, array_of, bind
from .pairs import points  # noqa: F401
from .passes import forward, laplacian


@knows_others
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Mask | Any = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dropout_offset: Any = None,
) -> Any:
    """`numbattn.attention` of JAX arrays.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score
        As in `numbattn.attention`; arrays are JAX's or NumPy's. Those in scores have gradients, unless the part has
        ``gradient=False``.
    return_lse : bool, optional
        Whether to return lse as well.
    deterministic : bool, optional
        For gradients: see `numbattn.attention_backward`.
    dropout_offset : int or integer array without axes, optional
        Replaces the offset of dropout; it may be traced, like the number of a training step.

    Returns
    -------
    o : jax.Array, (..., seqlen_q, head_dim_v)
    lse : jax.Array, (..., seqlen_q), float32, or float64 for float64
        With return_lse.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.attention`. The elements of traced arrays are checked when they are known.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import jax, numbattn as na
    >>> from numbattn.interop.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 100, 64))
    >>> loss = lambda q: (attention(q, k, v, mask=na.Window(16, 0)) ** 2).sum()
    >>> jax.jit(jax.grad(loss))(q).shape
    (2, 8, 100, 64)
    """
    x, how = _taken_apart(q, k, v, partial(taken_apart, causal, mask, scale, score=score), dropout, dropout_offset)
    how = how._replace(deterministic=flag("deterministic", deterministic), with_lse=flag("return_lse", return_lse))
    results = bind(forward, x, how)
    return tuple(results) if return_lse else results[0]


def graph_attention(
    q: Any, k: Any, v: Any, graph: Graph, *, bias: Any = None, k_edge: Any = None, v_edge: Any = None,
    factor: Any = None, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None, dropout_offset: Any = None,
) -> Any:  # fmt: skip
    """`numbattn.graphs.attention` of JAX arrays, under all transformations that `attention` works under.

    Parameters
    ----------
    q, k, v, bias, k_edge, v_edge, factor, softmax, scale, dropout, score
        As in `numbattn.graphs.attention`; arrays are JAX's or NumPy's. All have gradients, those in the score if it
        wants them.
    graph : numbattn.graphs.Graph
        Of NumPy arrays, or of CuPy arrays on a GPU. It is static: a function is compiled again for another one.
    dropout_offset : int or integer array without axes, optional
        As in `attention`.

    Returns
    -------
    o : jax.Array, (..., queries, head_dim_v)

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.graphs.attention`.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import jax, numpy as np
    >>> from numbattn.graphs import Graph
    >>> from numbattn.interop.jax import graph_attention
    >>> ring, x = Graph(np.arange(4), np.array([1, 2, 0])), jax.numpy.ones((3, 8))
    >>> loss = lambda bias: graph_attention(x, x, x, ring, bias=bias).sum()
    >>> jax.jit(jax.grad(loss))(jax.numpy.zeros(3)).shape
    (3,)
    """
    edges = {"bias": bias, "k_edge": k_edge, "v_edge": v_edge, "factor": factor}
    edges = {name: x if x is None else array_of(name, x) for name, x in edges.items()}
    options = partial(taken_apart_of_graph, graph, softmax, scale, score=score, **edges)
    x, how = _taken_apart(q, k, v, options, dropout, dropout_offset)
    return bind(forward, x, how._replace(with_lse=False))[0]


@knows_others
def attention_laplacian(
    q: Any, k: Any, v: Any, jq: Any, jk: Any, jv: Any, lq: Any = None, lk: Any = None, lv: Any = None, *,
    particle: Integers | tuple[Integers, Integers] | None = None, causal: bool = False, mask: Mask | Any = None,
    scale: float | None = None, dropout: Dropout | None = None, score: Scores = None, dropout_offset: Any = None,
) -> Any:  # fmt: skip
    """`numbattn.attention_laplacian` of JAX arrays: a primitive that has no derivatives, as they would be third ones.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score, dropout_offset
        As in `attention`; the arrays in a score are constants.
    jq, jk, jv, lq, lk, lv, particle
        As in `numbattn.attention_laplacian`.

    Returns
    -------
    o, jo, lo : jax.Array
        As there.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.attention_laplacian`.
    NotImplementedError
        For derivatives of the results.

    Examples
    --------
    >>> import jax
    >>> from numbattn.interop.jax import attention_laplacian
    >>> walkers, jacobian = jax.numpy.ones((10, 4, 5, 3)), jax.numpy.eye(60).reshape(60, 4, 5, 3)
    >>> jax.jit(jax.vmap(lambda x: attention_laplacian(x, x, x, *[jacobian] * 3)[2]))(walkers).shape
    (10, 4, 5, 3)
    """
    x, how = _taken_apart(q, k, v, partial(taken_apart, causal, mask, scale, score=score), dropout, dropout_offset)
    given = {"jq": jq, "jk": jk, "jv": jv, "lq": lq, "lk": lk, "lv": lv}
    arrays = [y if y is None else array_of(name, y) for name, y in given.items()]
    none = (None,) * len(how.wanted)
    tangents, second = (Directions(*arrays[first : first + 3], none) for first in (0, 3))
    if particle is not None:
        rows = checked_rows(particle, x.q.shape[-2], x.k.shape[-2])
        how = how._replace(particle=tuple([tuple(of.tolist()) for of in rows]))
    return tuple(bind(laplacian, x._replace(tangents=tangents, second=second), how._replace(several=True)))


def _taken_apart(q: Any, k: Any, v: Any, options: Any, dropout: Any, dropout_offset: Any) -> tuple[Operands, How]:
    """The operands of the forward pass, and what is static. options: (dropout=) -> Options and arrays."""
    if "folx" in sys.modules:
        register_folx()
    refuse_cache(k)
    q, k, v = array_of("q", q), array_of("k", k), array_of("v", v)
    seed = offset = None
    if dropout is None and dropout_offset is not None:
        raise ValueError(f"dropout_offset: got {words_for(dropout_offset)} without dropout")
    if isinstance(dropout, Dropout):
        seed, offset = np.array(dropout.key, np.uint32), _offset(dropout, dropout_offset)
        dropout = Dropout(dropout.p, 0)
    apart, arrays = options(dropout=dropout)
    return Operands(q, k, v, tuple(arrays), seed, offset), How(apart, apart.wanted, deterministic=False)


def _offset(dropout: Dropout, offset: Any) -> Any:
    """The offset of dropout as an array."""
    if not isinstance(offset, jax.Array):
        given = dropout if offset is None else replace(dropout, offset=offset)
        return np.array(given.offset, np.uint32)
    if offset.ndim or offset.dtype.kind not in "iu":
        raise TypeError(f"dropout_offset: got an array of {offset.dtype} of the shape {offset.shape}, expected an "
                        "integer without axes")  # fmt: skip
    return offset.astype(np.uint32)

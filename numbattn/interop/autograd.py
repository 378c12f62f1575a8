"""Attention of HIPS autograd's arrays, with first and second derivatives.

`attention` works under `grad`, `jacobian`, `hessian`, `make_vjp`, `make_hvp`, `make_ggnvp` and `make_jvp`: in reverse
and in forward mode, reverse over reverse, forward over reverse and reverse over forward. Forward over forward, third
derivatives, and those by arrays of a `Score` whose gradient is not wanted, raise a NotImplementedError.

Derivatives of the functions below are these functions: with x for q, k, v and the arrays in the score, r = (o, lse),
c for the gradient of a function of r and t for a tangent of x,

    forward(x) = r,  backward(x, c) = d<c, r> / dx,  tangent(x, t) = dr / dx t,  curvature(x, c, t) = d backward / dx t

where <curvature(x, c, t), s> = <t, curvature(x, c, s)>, since Hessians are symmetric.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autograd.builtins import tuple as make_tuple
from autograd.extend import VSpace, defjvp, defvjp, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vspaces import ArrayVSpace
from autograd.tracer import getval, isbox

from ..base.checks import Array, flag, words_for
from ..base.gradients import Gradients
from ..base.keywords import knows_others
from ..call.problem import refuse_cache
from ..dropout import Dropout
from ..graphs import Graph
from ..masks import Mask
from ..scores import ArrayPart, Scores
from .graphs import taken_apart_of_graph
from .options import Options, taken_apart


@knows_others
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """`numbattn.attention`, differentiable by autograd.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score
        As in `numbattn.attention`, but k is not a cache. Arrays in the score also have gradients, if the score wants
        them. Arrays may be NumPy's or CuPy's.
    return_lse : bool, optional
        Whether to return lse as well.
    deterministic : bool, optional
        As in `numbattn.attention_backward`, for all gradients.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v), of the dtype of q
    lse : array, (..., seqlen_q), float32, or float64 for float64
        With return_lse: the logarithm of the sum of exponentials of the scores that each query sees.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.attention`.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import autograd.numpy as np
    >>> from autograd import grad
    >>> from numbattn.interop.autograd import attention
    >>> x = np.linspace(-1, 1, 200).reshape(50, 4)
    >>> def loss(x):
    ...     return np.sum(attention(x, x, x, causal=True) ** 2)
    >>> grad(lambda x: np.sum(grad(loss)(x) ** 2))(x).shape
    (50, 4)
    """
    refuse_cache(k)
    options, arrays = taken_apart(causal, mask, scale, dropout, score)
    r = _called(q, k, v, options, arrays, flag("deterministic", deterministic))
    return r if flag("return_lse", return_lse) else r[0]


def graph_attention(
    q: Any, k: Any, v: Any, graph: Graph, *, bias: Any = None, k_edge: Any = None, v_edge: Any = None,
    factor: Any = None, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None,
) -> Any:  # fmt: skip
    """`numbattn.graphs.attention`, differentiable by autograd as `attention` is.

    Parameters
    ----------
    q, k, v, graph, bias, k_edge, v_edge, factor, softmax, scale, dropout, score
        As in `numbattn.graphs.attention`. All arrays have gradients, those in the score if it wants them.

    Returns
    -------
    o : array, (..., queries, head_dim_v), of the dtype of q

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.graphs.attention`.
    NotImplementedError
        For a derivative that does not exist: see above.

    Examples
    --------
    >>> import autograd.numpy as np
    >>> from autograd import grad
    >>> from numbattn.graphs import Graph
    >>> from numbattn.interop.autograd import graph_attention
    >>> ring, x = Graph(np.arange(4), np.array([1, 2, 0])), np.ones((3, 8))
    >>> grad(lambda bias: np.sum(graph_attention(x, x, x, ring, bias=bias)))(np.zeros(3)).shape
    (3,)
    """
    edges = {"bias": bias, "k_edge": k_edge, "v_edge": v_edge, "factor": factor}
    return _called(q, k, v, *taken_apart_of_graph(graph, softmax, scale, dropout, score, **edges), False)[0]


def _called(q: Any, k: Any, v: Any, options: Options, arrays: Sequence[Any], deterministic: bool) -> Any:
    """o and lse"""
    x = make_tuple([q, k, v, *traced(options, arrays)])
    wanted = dict(zip(options.weights, options.wanted))
    constants = [None if wanted.get(at) else getval(array) for at, array in enumerate(arrays)]
    return forward(AutogradCall(options, constants, deterministic), x)


class AutogradCall(NamedTuple):
    """The arguments of a call except x, which is q, k, v and the arrays in its score whose gradients are wanted."""

    options: Options
    arrays: list[Any]  # in its mask and score; None for those in x
    deterministic: bool

    @property
    def places(self) -> list[int]:
        """The numbers of the arrays in x, in order."""
        return [at for at, x in enumerate(self.arrays) if x is None]

    def given(self, x: Sequence[Any]) -> dict[str, Any]:
        """The options of numbattn's functions."""
        arrays = list(self.arrays)
        for at, array in zip(self.places, x[3:]):
            arrays[at] = array
        return self.options.given(arrays)

    def of_score(self, t: Sequence[Any]) -> list[Any]:
        """Tangents of x as tangents of the arrays with a place among the gradients."""
        found = dict(zip(self.places, t[3:]))
        return [found.get(at) for at in self.options.weights]

    def of_x(self, grads: Gradients[Any]) -> tuple[Any, ...]:
        """The gradient of x."""
        return *grads, *[dscore for dscore in grads.score if dscore is not None]


def traced(options: Options, arrays: Sequence[Any]) -> list[Any]:
    """The arrays that are in x."""
    for at, part, wanted in zip(options.weights, options.parts, options.wanted):
        if isbox(arrays[at]) and not isinstance(part, ArrayPart) and not wanted:
            raise NotImplementedError(f"score: got {words_for(arrays[at])} in a {type(part).__name__}, expected an "
                                      "array that is constant, or gradient=True")  # fmt: skip
    return [arrays[at] for at, wanted in zip(options.weights, options.wanted) if wanted]


# r is what forward returns, a function of x: derivatives by x are total, those by r zero
@primitive
def forward(call: AutogradCall, x: Any) -> tuple[Any, Any]:
    o, saved = call.options.functions.forward(*x[:3], **call.given(x))
    return o, saved.lse


@primitive
def backward(call: AutogradCall, x: Any, r: Any, c: Any) -> tuple[Any, ...]:
    functions = call.options.functions
    saved = functions.saved(*x[:3], *r, **call.given(x))
    return call.of_x(functions.backward(c[0], saved, dlse=c[1], deterministic=call.deterministic))


@primitive
def tangent(call: AutogradCall, x: Any, r: Any, t: Any) -> tuple[Any, Any]:
    forward_jvp = call.options.functions.forward_jvp
    _, to, _, tsaved = forward_jvp(*x[:3], *t[:3], tscore=call.of_score(t), **call.given(x))
    return to, tsaved.tlse


@primitive
def curvature(call: AutogradCall, x: Any, r: Any, c: Any, t: Any) -> tuple[Any, ...]:
    functions = call.options.functions
    _, _, saved, tsaved = functions.forward_jvp(*x[:3], *t[:3], tscore=call.of_score(t), **call.given(x))
    return call.of_x(functions.tangents_of_gradients(c[0], saved, tsaved, None, c[1], None, call.deterministic))


def missing(what: str) -> Callable[..., Any]:
    """A derivative that does not exist, which raises an error."""

    def derivative(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"numbattn has no {what}")

    return derivative


third = missing("third derivatives")
twice = missing("forward mode over forward mode: take reverse mode for one of both")
defvjp(forward, lambda r, call, x: lambda c: backward(call, x, r, c), argnums=[1])
defjvp(forward, lambda t, r, call, x: tangent(call, x, r, t), argnums=[1])
defvjp(
    backward,
    lambda dx, call, x, r, c: lambda t: curvature(call, x, r, c, t),
    None,
    lambda dx, call, x, r, c: lambda t: tangent(call, x, r, t),
    argnums=[1, 2, 3],
)
defjvp(
    backward,
    lambda t, dx, call, x, r, c: curvature(call, x, r, c, t),
    None,
    lambda tc, dx, call, x, r, c: backward(call, x, r, tc),
    argnums=[1, 2, 3],
)
defvjp(
    tangent,
    lambda tr, call, x, r, t: lambda c: curvature(call, x, r, c, t),
    None,
    lambda tr, call, x, r, t: lambda c: backward(call, x, r, c),
    argnums=[1, 2, 3],
)
defjvp(tangent, twice, None, lambda s, tr, call, x, r, t: tangent(call, x, r, s), argnums=[1, 2, 3])
defvjp(curvature, third, None, third, lambda tdx, call, x, r, c, t: lambda s: curvature(call, x, r, c, s),
       argnums=[1, 2, 3, 4])  # fmt: skip
defjvp(curvature, third, None, lambda tc, tdx, call, x, r, c, t: curvature(call, x, r, tc, t),
       lambda s, tdx, call, x, r, c, t: curvature(call, x, r, c, s), argnums=[1, 2, 3, 4])  # fmt: skip


class CupySpace(ArrayVSpace):
    """The vector space of CuPy arrays, which autograd does not know."""

    def __init__(self, value: Any) -> None:
        self.shape, self.dtype, self.xp = value.shape, value.dtype, sys.modules["cupy"]

    def zeros(self) -> Any:
        return self.xp.zeros(self.shape, self.dtype)

    def ones(self) -> Any:
        return self.xp.ones(self.shape, self.dtype)

    def randn(self) -> Any:
        return self.xp.random.standard_normal(self.shape).astype(self.dtype)

    def standard_basis(self) -> Any:
        return map(self.xp.asarray, super().standard_basis())


def register_cupy() -> None:
    """Make autograd trace CuPy arrays; functions of autograd.numpy then take them, too."""
    kind = sys.modules["cupy"].ndarray
    if kind not in VSpace.mappings:
        ArrayBox.register(kind)
        CupySpace.register(kind)


if "cupy" in sys.modules:
    register_cupy()

"""The rule by which folx, the forward Laplacian in JAX, takes attention, over graphs too: one pass,
`attention_laplacian`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
from jax import numpy as jnp

from ...base.checks import needed
from .derivatives import directions_of
from .operands import PRIMITIVES, How, bind
from .passes import forward, laplacian


def register_folx() -> None:
    """Have `folx.forward_laplacian` take `attention` and `graph_attention`, by the pass of `attention_laplacian`.

    Wherever folx is imported, calls of these see to it. Call this for functions that were traced before.
    """
    needed("folx", "register_folx", "folx").register_function(PRIMITIVES[forward], rule)


def rule(args: Any, kwargs: dict[str, Any], sparsity_threshold: int) -> list[Any]:
    """folx' triples of values, Jacobians and Laplacians of o from those of the operands of the forward pass."""
    api, tree, how = import_module("folx.api"), kwargs["tree"], kwargs["how"]
    triples = [x if isinstance(x, api.FwdLaplArray) else None for x in args]
    x = tree.unflatten([x if triple is None else triple.x for x, triple in zip(args, triples)])
    t = directions_of(tree.unflatten(jacobians(triples, how)), how)
    second = directions_of(tree.unflatten([x and x.laplacian for x in triples]), how)
    if how.with_lse:
        raise NotImplementedError("the Laplacian of attention's lse: jax.lax.stop_gradient makes a constant of it")
    if not t:
        return bind(forward, x, how)
    o, jo, lo = bind(laplacian, x._replace(tangents=t, second=second), how._replace(several=True))
    return [api.FwdLaplArray(o, api.FwdJacobian.from_dense(jnp.moveaxis(jo, how.loops, 0)), lo)]


def jacobians(triples: list[Any], how: How) -> list[Any]:
    """Dense, of equally many coordinates each; None for operands that depend on none."""
    dense = [x and x.dense_jacobian for x in triples]
    count = max(len(x) for x in dense if x is not None)

    def padded(x: Any) -> Any:
        return jnp.moveaxis(jnp.pad(x, [(0, count - len(x)), *[(0, 0)] * (x.ndim - 1)]), 0, how.loops)

    return jax.tree.map(padded, dense)

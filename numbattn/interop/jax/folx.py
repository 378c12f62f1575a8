"""The rule by which folx, the forward Laplacian in JAX, takes attention, over graphs too: one pass,
`attention_laplacian`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from ...base.checks import needed
from ..options import ATTENTION
from .derivatives import directions_of
from .operands import PRIMITIVES, Directions, How, Operands, bind
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
    first = directions_of(tree.unflatten([x and x.jacobian for x in triples]), how)
    second = directions_of(tree.unflatten([x and x.laplacian for x in triples]), how)
    if how.with_lse:
        raise NotImplementedError("the Laplacian of attention's lse: jax.lax.stop_gradient makes a constant of it")
    if not first:
        return bind(forward, x, how)
    sparse = first_layer(x, first, how)
    if sparse is None:
        t = directions_of(tree.unflatten(jacobians(triples, how)), how)
    else:
        t = Directions(*(jacobian and jacobian.data for jacobian in first[:3]), first.score)
        how = how._replace(particle=sparse.particle)
    o, jo, lo = bind(laplacian, x._replace(tangents=t, second=second), how._replace(several=True))
    jo = jnp.moveaxis(jo, how.loops, 0)
    return [api.FwdLaplArray(o, api.FwdJacobian.from_dense(jo if sparse is None else sparse.dense(jo)), lo)]


class FirstLayer(NamedTuple):
    """Rows that depend on the coordinates of one particle each, as `attention_laplacian` has them."""

    particle: tuple[tuple[int, ...], ...]  # of queries and of keys
    coordinates: Any  # numbers of those of each particle, (particles, T)

    def dense(self, jo: Any) -> Any:
        """The derivatives of o by folx' coordinates, from those by the particles'."""
        places = self.coordinates.ravel()
        count = places.max() + 1
        if np.array_equal(places, np.arange(count)):
            return jo
        return jnp.zeros((count, *jo.shape[1:]), jo.dtype).at[places].set(jo)


def first_layer(x: Operands, first: Directions, how: How) -> FirstLayer | None:
    """What sparse Jacobians of q, k and v say, whose x0_idx has the number of a coordinate for each element. None if a
    row depends on other coordinates than those of one particle, or if the call takes no particles."""
    (q, k, v, of_score), options = first, how.options
    if options.functions is not ATTENTION or options.dropout or any(part._is_nonlinear for part in options.score):
        return None
    given = [jacobian for jacobian in (q, k, v) if jacobian is not None]
    if how.loops or any(t is not None for t in of_score) or not all(jacobian.weak for jacobian in given):
        return None
    whole = [jacobian.x0_idx.reshape(len(jacobian.data), -1, *jacobian.data.shape[-2:]) for jacobian in given]
    rows = [numbers[:, 0, :, 0].T for numbers in whole]
    is_by_row = all((numbers == of_rows.T[:, None, :, None]).all() for numbers, of_rows in zip(whole, rows))
    if not is_by_row or len({of_rows.shape[1] for of_rows in rows}) > 1 or (
        k is not None and v is not None and not np.array_equal(*rows[-2:])
    ):
        return None
    every = np.unique(np.concatenate(rows), axis=0)
    coordinates = every[every.max(axis=1) >= 0]                 # without rows that are constant
    if not coordinates.size or coordinates.min() < 0 or np.unique(coordinates).size < coordinates.size:
        return None
    particles = {tuple(own): p for p, own in enumerate(coordinates.tolist())}

    def owners(of_rows: Any, seqlen: int) -> tuple[int, ...]:
        return (-1,) * seqlen if of_rows is None else tuple([particles.get(tuple(own), -1) for own in of_rows.tolist()])

    of_q = None if q is None else rows[0]
    of_k = None if k is None and v is None else rows[-1]
    return FirstLayer((owners(of_q, x.q.shape[-2]), owners(of_k, x.k.shape[-2])), coordinates)


def jacobians(triples: list[Any], how: How) -> list[Any]:
    """Dense, of equally many coordinates each; None for operands that depend on none."""
    dense = [x and x.dense_jacobian for x in triples]
    count = max(len(x) for x in dense if x is not None)

    def padded(x: Any) -> Any:
        return jnp.moveaxis(jnp.pad(x, [(0, count - len(x)), *[(0, 0)] * (x.ndim - 1)]), 0, how.loops)

    return jax.tree.map(padded, dense)

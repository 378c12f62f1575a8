"""How vmap maps a pass: as several tangents of one call, in a loop, or with one more batch axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from .operands import Directions, How, Operands, Pass, Results, bind, is_none
from .passes import backward, hessian, leads_of, results_of, tangent

TANGENTS = {"tangents", "tdo", "tdlse"}  # operands that may have an axis of tangents


def mapped(compute: Pass, operands: Results, dims: Sequence[int | None], *, tree: Any, how: How) -> Any:
    """The rule of vmap: results, and their mapped axes."""
    x, at = tree.unflatten(operands), tree.unflatten(dims)
    size = next(a.shape[dim] for a, dim in zip(operands, dims) if dim is not None)
    names = {name for name, dim in zip(Operands._fields, at) if jax.tree.leaves(dim)}
    if compute in (tangent, hessian) and names <= TANGENTS:
        return _of_several(compute, x, at, size, how)
    unplaced = (dim for dim, own in zip(at.arrays, how.options.own_axes) if own is None)
    if how.loops or x.seed is not None or any(dim is not None for dim in unplaced):
        x = jax.tree.map(lambda a, dim: _placed(a, dim, 0, size), x, at, is_leaf=is_none)
        return _at(0, bind(compute, x, how._replace(loops=how.loops + 1)))
    return _lifted(compute, x, at, size, how)


def _at(axis: int, results: Results) -> Any:
    return results, [axis] * len(results)


def _placed(a: Any, dim: int | None, axis: int, size: int) -> Any:
    """An array with the mapped axis at `axis`."""
    if a is None:
        return None
    if dim is not None:
        return jnp.moveaxis(a, dim, axis)
    return jnp.broadcast_to(jnp.expand_dims(a, axis), (*a.shape[:axis], size, *a.shape[axis:]))


def _of_several(compute: Pass, x: Operands, at: Operands, size: int, how: How) -> Any:
    """If only tangents are mapped, the mapped axis is theirs, joined with an axis that they have."""
    first = how.loops
    given = {name: jax.tree.map(lambda a, dim: _placed(a, dim, first, size), getattr(x, name), getattr(at, name),
                                is_leaf=is_none) for name in TANGENTS}  # fmt: skip
    axes = jax.tree.leaves(given)[0].shape[first : first + 1 + how.several]
    given = jax.tree.map(lambda a: a.reshape(*a.shape[:first], math.prod(axes), *a.shape[first + len(axes) :]), given)
    results = bind(compute, x._replace(**given), how._replace(several=True))
    return _at(first, [r.reshape(*r.shape[:first], *axes, *r.shape[first + 1 :]) for r in results])


def _lifted(compute: Pass, x: Operands, at: Operands, size: int, how: How) -> Any:
    """With one more batch axis in front; batch axes in between, at least that of the heads, are 1."""
    batch = max(a.ndim - (dim is not None) for a, dim in zip(x[:3], at[:3])) - 2

    def lifted(a: Any, dim: Any, place: MappedAxis) -> Any:
        if a is None or place.own is None:
            return a
        a = jnp.expand_dims(a, place.lead) if dim is None else jnp.moveaxis(a, dim, place.lead)
        before, after = a.shape[: place.lead], a.shape[place.lead + 1 :]
        missing = max(max(batch, 1) + place.own - len(after), 0)
        a = a.reshape(*before, a.shape[place.lead], *[1] * missing, *after)
        return jnp.broadcast_to(a, (*before, size, *a.shape[place.lead + 1 :])) if place.whole else a

    def alone(a: Any, dim: Any) -> Any:
        if a is None:
            return None
        return jax.ShapeDtypeStruct(tuple([n for axis, n in enumerate(a.shape) if axis != dim]), a.dtype)

    places = _places(compute, at, how)
    results = bind(compute, jax.tree.map(lifted, x, at, places, is_leaf=is_none), how)
    likes = results_of(compute, jax.tree.map(alone, x, at, is_leaf=is_none), how)
    leads = leads_of(compute, how, results)
    return [r.reshape(*a.shape[:lead], size, *a.shape[lead:]) for r, a, lead in zip(results, likes, leads)], leads


class MappedAxis(NamedTuple):
    """The place of the mapped axis of an operand."""

    own: int | None  # how many of its last axes are not batch axes
    whole: bool = True  # whether it has to have that axis at full size
    lead: int = 0  # axes in front of it


def _places(compute: Pass, at: Operands, how: How) -> Operands:
    """The MappedAxis of each operand. One that is not mapped keeps an axis of 1, if elements need no gradients of their
    own."""
    options = how.options

    def flat(x: Any) -> list[Any]:
        return [None] * (3 + len(how.wanted)) if x is None else [*x[:3], *x.score]

    by_inputs = [*at[:3], *[at.arrays[i] for i in options.weights]]
    whole = [any(dim is not None for dim in each) for each in zip(by_inputs, flat(at.tangents), flat(at.second))]
    if compute in (backward, hessian):
        whole = [x or asked for x, asked in zip(whole, (True, True, True, *options.wanted))]
    whole[0] |= not any(whole[:3])
    own = [2, 2, 2, *[options.own_axes[i] for i in options.weights]]
    arrays = [MappedAxis(own, False) for own in options.own_axes]
    for i, is_whole in zip(options.weights, whole[3:]):
        arrays[i] = arrays[i]._replace(whole=is_whole)

    def directions(lead: int) -> Directions:
        places = [MappedAxis(*about, lead) for about in zip(own, whole)]
        return Directions(*places[:3], tuple(places[3:]))

    lead = int(how.several)
    return Operands(
        *directions(0)[:3], tuple(arrays), o=MappedAxis(2), lse=MappedAxis(1), do=MappedAxis(2), dlse=MappedAxis(1),
        tangents=directions(lead), tdo=MappedAxis(2, lead=lead), tdlse=MappedAxis(1, lead=lead), second=directions(0),
    )  # fmt: skip

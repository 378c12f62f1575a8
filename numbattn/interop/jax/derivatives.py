"""Tangents and transposes of the passes, all of which are passes again: see `hessian`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad

from ...scores import ArrayPart
from .operands import Directions, How, Operands, Results, bind, is_none
from .passes import backward, forward, hessian, second_tangent, tangent


def forward_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    x, t = tree.unflatten(primals), directions_of(tree.unflatten(tangents), how)
    o, lse = bind(forward, x, how._replace(with_lse=True))
    results, wanted = (o, lse), slice(1 + how.with_lse)
    along = bind(tangent, x._replace(o=o, lse=lse, tangents=t), how) if t else (None, None)
    return results[wanted], _zeros_filled(results, along)[wanted]


def forward_transpose(cotangents: Any, *operands: Any, tree: Any, how: How) -> Any:
    """By v alone, in which o is linear: the backward pass at v = 0, where o is 0 too."""
    x, do = tree.unflatten(operands), _nonzero(cotangents[0])
    if not ad.is_undefined_primal(x.v) or sum(map(ad.is_undefined_primal, operands)) > 1:
        raise NotImplementedError("a transpose of attention by anything but v: it is linear in v alone")
    x = x._replace(v=jnp.zeros(x.v.aval.shape, x.v.aval.dtype))
    o, lse = bind(forward, x, how._replace(with_lse=True))
    return _found(operands, tree, v=_pulled_back(x._replace(o=o, lse=lse), how, do, None).v)


def tangent_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    x, tx = tree.unflatten(primals), tree.unflatten(tangents)
    results, second, linear = bind(tangent, x, how), directions_of(tx, how), _nonzero(tx.tangents)
    along = bind(tangent, x._replace(tangents=linear), how) if linear else (None, None)
    if second:

        def bent(t: Directions) -> Results:
            return bind(second_tangent, x._replace(tangents=t, second=second), how._replace(several=False))

        more = (jax.vmap(bent, how.loops, how.loops) if how.several else bent)(x.tangents)
        along = [a + b for a, b in zip(along, more)] if linear else more
    return results, _zeros_filled(results, along)


def tangent_transpose(cotangents: Any, *operands: Any, tree: Any, how: How) -> Any:
    x = tree.unflatten(operands)
    return _found(operands, tree, tangents=_pulled_back(x, _asking(how, x.tangents), *map(_nonzero, cotangents)))


def backward_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    x, tx = tree.unflatten(primals), tree.unflatten(tangents)
    results = bind(backward, x, how)
    along, _, _ = _along(x, how, directions_of(tx, how), _nonzero(tx.do), _nonzero(tx.dlse))
    return results, _zeros_filled(results, _in_order(along, how))


def backward_transpose(cotangents: Any, *operands: Any, tree: Any, how: How) -> Any:
    x, t = tree.unflatten(operands), _as_directions(map(_nonzero, cotangents), how)
    to, tlse = bind(tangent, x.with_(tangents=t), how) if t else (None, None)
    return _found(operands, tree, do=to, dlse=tlse)


def hessian_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    x, tx = tree.unflatten(primals), tree.unflatten(tangents)
    _refuse_third(directions_of(tx, how) or _nonzero((tx.do, tx.dlse)) != (None, None))
    results = bind(hessian, x, how)
    along, to, tlse = _along(x, how, _nonzero(tx.tangents), _nonzero(tx.tdo), _nonzero(tx.tdlse))
    return results, _zeros_filled(results, [*_in_order(along, how), to, tlse])


def hessian_transpose(cotangents: Any, *operands: Any, tree: Any, how: How) -> Any:
    x, (*by_inputs, tdo, tdlse) = tree.unflatten(operands), map(_nonzero, cotangents)
    along, to, tlse = _along(x, _asking(how, x.tangents), _as_directions(by_inputs, how), tdo, tdlse)
    return _found(operands, tree, tangents=along, tdo=to, tdlse=tlse)


def second_tangent_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    x, tx = tree.unflatten(primals), tree.unflatten(tangents)
    _refuse_third(directions_of(tx, how) or _nonzero(tx.tangents))
    results = bind(second_tangent, x, how)
    return results, bind(second_tangent, x._replace(second=_nonzero(tx.second)), how)


def second_tangent_transpose(cotangents: Any, *operands: Any, tree: Any, how: How) -> Any:
    x, (do, dlse) = tree.unflatten(operands), map(_nonzero, cotangents)
    x = x._replace(do=jnp.zeros(x.o.shape, x.o.dtype) if do is None else do, dlse=dlse)
    along, _, _ = _along(x, _asking(how, x.second), x.tangents, None, None)
    return _found(operands, tree, second=along)


def laplacian_jvp(primals: Any, tangents: Any, *, tree: Any, how: How) -> Any:
    _refuse_third(True)


def _along(x: Operands, how: How, t: Any, tdo: Any, tdlse: Any) -> tuple[Directions, Any, Any]:
    """The `hessian` for do and dlse times t, tdo and tdlse. Without t it is the backward pass of tdo and tdlse."""
    if not t:
        return _pulled_back(x, how, tdo, tdlse), None, None
    x = x.with_(do=x.do, dlse=x.dlse, tangents=t, tdo=tdo, tdlse=tdlse)
    *found, to, tlse = bind(hessian, x, how)
    return _as_directions(found, how), to, tlse


def _pulled_back(x: Operands, how: How, do: Any, dlse: Any) -> Directions:
    """The backward pass of do and dlse, or of several of them."""

    def of_one(do: Any, dlse: Any) -> Results:
        do = jnp.zeros(x.o.shape, x.o.dtype) if do is None else do
        return bind(backward, x.with_(do=do, dlse=dlse), how._replace(several=False))

    if do is None and dlse is None:
        return Directions(None, None, None, (None,) * len(how.wanted))
    return _as_directions((jax.vmap(of_one, how.loops, how.loops) if how.several else of_one)(do, dlse), how)


def directions_of(tx: Operands, how: How) -> Directions:
    """The tangents of q, k, v and weights, among those of operands."""
    of_score = []
    for part, index, wanted in zip(how.options.parts, how.options.weights, how.wanted):
        t = _nonzero(tx.arrays[index])
        if t is not None and not wanted and not isinstance(part, ArrayPart):
            raise NotImplementedError(f"derivatives by the arrays of a {type(part).__name__} without gradient=True: "
                                      "jax.lax.stop_gradient makes constants of them")  # fmt: skip
        of_score.append(t if wanted else None)
    return Directions(*_nonzero(tx[:3]), tuple(of_score))


def _as_directions(found: Iterable[Any], how: How) -> Directions:
    """The gradients that passes return, as Directions."""
    q, k, v, *rest = found
    each = iter(rest)
    return Directions(q, k, v, tuple([next(each) if wanted else None for wanted in how.options.wanted]))


def _in_order(x: Directions, how: How) -> list[Any]:
    """Directions in the order in which passes return them."""
    return [*x[:3], *(g for g, wanted in zip(x.score, how.options.wanted) if wanted)]


def _asking(how: How, t: Directions) -> How:
    """The How with gradients of the weights that have a tangent, and of no others."""
    options, wanted = how.options, tuple([x is not None for x in t.score])
    if wanted == options.wanted:
        return how
    each = iter(wanted)
    own = [[next(each) for _ in part._weights] for part in options.score]
    score = [part._asking(asked) if asked else part for part, asked in zip(options.score, own)]
    return how._replace(options=replace(options, score=tuple(score), wanted=wanted))


def _nonzero(tangents: Any) -> Any:
    """Tangents, None where they are zero."""

    def some(t: Any) -> Any:
        return None if isinstance(t, ad.Zero) or getattr(t, "dtype", None) == jax.dtypes.float0 else t

    return jax.tree.map(some, tangents, is_leaf=lambda t: isinstance(t, ad.Zero))


def _zeros_filled(results: Results, tangents: Results) -> list[Any]:
    """The tangents of results, with a Zero for None."""
    return [ad.Zero(jax.typeof(x)) if t is None else t for x, t in zip(results, tangents)]


def _found(operands: Results, tree: Any, **cotangents: Any) -> list[Any]:
    """Cotangents by name in the order of operands, of those that are linear."""
    found: list[Any] = [None] * len(operands)

    def put(number: Any, cotangent: Any) -> None:
        if number is not None and ad.is_undefined_primal(operands[number]):
            found[number] = cotangent

    numbers = tree.unflatten(range(len(operands)))
    for name, cotangent in cotangents.items():
        jax.tree.map(put, getattr(numbers, name), cotangent, is_leaf=is_none)
    return found


def _refuse_third(asked: Any) -> None:
    if asked:
        raise NotImplementedError("third derivatives of attention: there are first and second ones")

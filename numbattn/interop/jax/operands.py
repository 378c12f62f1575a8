"""The operands of numbattn's JAX primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from ...base.checks import library, words_for
from ..options import Options

Results = Sequence[Any]
Pass = Callable[["Operands", "How"], Results]
PRIMITIVES: dict[Pass, Any] = {}  # by the function that computes them


class Directions(NamedTuple):
    """Tangents or gradients of everything that has derivatives; None is zero."""

    q: Any
    k: Any
    v: Any
    score: tuple[Any, ...]  # one for each weight of the options

    def __bool__(self) -> bool:
        return any(x is not None for x in (*self[:3], *self.score))


class Operands(NamedTuple):
    """The arrays that primitives take; None for what one does not take."""

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]  # of the mask and the score
    seed: Any = None
    offset: Any = None
    o: Any = None  # the forward pass's result; derivatives are total, also through o and lse
    lse: Any = None
    do: Any = None
    dlse: Any = None
    tangents: Directions | None = None
    tdo: Any = None
    tdlse: Any = None
    second: Directions | None = None  # tangents of the point that `tangents` are taken at; Laplacians

    def with_(self, **values: Any) -> Operands:
        """The operands and results of the forward pass, with these values."""
        return Operands(*self[: Operands._fields.index("do")], **values)


class How(NamedTuple):
    """The static arguments."""

    options: Options  # with a Dropout of no seed; `options.wanted` says which gradients a pass returns
    wanted: tuple[bool, ...]  # which of them the user wants
    deterministic: bool
    with_lse: bool = True  # of the forward pass
    several: bool = False  # whether tangents, tdo and tdlse have one axis more in front
    loops: int = 0  # axes in front of all operands: a pass for each element
    particle: tuple[tuple[int, ...], ...] | None = None  # of the Laplacian: of each query, and of each key


def bind(compute: Pass, x: Operands, how: How) -> list[Any]:
    operands, tree = jax.tree.flatten(x)
    found: list[Any] = PRIMITIVES[compute].bind(*varying_alike(operands), tree=tree, how=how)
    return found


def varying_alike(operands: list[Any]) -> list[Any]:
    """The operands, cast inside of `jax.shard_map` from what all devices share to what differs between them: the
    transpose of the cast adds up their gradients."""
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        return operands
    axes = [varies_over(jax.typeof(x)) for x in operands]
    every = frozenset[str]().union(*axes)
    return [jax.lax.pcast(x, tuple(every - own), to="varying") if every - own else x for x, own in zip(operands, axes)]


def varies_over(aval: Any) -> frozenset[str]:
    """The axes of a mesh along which devices have values of their own."""
    kind = getattr(aval, "manual_axis_type", None)  # since JAX 0.10
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


def like(aval: Any, result: Any) -> Any:
    """The type of a result of operands of this one, which varies along the same axes."""
    if not varies_over(aval):
        return jax.core.ShapedArray(result.shape, result.dtype)
    sharding = aval.sharding.update(spec=PartitionSpec(*[None] * len(result.shape)))
    return aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)


def is_none(x: Any) -> bool:
    return x is None


def array_of(name: str, x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    if library(x) != "numpy":
        raise TypeError(f"{name}: got {words_for(x)}, expected a jax.Array or a numpy.ndarray")
    return jnp.asarray(x)

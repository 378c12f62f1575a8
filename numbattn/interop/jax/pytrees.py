"""Masks, scores and gradients as pytrees."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from typing import Any

import jax

from ...base.gradients import Gradients, SecondGradients
from ...base.values import Value, kinds
from ...masks import Mask
from ...scores import Part


def _flattened(value: Value) -> Any:
    """The arrays of a mask or a part of a score, or the masks in it; and everything else."""
    fields = value.__getstate__()
    traced = {name: x for name, x in fields.items() if _is_traced(x)}
    return tuple(traced.values()), (tuple(traced), tuple([x for x in fields.items() if x[0] not in traced]))


def _is_traced(x: Any) -> bool:
    return hasattr(x, "shape") or isinstance(x, Mask) or (isinstance(x, tuple) and bool(x) and all(map(_is_traced, x)))


def _unflattened(kind: type[Value], static: Any, traced: Any) -> Value:
    """Without checks, since JAX also passes objects that are not arrays."""
    value = object.__new__(kind)
    value._set(**dict(zip(static[0], traced)), **dict(static[1]))
    return value


for _kind in filter(is_dataclass, (*kinds(Mask), *kinds(Part))):
    jax.tree_util.register_pytree_node(_kind, _flattened, partial(_unflattened, _kind))
jax.tree_util.register_pytree_node(Gradients, lambda x: ((*x, x.score), None), lambda _, x: Gradients(*x))
jax.tree_util.register_pytree_node(
    SecondGradients, lambda x: ((*x, x.dlse, x.score), None), lambda _, x: SecondGradients(*x)
)

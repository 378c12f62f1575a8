"""Tangents of particles: rows of q, k and v that depend on the coordinates of one particle alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..base.checks import integer_array, library, own, words_for
from ..base.values import moved, rounded
from .order import taken
from .problem import Inputs, Problem
from .tangents import Tangents, weights_of


class Particles(NamedTuple):
    """Whose coordinates rows depend on: a number from 0 on, or -1, nobody's."""

    total: int
    queries: Any  # int64, (seqlen_q,)
    keys: Any  # int64, (seqlen_k,)

    @property
    def order(self) -> Any:
        """Keys by their particles, those of nobody first."""
        return np.argsort(self.keys, kind="stable")

    @property
    def starts(self) -> Any:
        """Particle number p has the keys order[starts[p]:starts[p + 1]]."""
        return np.searchsorted(np.sort(self.keys), np.arange(self.total + 1))

    def own(self, tangents: Tangents) -> Tangents:
        """These tangents, zero for what is nobody's."""
        return tangents._replace(q=_cleared(tangents.q, self.queries), k=_cleared(tangents.k, self.keys),
                                 v=_cleared(tangents.v, self.keys))  # fmt: skip

    @property
    def is_sorted(self) -> bool:
        """Whether keys lie in the order of their particles."""
        return not np.any(self.keys[1:] < self.keys[:-1])


def in_order(inputs: Inputs, tangents: Tangents, particles: Particles) -> tuple[Inputs, Tangents, Particles] | None:
    """The call with its keys in the order of their particles; None if its mask or its score depends on where they are.
    """
    if particles.is_sorted:
        return inputs, tangents, particles
    if inputs.mask._parts or any(part._has_step for part in inputs.score):
        return None
    order = moved(particles.order, inputs.k)
    k, v, tk, tv = (taken("k", x, order) for x in (inputs.k, inputs.v, tangents.k, tangents.v))
    own = particles._replace(keys=np.sort(particles.keys))
    return inputs._replace(k=k, v=v), tangents._replace(k=tk, v=tv), own


def _cleared(x: Any, of_rows: Any) -> Any:
    rows = np.flatnonzero(of_rows < 0)
    if x is None or not rows.size:
        return x
    x = x.copy()
    x[..., moved(rows, x), :] = 0
    return x


def checked_particles(particle: Any, problem: Problem, inputs: Inputs, tangents: Tangents) -> Particles:
    """The Particles that the tangents of a call are of."""
    rows = checked_rows(particle, problem.seqlen_q, problem.seqlen_k)
    others = [part for part in inputs.score if part._is_nonlinear]
    others += [part for (part, _), x in zip(weights_of(inputs), tangents.score) if x is not None]
    if inputs.dropout is not None or others:
        got = inputs.dropout if inputs.dropout is not None else others[0]
        raise NotImplementedError(f"particle: got one with {got}, allowed beside it are scores that are added to S and "
                                  "do not move, Alibi, Bias, RelativeBias and Sink, and no dropout")  # fmt: skip
    return Particles(1 + max(int(x.max(initial=-1)) for x in rows), *rows)


def checked_rows(particle: Any, seqlen_q: int, seqlen_k: int) -> list[Any]:
    """Whose the rows of q and of k are."""
    pair = particle if isinstance(particle, tuple) else (particle, particle)
    if len(pair) != 2:
        raise ValueError(f"particle: got a tuple of {len(pair)}, expected an array, or two: of queries and of keys")
    return [_checked_rows(x, size, of) for x, size, of in zip(pair, (seqlen_q, seqlen_k), "qk")]


def _checked_rows(particle: Any, size: int, of: str) -> Any:
    """Whose the rows of q or of k are, by a NumPy array: its largest number says how many tangents there are."""
    array = own("particle", integer_array("particle", particle, "(rows,)"))
    if library(array) != "numpy":
        raise TypeError(f"particle: got a {words_for(array)}, expected a list or an array of NumPy")
    if array.shape != (size,):
        raise ValueError(f"particle: got the shape {array.shape}, expected ({size},), one for each row of {of}")
    if array.min(initial=0) < -1 or array.max(initial=0) >= 2**31:
        raise ValueError(f"particle: got {array.min()} to {array.max()}, allowed -1 to {2**31 - 1}")
    return array.astype(np.int64)


def by_products(
    problem: Problem, inputs: Inputs, tangents: Tangents, particles: Particles, P: Any
) -> dict[str, Any]:  # fmt: skip
    """What cpu/particle_laplacian.py, where the equations are, computes but for o, from P; by products of matrices."""
    dtype, count, owners = problem.sum_dtype, tangents.count, particles.queries
    P, own = rounded(P, dtype), np.flatnonzero(owners >= 0)
    seen = P.any(axis=-2)[..., None]                            # what no query sees may be anything
    Q, K, V = (_of_heads(x, problem) for x in inputs[:3])
    V = np.where(seen, V, 0)
    O, W = P @ V, np.zeros_like(P)
    jo, O2 = np.empty((particles.total, count, *O.shape), dtype, like=P), np.zeros_like(O)
    same, starts = np.asarray(owners[:, None] == particles.keys, dtype, like=P), particles.starts
    numbers = starts[:-1, None] + np.arange(np.diff(starts).max(initial=0))
    is_key = np.asarray(numbers < starts[1:, None], dtype, like=P)
    keys = moved(particles.order[np.minimum(numbers, problem.seqlen_k - 1)], P)  # of each particle, as many
    for c in range(count):
        jQ, jK, jV = (0 * x if jx is None else _of_heads(jx[c], problem)
                      for jx, x in zip(tangents, (Q, K, V)))  # fmt: skip
        A, B, both = (np.where(P != 0, problem.sum_dtype.type(inputs.scale) * x @ y.swapaxes(-2, -1), 0)
                      for x, y in ((jQ, K), (Q, jK), (jQ, jK)))  # fmt: skip
        jV, W = np.where(seen, jV, 0), W + P * (A * A + B * B + 2 * same * (A * B + both))
        A, B = P * A, P * B
        P_keys, B_keys = (np.moveaxis(x[..., keys] * is_key, -2, -3) for x in (P, B))  # (..., particles, rows, keys)
        b, a = B_keys.sum(axis=-1, keepdims=True), A.sum(axis=-1, keepdims=True)
        jO = P_keys @ jV[..., keys, :] + B_keys @ V[..., keys, :] - b * O[..., None, :, :]
        jO[..., owners[own], own, :] += (A @ V - a * O)[..., own, :]
        b[..., owners[own], own, :] += a[..., own, :]
        jo[:, c] = np.moveaxis(jO, -3, 0)
        O2 += 2 * ((B + same * A) @ jV - (b * jO).sum(axis=-3))
    O2 += W @ V - W.sum(axis=-1, keepdims=True) * O
    jo = jo.reshape(particles.total * count, *problem.out_shape)
    return {"to": rounded(jo, problem.result_dtype), "o2": O2.reshape(1, *problem.out_shape)}


def _of_heads(x: Any, problem: Problem) -> Any:
    """q, k, v or a tangent of it in the dtype of sums, with keys and values for each query head."""
    x = rounded(x, problem.sum_dtype)
    is_shared = x.ndim > 2 and 1 < x.shape[-3] < problem.heads
    return np.repeat(x, problem.heads // x.shape[-3], axis=-3) if is_shared else x

"""The options of a call split into arrays, which a framework traces, and everything else, which it compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..api import attention_backward, attention_forward
from ..base.checks import Array, dtype_of, flag, number
from ..base.values import Placeholder
from ..call.problem import Saved, describe
from ..call.tangents import SavedTangents, checked_tangents
from ..dropout import Dropout
from ..jets import attention_forward_jvp, attention_laplacian, tangents_of_gradients
from ..masks import Mask, as_mask
from ..scores import Part, Scores, as_parts


class Functions(NamedTuple):
    """Attention and its derivatives, on arrays of NumPy or CuPy, with the options of `Options.given`."""

    forward: Callable[..., Any]  # (q, k, v, **given) -> o, saved
    forward_jvp: Callable[..., Any]  # (q, k, v, tq, tk, tv, tscore=, **given) -> o, to, saved, tsaved
    tangent: Callable[..., Any]  # (q, k, v, o, lse, tq, tk, tv, tscore=, **given) -> to, tlse
    saved: Callable[..., Any]  # (q, k, v, o, lse, **given) -> saved
    backward: Callable[..., Any]  # (do, saved, dlse=, deterministic=) -> grads
    saved_tangents: Callable[..., Any]  # (saved, tq, tk, tv, tscore, to, tlse) -> tsaved
    tangents_of_gradients: Callable[..., Any]  # (do, saved, tsaved, tdo, dlse, tdlse, deterministic) -> grads
    describe: Callable[..., Any]  # (q, k, v, may_wait=, **given) -> problem, inputs
    laplacian: Callable[..., Any]  # (q, k, v, jq, jk, jv, lq, lk, lv, jscore=, lscore=, **given) -> o, jo, lo
    coordinates: Callable[..., Any]  # (inputs, (jq, jk, jv, jscore), (lq, lk, lv, lscore)), checked -> how many


def tangent_by(forward_jvp: Callable[..., Any]) -> Callable[..., Any]:
    """`Functions.tangent` where o and lse are computed again with it."""

    def tangent(q: Any, k: Any, v: Any, o: Any, lse: Any, *tqkv: Any, **given: Any) -> tuple[Any, Any]:
        _, to, _, tsaved = forward_jvp(q, k, v, *tqkv, **given)
        return to, tsaved.tlse

    return tangent


def _saved_tangents(saved: Any, tq: Any, tk: Any, tv: Any, tscore: Any, to: Any, tlse: Any) -> SavedTangents[Any]:
    tangents, several = checked_tangents(saved.inputs, tq, tk, tv, tscore)
    return SavedTangents(saved.problem, tangents, to, tlse, several)


def _coordinates(inputs: Any, first: Sequence[Any], second: Sequence[Any]) -> int:
    (jq, jk, jv, jscore), (lq, lk, lv, lscore) = first, second
    tangents, _ = checked_tangents(inputs, jq, jk, jv, jscore, "j", several=True)
    checked_tangents(inputs, lq, lk, lv, lscore, "l", several=False)
    return tangents.count


ATTENTION = Functions(attention_forward, attention_forward_jvp, tangent_by(attention_forward_jvp), Saved.of,
                      attention_backward, _saved_tangents, tangents_of_gradients, describe, attention_laplacian,
                      _coordinates)  # fmt: skip
INSTEAD = "; to trace it, or for its gradient, pass q * scale with scale=1.0"


@dataclass(frozen=True)
class Options:
    """The options of a call, with a Placeholder for each array in its mask and score: hashable, and equal to those of
    any other call that only differs in the elements of these arrays.

    Attributes
    ----------
    own_axes : tuple
        How many of the last axes of each array are not batch axes; None if it has no batch axes.
    weights : tuple
        The numbers of the arrays with a place in ``grads.score``, in its order.
    wanted : tuple
        Whether the gradient of each of these is wanted.
    """

    causal: bool
    mask: Mask | None
    scale: float | None
    dropout: Dropout | None
    score: tuple[Part, ...]
    own_axes: tuple[int | None, ...]
    weights: tuple[int, ...]
    wanted: tuple[bool, ...]

    on_gpu = False  # whether arrays have to be, even where a framework has NumPy's

    @property
    def functions(self) -> Functions:
        """What computes it."""
        return ATTENTION

    @property
    def parts(self) -> list[Any]:
        """The part of the score that each of the weights is in."""
        return [part for part in self.score for _ in part._weights]

    def given(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The options of numbattn's functions, with these arrays, of NumPy or CuPy, in their places."""

        def filled(x: Any) -> Any:
            return arrays[x.number] if isinstance(x, Placeholder) else x

        mask = None if self.mask is None else self.mask._mapped(filled)
        score = [part._mapped(filled) for part in self.score]
        return {"causal": self.causal, "mask": mask, "scale": self.scale, "dropout": self.dropout, "score": score}


def taken_apart(
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> tuple[Options, list[Any]]:
    """Options and their arrays: first those of the mask, then those of the parts of the score."""
    arrays: list[Any] = []

    def placeholder(x: Any) -> Placeholder:
        arrays.append(x)
        return Placeholder(len(arrays) - 1, tuple(x.shape), dtype_of(x))

    causal, scale = flag("causal", causal), None if scale is None else number("scale", scale, INSTEAD)
    mask = None if mask is None else as_mask(mask)
    parts = as_parts(score)
    values: list[Mask | Part] = [*(() if mask is None else mask._leaves), *parts]
    own_axes = tuple([axes for value in values for axes in _own_axes(value)])
    weights, first = list[int](), sum(len(leaf._arrays()) for leaf in values[: len(values) - len(parts)])
    for part in parts:
        own = list(part._arrays().values())
        weights += [first + [x is weight for x in own].index(True) for weight in part._weights]
        first += len(own)
    wanted = tuple([wanted for part in parts for wanted in part._wanted])
    return Options(
        causal, None if mask is None else mask._mapped(placeholder), scale, dropout,
        tuple([part._mapped(placeholder) for part in parts]), own_axes, tuple(weights), wanted,
    ), arrays  # fmt: skip


def _own_axes(value: Mask | Part) -> list[int | None]:
    """`Options.own_axes` for the arrays of a mask or a part of a score."""
    known = value._axes_of_arrays()
    return [known.get(name) for name in value._arrays()]

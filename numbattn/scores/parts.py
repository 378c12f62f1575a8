"""What all parts of a score are, and what a user gives as a score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np

from ..base.checks import flag, floats, words_for
from ..base.forks import cached_property
from ..base.origin import Crop
from ..base.values import Value, broadcasts, kinds


class Part(Value):
    """What all parts of a score share."""

    _is_nonlinear = False  # whether it has a derivative that is not 1
    _is_linear = True  # whether S is linear in its arrays
    _has_step = True  # whether it is a function of S; a Sink is one more logit of each row
    _needs_positions = True  # whether what it does depends on where the query and the key are
    _crops_by_sequence = False  # whether `_cropped` takes places that differ between sequences, as in caches
    # examples for `python -m numbattn`, by name: (shape of S without the batch, dtype, gradient) -> a part
    _examples: tuple[tuple[str, Callable[[tuple[int, ...], Any, bool], Part]], ...] = ()

    def _applied(self, S: Any) -> Any:
        """S (..., seqlen_q, seqlen_k) after this part."""
        return S

    def _derivative(self, S: Any) -> Any:
        """The derivative of `_applied` at S."""
        return 1

    def _curvature(self, S: Any) -> Any:
        """The second derivative of `_applied` at S."""
        return 0

    def _gradient_along(self, dS: Any, tdS: Any, S: Any, tS: Any, tangent: Any) -> Any:
        """The tangent of `_gradient`, but not of a Sink; tS: that of S; tangent: see `_tangent`."""
        return self._gradient(tdS, None, None)

    def _gradient(self, dS: Any, lse: Any, delta: Any, S: Any = None) -> Any:
        """The gradient of its array, from dS after it; a Sink's, from lse and delta = rowsum(dO * O) - dlse; a Score's,
        those of all arrays one after the other, from dS and S before it.
        """

    def _gradients(self, found: Any, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """The gradient of each of `_weights`, None for one that is not wanted; found: what `_gradient` returns, with
        these leading axes, which each gradient has, too."""
        return tuple([None if found is None else found.reshape((*lead, *x.shape)) for x in self._weights])

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        """Refuse arrays that do not broadcast to the batch axes, heads included, and the lengths."""

    def _within(self, frame: Any) -> Part:
        """The part in a call whose mask has this frame, which may be None."""
        return self

    def _cropped(self, crop: Crop, frame: Any) -> Part:
        """The part of the score for a crop of the score matrix; frame: of the whole matrix's mask."""
        return self

    def _in_order(self, order: Any) -> Part | None:
        """The part for tokens of a grid in another order, or None: see numbattn.call.order."""
        return None if self._needs_positions else self

    def _in_order_of(self, array: Any) -> Any:
        """For a part in order: one of `_weights` of the part as given, or its tangent."""
        return array

    def _as_given(self, gradient: Any) -> Any:
        """The gradient of the arrays of the part as given, from that of those of this one in order."""
        return gradient

    @property
    def _is_trained_on_grid(self) -> bool:
        """Whether it is a bias by offset on a grid whose table has a gradient."""
        return False

    @property
    def _weights(self) -> tuple[Any, ...]:
        """The arrays that have a place among the gradients."""
        return tuple(self._arrays().values())

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for."""
        return type(self), *[x.dtype for x in self._arrays().values()]

    @property
    def _wants_gradient(self) -> bool:
        return False

    @property
    def _keeps_scores(self) -> bool:
        """Whether the gradients of its arrays depend on S before it."""
        return False

    def _tangent(self, tangents: Sequence[Any], dtype: Any, backward: bool) -> Any:
        """What moves S along the tangents of its arrays, None where that is zero; None if it does not.

        dtype: of sums; backward: whether gradients have tangents, too, which there are even if all of these are zero.
        """

    def _gradient_like(self, sum_dtype: np.dtype[Any], wide: bool) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of the gradient that kernels write, of all its arrays."""
        (array,) = self._weights
        return array.shape, sum_dtype if wide else array.dtype

    @property
    def _wanted(self) -> tuple[bool, ...]:
        """Whether the gradient of each of `_weights` is wanted."""
        return (self._wants_gradient,) * len(self._weights)

    def _asking(self, wanted: Sequence[bool]) -> Part:
        """The part with only the gradients of these of `_weights` wanted."""
        return self


class ArrayPart(Part):
    """A part with an array, its first field, which has a gradient."""

    gradient: bool

    _own_axes: int | None = 0

    def __post_init__(self) -> None:
        name, part = self._name, type(self).__name__
        array = floats(f"{part} {name}", getattr(self, name))
        self._set(**{name: array, "gradient": flag(f"{part} gradient", self.gradient)})

    @property
    def _name(self) -> str:
        kind: Any = type(self)
        return next(iter(kind.__dataclass_fields__))

    @property
    def _array(self) -> Any:
        return getattr(self, self._name)

    @property
    def _weights(self) -> tuple[Any, ...]:
        return (self._array,)

    @property
    def _wants_gradient(self) -> bool:
        return self.gradient

    def _asking(self, wanted: Sequence[bool]) -> Part:
        return self if wanted[0] == self.gradient else replace(cast(Any, self), gradient=wanted[0])

    def _tangent(self, tangents: Sequence[Any], dtype: Any, backward: bool) -> Any:
        """The part with the tangent in place of its array: S and its tangent are linear in that."""
        (x,) = tangents
        return None if x is None else replace(cast(Any, self), **{self._name: x})

    def _of_value(self, S: Any) -> Any:
        """For what `_tangent` returns: the tangent of `_applied` where S has none."""
        return self._applied(np.zeros_like(S))

    def _of_derivative(self, S: Any) -> Any:
        """The tangent of `_derivative` where S has none."""
        return 0

    def _whole_shape(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        """What its array is broadcast to."""
        return batch

    def _fit(self, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> None:
        array, shape = self._array, self._whole_shape(batch, seqlen_q, seqlen_k)
        if not broadcasts(array.shape, shape):
            raise ValueError(f"score: {type(self).__name__} {self._name}: got the shape {array.shape}, which does not "
                             f"broadcast to {shape}{_one_more_axis(self._name, array.shape, shape)}")


def _one_more_axis(name: str, own: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """How to pass an array that lacks an axis, for an error; "" for others."""
    fits = (at for at in range(1, len(own) + 1) if broadcasts((*own[:at], 1, *own[at:]), shape))
    return next((f"; pass {name}[{':, ' * at}None]" for at in fits), "")


Scores: TypeAlias = Part | Sequence[Part] | None


def as_parts(score: Scores) -> tuple[Part, ...]:
    """The parts of what a user may give: None, a part, a list or tuple of them."""
    if score is None:
        return ()
    if isinstance(score, Part):
        return (score,)
    parts = tuple(score) if isinstance(score, list | tuple) else (score,)
    for part in parts:
        if not isinstance(part, Part):
            kind = "Bias" * hasattr(part, "shape") or "Score" * (callable(part) and not isinstance(part, type))
            raise TypeError(f"score: got {words_for(part)}, expected numbattn's {', '.join(names())}, or a list of them"
                            + f"; pass numbattn.{kind}(...) of it" * bool(kind))
    if sum(not part._has_step for part in parts) > 1:
        raise ValueError("score: got more than one Sink, allowed one")
    return parts


def steps_of(parts: Sequence[Part]) -> list[Part]:
    """The parts that do something to S."""
    return [part for part in parts if part._has_step]


def sink_of(parts: Sequence[Part]) -> Any:
    """The Sink among the parts, or None."""
    return next((part for part in parts if not part._has_step), None)


def names(fits: Callable[[type[Part]], bool] = lambda kind: True) -> list[str]:
    """The names of all kinds of parts that numbattn has, and that fit."""
    own = (kind for kind in kinds(Part) if kind._examples and kind.__module__.startswith(__package__))
    return sorted(kind.__name__ for kind in own if fits(kind))



"""How queries and keys are turned, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..base.checks import flag, integer, number
from ..base.forks import cached_property
from ..base.values import Value, remembered
from .scaling import KINDS, TWO_PI, checked


@dataclass(frozen=True, eq=False, repr=False)
class Rotary(Value):
    """Rotary position embeddings (Su et al., arXiv 2104.09864): pairs of features turn by angles in proportion to the
    position of their token, so that products of queries and keys depend on the distance of their positions alone.

    Parameters
    ----------
    base : float, optional
        Pair f of w / 2 turns by ``position * base**(-2 f / w)``, in radians; more than 1.
    dims : int, optional
        The first `dims` features are turned, an even number; the others stay as they are. Default: all.
    interleaved : bool, optional
        Pair f is features f and f + w / 2, as in Llama and GPT-NeoX; or, interleaved, 2 f and 2 f + 1, as in GPT-J.
    scaling : dict, optional
        Frequencies for more positions than a model was trained on, as ``config.rope_scaling`` of transformers has
        them: a name, ``"rope_type"``, and its numbers:

        ========  =================================================================================================
        linear    factor
        ntk       factor, by which the slowest pair is slowed; a base ``base * factor**(w / (w - 2))``
        yarn      factor, original_max_position_embeddings; beta_fast=32, beta_slow=1, attention_factor, mscale,
                  mscale_all_dim, truncate=True: turned features are multiplied by the attention factor, too
        llama3    factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
        default   nothing
        ========  =================================================================================================

    Raises
    ------
    TypeError, ValueError
        For what is of a wrong type or out of range, and for names and numbers that are not known, or missing.

    See Also
    --------
    rotary : which turns arrays.
    KVCache.append : which turns keys as it writes them.

    Notes
    -----
    w is `dims`; where positions have several axes each turns an equal part of these features, in order, and w is the
    width of a part. Two values are equal if their numbers are.

    Examples
    --------
    >>> import numbattn as na
    >>> na.Rotary(500000.0, scaling={"rope_type": "linear", "factor": 4})
    Rotary(base=500000.0, interleaved=False, scaling=(('rope_type', 'linear'), ('factor', 4.0)))
    """

    base: float = 10000.0
    dims: int | None = None
    interleaved: bool = False
    scaling: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        base = number("Rotary base", self.base)
        if not 1 < base < math.inf:
            raise ValueError(f"Rotary base: got {base}, expected a finite number above 1")
        dims = self.dims if self.dims is None else integer("Rotary dims", self.dims, low=2)
        if dims is not None and dims % 2:
            raise ValueError(f"Rotary dims: got {dims}, expected an even number")
        scaling = self.scaling if self.scaling is None else checked(self.scaling)
        self._set(base=base, dims=dims, interleaved=flag("Rotary interleaved", self.interleaved), scaling=scaling)

    # ------------------------------------------------------------------------------------------------- what calls ask
    def _width(self, features: int, axes: int = 1, name: str = "x") -> int:
        """The features that turn along each axis of positions, of an array of this name with so many."""
        dims = features if self.dims is None else self.dims
        if dims > features:
            raise ValueError(f"Rotary dims: got {dims}, at most {features}, the features of {name}")
        if dims % (2 * axes):
            of = f"features of {name}" if self.dims is None else "Rotary dims"
            raise ValueError(f"{of}: got {dims}, expected a multiple of {2 * axes}, pairs along each axis of positions")
        return dims // axes

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """What has been computed of it and its equals, see `remembered`: whoever makes one a call waits once."""
        return known_of(self)

    def _turns(self, width: int) -> tuple[Any, float]:
        """Turns of each pair in a step, float64, and what turned features are multiplied by."""

        def found() -> tuple[Any, float]:
            numbers = dict(self.scaling or {"rope_type": "default"})
            angles, factor = KINDS[numbers.pop("rope_type")](width, self.base, **numbers)
            return angles / TWO_PI, factor

        turns: tuple[Any, float] = remembered(self._known, width, found)
        return turns


@lru_cache(maxsize=64)
def known_of(rotary: Rotary) -> dict[Any, Any]:
    return {}

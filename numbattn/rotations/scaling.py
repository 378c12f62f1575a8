"""Scaled frequencies, for more positions than a model was trained on: by name, as the configurations of models give
them. Each takes the features that are turned and the base, and returns the angles of a step, in radians, and a factor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..base.checks import flag, integer, number, words_for

NAMES = "rope_type", "type"  # the latter in older configurations
TWO_PI = 2 * math.pi
Found = tuple[Any, float]


def frequencies(width: int, base: float) -> Any:
    """base**(-2 f / width) for each pair f."""
    return base ** (-np.arange(0, width, 2) / width)


def default(width: int, base: float) -> Found:
    return frequencies(width, base), 1.0


def linear(width: int, base: float, factor: float) -> Found:
    """Positions divided by a factor (Chen et al., arXiv 2306.15595)."""
    return frequencies(width, base) / factor, 1.0


def ntk(width: int, base: float, factor: float) -> Found:
    """A larger base, by which the slowest pair alone is slowed by the whole factor ("NTK-aware")."""
    return frequencies(width, base * factor ** (width / (width - 2)) if width > 2 else base), 1.0


def yarn(
    width: int, base: float, factor: float, original_max_position_embeddings: int, beta_fast: float = 32.0,
    beta_slow: float = 1.0, attention_factor: float | None = None, mscale: float | None = None,
    mscale_all_dim: float | None = None, truncate: bool = True,
) -> Found:  # fmt: skip
    """Pairs with few turns within the trained length are slowed, those with many are not, with a ramp in between; and
    all are multiplied by a factor (Peng et al., arXiv 2309.00071)."""

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the trained length, as a fraction."""
        return width * math.log(original_max_position_embeddings / (turns * TWO_PI)) / (2 * math.log(base))

    def size(of: float) -> float:
        return 0.1 * of * math.log(factor) + 1 if factor > 1 else 1.0

    first, last = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    slowed = np.clip((np.arange(width // 2) - first) / (last - first or 0.001), 0, 1)
    if attention_factor is None:
        attention_factor = size(mscale) / size(mscale_all_dim) if mscale and mscale_all_dim else size(1)
    return frequencies(width, base) * (1 - slowed + slowed / factor), attention_factor


def llama3(
    width: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Found:  # fmt: skip
    """As in Llama 3.1: pairs with fewer turns within the trained length than the low factor are slowed, those with
    more than the high one are not, with a ramp in between."""
    found = frequencies(width, base)
    turns = original_max_position_embeddings * found / TWO_PI
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return found * (kept + (1 - kept) / factor), 1.0


KINDS: dict[str, Callable[..., Found]] = {x.__name__: x for x in (default, linear, ntk, yarn, llama3)}
PARAMETERS = {name: dict(list(inspect.signature(kind).parameters.items())[2:]) for name, kind in KINDS.items()}


def checked(scaling: Any) -> tuple[tuple[str, Any], ...]:
    """A scaling as pairs of names and numbers, its own name first."""
    if not isinstance(scaling, Mapping | tuple):
        raise TypeError(f"Rotary scaling: got {words_for(scaling)}, expected a dict with a rope_type and its numbers")
    given = dict(scaling)
    names = [given.pop(name) for name in NAMES if name in given]
    kind = names[0] if names else None
    if kind not in KINDS:
        raise ValueError(f"Rotary scaling: got the rope_type {kind!r}, allowed {', '.join(KINDS)}")
    allowed = PARAMETERS[kind]
    for name in given:
        if name not in allowed:
            raise ValueError(f"Rotary scaling: got {name} for {kind}, allowed {', '.join(allowed) or 'nothing'}")
    found = {}
    for name, about in allowed.items():
        if name not in given and about.default is about.empty:
            raise ValueError(f"Rotary scaling: got no {name}, which {kind} needs")
        found[name] = _number(f"Rotary scaling {name}", given.get(name, about.default), about)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in found and found[low] >= found[high]:
            raise ValueError(f"Rotary scaling {high}: got {found[high]}, expected more than {low}, {found[low]}")
    return (NAMES[0], kind), *found.items()


def _number(name: str, value: Any, about: inspect.Parameter) -> Any:
    if isinstance(about.default, bool):
        return flag(name, value)
    if value is None and about.default is None:
        return None
    if about.annotation == "int":
        return integer(name, value, low=1)
    found = number(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name}: got {found}, expected a finite number above 0")
    return found

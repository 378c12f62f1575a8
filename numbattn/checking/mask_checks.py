"""A check of a user's mask function: what it reads, and whether compiled code does the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.checks import words_for
from ..base.interrupts import imported
from ..base.values import moved
from ..masks import visible
from ..masks.where import Where
from .score_checks import check_reads, checked_sizes, compared, cupy_if_any, raising_nothing, words_of


def check_mask(mask: Where, seqlen_q: int = 16, seqlen_k: int = 16, *, heads: int = 1, batch: int = 1) -> float:
    """Look for reads of a mask function outside of its arrays; compare the compiled function with plain Python.

    In a call of attention the compiled function does not check indices. So pass the lengths, heads and elements of a
    batch that the mask will be used with.

    Parameters
    ----------
    mask : Where
    seqlen_q, seqlen_k : int, optional
        How many queries and keys there are. The function is called for pairs of these as in `check_score`.
    heads, batch : int, optional
        How many heads, and elements of the batch, there are.

    Returns
    -------
    shown : float
        The share of visible elements among those compared, up to 256.

    Raises
    ------
    TypeError
        For anything but a Where, and for a function that attention also refuses.
    ValueError
        If the function, compiled for CPUs, or for a GPU if CuPy finds one, differs from Python, where it may also raise
        an error; or if it reads outside of its arrays. The message names the element.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> na.check_mask(na.Where(lambda batch, head, i, j: i // 4 == j // 4))
    0.25
    >>> looks_up = na.Where(lambda batch, head, i, j, x: x[j], arrays=[np.ones(500, bool)])
    >>> na.check_mask(looks_up, 500, 501)
    Traceback (most recent call last):
      ...
    ValueError: mask: <lambda> reads outside of its arrays, of shapes (500,), at batch = 0, head = 0, i = 0, j = 500
    """
    if not isinstance(mask, Where):
        raise TypeError(f"mask: got {words_for(mask)}, expected a numbattn.Where")
    shape = checked_sizes(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    mask, of_cpus = mask._like(np.empty(0)), imported("numbattn.cpu.where")  # Numba is not imported before
    compiled = of_cpus.one_test(mask)
    check_reads("mask", mask, shape)
    places = list(compared(shape))
    wanted = [_in_python(mask, place) for place in places]
    _compare(mask, "compiled", places, [compiled(*place) for place in places], wanted)
    xp = cupy_if_any()
    if xp is not None:
        few = tuple(map(min, shape, (2, 2, 16, 16)))
        near = xp.empty(0)
        shown = np.broadcast_to(moved(visible(mask._like(near)._fit(few), few[2], few[3], near), np.empty(0)), few)
        places = list(np.ndindex(few))
        _compare(mask, "on the GPU", places, shown.ravel(), [_in_python(mask, place) for place in places])
    return float(np.mean(wanted))


def _in_python(mask: Where, place: Any) -> bool:
    with raising_nothing("mask", mask.function.__qualname__, "", place):
        return mask._test(*place)


def _compare(mask: Where, how: str, places: Any, got: Any, wanted: Any) -> None:
    for place, one, other in zip(places, got, wanted):
        if bool(one) != other:
            raise ValueError(f"mask: {mask.function.__qualname__}, {how} gives {bool(one)}, in Python {other}, at "
                             f"{words_of(place)}")  # fmt: skip

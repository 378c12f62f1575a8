"""Cosine and sine of a turn, of one element, for all backends: reduced to an eighth of a turn in float64, in which
nothing is rounded, then Taylor's polynomials in the dtype of sums."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ROUND, QUARTER = 1.5 * 2.0**52, math.pi / 2  # what rounds to integers, if it is added; the angle of a quarter turn
DEGREES = {"float32": 9, "float64": 17}  # beyond these terms are less than half of the last digit


def cosine_and_sine(dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions of turns in this dtype; on GPUs a row and a column follow, which they do not look at."""
    real, degree = np.dtype(dtype).type, DEGREES[np.dtype(dtype).name]
    of_cosine, of_sine = (
        tuple([real((-1) ** (k // 2) / math.factorial(k)) for k in range(highest, -1, -2)])
        for highest in (degree - 1, degree)
    )

    def ahead_by(shift: float) -> Callable[..., Any]:
        """cos(2 pi turns) - the sine is a cosine a quarter turn before."""

        def function(turns, row=0, column=0):  # type: ignore[no-untyped-def]
            quarters = 4 * turns
            whole = (quarters + ROUND) - ROUND
            quadrant = whole - shift
            quadrant -= 4 * ((0.25 * quadrant + ROUND) - ROUND)  # -2 to 2
            x = real((quarters - whole) * QUARTER)
            square, c, s = x * x, of_cosine[0], of_sine[0]
            for a in of_cosine[1:]:
                c = c * square + a
            for a in of_sine[1:]:
                s = s * square + a
            y = s * x if abs(quadrant) == 1 else c
            return y if quadrant == 0 or quadrant == -1 else -y

        return function

    return ahead_by(0), ahead_by(1)

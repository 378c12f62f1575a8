"""The function that kernels apply to a tile of t, compiled apart from them for each kind.

Kernels call it by its address: they are compiled once for all kinds, including a user's own functions. Hidden pairs,
and no others, have t = -inf; they become 0, or -inf for a logarithm.
"""

import ctypes
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...functions.compiled import elementary, exponentials, logarithms
from ...functions.compiled.elementwise import of_one
from ...functions.compiled.errors import naming
from ...points.kinds import CURVATURE, DERIVATIVE, LOGARITHM, VALUE, Derivative, Radial, Words, pair_function
from ..compile import c_function
from ..tile import address_of, call_at, contiguous_view, inline

DIFFERENTIATED = {VALUE: DERIVATIVE, DERIVATIVE: CURVATURE}
ARGUMENTS = [ctypes.c_int64] * 6  # of a CFunction here


# --------------------------------------------------------------------------------------------------------------- steps
class Step(NamedTuple):
    """A kind as kernels take it."""

    function: int  # address
    number: Any  # float64, (1,)
    is_of_product: int  # whether t is a product


def step_of(kind, what, dtype):
    """The Step of a kind, and what has to live as long. what: VALUE, DERIVATIVE, CURVATURE or LOGARITHM."""
    if isinstance(kind, Derivative):
        return step_of(kind.of, DIFFERENTIATED[what], dtype)
    with naming(kind.function.python) if isinstance(kind, Radial) else nullcontext():
        function = function_of(kind.form, what, dtype)
    return Step(function.address, np.array([kind.number], np.float64), int(kind.is_of_product)), function


NO_STEP = Step(0, np.zeros(1), 0)  # t alone


@inline
def apply(S, step, rows, columns):
    """Turn S, which holds t, into kappa, kappa' or the logarithm of kappa, with exp(rows + columns)."""
    number = address_of(step.number)
    call_at(step.function, (address_of(S), S.shape[0], S.shape[1], address_of(rows), address_of(columns), number))


# ------------------------------------------------------------------------------------------------------------ elements
@lru_cache(maxsize=256)
def function_of(kind, what, dtype):
    """The CFunction (S, keys, queries, rows, columns, number) of the form of a kind: all addresses but for two."""

    def make():
        return _over_tiles(pair_function(kind, words_of(dtype), what, kind.is_exponential), what, dtype.type)

    return c_function((__name__, kind, what, dtype.str), ARGUMENTS, make, f"{type(kind).__name__} for points, {what}")


@lru_cache
def words_of(dtype):
    """The Words for an element, with which loops are vectorised."""
    ZERO, ONE = map(dtype.type, (0, 1))

    @inline
    def reciprocal(x):
        return ONE / x

    @inline
    def quotient(x, y):
        return x / y if y > ZERO else ZERO

    @inline
    def where(condition, x, y):
        return x if condition else y

    return Words(
        function=inline, real=dtype.type, log_e=1.0, exp=exponentials.exp, exp_of_sum=elementary.exp,
        log1p=logarithms.log1p, sqrt=np.sqrt, reciprocal=reciprocal, quotient=quotient, power=logarithms.power,
        where=where, of_users=lambda function, order: of_one(function.of(dtype), order),
    )  # fmt: skip


def _over_tiles(element, what, real):
    hidden, nothing = real(-np.inf), real(-np.inf if what == LOGARITHM else 0)

    def apply(S, keys, queries, rows, columns, number):
        S, number = contiguous_view(S, keys, queries, queries, real), contiguous_view(number, 1, 1, 1, np.float64)
        rows = contiguous_view(rows, 1, queries, queries, real)[0]
        columns = contiguous_view(columns, 1, keys, keys, real)[0]
        own = real(number[0, 0])
        for j in range(keys):
            for i in range(queries):
                t = S[j, i]
                x = element(t, rows[i] + columns[j], own)
                S[j, i] = nothing if t == hidden else x

    return apply

"""The functions of `numbattn.points.kinds` of a tile of t.

Only the form of a kind is compiled in; its number, if it has one, comes with each call. Exponentials are powers of 2:
logarithms of rows and columns are added to their exponents, so that nothing overflows.
"""

from functools import lru_cache

from ....functions.compiled.elementwise import of_one
from ....points.kinds import VALUE, Words, pair_function
from ...tile import device, exp2, log2, map_elements, reciprocal, sqrt, where
from ...words.numbers import LOG2_E


@lru_cache
def words_of(ACC):
    """The Words for a tile."""

    @device
    def quotient(x, y):
        return reciprocal(y) * x

    @device
    def log1p(x):
        return log2(x + 1)

    @device
    def power(x, y):
        return exp2(log2(x) * y)

    def of_users(function, order):
        of_number = of_one(function.of(ACC), order)

        @device
        def of_each(t, i, j):
            return of_number(t)

        @device
        def of_tile(T):
            return map_elements(of_each, T, 0, 0, (1, 1), ())

        return of_tile

    return Words(
        function=device, real=ACC, log_e=LOG2_E, exp=exp2, exp_of_sum=exp2, log1p=log1p, sqrt=sqrt,
        reciprocal=reciprocal, quotient=quotient, power=power, where=where, of_users=of_users,
    )  # fmt: skip


def pair_step(kind, ACC, what=VALUE, shifted=False):
    """The device function (T, shift, number) of a tile of t, see `pair_function`."""
    return pair_function(kind, words_of(ACC), what, shifted)

"""Scores: what happens to S = scale Q K^T before the mask, in the order in which the parts are given.

Every part is an element-wise function of S, or, as a Sink, one more logit of each row: a file a kind. It says what it
does to S, its derivative and the derivative of that, and the gradient of its array, all as NumPy's functions do, which
pass CuPy's arrays on to CuPy. Backends have tiles of their own for each kind of part. Parts are values: two are equal
if their numbers are equal and they hold the same arrays, so that a pickled copy of one with arrays is unequal.

A user's function, a `Score`, is kept as it is when the `Score` is made and compiled by Numba when it is needed: see
`numbattn.functions`.
"""

from .parts import ArrayPart, Part, Scores, as_parts, names, sink_of, steps_of

__all__ = ["ArrayPart", "Part", "Scores", "as_parts", "names", "sink_of", "steps_of"]

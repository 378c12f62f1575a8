"""A user's own functions, compiled by Numba for one element, as kernels on CPUs and GPUs call them.

`element` has the function and its derivative, checked. `strict` is the compiler, `wide` has arrays as functions see
them, `nothrow` refuses what may raise an error, `derivative` differentiates by the rules of `dual` and
`numpy_functions`, `errors` reports what Numba refuses. `elementary` has the functions of math, of which `exponentials`
and `logarithms` are vectorised, and which kernels of ours call, too.
"""

from ...base.interrupts import imported

imported("numba")

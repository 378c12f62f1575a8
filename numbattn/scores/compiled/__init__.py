"""Functions of the user's own, compiled by Numba for one element, as kernels on CPUs and GPUs call them.

`element` has the function and its derivative, checked. `strict` is the compiler, `wide` shows arrays, `nothrow` refuses
what may raise an error, `derivative` differentiates by the rules of `dual` and `numpy_functions`, `errors` says what
Numba refuses.
"""

"""A user's own functions, of which masks, scores and kernels are made.

`given` checks what a user gives, `frozen` takes a function as it is at that time, and `entries` shows it the integers
that it reads in plain Python. `compiled` compiles it; that alone imports Numba, and is imported when it is needed.
"""

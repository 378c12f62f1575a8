"""The kernels: one file per pass and tier, and the steps that they share.

Each factory takes plain numbers and names from a plan and returns a `Source`. What it captures is compiled in: dtypes,
tile sizes, which kinds of masks there are. Everything else is an argument.
"""

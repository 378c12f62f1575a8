"""The words in which kernels are described: below the kernels, which use them, and the planner, which reads them."""

from .. import compiler  # noqa: F401, before anything of numba.cuda

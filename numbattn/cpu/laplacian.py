"""Tangents of attention on the CPU and its second derivatives along them: see `tangent`."""

from functools import partial

from .tangent import tangent

laplacian = partial(tangent, bends=True)

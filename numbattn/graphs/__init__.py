"""Attention over the edges of graphs, as of molecules and meshes, with first and second derivatives.

>>> import numpy as np
>>> from numbattn import graphs
>>> rng = np.random.default_rng(0)
>>> g, order = graphs.Graph.from_edges(*rng.integers(100, size=(2, 1200)), (100, 100))
>>> q, k, v = rng.standard_normal((3, 4, 100, 16))                      # 4 heads
>>> o, backprop = graphs.attention_vjp(q, k, v, g, bias=rng.standard_normal(g.edges))
>>> (dq, dk, dv), backprop2 = backprop.vjp(o)
>>> gq, gk, gv, gdo = backprop2(dq, dk, dv)                             # gradients of a function of gradients
>>> gdo.shape
(4, 100, 16)

From positions to forces, in a periodic box:

>>> x, box = 8 * rng.random((100, 3)), np.full(3, 8.0)
>>> g, shifts = graphs.radius_graph(x, 2.0, box=box)
>>> e, to_positions = graphs.differences_vjp(x, g, shifts=shifts, box=box)
>>> bias = -(e**2).sum(axis=-1)                                         # near atoms count for more
>>> o, backprop = graphs.attention_vjp(q, k, v, g, bias=bias)
>>> dx, _ = to_positions(-2 * backprop(o).bias[:, None] * e)            # of (o**2).sum() / 2: minus the forces
>>> dx.shape
(100, 3)

Arrays are NumPy's, computed on CPUs, or CuPy's, computed on the GPU, of float16, bfloat16, float32 or float64. Time and
memory are proportional to the number of edges, and results are equal bit for bit from call to call.
"""

from .attention import GraphBackprop, attention, attention_backward, attention_forward, attention_vjp
from .gradients import GraphGradients, GraphSecondGradients
from .graph import Graph
from .jets import (
    GraphSavedTangents,
    attention_backward_jvp,
    attention_backward_vjp,
    attention_forward_jvp,
    attention_jvp,
    attention_laplacian,
)
from .neighbours import radius_graph
from .positions import differences, differences_vjp, sum_by_key, sum_by_query
from .problem import GraphSaved
from .score import EdgeScore

__all__ = [
    "EdgeScore",
    "Graph",
    "GraphBackprop",
    "GraphGradients",
    "GraphSaved",
    "GraphSavedTangents",
    "GraphSecondGradients",
    "attention",
    "attention_backward",
    "attention_backward_jvp",
    "attention_backward_vjp",
    "attention_forward",
    "attention_forward_jvp",
    "attention_jvp",
    "attention_laplacian",
    "attention_vjp",
    "differences",
    "differences_vjp",
    "radius_graph",
    "sum_by_key",
    "sum_by_query",
]

"""A call over a graph for any framework."""


import numbattn as na
from numbattn.graphs import EdgeScore, Graph


def bending(s, batch, head, edge, i, j, weight):
    return s + weight[head] * s * s


class Call:
    """Arrays by name, the graph, and options; with a query without edges and two edges between the same nodes."""

    def __init__(self, rng):
        nodes, edges = 5, 9
        i, j = rng.integers(nodes - 1, size=edges), rng.integers(nodes, size=edges)
        i[1], j[1] = i[0], j[0]
        self.graph, _ = Graph.from_edges(i, j, (nodes, nodes))
        shapes = {"q": (4, nodes, 3), "k": (2, nodes, 3), "v": (2, nodes, 2), "bias": (edges,), "k_edge": (4, edges, 3),
                  "v_edge": (edges, 2), "factor": (4, edges), "weight": (4,)}  # fmt: skip
        self.arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}

    def of(self, attention, softmax=True, graph=None):
        """The function of the arrays, by position."""

        def function(q, k, v, bias, k_edge, v_edge, factor, weight):
            score = [na.Softcap(3.0), EdgeScore(bending, arrays=[weight], gradient=True)]
            return attention(q, k, v, graph or self.graph, bias=bias, k_edge=k_edge, v_edge=v_edge, factor=factor,
                             softmax=softmax, score=score)  # fmt: skip

        return function

"""The two attentions of DPA-2, a model of the energy of atoms, over graphs and over padded lists of neighbours.

    pip install torch && python examples/23_dpa2.py

Atoms attend to their neighbours, `LocalAtten` in deepmd-kit, and the edges of an atom to each other, `Atten2Map`: this
is attention over a graph whose nodes are edges. A switch that goes to 0 at the radius multiplies scores and weights, by
a function of a score and by a factor, and in the second one so does the product of two directions, its gate.
Everything is in float64. Forces are gradients of an energy, and training on forces derives them again: all arrays have
second derivatives. Results are the same both ways. A step is an energy, forces, and the gradient of a loss on forces by
all parameters; a padded list has as many places for each atom as in DPA-2. With --replay a step on a GPU is recorded as
a CUDA graph: launched from Python one by one, its hundreds of small kernels take longer than the GPU does.
"""

import argparse
import time
from functools import partial
from importlib import import_module

import numpy as np
import torch

from numbattn import graphs
from numbattn.interop.torch import graph_attention

RADIUS, INNER, DENSITY = 4.0, 3.5, 0.1  # angstrom, where the switch is 0 and where it is 1; atoms in a cubic one
SHIFT = 20.0  # of scores: exp(-SHIFT) is what a neighbour counts at the radius
LAYERS, PLACES = 2, 48  # of a padded list
ATOM, EDGE, HEADS, ATOM_HEAD, EDGE_HEAD = 128, 32, 4, 128, 32  # features, and those of a head's queries and keys


# ------------------------------------------------------------------------------------------------------------ both ways
class Lists:
    """Over graphs: arrays of edges are (edges, ...)."""

    def __init__(self, graph):
        starts, self.j = (torch.from_dlpack(x).long() for x in (graph.indptr, graph.indices))
        self.of_edges, self.atoms, degrees = graph, graph.queries, starts.diff()
        self.i = numbered(degrees)
        others = degrees[self.i]  # edges of the atom of each edge
        self.first, ends = numbered(others), others.cumsum(0)
        places = torch.arange(len(self.first), device=self.j.device)
        self.second = places - (ends - others - starts[self.i])[self.first]
        indptr = torch.cat([0 * ends[:1], ends])
        self.of_pairs = graphs.Graph(array_of(indptr), array_of(self.second), graph.edges)

    def from_edges(self, x, empty):
        return x

    def here(self, x):
        return x[self.i]

    def there(self, x):
        return x[self.j]

    def summed(self, x):
        return x.new_zeros(self.atoms, *x.shape[1:]).index_add(0, self.i, x)

    def atoms_attend(self, q, k, v, switch):
        return self.attend(self.of_edges, q, k, v, switch, None)

    def pairs(self, h, switch):
        x = torch.cat([h, switch[:, None]], -1)
        products = x.index_select(0, self.first) * x.index_select(0, self.second)
        return products[:, 3].contiguous(), products[:, :3].sum(-1)

    def edges_attend(self, q, k, v, pairs):
        return self.attend(self.of_pairs, q, k, v, *pairs)

    @staticmethod
    def attend(graph, q, k, v, switch, gate):
        """Of tensors (rows, heads, features)."""
        arrays, factor = ([switch], switch) if gate is None else ([switch, gate], switch * gate)
        score = graphs.EdgeScore(switched if gate is None else gated, arrays=arrays, gradient=True)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return graph_attention(q, k, v, graph, factor=factor, score=score, scale=1.0).transpose(0, 1)


def switched(S, batch, head, edge, i, j, switch):
    return (S + SHIFT) * switch[edge]  # less SHIFT, which the softmax ignores


def gated(S, batch, head, edge, i, j, switch, gate):
    return (S * gate[edge] + SHIFT) * switch[edge]


def numbered(counts):
    """0 as often as the first count says, and so on."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


class Padded:
    """Over lists of so many places: arrays of edges are (atoms, places, ...). Empty places count for nothing, where in
    deepmd-kit each adds exp(-SHIFT) to the sums of a softmax."""

    def __init__(self, graph, places=PLACES):
        lists = Lists(graph)
        starts = torch.from_dlpack(graph.indptr).long()
        if int(starts.diff().max()) > places:
            raise ValueError(f"places: got {places}, expected {int(starts.diff().max())} or more")
        self.at = lists.i, torch.arange(graph.edges, device=lists.i.device) - starts[lists.i]
        self.shape = graph.queries, places
        self.j = self.from_edges(lists.j, torch.arange(graph.queries, device=lists.j.device)[:, None])
        self.mask = self.from_edges(torch.ones_like(lists.j, dtype=torch.bool), False)

    def from_edges(self, x, empty):
        found = x.new_empty(*self.shape, *x.shape[1:])
        found[:], found[self.at] = empty, x
        return found

    def here(self, x):
        return x[:, None]

    def there(self, x):
        return x[self.j]

    def summed(self, x):
        return x.sum(1)

    def atoms_attend(self, q, k, v, switch):
        S = torch.einsum("ihd,ijhd->ihj", q, k[self.j])
        P = self.softmax((S + SHIFT) * switch[:, None] - SHIFT, self.mask[:, None]) * switch[:, None]
        return torch.einsum("ihj,ijhd->ihd", P, v[self.j])

    def pairs(self, h, switch):
        return (switch[:, :, None] * switch[:, None])[:, None], (h @ h.mT)[:, None]

    def edges_attend(self, q, k, v, pairs):
        switch, gate = pairs
        S = torch.einsum("iahd,ibhd->ihab", q, k) * gate
        P = self.softmax((S + SHIFT) * switch - SHIFT, self.mask[:, None, None]) * (switch * gate)
        return torch.einsum("ihab,ibhd->iahd", P, v)

    @staticmethod
    def softmax(S, mask):
        return S.masked_fill(~mask, -torch.inf).softmax(-1)


# ---------------------------------------------------------------------------------------------------------------- model
def init_weights(device="cpu"):
    torch.manual_seed(0)
    of_atoms, of_edges = HEADS * (2 * ATOM_HEAD + ATOM), HEADS * (2 * EDGE_HEAD + EDGE)
    shapes = {"types": (2, ATOM), "edges": (1, EDGE), "energies": (ATOM, 1)}
    for n in range(LAYERS):
        shapes |= {f"qkv_atoms{n}": (ATOM, of_atoms), f"qkv_edges{n}": (EDGE, of_edges), f"of_edges{n}": (EDGE, ATOM),
                   f"o_atoms{n}": (HEADS * ATOM, ATOM), f"o_edges{n}": (HEADS * EDGE, EDGE)}  # fmt: skip
    return {name: (torch.randn(shape, dtype=torch.float64, device=device) / shape[0] ** 0.5).requires_grad_()
            for name, shape in shapes.items()}  # fmt: skip


def heads_of(x, weights, sizes):
    """Queries, which are scaled, keys and values, (..., heads, features)."""
    q, k, v = (x @ weights).unflatten(-1, (HEADS, -1)).split(sizes, -1)
    return q / sizes[0] ** 0.5, k, v


def energy(p, x, types, images, way):
    """The energy of atoms at x, the image of each edge's end being given."""
    e = way.there(x) - way.here(x) + images
    r = e.norm(dim=-1)
    u = ((r - INNER) / (RADIUS - INNER)).clamp(0, 1)
    switch = 1 + u**3 * (-10 + 15 * u - 6 * u**2)
    atoms, edges = p["types"][types], torch.tanh((switch / r)[..., None] * p["edges"])
    pairs = way.pairs(e * (switch / r**2)[..., None], switch)
    for n in range(LAYERS):
        o = way.edges_attend(*heads_of(edges, p[f"qkv_edges{n}"], (EDGE_HEAD, EDGE_HEAD, EDGE)), pairs)
        edges = edges + o.flatten(-2) @ p[f"o_edges{n}"]
        near = way.summed(switch[..., None] * (edges @ p[f"of_edges{n}"]) * way.there(atoms)) / PLACES**0.5
        o = way.atoms_attend(*heads_of(atoms, p[f"qkv_atoms{n}"], (ATOM_HEAD, ATOM_HEAD, ATOM)), switch)
        atoms = atoms + torch.tanh(near) + o.flatten(-2) @ p[f"o_atoms{n}"]
    return (torch.tanh(atoms) @ p["energies"]).sum()


def step(p, x, types, images, way, wanted):
    """The energy, the forces, and the gradients by all parameters of their mean square error."""
    x = x.detach().requires_grad_()
    found = energy(p, x, types, images, way)
    (slope,) = torch.autograd.grad(found, x, create_graph=True)
    loss = (-slope - wanted).square().mean()
    return found.detach(), -slope.detach(), torch.autograd.grad(loss, [*p.values()])


# -------------------------------------------------------------------------------------------------------------- systems
def atoms_in_box(count, device="cpu"):
    """Positions (atoms, 3) of a liquid, types, the graph, and how far away the image of each edge's end is."""
    rng, side = np.random.default_rng(0), round(count ** (1 / 3))
    length = (count / DENSITY) ** (1 / 3)
    places = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)
    x = torch.as_tensor(length / side * (places + rng.uniform(-0.2, 0.2, places.shape)), device=device)
    types = torch.as_tensor(np.arange(count) % 3 > 0, device=device).long()
    box = torch.full((3,), length, dtype=x.dtype, device=device)
    graph, shifts = graphs.radius_graph(array_of(x), RADIUS, box=array_of(box))
    return x, types, graph, torch.from_dlpack(shifts) * box


def ways_of(graph, images):
    """Both, and the images as each has them; places that are empty are far away."""
    return {name: (way, way.from_edges(images, 2 * RADIUS))
            for name, way in (("graphs", Lists(graph)), ("padded", Padded(graph)))}  # fmt: skip


def seconds(run, rounds):
    """The fastest of a few."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()[0].item()  # waits for a GPU
        found.append(time.perf_counter() - start)
    return min(found)


def recorded(run):
    """run, whose kernels a CUDA graph launches from now on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay():
        graph.replay()
        return results

    return replay


def array_of(x):
    """The array in the memory of a tensor."""
    return import_module("cupy" if x.is_cuda else "numpy").from_dlpack(x)


def difference(x, y):
    return float((x - y).abs().max() / y.abs().max())


def compare(count, rounds, device="cpu", replays=False):
    """Both ways with the same atoms: milliseconds of a step, and by how much results differ."""
    p, (x, types, graph, images) = init_weights(device), atoms_in_box(count, device)
    wanted, found, times = torch.randn_like(x), {}, {}
    for name, (way, there) in ways_of(graph, images).items():
        run = partial(step, p, x, types, there, way, wanted)
        found[name] = run()
        if replays:
            run = recorded(run)
            found[name] = run()
        times[name] = 1e3 * seconds(run, rounds)
    (e, forces, grads), (e1, forces1, grads1) = found.values()
    return times, graph.edges, max(map(difference, (e, forces, *grads), (e1, forces1, *grads1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", nargs="+", type=int, default=[64, 216, 512], help="cubes of numbers")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s unless given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, %(default)s unless given")
    parser.add_argument("--replay", action="store_true", help="record a step as a CUDA graph")
    args = parser.parse_args()
    for count in args.atoms:
        times, edges, wrong = compare(count, args.rounds, args.device, args.replay)
        print(f"{count} atoms, {edges} edges: a step takes {times['graphs']:.1f} ms over graphs, "
              f"{times['padded']:.1f} ms over padded lists; results differ by {wrong:.0e}")  # fmt: skip

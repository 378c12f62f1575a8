"""Learn the forces between the atoms of a liquid metal, and let the atoms move by what is learned.

    python examples/22_force_field.py --plot metal.png

An atom attends to those within a radius, in a periodic box. What an edge adds to keys, values and scores are functions
of its length, and so is a factor that goes to 0 at the radius. Its logarithm is added to scores, too: the softmax and
the energy are smooth as atoms come and go.
Forces are its gradients. How atoms repel each other is given; how they bind is learned, from forces alone, of Gupta's
potential for metals. The gradient of their error takes the tangents of these gradients, along the error itself.
"""

import argparse
from importlib import import_module

import numpy as np

from numbattn import graphs

RADIUS, CENTERS, WIDTH = 1.9, 12, 0.12  # in lengths of a bond
HEADS, HEAD_DIM = 4, 8
ATOMS, SPACING, BATCH = 64, 1.12, 4  # in a box; of a cubic lattice; boxes of a step of training
TEMPERATURE, TIME_STEP = 0.05, 0.01
RATE = 0.02


def basis_of(r):
    """Functions of lengths (edges,), and their derivatives, (edges, CENTERS)."""
    away = (r[:, None] - xp.linspace(0.7, RADIUS, CENTERS)) / WIDTH
    basis = xp.exp(-0.5 * away**2)
    return basis, -away / WIDTH * basis


def factor_of(r):
    """What goes to 0 at the radius, and its derivative."""
    angle = np.pi / RADIUS * r
    return 0.5 + 0.5 * xp.cos(angle), -0.5 * np.pi / RADIUS * xp.sin(angle)


def neighbours(x, box, segments=None):
    """The graph of atoms within the radius, the vectors along its edges, their lengths, and back to positions."""
    graph, shifts = graphs.radius_graph(x, RADIUS, box=box, segments=segments)
    e, to_positions = graphs.differences_vjp(x, graph, shifts=shifts, box=box)
    return graph, e, xp.sqrt((e**2).sum(-1)), to_positions


class Model:
    """The energy of an atom is a function of what it attends to, weights @ tanh(o + offsets), beside repulsion."""

    def __init__(self, rng):
        shapes = {"query": (HEADS, 1, HEAD_DIM), "keys": (HEADS, CENTERS, HEAD_DIM), "biases": (HEADS, CENTERS),
                  "values": (HEADS, CENTERS, HEAD_DIM), "offsets": (HEADS, 1, HEAD_DIM),
                  "weights": (HEADS, 1, HEAD_DIM)}  # fmt: skip
        self.parameters = {name: xp.asarray(0.3 * rng.standard_normal(shape)) for name, shape in shapes.items()}

    def arrays(self, graph, basis):
        """q, k and v, and the arrays of edges, all linear in the basis."""
        p, zeros = self.parameters, xp.zeros((HEADS, graph.queries, HEAD_DIM))
        return (p["query"] + zeros, zeros, zeros), {"k_edge": basis @ p["keys"], "v_edge": basis @ p["values"],
                                                    "bias": p["biases"] @ basis.T}  # fmt: skip

    def forces(self, x, box, segments=None):
        """The energy of all atoms, and the force on each."""
        p, (graph, e, r, to_positions) = self.parameters, neighbours(x, box, segments)
        (basis, of_basis), (factor, of_factor) = basis_of(r), factor_of(r)
        nodes, edges = self.arrays(graph, basis)
        edges["bias"] += xp.log(factor)
        o, backprop = graphs.attention_vjp(*nodes, graph, factor=factor, **edges)
        h = xp.tanh(o + p["offsets"])
        grads = backprop(p["weights"] * (1 - h**2))
        push, of_push = repulsion(r, factor, of_factor)
        dr = self.by_length(grads, factor, of_basis, of_factor) + of_push
        dx, _ = to_positions((dr / r)[:, None] * e)
        return float((p["weights"] * h).sum() + push.sum()), -dx

    def by_length(self, grads, factor, of_basis, of_factor):
        """The gradient of the energy by the lengths of edges."""
        p = self.parameters
        dbasis = sum(xp.einsum("hed,hcd->ec", dx, p[name]) for dx, name in ((grads.k_edge, "keys"),
                                                                          (grads.v_edge, "values")))  # fmt: skip
        dbasis += grads.bias.T @ p["biases"]
        return (dbasis * of_basis).sum(-1) + (grads.factor + grads.bias.sum(0) / factor) * of_factor

    def gradients(self, x, box, segments, along):
        """The gradients by the parameters of <along, forces>: minus the tangents of the energy's, as atoms move."""
        p, (graph, e, r, _) = self.parameters, neighbours(x, box, segments)
        (basis, of_basis), (factor, of_factor) = basis_of(r), factor_of(r)
        tr = (e * graphs.differences(along, graph)).sum(-1) / r
        tbasis = of_basis * tr[:, None]
        (nodes, edges), (_, tangents) = self.arrays(graph, basis), self.arrays(graph, tbasis)
        edges["bias"] += xp.log(factor)
        tangents["bias"] += of_factor / factor * tr
        o, to, saved, tsaved = graphs.attention_forward_jvp(
            *nodes, graph, None, None, None, factor=factor, tfactor=of_factor * tr, **edges,
            **{f"t{name}": tx for name, tx in tangents.items()},
        )
        h = xp.tanh(o + p["offsets"])
        slope, th = 1 - h**2, (1 - h**2) * to
        do, tdo = p["weights"] * slope, -2 * p["weights"] * h * th
        grads, tgrads = graphs.attention_backward_jvp(do, saved, tsaved, tdo=tdo)
        found = {"query": tgrads.dq.sum(1, keepdims=True), "weights": th.sum(1, keepdims=True),
                 "offsets": tdo.sum(1, keepdims=True),
                 "biases": tgrads.bias @ basis + grads.bias @ tbasis}  # fmt: skip
        for name, dx, tdx in (("keys", grads.k_edge, tgrads.k_edge), ("values", grads.v_edge, tgrads.v_edge)):
            found[name] = basis.T @ tdx + tbasis.T @ dx
        return {name: -x for name, x in found.items()}


def repulsion(r, factor, of_factor):
    """The energy of each pair, and its derivative by its length."""
    push = 0.2 * xp.exp(-6 * (r - 1))
    return factor * push, (of_factor - 6 * factor) * push


def gupta(x, box, segments=None):
    """Energy and forces of Gupta's potential: beside repulsion, the root of a density binds each atom."""
    graph, e, r, to_positions = neighbours(x, box, segments)
    factor, of_factor = factor_of(r)
    push, of_push = repulsion(r, factor, of_factor)
    pull = xp.exp(-3 * (r - 1))
    root = xp.sqrt(graphs.sum_by_query((factor * pull)[:, None], graph))
    of_root = xp.repeat(0.5 / root[:, 0], xp.diff(graph.indptr).tolist())       # of the query of each edge
    dx, _ = to_positions(((of_push - of_root * (of_factor - 3 * factor) * pull) / r)[:, None] * e)
    return float(push.sum() - root.sum()), -dx


def lattice(rng):
    """Atoms of one box, near the places of a cubic lattice."""
    side = round(ATOMS ** (1 / 3))
    places = np.stack(np.meshgrid(*[np.arange(side)] * 3), axis=-1).reshape(-1, 3)
    return SPACING * (places + rng.uniform(0.02, 0.16) * rng.standard_normal(places.shape))


def train(model, steps, box, rng):
    """Learn in place, by Adam; returns the mean errors of forces over that of none, for each step."""
    segments, found = xp.arange(BATCH + 1) * ATOMS, []
    moments = {name: (xp.zeros_like(x), xp.zeros_like(x)) for name, x in model.parameters.items()}
    for step in range(1, steps + 1):
        x = xp.asarray(np.concatenate([lattice(rng) for _ in range(BATCH)]))
        wanted, (_, forces) = gupta(x, box, segments)[1], model.forces(x, box, segments)
        wrong = forces - wanted
        grads = model.gradients(x, box, segments, 2 * wrong / wrong.size)
        for name, (mean, square) in moments.items():
            mean += 0.1 * (grads[name] - mean)
            square += 0.01 * (grads[name] ** 2 - square)
            size = xp.sqrt(square / (1 - 0.99**step)) + 1e-8
            model.parameters[name] -= RATE * min(1, 2 * (1 - step / steps)) / (1 - 0.9**step) * mean / size
        found.append(float(xp.sqrt((wrong**2).mean() / (wanted**2).mean())))
    return found


def move(forces_of, x, box, steps, rng):
    """Newton's equations by the rule of Verlet; returns the energies: potential, and both."""
    v, energies = xp.asarray(TEMPERATURE**0.5 * rng.standard_normal(x.shape)), []
    _, forces = forces_of(x, box)
    for _ in range(steps):
        v += 0.5 * TIME_STEP * forces
        x = x + TIME_STEP * v
        energy, forces = forces_of(x, box)
        v += 0.5 * TIME_STEP * forces
        energies.append((energy, energy + 0.5 * float((v**2).sum())))
    return np.array(energies)


def plot(file, errors, energies):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(errors)
    left.set(title="error of forces, relative", xlabel="training step")
    times = TIME_STEP * np.arange(1, len(energies) + 1)
    for name, of_atom in (("potential", energies[:, 0]), ("potential + kinetic", energies[:, 1])):
        right.plot(times, (of_atom - energies[0, 1]) / ATOMS, label=name)
    right.set(title="energy of an atom, less that at first", xlabel="time")
    right.legend(frameon=False)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps, %(default)s unless given")
    parser.add_argument("--moves", type=int, default=1500, help="steps of time, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    parser.add_argument("--plot", metavar="FILE", help="save a picture, e.g. metal.png (needs matplotlib)")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)
    box = xp.full(3, SPACING * round(ATOMS ** (1 / 3)))
    model = Model(rng)
    errors = train(model, args.steps, box, rng)
    print(f"forces are learned up to {100 * np.mean(errors[-10:]):.1f} % of their size")
    energies = move(model.forces, xp.asarray(lattice(rng)), box, args.moves, rng)
    drift = abs(energies[:, 1] - energies[0, 1]).max()
    print(f"moving, the potential energy varies by {np.ptp(energies[:, 0]):.3f}, all of it by {drift:.1e} at most")
    if args.plot:
        plot(args.plot, errors, energies)

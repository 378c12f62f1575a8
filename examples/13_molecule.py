"""Learn who binds to whom in a solution, from nothing but the total energies of small sets of particles.

    python examples/13_molecule.py

A molecule of six different sites is surrounded by up to fourteen solvent particles, all of one type. Particle i binds
to particle j, itself included, with Boltzmann's probability, the softmax over j of b[type i, type j] - |x_i - x_j|^2/2,
and a pair contributes the product of its charges. The mean energy of a set is then an attention: its values are
charges, distances are products of queries and keys, and the binding energies b are a bias for pairs that all sets
share. The model learns b, a number for each pair of types, so the order of the solvent particles does not matter; sets
of unequal size are padded, and Lengths hides the padding.
"""

import argparse
from importlib import import_module

import numpy as np

import numbattn as na

SITES, SOLVENT, BATCH = 6, 14, 256  # at most so much solvent
SIZE, TYPES = SITES + SOLVENT, SITES + 1  # of a padded set; each site has a type of its own
NOISE, RATE = 0.1, 0.05
TYPE_OF = np.eye(TYPES, dtype=np.float32)[[*range(SITES), *[SITES] * SOLVENT]]  # (SIZE, TYPES), one-hot


def draw(rng):
    """Positions (BATCH, 1, SIZE, 3), charges (BATCH, 1, SIZE, 1) and sizes (BATCH, 1) of sets; there is one head."""
    positions = rng.standard_normal((BATCH, 1, SIZE, 3), dtype=np.float32)
    charges = rng.standard_normal((BATCH, 1, SIZE, 1), dtype=np.float32)
    sizes = rng.integers(SITES, SIZE + 1, size=(BATCH, 1), dtype=np.int32)
    return [xp.asarray(x) for x in (positions, charges, sizes)]


def energies_vjp(positions, charges, sizes, binding):
    """The energy of each set, (BATCH,), and a function from their gradients dE to the binding energies' gradient."""
    # -|x_i - x_j|^2 / 2 = x_i x_j - |x_j|^2 / 2, up to what a row of scores has in common, which softmax ignores
    q = xp.concatenate([positions, xp.ones_like(charges)], axis=-1)
    k = xp.concatenate([positions, -0.5 * (positions**2).sum(axis=-1, keepdims=True)], axis=-1)
    bias = na.Bias(type_of @ binding @ type_of.T)
    partners, backprop = na.attention_vjp(q, k, charges, mask=na.Lengths(sizes, sizes), score=bias, scale=1.0)

    def gradient(dE):
        (dbias,) = backprop(dE[:, None, None, None] * charges).score
        return type_of.T @ dbias @ type_of

    return (charges * partners).sum(axis=(1, 2, 3)), gradient  # padding has no partners: 0


def relative(binding):
    """The energies without what each row has in common."""
    return binding - binding.mean(axis=1, keepdims=True)


def train(hidden, steps, rng):
    """Learn the binding energies, float32 (TYPES, TYPES)."""
    binding = xp.zeros_like(hidden)
    mean, square = xp.zeros_like(binding), xp.zeros_like(binding)
    for step in range(1, steps + 1):
        sets = draw(rng)
        truth, _ = energies_vjp(*sets, hidden)
        truth += NOISE * xp.asarray(rng.standard_normal(BATCH, dtype=np.float32))
        found, gradient = energies_vjp(*sets, binding)
        grad = gradient(2 * (found - truth) / BATCH)
        mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad**2  # Adam
        step_size = RATE * min(1, 2 * (1 - step / steps))
        binding -= step_size * mean / (1 - 0.9**step) / (xp.sqrt(square / (1 - 0.99**step)) + 1e-8)
        if step % max(1, steps // 5) == 0:
            print(f"step {step}: squared error {float(((found - truth) ** 2).mean()):.4f}, of noise {NOISE**2:.4f}")
    return binding


def largest_change(binding, rng):
    """The largest change in a full set's energy when its solvent particles change places."""
    positions, charges, sizes = draw(rng)
    sizes[:] = SIZE
    order = xp.asarray([*range(SITES), *rng.permutation(np.arange(SITES, SIZE))])
    before, _ = energies_vjp(positions, charges, sizes, binding)
    after, _ = energies_vjp(positions[:, :, order], charges[:, :, order], sizes, binding)
    return float(abs(after - before).max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)
    type_of = xp.asarray(TYPE_OF)
    hidden = xp.asarray(1.5 * rng.standard_normal((TYPES, TYPES), dtype=np.float32))
    learned = train(hidden, args.steps, rng)
    spread, error = (float(x.std()) for x in (relative(hidden), relative(learned) - relative(hidden)))
    print(f"binding energies, which spread over {spread:.2f} kT, are learned to {error:.2f} kT")
    print(f"with the solvent in another order, an energy changes by {largest_change(learned, rng):.0e} at most")

"""Backends: which module computes, by the library of a call's arrays, and whose fault an error in it is."""

from typing import Any

from . import faults
from .interrupts import imported

# Each has forward and run, for passes, see numbattn/call/passes.py, turn, for numbattn/rotations, and states_of_blocks
# and shown_by_function, for functions of masks; that of CuPy also append and check_device, for caches, merge_into and
# sum_into, and chosen, for masks of lists
MODULES = {"numpy": "numbattn.cpu", "cupy": "numbattn.cuda.backend"}
# of sums over pairs of points: sums, gradient, logsumexp, nearest and clusters, see numbattn/points/formula.py
POINTS = {"numpy": "numbattn.cpu.points", "cupy": "numbattn.cuda.backend"}
# of products with block-sparse matrices: forward, backward_x and backward_w, see numbattn/sparse/formula.py
SPARSE = {"numpy": "numbattn.sparse.formula", "cupy": "numbattn.cuda.sparse.backend"}
# of attention over the edges of graphs: forward, tangent, backward and backward_tangent, see numbattn/graphs/passes.py
GRAPHS = {"numpy": "numbattn.cpu.graphs", "cupy": "numbattn.cuda.graphs.backend"}
# of losses over pairs with many features: the steps of a block, see numbattn/points/blocks.py
LOSSES = {"numpy": "numbattn.points.blocks", "cupy": "numbattn.cuda.losses"}
BACKENDS: dict[str, Any] = {}  # by library, imported when first needed: importing Numba takes long


def backend(library: str) -> Any:
    """The backend for arrays of a library, "numpy" or "cupy"."""
    return BACKENDS.get(library) or BACKENDS.setdefault(library, imported(MODULES[library]))


def loss_steps(library: str) -> Any:
    """The module of LOSSES for arrays of a library."""
    return imported(LOSSES[library])


def on_cpus() -> Any:
    """The backend for NumPy arrays, for what the CPU computes whatever the arrays."""
    return imported(MODULES["numpy"])


def run(name: str, problem: Any, *args: Any, chosen: Any = None, **options: Any) -> Any:
    """What the backend's function of this name returns. An error that is numbattn's own fault says so."""
    chosen = chosen or BACKENDS.get(problem.xp) or backend(problem.xp)
    try:
        return getattr(chosen, name)(problem, *args, **options)
    except Exception as error:
        if faults.is_fault(error):
            raise faults.fault(error, problem, chosen) from error
        raise


def run_points(problem: Any, name: str, *args: Any, **options: Any) -> Any:
    """Run a sum over pairs of points, likewise."""
    return run(name, problem, *args, chosen=imported(POINTS[problem.xp]), **options)

"""Sums over pairs of points on CuPy arrays, see `numbattn.points`: passes over a Problem whose q, k and v are points x
and y, and b."""

from typing import Any

from . import kernels
from .kernels.points.kinds import lowered, of_products
from .kernels.points.pairs import COLUMNS, DIFFERENCES, ROWS, X_NORMS, Y_NORMS
from .passes import run
from .words.spec import Pass

VECTORS = ROWS, COLUMNS, X_NORMS, Y_NORMS
SUMS = Pass("sums", kernels.POINT_SUMS, takes=("q", "k", "v", *VECTORS), gives=("o",))
GRADIENT = Pass("gradient", kernels.POINT_GRADIENT, takes=("q", "k", "v", "c", *VECTORS), gives=("dq",))


class Points:
    """The backend for points on GPUs. `current` returns the GPU of a call, normally a launch.GPU."""

    def __init__(self, current: Any) -> None:
        self.current = current

    def sums(self, problem, inputs, kind, rows=None, columns=None):
        """o_i = sum_j kappa_ij b_j, in the dtype of sums; kappa_ij is multiplied by exp(rows_i + columns_j)."""
        o = self.current().empty(problem.out_shape, problem.sum_dtype)
        self.run(SUMS, problem, inputs, kind, {"o": o}, rows, columns)
        return o

    def gradient(self, problem, inputs, kind, c, rows=None, columns=None):
        """dx_i = sum_j kappa'_ij <c_i, b_j> 2 (x_i - y_j), or y_j for a function of x . y, in the dtype of sums."""
        shape = *problem.batch, problem.seqlen_q, problem.head_dim
        dx = self.current().empty(shape, problem.sum_dtype)
        c = c.astype(problem.dtype, copy=False)
        self.run(GRADIENT, problem, inputs, kind, {"c": c, "dq": dx}, rows, columns)
        return dx

    def run(self, pass_, problem, inputs, kind, arrays, rows=None, columns=None):
        """Run a pass with arrays of its own by name; its results are 0 if nobody sees anything."""
        text, number = lowered(kind)
        given = {ROWS: rows, COLUMNS: columns}
        if problem.head_dim > DIFFERENCES and not of_products(text):
            given |= {X_NORMS: norms(inputs.q, problem), Y_NORMS: norms(inputs.k, problem)}
        given = {name: x for name, x in given.items() if x is not None}
        results = [arrays[name] for name in pass_.gives]
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **given, **arrays}
        strides = tuple([arrays[name].strides if name in arrays else None for name in pass_.takes[3:]])
        if not run(self.current(), pass_, problem, inputs, arrays, strides, kind=(text, number)):
            for x in results:
                x.fill(0)


def norms(x, problem):
    """|x|^2 of each point, once where a batch shares them."""
    x = x[tuple([slice(None, None if stride else 1) for stride in x.strides[:-2]])]
    return (x.astype(problem.sum_dtype, copy=False) ** 2).sum(axis=-1)

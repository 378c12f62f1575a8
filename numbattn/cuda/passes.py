"""Attention on CuPy arrays: a Problem's arrays -> kernels -> o, lse and gradients.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph.
"""

import math
from contextlib import nullcontext

import cupy
import numpy as np

from ..masks import Bits, BlockSparse, Dense
from ..problem import Saved, sum_to
from .build import Key
from .launch import current_device, device_of, get_kernel, is_capturing, view_of
from .plan import DELTA_ROWS, KERNELS, STATES_TILES, plan, rounded
from .views import VECTOR_BYTES, alignment, broadcast, pieces

LOG2_E = math.log2(math.e)
OVER_KEYS = ("backward_simt:backward_kv",)  # the others have a block for each tile of queries
GRIDS = {Dense: "dense", Bits: "bits", BlockSparse: "blocks"}
NO_BAND = 0, 0, 0, 0


def forward(problem, inputs, out=None):
    """o, in `out` if given, and what the backward pass needs."""
    call = Call(problem, inputs, out=out)
    o = cupy.empty(problem.out_shape, problem.dtype) if out is None else out
    lse = cupy.empty(problem.lse_shape, problem.sum_dtype)
    if call.is_empty:
        o.fill(0)
        lse.fill(-math.inf)
        return o, Saved(problem, inputs, o, lse)
    with _scratch_memory():
        matrices = *call.qkv(), call.queries(_with_features(o))
        call.run("forward_simt:forward", matrices, [call.line(lse)], inputs.scale * LOG2_E)
    return o, Saved(problem, inputs, o, lse)


def backward(saved, do, dlse=None, deterministic=True):
    """dq, dk, dv. They are equal bit for bit from call to call, whatever `deterministic`."""
    problem, inputs = saved.problem, saved.inputs
    call = Call(problem, inputs, do=do, dlse=dlse)
    grads = [cupy.empty(x.shape, x.dtype) for x in (inputs.q, inputs.k, inputs.v)]
    if call.is_empty:
        for grad in grads:
            grad.fill(0)
        return tuple(grads)
    with _scratch_memory():
        do, o = call.queries(_with_features(do)), call.queries(_with_features(saved.o))
        delta = cupy.empty(problem.lse_shape, problem.sum_dtype)
        lines = call.line(saved.lse), call.line(delta)
        call.run_delta(do, o, *lines, dlse)
        whole = [call.whole(*x) for x in zip(grads, (problem.heads, problem.heads_k, problem.heads_k))]
        dq, dk, dv = whole
        read = *call.qkv(), do
        call.run("backward_simt:backward_kv", (*read, call.keys(dk), call.keys(dv)), lines, inputs.scale,
                 out_dtypes=(dk.dtype.name, dv.dtype.name))
        call.run("backward_simt:backward_q", (*read, call.queries(dq)), lines, inputs.scale, out_dtypes=(dq.dtype.name,))
        for grad, dx in zip(grads, whole):
            if dx is not grad:
                grad[...] = sum_to(dx[..., : grad.shape[-1]], grad.shape)
    return tuple(grads)


class Call:
    """One call: its arrays as Views with all batch axes, and how its kernels are run."""

    def __init__(self, problem, inputs, **others):
        self.problem, self.inputs, self.device = problem, inputs, current_device()
        for name, x in {"q": inputs.q, "k": inputs.k, "v": inputs.v, **others}.items():
            if x is not None and device_of(x) != self.device.index:
                raise ValueError(f"{name}: got an array of device {device_of(x)}, expected device {self.device.index}, "
                                 "CuPy's current one")
        self.head_dim = rounded("head_dim", problem.head_dim)
        self.head_dim_v = rounded("head_dim_v", problem.head_dim_v)
        self.is_empty = not (math.prod(problem.batch) and problem.seqlen_q and problem.seqlen_k)
        self.axes = problem.batch[:-1] or (1,)
        self.alive = [_with_features(x) for x in (inputs.q, inputs.k, inputs.v)]

    # ------------------------------------------------------------------------------------------------------- views
    def qkv(self):
        q, k, v = self.alive
        return self.queries(q), self.keys(k), self.keys(v)

    def queries(self, x):
        """(..., seqlen_q, features) -> (batch axes, heads, ...)"""
        return broadcast(view_of(x), (*self.axes, self.problem.heads))

    def keys(self, x):
        """(..., seqlen_k, features) -> (batch axes, heads_k, ...)"""
        return broadcast(view_of(x), (*self.axes, self.problem.heads_k))

    def line(self, x):
        """(..., seqlen_q) -> (batch axes, heads, seqlen_q)"""
        return broadcast(view_of(x), (*self.axes, self.problem.heads), own=1)

    def whole(self, grad, heads):
        """Where the kernels put a gradient: where it belongs, or, if it is to be summed over axes, an array of sums."""
        shape = (*self.problem.batch[:-1], *([heads] if self.problem.batch else []), *grad.shape[-2:])
        if grad.shape == shape and grad.shape[-1]:
            return grad
        return cupy.empty((*shape[:-1], max(shape[-1], 1)), self.problem.sum_dtype)

    # ----------------------------------------------------------------------------------------------------- kernels
    def run(self, factory, matrices, lines, scale, **compiled_in):
        """Run a kernel over tiles of all matrices."""
        problem, dropout = self.problem, self.inputs.dropout
        mask = self.inputs.mask
        band = mask.band(problem.seqlen_q, problem.seqlen_k)
        one_band = all(isinstance(number, int) for number in band)
        kinds = ("band" if one_band else "bands", *(GRIDS[kind] for kind in problem.mask_kinds if kind in GRIDS))
        aligned = all(_alignment(view) == VECTOR_BYTES for view in matrices)
        tiles, key = plan(
            factory, self.device, problem.dtype.name, self.head_dim, self.head_dim_v, mask=kinds,
            dropout=problem.dropout, nbytes=VECTOR_BYTES if aligned else 0, **compiled_in,
        )  # fmt: skip
        if factory in OVER_KEYS:
            blocks = problem.heads_k * -(-problem.seqlen_k // tiles.tile_n)
        else:
            blocks = problem.heads * -(-problem.seqlen_q // tiles.tile_m)
        sight, alive = self.sight(mask, band, kinds, tiles)
        kernel = get_kernel(key)
        for first, batch, views in pieces(self.axes, [*matrices, *lines, *sight]):
            kernel.launch(
                blocks * batch, *views, *_drops(dropout), first * problem.heads,
                problem.heads // problem.heads_k, scale, 1 if dropout is None else dropout.scale,
            )  # fmt: skip

    def sight(self, mask, band, kinds, tiles):
        """What kernels.visibility.Sight holds, one after the other, and the arrays to keep alive."""
        problem, alive = self.problem, []

        def view(array, own=2):
            alive.append(array)
            return broadcast(view_of(array), (*self.axes, problem.heads), own)

        if kinds[0] == "band":
            found = list(band)
        else:
            numbers = [cupy.broadcast_to(cupy.asarray(x, np.int32), problem.batch) for x in band]
            found = [*NO_BAND, view(cupy.stack(numbers, axis=-1), own=1)]
        for cells, rows, cols, _ in mask.grids():
            found += [view(cells), rows, cols]
        if "blocks" in kinds:
            m_blocks, n_blocks = -(-problem.seqlen_q // tiles.tile_m), -(-problem.seqlen_k // tiles.tile_n)
            found.append(view(cupy.empty((*problem.batch, m_blocks, n_blocks), np.uint8)))
            key = Key.of(KERNELS + "visibility:tile_states", self.device.cc, mask=kinds,
                         tile_m=tiles.tile_m, tile_n=tiles.tile_n)  # fmt: skip
            blocks = problem.heads * -(-m_blocks * n_blocks // STATES_TILES)
            for _, batch, views in pieces(self.axes, found):
                get_kernel(key).launch(blocks * batch, *views, problem.seqlen_q, problem.seqlen_k)
        return found, alive

    def run_delta(self, do, o, lse, delta, dlse):
        """delta = rowsum(dO * O) - dlse."""
        problem = self.problem
        aligned = _alignment(do) == _alignment(o) == VECTOR_BYTES
        key = Key.of(
            KERNELS + "delta:delta", self.device.cc, dtype=problem.dtype.name, head_dim_v=self.head_dim_v,
            dlse=dlse is not None, nbytes=VECTOR_BYTES if aligned else 0,
        )  # fmt: skip
        blocks = problem.heads * -(-problem.seqlen_q // DELTA_ROWS)
        for _, batch, views in pieces(self.axes, [do, o, lse, lse if dlse is None else self.line(dlse), delta]):
            get_kernel(key).launch(blocks * batch, *views)


def _with_features(x):
    """x; a column of zeros if it has no features: they change no product."""
    return x if x.shape[-1] else cupy.zeros((*x.shape[:-1], 1), x.dtype)


def _alignment(view):
    return alignment(view.shape, view.strides, view.itemsize, view.pointer)


def _drops(dropout):
    """What kernels.dropout.Drops holds, but for the number of the first matrix."""
    return (0, 0, 0, 0) if dropout is None else (dropout.threshold, dropout.offset, *dropout.key)


def _scratch_memory():
    """Where a call's own arrays come from: CuPy's pool. In a capture they belong to the graph, for as long as it lives."""
    if is_capturing():
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    return nullcontext()

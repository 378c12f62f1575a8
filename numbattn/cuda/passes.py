"""Attention on CuPy arrays: a Problem's arrays -> kernels -> o, lse and gradients.

Everything happens on CuPy's current device and stream, in CuPy's memory, and nothing waits for the device: a call may
be captured in a CUDA graph. What follows from shapes, strides and kinds is worked out once, see `_launches`.
"""

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import cupy
import numpy as np

from ..masks import Bits, BlockSparse, Dense
from ..problem import Saved, sum_to
from .build import Key
from .counters import counters
from .launch import current_device, device_of, get_kernel, is_capturing, pointer_of
from .plan import (
    DELTA_ROWS,
    HOPPER,
    KERNELS,
    STATES_TILES,
    STATES_WORD,
    forward_factory,
    heads_abreast,
    hopper_plan,
    near_masked,
    plan,
    rounded,
    sums_of_kv,
)
from .views import VECTOR_BYTES, View, alignment, broadcast, fits_tensor_map, pieces

LOG2_E = math.log2(math.e)
COUNTERS = View(0, 4, (2,), (4,))
GRIDS = {Dense: "dense", Bits: "bits", BlockSparse: "blocks"}


def forward(problem, inputs, out=None, save=True):
    """o, in `out` if given, and what the backward pass needs, if it is to be saved."""
    o = cupy.empty(problem.out_shape, problem.dtype) if out is None else out
    lse = cupy.empty(problem.lse_shape, problem.sum_dtype) if save else None
    with _scratch_memory():
        call = Call(problem, inputs, out=out)
        lines = [cupy.empty(problem.lse_shape, problem.sum_dtype) if lse is None else lse]
        if call.is_empty:
            o.fill(0)
            lines[0].fill(-math.inf)
        elif forward_factory(call.device, problem.dtype.itemsize) == HOPPER:
            call.run_in_boxes(o, lines)
        else:
            call.run("forward_simt:forward", [*call.qkv, _with_features(o)], lines, inputs.scale * LOG2_E)
    return o, Saved(problem, inputs, o, lse)


def backward(saved, do, dlse=None, deterministic=True):
    """dq, dk, dv. They are equal bit for bit from call to call, whatever `deterministic`."""
    problem, inputs = saved.problem, saved.inputs
    grads = [cupy.empty(x.shape, x.dtype) for x in (inputs.q, inputs.k, inputs.v)]
    with _scratch_memory():
        call = Call(problem, inputs, do=do, dlse=dlse)
        if call.is_empty:
            for grad in grads:
                grad.fill(0)
            return tuple(grads)
        do, o, lse = _with_features(do), _with_features(saved.o), saved.lse
        delta = cupy.empty(problem.lse_shape, problem.sum_dtype)
        call.run_delta(do, o, lse, delta, dlse)
        sums = [call.whole(grad, heads) for grad, heads in zip(grads, (problem.heads, *[problem.heads_k] * 2))]
        dq, dk, dv = sums
        for sums_of in sums_of_kv(call.device, problem.dtype.name, *_head_dims(problem)):
            call.run("backward_simt:backward_kv", [*call.qkv, do, dk, dv], [lse, delta], inputs.scale, sums_of=sums_of)
        call.run("backward_simt:backward_q", [*call.qkv, do, dq], [lse, delta], inputs.scale)
        for grad, whole in zip(grads, sums):
            if whole is not grad:
                grad[...] = sum_to(whole[..., : grad.shape[-1]], grad.shape)
    return tuple(grads)


class Call:
    """One call: what its kernels have in common."""

    def __init__(self, problem, inputs, **others):
        self.problem, self.inputs, self.device = problem, inputs, current_device()
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), *others.items()):
            self.check_device(name, x)
        self.is_empty = not (problem.seqlen_q and problem.seqlen_k and math.prod(problem.batch))
        self.qkv = [_with_features(x) for x in (inputs.q, inputs.k, inputs.v)]
        self.band = inputs.mask._band(problem.seqlen_q, problem.seqlen_k)
        self.mask, self.in_mask, self.cell_sizes = ("band",), [], []  # kinds; arrays; rows and columns of cells
        if problem.mask_kinds:
            self.unpack(inputs.mask)

    def unpack(self, mask):
        """What kernels get to know of a mask."""
        if not all(isinstance(number, int) for number in self.band):
            numbers = [cupy.broadcast_to(cupy.asarray(x, np.int32), self.problem.batch) for x in self.band]
            self.mask, self.band, self.in_mask = ("bands",), (0, 0, 0, 0), [cupy.stack(numbers, axis=-1)]
        self.mask += tuple(GRIDS[kind] for kind in self.problem.mask_kinds if kind in GRIDS)
        for cells, rows, cols, _ in mask._grids():
            self.check_device("mask", cells)
            self.in_mask.append(cells)
            self.cell_sizes += rows, cols

    def check_device(self, name, x):
        if x is not None and device_of(x) != self.device.index:
            raise ValueError(f"{name}: got an array of device {device_of(x)}, expected device {self.device.index}, "
                             "CuPy's current one")

    def whole(self, grad, heads):
        """Where the kernels put a gradient: where it belongs, or, if it is to be summed over axes, an array of sums."""
        batch = (*self.problem.batch[:-1], heads) if self.problem.batch else ()
        shape = (*batch, grad.shape[-2], max(grad.shape[-1], 1))
        return grad if grad.shape == shape else cupy.empty(shape, self.problem.sum_dtype)

    def run(self, factory, matrices, lines, scale, **compiled_in):
        """Run a kernel over all tiles. Whether it can: the matrices may lie otherwise than it needs them."""
        problem, dropout = self.problem, self.inputs.dropout
        if len(matrices) > 4:
            compiled_in["out_dtypes"] = tuple(x.dtype.name for x in matrices[4:])
        addresses, layouts = _describe((*matrices, *lines, *self.in_mask))
        found = _launches(factory, problem, self.device, self.mask, layouts, **compiled_in)
        if found is None:
            return False
        sight = *self.band, *self.cell_sizes
        if found.counts:
            addresses.append(counters(self.device.index, is_capturing()))
        if found.states:
            states = cupy.empty(found.states, np.uint32)
            addresses.insert(len(layouts), pointer_of(states))
            for _, launch in found.find_states:
                in_sight = addresses[len(matrices) + len(lines) : len(layouts) + 1]
                launch(in_sight, (*sight, problem.seqlen_q, problem.seqlen_k))
        drops = (0, 0, 0, 0) if dropout is None else (dropout.threshold, dropout.offset, *dropout.key)
        rest = found.group_size, scale, 1 if dropout is None else dropout.scale
        for first, launch in found.launches:
            launch(addresses, (*sight, *drops, first, *rest, *found.more))
        return True

    def run_in_boxes(self, o, lines):
        """The forward pass on Hopper, which moves boxes: what does not lie right for that is copied."""
        q, k, v = self.qkv
        if self.mask[0] == "band" and self.band[3] < self.problem.seqlen_k:  # what lies beyond may be NaN
            k, v = (x[..., : max(self.band[3], 1), :] for x in (k, v))
        (lo, hi, *_), seqlen_k = self.band, self.problem.seqlen_k
        keys = seqlen_k if self.mask[0] == "bands" else max(min(seqlen_k, hi - lo + 1), 0)
        others = {"lines": lines, "scale": self.inputs.scale * LOG2_E, "keys": keys}
        if not self.run(HOPPER, [q, k, v, o], **others):
            target = o if _fits_boxes(o) else cupy.empty((*o.shape[:-1], _padded(o.shape[-1])), o.dtype)
            self.run(HOPPER, [*(_for_boxes(x) for x in (q, k, v)), target], **others)
            if target is not o:
                o[...] = target[..., : o.shape[-1]]

    def run_delta(self, do, o, lse, delta, dlse):
        """delta = rowsum(dO * O) - dlse."""
        addresses, layouts = _describe((do, o, lse, lse if dlse is None else dlse, delta))
        for _, launch in _delta_launches(self.problem, self.device, layouts, dlse is not None):
            launch(addresses, ())


def _with_features(x):
    """x; a column of zeros if it has no features: they change no product."""
    return x if x.shape[-1] else cupy.zeros((*x.shape[:-1], 1), x.dtype)


def _padded(columns):
    """The fewest columns, of 2 bytes, that boxes take."""
    return -(-columns // 8) * 8 or 8


def _fits_boxes(x):
    _, (layout,) = _describe([x])
    return fits_tensor_map(*layout)


def _for_boxes(x):
    """x, or, where boxes of it cannot be moved, a copy with columns of zeros."""
    if _fits_boxes(x):
        return x
    copy = cupy.zeros((*x.shape[:-1], _padded(x.shape[-1])), x.dtype)
    copy[..., : x.shape[-1]] = x
    return copy


def _scratch_memory():
    """Where a call's own arrays come from: CuPy's pool, but in a capture the graph, which keeps them while it lives."""
    return cupy.cuda.using_allocator(cupy.cuda.malloc_async) if is_capturing() else nullcontext()


# -------------------------------------------------------------------------------------- worked out once for a Problem
class Launches(NamedTuple):
    launches: list  # see _prepared
    group_size: int
    states: tuple  # shape of the states of tiles; () without blocks in the mask
    find_states: list  # see _prepared
    more: tuple = ()  # numbers that only this kernel takes
    counts: bool = False  # whether its blocks share out their work by counters


OVER = {  # whose heads, of queries or keys, the matrices of a kernel have, and whose tiles its blocks keep
    "forward_simt:forward": ("qkkq", "q"),
    HOPPER: ("qkkq", "q"),
    "backward_simt:backward_kv": ("qkkqkk", "k"),
    "backward_simt:backward_q": ("qkkqq", "q"),
}


def _describe(arrays):
    """Their addresses, and what else of them a launch depends on."""
    addresses = [pointer_of(x) for x in arrays]
    return addresses, tuple([(x.shape, x.strides, x.itemsize, at % VECTOR_BYTES) for x, at in zip(arrays, addresses)])


@lru_cache(maxsize=4096)
def _launches(factory, problem, device, mask, layouts, **compiled_in):
    """The Launches of a kernel for arrays of these layouts: matrices, lines of sums, bands and cells of the mask. None
    if it moves boxes and a matrix does not lie as they need it."""
    matrix_heads, kept = OVER[factory]
    if factory == HOPPER and not all(fits_tensor_map(*layout) for layout in layouts[: len(matrix_heads)]):
        return None
    lines = len(layouts) - len(matrix_heads) - (mask[0] == "bands") - len(mask[1:])
    tiles, key = _plan(factory, problem, device, mask, layouts[: len(matrix_heads)], **compiled_in)
    views = [_view(problem, layout, of) for layout, of in zip(layouts, matrix_heads)]
    views += [_view(problem, layout, "q", own=1) for layout in layouts[len(views) : len(views) + lines]]
    in_mask = layouts[len(views) :]
    if mask[0] == "bands":
        views.append(_view(problem, in_mask[0], "q", own=1))
    views += [_view(problem, layout, "q") for layout in in_mask[mask[0] == "bands" :]]
    m_blocks, n_blocks = -(-problem.seqlen_q // tiles.tile_m), -(-problem.seqlen_k // tiles.tile_n)
    states, find_states = (), []
    if "blocks" in mask:
        kept_tiles, walked = (m_blocks, n_blocks) if kept == "q" else (n_blocks, m_blocks)
        words = -(-walked // STATES_WORD)
        states = *problem.batch, kept_tiles, 2 * words
        strides = tuple(4 * math.prod(states[i + 1 :]) for i in range(len(states)))
        views.append(_view(problem, (states, strides, 4, 0), "q"))
        states_key = Key.of(KERNELS + "visibility:tile_states", device.cc, tile_m=tiles.tile_m, tile_n=tiles.tile_n,
                            kept=kept, mask=mask)  # fmt: skip
        blocks = problem.heads * -(-kept_tiles * words * STATES_WORD // STATES_TILES)
        find_states = _prepared(problem, states_key, blocks, views[len(matrix_heads) + lines :])
    group_size = problem.group_size
    if factory == HOPPER:  # blocks that do one tile after the other
        abreast = heads_abreast(tiles, mask, group_size, problem.seqlen_q)
        jobs = problem.heads // abreast * m_blocks
        launches = _prepared(problem, key, jobs, views, device.multiprocessors, [COUNTERS])
        has_band = any(kind not in GRIDS for kind in problem.mask_kinds)
        uneven = has_band and compiled_in["keys"] >= problem.seqlen_k  # gives tiles different weights
        near = near_masked(problem.head_dim) if has_band or len(mask) > 1 else 1
        near = -(-max(near, group_size) // abreast)
        return Launches(launches, group_size, states, find_states, (near, abreast, int(not uneven)), counts=True)
    blocks = problem.heads_k * n_blocks if kept == "k" else problem.heads * m_blocks
    return Launches(_prepared(problem, key, blocks, views), group_size, states, find_states)


def _plan(factory, problem, device, mask, matrices, **compiled_in):
    """Tiles and Key of a kernel whose matrices have these layouts."""
    name, head_dims = problem.dtype.name, _head_dims(problem)
    if factory == HOPPER:
        narrow = compiled_in["keys"] < problem.seqlen_k
        return hopper_plan(
            name, problem.head_dim, problem.head_dim_v, **compiled_in, narrow=narrow, mask=mask,
            dropout=problem.dropout, group_size=problem.group_size, seqlen_q=problem.seqlen_q,
        )  # fmt: skip
    nbytes = VECTOR_BYTES if all(alignment(*layout) == VECTOR_BYTES for layout in matrices) else 0
    return plan(factory, device, name, *head_dims, mask=mask, dropout=problem.dropout, nbytes=nbytes, **compiled_in)


@lru_cache(maxsize=4096)
def _delta_launches(problem, device, layouts, dlse):
    """As `_launches`, for delta's kernel."""
    aligned = all(alignment(*layout) == VECTOR_BYTES for layout in layouts[:2])
    key = Key.of(
        KERNELS + "delta:delta", device.cc, dtype=problem.dtype.name, dlse=dlse,
        head_dim_v=rounded("head_dim_v", problem.head_dim_v), nbytes=VECTOR_BYTES if aligned else 0,
    )  # fmt: skip
    views = [_view(problem, layout, "q", own) for layout, own in zip(layouts, (2, 2, 1, 1, 1))]
    return _prepared(problem, key, problem.heads * -(-problem.seqlen_q // DELTA_ROWS), views)


def _view(problem, layout, heads_of, own=2):
    """A View with all batch axes, its pointer counted from the array's address."""
    shape, strides, itemsize, _ = layout
    heads = problem.heads if heads_of == "q" else problem.heads_k
    return broadcast(View(0, itemsize, shape, strides), (*_axes(problem), heads), own)


def _prepared(problem, key, blocks, views, at_most=math.inf, others=()):
    """(number of the first matrix, launch) for each piece of the batch; blocks of one element of it.

    at_most: blocks that are started, where one does the work of many. others: views without batch axes.
    """
    kernel = get_kernel(key)
    return [
        (piece.first * problem.heads, kernel.prepare(min(blocks * piece.batch, at_most), [*piece.views, *others]))
        for piece in pieces(_axes(problem), views)
    ]


def _head_dims(problem):
    """What the kernels are compiled for."""
    return rounded("head_dim", problem.head_dim), rounded("head_dim_v", problem.head_dim_v)


def _axes(problem):
    return problem.batch[:-1] or (1,)

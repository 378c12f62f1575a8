"""Arrays as addresses, shapes and strides, as kernels and tensor maps see them. No CUDA here."""

import math
from itertools import product
from typing import NamedTuple

import numpy as np

from .tile.alignment import VECTOR_BYTES, ArrayLayout, alignment


class View(NamedTuple):
    """The address, shape and strides of an array. It does not keep the memory alive: hold the array."""

    pointer: int
    itemsize: int
    shape: tuple
    strides: tuple  # bytes

    def of_columns(self, first, count):
        """The View of some of the columns, as far as there are any."""
        *lead, columns = self.shape
        pointer, shape = self.pointer + first * self.strides[-1], (*lead, min(count, columns - first))
        return self._replace(pointer=pointer, shape=shape)


class BatchPiece(NamedTuple):
    """Views with one batch axis, (batch, heads, ...), and the part of the batch that they are."""

    first: int
    batch: int
    views: list


def contiguous(shape, dtype):
    """The ArrayLayout of a new array."""
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return ArrayLayout(tuple(shape), tuple(strides), dtype)


def without_memory(shape, dtype):
    """An object like a new NumPy array, which must not be read."""
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, contiguous(shape, dtype).strides)


def fits_tensor_map(layout):
    """Whether the tensor memory accelerator can move all matrices of an array in this layout."""
    backwards = any(stride < 0 for stride, n in zip(layout.strides, layout.shape) if n > 1)
    return layout.shape[-1] > 0 and alignment(layout) == VECTOR_BYTES and not backwards


def for_tensor_map(view):
    """The View with strides that a tensor map takes, even for axes of one element, where they mean nothing."""
    step = -(-view.shape[-1] * view.itemsize // VECTOR_BYTES) * VECTOR_BYTES
    strides = [step if n == 1 else stride for n, stride in zip(view.shape[:-1], view.strides)]
    return view._replace(strides=(*strides, view.itemsize))


def broadcast(view, batch, own=2):
    """The View with all batch axes, heads included, before its last `own` axes: stride 0 where it is broadcast."""
    given = len(view.shape) - own
    lead = [0 if n == 1 else stride for n, stride in zip(view.shape[:given], view.strides)]
    shape = *batch, *view.shape[given:]
    strides = *[0] * (len(batch) - given), *lead, *view.strides[given:]
    return view._replace(shape=shape, strides=strides)


def pieces(axes, views):
    """Views that start with these batch axes, as BatchPieces: one if their strides allow, else several.

    Anything but a View is passed on unchanged.
    """
    if len(axes) == 1:
        return [BatchPiece(0, axes[0], views)]
    count, mine = len(axes), [i for i, view in enumerate(views) if isinstance(view, View)]
    merged = [(axes[-1], [views[i].strides[count - 1] for i in mine])]
    for axis in reversed(range(count - 1)):
        size, steps = merged[0]
        strides = [views[i].strides[axis] for i in mine]
        if axes[axis] == 1 or size == 1 or strides == [size * step for step in steps]:
            merged[0] = size * axes[axis], strides if size == 1 else steps
        else:
            merged.insert(0, (axes[axis], strides))
    *outer, (batch, steps) = merged
    found = []
    for number, index in enumerate(product(*(range(size) for size, _ in outer))):
        piece = list(views)
        for place, i in enumerate(mine):
            pointer, itemsize, shape, strides = views[i]
            pointer += sum(n * strides_of[place] for n, (_, strides_of) in zip(index, outer))
            piece[i] = View(pointer, itemsize, (batch, *shape[count:]), (steps[place], *strides[count:]))
        found.append(BatchPiece(number * batch, batch, piece))
    return found

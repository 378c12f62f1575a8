"""Arrays as kernels take them: one type for all shapes, strides and broadcasts."""

from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from ..base.checks import DTYPES
from ..base.values import put
from ..caches import eight_bits
from .record import HOLE, Later, Record, data_address
from .tile import BFLOAT16, FLOAT8, FLOAT16, INT8, OF_SUMS


class Matrices(NamedTuple):
    """An array as the addresses of its matrices, one for each (batch, head)."""

    address: int
    offsets: Any  # int64 (batch, heads), bytes; of tangents (directions, batch, heads)
    rows: int
    cols: int
    stride: int  # elements from one row to the next


class RowAddresses(NamedTuple):
    """The addresses of rows, in bytes: row r of page p at address + offsets[batch, head] + p page_stride + r
    row_stride.
    """

    address: int
    offsets: Any  # int64 (batch, heads)
    page_stride: int
    row_stride: int


class Tokens(NamedTuple):
    """Keys or values: token t of a sequence is row t % page_size of page table[batch, t // page_size]."""

    place: RowAddresses
    kind: int  # of their numbers: OF_SUMS, FLOAT16, ...
    cols: int
    table: Any  # int32 (batch, pages of a sequence); without pages all is in page 0
    page_size: int
    scales: RowAddresses  # of numbers of 8 bits, a float32 a token


NO_MATRICES, NO_TANGENTS = (Matrices(0, np.zeros((0,) * axes, np.int64), 0, 0, 1) for axes in (2, 3))
NO_SCALES = RowAddresses(0, np.zeros((0, 0), np.int64), 0, 0)
KINDS = {DTYPES[0]: FLOAT16, DTYPES[1]: BFLOAT16, eight_bits.INT8: INT8, eight_bits.FLOAT8: FLOAT8}


def compact(x):
    """x with one element along each axis whose elements share memory."""
    if 0 not in x.strides:
        return x
    return x[tuple([slice(0, None if stride else 1) for stride in x.strides])]


def readable(x, dtype, new=np.empty):
    """x itself if kernels can read its matrices in `dtype`, else a copy, with one matrix for those that share memory,
    which `new` allocates."""
    flags = x.flags
    if x.dtype == dtype and flags.aligned and (flags.c_contiguous or has_rows(x.shape, x.strides, x.itemsize)):
        return x
    *lead, _, _ = compact(x).shape
    copy = new((*lead, *x.shape[-2:]), np.dtype(dtype))
    put(copy, x[tuple(map(slice, lead))])
    return copy


def readable_along(x, dtype, new=np.empty):
    """The same of an array with directions in front, of which each has matrices, shared or not."""
    found = readable(x, dtype, new)
    return found if len(found) == len(x) else np.broadcast_to(found, (len(x), *found.shape[1:]))


def has_rows(shape, strides, itemsize):
    """Whether an array is matrices of contiguous rows, one after the other."""
    (rows, cols), (row, col) = shape[-2:], strides[-2:]
    return (col == itemsize or cols <= 1) and (row >= cols * itemsize or rows <= 1)


def matrices_of(x, problem):
    """The Matrices of an array (..., heads, rows, columns), broadcast to the problem's batch axes. Keep x alive."""
    return matrices(problem, x.shape, x.strides, x.itemsize)._replace(address=data_address(x))


def matrices(problem, shape, strides, itemsize):
    """The Matrices of an array with this layout."""
    *_, rows, cols = shape
    offsets = offsets_of(shape[:-2], strides[:-2], problem.batch, problem.heads)
    return Matrices(HOLE, offsets, rows, cols, max(strides[-2] // itemsize, cols, 1))


def matrices_along(problem, shape, strides, itemsize):
    """The Matrices of an array (directions, ..., rows, columns) with this layout."""
    count, *own, rows, cols = shape
    batch = count, *(problem.batch or (1,))
    missing = len(batch) - 1 - len(own)
    lead = (count, *[1] * missing, *own), (strides[0], *[0] * missing, *strides[1:-2])
    offsets = offsets_of(*lead, batch, problem.heads).reshape(count, *problem.matrices)
    return Matrices(HOLE, offsets, rows, cols, max(strides[-2] // itemsize, cols, 1))


# ---------------------------------------------------------------------------------------------------- arrays of a call
class Operand(NamedTuple):
    """How kernels take an array of a call."""

    readable: Any  # (array, dtype of sums, new): itself if kernels can read it, else a copy in new(shape, dtype)
    layout: Any  # (problem, shape, strides, itemsize): what a Record has of it
    nothing: Any  # (dtype of sums): what it has in place of None


def contiguous(lead, own):
    """The Operand for arrays (*lead, batch, heads, *own) with these numbers of axes."""

    def layout(problem, shape, strides, itemsize):
        return Later((*shape[:lead], *problem.matrices, *shape[len(shape) - own :]), problem.sum_dtype)

    def nothing(dtype):
        return np.zeros((0,) * (lead + 2 + own), dtype)

    return Operand(lambda x, dtype, new: np.ascontiguousarray(x), layout, nothing)


MATRIX = Operand(readable, matrices, lambda dtype: NO_MATRICES)
HALVES = MATRIX._replace(readable=lambda x, dtype, new: readable(x, DTYPES[1], new),
                         layout=lambda *layout: matrices(*layout[:-1], 2))  # fmt: skip
TANGENT = Operand(readable_along, matrices_along, lambda dtype: NO_TANGENTS)
ROWS, ROWS_ALONG, RESULT, RESULT_ALONG = contiguous(0, 1), contiguous(1, 1), contiguous(0, 2), contiguous(1, 2)


class Operands:
    """The arrays that a kernel takes, by name, each with its Operand."""

    def __init__(self, **operands):
        self.operands, self.described = operands, lru_cache(maxsize=64)(self._described)
        self.readable = [(name, operand.readable) for name, operand in operands.items()]

    def record(self, problem, arrays, new=np.empty):
        """The Record of arrays by name; one that is not there is nothing. new: allocates copies."""
        found, layouts = self.found(problem, arrays, new)
        return self.described(problem, layouts).filled(*found)

    def found(self, problem, arrays, new=np.empty):
        """Those of these arrays that are there, as kernels read them, and the layouts of all."""
        dtype, found, layouts = problem.sum_dtype, [], []
        for name, readable in self.readable:
            if (x := arrays.get(name)) is None:
                layouts.append(None)
            else:
                found.append(x := readable(x, dtype, new))
                layouts.append((x.shape, x.strides))
        return found, tuple(layouts)

    def _described(self, problem, layouts):
        """The Record, without addresses, of arrays of these shapes and strides, or None."""
        dtype = problem.sum_dtype
        return Record(*[operand.layout(problem, *layout, dtype.itemsize) if layout else operand.nothing(dtype)
                        for operand, layout in zip(self.operands.values(), layouts)])  # fmt: skip


class ForwardGiven(NamedTuple):
    """The arrays and options of a forward pass, in the order of its Records."""

    q: Any  # Matrices
    k: Any  # Tokens
    v: Any
    o: Any
    lse: Any  # and its low part, (2, batch, heads, queries); without queries if it is not wanted
    mask: Any
    steps: Any
    drops: Any
    scale: Any
    kept_scale: Any
    sinks: Any


def operands_of(problem, inputs, new, widened=False, narrow=False):
    """q, k and v as kernels read them, in as many arrays as these are in, and their layouts. new: allocates copies;
    widened: whether k and v are converted to the dtype of sums beforehand, not tile by tile; narrow: whether q is not.
    """
    q, k, v = inputs[:3]
    if _is_readable(problem, narrow) and q.flags.aligned and k.flags.aligned and v.flags.aligned:
        return (q, k, v), (None, None, None, q.itemsize)
    q = readable(inputs.q, problem.dtype if narrow else problem.sum_dtype, new)
    cache, dtype = inputs.cache, problem.sum_dtype if widened else None
    k, of_k = _tokens_of(inputs.k, problem, cache, cache and cache.k_scale, dtype, new)
    v, of_v = _tokens_of(inputs.v, problem, cache, cache and cache.v_scale, dtype, new)
    of_q = None if q is inputs.q else (q.shape, q.strides)
    return (q, *k, *v), (of_q, of_k, of_v, q.itemsize)


@lru_cache(maxsize=64)
def _is_readable(problem, narrow):
    """Whether kernels can read q, k and v themselves, if these are aligned."""
    if (problem.dtype != problem.sum_dtype and not narrow) or problem.cache not in (None, (problem.dtype, None)):
        return False
    return all(map(has_rows, problem.shapes, problem.strides, repeat(problem.dtype.itemsize)))


def _tokens_of(x, problem, cache, scale, dtype, new):
    """The arrays of the Tokens of k or v, (..., heads, tokens, features), or of a cache; and their layout, None if it
    is that of x."""
    given, x = x, readable(x, dtype or x.dtype, new)
    if cache is None:
        return (x,), None if x is given else (x.shape, x.strides, x.dtype)
    arrays, table, of_scale = [x], None, None
    if is_paged(problem):
        arrays.append(np.ascontiguousarray(cache.table))
        table = cache.table.shape
    if scale is not None:
        scale = cache._scale_of_tokens(scale)[..., None]
        arrays.append(scale)
        of_scale = scale.shape, scale.strides
    return arrays, (x.shape, x.strides, x.dtype, table, of_scale)


@lru_cache(maxsize=64)
def record_of(problem, layouts, saves):
    """The Record, without addresses, of q, k, v of these layouts, None for those of the problem; of o, and of lse with
    its low part, if it is wanted."""
    q, k, v, itemsize = layouts
    q, k, v = (found or (shape, strides) for found, shape, strides in zip((q, k, v), problem.shapes, problem.strides))
    rows, dtype = (*problem.matrices, problem.seqlen_q), problem.sum_dtype
    lse = Later((2, *rows), dtype) if saves else np.zeros((2, *problem.matrices, 0), dtype)
    return Record(matrices(problem, *q, itemsize), _tokens(problem, *k), _tokens(problem, *v),
                  Later((*rows, problem.head_dim_v), dtype), lse)  # fmt: skip


def _tokens(problem, shape, strides, dtype=None, table=None, scale=None):
    """The Tokens of arrays with these layouts; a cache may have a dtype of its own, a table and scales."""
    dtype = dtype or problem.dtype
    kind, scales = KINDS.get(dtype, OF_SUMS), NO_SCALES if scale is None else _place(problem, *scale)
    if table is None:
        pages, page_size = np.zeros((problem.matrices[0], 1), np.int32), max(problem.seqlen_k, 1)
    else:
        pages, page_size = Later(table, np.int32), problem.cache.page_size
    return Tokens(_place(problem, shape, strides), kind, shape[-1], pages, page_size, scales)


def _place(problem, shape, strides):
    """The RowAddresses of an array (..., heads, rows, columns), or (pages, heads, rows, columns)."""
    axes = slice(1 if is_paged(problem) else 0, -2)
    offsets = offsets_of(shape[axes], strides[axes], problem.batch, problem.heads)
    return RowAddresses(HOLE, offsets, strides[0], strides[-2])


def is_paged(problem):
    return problem.cache is not None and problem.cache.page_size is not None


@lru_cache(maxsize=256)
def offsets_of(shape, strides, batch, heads):
    """Offsets of the matrices of an array with these batch axes; the heads of a group share one."""
    steps = [np.arange(size) * stride for size, stride in zip(shape, strides)] or [np.zeros(1, np.int64)]
    steps[-1] = np.repeat(steps[-1], heads // max(steps[-1].size, 1))
    batch = batch or (1,)
    offsets = np.broadcast_to(sum(np.ix_(*steps)), batch)
    # a copy: NumPy's broadcast arrays are read-only, for which Numba would compile other kernels
    return np.array(offsets.reshape(-1, heads) if offsets.size else np.zeros((0, heads)), np.int64, order="C")

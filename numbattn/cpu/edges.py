"""What kernels over graphs do of an edge: find its rows and numbers, and add to those of results."""

import numpy as np

from ..functions.compiled.exponentials import exp
from ..graphs.edge import Edge
from .product import add_multiple, dot
from .tile import address_of, contiguous_view, inline, philox4x32


@inline
def edge_at(options, batch, head, i, number):
    return Edge(batch, head, i, np.int64(options.lists.others[number]), np.int64(number))


@inline
def row(x, at, number, like):
    """The address of a row of one of the Arrays."""
    return x.address + x.offsets[at.batch, at.head] + number * x.stride * like.itemsize


@inline
def row_or_zeros(x, at, number, zeros):
    return row(x, at, number, zeros) if x.rows else address_of(zeros)


@inline
def with_edge(address, of_edges, at, buffer):
    """The address of a row plus that of an edge, if edges have any."""
    if of_edges.rows == 0:
        return address
    cols = of_edges.cols
    x = contiguous_view(address, 1, cols, cols, buffer.dtype)
    y = contiguous_view(row(of_edges, at, at.number, buffer), 1, cols, cols, buffer.dtype)
    for c in range(cols):
        buffer[c] = x[0, c] + y[0, c]
    return address_of(buffer)


@inline
def number_of(x, at, otherwise, like):
    """A number of an edge."""
    if x.rows == 0:
        return like.dtype.type(otherwise)
    return contiguous_view(row(x, at, at.number, like), 1, 1, 1, like.dtype)[0, 0]


@inline
def add_to(sums, at, number, factor, x, like):
    """Add factor x to a row of results, if they are wanted."""
    if sums.rows:
        add_multiple(row(sums, at, number, like), factor, x, sums.cols)


@inline
def add_number(sums, at, x, like):
    if sums.rows:
        contiguous_view(row(sums, at, at.number, like), 1, 1, 1, like.dtype)[0, 0] += x


@inline
def add_ends(of_k, of_v, at, number, factors, q, do, like):
    """dS q to the gradient of a row of keys, or of what an edge adds to one, and likewise weight do to that of values.
    factors: dS and the weight."""
    add_to(of_k, at, number, factors[0], q, like)
    add_to(of_v, at, number, factors[1], do, like)


@inline
def kept(given, drops, at, like):
    """What dropout multiplies P of an edge by, see `numbattn.dropout_mask`: the element (0, number) of a matrix."""
    real, number = like.dtype.type, at.number
    if not drops.drops:
        return real(1)
    matrix, zero = np.uint64(at.batch * given.q.offsets.shape[1] + at.head), np.uint64(0)
    counter = np.uint64(number // 16 * 4 + number // 2 % 4), zero, matrix, drops.offset
    left, right, _, _ = philox4x32(*counter, drops.key_low, drops.key_high)
    drawn = (right if number // 8 % 2 else left) >> np.uint64(number % 2 * 16) & np.uint64(0xFFFF)
    return real(drops.scale if drawn >= drops.threshold else 0)


@inline
def keys_of(arrays, at, buffers, factor, like):
    """Of an edge k + k_edge, v + v_edge, bias and factor, or the tangents of these; factor: where none is given."""
    k = with_edge(row_or_zeros(arrays.k, at, at.j, like), arrays.k_edge, at, buffers[0])
    v = with_edge(row_or_zeros(arrays.v, at, at.j, like), arrays.v_edge, at, buffers[1])
    return k, v, number_of(arrays.bias, at, 0, like), number_of(arrays.factor, at, factor, like)


@inline
def sum_of_products(x, y, z, w, cols, like):
    """x y + z w"""
    return dot(x, y, cols, like.dtype) + dot(z, w, cols, like.dtype)


@inline
def weight_of(S, lse, softmax, like):
    """P of an edge, and its first and second derivative by S; 0 where no edge of a query has any weight."""
    zero = like.dtype.type(0)
    if softmax:
        P = exp(S - lse) if lse != -np.inf else zero
        return P, P, P
    return S, like.dtype.type(1), zero

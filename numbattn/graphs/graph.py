"""A graph: which keys each query sees, as lists of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import Array, check_values, integer, library, same_library, words_for
from ..base.forks import cached_property
from ..base.values import Value, moved

TAKER = "numbattn.graphs"
# on a GPU: edges of a row that is long, which a block takes, or a part of so many edges at most; rows among which those
# of like length are side by side, to walk along their edges together
LONG, PART, WINDOW = 192, 1024, 1024
MOST = 2**31 - 2  # queries, keys and edges: kernels count them in int32


class Lists:
    """For each query, or each key, where its edges begin, (rows + 1,); and of each edge, in this order, the key or
    query at its other end, and its number, None where edges are in the order of their numbers. All are of int32."""

    def __init__(self, starts: Any, others: Any, numbers: Any) -> None:
        self.starts, self.others, self.numbers = starts, others, numbers

    @cached_property
    def rows(self) -> Any:
        """Rows by their length, longest first, within windows: of each its number, and where it begins and ends, (3,
        rows). Long rows have `parts`; here they are -1 and empty."""
        numbers, edges = np.arange(len(self.starts) - 1, like=self.starts), self._edges
        order, short = np.argsort(numbers // WINDOW * (MOST + 1) - edges, kind="stable"), edges <= LONG
        first = self.starts[:-1][order]
        return np.stack([np.where(short, numbers, -1)[order], first, first + (edges * short)[order]]).astype(np.int32)

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Parts of long rows, (4, parts): of each the row, where it begins and ends, and of how many it is the first,
        or 0; and how many there are of rows that have several, which come first, and in all, (2,). There are as many
        columns as there can be parts."""
        edges, most = self._edges, max(len(self.others) // LONG, 1)
        several, alone = (edges + PART - 1) // PART * (edges > PART), (edges > LONG) & (edges <= PART)
        own = np.concatenate([several, alone.astype(several.dtype)])
        ends, numbers = own.cumsum(), np.arange(most, like=own)
        at = np.minimum(np.searchsorted(ends, numbers, side="right"), len(own) - 1)
        row, place = at % len(edges), numbers - (ends - own)[at]
        first = self.starts[row] + place * PART
        found = np.stack([row, first, np.minimum(first + PART, self.starts[row + 1]), own[at] * (place == 0)])
        return found.astype(np.int32), ends[len(edges) - 1 :: len(edges)].astype(np.int32)

    @property
    def _edges(self) -> Any:
        """How many each row has."""
        return np.maximum(self.starts[1:] - self.starts[:-1], 0).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Graph(Value):
    """Edges from queries to the keys that they see: rows of neighbours in compressed form, as of `scipy.sparse`'s CSR.

    Query i sees the keys ``indices[indptr[i]:indptr[i + 1]]``, and edge number e leads to the key ``indices[e]``.
    Several edges between the same nodes are several terms, as for periodic images; self-loops are edges like others,
    and queries and keys may have none. A batch of graphs of unequal size is one graph, whose keys are counted on.

    Parameters
    ----------
    indptr : array of integers, (queries + 1,)
        NumPy's or CuPy's, as the arrays of the calls; begins with 0 and ends with the number of edges.
    indices : array of integers, (edges,)
    keys : int, optional
        The number of keys. Default: as many as queries.

    Attributes
    ----------
    indptr, indices : arrays of int32
        Copies, unless they were contiguous and of int32: do not edit these.
    queries, keys, edges : int

    Raises
    ------
    TypeError
        For anything but integers.
    ValueError
        For shapes that do not fit, and on NumPy arrays for an indptr that does not ascend from 0 to the number of edges
        and for keys out of range. Nobody looks at CuPy arrays, for which the host would wait: there an edge whose key
        is out of range counts as absent. `check` looks.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn import graphs
    >>> graphs.Graph(np.array([0, 2, 2, 3]), np.array([0, 2, 1]))
    Graph(3 queries, 3 keys, 3 edges)
    """

    indptr: Any
    indices: Any
    keys: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        same_library(TAKER, indptr=self.indptr, indices=self.indices)
        for name, x, shape in (("indptr", self.indptr, "(queries + 1,)"), ("indices", self.indices, "(edges,)")):
            if x.dtype.kind not in "iu":
                raise TypeError(f"{name}: got {words_for(x)}, expected an array of integers")
            if x.ndim != 1 or (name == "indptr" and not x.size):
                raise ValueError(f"{name}: got the shape {x.shape}, expected {shape}")
            if x.size > MOST:
                raise ValueError(f"{name}: got {x.size} elements, at most {MOST}")
        keys = len(self.indptr) - 1 if self.keys is None else integer("keys", self.keys, 0, MOST)
        if library(self.indptr) == "numpy":
            _check(self.indptr, self.indices, keys)
        self._set(indptr=_int32(self.indptr, len(self.indices)), indices=_int32(self.indices, keys), keys=keys)

    @classmethod
    def from_edges(cls, queries: Array, keys: Array, shape: tuple[int, int]) -> tuple[Graph, Any]:
        """The graph of edges in any order, which are sorted by query on the device, stably.

        Parameters
        ----------
        queries, keys : arrays of integers, (edges,)
            The query and the key of each edge.
        shape : (int, int)
            The numbers of queries and of keys.

        Returns
        -------
        graph : Graph
        order : array of integers, (edges,)
            Edge number e of the graph was number order[e]: pass ``bias[..., order]`` for a bias of the edges as given.

        Raises
        ------
        TypeError, ValueError
            As from `Graph`.

        Examples
        --------
        >>> import numpy as np
        >>> from numbattn import graphs
        >>> graph, order = graphs.Graph.from_edges(np.array([2, 0, 0]), np.array([1, 0, 2]), (3, 3))
        >>> graph.indptr, graph.indices, order
        (array([0, 2, 2, 3], dtype=int32), array([0, 2, 1], dtype=int32), array([1, 2, 0]))
        """
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise ValueError(f"shape: got {shape!r}, expected the numbers of queries and of keys")
        m, n = (integer("shape", size, 0, MOST) for size in shape)
        xp = same_library(TAKER, queries=queries, keys=keys)
        x, y = _integers("queries", queries), _integers("keys", keys)
        if x.ndim != 1:
            raise ValueError(f"queries: got the shape {x.shape}, expected (edges,)")
        if x.shape != y.shape:
            raise ValueError(f"keys: got the shape {y.shape}, expected {x.shape}, that of queries")
        if xp == "numpy":
            check_values("queries", x, m - 1)
            check_values("keys", y, n - 1)
        x, y = _int32(x, m), _int32(y, n)
        if xp == "cupy":  # an edge of no query is one to no key
            y = np.where((x >= 0) & (x < m), y, -1)
            x = np.clip(x, 0, max(m - 1, 0))
        order = np.argsort(x, kind="stable")
        indptr = np.searchsorted(x[order], np.arange(m + 1, dtype=np.int32, like=x))
        return cls(indptr, y[order], n), order

    def __repr__(self) -> str:
        return f"Graph({self.queries} queries, {self.keys} keys, {self.edges} edges)"

    @property
    def queries(self) -> int:
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        return len(self.indices)

    def check(self) -> None:
        """Look at the arrays of a graph on a GPU, and wait for it.

        Raises
        ------
        ValueError
            As from `Graph` on NumPy arrays.
        """
        host = np.zeros(0)
        _check(moved(self.indptr, host), moved(self.indices, host), self.keys)

    @cached_property
    def _by_query(self) -> Lists:
        return Lists(self.indptr, self.indices, None)

    @cached_property
    def _by_key(self) -> Lists:
        """The transposed lists: edges of a key in the order of their numbers, so that sums have one order."""
        order = np.argsort(self.indices, kind="stable").astype(np.int32)  # those without a key first and last
        starts = np.searchsorted(self.indices[order], np.arange(self.keys + 1, dtype=np.int32, like=self.indptr))
        return Lists(starts.astype(np.int32), self._rows[order], order)

    @cached_property
    def _rows(self) -> Any:
        """The query of each edge."""
        numbers = np.arange(self.edges, dtype=np.int32, like=self.indptr)
        return np.searchsorted(self.indptr[1:], numbers, side="right").astype(np.int32)

    @cached_property
    def _transposed(self) -> Graph:
        """The graph whose queries are these keys: its edges are in the order of `_by_key`."""
        lists = self._by_key
        return Graph(lists.starts, lists.others, self.queries)


def check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(f"graph: got {words_for(graph)}, expected a graphs.Graph")


def _check(indptr: Any, indices: Any, keys: int) -> None:
    """Refuse NumPy arrays that are no rows of neighbours."""
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(f"indptr: got offsets from {indptr[0]} to {indptr[-1]}, expected from 0 to {len(indices)}, "
                         "the number of edges")  # fmt: skip
    if (indptr[1:] < indptr[:-1]).any():
        raise ValueError("indptr: got offsets that decrease")
    check_values("indices", indices, keys - 1)


def _integers(name: str, x: Any) -> Any:
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {words_for(x)}, expected an array of integers")
    return x


def _int32(x: Any, largest: int) -> Any:
    """Contiguous, in int32; what is out of range stays so."""
    if x.dtype.itemsize >= 4 and x.dtype != np.int32:  # smaller ones need not count to the largest
        x = np.clip(x, 0 if x.dtype.kind == "u" else -1, largest)
    x = x.astype(np.int32, copy=False)
    return x if x.flags.c_contiguous else x.copy()

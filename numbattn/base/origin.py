"""Parts of a larger attention: where a call's queries and keys are in it, for what depends on their positions."""

from __future__ import annotations

from typing import Any, NamedTuple

from .values import clip

FAR = 2**40  # beyond every sequence, and far from overflow


class Origin(NamedTuple):
    """Where the first element of a call's P is in that of a larger attention: dropout and functions of scores, which
    depend on it, count from there. Masks and other scores are cropped: see `Crop`."""

    query: int = 0
    key: int = 0
    batch: int = 0  # number of the element of the batch, in C order
    head: int = 0
    heads: int = 1  # in all


class Crop(NamedTuple):
    """A rectangle of a score matrix: adapts masks and scores to it, counted from its first query and key.

    An array with rows for queries may have all of them, or only those of one device, which include these queries.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    seqlen_q: int  # of the whole matrix
    seqlen_k: int
    first_row: int = 0  # where the queries begin among the rows of the device
    rows: int = 0

    def offset(self, offset: Any) -> Any:
        """The own key of the first query. offset: the own key of query 0 of the whole, or None."""
        whole = self.seqlen_k - self.seqlen_q if offset is None else clip(offset, -FAR, FAR)
        return whole + self.first_query - self.first_key

    def keys_before(self, count: Any) -> Any:
        """How many of its keys are among the first `count`."""
        return clip(clip(count, 0, FAR) - self.first_key, 0, self.keys)

    def queries_before(self, count: Any) -> Any:
        return clip(clip(count, 0, FAR) - self.first_query, 0, self.queries)

    def of_queries(self, name: str, x: Any, axis: int = -2) -> Any:
        """The part of an array for its queries. name: for an error."""
        size = x.shape[axis] if x.ndim >= -axis else 1
        if size == 1:
            return x
        if size not in (self.seqlen_q, self.rows):
            raise ValueError(f"{name}: got {size} rows for queries, expected {self.seqlen_q}, all of them, or "
                             f"{self.rows}, those of this rank")
        first = self.first_query if size == self.seqlen_q else self.first_row
        return x[(..., slice(first, first + self.queries), *[slice(None)] * (-axis - 1))]

    def of_keys(self, name: str, x: Any) -> Any:
        """The part of an array for its keys, along the last axis."""
        if x.ndim == 0 or x.shape[-1] == 1:
            return x
        if x.shape[-1] != self.seqlen_k:
            raise ValueError(f"{name}: got {x.shape[-1]} columns for keys, expected {self.seqlen_k}, all of them")
        return x[..., self.first_key : self.first_key + self.keys]

"""A grid of tokens: masks and scores for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.checks import Array, flag, floats, integer, words_for
from ..base.values import Value
from ..masks.where import Where
from ..scores.function import Score
from .axis import EDGES, AxisWindow, Part
from .visibility import Fields
from .windows import Windows

MOST_AXES, MOST_TOKENS = 3, 2**31 - 1
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Grid(Value):
    """Tokens of a grid of one to three axes, in C order along axis -2 of q, k and v, and masks and scores for them.

    Parameters
    ----------
    shape : sequence of int, or sequence of such
        Tokens along each axis of the grid; or shapes of several grids, whose tokens come one after the other. These see
        nothing of each other, but all are to be finite: ``& Segments(offsets)`` keeps a NaN in its grid.
    extra : int, optional
        How many tokens come before those of each grid that see all of it and are seen by all of it, also by each other
        and along causal axes: class tokens, registers.

    Raises
    ------
    TypeError, ValueError
        For a shape of no axes or more than three, or with a number below 1, for shapes with different numbers of axes,
        and for too many tokens.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> grid = na.Grid((16, 16))
    >>> mask, table = grid.window(5), np.zeros((2, 9, 9), np.float32)
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 256, 8), dtype=np.float32)
    >>> o, backprop = na.attention_vjp(q, k, v, mask=mask, score=grid.relative_bias(table))
    >>> dq, dk, dv = backprop(do)
    >>> backprop(do).score[0].shape                       # the gradient of the table
    (2, 9, 9)

    Two images of different sizes, with a class token before each: 1 + 6 * 8 + 1 + 9 * 5 tokens.

    >>> mask = na.Grid([(6, 8), (9, 5)], extra=1).window(5)
    >>> na.attention(*np.zeros((3, 2, 95, 8)), mask=mask).shape
    (2, 95, 8)
    """

    shape: Sequence[int] | Sequence[Sequence[int]]
    extra: int = 0

    def __post_init__(self) -> None:
        if any(isinstance(one, Sequence | np.ndarray) for one in _listed(self.shape)):
            shape: Any = tuple([_shape(f"Grid shape[{at}]", one) for at, one in enumerate(self.shape)])
            axes = len(shape[0]) if shape else 0
            for at, one in enumerate(shape):
                if len(one) != axes:
                    raise ValueError(f"Grid shape[{at}]: got {len(one)} axes, expected {axes}, as shape[0] has")
        else:
            shape = _shape("Grid shape", self.shape)
        self._set(shape=shape, extra=integer("Grid extra", self.extra, low=0))
        tokens = sum(math.prod(one) + self.extra for one in self._shapes)
        if tokens > MOST_TOKENS:
            raise ValueError(f"Grid shape: got {tokens} tokens, allowed at most {MOST_TOKENS}")
        longest, most = max(len(self._shapes), *map(max, self._shapes)), Fields.longest(self._axes, len(self._shapes))
        if longest > most:
            raise ValueError(f"Grid shape: got {longest} tokens of an axis, or grids, allowed at most {most}")

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        """Of all grids."""
        shape: Any = self.shape
        return shape if isinstance(shape[0], tuple) else (shape,)

    @property
    def _axes(self) -> int:
        return len(self._shapes[0])

    def window(
        self, window: int | Sequence[int], *, dilation: int | Sequence[int] = 1, stride: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False, edges: str | Sequence[str] = "moved",
    ) -> Where:  # fmt: skip
        """The mask by which each token sees a window of its neighbours. Each argument is for all axes, or has a value
        for each.

        With dilation d the tokens of an axis see those of their residue class mod d; i' = i div d counts the n' tokens
        of a class. Tokens see what their leader sees, l = min(i' div s * s + s div 2, n' - 1) with stride s: the keys
        c <= j' < c + window, c = l - window div 2. An even window has one more key before than after.

        Parameters
        ----------
        window : int
            Keys along an axis; window * dilation is at most the axis' size, of several grids that of the smallest.
        dilation : int, optional
        stride : int, optional
            How many neighbours see the same window, at most `window`.
        causal : bool, optional
            Along a causal axis the leader is the last of its `stride` neighbours, and a token sees l - window < j' <=
            i'.
        edges : {"moved", "cut", "periodic"}, optional
            What happens to windows that reach beyond the grid: they are moved inside, as NATTEN does; they lose what
            lies outside; or they go on at the other side, not along causal axes. Causal axes are always cut.

        Returns
        -------
        mask : Where
            For as many queries and keys as the grid has tokens. Keep it: the states of its blocks are kept with it.

        Raises
        ------
        TypeError, ValueError
            For what does not fit, as above.

        Notes
        -----
        The rule is that of A. Hassani et al., *Generalized Neighborhood Attention*, 2025. Where it pays, tiles are
        boxes of the grid: q, k, v and o are copied into their order, and back. Beside dropout, other masks, and scores
        that depend on positions, but for `relative_bias`, tiles are rows of tokens in C order, which compute more that
        nobody sees. ``|`` with another mask becomes Bits in each call, which takes long.

        Examples
        --------
        >>> import numbattn as na
        >>> na.Grid((5,)).window(3).dense(5, 5).astype(int)
        array([[1, 1, 1, 0, 0],
               [1, 1, 1, 0, 0],
               [0, 1, 1, 1, 0],
               [0, 0, 1, 1, 1],
               [0, 0, 1, 1, 1]])
        """
        return self._windows(window, dilation, stride, causal, edges).mask()

    def relative_bias(
        self, table: Array, *, dilation: int | Sequence[int] = 1, stride: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False, edges: str | Sequence[str] = "moved",
    ) -> Score:  # fmt: skip
        """The score that adds ``table[head, j' - i' + window - 1]`` to S, with an index for each axis, and has the
        table's gradient.

        Parameters
        ----------
        table : array, (heads or 1, 2 * window - 1, ...), float32 or float64
            Its shape says which windows it is for. Head number h adds table[h], or all add table[0] if that is all;
            it may have more heads than q. Pairs outside of the window, which another mask may show, have some entry of
            it, too; which one is not said.
        dilation, stride, causal, edges
            Those of the `window`. Periodic offsets are those inside of the window.

        Returns
        -------
        score : Score
            Its arrays are the table and integers: ``backprop(do).score[0]`` is the table's gradient. Tokens of `extra`
            have no bias.

        Raises
        ------
        TypeError, ValueError
            For a table of other axes or dtypes, or whose windows do not fit.

        Examples
        --------
        >>> import numbattn as na, numpy as np
        >>> grid, table = na.Grid((4,)), np.array([[0.0, -1.0, -2.0, 0.0, 3.0]])    # of offsets -2 to 2
        >>> q, k = np.zeros((2, 1, 4, 8))
        >>> na.attention_weights(q, k, mask=grid.window(3), score=grid.relative_bias(table)).round(2)[0]
        array([[0.01, 0.05, 0.95, 0.  ],
               [0.24, 0.09, 0.67, 0.  ],
               [0.  , 0.24, 0.09, 0.67],
               [0.  , 0.67, 0.24, 0.09]])
        """
        array = floats("relative_bias table", table)
        if array.dtype.itemsize < 4:
            raise TypeError(f"relative_bias table: got an array of {array.dtype}, expected float32 or float64")
        shape, axes = array.shape, self._axes
        if len(shape) != axes + 1 or not shape[0] or not all(n % 2 for n in shape[1:]):
            sizes = ", ".join(f"2 * window - 1 of axis {axis}" for axis in range(axes))
            raise ValueError(f"relative_bias table: got the shape {shape}, expected (heads, {sizes})")
        window = [n // 2 + 1 for n in shape[1:]]
        return self._windows(window, dilation, stride, causal, edges).bias(array)

    def _windows(self, *given: Any) -> Windows:
        columns = [self._each(name, x) for name, x in zip(AxisWindow._fields[1:], given)]
        return Windows(tuple([self._part(number, [*zip(*columns)]) for number in range(len(self._shapes))]))

    def _each(self, name: str, value: Any) -> Any:
        """A value for each axis."""
        if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
            return [value] * self._axes
        if len(value) != self._axes:
            raise ValueError(f"{name}: got {len(value)} values, expected one, or {self._axes}, one for each axis")
        return value

    def _part(self, number: int, given: list[Any]) -> Part:
        """The windows of one grid; given: of each axis."""
        shape = self._shapes[number]
        of = f" of shape[{number}]" * (len(self._shapes) > 1)
        axes = [_axis(f" of axis {axis}{of}", n, *one) for axis, (n, one) in enumerate(zip(shape, given))]
        return Part(tuple(axes), self.extra)

    def __repr__(self) -> str:
        return f"Grid({self.shape}{f', extra={self.extra}' * bool(self.extra)})"


def _listed(shape: Any) -> Any:
    return shape if isinstance(shape, list | tuple | np.ndarray) else ()


def _shape(name: str, shape: Any) -> Shape:
    try:
        found = tuple([integer(name, n, low=1) for n in shape])
    except TypeError:
        raise TypeError(f"{name}: got {words_for(shape)}, expected one to {MOST_AXES} integers") from None
    if not 1 <= len(found) <= MOST_AXES:
        raise ValueError(f"{name}: got {len(found)} axes, allowed 1 to {MOST_AXES}")
    return found


def _axis(of: str, size: int, window: Any, dilation: Any, stride: Any, causal: Any, edges: Any) -> AxisWindow:
    """The windows along an axis of this size; of: its name in errors."""
    dilation = integer(f"dilation{of}", dilation, low=1)
    window = integer(f"window{of}", window, low=1)
    if window * dilation > size:
        raise ValueError(f"window{of}: got {window} with dilation {dilation}, allowed 1 to {size // dilation}: "
                         f"window * dilation is at most {size}")  # fmt: skip
    stride, causal = integer(f"stride{of}", stride, low=1, high=window), flag(f"causal{of}", causal)
    if edges not in EDGES:
        raise ValueError(f"edges{of}: got {edges!r}, allowed are {', '.join(map(repr, EDGES))}")
    if causal and edges == "periodic":
        raise ValueError(f"edges{of}: got 'periodic' along a causal axis, allowed are 'moved' and 'cut'")
    return AxisWindow(size, window, dilation, stride, causal, edges)

"""Random problems: all that a call can be asked for.

    python -m tests.problems 7 12 --device hopper       # problem 12 of seed 7: what it is, and what is wrong with it
    python -m tests.problems 7 --seconds 60             # those of seed 7, one after the other

A problem is drawn from (seed, number) and the Limit of a device, and is always the same. Compiling is what takes time:
in a run of problems all are of one *kind*, that is of all that is compiled in, and differ in sizes and numbers. A third
of the runs are of many short sequences, whose options are fewer. To add a mask or a score, add a line to MASKS or
SCORES.
"""

import argparse
import math
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.base.values import shown, sum_broadcast
from numbattn.masks import as_mask

from .accuracy import differentiated, present, to_numpy
from .directions import Directions
from .rounding import rounding, wrong_elements

DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
SCALES = dict(zip(DTYPES, [(-2, 2), (-30, 30), (-30, 30), (-30, 30)]))  # of v, powers of ten
HEAD_DIMS = 1, 2, 3, 8, 16, 20, 32, 40, 64, 72, 96, 128, 160, 192, 256
SHORT = 70, 70, 70, 130  # queries, keys at most, of many sequences: with margins beyond 64 and 128
LENGTHS = 2, 3, 5, 8, 16, 17, 31, 33, 48, 63, 64, 65, 90, 127, 128, 129, 140, 200, 256, 257, 300
NAMES = "o", "lse", "dq", "dk", "dv"


class Limit(NamedTuple):
    """How large problems are, and how many of a kind come in a row."""

    longest: int  # queries, keys
    elements: int  # of all score matrices, each with a margin
    head_dim: int
    run: int = 1
    tangents: float = 0.0  # of so many problems


MARGIN, MARGIN_OF_SHORT = 32, 16  # rows and columns, so that there are not too many rows either
LIMITS = {
    "cpu": Limit(300, 100_000, 256, tangents=0.6),  # kernels there are compiled for all masks and scores
    **dict.fromkeys(("turing", "ampere", "hopper"), Limit(140, 40_000, 192, 2, tangents=0.3)),
    "gpu": Limit(100_000, 1 << 24, 256, 10, tangents=0.3),
}
SMALL = Limit(40, 6_000, 64, tangents=0.3)  # of a second or two without a GPU, if their kernels have been compiled
ELEMENTS_IN_PYTHON = 30_000  # with a Score, whose function the reference calls for each element
COMMON = 0, 0, 0, 3, 10  # what all keys have in common, times their own standard deviation
ELEMENTS_DROPPED = 1 << 20  # with dropout, which the reference has from the host


# ------------------------------------------------------------------------------------------------ functions of scores
def leaky(s, batch, head, i, j):
    return s if s > 0 else 0.25 * s


def bent(s, batch, head, i, j):
    return 3.0 * math.tanh(s) + 0.1 * s


def softplus(s, batch, head, i, j):
    return max(s, 0.0) + math.log1p(math.exp(-abs(s)))


def squared(s, batch, head, i, j):
    return 0.125 * s * s


def derivative_of_squared(s, batch, head, i, j):
    return 0.25 * s


def looked_up(s, batch, head, i, j, table):
    return s + table[i, j]


def groups(s, batch, head, i, j, mine, yours):
    return s if mine[i] == yours[j] else s - 4.0


def by_head(s, batch, head, i, j, factor, shift):
    return s * factor[head] + shift[batch]


def hiding(s, batch, head, i, j, hidden):
    return -math.inf if hidden[j] else s


def of_kinds(s, batch, head, i, j, weights, mine, yours):
    return s + weights[mine[i], yours[j]] * weights[0, mine[i]]


def apart(s, batch, head, i, j, mine, yours):
    return s - 0.25 * abs(mine[i] - yours[j])


def of_products(s, batch, head, i, j, mine, yours):
    return s + 0.125 * (mine[i] * yours[j] % 17 - mine[i] // 7)


def striped(batch, head, i, j):
    return j <= i and (i - j < 40 or j % 7 == 0)


def same_group(batch, head, i, j, mine, yours):
    return mine[i] == yours[j]


def near(batch, head, i, j, reach, least):
    return abs(i - j) <= reach[head] and i + j >= least[batch]


def distance(slope):
    def function(s, batch, head, i, j):
        return s - slope * abs(i - j)

    return function


# --------------------------------------------------------------------------------------------------- masks and scores
MASKS = {  # of a Problem
    "causal": lambda x: na.Causal(x.offset()),
    "window": lambda x: na.Window(*x.reaches(), x.offset()),
    "lengths": lambda x: na.Lengths(*(x.length(size) if x.often() else None for size in (x.n, x.m))),
    "first": lambda x: na.First(x.number_or_array(0, x.one_of(3, x.n, x.n + 5))),
    "stream": lambda x: na.Window(*x.reaches(), x.offset()) | na.First(x.number_or_array(0, 5)),
    "prefix": lambda x: na.Prefix(x.length(x.n), x.offset()),
    "segments": lambda x: na.Segments(*x.segments()),
    "intervals": lambda x: na.Intervals(*(x.whole(-3, x.n + 3, *x.some_axes(), x.m) for _ in ("first", "end"))),
    "dense": lambda x: na.Dense(x.truths(*x.broadcast(*x.batch, x.m, x.n))),
    "array": lambda x: x.truths(*x.broadcast(*x.batch, x.m, x.n)),
    "bits": lambda x: na.Bits.pack(x.truths(*x.some_axes(), x.m, x.n)),
    "tree": lambda x: na.Bits.tree(x.parents()),
    "tail": lambda x: na.Tail(x.truths(*x.broadcast(*x.batch, x.m, x.m))),
    "blocks": lambda x: x.blocks(x.one_of(1, 3, 16, 64, 100), x.one_of(1, 7, 64, 128)),
    "where": lambda x: na.Where(striped, block_size=x.one_of(8, 128)),
    "where in groups": lambda x: na.Where(same_group, [np.sort(x.whole(0, 3, size)) for size in (x.m, x.n)]),
    "grid": lambda x: x.windows() if x.m == x.n > 0 else na.Causal(),
    "where by head": lambda x: na.Where(near, [x.whole(0, 90, n) for n in x.heads_and_batches()], x.one_of(9, 64)),
}
SCORES = {
    "softcap": lambda x: na.Softcap(x.one_of(0.7, 3.0, 30.0)),
    "bias": lambda x: na.Bias(x.bias(), x.often()),
    "hiding bias": lambda x: na.Bias(x.with_minus_inf(x.bias()), x.often()),
    "alibi": lambda x: na.Alibi(x.floats(*x.broadcast_or_none(*x.batch), size=0.1), x.often()),
    "relative": lambda x: na.RelativeBias(x.floats(*x.broadcast_or_none(*x.batch), x.one_of(1, 3, 9, 81)), x.often()),
    "sink": lambda x: na.Sink(x.floats(*x.broadcast_or_none(*x.batch), size=2.0), x.often()),
}
FUNCTIONS = {
    "leaky": lambda x: na.Score(leaky),
    "bent": lambda x: na.Score(bent),
    "softplus": lambda x: na.Score(softplus),
    "squared": lambda x: na.Score(squared, derivative_of_squared),
    "looked up": lambda x: na.Score(looked_up, arrays=[x.numbers(x.m, x.n)], gradient=x.is_trained()),
    "of kinds": lambda x: na.Score(of_kinds, arrays=[x.numbers(5, 5), x.whole(0, 4, x.m), x.whole(0, 4, x.n)],
                                   gradient=[x.is_trained(), False, False]),
    "groups": lambda x: na.Score(groups, arrays=[x.whole(0, 2, x.m), x.whole(0, 2, x.n)]),
    "apart": lambda x: na.Score(apart, arrays=[x.small(9, x.m), x.small(9, x.n)]),
    "of products": lambda x: na.Score(of_products, arrays=[x.small(120, x.m), x.small(120, x.n)]),
    "by head": lambda x: na.Score(by_head, arrays=[x.numbers(size) for size in x.heads_and_batches()],
                                  gradient=[x.is_trained(), x.is_trained()]),
    "hiding": lambda x: na.Score(hiding, arrays=[x.truths(x.n)]),
    "distance": lambda x: na.Score(distance(float(x.kind.choice([0.5, 0.125])))),
}
OF_SHORT = {"shared bias": lambda x: na.Bias(x.bias(x.shape_for_all()), x.often())}  # of many short sequences, first
HIDING = {"hiding bias", "hiding"}
ONCE = {"segments", "sink"}
NONLINEAR = {"softcap", "leaky", "bent", "softplus", "squared", "by head"}  # are not drawn behind those


# ------------------------------------------------------------------------------------------------------------ drawing
class Draw:
    """What MASKS and SCORES draw from: `kind` for all that is compiled in, `rng` for all else, and `late`, `short`,
    `jets`, `trained` and `layouts`, `kind`s for what has been added since, so that older problems stay as they are;
    with `jets` goes `along`."""

    def __init__(self, seed, number, limit, xp):
        run = number // limit.run
        seeds = [seed, run], [seed, number, 1], [seed, run, 2], [seed, run, 3], [seed, run, 4], [seed, number, 5]
        self.kind, self.rng, self.late, self.short, self.jets, self.along = map(np.random.default_rng, seeds)
        self.trained, self.layouts = (np.random.default_rng([seed, run, salt]) for salt in (6, 7))
        self.is_short, self.is_plain = self.short.random(2) < (1 / 3, 1 / 2)  # many short sequences; in plain layouts
        self.xp = xp

    def often(self):
        return bool(self.kind.random() < 0.75)

    def is_trained(self):
        """Whether the gradient of a function's array is wanted."""
        return bool(self.trained.random() < 0.75)

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    # shapes: batch axes, queries and keys
    def shapes(self, limit, square):
        """Those of q, k and v; sets m, n and batch."""
        d, e, axes, group = (int(self.kind.choice(x)) for x in (HEAD_DIMS, HEAD_DIMS, [0, 1, 2, 2, 3], [1, 1, 2, 4]))
        if self.is_short:
            d, e = self.short.integers(1, 32, 2).tolist() if self.short.random() < 0.6 else (min(d, 128), min(e, 128))
        d = 0 if self.kind.random() < 0.01 else min(d, limit.head_dim)
        e = d if self.often() and d else min(e, limit.head_dim)
        draw = self.many_short if self.is_short else self.few_long
        lead, heads_k, m, n = draw(limit, square, axes, group)
        alone = self.kind.choice(["", "", "", "", "k", "v", "q" if group == 1 else ""])     # has one head for all
        sizes = (heads_k * group, m, d), (heads_k, n, d), (heads_k, n, e)
        shapes = [self.part_of(lead, 1 if x == alone else heads, *size) for x, (heads, *size) in zip("qkv", sizes)]
        shapes = shapes if axes or self.is_short else [shape[-2:] for shape in shapes]
        self.m, self.n, self.batch = m, n, reference.describe(*map(np.empty, shapes))[0].batch
        return shapes

    def few_long(self, limit, square, axes, group):
        """Batch axes, heads of k, queries, keys."""
        lead, heads_k = self.rng.integers(1, 4, max(axes - 1, 0)).tolist(), int(self.rng.integers(1, 4))
        m, n = self.seqlen(limit.longest), self.seqlen(limit.longest)
        n = m if square or self.rng.random() < 0.4 else n
        while math.prod(lead) * heads_k * group * (m + MARGIN) * (n + MARGIN) > limit.elements:
            if max(lead, default=1) > 1:
                lead = [1] * len(lead)
            elif heads_k > 1:
                heads_k -= 1
            else:
                m, n = (x * 2 // 3 if x == max(m, n) or square else x for x in (m, n))
        return lead, heads_k, m, n

    def many_short(self, limit, square, axes, group):
        """The same, of as many sequences as there is room for, or less; all are heads where there is but one axis."""
        longest = min(limit.longest, self.one_of(*SHORT))
        m, n = (self.seqlen(longest) if self.often() else int(self.rng.integers(1, longest + 1)) for _ in range(2))
        n = m if square or self.rng.random() < 0.5 else n
        room = max(limit.elements // ((m + MARGIN_OF_SHORT) * (n + MARGIN_OF_SHORT) * group), 1)
        count = round(room ** self.rng.uniform(0.5, 1))
        if axes < 2:
            return [], count, m, n
        sizes = [min(self.one_of(1, 1, 2, 3, 8), count)]  # heads, and the first of two axes
        if axes > 2:
            sizes.append(min(self.one_of(1, 2, 3, 5), count // sizes[0]))
        return [*sizes[1:], count // math.prod(sizes)], sizes[0], m, n

    def part_of(self, lead, heads, *size):
        """A shape that is broadcast along some axes, or has less of them."""
        own = [size if self.kind.random() < 0.85 else 1 for size in lead]
        own = [] if self.kind.random() < 0.15 else own
        return size if heads == 1 and not own and self.often() else (*own, heads, *size)

    def seqlen(self, longest):
        if self.rng.random() < 0.15:
            return self.one_of(0, 1, 1, 1, 1)
        if self.rng.random() < 0.5:
            return self.one_of(*(size for size in LENGTHS if size <= longest))
        return round(math.exp(self.rng.uniform(0, math.log(longest))))

    def some_axes(self):
        """Of all batch axes, each of full size or 1."""
        return [size if self.often() else 1 for size in self.batch]

    def broadcast(self, *shape):
        """What NumPy broadcasts to this shape."""
        own = [size if self.kind.random() < 0.6 else 1 for size in shape]
        return own[self.kind.integers(max(len(own), 1)) :] if not self.often() else own

    def broadcast_or_none(self, *shape):
        """The same, or no axes at all."""
        own = self.broadcast(*shape)
        return own if self.late.random() < 0.8 else ()

    # arrays
    def floats(self, *shape, size=1.0, dtype=None):
        dtype = DTYPES[self.kind.integers(len(DTYPES))] if dtype is None else dtype
        return np.asarray(size * self.rng.standard_normal(shape, np.float32), dtype)

    def numbers(self, *shape):
        """For a Score: of float64 beside float64, since Python makes float32 of a float and a float32."""
        return self.floats(*shape, dtype=np.float64 if self.often() or self.dtype == np.float64 else np.float32)

    def whole(self, low, high, *shape):
        dtype = self.kind.choice(["i4", "i8", "i2", *["u2", "u4"] * (low >= 0)])
        return self.rng.integers(low, high, shape, endpoint=True).astype(dtype)

    def small(self, high, *shape):
        """Integers for a Score, of all dtypes that it takes."""
        dtype = self.late.choice(["i1", "u1", "i2", "u2", "i4", "u4", "i8"])
        return self.rng.integers(0, high, shape, endpoint=True).astype(dtype)

    def truths(self, *shape):
        return self.rng.random(shape) < self.one_of(0.3, 0.7, 0.7, 0.95)

    def number_or_array(self, low, high):
        shape = self.some_axes()
        return self.whole(low, high, *shape) if self.often() and shape else int(self.rng.integers(low, high + 1))

    # masks
    def offset(self):
        return self.number_or_array(-self.m // 2 - 2, self.n + 3) if self.kind.random() < 0.5 else None

    def reach(self):
        return int(self.rng.integers(-2, self.n + 1)) if self.often() else None

    def reaches(self):
        """To the left and to the right, so that there is a key between them."""
        left, right = self.reach(), self.reach()
        return left, right if None in (left, right) else max(right, -left)

    def length(self, size):
        return self.number_or_array(0, self.one_of(size, size, 0))

    def segments(self):
        lead, count = [] if self.often() else self.some_axes(), self.rng.integers(1, 30 if self.is_short else 7)
        sides = [np.sort(self.rng.integers(0, size + 1, (*lead, count + 1)), axis=-1) for size in (self.m, self.n)]
        if self.rng.random() < 0.6:  # all tokens are in one
            for side, size in zip(sides, (self.m, self.n)):
                side[..., 0], side[..., -1] = 0, size
        return sides[: 1 if self.often() and self.m == self.n else 2]

    def parents(self):
        nodes = [self.rng.integers(-1, node) for node in range(self.m)]
        return np.array(nodes, int).reshape(*[1] * len(self.batch), self.m)

    def blocks(self, rows, cols):
        blocks, size = self.truths(*self.some_axes(), -(-self.m // rows), -(-self.n // cols)), (rows, cols)
        if rows != 64:
            return na.BlockSparse(blocks, size)
        chosen, counts = np.argsort(~blocks, axis=-1), blocks.sum(axis=-1)
        return na.BlockSparse.from_indices(chosen, counts, shape=(self.m, self.n), block_size=size)

    # scores
    def windows(self):
        """Windows on a grid of as many tokens as there are."""
        shapes = [(a, b, self.m // a // b) for a in range(1, 9) for b in range(1, 13) if self.m % (a * b) == 0]
        shape = self.one_of(*shapes)
        edges = [self.one_of("moved", "cut", "periodic") for _ in shape]
        windows = [int(self.kind.integers(1, n + 1)) for n in shape]
        causal = [each != "periodic" and self.often() for each in edges]
        strides = [int(self.kind.integers(1, window + 1)) for window in windows]
        return na.Grid(shape).window(windows, stride=strides, causal=causal, edges=edges)

    def heads_and_batches(self):
        return self.batch[-1] if self.batch else 1, math.prod(self.batch[:-1])

    def shape_for_all(self):
        """For all of a batch, one for each head or one."""
        return *[1] * len(self.batch[:-1]), *(self.batch[-1:] if self.often() else [1]), self.m, self.n

    def bias(self, shape=None):
        """NaN where nobody looks."""
        bias = self.floats(*(self.broadcast_or_none(*self.batch, self.m, self.n) if shape is None else shape))
        if self.rng.random() < 0.5:
            bias[sum_broadcast(self.visible, bias.shape) == 0] = np.nan
        return bias

    def with_minus_inf(self, bias):
        rows = (*bias.shape[:-1], 1) if self.rng.random() < 0.5 and bias.ndim else bias.shape
        bias[np.broadcast_to(self.rng.random(rows) < self.one_of(0.1, 0.5), bias.shape)] = -np.inf
        return bias

    # memory
    def placed(self, x):
        """An array in `xp`, in some layout; a mask or part of a score, all whose arrays are."""
        if isinstance(x, na.Where):
            return x._mapped(self.placed)
        if isinstance(x, na.Score):
            return na.Score(x.function, x.derivative, [*map(self.placed, x.arrays)], gradient=x.gradient)
        if isinstance(x, na.Tail):
            return na.Tail(self.placed(x.mask))
        if isinstance(x, na.Mask) and len(x._parts) > 1:
            return type(x)(tuple(map(self.placed, x._parts)))
        if not hasattr(x, "shape"):
            return replace(x, **{name: self.placed(y) for name, y in x._arrays().items()})
        axes, axis = range(x.ndim), self.kind.integers(max(x.ndim, 1))
        how = self.kind.choice(["plain", "swapped", "negative", "steps", "offset", "Fortran"] if x.ndim else ["plain"])
        how = "slice" if x.ndim and self.layouts.random() < 0.2 else how    # of something wider
        how = "plain" if self.is_short and self.is_plain else how
        shape, along, order = list(x.shape), [slice(None)] * x.ndim, [*axes]
        if how == "slice":
            before, after = self.layouts.choice([0, 1, 4, 8], 2).tolist()
            shape[-1], along[-1] = before + shape[-1] + after, slice(before, before + shape[-1])
        if how == "swapped" and x.ndim > 2:
            order[-3], order[-2] = order[-2], order[-3]
        if how == "Fortran":
            order.reverse()
        if how == "negative":
            along[axis] = slice(None, None, -1)
        if how == "steps":
            shape[axis], along[axis] = 2 * shape[axis] + 1, slice(1, None, 2)
        memory = self.xp.empty(math.prod(shape) + 3, x.dtype)[3 * (how == "offset") :][: math.prod(shape)]
        y = memory.reshape([shape[axis] for axis in order]).transpose(np.argsort(order).tolist())[(*along, ...)]
        bits = f"u{x.itemsize}"  # which every library can copy
        y.view(bits)[...] = self.xp.asarray(x.view(bits))
        return y

    def given(self, x):
        """An input, `placed`; now and then another one, which is the same along an axis, in memory too."""
        axis, is_same = self.layouts.integers(max(x.ndim, 1)), self.layouts.random() < 0.1
        if not (is_same and x.ndim and x.size and np.isfinite(x).all()):
            return self.placed(x)
        one = self.placed(x.take([0], axis))
        strides = [0 if at == axis else stride for at, stride in enumerate(one.strides)]
        return self.xp.lib.stride_tricks.as_strided(one, x.shape, strides)


class Problem(Draw):
    """The arrays and options of a call."""

    def __init__(self, seed, number, limit, xp=np):
        super().__init__(seed, number, limit, xp)
        self.dtype = dtype = DTYPES[self.kind.integers(len(DTYPES))]
        masks, score = self.names()
        dropout, dlse, self.deterministic = map(bool, self.kind.random(3) < (0.25, 0.5, 0.5))
        most = ELEMENTS_IN_PYTHON if FUNCTIONS.keys() & score else ELEMENTS_DROPPED if dropout else limit.elements
        shapes = self.shapes(limit._replace(elements=min(most, limit.elements)), "tree" in masks)
        q, k, v, do = (self.floats(*x, dtype=dtype) for x in (*shapes, (*self.batch, self.m, shapes[-1][-1])))
        dlse = self.floats(*self.batch, self.m, dtype="f8" if dtype == np.float64 else "f4") if dlse else None
        k = k + (self.layouts.choice(COMMON) * self.layouts.standard_normal(k.shape[-1])).astype(dtype)
        largest = np.array(10.0 ** self.late.uniform(*SCALES[dtype])).astype(dtype) if self.late.random() < 0.5 else 1
        v, do = v * largest, do / largest
        mask = self.joined(masks)
        causal, scale = bool(self.kind.random() < 0.2), self.one_of(None, None, float(self.rng.uniform(0.05, 1.5)))
        _, inputs = reference.describe(q, k, v, causal, mask)
        self.visible = np.broadcast_to(inputs.mask.dense(self.m, self.n), (*self.batch, self.m, self.n))
        self.hide(inputs.mask._parts, q, k, v, do, dlse)
        score = [(SCORES | FUNCTIONS | OF_SHORT)[name](self) for name in score]
        self.arrays, self.do = [*map(self.given, (q, k, v))], self.given(do)
        self.dlse = None if dlse is None else self.given(dlse)
        self.is_rebuilt = self.layouts.random() < 0.2   # o and lse from elsewhere: see `numbattn.Saved.of`
        on_host = xp is not np and self.kind.random() < 0.3     # NumPy's arrays beside CuPy's
        mask = mask if mask is None or on_host else self.placed(mask)
        score = score if on_host else [*map(self.placed, score)]
        dropout = na.Dropout(self.one_of(0.0, 0.1, 0.5, 0.9), int(self.rng.integers(2**63)), 5) if dropout else None
        self.options = {"causal": causal, "mask": mask, "scale": scale, "dropout": dropout, "score": score}
        self.out = self.placed(np.full(self.do.shape, np.nan, dtype)) if self.late.random() < 0.5 else None
        self.numpy_errors = {"all": "raise"} if self.late.random() < 0.25 else {}
        self.directions = self.drawn_directions() if self.jets.random() < limit.tangents else None

    def drawn_directions(self):
        return Directions(self, self.jets, self.along)

    def names(self):
        """Of masks and of the parts of a score."""
        masks, score = [], []
        for _ in range(self.kind.choice([0, 1, 1, 2, 2, 3])):
            name = self.pick(MASKS)
            if name not in ONCE or name not in masks:
                masks.append(name)
        for _ in range(self.kind.choice([0, 0, 1, 1, 2, 3])):
            name = self.pick(SCORES if self.often() else FUNCTIONS)
            if (name not in ONCE or name not in score) and not (name in NONLINEAR and HIDING.intersection(score)):
                score.append(name)
        if self.is_short:  # what they have is mostly one thing, and a bias
            most_masks, most_parts = self.short.integers((3, 2))
            masks, score = masks[:most_masks], [*OF_SHORT] * (self.short.random() < 0.4) + score[:most_parts]
        return masks, score

    def pick(self, table):
        """A name. Where a table has got one more, most problems stay as they are."""
        salt = self.kind.integers(2**32)
        return max(table, key=lambda name: crc32(f"{name} {salt}".encode()))

    def joined(self, names):
        mask = None
        for name in names:
            other = MASKS[name](self)
            mask = other if mask is None else mask & other
        return mask

    def hide(self, masks, q, k, v, do, dlse):
        """Put NaN or inf where nobody may look: beyond Lengths, and in dlse of rows that see nothing."""
        shape, nothing = self.visible.shape, self.one_of(np.nan, np.nan, np.inf, -np.inf)
        i, j = np.arange(self.m)[:, None], np.arange(self.n)
        queries, keys = np.ones(shape, bool), np.ones(shape, bool)
        for mask in masks:
            if isinstance(mask, na.Lengths):
                for seen, at, length in ((queries, i, mask.queries), (keys, j, mask.keys)):
                    seen &= True if length is None else at < np.asarray(length)[..., None, None]
        if self.n:
            do[~queries[..., 0]] = nothing
            q[reference.sum_to(queries[..., :1], (*q.shape[:-1], 1))[..., 0] == 0] = nothing
        for x in (k, v) if self.m else ():
            x[reference.sum_to(keys[..., :1, :].swapaxes(-2, -1), (*x.shape[:-1], 1))[..., 0] == 0] = nothing
        if dlse is not None:
            dlse[~self.visible.any(-1)] = nothing

    def __repr__(self):
        q, k, v = map(shown, self.arrays)
        options = ", ".join(f"{name}={shown(x)}" for name, x in self.options.items()
                            if x is not None and not (isinstance(x, list) and not x))
        return (f"q {q}, k {k}, v {v}, strides {[x.strides for x in self.arrays]}, {options}, "
                f"{'no ' * (self.dlse is None)}dlse, {'not ' * (not self.deterministic)}deterministic, "
                f"{self.directions or 'no tangents'}")

    # -------------------------------------------------------------------------------------------------------- measure
    @property
    def about_results(self):
        """Name, dtype and shape of each."""
        (q, k, v), rows, weights = self.arrays, self.do.shape, differentiated(self.options["score"])
        lse = np.float64 if self.dtype == np.float64 else np.float32
        dtypes = self.dtype, lse, *[self.dtype] * 3, *(x.dtype for x in weights)
        shapes = rows, rows[:-1], *(x.shape for x in (q, k, v, *weights))
        names = *NAMES, *(f"gradient {at} of score" for at in range(len(weights)))
        about = [*zip(names, dtypes, shapes)]
        return about + (self.directions.about_results(about) if self.directions else [])

    @property
    def names_of_results(self):
        return [name for name, _, _ in self.about_results]

    def run(self):
        """o, lse, dq, dk, dv and the gradients of the score's arrays that are wanted; NumPy stays as it was."""
        with np.errstate(**self.numpy_errors):
            before, results = np.geterr(), self.called()
            assert np.geterr() == before
        assert np.float32(1e-40) * np.float32(1) > 0
        return results

    def called(self):
        o, saved = na.attention_forward(*self.arrays, out=self.out, **self.options)
        assert self.out is None or o is self.out
        if self.is_rebuilt:
            saved = na.Saved.of(*self.arrays, *map(self.placed, (o, saved.lse)), **self.options)
        grads = na.attention_backward(self.do, saved, dlse=self.dlse, deterministic=self.deterministic)
        return o, saved.lse, *grads, *present(grads.score), *(self.directions.called() if self.directions else ())

    @cached_property
    def expected(self):
        """What the results are, and their largest errors; on the host where the reference has to call Python."""
        on_host, options = any(isinstance(part, na.Score) for part in self.options["score"]), dict(self.options)
        call = [x if x is None or not on_host else to_numpy(x) for x in (self.do, *self.arrays, self.dlse)]
        if on_host:
            host = np.empty(0)
            options["mask"] = as_mask(options["mask"])._like(host)
            options["score"] = [part._like(host) for part in options["score"]]
        do, q, k, v, dlse = call
        with np.errstate(all="ignore"):
            grads = reference.attention_backward(*call[:4], **options, dlse=dlse)
            exact = *reference.attention_forward(q, k, v, **options), *grads, *present(grads.score)
            errors = *rounding(*call, **options),
            if self.directions:
                along = self.directions.expected(*call, options, on_host)
                exact, errors = (*exact, *along[0]), (*errors, *along[1])
            return exact, errors

    def wrong(self, results):
        """A line for each result that is wrong."""
        for (name, dtype, shape), got, exact, error in zip(self.about_results, results, *self.expected, strict=True):
            if (got.dtype, got.shape) != (dtype, shape):
                yield f"{name}: got {shown(got)}, expected {dtype} {shape}"
                continue
            got = to_numpy(got) if self.xp is not np and isinstance(exact, np.ndarray) else got
            wrong = wrong_elements(got, exact, error)
            if wrong.any():
                at = tuple(int(x) for x in np.argwhere(wrong)[0])
                here, there, most = (float(x[at].astype(np.float64)) for x in (got, exact, error))
                yield (f"{name}: {int(wrong.sum())} of {wrong.size} are wrong, at {at} {here:.6g}, "
                       f"exactly {there:.6g}, give or take {most:.2g}")


# ------------------------------------------------------------------------------------------------------------ devices
WORLDS = "compiled", "simulated", "planned"  # of devices that are not there; planned: all but the kernels


@contextmanager
def on_device(name, world="compiled", small=True, **facts):
    """Inside, calls run on a device, on arrays of the library that this yields. Of one that is not there: small, see
    tests.tools.device.on, and facts, what else is to be true of it."""
    if name in ("cpu", "gpu"):
        yield np if name == "cpu" else import_module("cupy")
        return
    device, launch = (import_module(f"tests.tools.{module}") for module in ("device", "launch"))
    execute = device.execute if world != "planned" else lambda *launched: None
    with launch.world_of(world), device.on(getattr(device, name.upper())._replace(**facts), execute, small):
        yield np


def checked(seed, number, device, world="compiled", small=False):
    """A problem, SMALL or within the device's Limit, and what is wrong with it, a line each. Of many short sequences
    every other one has a device of one multiprocessor, whose few blocks take many in turn. Of the others every other
    one has kernels for any size alone."""
    limit = SMALL if small else LIMITS[device]
    is_odd, is_short = number % 2, Draw(seed, number, limit, np).is_short
    facts = {"multiprocessors": 1} if is_odd and is_short else {}
    with on_device(device, world, is_odd or is_short, **facts) as xp:
        problem = Problem(seed, number, limit, xp)
        try:
            results = problem.run()
            return problem, list(problem.wrong(results)) if world != "planned" else []
        except Exception:
            return problem, [traceback.format_exc()]


def again(seed, number, device, world="compiled", small=False):
    """How to repeat a problem."""
    options = f" --world {world}" * (world != "compiled") + " --small" * small
    return f"python -m tests.problems {seed} {number} --device {device}{options}"


def many(seed, seconds, device, world="compiled", small=False, first=0):
    """(number, problem, what is wrong with it) of one after the other, for so many seconds."""
    end = time.monotonic() + seconds
    for number in count(first):
        if time.monotonic() > end:
            return
        yield number, *checked(seed, number, device, world, small)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("number", type=int, nargs="?", help="of one problem (default: all from 0 on)")
    parser.add_argument("--device", choices=list(LIMITS), default="cpu")
    parser.add_argument("--world", choices=WORLDS, default="compiled")
    parser.add_argument("--small", action="store_true", help="small ones, whatever the device")
    parser.add_argument("--seconds", type=float, default=60, help="for all from 0 on (default: 60)")
    args = parser.parse_args()
    where = args.device, args.world, args.small
    if args.number is not None:
        problem, found = checked(args.seed, args.number, *where)
        print(problem, *found or ["right"], sep="\n")
        return bool(found)
    total = failed = 0
    for number, problem, found in many(args.seed, args.seconds, *where):
        total, failed = total + 1, failed + bool(found)
        if found:
            print(again(args.seed, number, *where), problem, *found, sep="\n", flush=True)
    print(f"{total} problems, {failed} wrong")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The arguments of attention kernels, for tiles of any size: small ones reach every edge with few elements."""

import math
from typing import Any, NamedTuple

import numpy as np

from numbattn.base.origin import Origin
from numbattn.call.problem import describe
from numbattn.cuda.kernels.any.tile_states import states_blocks, states_shape, tile_states
from numbattn.cuda.kernels.shared.dropout import Drops
from numbattn.cuda.kernels.shared.visibility import GRIDS, Cells, MaskArgs
from numbattn.cuda.words.numbers import SIDES
from numbattn.cuda.words.spec import PADDED
from tests.accuracy import exact, plain, random
from tests.tools.launch import launch

NAMES = "o", "lse", "dq", "dk", "dv", "dbias"  # of a score that is one bias


class Call(NamedTuple):
    """One call: q, k, v, do (batch, heads, sequence, features) and what else all kernels are given."""

    q: Any
    k: Any
    v: Any
    do: Any
    dlse: Any
    kinds: tuple  # of its mask, see kernels.shared.visibility
    mask: MaskArgs  # without states
    drops: Drops
    kept_scale: Any
    wanted: dict  # results in float64, by name
    plain: dict  # and by the plain formula

    @property
    def group_size(self):
        return np.int32(self.q.shape[1] // self.k.shape[1])

    @property
    def scale(self):
        return self.lse.dtype.type(self.q.shape[-1] ** -0.5)

    @property
    def scale_log2(self):
        return self.lse.dtype.type(self.q.shape[-1] ** -0.5 * math.log2(math.e))

    @property
    def ds_scale(self):
        """With dropout dS is that of `dropout_steps`."""
        return self.scale * self.lse.dtype.type(1 if self.kept_scale == 1 else self.kept_scale / 2)

    @property
    def delta_scale(self):
        return self.lse.dtype.type(2 / self.kept_scale)

    @property
    def lse(self):
        return self.wanted["lse"].astype(self.dlse.dtype)

    @property
    def lse_log2(self):
        """As the kernels of the backward pass are given it."""
        return np.where(np.isfinite(self.lse), self.lse * self.lse.dtype.type(np.log2(np.e)), np.inf)

    @property
    def delta(self):
        """rowsum(dO * O) - dlse; 0 where nothing is seen."""
        delta = (self.do.astype(np.float64) * self.wanted["o"]).sum(-1) - self.dlse
        return np.where(np.isfinite(self.wanted["lse"]), delta, 0).astype(self.dlse.dtype)

    def mask_of(self, kept, tile_m, tile_n):
        """For a kernel that keeps tiles of queries, "q", or of keys, "k"."""
        if "blocks" not in self.kinds:
            return self.mask
        batches, heads, seqlen_q = self.lse.shape
        seqlens = seqlen_q, self.k.shape[2]
        sizes = -(-seqlens[0] // tile_m), -(-seqlens[1] // tile_n)
        shape = states_shape(*(sizes if kept == "q" else sizes[::-1]))
        mask = self.mask._replace(states=(np.zeros((batches, heads, *shape), np.uint32),))
        source = tile_states(tile_m=tile_m, tile_n=tile_n, kept=kept, mask=self.kinds)
        blocks = batches * heads * states_blocks(*shape)
        launch(source.function, (blocks, 1, 1), source.threads, 0, mask, *map(np.int32, seqlens))
        return mask


def padded(statistic, beyond):
    """A row statistic as `delta` writes it for kernels that copy these tile by tile."""
    out = np.full((*statistic.shape[:-1], -(-statistic.shape[-1] // PADDED) * PADDED), beyond, statistic.dtype)
    out[..., : statistic.shape[-1]] = statistic
    return out


def padded_lse(lse, beyond):
    """The same of lse in base 2, with nothing lost in rounding: see `words.arguments.LSE_LOG2`."""
    return np.concatenate([padded(lse, beyond), padded(0 * np.where(np.isfinite(lse), lse, 0), 0)], axis=-1)


def call(rng, dtype=np.float32, *, batch=1, heads=1, heads_k=1, m, n, d=13, e=8, poison=None, **options):
    """A Call; options are those of `numbattn.attention`. poison: what queries and keys hold that the mask hides."""
    q, k, v, do = (
        random(rng, shape, dtype)
        for shape in ((batch, heads, m, d), (batch, heads_k, n, d), (batch, heads_k, n, e), (batch, heads, m, e))
    )
    problem, inputs = describe(q, k, v, **options)
    dlse = random(rng, (batch, heads, m), problem.sum_dtype)
    visible = np.broadcast_to(inputs.mask.dense(m, n), (batch, heads, m, n))
    if poison is not None:
        unseen = ~visible.reshape(batch, heads_k, -1, n).any(2)
        q[~visible.any(3)] = k[unseen] = v[unseen] = poison
    results = (dict(zip(NAMES, formula(do, q, k, v, dlse, **options))) for formula in (exact, plain))
    band, sides, edges = inputs.mask._band(m, n), (), ()
    if not all(isinstance(number, int) for number in band):
        edges = tuple(np.broadcast_to(np.asarray(x, np.int32), (batch, heads)) for x in band)
        sides, band = SIDES, (-m, n, m, n)
    grids = tuple(
        Cells(np.broadcast_to(x.cells, (batch, heads, *x.cells.shape[-2:])), np.int32(x.rows), np.int32(x.cols))
        for x in inputs.mask._grids()
    )
    kinds = *sides, *(GRIDS[kind] for kind in problem.mask_kinds if kind in GRIDS)
    dropout = inputs.dropout
    numbers = (0, 0, 0, 0) if dropout is None else dropout._numbers
    origin = Origin(*map(np.int32, inputs.origin))
    return Call(
        q, k, v, do, dlse, kinds, MaskArgs(*map(np.int32, band), edges, (np.int32(0),) * bool(edges) * 2, grids),
        Drops(np.uint32(numbers[0]), *map(np.uint64, numbers[1:]), np.int32(0), origin),
        problem.sum_dtype.type(1 if dropout is None else dropout.scale), *results,
    )  # fmt: skip

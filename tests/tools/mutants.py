"""Mutation testing: plants small faults in a copy of the package, one at a time; the tests named with them must fail.

    python -m tests.tools.mutants -n 2                  # all faults, two at a time
    python -m tests.tools.mutants -k visibility band    # those with all of these words in their file or text
    python -m tests.tools.mutants --list

A fault that goes unnoticed shows a property that is not tested: test the property, not the fault. A fault that changes
no result does not belong in the table.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds: a fault may make a loop endless


class Faults(NamedTuple):
    """Faults in one file that the same tests notice."""

    file: str  # in numbattn/
    tests: list  # in tests/, as pytest takes them
    texts: dict  # {original text, which occurs once in the file: faulty text}


CPU = ["test_api.py::test_masks[numpy-dropout-window]", "test_api.py::test_masks[numpy--lengths]",
       "test_api.py::test_pairs_of_masks[numpy-causal-causal]", "test_api.py::test_masks[numpy--blocks]"]  # fmt: skip
NOTHING_SEEN = ["test_api.py::test_rows_that_see_nothing[numpy-float32]",
                "test_api.py::test_beyond_lengths_nothing_leaks[numpy-Causal()-nan]",
                "test_api.py::test_gradient_of_lse_is_ignored_where_nothing_is_seen[numpy]"]  # fmt: skip
SEGMENTS = [*[f"masks/test_segments.py::test_{name}" for name in (
    "segments", "alignment_within_segments", "batch_axes", "cupys_offsets_out_of_range_are_clamped", "pack_and_unpack",
)], "masks/test_calls.py::test_masks[-segments]"]  # fmt: skip
APART = [f"masks/test_segments.py::test_{name}" for name in (
    "packed_is_separate", "nan_stays_in_its_segment[None-v-nan]", "nan_stays_in_its_segment[None-q-nan]",
)]  # fmt: skip
PACKED = ["cuda/kernels/test_intervals.py::test_small_problems[simulated-CUDA cores-segments by head]"]
SCORES = [f"cuda/kernels/scores/test_score.py::test_small_problems[simulated-CUDA cores-{parts}]" for parts in (
    "softcap-alibi-sink", "relative-softcap", "bias of keys", "pair bias-softcap-bias of queries",
    "relative-function-shift",
)]  # fmt: skip
PACKED_ON_ANY = [f"cuda/kernels/shared/test_segments.py::test_{name}" for name in (
    "nan_stays_in_its_segment_simulated[simulated-CUDA cores]", "gradients_without_own_kernels[compiled-CUDA cores]",
)]  # fmt: skip
# fmt: off
TABLE = [
    # -------------------------------------------------------------------------------------------- masks and dropout
    Faults("masks/base.py", ["masks/test_bands.py", "masks/test_dense.py"], {
        '_larger if side == "lo" else _smaller': '_larger if side == "hi" else _smaller',
        "clip(at, -FAR, FAR) + clip(shift, -FAR, FAR)": "at + shift",
        '"queries": (0, seqlen_q), "keys"': '"queries": (1, seqlen_q), "keys"',
        '"keys": (0, seqlen_k)}.get': '"keys": (1, seqlen_k)}.get',
        "own = (1,) * (len(shape) - x.ndim) + x.shape": "own = x.shape + (1,) * (len(shape) - x.ndim)",
    }),
    Faults("masks/base.py", ["masks/test_logic.py::test_beside_the_keys_of_a_cache"], {
        "frame._last_keys(seqlen_q) if isinstance(frame, masks.Cached) else seqlen_k": "seqlen_k",
    }),
    Faults("masks/base.py", SEGMENTS, {
        "reduce(_larger, (clip(interval": "reduce(_smaller, (clip(interval",
    }),
    Faults("masks/logic.py", ["masks/test_bands.py", "masks/test_dense.py", "masks/test_logic.py"], {
        "(i + lo <= j)": "(i + lo < j)",
        "(j <= i + hi)": "(j < i + hi)",
        "(i < queries) &": "(i <= queries) &",
        "cell = cells[..., row, col]": "cell = cells[..., row, row]",
        ">> (j % cols)": ">> (7 - j % cols)",
        "minimum(i + hi + 1, keys)": "minimum(i + hi, keys)",
        "Interval(np.minimum(one.end, other.end), gap_end)": "Interval(np.maximum(one.end, other.end), gap_end)",
        "np.where(both, ": "np.where(True, ",
    }),
    Faults("masks/logic.py", [*SEGMENTS, "masks/test_calls.py::test_unions_of_both_kinds_within_segments"], {
        "if part not in self._within)": ")",
    }),
    Faults("masks/logic.py", [f"masks/test_logic.py::test_{name}" for name in (
        "two_intervals_are_no_grid", "beside_the_keys_of_a_cache",
    )], {
        "if mask._draws(part) or": "if isinstance(part, AnyOf) or",
        "alternatives = self._inside(frame).of": "alternatives = self.of",
        "seqlen_k if isinstance(part, AnyOf) else keys": "seqlen_k",
        "part._inside(self._frame) if": "part._inside(self._segments) if",
    }),
    Faults("masks/tail.py", ["masks/test_tail.py"], {
        "(seqlen_q + WORD - 1) // WORD": "seqlen_q // WORD",
        "like=array) - first % WORD": "like=array)",
        " | (key < 0)": "",
        "np.where(word < 0": "np.where(word <= 0",
        "frame._own_key(seqlen_q, seqlen_k) if isinstance(frame, Cached) else": "",
        "self._inner._held(seqlen_q, seqlen_q)": "self._inner._held(seqlen_q, seqlen_k)",
    }),
    Faults("masks/tail.py", ["distributed/test_over_keys.py::test_caches"], {
        "crop.seqlen_k - crop.seqlen_q - crop.first_key": "crop.seqlen_k - crop.seqlen_q",
    }),
    Faults("masks/bands.py", ["masks/test_bands.py"], {
        "shift - self.left": "shift + self.left",
        'Edge("hi", seqlen_k, -seqlen_q) if': 'Edge("hi", 0) if',
        "at, shift = (seqlen_k, -seqlen_q)": "at, shift = (seqlen_k, 0)",
    }),
    Faults("masks/bands.py", SEGMENTS, {
        "Interval(rows.own - left, rows.own + right + 1)": "Interval(rows.own - left, rows.own + right)",
        "Interval(rows.first, rows.own + 1)": "Interval(rows.first, rows.own)",
    }),
    Faults("masks/bands.py", ["masks/test_first.py"], {
        "rows.first + for_queries(clip(self.n, 0, FAR))": "for_queries(clip(self.n, 0, FAR))",
        "    _is_aligned = True": "    _is_aligned = False",
    }),
    Faults("masks/bands.py", ["distributed/test_over_keys.py::test_caches"], {
        "First(crop.keys_before(self.n))": "First(self.n)",
    }),
    Faults("masks/base.py", ["masks/test_tail.py"], {
        "ends = masks.Lengths, masks.First": "ends = (masks.Lengths,)",
    }),
    Faults("fitting.py", ["masks/test_first.py::test_lengths_where_first_was_meant_warn"], {
        "isinstance(leaf, Lengths) and leaf.keys is not None": "isinstance(leaf, Lengths)",
        "if isinstance(part, AnyOf) for leaf": "for leaf",
        "if mask._segments is not None:": "if True:",
    }),
    Faults("masks/dense.py", ["masks/test_dense.py"], {
        "padded[..., bit::8]": "padded[..., 7 - bit::8]",
        "cast(Any, visible).view(np.uint8) != 0": "visible",
        "for _ in range(nodes)": "for _ in range(nodes - 1)",
        "visible[tree, at, node[tree, at]] = True": "visible[tree, node[tree, at], at] = True",
    }),
    Faults("masks/block_sparse.py", ["masks/test_block_sparse.py"], {
        "(i ^ j) & ((i ^ j) - 1)": "(i ^ j) & (i ^ j)",
        "(abs(i - j) <= local) | (np.minimum(i, j) < everywhere)":
            "(abs(i - j) <= local) | (np.minimum(i, j) <= everywhere)",
        "(abs(i - j) <= local) | ((i - j) % stride == 0)": "(abs(i - j) < local) | ((i - j) % stride == 0)",
        "j = np.arange(n_blocks) * shorter // max(n_blocks, 1)": "j = np.arange(n_blocks)",
    }),
    Faults("masks/segments.py", SEGMENTS, {
        "x.reshape(*lead, x.size)": "x",
        "above = i.size * row": "above = 0 * row",
        'side="right"': 'side="left"',
        "Rows(first, end, i + end - ": "Rows(first, end, i + first - ",
        "packed[..., first:end, :]": "packed[..., first:end, :].copy()",
    }),
    Faults("masks/segments.py", ["test_scores.py"], {
        "0 if self.keys is None and seqlen_q == seqlen_k else None": "0",
    }),
    Faults("masks/intervals.py", [*SEGMENTS, "masks/test_intervals.py::test_prefix"], {
        "np.maximum(rows.first + ": "np.maximum(",
        "offset = seqlen_k - i.size if self.offset": "offset = 0 if self.offset",
    }),
    Faults("masks/bands.py", ["test_kv_cache.py::test_weights"], {
        "clip(self.keys, 0, seqlen_k) - counts": "seqlen_k - counts",
    }),
    Faults("kv_cache.py", [f"test_kv_cache.py::test_{name}" for name in (
        "append_in_pieces", "append_to_a_ragged_batch", "sequences_share_pages", "error_of_int8", "error_of_float8",
        "keep", "keep_where_v_is_a_part_of_k", "weights", "errors", "nothing_is_written_where_something_is_wrong",
        "overflowed",
    )], {
        "(lengths - offsets[:-1])[sequence]": "lengths[sequence]",
        "slice(offsets[0], offsets[-1])": "slice(0, offsets[-1] - offsets[0])",
        "counts > self.capacity - lengths": "counts > self.capacity",
        "position // size]": "0 * position]",
        "        self._check_pages(pages)\n": "",
        "first < lengths[:, None]": "first <= lengths[:, None]",
        "before + np.maximum(steps, 0)": "before + t",
        "[x[page, :, row] for x in arrays]": "(x[page, :, row] for x in arrays)",
        "- nodes + (steps >= 0).sum(axis=1)": "- nodes + steps.shape[1]",
        "lengths.min() < nodes": "lengths.max() < nodes",
        "(self.k_scale, self.v_scale) if self.k.dtype == INT8 else ()": "()",
        "(given < 0) | (given > held)": "given > held",
        "self.lengths > self.capacity": "self.lengths >= self.capacity",
        "All((Cached(np.frombuffer(lengths, dtype)[:, None]), *mask._parts))": "All(mask._parts)",
    }),
    Faults("eight_bits.py", [f"test_kv_cache.py::test_error_of_{kind}" for kind in ("int8", "float8")], {
        "np.rint(x": "np.trunc(x",
        "np.clip(scaled, -LARGEST_FLOAT8, LARGEST_FLOAT8)": "np.clip(scaled, -np.inf, np.inf)",
    }),
    Faults("eight_bits.py", ["test_kv_cache.py::test_what_is_too_large_for_8_bits"], {
        "np.clip(x, -LARGEST_IN_INT8, LARGEST_IN_INT8)": "x",
    }),
    Faults("kv_cache.py", [f"test_kv_cache.py::test_{name}" for name in (
        "what_is_read_only_is_not_changed_by_half", "keep_that_is_interrupted_has_changed_nothing", "scales_of_float8",
    )], {
        "            return self._append_on_gpu(k, v, segments)\n        self._check_writable()\n":
            "            return self._append_on_gpu(k, v, segments)\n",
        'self._check_writable("lengths")': "pass",
        "x[to_page, :, to_row] = before_it": "pass",
        "            self.lengths[...] = lengths\n            raise": "            raise",
        "            self._check_scales()\n            if self.table": "            if self.table",
    }),
    Faults("tokens.py", [f"test_kv_cache.py::test_{name}" for name in ("append_in_pieces", "errors")], {
        "x.swapaxes(-2, -3)": "x.swapaxes(0, 1)",
        "(other <= one)": "(other < one)",
    }),
    Faults("problem.py", ["test_ragged.py::test_out_is_checked_before_anything_runs",
                          "test_kv_cache.py::test_errors_of_calls"], {
        "problem.out_shape if packing is None else packing.shape_of(problem.out_shape)": "problem.out_shape",
        "(*caches, *asked._leaves, *wanted)": "(*asked._leaves, *wanted)",
        "*asked._leaves, *wanted)": "*given._leaves, *wanted)",
        '({"q": passed}, (cache,))': '({"q": q}, (cache,))',
    }),
    Faults("ragged.py", ["test_ragged.py::test_as_each_sequence_alone[full]", "test_ragged.py::test_weights"], {
        "np.where(inside, x[self.sequence, :, self.row].swapaxes(0, 1), out)":
            "x[self.sequence, :, self.row].swapaxes(0, 1)",
    }),
    Faults("faults.py", ["test_faults.py"], {
        "not isinstance(error, STATED) and ": "",
        "STATED = UserError, ": "STATED = ",
    }),
    Faults("values.py", ["masks/test_bands.py"], {
        "x = np.minimum(x, np.uint64(2**62))": "pass",
    }),
    Faults("checks.py", ["test_scores.py::test_numbers_and_lists_are_arrays", "test_scores.py::test_errors"], {
        "isinstance(value, int | np.integer) and not isinstance(value, bool):\n        value =":
            "isinstance(value, int | np.integer):\n        value =",
        "array is not value and array.dtype.kind": "array.dtype.kind",
        "        array = array.astype(np.float64)": "        array = array.astype(np.float32)",
        "str(dtype) if dtype.isnative": "str(dtype) if True",
    }),
    Faults("masks/base.py", ["test_errors.py"], {
        "if missing < 1 or": "if",
        "count in (missing, missing - 1)": "count in (missing, missing)",
    }),
    Faults("masks/bands.py", ["test_errors.py"], {
        "and self.left + self.right < 0": "and self.left + self.right < -1",
    }),
    Faults("checks.py", ["test_errors.py"], {
        "array.ndim > MOST_AXES": "array.ndim > 99",
        "except (TypeError, ValueError) as error": "except TypeError as error",
        "array[..., 1:] < array[..., :-1]": "array[1:] < array[:-1]",
        "0 <= array.min() <= array.max() <= largest": "array.max() <= largest",
        '"0 or more" if largest == math.inf': '"0 or more" if False',
    }),
    Faults("dropout.py", ["test_dropout.py"], {
        "ROUNDS = 7": "ROUNDS = 6",
        "(k0 + W0) & LOW": "k0 + W0",
        "x_high ^ c3 ^ k1, x_low": "x_low ^ c3 ^ k1, x_high",
        "return round(65536 * self.p)": "return int(65536 * self.p)",
        "65536 / (65536 - self.threshold)": "1 / (1 - self.p)",
        "self.seed & 0xFFFFFFFF, self.seed >> 32": "self.seed >> 32, self.seed & 0xFFFFFFFF",
        "rows + 8 * (w // 2)": "rows + 8 * (w % 2)",
        "number >= dropout.threshold": "number > dropout.threshold",
    }),
    Faults("dropout.py", ["cpu/test_tile.py::test_draw"], {
        "self.threshold, self.offset, *self.key": "self.threshold, *self.key, self.offset",
    }),
    # ----------------------------------------------------------------------------- parts of a larger attention, rings
    Faults("origin.py", ["test_origin.py::test_masks", "test_origin.py::test_masks_within_segments",
                         "test_origin.py::test_rows_of_one_rank_alone", "test_origin.py::test_what_does_not_fit"], {
        "return whole + self.first_query - self.first_key": "return whole + self.first_query",
        "self.seqlen_k - self.seqlen_q if offset is None": "self.keys - self.queries if offset is None",
        "clip(clip(count, 0, FAR) - self.first_key, 0, self.keys)": "clip(clip(count, 0, FAR), 0, self.keys)",
        "clip(clip(count, 0, FAR) - self.first_query, 0, self.queries)": "clip(clip(count, 0, FAR), 0, self.queries)",
        "self.first_query if size == self.seqlen_q else self.first_row": "self.first_query",
        "if size not in (self.seqlen_q, self.rows)": "if size not in (self.seqlen_q, size)",
        "self.first_key : self.first_key + self.keys]": "self.first_query : self.first_query + self.keys]",
    }),
    Faults("masks/logic.py", ["test_origin.py::test_masks_within_segments"], {
        "segments if mask._segments is None else mask._segments": "mask._segments",
        "own is not None and isinstance(mask, Causal | Window)": "own is not None",
        "offset=own)._cropped(crop)": "offset=0 * own + 1)._cropped(crop)",
    }),
    Faults("masks/block_sparse.py", ["test_origin.py::test_masks"], {
        "(math.gcd(*x) for x in zip(self.block_size,": "(x[0] for x in zip(self.block_size,",
    }),
    Faults("masks/base.py", ["test_origin.py::test_what_shows_nothing_says_so"], {
        "(lo < keys) & (hi > -queries)": "(lo < keys)",
        "(lo <= hi) & (queries > 0) & (keys > 0)": "(lo <= hi) & (queries > 0)",
    }),
    Faults("cpu/tile.py", ["cpu/test_tile.py::test_draw"], {
        "(at.batch + batch) * at.heads + at.head + head": "(at.batch + batch) * at.heads + head",
        "at.query + m0, at.key + n0\n": "at.query + m0, n0\n",
    }),
    Faults("cpu/score.py", ["test_origin.py::test_heads_and_elements_of_the_batch"], {
        "batch + origin.batch, head + origin.head": "batch + origin.batch, head",
        "m0 + origin.query, n0 + origin.key": "m0 + origin.query, n0",
    }),
    Faults("cpu/backward.py", ["test_origin.py::test_results_of_the_dtype_of_sums"], {
        "x.shape), problem.result_dtype": "x.shape), problem.dtype",
    }),
    Faults("cuda/kernels/shared/dropout.py", ["cuda/kernels/shared/test_dropout.py::test_what_is_kept"], {
        "drops.first + at.batch + batch": "drops.first + batch",
        "at.head + head, at.query + m0, at.key + n0\n": "head, at.query + m0, at.key + n0\n",
        "at.query + m0, at.key + n0\n": "at.query + m0, n0\n",
    }),
    Faults("cuda/kernels/scores/function.py", ["cuda/test_origin.py::test_part_of_the_heads_and_of_the_batch"], {
        "(first + at.batch + batch, at.head + head, arrays)": "(first + batch, at.head + head, arrays)",
        "at.batch + batch, at.head + head, arrays)": "at.batch + batch, head, arrays)",
    }),
    Faults("cuda/passes.py", ["cuda/test_origin.py::test_wide"], {
        "gpu.empty(problem.out_shape, problem.result_dtype)": "gpu.empty(problem.out_shape, problem.dtype)",
        "gpu.empty(x.shape, problem.result_dtype)": "gpu.empty(x.shape, x.dtype)",
    }),
    Faults("cuda/kernels/hopper/forward.py", ["cuda/test_origin.py::test_wide"], {
        "if not IS_STAGED or (IS_PACKED and": "if (IS_PACKED and",
    }),
    Faults("cuda/kernels/hopper/forward_producer.py", ["cuda/test_origin.py::test_wide"], {
        "if IS_STAGED and count >= Q_STAGES": "if count >= Q_STAGES",
    }),
    Faults("cuda/kernels/forward_mma.py", ["cuda/test_origin.py::test_wide"], {
        "IS_STAGED = out_dtypes == (dtype.name,)": "IS_STAGED = True",
    }),
    Faults("cuda/kernels/scores/function.py", ["cuda/test_origin.py::test_parts_make_the_whole"], {
        "of_rows, S, i + m0, j + n0,": "of_rows, S, i + m0, n0,",
        "of_rows, S, i + m0, j + n0, (i + seqlen_q, j + seqlen_k)": "of_rows, S, i + m0, j + n0, (seqlen_q, seqlen_k)",
    }),
    Faults("distributed/pieces.py", ["distributed/test_pieces.py"], {
        "min(length, UNIT * (number * units // count))": "number * length // count",
        "[bounds[rank], bounds[-1 - rank]]": "[bounds[2 * rank], bounds[2 * rank + 1]]",
        "key=lambda x: x[0]": "key=lambda x: 0",
        "row += end - first": "row += 1",
    }),
    Faults("distributed/blocks.py", ["distributed/test_blocks.py"], {
        "block for block in blocks if block.may_show": "block for block in blocks",
        "is_band and lo <= 1 - m": "is_band",
        "and (queries, keys) == (m, n)": "",
        "return self.clipped(hi) if is_band and": "return self.clipped(hi) if",
        "- (block.keys.start - of_k.start) for": "for",
        "block.clipped(offset + place)": "block.clipped(offset)",
        "if offset >= of_k.stop - of_k.start - 1": "if offset >= 0",
        "_joined(blocks, of_q, of_k) if joins else None": "None",
    }),
    Faults("distributed/share.py", ["distributed/test_ring.py"], {
        "if not isinstance(part, Sink)]": "]",
        "Origin(crop.first_query, crop.first_key,": "Origin(crop.first_query, crop.first_query,",
        "not (self.problem.dropout or self.mask._holds_arrays)": "not self.mask._holds_arrays",
        "all(isinstance(part, Softcap) for part in self.parts)": "True",
        "cropped(self.mask, crop) if self.mask._holds_arrays else block.mask": "block.mask",
        "mask if mask._axis_of_queries is None else All()": "mask",
        "any(rows not in (1, seqlen_q) for rows in of_value)": "False",
        "check_mask(_without_rows(self.mask)._fit(shape), shape, xp)": "pass",
        "check_numbers(self.mask, shape, xp)": "pass",
        "self.sink._fit(batch, *self.sizes)": "pass",
        "check_mask(block.mask._fit(shape), shape, xp)": "pass",
        "check_part(part._cropped(block.crop, self.mask._frame), shape, xp)": "pass",
        "if got != length": "if got > length + 99",
    }),
    Faults("distributed/facts.py", ["distributed/test_facts.py"], {
        "if isinstance(found, str)": "if False",
        "if gathered.count(gathered[0]) == len(gathered):": "if True:",
        "if values.count(values[0]) < len(values):": "if values.count(values[0]) < len(values) - 1:",
        "isinstance(x, Mask) and isinstance(held, np.ndarray)": "False",
        '"rows" if number == held.ndim + axis else str(n)': "str(n)",
    }),
    Faults("distributed/ring.py", ["distributed/test_ring.py"], {
        "rows_of(keys, theirs), source,": "keys, source,",
        "zip((dq, *totals), (some, rows, rows), grads)": "zip((dq,), (some,), grads)",
        "    add_rows((dk, dv), share.other_hop(place.ranks - 1).keys, (yield from arrived(sent_back)))": "    pass",
        "delta - (0 if dlse is None else dlse)": "delta",
        "if dx is not None and not alone": "if dx is not None",
    }),
    Faults("distributed/totals.py", ["distributed/test_ring.py"], {
        "self.sum is None and part": "part",
        "        lse[...] = -math.inf": "        pass",
        "np.where(lse == -math.inf, lse, sink._like(o)._logits(lse))": "sink._like(o)._logits(lse)",
        "slice(rows.stop, self.shape[-2])": "slice(0, 0)",
        "        self.settle()\n        if self.sum": "        if self.sum",
        "            self.settle()\n            return": "            return",
        "or problem.out_shape != self.shape": "",
        "            self.rounded, out = (o, rows), o[..., rows, :]": "            out = o[..., rows, :]",
        "super().result(dtype) if self.rounded is None": "self.rounded[0] if self.rounded",
    }),
    Faults("distributed/heads.py", ["distributed/test_heads.py"], {
        "if not heads or heads % ranks": "if heads < ranks",
        "rows not in (1, size)": "False",
        "Origin(head=place.rank * heads // place.ranks, heads=heads)": "Origin(heads=heads)",
        "wide=sums_over_ranks(share)": "wide=False",
        "dx if axes.heads is None else rounded(dx, x.dtype)": "rounded(dx, x.dtype)",
        "(yield Sum([*whole.values()])) if whole else ()": "whole.values()",
        "reduce(np.add, parts) if axes.heads is None else": "",
        "np.broadcast_to(x, with_tokens(x.shape, axes, share.place.rank))": "x",
        "x.ndim <= own or x.shape[-1 - own] == 1": "x.ndim <= own",
        "found = {held.name: len(held.shape) for held in value._held(0, 0)}": "found = {}",
        "len(value._whole_shape((), 0, 0))": "0",
    }),
    Faults("distributed/plan.py", ["distributed/test_plan.py"], {
        "if rank != source else slice(0, 0)": "",
        "needed.sum(axis=1) * elements": "needed.sum(axis=0) * elements",
        "if costs[uneven].busiest > UNEQUAL": "if costs[uneven].busiest > 9 * UNEQUAL",
        "less, more = sorted": "more, less = sorted",
        "if wanted and axes.pieces": "if wanted",
        "sums if axes.heads is None else x.dtype.itemsize": "sums",
        "counts = counts - np.maximum(inside, 0)": "pass",
        "and mask._axis_of_queries is None and on_host": "and on_host",
        "isinstance(mask, AnyOf) and mask._is_drawn": "False",
        "if key not in KNOWN:": "if True:",
    }),
    Faults("distributed/over_keys.py", ["distributed/test_over_keys.py"], {
        "mask._leaves or not all": "not all",
        "counts[: place.rank], counts": "counts[: place.rank + 1], counts",
        "lengths is not None:": "False:",
        "share.check()": "pass",
        "mask=mask, scale=inputs.scale, score=parts, wide=True": "mask=mask, scale=inputs.scale, score=parts",
        "if not isinstance(part, Sink)]": "]",
        "whole.add_sink(sink_of(score))": "pass",
        "check_mask(leaf._fit(shape), shape, problem.xp)": "pass",
        '"seqlen_q": problem.seqlen_q,': "",
    }),
    Faults("distributed/simulated.py", ["distributed/test_simulated.py", "distributed/test_ring.py::test_errors"], {
        'x.copy(order="C")': "x",
        "self.waiting[message.source].arrays, message.source,": "self.waiting[message.to].arrays, message.to,",
        'raise Deadlock(f"': 'raise RuntimeError(f"',
    }),
    Faults("distributed/devices.py", ["distributed/test_devices.py"], {
        "stream.wait_event(event)": "pass",
        "for event in (made, cuda": "for event in (cuda",
        "for transfer in (incoming, outgoing)": "for transfer in (incoming,)",
        "for device in (source, to)": "for device in (to,)",
        "self.cupy.cuda.Device(self.devices[rank])": "self.cupy.cuda.Device(0)",
        "x if own else self.cupy.ascontiguousarray(x)": "x",
        "self.cupy.empty(x.shape, x.dtype) for x in arrays]": "self.cupy.empty(x.shape, x.dtype) for x in packed]",
        "            stream.synchronize()": "            pass",
        "if n > 1]": "]",
        "axes[-1][1] == number * step": "False",
        "if axes or nbytes": "if nbytes",
        "or nbytes < LEAST": "",
        "or not nbytes <= step <= MOST": "",
        "if runtime.deviceCanAccessPeer(device, other):": "if True:",
        "suppress(runtime.CUDARuntimeError)": "suppress()",
        "x.device.id == to": "False",
        "not isinstance(x, self.cupy.ndarray) or x.device.id == to": "True",
        "self._brought(x, self.devices[rank])": "self._brought(x, self.devices[0])",
        "self.devices.index(x.device.id) if is_here else 0": "0",
        "x.device.id in self.devices": "True",
    }),
    Faults("distributed/share.py", ["distributed/test_devices.py"], {
        "mask, near = yield from near_by(mask, score)": "near = score",
    }),
    Faults("distributed/over_keys.py", ["distributed/test_devices.py"], {
        "    mask, score = yield from near_by(mask, score)": "    pass",
    }),
    Faults("distributed/nccl.py", ["distributed/test_nccl.py"], {
        "self.check == ALWAYS or own not in self.known": "True",
        "if self.check == ALWAYS or": "if",
        "del self.known[next(iter(self.known))]": "pass",
        "self.stream.wait_event(current.record())": "pass",
        "self.cupy.cuda.get_current_stream().wait_event(ticket.done)": "pass",
        "self.communicator.abort()": "pass",
        "if not self.in_flight:": "if True:",
        "self.stream.synchronize()": "pass",
        'self._interrupted = "synchronize"': "pass",
        "total, x = self.cupy.empty(x.shape, x": "total, x = self.cupy.empty(x.size, x",
        "self.in_flight -= 1": "pass",
        "self.nccl.NCCL_FLOAT64 if x.dtype == np.float64 else self.nccl.NCCL_FLOAT32": "self.nccl.NCCL_FLOAT32",
        "pickle.loads(row[:size])": "pickle.loads(row[:1])",
        "(message.source, like) for like": "(message.to, like) for like",
    }),
    Faults("cuda/kernels/shared/start.py", ["cuda/kernels/shared/test_start.py"], {
        "maximum(lse / unit, NO_MAX)": "lse / unit",
        "* (ONE / kept_scale)": "",
        "full(PARTS, SHARE) * l": "full(PARTS, ONE) * l",
        "minimum(maximum(lse / unit, NO_MAX), -NO_MAX)": "maximum(lse / unit, NO_MAX)",
        "(lse - m * unit) * LOG2E": "lse * ZERO",
        "first, end = queries_of(segment)": "first, end = 0, 99",
    }),
    Faults("cuda/kernels/combine.py", ["cuda/test_origin.py::test_goes_on[few queries]"], {
        "top = maximum(top, m_before)": "pass",
        "total = total + weight": "pass",
        "full(O_LINE, weight / kept_scale)": "full(O_LINE, weight)",
        "weight = l_before * exp2((m_before - top) * scale_log2)": "weight = l_before",
    }),
    Faults("cuda/passes.py", ["cuda/test_origin.py::test_keys_that_nobody_sees_add_nothing"], {
        "if save and onto is None": "if save",
    }),
    Faults("cuda/merge.py", ["cuda/test_merge.py"], {
        "where(highest == -INFINITE, 0, highest)": "highest",
        "where(l == 0, 1, l)": "l",
        "where(highest == INFINITE, highest, m + log2(l) * LN2)": "m + log2(l) * LN2",
        "        sync_threads()": "        pass",
        "* len(out), 1, 1)": ", 1, 1)",
        "if TWO:": "if not TWO:",
    }),
    Faults("distributed/mpi.py", ["distributed/test_mpi.py::test_waiting_ends"], {
        "if time.monotonic() > end": "if time.monotonic() > end + 6",
    }),
    Faults("distributed/mpi.py", ["distributed/test_mpi.py::test_memory_of_requests_is_kept_until_they_are_done"], {
        "request.Cancel()": "pass",
        "self._send(repeat(np.empty(0)), self._others, END)": "pass",
        "UNFINISHED.extend([self._received, self._sent])": "pass",
        "if not request.Test()]": "if False]",
    }),
    Faults("distributed/mpi.py", ["distributed/test_mpi.py::test_processes[interrupted-2]"], {
        "            self._listen()\n            if time": "            if time",
        "            except Interrupted:": "            except ZeroDivisionError:",
        "self._received.extend(map(message.Irecv, [np": "([np",
    }),
    Faults("distributed/driver.py", ["distributed/test_driver.py"], {
        "self._interrupted = self._interrupted or name": "pass",
        "except Agreed as agreed:": "except Agreed as agreed:\n            self._interrupted = name",
        "        self._check()\n": "",
    }),
    Faults("distributed/driver.py", ["distributed/test_mpi.py::test_errors"], {
        "if not found > 0:": "if found <= 0:",
    }),
    Faults("distributed/driver.py", ["distributed/test_devices.py"], {
        "            self._abandon()\n            raise": "            raise",
        "        self._abandon()\n        self._interrupted": "        self._interrupted",
    }),
    Faults("distributed/simulated.py", ["distributed/test_driver.py"], {
        "            turns.close()": "            pass",
    }),
    Faults("distributed/facts.py", ["distributed/test_driver.py"], {
        "except Exception as error:": "except ValueError as error:",
        "isinstance(error, TypeError | ValueError)": "isinstance(error, TypeError)",
    }),
    Faults("distributed/joining.py", ["distributed/test_nccl.py::test_as_on_one_device"], {
        "lengths[source], *part.shape[axis + 1 :]": "part.shape[axis], *part.shape[axis + 1 :]",
    }),
    Faults("distributed/joining.py", ["distributed/test_joining.py"], {
        '        pieces_by_rank("parts", lengths, place)': "        pass",
        '    pieces_by_rank("parts", lengths_in(facts), Place(0, len(parts), order))': "    pass",
        "    check_same(facts)": "    pass",
        '"..." if number == axis else str(n)': "str(n)",
    }),
    # ---------------------------------------------------------------------------------------------------------- CPU
    Faults("cpu/tile.py", ["cpu/test_tile.py"], {
        "np.float32, np.int32, 7": "np.float32, np.int32, 6",
        "ZERO if n < LOWEST else": "",
        "y if x == x else x": "y",
        "m_end = min(m_end, queries)\n": "pass\n",
        "max(m0 + lo, first), min(m_end + hi, keys, end)": "m0 + lo, min(m_end + hi, keys, end)",
        "first), min(m_end + hi, keys, end)": "first), min(m_end + hi - 1, keys, end)",
        "min(m_end + hi, keys, end)": "min(m_end + hi, keys)",
        "min_of(intervals[0, m0:m_end])": "intervals[0, m0]",
        "max_of(intervals[1, m0:m_end])": "intervals[1, m_end - 1]",
        "max_of(first) > n0": "min_of(first) > n0",
        "n0 + rows > min_of(end)": "n0 + rows > max_of(end)",
        "S[j, i] if first[i] <= n0 + j < end[i]": "S[j, i] if first[i] < n0 + j < end[i]",
        "m0 + cols - 1 + lo <= n0": "m0 + cols - 2 + lo <= n0",
        "n0 + rows - 1 <= m0 + hi": "n0 + rows - 2 <= m0 + hi",
        "m0 + cols <= queries and": "m0 <= queries and",
        "and n0 + rows <= keys": "and n0 + rows <= keys + 1",
        "max(n0 + j - hi - m0, 0)": "max(n0 + j - hi + 1 - m0, 0)",
        "n0 + j - lo + 1 - m0, queries - m0": "n0 + j - lo - m0, queries - m0",
        "if n0 + j < keys else first": "if n0 + j <= keys else first",
        "(m_end + rows - 1) // rows": "m_end // rows",
        "(n_end + cols - 1) // cols": "n_end // cols",
        "cells[r, c] == 255 if packed": "cells[r, c] != 0 if packed",
        "if every < total": "if every < some",
        "bit = (n0 + j) // cols, (n0 + j) % cols * packed": "bit = (n0 + j) // cols, j % cols * packed",
        "first, r = 0, m0 // rows": "first, r = 0, 0",
        "np.uint64(m0 // 16 * 8)": "np.uint64(m0 // 2)",
        "(before + cols + 15) // 16": "(cols + 15) // 16",
        "(n0 + rows + 15) // 16 * 4": "n0 // 16 * 4 + (rows + 15) // 16 * 4",
        "if not 0 <= j < rows:": "if j >= rows:",
        "8 * (number // 2 % 2)": "8 * (number // 4 % 2)",
        "16 * (number % 2)": "16 - 16 * (number % 2)",
        "drawn >= drops.threshold": "drawn > drops.threshold",
    }),
    Faults("cpu/product.py", ["cpu/test_product.py"], {
        'icmp_signed("<", lanes, self.splat(cols))': 'icmp_signed("<=", lanes, self.splat(cols))',
        "self.b.mul(index, stride)": "self.b.mul(index, self.strides[0])",
        "builder.sub(end, LONG(1))": "end",
        "builder.fmul(builder.load(total), alpha)": "builder.load(total)",
        "with builder.if_then(add):": "with builder.if_then(builder.not_(add)):",
        "cols // (vectors * width) * (vectors * width)":
            "(cols + vectors * width - 1) // (vectors * width) * (vectors * width)",
    }),
    Faults("cpu/arguments.py",
           ["cpu/test_arguments.py", "cpu/test_tile.py::test_grids", "cpu/test_tile.py::test_draw"], {
        "(col == item or cols <= 1)": "(col == item or cols <= 2)",
        "(row >= cols * item or rows <= 1)": "(row > 0 or rows <= 1)",
        " and x.flags.aligned": "",
        "max(strides[-2] // itemsize, cols, 1)": "max(cols, 1)",
        "np.repeat(steps[-1], heads": "np.tile(steps[-1], heads",
        "[np.arange(size) * stride for": "[np.arange(size)[::-1] * stride for",
        "return np.array(offsets": "return np.asarray(offsets",
        "cells, rows = cells[..., :1, :], rows * cells.shape[-2]": "cells = cells[..., :1, :]",
        "cells[..., :1], cols * cells.shape[-1]": "cells[..., :1], cols",
        "np.minimum(m0 + tile_m, np.repeat(bounds[1:], counts))": "m0 + tile_m",
        "(np.diff(first) != 0) | (np.diff(end) != 0)": "np.diff(first) != 0",
        "(m_end - m0) * (end - first)": "(m_end - m0 + 1) * (end - first)",
        "own[m0] - m0], axis=-1)[::-1]": "own[m0] - m0], axis=-1)",
        "batch[-1] if batch else 1), cut": "1), cut",
    }),
    Faults("cpu/tile.py", ["cpu/test_tile.py::test_every_float16"], {
        "0 if is_finite else 0x7F800000": "0",
    }),
    Faults("cpu/tile.py", ["cpu/test_tile.py::test_every_float8"], {
        "if magnitude >= np.int32(8)": "if True",
        "if magnitude != np.int32(0x7F)": "if True",
    }),
    Faults("cpu/tile.py", ["test_kv_cache.py::test_8_bits[16-1-int8]", "test_kv_cache.py::test_dtypes[2-16-float64]"], {
        "first // x.page_size == (end - 1) // x.page_size": "True",
        "(row // x.page_size + 1) * x.page_size": "(row // x.page_size + 2) * x.page_size",
        "row % x.page_size * place.row_stride": "row * place.row_stride",
        "of_scale + x.scales.row_stride": "of_scale",
    }),
    Faults("cpu/arguments.py", [f"test_kv_cache.py::test_8_bits[{pages}-1-int8]" for pages in (16, None)], {
        "slice(1 if is_paged(problem) else 0, -2)": "slice(0, -2)",
        "end = tiles.table.copy(), lengths[tiles.table[:, 0], 0]": "end = tiles.table.copy(), 0 * tiles.table[:, 0]",
    }),
    Faults("cpu/arguments.py", ["cpu/test_arguments.py"], {
        " and problem.seqlen_q <= FEW)": ")",
        "(mask._is_settled and": "(False and",
    }),
    Faults("kv_cache.py", ["test_kv_cache.py::test_lengths_may_be_edited_in_place"], {
        "_check_lengths(self.lengths.tobytes(), self.lengths.dtype, self.capacity)": "pass",
    }),
    Faults("cpu/forward.py", CPU, {
        "fill(l, 0)": "pass",
        "if state == PARTIAL": "if state == EMPTY",
        "drops, batch, head, m0, n0)": "drops, head, batch, m0, n0)",
        "score(S, given.steps, scratch.slopes, batch, head, m0, n0, at.offset)": "pass",
    }),
    Faults("cpu/forward.py", ["cpu/test_forward.py"], {
        "if n_next != first:": "if False:",
        "(O, m, l) if n_next == first else (O_next, m_next, l_next)": "(O, m, l)",
        "min(n_next + LONG, end)": "end",
    }),
    Faults("cpu/softmax.py", ["cpu/test_decode.py", "cpu/test_forward.py"], {
        "alpha * l[r] + beta * l_next[r]": "l[r] + l_next[r]",
        "if l_next[r] != 0:": "if l[r] != 0:",
    }),
    Faults("cpu/softmax.py", CPU, {
        "S[j, i] if S[j, i] > m[i] else m[i]": "S[j, i] if S[j, i] < m[i] else m[i]",
        "exp(alpha[i] - m[i])": "exp(m[i] - alpha[i])",
        "l[i] *= alpha[i]": "pass",
        "O[i, c] *= alpha[i]": "pass",
        "min(first + SUMMED, keys)": "min(first + SUMMED - 1, keys)",
        "m[i] + np.log(l[i])": "m[i] + l[i]",
        "if l[i] != 0 else -np.inf": "if l[i] != 0 else 0.0",
        "O.dtype.type(kept_scale / l[i]": "O.dtype.type(1 / l[i]",
        "alpha[i] = exp(m[i] - m_new)": "alpha[i] = 1",
        "l[i] * alpha[i] + exp(logit - m_new)": "l[i] * alpha[i]",
    }),
    Faults("cpu/decode.py", ["cpu/test_decode.py"], {
        "head % packed == 0": "head >= 0",
        "segment + (block - begin) * CHUNK": "segment",
        "begin + 1, begin + chunks)": "begin + 1, begin + 1)",
        "seen_by(sight, batch, other, m0, m_end, first, end) == seen": "True",
        "first - (first - origin) % TILE_N": "first",
        "fill(S[keys : whole * LANES], -np.inf)": "pass",
        "lanes[width + i] if lanes[width + i] > lanes[i] else lanes[i]": "lanes[i]",
        "lanes[i] += lanes[width + i]": "pass",
    }),
    Faults("merging.py", ["test_errstate.py"], {
        'under="ignore", invalid="ignore"': 'invalid="ignore"',
    }),
    Faults("values.py", ["test_errstate.py"], {
        'with np.errstate(under="ignore"):': "if True:",
    }),
    Faults("merging.py", ["test_merging.py"], {
        "np.where(highest == -np.inf, 0, highest)": "highest",
        "np.where(l == 0, 1, l)": "l",
        "np.where(w == 0, 0, w * along)": "w * along",
        "np.where(highest == np.inf, highest, m + np.log(l))": "m + np.log(l)",
    }),
    Faults("cpu/forward.py", APART, {
        "first -= (first - segment) % TILE_N": "first = first // TILE_N * TILE_N",
    }),
    Faults("cpu/backward.py", ["cpu/test_backward.py"], {
        "for n_tile in range(n_first, at.end": "for n_tile in range(at.first, at.end",
        "(chunk - at.segment // TILE_N) % chunks": "chunk",
    }),
    Faults("cpu/score.py", ["test_scores.py"], {
        "offsets[number] = 0 if offset is None else offset": "offsets[number] = 0",
        "return Step(kind, x.shape, x.strides, reach,": "return Step(kind, x.shape, x.shape, reach,",
        "aligned if steps.numbers[step, 6] else ": "",
        "slopes[number * S.size : (number + 1) * S.size]": "slopes[: S.size]",
        "derivative[j, i] = (S[j, i] + one) * half * half": "derivative[j, i] = one",
        "abs(first + i - j)": "abs(first + j - i)",
        "bias.strides[1] == bias.itemsize": "True",
    }),
    Faults("cpu/score_gradients.py", ["test_scores.py"], {
        "first = n0 - m0 - offset_of(steps, step, batch, head, aligned)": "first = n0 - m0",
        "0 if one_key else n0 + j] += dS": "n0 + j] += dS",
        "if dS[j, i] != 0 else dS.dtype.type(0)": "",
        "dx[0, 0] -= abs": "dx[0, 0] += abs",
        "range(steps.caps.size - 1, -1, -1)": "range(steps.caps.size)",
        "            curved -= 1\n": "",
        "whole[m0 : m0 + dS.shape[1], n0": "whole[: dS.shape[1], n0",
    }),
    Faults("cpu/score_gradients.py", ["cpu/test_score_gradients.py"], {
        "np.unique(own * count + block": "np.unique(own",
        "np.unique(own * count": "np.unique(own * 0",
        "sums // count, prepend": "sums, prepend",
        "if more <= room:": "if True:",
        "dx if len(dx) == len(firsts) else ": "dx[: len(firsts)] if True else ",
    }),
    Faults("cpu/score_gradients.py", ["cpu/test_backward.py::test_blocks_add_to_sums_of_their_own"], {
        "0 if whole else nbytes": "0",
        "dx[:, 0] if dx.shape[1] == 1 else dx.sum(axis=1)": "dx[:, 0]",
    }),
    Faults("cpu/transposition.py", ["cpu/test_transposition.py"], {
        "n + unit.width - size if n & size": "n + unit.width if n & size",
        "builder.fmul(unit.rounded(line), unit.splat(factor))": "unit.rounded(line)",
        'builder.select(builder.icmp_signed("<", c, width), left, zero)': "left",
        "with builder.if_then(add):": "with builder.if_then(builder.not_(add)):",
        "row + width <= rows and": "",
        "and col + width <= cols": "",
    }),
    Faults("cpu/function.py", ["test_scores.py::test_what_was_minus_infinity_has_no_gradient"], {
        "derivative and S[j, i] == hidden": "False",
    }),
    Faults("functions.py", ["test_scores.py::test_what_was_minus_infinity_has_no_gradient"], {
        "np.where(np.isneginf(S), 0, self._of_each(self._slope, S))": "self._of_each(self._slope, S)",
    }),
    Faults("cpu/function.py", ["cpu/test_function.py"], {
        "cols, cols, real) if derivative else S": "cols, cols, real) if not derivative else S",
        "of_element(S[j, i], batch, head, m0 + i, n0 + j, arrays)": "of_element(S[j, i], batch, head, i, j, arrays)",
        "(data_address(x), *x.shape": "(data_address(x), *x.shape[::-1]",
    }),
    Faults("cpu/record.py", [f"cpu/test_record.py::test_{name}" for name in (
            "what_is_read_is_what_was_packed", "other_types_have_code_of_their_own", "kernels_take_contiguous_arrays",
            "all_holes_are_filled", "arrays_live_as_long")], {
        "numbers += address, *x.shape, *x.strides": "numbers += address, *x.strides, *x.shape",
        "elif x.flags.c_contiguous:": "else:",
        "itertools.chain(args[1:], itertools.repeat(INT64(0)))": "itertools.repeat(args[1])",
        "builder.bitcast(word, ir.DoubleType()) if kind == types.float64 else word": "word",
        "zip(self._holes, arrays, strict=True)": "zip(self._holes, arrays)",
        "(arrays, held)": "held",
        "[8 * hole for hole in holes]": "[8 * hole for hole in holes[::-1]]",
        "form.append(x.dtype.char + codes[-1])": "form.append(codes[-1])",
    }),
    Faults("cpu/arguments.py", [f"cpu/test_record.py::test_{name}" for name in (
            "what_is_kept_keeps_no_array_of_a_mask", "arrays_of_masks_and_scores_are_read_anew")], {
        "return known(problem, NO_FRAME, *more)": "return known(problem, mask, *more)",
        "known if mask._is_settled else function": "known",
    }),
    Faults("dual.py", ["test_dual.py"], {
        "keeps_shifted(function, first_only=True)": "keeps_shifted(function, first_only=False)",
        "signature.return_type == SHIFTED": "signature.return_type is not None",
        "(operator.mul, lambda x, y, z: y, lambda x, y, z: x": "(operator.mul, lambda x, y, z: y, lambda x, y, z: ONE",
        "lambda x, y, z: -z / y": "lambda x, y, z: z / y",
        "y if first(y, x) else x": "x if first(y, x) else y",
        "y * x ** (y - ONE) if y != 0": "x ** (y - ONE) if y != 0",
        "y * x ** (y - ONE) if y != 0 else type(x)(0)": "y * x ** (y - ONE)",
        "z * math.log(x) if z != 0": "z if z != 0",
        "lambda x, z: math.cos(x)": "lambda x, z: math.sin(x)",
        "return partial * slope if slope != 0 else slope": "return partial * slope",
        "lambda x, y, z: (z - x) / y": "lambda x, y, z: (z + x) / y",
        "math.exp(x - z) if x != z": "math.exp(y - z) if x != z",
        "kind(to_integer(x)) if abs(x) < ALL_WHOLE else x": "x",
        "made.slope = context.get_constant(out.dtype, 0)": "made.slope = context.get_constant(out.dtype, 1)",
    }),
    Faults("wide.py", ["test_wide.py"], {
        "return types.int64 if _is_narrow(kind) else kind": "return kind",
        "lambda x: widen(array_of(x).T)": "lambda x: array_of(x).T",
        "kind.copy(readonly=True)": "kind",
    }),
    Faults("entries.py", ["test_wide.py"], {
        "return x.item() if isinstance(x, np.generic) else": "return x if isinstance(x, np.generic) else",
    }),
    Faults("nothrow.py", ["test_nothrow.py"], {
        "if name in seen:    #": "if False:    #",
        "return PYTHON.match(name) is not None": "return False",
        "return found and found[1]": "return None",
        "return x in seen or x == \"0\"": "return True",
        "isinstance(typemap[value.value.name], types.BaseTuple)": "False",
    }),
    Faults("element.py", ["test_nothrow.py"], {
        'builder.assume(builder.icmp_signed(">=", args[0], ir.Constant(args[0].type, 0)))': "pass",
        "slope_of(identity) if derivative else value_of(identity)": "value_of(identity)",
    }),
    Faults("strict.py", ["test_strict.py"], {
        "return lambda x, y: x ** float(y)": "return lambda x, y: x**y",
        "if exponent < 0:": "if False:",
        "if value.op == \"unary\"": "if False",
    }),
    Faults("score_checks.py", ["test_score_checks.py"], {
        "np.where(finite, got, 0), want": "got, want",
        "elements.compare(\"compiled\"": "(lambda *_: None)(\"compiled\"",
        "room //= min(shape[each], most)": "pass",
        "n * (size - 1) / max(count - 1, 1)": "n",
    }),
    Faults("cuda/tile/mapping.py", ["cuda/tile/test_mapping.py::test_sums_with_large_integers_have_64_bits"], {
        "abs(x.literal_value) <= SMALL": "True",
        "isinstance(x, types.IntegerLiteral) and abs(x.literal_value) <= SMALL": "isinstance(x, types.Integer)",
    }),
    Faults("frozen.py", ["test_frozen.py"], {
        "if isinstance(x, Called):": "if False:",
        "{module} {next(COUNTER)}": "{module}",
        "if function in self.numbers:": "if False:",
        "if reads.refused:": "if False:",
        "if library(x):": "if False:",
        "return kind.__name__, repr(x)": "return repr(x)",
        "x.dtype.str, x.tobytes()": "x.dtype.str, float(x)",
        "for x in inner for path in x.globals": "for x in () for path in x.globals",
        "[refused, *(x.refused for x in inner)]": "[refused]",
        "(*of_defaults, *keywords)": "()",
        "tuple(sorted(map(repr, map(_key_of_code, x))))": "tuple(map(repr, x))",
    }),
    Faults("functions.py", ["test_scores.py"], {
        "copies, _identity=self._identity)": "copies, _identity=Identity(self.function, self.derivative))",
    }),
    Faults("scores.py", ["test_scores.py"], {
        "return 1 - np.tanh(S / S.dtype.type(self.cap)) ** 2": "return 1",
        "sum_broadcast(-(dS * distance)": "sum_broadcast((dS * distance)",
        "return j - own[..., None]": "return own[..., None] - j",
        "sum_broadcast(-(P * np.where": "sum_broadcast((P * np.where",
        "return seqlen_k - seqlen_q if self.offset is None": "return 0 if self.offset is None",
        "if sum(isinstance(part, Sink) for part in parts) > 1": "if False",
    }),
    Faults("cpu/backward.py", [*CPU, *NOTHING_SEEN], {
        "at.D[i] -= dlse[i]": "at.D[i] += dlse[i]",
        "    if chunks == 1:\n        clear(dK)": "    if False:\n        clear(dK)",
        "        if chunks == 1:\n            clear(dq": "        if False:\n            clear(dq",
        "dq[0] if len(dq) == 1 else dq.sum(axis=0)": "dq[0]",
        "range(head_k * group_size, (head_k + 1) * group_size)": "range(head_k, heads, heads_k)",
        "m_end = max(min(m_end, band[2]), m0)": "pass",
        "transpose(at.dOT, dO, dtype.type(given.kept_scale), False)": "transpose(at.dOT, dO, dtype.type(1), False)",
        "lse[i] if lse[i] != -np.inf else dtype.type(np.inf)": "lse[i]",
        "at.D[i] if lse[i] != -np.inf else dtype.type(0)": "at.D[i]",
        "end, chunks * TILE_N)": "end, TILE_N)",
        "given.drops, batch, head": "given.drops, head, batch",
        "product(dV[n0:n_end], S, dO, kept_scale, True)": "product(dV[n0:n_end], S, dO, dtype.type(1), True)",
        "product(dK[n0:n_end], dP, Q, scale, True)": "product(dK[n0:n_end], dP, Q, dtype.type(1), True)",
        "product_tn(dQ, dP, K[n0:n_end], scale, True)": "product_tn(dQ, dP, K[n0:n_end], scale, False)",
        "dP[j, i] * Z[j, i] - D[i]": "dP[j, i] - D[i]",
        "P[j, i] *= Z[j, i]": "pass",
        "P[j, i] * (dP[j, i] - D[i])": "P[j, i] * dP[j, i] - D[i]",
    }),
    Faults("cpu/backward.py", ["cpu/test_subnormals.py"], {
        "    restore(before)\n": "    pass\n",
    }),
    Faults("cpu/subnormals.py", ["cpu/test_subnormals.py"], {
        "1 << 15 | 1 << 6": "1 << 15",
        "FZ = 1 << 24": "FZ = 1 << 25",
        "builder.or_(before, ": "builder.and_(before, ",
    }),
    Faults("compiling.py", ["test_compiling.py"], {
        "    if not _told:": "    if True:",
        "if sys.stderr and sys.stderr.isatty():": "if sys.stderr:",
        "        timer.cancel()\n": "        pass\n",
        "    if getattr(numba.config, name, False):": "    if False:",
        "    finally:\n        timer": "    except ValueError:\n        timer",
    }),
    Faults("dual.py", ["test_compiling.py::test_functions_of_scores_are_not_called_uncompiled"], {
        "    check_setting(\"DISABLE_JIT\")\n": "",
    }),
    Faults("cpu/product.py", ["cpu/test_tile.py::test_float16_where_numba_compiles_for_another_cpu"], {
        'if feature.startswith("+")}': 'if feature} | {"f16c"}',
    }),
    Faults("cpu/compile.py", ["cpu/test_compile.py::test_code_of_other_settings_has_another_name",
                              "cpu/test_compile.py::test_what_compiles_says_so_and_what_is_read_does_not"], {
        "numba.__version__, settings, ": "numba.__version__, ",
        "isinstance(x.dtype, types.Float)}": "not isinstance(x.dtype, types.Float)}",
    }),
    Faults("cuda/compiler.py", ["cuda/test_compiler.py"], {
        "            yield\n            import_module": "            yield\n            len",
        "        del np.row_stack": "        pass",
        'if find_spec("numba_cuda") is None:': "if False:",
    }),
    Faults("ahead.py", [f"test_ahead.py::test_{name}" for name in (
            "what_is_compiled_for_cpus_is_all_that_calls_need", "without_a_gpu_or_its_name",
            "an_extra_that_is_missing_is_named")], {
        "dtype_of_sums(np.dtype(name)).name: None": "name: None",
        "na.attention(x[..., :1, :], x, x,": "na.attention(x[..., :20, :], x, x,",
        "        raise ValueError(f\"no GPU": "        raise SystemExit(f\"no GPU",
    }),
    Faults("__main__.py", ["test_ahead.py::test_an_extra_that_is_missing_is_named"], {
        "NotImplementedError, ImportError)": "NotImplementedError)",
    }),
    Faults("cpu/launch.py", ["cpu/test_launch.py::test_every_block_runs_once",
                             "cpu/test_launch.py::test_an_error_in_a_thread_reaches_the_caller",
                             "cpu/test_launch.py::test_without_threads_the_caller_does_it_all",
                             "cpu/test_launch.py::test_each_thread_has_its_own_scratch",
                             "cpu/test_launch.py::test_no_more_threads_than_pay",
                             "cpu/test_launch.py::test_a_call_ends_after_its_last_block",
                             "cpu/test_launch.py::test_no_block_starts_after_an_error",
                             "cpu/test_launch.py::test_an_interrupted_call_leaves_no_thread_behind"], {
        "range(threads - takes_part)": "range(threads)",
        "min(first + self.step, self.blocks)": "first + self.step",
        "first + self.step, self.active + 1": "first + 1, self.active + 1",
        "self.error, self.stop[0] = error, 1": "self.stop[0] = 1",
        "if self.stop[0] or self.next >= self.blocks": "if self.next >= self.blocks",
        "while self.active:": "if self.active:",
        "not self.active and (": "(",
        "scratch = self.scratch()\n": "scratch = ()\n",
    }),
    # --------------------------------------------------------------------------------------------- what is kept on disk
    Faults("cache.py", ["test_cache.py"], {
        "stat.S_IWGRP | stat.S_IWOTH": "stat.S_IWOTH",
        '"O_NOFOLLOW", ': "",
        "state.st_uid not in (0, os.geteuid())": "state.st_uid == 0 != os.geteuid()",
        "path.parents[:3]": "path.parents[:2]",
        "state = os.fstat(file)\n        _check(path, state)": "state = os.fstat(file)",
        "not stat.S_ISREG(state.st_mode)": "False",
        "_digest(name, content) != digest": "False",
        'name.encode() + b"\\n" + content': "content",
        "0o644": "0o666",
        "each.mkdir(0o755": "each.mkdir(0o777",
        "            draft.unlink(missing_ok=True)": "            pass",
        "NAME.fullmatch(path.name) and ": "",
        "NAME.fullmatch": "NAME.match",
        " + [ours.parent / kind for kind in KINDS]": "",
        "            if kept:\n": "            if True:\n",
        "os.utime(path)": "pass",
        "size <= MOST_BYTES": "not size",
        "_warned.add(place)": "pass",
    }),
    Faults("sources.py", ["cpu/test_compile.py::test_code_of_other_sources_is_neither_kept_nor_read"], {
        "bool(_IMPORTED) and _states() == _IMPORTED": "True",
        "path.parent == PACKAGE or ": "",
    }),
    Faults("forks.py", ["cpu/test_compile.py::test_a_child_that_is_forked_while_a_thread_compiles",
                        "test_forks.py"], {
        "before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.after": "before=list",
        "held.enter_context(attrgetter(lock)(sys.modules[module]))": "pass",
        "self.held.pop().close()": "pass",
        "import_module(name)": "pass",
    }),
    Faults("cpu/compile.py", ["cpu/test_compile.py::test_what_needs_this_process_is_not_kept",
                              "cpu/test_function.py::test_a_function_that_calls_others",
                              "cpu/test_compile.py::test_nothing_is_unpickled"], {
        "has_addresses or any(": "any(",
        "x.name.startswith(RuntimeLinker.PREFIX)": "False",
    }),
    # ----------------------------------------------------------------------------------------------------- CUDA: calls
    Faults("cuda/gather.py", ["cuda/test_gather.py"], {
        "np.float64 if dense.dtype == np.float64 else np.float32": "np.float32",
    }),
    Faults("cuda/tile/global_memory.py", ["cuda/tile/test_global_memory.py::test_load_behind_the_end"], {
        "array[rows, cols] if inside.all() else elements(array, inside, rows, cols)": "array[rows, cols]",
    }),
    Faults("cuda/append.py", ["cuda/test_append.py::test_float64_beyond_float32"], {
        "capped_for_int8(X) if of_float64 else X": "X",
    }),
    Faults("cuda/append.py", ["cuda/test_append.py"], {
        "batch < ends - 1 and ": "",
        "batch if token >= 0 else ends": "batch",
        "batch if position < capacity else -1": "batch",
        "page if page < pages else -1": "page",
        "bitcast(row_max(bitcast(abs(X), np.uint32)), np.float32)": "row_max(abs(X))",
        "where(scale == 0, 1, scale)": "scale",
        "where(X == X, X, 0), -127)": "X, -127)",
        "X, 0), -127), 127)": "X, 0), -128), 128)",
        "save(scales[0][page, :, row], scale, head)": "save(scales[0][page, :, row], scale, 0)",
        "load(scales[0], ROWS, head)": "load(scales[0], ROWS, 0)",
        "capped(abs(X), 448)": "minimum(abs(X), 448)",
        " + (bits >> 20 & 1)": "",
        "size + 2**14": "size + 2**15",
        "size < 2**-6": "size < 2**-7",
        "normal, 0x7F)": "normal, normal)",
        ">> 24 & 0x80": ">> 31",
    }),
    Faults("cuda/passes.py", ["cuda/test_passes.py::test_saved_or_not[warps]",
                              "cuda/test_passes.py::test_beyond_one_length_for_all_nothing_leaks[warpgroups]",
                              "cuda/test_passes.py::test_masks[compiled-edges in int32-warps]",
                              "cuda/test_passes.py::test_masks[compiled-two edges of a side-warps]",
                              "cuda/test_passes.py::test_shapes[pieces]"], {
        "strides = save, *strides": "strides = *strides",
        "sum_to(whole[..., : given.shape[-1]], given.shape)": "whole[..., : given.shape[-1]][:1]",
        "scale * LOG2_E": "scale",
    }),
    Faults("cuda/plan/masks.py", ["cuda/test_passes.py::test_saved_or_not[warps]",
                              "cuda/test_passes.py::test_beyond_one_length_for_all_nothing_leaks[warpgroups]",
                              "cuda/test_passes.py::test_masks[compiled-edges in int32-warps]",
                              "cuda/test_passes.py::test_masks[compiled-two edges of a side-warps]",
                              "cuda/test_passes.py::test_shapes[pieces]"], {
        "else band.keys\n": "else seqlen_k\n",
        "shifts[side] = max(-FARTHEST, min(shift, FARTHEST))": "pass",
        "getattr(band_of(found, *sizes), side)": "found[0].at",
    }),
    Faults("cuda/kernel.py", ["cuda/test_kernel.py"], {
        "(type(x), x) if _is_number(x) else layout_of(x, 0)": "(type(x), x) if _is_number(x) else x.dtype",
        'At(f"argument {i}", _view': 'At("argument 0", _view',
        "INDEX if isinstance(x, np.int32) else": "",
        "if isinstance(x, TensorMap) and not fits_tensor_map(": "if False and not fits_tensor_map(",
        "x.holders > threads": "False",
        "x.end > shared_bytes": "False",
        "yield from captured(x, known)": "pass",
    }),
    Faults("cuda/kernels/small/backward.py", [
        f"test_small.py::test_padding_is_not_read[simulated-{score}]" for score in ("bias", "capped bias")], {
        "S, F = where(visible, S, NO_SCORE), where(visible, F, 0)": "S = where(visible, S, NO_SCORE)",
        "inverse(whole, alpha), total > 0": "inverse(whole, alpha), total >= 0",
        "band_at(sight, at.batch, at.head)[2])": "band_at(sight, at.batch, at.head)[3])",
        "band_at(sight, at.batch, at.head)[3])": "band_at(sight, at.batch, at.head)[2])",
    }),
    Faults("cuda/kernels/small/backward.py", [
        "test_small.py::test_gradients_of_inputs_that_a_batch_shares[simulated-groups-kv]"], {
        "member == group_size - 1)": "member == 0)",
        "dV = full(V_TILE, ZERO)": "dV = dV + ZERO",
    }),
    Faults("cuda/kernels/small/backward.py", ["test_small.py::test_arrays_of_as_many_elements_as_the_scores"], {
        "if others or not is_matrix or": "if others or",
    }),
    Faults("cuda/plan/planner.py", ["test_random.py::test_without_a_gpu[a bias, then a function]"], {
        "if any(array_of_part(number) not in self.layouts": "if any(False",
    }),
    Faults("cuda/plan/score_gradients.py", ["test_small.py::test_matrices_that_tma_cannot_move"], {
        "[route] if all(map(fits_tensor_map, matrices)) else []": "[route]",
    }),
    Faults("cuda/plan/planner.py", [f"cuda/plan/test_planner.py::test_{name}" for name in (
        "steps_in_their_order", "what_tensor_maps_cannot_move_is_copied", "gradients_are_summed_over_broadcast_axes",
        "blocks_of_a_mask_are_looked_up_first", "blocks_that_draw_work_are_one_a_multiprocessor",
        "a_batch_that_is_no_single_stride_takes_a_launch_a_piece", "matrices_without_features_get_a_column",
    )], {
        '"first": piece.first': '"first": 0',
        "-(-shape[-1] // columns) * columns": "shape[-1]",
        "if spec.persistent else math.inf": "if not spec.persistent else math.inf",
        "and shape[:-2] != (whole := self.batch(heads))": "and not (whole := self.batch(heads))",
        "if has_states(work.mask) and MASK in spec.arguments": "if MASK in spec.arguments",
        "if not shape[-1]": "if False",
    }),
    Faults("cuda/plan/arguments.py", [
        "cuda/plan/test_planner.py::test_lse_that_nobody_wants_goes_to_the_sink_if_it_fits"
    ], {
        "<= SINK_BYTES": ">= SINK_BYTES",
    }),
    Faults("cuda/launch.py", ["cuda/test_launch.py"], {
        "addresses[i] + pointer for i, pointer": "addresses[i] for i, pointer",
        "config.stream = stream": "pass",
        "offset += -offset % size": "pass",
        "if kind != expected": "if False",
        "(0, 0, math.prod(view.shape), itemsize)": "(0, 0, itemsize, math.prod(view.shape))",
        "if not 0 < grid[0] <= LARGEST_GRID or": "if grid[0] > LARGEST_GRID or",
    }),
    Faults("cuda/plan/views.py", ["cuda/plan/test_views.py"], {
        "0 if n == 1 else stride": "stride",
        "common >= dtype.itemsize": "common > dtype.itemsize",
        "min(layout.strides) >= 0": "True",
        "number * batch, batch, piece": "number, batch, piece",
    }),
    # ------------------------------------------------------------------------------------------------- CUDA: kernels
    Faults("cuda/kernels/shared/visibility.py", ["cuda/kernels/shared/test_visibility.py"], {
        "maximum(sight.lo, lo_of(sight, batch, head, sight.lo))": "lo_of(sight, batch, head, sight.lo)",
        "minimum(sight.hi, hi_of(sight, batch, head, sight.hi))": "hi_of(sight, batch, head, sight.hi)",
        "minimum(sight.edges[at][batch, head], sight.keys - shift)": "sight.edges[at][batch, head]",
        "maximum(edge, -sight.queries - shift) + shift": "edge + shift",
        "maximum(minimum(sight.edges[at][batch, head], otherwise), 0)":
            "minimum(sight.edges[at][batch, head], otherwise)",
        "last = minimum(m_end, queries) - 1": "last = m_end - 1",
        "return maximum(m0 + lo, 0)": "return m0 + lo",
        "minimum(last + hi + 1, keys)": "minimum(last + hi, keys)",
        "if m0 <= last": "if m0 < last",
        "last = minimum(n_end, keys) - 1": "last = n_end - 1",
        "maximum(n0 - hi, 0)": "maximum(n0 - hi + 1, 0)",
        "minimum(last - lo + 1, queries)": "minimum(last - lo, queries)",
        "m_end - 1 + lo <= n0": "m_end - 2 + lo <= n0",
        "n_end <= m0 + hi + 1": "n_end <= m0 + hi + 2",
        "right and m_end <= queries": "right and m_end <= queries + 1",
        "and n_end <= keys\n": "\n",
        "where(i < queries, ": "where(i <= queries, ",
        "minimum(i + hi, keys - 1)": "minimum(i + hi, keys)",
        "cols_between(layout, n0, i + lo, last)": "cols_between(layout, n0, i + lo + 1, last)",
        "where(j < keys, ": "where(j <= keys, ",
        "minimum(j - lo, queries - 1)": "minimum(j - lo, queries)",
        "cols_between(layout, m0, j - hi, last)": "cols_between(layout, m0, j - hi - 1, last)",
        "1 << (j & 7)": "128 >> (j & 7)",
        "head], i // rows, j // cols": "head], i // cols, j // rows",
        "one(sight, band, batch, head, i, j) & other": "one(sight, band, batch, head, i, j) | other",
        "j = j - first_of_tail(band)": "pass",
        "(j < 0) | bits": "bits",
        "n_end > first_of_tail(band) or tested": "n_end > first_of_tail(band) or not tested",
        "seen_in_band(band, m0, n0) & seen_by_others": "seen_by_others",
        "WORD - at % WORD": "WORD",
        "minimum(steps, count)": "steps",
        "2 * (tile // WORD) + which": "2 * (tile // WORD) + 1 - which",
        "not (whole and in_band(band, m0, m_end, n0, n_end))": "not whole",
        "tile, which) & np.uint32(1)) != 0": "tile, which)) != 0",
    }),
    Faults("cuda/kernels/tile_states.py", ["cuda/kernels/test_tile_states.py"], {
        "minimum(m0 + TILE_M, seqlen_q) - 1": "minimum(m0 + TILE_M, seqlen_q)",
        "minimum(n0 + TILE_N, seqlen_k) - 1": "n0 + TILE_N - 1",
        "some or shown": "shown",
        "minimum(one(sight": "max(one(sight",
        "(kept_tile, tile) if KEEPS_Q else (tile, kept_tile)": "(kept_tile, tile)",
        "if m0 < seqlen_q and n0 < seqlen_k": "if True",
        "first[i] < n_end and n0 < end[i]": "first[i] < n0 and n0 < end[i]",
        "every and (first[i] <= n0 and n_end <= end[i])": "every and first[i] <= n0",
    }),
    Faults("cuda/kernels/shared/visibility.py", PACKED, {
        "i = minimum(i, seqlen_q - 1)": "pass",
        "(take(first[batch, head], i) <= j)": "(take(first[batch, head], i) < j)",
        "(j < take(end[batch, head], i))": "(j <= take(end[batch, head], i))",
    }),
    Faults("cuda/kernels/intervals.py", ["cuda/kernels/test_intervals.py"], {
        "queries[middle] <= i": "queries[middle] < i",
        "minimum(low, count - 1)": "minimum(low, count - 2)",
        "segment.own + mask.lo": "segment.own + mask.lo + 1",
        "segment.own + mask.hi + 1": "segment.own + mask.hi",
        "own = i + end - inside(queries[behind], seqlen_q)": "own = i + end",
        "i + offset_of(offset, batch, head) + 1": "i + offset_of(offset, batch, head)",
        "maximum(segment.first + length_of": "maximum(length_of",
        "segment.first + inside(n_of": "inside(n_of",
        "inside(n_of(n, batch, head), segment.end - segment.first)": "n_of(n, batch, head)",
        "return maximum(first, other_first)": "return first",
        "first if some else seqlen_k": "first",
    }),
    Faults("cuda/kernels/scores/softcap.py", SCORES, {
        "cap - 2 * cap * r": "cap - cap * r",
        "F * (4 * r * (1 - r))": "F * (4 * r)",
    }),
    Faults("cuda/kernels/scores/distance.py", SCORES, {
        "convert(SIGN * (n0 - key), ACC)": "convert(n0 - key, ACC)",
        "m0 + offset, ()": "m0, ()",
    }),
    Faults("cuda/kernels/scores/relative.py", SCORES, {
        "diagonal_index(layout, SIGN * (n0 - key)) * SIGN": "diagonal_index(layout, SIGN * (n0 - key))",
        "maximum(minimum(ahead, reach), -reach)": "minimum(ahead, reach)",
    }),
    Faults("cuda/kernels/scores/score.py", SCORES, {
        "if is_natural(before):": "if is_natural([*before, part]):",
        "return scale * LOG2E": "return LOG2E",
    }),
    Faults("cuda/kernels/scores/bias.py", SCORES, {
        "load(matrix[m0:].T, layout, n0)": "load(matrix.T, layout, n0)",
    }),
    Faults("cuda/kernels/scores/sink.py", SCORES, {
        "total * alpha + where": "total + where",
        "return alpha * reciprocal(total)": "return reciprocal(total)",
    }),
    Faults("cuda/kernels/scores/relative.py", ["cuda/kernels/scores/test_relative.py"], {
        "entry_of(n0 - key - BEFORE, table)": "entry_of(n0 - key, table)",
        "entry_of(n0 - key + AHEAD, table)": "entry_of(n0 - key, table)",
        "(LAST_COL, LAST_ROW) if transposed": "(LAST_ROW, LAST_COL) if transposed",
        "table[batch, head, entry], F": "table[batch, head, 0], F",
        "table[batch, head, entry], natural(ONE, scores)": "table[batch, head, 0], natural(ONE, scores)",
        "head, entry], natural(ONE, scores)": "head, entry], ONE",
    }),
    Faults("cuda/kernels/shared/visibility.py", [
        "cuda/kernels/test_score_gradient.py::test_gradients_where_tiles_are_empty"
    ], {
        "has_state(sight, batch, head, kept, tile, 0)": "has_state(sight, batch, head, kept, tile, 1)",
    }),
    Faults("cuda/plan/planner.py", [
        "cuda/plan/test_planner.py::test_kernels_of_gradients_look_up_which_tiles_are_empty"
    ], {
        "if name in self.temporaries:": "if False:",
    }),
    Faults("cuda/kernels/hopper/linear_bias.py", [
        f"cuda/kernels/hopper/test_linear_bias.py::test_slopes_far_from_the_diagonal{world}"
        for world in ("", "_simulated")
    ], {
        "row_index(RIGHT, -MIDDLE)": "row_index(RIGHT, 0)",
        "PIECES = 3": "PIECES = 2",
        "            fence_async_proxy()\n": "",
        "k == 2, whole - high - middle": "k == 2, whole - high",
        "slopes[batch, head] * scores.inverse_scale": "slopes[batch, head]",
        "key - n0)": "key)",
        "bias.at + TILE_M - 1:": "bias.at:",
        "Side(-bias.slope,": "Side(bias.slope,",
        "operand(-bias.pieces, COLUMNS)": "operand(bias.pieces, COLUMNS)",
        "(bias.at + 1, 0) // TILE_N": "(bias.at + TILE_N, 0) // TILE_N",
        "bias.at - MIDDLE - n_block": "bias.at - n_block",
    }),
    Faults("cuda/kernels/hopper/forward.py", [
        "cuda/kernels/hopper/test_linear_bias.py::test_slopes_far_from_the_diagonal"
    ], {
        "HAS_LINEAR_BIAS and not masks": "HAS_LINEAR_BIAS",
    }),
    Faults("cuda/kernels/hopper/forward_tiles.py", [
        "cuda/test_registers.py::test_nothing_is_spilled[forward sm_90 bfloat16 256 256 lo+hi+queries+keys alibi "
        "keys=100 seqlen_k=100]"
    ], {
        "row._replace(q_stages=row.consumers)": "row",
    }),
    Faults("cuda/kernels/hopper/forward_tiles.py", ["cuda/plan/test_planner.py"], {
        "(GAIN if x is row else 1)": "1",
        "if is_uneven(work):": "if False:",
        "has_band(work.problem) and (": "(",
        "all_at_once * row.tile_m)": "all_at_once)",
        "-(-seqlen_q // row.tile_m)": "(seqlen_q // row.tile_m)",
    }),
    Faults("cuda/kernels/shared/schedule.py", ["cuda/plan/test_planner.py"], {
        "if not has_band(problem):": "if False:",
        "min(max(4, L2_BYTES // max(nbytes, 1)), 8)": "min(L2_BYTES // max(nbytes, 1), 8)",
    }),
    Faults("cuda/kernels/hopper/variants.py", [
        "cuda/plan/test_planner.py::test_a_consumer_has_registers_for_both_sums_unless_much_is_looked_up"
    ], {
        'Row("128 nonlinear dropout", WIDE)': 'Row("192 nonlinear dropout", WIDE)',
        '"128 nonlinear dropout", WIDE)': '"nonlinear dropout", WIDE)',
        "is_looked_up(work.mask) or looks_up(work.score)": "is_looked_up(work.mask)",
        '"64 intervals", WIDE)': '"192 intervals", WIDE)',
        'Row("64 intervals", WIDE)': 'Row("intervals", WIDE)',
    }),
    Faults("cuda/kernels/scores/alibi.py", ["cuda/kernels/scores/test_alibi.py::test_slopes_of_all_heads_or_some"], {
        "add_tile(sums, dS, key, offsets, n0)": "add_tile(sums, dS, m0, offsets, n0)",
        "key + DOWN, offsets, n0 + RIGHT": "key, offsets, n0",
    }),
    Faults("cuda/kernels/scores/distance.py", [
        "cuda/kernels/scores/test_distance.py::test_offsets",
        "cuda/kernels/scores/test_distance.py::test_distances_within_segments_of_unequal_lengths"
    ], {
        "index(offsets[batch, head])": "index(offsets[batch, 0])",
        "convert(of_queries(offsets, m0) * SIGN, ACC)": "convert(of_queries(offsets, m0), ACC)",
    }),
    Faults("cuda/kernels/scores/relative.py", [
        "cuda/kernels/scores/test_distance.py::test_offsets",
        "cuda/kernels/scores/test_distance.py::test_distances_within_segments_of_unequal_lengths"
    ], {
        "* SIGN - of_queries(offsets, m0)": "* SIGN",
    }),
    Faults("cuda/kernels/scores/score.py", [
        "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels[compiled-warpgroups in two]"
    ], {
        "within(scores.parts, own - query)": "within(scores.parts, own)",
    }),
    Faults("cuda/kernels/score_gradient.py", [
        "cuda/kernels/scores/test_distance.py::test_distances_within_segments_of_unequal_lengths"
    ], {
        "low + apart if entry > 0 else -FARTHEST": "low + apart",
        "high + apart + 1 if entry < entries - 1 else FARTHEST": "high + apart + 1",
        "== walk.entry, dS, 0)": "== walk.entry, 0, dS)",
    }),
    Faults("cuda/kernels/scores/relative.py", ["cuda/kernels/scores/test_distance.py::test_offsets"], {
        "first = 1 - -(-seqlen_q // tile_m) * tile_m - offset": "first = 1 - -(-seqlen_q // tile_m) * tile_m",
        "(at >= 0) & (at < whole.shape[-1])": "at >= 0",
    }),
    Faults("cuda/plan/planner.py", ["cuda/plan/test_planner.py::test_what_offsets_depend_on",
                            "cuda/plan/test_planner.py::test_the_gradient_of_a_table_by_its_offset"], {
        "BY_SEGMENT if segments else BY_QUERY": "BY_QUERY",
    }),
    Faults("cuda/plan/score_gradients.py", ["cuda/plan/test_planner.py::test_what_offsets_depend_on",
                            "cuda/plan/test_planner.py::test_the_gradient_of_a_table_by_its_offset"], {
        "lead = np.broadcast_shapes(lead, planner.layouts[array_of_offset(number)].shape)": "pass",
    }),
    Faults("cuda/plan/known.py", ["cuda/plan/test_scores.py"], {
        "any(x is y or overlap(x, y) for y in held)": "True",
        "KNOWN.keep(value, key, found)": "pass",
        "held is not None and": "",
    }),
    Faults("scores.py", ["cuda/plan/test_scores.py"], {
        "BESIDE.keep(self, frame, part)": "pass",
    }),
    Faults("cuda/plan/scores.py", ["cuda/kernels/scores/test_alibi.py::test_slopes_of_all_heads_or_some"], {
        "sum_broadcast(by_row.sum(axis=-1), grad.shape)": "by_row.sum(axis=-1)",
    }),
    Faults("cuda/kernels/scores/score.py", ["cuda/plan/test_planner.py::test_biases_that_tma_loads"], {
        " and len(by_tma) == 1": "",
        "looking_up == by_tma and": "by_tma and",
        "(is_looked_up(work.mask) or work.problem.dropout)": "is_looked_up(work.mask)",
    }),
    Faults("cuda/kernels/hopper/backward_steps.py", [
        "cuda/plan/test_planner.py::test_slopes_get_their_gradient_with_dq"
    ], {
        "return slopes is not None and not": "return slopes is not None or not",
        "(is_nonlinear(score) or dropout)": "is_nonlinear(score)",
    }),
    Faults("cuda/kernels/hopper/variants.py", [
        "cuda/plan/test_planner.py::test_no_sums_that_are_much_larger_than_dq",
        "cuda/plan/test_planner.py::test_slopes_get_their_gradient_with_dq"
    ], {
        'Row("narrow", BOTH)': 'Row("192 narrow", BOTH)',
        'Row("slopes grouped", BOTH)': 'Row("192 slopes grouped", BOTH)',
        'Row("slopes looked-up", BOTH)': 'Row("192 slopes looked-up", BOTH)',
        "work.problem.head_dim <= 32": "False",
    }),
    Faults("cuda/plan/planner.py", ["cuda/plan/test_planner.py::test_slopes_get_their_gradient_with_dq"], {
        "and len(slopes) == 1 else None": "and slopes else None",
    }),
    Faults("cuda/plan/score_gradients.py", [
        "cuda/plan/test_planner.py::"
        "test_what_a_batch_shares_is_summed_in_as_many_parts_as_fill_the_gpu"
    ], {
        " if blocks < 2 * room else 1), served)": ", 1), served)",
        "* -(-served // parts))": "* served // parts)",
        "max(source.blocks, THREADS // source.threads)": "THREADS // source.threads",
        "blocks, served = own * blocks": "blocks, served = blocks",
    }),
    Faults("ahead.py", ["test_ahead.py::test_sums_of_what_a_batch_shares_are_compiled_too"], {
        "args.mask, (1, 2)):": "args.mask, (1,)):",
    }),
    Faults("cuda/kernels/shared/shares.py", [
        "cuda/kernels/test_score_gradient.py::test_gradients_where_tiles_are_empty"
    ], {
        "size = (count + parts - 1) // parts": "size = count // parts",
        "minimum((part + 1) * size, count)": "(part + 1) * size",
        "share.own_head + number % share.heads": "share.own_head",
        "1 if own_heads > 1 else heads": "1",
    }),
    Faults("cuda/kernels/sum_parts.py", ["cuda/kernels/test_sum_parts.py"], {
        "total + load(mParts": "load(mParts",
        "matrix, place = split(": "place, matrix = split(",
    }),
    Faults("cuda/kernels/table_gradient.py", ["cuda/kernels/test_table_gradient.py"], {
        "& (entry < end)": "",
        "& (j >= 0)": "",
        "own - seqlen_q + 1, 0)": "own - seqlen_q + 2, 0)",
        "entries, own + seqlen_k)": "entries, own + seqlen_k - 1)",
        "index(offsets[table, matrix])": "index(offsets[table, 0])",
    }),
    Faults("cuda/plan/score_gradients.py", ["test_small.py::test_tables_and_offsets_that_heads_share"], {
        "matrices, name = math.prod(heads) // tables": "matrices, name = 1",
        "of_heads.strides[-1:] * 2": "(0, 0)",
    }),
    Faults("cuda/plan/score_gradients.py", ["cuda/plan/test_planner.py::test_slopes_get_their_gradient_with_dq"], {
        " or sums_by_row(number) in planner.temporaries": "",
    }),
    Faults("cuda/kernels/hopper/score_gradient.py", [
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]"
    ], {
        "allocate(SHARED_B, consumer), m0 + consumer * ROWS": "allocate(SHARED_B, consumer), m0",
        "mDO, batch, head, m0 + consumer * ROWS, 0": "mDO, batch, head, m0, 0",
        "at.share.part][:, at.n_first :]": "at.share.part]",
    }),
    Faults("cuda/kernels/hopper/score_gradient.py", ["cuda/kernels/hopper/test_score_gradient.py"], {
        "mSums[at.share.own_batch, at.share.own_head, at": "mSums[at.share.own_batch, 0, at",
        "K, V = load_tiles(K, V, given": "load_tiles(K, V, given",
    }),
    Faults("cuda/kernels/score_gradient.py", ["cuda/kernels/hopper/test_score_gradient.py"], {
        "+ n_blocks + PER_TILE - 1)": "+ n_blocks)",
        "(number + PER_TILE * m_first - before)": "(number - before)",
    }),
    Faults("cuda/kernels/hopper/score_gradient.py", ["cuda/plan/test_planner.py::test_gradients_by_warpgroups"], {
        " - {\"relative\", \"softcap\", \"alibi\", \"sink\"}": " - {\"relative\"}",
        "looked_up or is_looked_up(work.mask) or work.problem.dropout": "looked_up or is_looked_up(work.mask)",
        "not (looked_up or is_looked_up": "not (is_looked_up",
        "> 64": "> 6400",
    }),
    Faults("cuda/kernels/hopper/forward_producer.py", [
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
        "cuda/kernels/scores/test_bias.py::test_biases_in_stages_that_are_filled_again"
    ], {
        "place = allocate(SHARED_B, K.index * CONSUMERS + consumer)": "place = allocate(SHARED_B, K.index * CONSUMERS)",
    }),
    Faults("cuda/kernels/hopper/walk.py", [
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
        "cuda/kernels/scores/test_bias.py::test_biases_in_stages_that_are_filled_again"
    ], {
        "        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)\n        sync_warpgroup()":
            "        loaded = look_up(scores, place, tile.batch, tile.head, 0, 0)\n        pass",
    }),
    Faults("cuda/kernels/hopper/backward_kv.py", [
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]",
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads_simulated"
    ], {
        "tile.segment.first_key + tile.first + consumer * ROWS": "tile.segment.first_key + tile.first",
        "sync_warpgroup()                                    # all have read it": "pass  # all have read it",
    }),
    Faults("cuda/kernels/hopper/backward_q.py", [
        "cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-deterministic]"
    ], {
        "work.m_block * TILE_M + consumer * ROWS\n            tma_load_part":
            "work.m_block * TILE_M\n            tma_load_part",
    }),
    Faults("cuda/tile/tma.py", ["cuda/kernels/scores/test_bias.py::test_biases_that_tma_loads[compiled-sums]"], {
        "b.add(col, right)": "col",
    }),
    Faults("cuda/tile/tma.py", ["cuda/tile/test_tma.py::test_pages"], {
        "b.urem(row, I32(size))": "I32(0)",
        "b.select(b.icmp_signed(\"<\", place, last), place, last)": "place",
        "I32(down * ROW_BYTES)": "I32(0)",
        "min(place, len(table) - 1)": "place",
        "if 0 <= page < len(pages)": "if page < len(pages)",
    }),
    Faults("cuda/kernels/scores/function.py", SCORES, {
        "map_elements(of_cols, S, j + n0, i + m0": "map_elements(of_rows, S, j + n0, i + m0",
        "F * where((S != HIDDEN) & (value != HIDDEN), slope, 0)": "F",
        "(first + at.batch + batch, at.head + head": "(at.batch + batch, at.head + head + 1",
    }),
    Faults("cuda/kernels/scores/function.py", [
        "cuda/kernels/scores/test_function.py::test_a_derivative_may_be_negative[simulated-]",
        "cuda/kernels/scores/test_function.py::test_what_was_minus_infinity_has_no_gradient",
    ], {
        "S = S * natural(ONE, scores)": "pass",
        "(S != HIDDEN) & (value != HIDDEN)": "(value != HIDDEN)",
    }),
    Faults("cuda/kernels/score_gradient.py", SCORES, {
        "return total + dS": "return dS",
        "total - dS * distance(": "total + dS * distance(",
        "if first < n0 + TILE_N and n0 < end": "if first < n0 and n0 < end",
        "dS = pull_back(P * (dP * Z - D), F)": "dS = P * (dP * Z - D)",
        "dS = where(sees(sight, band, batch, head, m0, n0), dS, 0)": "pass",
    }),
    Faults("cuda/tile/mapping.py", ["cuda/tile/test_mapping.py"], {
        'operator.sub: emit_sum("sub")': 'operator.sub: emit_sum("add")',
        'min: emit_chosen("<")': 'min: emit_chosen(">")',
        'b.select(b.icmp_signed("<", whole, I32(0)), b.neg(whole), whole)': "whole",
        "place(b, b.neg(whole), *[": "place(b, whole, *[",
        "emit_minimum(b, types.int32, b.add(start, I32(offset)), last)": "b.add(start, I32(offset))",
        "np.minimum(places, size - 1)": "places",
        "isinstance(x, Dual | types.Float) for x in args)": "isinstance(x, Dual) for x in args)",
    }),
    Faults("cuda/kernels/shared/schedule.py", ["cuda/kernels/shared/test_schedule.py"], {
        "return whole, number % size": "return whole, number",
        "split(matrix, heads)\n    return tile, batch, head\n\n\n@device\ndef place_grouped":
            "split(matrix, heads)\n    return tile, head, batch\n\n\n@device\ndef place_grouped",
        "at_once * tiles": "at_once",
        "minimum(at_once, matrices - first)": "at_once",
        "first + matrix": "matrix",
        "first + atomic_add": "atomic_add",
        "counters, 1, workers - 1)": "counters, 1, workers)",
        "counters[0] = 0": "pass",
    }),
    Faults("cuda/kernels/shared/softmax.py", ["cuda/kernels/shared/test_softmax.py"], {
        "SLACK = 1 ": "SLACK = 40 ",
        "np.finfo(ACC).min * (1": "0 * (1",
        "subtracted_first if far else fused": "fused",
        "(m_new - m) * scale_log2 > SLACK": "m_new - m > SLACK",
        "> SLACK, m_new, m)": "> SLACK, m, m_new)",
        "exp2((m - m_new) * scale_log2)": "exp2(m - m_new)",
        "return m_new, alpha, m_new if": "return m_new, alpha, m if",
        "part_sum(P, l * alpha)": "part_sum(P, l)",
        "m + log2(total)": "log2(total)",
        "log2(total) * ln_2": "log2(total)",
    }),
    Faults("cuda/kernels/shared/softmax.py", [
        "cuda/kernels/hopper/test_linear_bias.py::test_slopes_far_from_the_diagonal"
    ], {
        "row_max(S) * factor) + level, m)": "row_max(S) * factor), m)",
        "else m_new - level": "else m_new",
    }),
    Faults("cuda/kernels/shared/softmax.py", ["cuda/kernels/scores/test_relative.py"], {
        "else factor * scale_log2": "else scale_log2",
    }),
    Faults("cuda/kernels/shared/dropout.py", ["cuda/kernels/shared/test_dropout.py"], {
        "[device(round_by(wide_product))] * ROUNDS": "[device(round_by(wide_product))] * (ROUNDS - 1)",
        "% 16 == 0 else 15": "% 16 == 0 else 7",
        "(j >> 4) * 4 + ((j >> 1) & 3)": "(j >> 4) * 4 + ((j >> 1) & 1)",
        "(i >> 4) * 8 + (i & 7)": "(i >> 4) * 8 + (i & 3)",
        "drops.first + at.batch + batch": "at.batch + batch",
        "convert(batch, U64) * convert(at.heads, U64)": "convert(batch, U64)",
        "drops.key_low, drops.key_high)": "drops.key_high, drops.key_low)",
        "(i & 8) != 0, (j & 8) != 0": "(j & 8) != 0, (i & 8) != 0",
        "i = i + (j & 1)": "pass",
        "where(odd, word, word << 16)": "where(odd, word << 16, word)",
        ">= U32(drops.threshold << 16)": "> U32(drops.threshold << 16)",
        "where(kept(drops, batch, head, m0, n0), P, 0)": "where(kept(drops, batch, head, n0, m0), P, 0)",
    }),
    Faults("cuda/kernels/shared/layouts.py", ["cuda/kernels/test_forward.py", "cuda/kernels/test_backward.py"], {
        "return row_index(layout, m0), col_index(layout, n0)": "return row_index(layout, n0), col_index(layout, m0)",
        "return col_index(layout, m0), row_index(layout, n0)": "return row_index(layout, m0), col_index(layout, n0)",
        "        arrive()\n": "",
    }),
    Faults("cuda/kernels/shared/layouts.py", ["cuda/kernels/test_backward.py::test_two_warps"], {
        "columns(x, mine, SLICES)": "columns(x, 0, SLICES)",
        "sync_threads()                                          # all have read": "pass  # all have read",
        "put_registers(allocate(PLACE, mine), S)\n        sync_threads()": "put_registers(allocate(PLACE, mine), S)",
        "range(1, SLICES)": "range(2, SLICES)",
    }),
    Faults("cuda/kernels/delta.py", ["cuda/kernels/test_delta.py"], {
        "row_sum(dO * O)": "row_sum(dO)",
        "D = D - load(mDlse": "D = D + load(mDlse",
        "where(sees, D, 0)": "D",
        "where(sees, lse_log2, INFINITE)": "lse_log2",
        "if BOUNDED:": "if not BOUNDED:",
        "where(lse_log2 < LOWEST, LOWEST, lse_log2)": "lse_log2",
        "lse_log2 + abs(lse_log2) * MARGIN": "lse_log2 * (1 + MARGIN)",
        " & (row_index(ROWS, m0) < end - first)": "",
        "tile % TILES_A_SLOT * TILE_M": "tile % TILES_A_SLOT",
        "batches * heads, heads)": "batches * heads, batches)",
    }),
    Faults("cuda/kernels/delta.py", [
        "cuda/kernels/shared/test_segments.py::test_gradients_without_own_kernels"
    ], {
        "(logits[batch, head] - lse)": "(logits[head, batch] - lse)",
        "-(P * D)": "P * D",
        "where(sees, -(P * D), 0)": "-(P * D)",
        "            save_sink(sinks, batch, head, lse, D, sees, first, end, m0)\n": "",
    }),
    Faults("cuda/plan/planner.py", [f"cuda/plan/test_planner.py::test_packed_arrays_{name}" for name in (
        "are_computed_by_segment", "on_other_gpus"
    )], {
        "wanted == [self.slopes] and with_dq": "wanted == [self.slopes]",
        "by_wgmma and comes_with_dq": "comes_with_dq",
        " and number != self.sink]": "]",
        "self.wanted and not (self.wanted": "not (self.wanted",
    }),
    Faults("cuda/kernels/shared/segments.py", ["cuda/kernels/shared/test_segments.py"], {
        "inside(offsets[t - 1], length)": "offsets[t - 1]",
        "if t > 0 else 0": "if t > 1 else 0",
        "if t < count else length": "if t < count - 1 else length",
        "low, high = index(1), count + 1": "low, high = index(1), count",
        "// TILE + t > slot": "// TILE + t >= slot",
        "(thread_index() % WARP + 1) * step": "thread_index() % WARP * step",
        "ballot(later)) * step, step - 1": "ballot(later)) * step, index(0)",
        "if t == 0 or t == count:": "if t == 0:",
        "(count_q, index(0)) if KEEPS_Q": "(index(0), count_k) if KEEPS_Q",
        "// TILE - t": "// TILE",
        "(first_query // PADDED + t)": "(first_query // PADDED)",
        "length // TILE + count + 1": "length // TILE + count",
        "maximum(packing.lo + shift, sight.lo + apart)": "packing.lo + shift",
        "minimum(packing.hi + shift, sight.hi + apart)": "packing.hi + shift",
        "segment.keys - segment.queries, segment": "segment.keys, segment",
        "left if left < segment.queries": "left if left > segment.queries",
        "sight.keys - segment.first_key": "sight.keys",
    }),
    Faults("cuda/kernels/hopper/forward_steps.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated"
    ], {
        "m0 + ROWS <= segment.queries": "m0 <= segment.queries",
    }),
    Faults("cuda/kernels/hopper/forward_producer.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated"
    ], {
        "first_key + n_block * TILE_N\n                acquire": "first_key + n_block\n                acquire",
        "row = work.segment.first_query + m0": "row = m0",
    }),
    Faults("cuda/kernels/hopper/forward.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated"
    ], {
        "(IS_PACKED and not is_whole(tile.segment, tile.m0))": "False",
        "first, end = queries_of(tile.segment)": "first, end = tile.segment.first_query, 65",
    }),
    Faults("cuda/kernels/hopper/backward_steps.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated"
    ], {
        "tile.segment.first_key + tile.first": "tile.first",
        "tile.segment.first_query + m0, tile": "m0, tile",
        "tile.segment.first_padded_row + m0": "m0",
    }),
    Faults("cuda/kernels/forward_mma.py", [
        f"cuda/kernels/test_forward_mma.py::test_{name}"
        for name in ("masks", "tiles_and_groups", "dropout", "tiles_that_are_empty_are_skipped")
    ], {
        "wait_copies()\n        sync_threads()                                          # K":
            "sync_threads()                                          # K",
        "sync_threads()                                          # K": "pass  # K",
        "wait_copies()\n        sync_threads()                                          # V":
            "sync_threads()                                          # V",
        "sync_threads()                                          # V": "pass  # V",
        "sync_threads()                                          # all": "pass  # all",
        "        sync_threads()\n        save(aligned": "        save(aligned",
        "at=SHARED_V if held else None": "at=SHARED_V",
        "if tested(": "if not tested(",
        "tile.m0 + TILE_M, n0, n_end)": "tile.m0 + 1, n0, n_end)",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "next_n_block(tile, sight, first // TILE_N)": "first // TILE_N",
        "next_n_block(tile, call.sight, n_block + 1)": "n_block + 1",
        "n_block + steps(": "n_block + 0 * steps(",
        "O = rescaled(O, alpha)": "O = O * 1",
        "part_sum(P, l * alpha)": "part_sum(P, l)",
        "tile.batch, tile.head, tile.m0, n0)     #": "tile.batch, tile.head, n0, tile.m0)     #",
        "tile.head // group_size": "tile.head",
        "m_blocks - 1 - number": "m_blocks - number",
        "segment.first_key + maximum(tile.band[3], 1)": "segment.first_key + segment.keys",
        "(inverse(total, alpha) * kept_scale)": "inverse(total, alpha)",
        "m * (scale_log2 * LN2)": "m * scale_log2",
        "get(sQ, Q_TILE) if HELD else sQ": "sQ",
    }),
    Faults("cuda/kernels/forward_mma.py", ["cuda/kernels/test_forward_mma.py::test_packed"], {
        "tile.segment.first_key + n0": "n0",
        "mV[batch, head_k][segment.first_key : keys]": "mV[batch, head_k][:keys]",
        "mQ[batch, head][first : first +": "mQ[batch, head][: first +",
        "mO[batch, head][first:end]": "mO[batch, head][first:]",
        "scores_of(scores, segment)": "scores",
        "packs=True": "packs=False",
    }),
    Faults("cuda/kernels/forward_mma_tiles.py", ["cuda/plan/test_planner.py"], {
        "room <= work.device.shared": "room <= 1 << 30",
        "ForwardTiles(128, 32, 128, False)": "ForwardTiles(128, 64, 128, False)",
        "problem.group_size * min": "min",
        "max(1, L2_BYTES // max(nbytes, 1))": "L2_BYTES",
        "min(max(1, L2_BYTES": "max(max(1, L2_BYTES",
    }),
    Faults("cuda/kernels/shared/tables.py", ["cuda/plan/test_planner.py"], {
        "if size >= max(": "if size > max(",
    }),
    Faults("cuda/plan/tiers.py", ["cuda/plan/test_tiers.py"], {
        "latest.reset(token)": "pass",
        "TIERS.index(name) <=": "TIERS.index(name) >=",
        "not name or": "name and",
        "if name not in TIERS": "if False",
    }),
    Faults("cuda/passes.py", ["cuda/plan/test_tiers.py"], {
        "of_score, misaligned, tier": "of_score, misaligned",
        "score, tier, whole))": "score))",
        "score, latest.get(), True))": "score))",
    }),
    Faults("cuda/kernels/hopper/score_gradient.py", ["cuda/plan/test_tiers.py"], {
        "(spec,), WGMMA)\n\n\ndef diagonals_route": "(spec,))\n\n\ndef diagonals_route",
    }),
    Faults("cuda/plan/arguments.py", ["cuda/plan/test_planner.py::test_what_is_not_aligned_is_copied_for_cp_async"], {
        "class AlignedMatrix(Matrix):": "class AlignedMatrix(Matrix):\n    find = Matrix.find\n\nclass Unused(Matrix):",
    }),
    Faults("cuda/kernels/forward.py", PACKED_ON_ANY, {
        "mV[batch, head_k][key : key + maximum(band[3], 1)]": "mV[batch, head_k][key:]",
        "query + m0, key + n0": "m0, n0",
        "scores_of(scores, segment)": "scores",
        "mO[batch, head][query:end_query]": "mO[batch, head][query:]",
        "packs=True": "packs=False",
    }),
    Faults("cuda/kernels/backward.py", PACKED_ON_ANY, {
        # keys and values
        "segment.first_query, segment.first_padded_row, keys_of": "segment.first_query, segment.first_query, keys_of",
        "mQ[batch, head][query : query + length]": "mQ[batch, head][query:]",
        "query + m0, key + n0)\n                lse": "m0, n0)\n                lse",
        "work.problem.heads_k * n_blocks,\n    packs=True": "work.problem.heads_k * n_blocks,\n    packs=False",
        # queries
        "segment.first_key, segment.first_padded_row\n": "segment.first_key, segment.first_query\n",
        "mK[batch, head_k][key : key + length_k]": "mK[batch, head_k][key:]",
        "query + m0, key + n0)\n            P": "m0, n0)\n            P",
        "mDQ[batch, head][query:end_query]": "mDQ[batch, head][query:]",
        'with_results("dq"),\n    packs=True': 'with_results("dq"),\n    packs=False',
    }),
    Faults("cuda/kernels/forward.py", ["cuda/kernels/test_forward.py"], {
        "head_k, key, (query, end_query) = head // group_size": "head_k, key, (query, end_query) = head",
        "mV[batch, head_k][key : key + maximum(band[3], 1)]": "mV[batch, head_k]",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "wait_copies()\n        sync_threads()\n": "sync_threads()\n",
        "        sync_threads()\n        while": "        while",
        "wait_copies()\n            sync_threads()                                      # V":
            "sync_threads()                                      # V",
        "sync_threads()                                      # V": "pass  # V",
        "wait_copies()\n            sync_threads()                                      # K":
            "sync_threads()                                      # K",
        "sync_threads()                                      # K": "pass  # K",
        "if tested(": "if not tested(",
        "sees(sight, band, batch, head, m0, n0)": "sees(sight, band, batch, head, n0, m0)",
        "drops, batch, head, m0": "drops, head, batch, m0",
        "dot(O * alpha, left(P), sV)": "dot(O, left(P), sV)",
        "inverse(total, alpha) * kept_scale": "inverse(total, alpha)",
    }),
    Faults("cuda/kernels/shared/all_keys.py", ["cuda/kernels/test_backward.py::test_all_keys_in_a_block"], {
        "maximum(longest(sight, tile), 1)": "end_key",
        "m_block < first or m_block >= end": "m_block < first or m_block > end",
        "sync_threads()                                          # dS": "pass  # dS",
        "dQ * scale, m0)\n\n    @device": "dQ, m0)\n\n    @device",
    }),
    Faults("cuda/kernels/shared/layouts.py", ["cuda/kernels/test_backward.py::test_all_keys_in_a_block"], {
        "columns(y, part, PARTS)": "columns(y, 0, PARTS)",
    }),
    Faults("cuda/kernels/shared/tables.py", ["cuda/plan/test_planner.py"], {
        "longest <= seqlen": "longest < seqlen",
        "and not (scarce and seqlen > MANY)": "",
        "row._replace(blocks=1) if scarce else row": "row",
        "work.segments - 2": "work.segments - 1",
    }),
    Faults("cuda/kernels/small/steps.py", ["cuda/plan/test_small.py"], {
        "FEWER * problem.seqlen_q >= problem.seqlen_k": "True",
        "min(tiles.blocks, ": "max(tiles.blocks, ",
        "(work.score_added == BY_HEAD and not grouped)": "False",
        "work.problem.heads if sharing == BY_HEAD else 1": "1",
    }),
    Faults("cuda/kernels/small/steps.py", ["cuda/kernels/small/test_scores.py"], {
        "if end > 0:": "if end >= 0:",
        "put(allocate(PLACE, stage), full(COPY, ZERO))": "pass",
        "put_registers(allocate(PLACE), added)": "put_registers(allocate(PLACE), added + added)",
        "S = S * scores.scale": "S = S",
        "apply(full(S_TILE, ZERO), scores, 0, head, 0, 0)": "apply(full(S_TILE, ZERO), scores, 0, 0, 0, 0)",
    }),
    Faults("cuda/kernels/small/forward.py", ["cuda/kernels/small/test_forward.py"], {
        "fetch_k(mK, batch, head // group_size": "fetch_k(mK, batch, head",
        "fetch_v(mV, batch, head // group_size, band[3]": "fetch_v(mV, batch, head // group_size, sight.keys",
        "stage = 1 - stage\n": "stage = stage + 0\n",
        "wait_copies(AHEAD)": "wait_copies(1)",
        "sync()                                              # Q, K and V have": "pass  # Q, K and V have",
        "sync()                                              # all have": "pass  # all have",
        "where(sees(sight, band, batch, head, 0, 0), S, NO_SCORE)": "where(sees(sight, band, batch, head, 0, 0), S, 0)",
        "drop(P, drops, batch, head, 0, 0)": "drop(P, drops, head, batch, 0, 0)",
        "if SAVES:": "if not SAVES:",
        "number < matrices:\n            band": "number <= matrices:\n            band",
    }),
    Faults("cuda/kernels/small/backward.py", ["cuda/kernels/small/test_backward.py"], {
        "at.head, band_at(sight, at.batch, at.head)[2])": "at.head, sight.queries)",
        "at.head_k, band_at(sight, at.batch, at.head)[3])": "at.head_k, sight.keys)",
        "wait_copies(2)": "wait_copies(3)",
        "sync()                                              # V and dO": "pass  # V and dO",
        "wait_copies()\n            sync()": "sync()",
        "sync()                                              # Q and K": "pass  # Q and K",
        "sync()                                              # P is": "pass  # P is",
        "sync()                                              # all have read P": "pass  # all have read P",
        "sync()                                              # dS is": "pass  # dS is",
        "sync()                                              # all have read Q": "pass  # all have read Q",
        "S, F = where(visible, S, NO_SCORE), where(visible, F, 0)": "S, F = where(visible, S, 0), F",
        "put(sP, PZ)": "put(sP, P)",
        "dV = full(V_TILE, ZERO)\n": "dV = dV\n",
        "dK = full(Q_TILE, ZERO)\n": "dK = dK\n",
        "member == group_size - 1": "member == 0",
        "return P * Z, dP * Z": "return P * Z, dP",
        "D - where(seen, load": "D + where(seen, load",
        "where(seen, load(statistics[0][batch, head], ROWS, 0), 0)": "load(statistics[0][batch, head], ROWS, 0)",
        "load(statistics[1][batch, head][:queries]": "load(statistics[0][batch, head][:queries]",
        "load(statistics[0][batch, head][:queries]": "load(statistics[0][batch, head]",
    }),
    Faults("cuda/kernels/small/backward.py", ["cuda/kernels/small/test_scores.py"], {
        "return total + dS": "return total",
        "save(mSums[0][block, head], total, 0)": "save(mSums[0][block, 0], total, 0)",
        "is_zero=True)": "is_zero=False)",
        "or not is_matrix": "",
        "[heads] * bool(lead)": "[1] * bool(lead)",
    }),
    Faults("cuda/kernels/small/backward.py", ["cuda/plan/test_small.py"], {
        "return work.whole and work.sink is None": "return work.sink is None",
        "work.sink is None and (not": "(not",
        "in (SHARED, BY_HEAD) and not is_grouped(work)": "in (SHARED, BY_HEAD)",
    }),
    Faults("cuda/kernels/backward.py", ["cuda/plan/test_planner.py"], {
        "not work.segments and SPEC_ALL": "SPEC_ALL",
    }),
    Faults("cuda/kernels/backward.py", ["cuda/kernels/test_backward.py"], {
        # keys and values
        "range(head_k * group_size, (head_k + 1) * group_size)": "range(head_k * group_size, head_k * group_size + 1)",
        "(end + TILE_M - 1) // TILE_M": "end // TILE_M",
        "sync_threads()                                      # all have": "pass  # all have",
        "wait_copies()\n                sync_threads()                                  # dO":
            "sync_threads()                                  # dO",
        "sync_threads()                                  # dO": "pass  # dO",
        "wait_copies()\n                    sync_threads()  ": "sync_threads()  ",
        "sync_threads()                              # Q has": "pass  # Q has",
        "sync_threads()                              # all have read dO": "pass  # all have read dO",
        "fetch_do(1 - stage": "fetch_do(stage",
        "fetch_q(1 - stage": "fetch_q(stage",
        "not IN_TURN:\n                    stage = 1 - stage": "IN_TURN:\n                    stage = 1 - stage",
        "allocate(SHARED_LSE, stage), COLS)": "allocate(SHARED_DELTA, stage), COLS)",
        "\n                P = exp2(capped(S * to_log2(scale)": "\n                P = exp2(capped(S * scale",
        "\n                    P, dP = where(visible, P, 0), where(visible, dP, 0)":
            "\n                    P = where(visible, P, 0)",
        "mQ[batch, head][query : query + length]": "mQ[batch, head]",
        "\n                Z = drop(full(S_TILE, kept_scale), drops, batch, head":
            "\n                Z = drop(full(S_TILE, kept_scale), drops, head, batch",
        "left_P(P * Z)": "left_P(P)",
        "\n                dS = pull_back(P * (dP * Z - D)": "\n                dS = pull_back(P * (dP - D)",
        "\n                dS = pull_back(P * (dP * Z - D), F)": "\n                dS = pull_back(P * (dP * Z), F)",
        "dot(dK, left_dS(dS), sQ)": "dot(full(K_TILE, ZERO), left_dS(dS), sQ)",
        "left_P, left_dS = left_operand(S_TILE, shared, ACC), left_operand(S_TILE, shared, ACC)":
            "left_P = left_dS = left_operand(S_TILE, shared, ACC)",
        "dK * scale, n0": "dK, n0",
        "dV, n0": "dV * scale, n0",
        # queries
        "head_k, key, row = head // group_size": "head_k, key, row = head",
        "mK[batch, head_k][key : key + length_k]": "mK[batch, head_k]",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "\n            wait_copies()\n            sync_threads()": "\n            sync_threads()",
        "\n            wait_copies()\n            sync_threads()  ": "\n            wait_copies()  ",
        "wait_copies()\n                sync_threads()                                  # K has":
            "sync_threads()                                  # K has",
        "sync_threads()                                  # K has": "pass  # K has",
        "fetch_v(1 - stage": "fetch_v(stage",
        "fetch_k(1 - stage": "fetch_k(stage",
        "not IN_TURN:\n                stage = 1 - stage": "IN_TURN:\n                stage = 1 - stage",
        "load(mLse[batch, head][row": "load(mDelta[batch, head][row",
        "\n            P = exp2(capped(S * to_log2(scale)": "\n            P = exp2(capped(S * scale",
        "\n            Z = drop(full(S_TILE, kept_scale), drops, batch, head":
            "\n            Z = drop(full(S_TILE, kept_scale), drops, head, batch",
        "\n            dS = pull_back(P * (dP * Z - D)": "\n            dS = pull_back(P * (dP - D)",
        "dot(dQ, left(dS), sK)": "dot(dQ, left(P), sK)",
        "dQ * scale, m0": "dQ, m0",
    }),
    Faults("cuda/kernels/backward_mma.py", [f"cuda/kernels/test_backward_mma.py::test_{name}" for name in (
        "groups_of_heads", "nothing_is_seen", "dropout", "causal"
    )], {
        "rows_between(mK, batch, head, first, end": "rows_between(mK, batch, head, first, shape(mK)[2]",
        "maximum(longest(sight, tile), 1)": "longest(sight, tile)",
        "            wait_copies()\n            sync_threads()": "            sync_threads()",
        "sync_threads()                                      # this tile": "pass  # this tile",
        "copy_queries(1 - stage,": "copy_queries(stage,",
        "add_dq(mSums, tile, last, 1 - stage)\n            sQ": "add_dq(mSums, tile, last, stage)\n            sQ",
        "sync_threads()                                  # all have read it": "pass  # all have read it",
        "        wait_copies()\n        sync_threads()\n        if": "        wait_copies()\n        if",
        "            add_dq(mSums, tile, last, 1 - stage)\n            sync_threads()": "            sync_threads()",
        "sync_threads()                                      # all have read K": "pass  # all have read K",
        "        put(sdS, dS)\n        sync_threads()\n": "        put(sdS, dS)\n",
        "if needs_mask(sight": "if not needs_mask(sight",
        "where(visible, P, 0)": "P",
        "drops, batch, at.head, m0": "drops, 0, at.head, m0",
        "maximum(P, 0) if HAS_DROPOUT else P": "P",
        "dK * scale": "dK",
        "dV * kept_scale": "dV",
        "stages * adds_dq if HAS_WHOLE_ROWS else 1": "1",
        "ADDS_DQ and at.m_blocks > 0": "ADDS_DQ",
    }),
    Faults("cuda/kernels/backward_mma.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-warps]"
    ], {
        "rows_between(mQ, batch, head, first, end": "rows_between(mQ, batch, head, first, shape(mQ)[2]",
        "rows_between(mDO, batch, head, first, end": "rows_between(mDO, batch, head, first, shape(mDO)[2]",
    }),
    Faults("cuda/kernels/backward_mma.py", ["cuda/plan/test_planner.py::test_packed_arrays_on_other_gpus"], {
        "parameters=parameters(adds_dq=False))": "parameters=parameters(adds_dq=False), packs=False)",
    }),
    Faults("cuda/kernels/round_dq.py", [
        "cuda/kernels/test_backward_mma.py::test_causal", "cuda/kernels/hopper/test_backward.py::test_causal"
    ], {
        "down % PARTS_A_SLOT * TILE_M": "down * TILE_M",
        "load_lines if in_lines else load_registers": "load_lines",
        "dQ * scale": "dQ",
    }),
    Faults("cuda/kernels/shared/query_tiles.py", [
        "cuda/kernels/shared/test_segments.py::test_nan_stays_in_its_segment_simulated[simulated-warps]"
    ], {
        "opaque(tile.segment.first_padded_row) // tile_m + at.m_block": "at.m_block",
    }),
    Faults("cuda/kernels/shared/layouts.py", ["cuda/kernels/test_backward_mma.py::test_causal"], {
        "cols // 16": "cols // 8",
        "put(place, tile)\n        sync()": "put(place, tile)",
    }),
    Faults("cuda/kernels/shared/layouts.py",
           ["cuda/kernels/test_backward_mma.py::test_every_warp_has_sums_of_its_own"],
           {"sixteens & -sixteens": "sixteens"}),
    Faults("cuda/kernels/backward_mma.py",
           ["cuda/kernels/test_backward_mma.py::test_every_warp_has_sums_of_its_own"],
           {"max(head_dim, 8 * tiles.threads // tiles.tile_m)": "head_dim"}),
    Faults("cuda/kernels/hopper/forward_producer.py", ["cuda/kernels/hopper/test_forward.py"], {
        "            tma_store_wait()\n": "",
        "head * heads_per_tile": "head",
        "if n_block >= end:": "if n_block > end:",
        "        acquire(Q)\n        if": "        if",
        "and count >= Q_STAGES:": "and count > Q_STAGES:",
        "number < m_blocks * matrices": "number <= m_blocks * matrices",
        "(work.batch, head, stored_at))": "(work.batch, work.head, stored_at))",
        "        commit(W, NO_WORK)\n": "",
        "        finish(counters, grid_size())\n": "",
        "end = count + Q_STAGES": "end = count",
        "            wait(W)\n            work": "            work",
        "release(W)\n            W = advance(W, 1)\n": "W = advance(W, 1)\n",
        "                acquire(K)\n": "",
        "                acquire(V)\n": "",
        "work.head // group_size": "work.head",
    }),
    Faults("cuda/kernels/hopper/forward_steps.py", ["cuda/kernels/hopper/test_forward.py"], {
        "clear(stage.tile, length)": "clear(stage.tile, length + 1)",
        "                fence_async_proxy()\n": "",
        "            sync_warpgroups(consumers)\n": "",
        "where(sees(sight, band, batch, head, m0, n0), S, NO_SCORE)":
            "where(sees(sight, band, batch, head, m0, n0), S, ZERO)",
        "while head >= heads_per_tile:": "while head > heads_per_tile:",
        "row * ROWS": "row",
        "length < rows:": "length < rows - 64:",
        "            wait(stage)\n": "",
    }),
    Faults("cuda/kernels/hopper/forward.py", ["cuda/kernels/hopper/test_forward.py"], {
        "            sync_warpgroup()                                    # no warp": "            # no warp",
        "            release(K)\n            release(V)\n": "            release(K)\n",
        "            clear_beyond(V, tile, sight, n_block)\n": "",
        "skip(K, V, tile, args.sight, here, tile.n_blocks)": "K, V, here",
        "if RESCALES_FIRST:\n                O = rescaled(O, alpha)": "if RESCALES_FIRST:\n                pass",
        "if not RESCALES_FIRST:\n                O = rescaled(O, alpha)":
            "if not RESCALES_FIRST:\n                pass",
        "            wait(K)\n            S = dot(": "            S = dot(",
        "            wait(V)\n            O = dot(O": "            O = dot(O",
        "            release(K)\n            if BY_PRODUCT:": "            if BY_PRODUCT:",
        "wgmma_wait(O, 0)\n            release(V)\n            P": "wgmma_wait(O, 0)\n            P",
        "            O = wgmma_wait(O, 0)\n            release(V)\n            P":
            "            release(V)\n            O = wgmma_wait(O, 0)\n            P",
        "args.drops, tile.batch, tile.head": "args.drops, 0, tile.head",
        "acquire(Q)                                              #": "pass  #",
        "        wait(Q)\n": "",
        "        wait(K)\n        S = wgmma_wait(": "        S = wgmma_wait(",
        "        wait(V)\n        O = dot(rescaled(": "        O = dot(rescaled(",
        "dot(rescaled(O, alpha), P, V.tile)": "dot(O, P, V.tile)",
        "O * (inverse(total, alpha) * args.kept_scale)": "O * inverse(total, alpha)",
        "        fence_async_proxy()\n        sync_warpgroup()\n": "        sync_warpgroup()\n",
        "        fence_async_proxy()\n        sync_warpgroup()\n        release":
            "        fence_async_proxy()\n        release",
        "release(Q)                                              #": "pass  #",
        "advance(Q, CONSUMERS)": "advance(Q, 1)",
        "        release(W)\n        return": "        return",
        "init_pipelines(WORK_PIPELINE, Q_PIPELINE, O_PIPELINE": "init_pipelines(WORK_PIPELINE, Q_PIPELINE",
        "        sync_threads()\n": "",
    }),
    Faults("cuda/kernels/shared/schedule.py", ["cuda/test_passes.py::test_out[40-warpgroups]"], {
        "    wait_on_dependencies()\n": "",
    }),
    # ------------------------------------------------------------------------------------------- CUDA: tile language
    Faults("cuda/tile/pipeline.py", ["cuda/tile/test_hopper.py", "cuda/tile/test_pipeline.py"], {
        "2 * tile.stages * BARRIER_BYTES": "tile.stages * BARRIER_BYTES",
        "free * pipeline.tile.stages * BARRIER_BYTES": "free * BARRIER_BYTES",
        "enumerate((pipeline.fills, pipeline.readers))": "enumerate((pipeline.fills, 1))",
        'icmp_unsigned(">=", index, I32(count))': 'icmp_unsigned(">", index, I32(count))',
        "b.select(beyond, b.xor(parity, I32(1)), parity)": "parity",
        "stage.pipeline, index, True), b.xor(parity, I32(1))": "stage.pipeline, index, True), parity",
        "stage.pipeline, index, False), parity": "stage.pipeline, index, True), parity",
        "b.and_(thread_index(b), I32(WARPGROUP - 1))": "b.and_(thread_index(b), I32(31))",
        "emit_arrival_of_warpgroup(b, stage, value, True)": "emit_arrival_of_warpgroup(b, stage, value, False)",
        "emit_arrival_of_warpgroup(b, stage, value, False)": "emit_arrival_of_warpgroup(b, stage, value, True)",
        "        emit_arrival(b, stage.pipeline, index, False)\n": "",
        'asm(b, "fence.mbarrier_init.release.cluster;", VOID, effect=True)': "pass",
    }),
    Faults("cuda/tile/tma.py", ["cuda/tile/test_hopper.py", "cuda/tile/test_tma.py"], {
        "head, row):\n        index, _ = unpack(b, value)\n        filled = emit_expect(b, stage.pipeline, index, "
        "I32(plan.nbytes))": "head, row):\n        index, _ = unpack(b, value)\n        filled = emit_expect("
                             "b, stage.pipeline, index, I32(plan.nbytes // 2))",
        'asm(b, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", VOID, filled, nbytes, effect=True)': "pass",
        "b.add(start, I32(i * plan.box_bytes))": "start",
        'asm(b, "fence.proxy.async.shared::cta;", VOID, effect=True)': "None",
        'asm(b, "cp.async.bulk.commit_group;", VOID, effect=True)': "pass",
        "wait_group.read 0;": "wait_group.read 1;",
    }),
    Faults("cuda/tile/pipeline.py", ["cuda/tile/test_pipeline.py"], {
        '("free", pipeline.readers)': '("free", 1)',
        "stage.index + int(steps), stage.pipeline.tile.stages": "stage.index + 1, stage.pipeline.tile.stages",
        "stage.barrier(free=True).wait(stage.round - 1)": "pass",
        "stage.barrier(free=False).wait(stage.round)": "pass",
        "    stage.note_wait()\n": "",
        '("filled", pipeline.fills)': '("filled", 1)',
        "elif simulator.thread_index() % WARPGROUP:": "elif simulator.thread_index():",
        "simulator.thread_index() % WARPGROUP == 0": "simulator.thread_index() == 0",
    }),
    Faults("cuda/tile/tma.py", ["cuda/tile/test_tma.py"], {
        "    simulator.shared_memory().share()\n": "    pass\n",
        "memory.note_end(unit, memory.clocks[0, unit, unit])": "pass",
    }),
    Faults("cuda/tile/accumulation.py", ["cuda/tile/test_accumulation.py"], {
        "run + i % run\n": "run\n",
        "_places(tile.layout)] +=": "_places(tile.layout)] =",
        "_places(tile.layout, 1)] +=": "_places(tile.layout)] +=",
        "run if capability() >= (9, 0) else 1": "1",
        "(i // run * tile.layout.threads) * run + i % run": "i * tile.layout.threads",
        "_check(word, tile.layout, array)": "pass",
        "array[int(number) * cols :][:cols] +=": "array[:cols] +=",
        "add.f32 [$0], [$1], $2;": "add.u32 [$0], [$1], $2;",
        "I64(plan.cols)": "I64(1)",
        "I64(prod(layout.shape))": "I64(0)",
        "b.mul(b.and_(thread_index(b), I32(layout.threads - 1)), I32(run))": "b.and_(thread_index(b), I32(127))",
        'if name_of(array.dtype) != "float32":': "if False:",
    }),
    Faults("cuda/tile/boxes.py", ["cuda/tile/test_boxes.py"], {
        "stages=self.stages * (self.cols // cols), room=0": "room=0",
    }),
    Faults("cuda/kernels/hopper/forward_steps.py", ["cuda/kernels/hopper/test_backward.py"], {
        "            sync_warpgroups(consumers)\n": "",
    }),
    Faults("cuda/kernels/shared/dropout.py", ["cuda/kernels/hopper/test_backward.py"], {
        "- abs(P) * D": "- P * D",
    }),
    Faults("cuda/kernels/shared/query_tiles.py", ["cuda/kernels/hopper/test_backward.py"], {
        "m_block, m_blocks = first // TILE_M, (end + TILE_M - 1) // TILE_M": "m_block, m_blocks = 0, end // TILE_M",
        "return queries_from(sight, tile, at.head + 1)": "return queries_from(sight, tile, tile.heads)",
        "            if queries > 0:\n": "            if queries > -1:\n",
    }),
    Faults("cuda/kernels/hopper/backward_kv.py", ["cuda/kernels/hopper/test_backward.py"], {
        "share(dS, advance(E, 1), sent": "share(dS, E, sent",
        "sync_warpgroup()                                # all have read": "pass  # all have read",
        "            share(full(S_TILE, ZERO), stages.E, none, mSums, tile)": "            pass",
        "sync_warpgroups(CONSUMERS)                              # all have read K": "pass  # all have read K",
    }),
    Faults("cuda/kernels/hopper/dq_sums.py", ["cuda/kernels/hopper/test_backward.py"], {
        "        release(E)\n": "",
        "first * CONSUMERS + part, dq_place(E, part)": "first * CONSUMERS, dq_place(E, part)",
        "send_dq(E, sent, mSums, tile)": "pass",
        "            add_dq(E, walk.last, mSums, tile)": "            pass",
        "E.index % PLACES * CONSUMERS": "0",
    }),
    Faults("cuda/kernels/hopper/backward_wide.py", ["cuda/kernels/hopper/test_backward.py"], {
        "sync_warpgroup()                                        # all have read P": "pass  # all have read P",
        "        sync_warpgroup()\n        commit(sP)\n": "        commit(sP)\n",
        "acquire(advance(V, 1))                                  # the other one has read V": "pass  # has read V",
    }),
    Faults("cuda/kernels/hopper/backward_q.py", ["cuda/kernels/hopper/test_backward.py"], {
        "m_blocks - 1 - tile, seqlen_q": "tile - 1, seqlen_q",
        "work, head // group_size": "work, head",
    }),
    Faults("cuda/tile/synchronisation.py", ["cuda/tile/test_synchronisation.py"], {
        "ALL_WARPGROUPS, FIRST_OF_WARPGROUPS = 1, 2": "ALL_WARPGROUPS, FIRST_OF_WARPGROUPS = 1, 1",
        "b.add(emit_warpgroup(b), I32(FIRST_OF_WARPGROUPS))": "I32(FIRST_OF_WARPGROUPS)",
        'asm(b, "bar.warp.sync 0xffffffff;", VOID, effect=True)': "pass",
        'asm(b, f"bar.sync $0, {WARPGROUP};", VOID, barrier, effect=True)': "pass",
        'lambda b, _: asm(b, text, VOID, effect=True)\n\n\n@primitive\ndef wait_on':
            'lambda b, _: None\n\n\n@primitive\ndef wait_on',
        '_lower_registers("dec")': '_lower_registers("inc")',
    }),
    Faults("cuda/tile/synchronisation.py", ["cuda/tile/test_synchronisation.py"], {
        "WARPGROUP).sync()\n\n\n@sync_warpgroup.": "WARPGROUP // 2).sync()\n\n\n@sync_warpgroup.",
        "count * WARPGROUP).sync()": "WARPGROUP).sync()",
        "range(24, 241, 8)": "range(24, 249, 8)",
    }),
    Faults("cuda/tile/warpgroup.py", ["cuda/tile/test_warpgroup.py"], {
        "sync.aligned {later.literal_value};": "sync.aligned {later.literal_value + 1};",
        'asm(b, "wgmma.fence.sync.aligned;", VOID, effect=True)': "pass",
        'asm(b, "wgmma.commit_group.sync.aligned;", VOID, effect=True)': "pass",
        "{int(sums[0] is not None)}": "1",
        "== bool(k_axis)": "!= bool(k_axis)",
        "k // 4 + i": "k // 8 + i",
        "nbytes = k * ROW_BYTES": "nbytes = k * CHUNK_BYTES",
        "box * plan.box_bytes + col": "col",
        "lead = plan.box_bytes if": "lead = CHUNK_BYTES if",
        "(*upper[c : c + 2], *lower[c : c + 2])": "(*lower[c : c + 2], *upper[c : c + 2])",
    }),
    Faults("cuda/tile/warpgroup.py", ["cuda/tile/test_warpgroup.py"], {
        "over = _products().phases - later": "over = _products().phases",
        "    shared_memory().note_end(unit, over)\n": "",
        "_products().sync(shared_memory().tell_waits())": "_products().sync()",
        ", by=np.arange(first, first + WARPGROUP))": ")",
        "products.of != (acc.layout, y)": "False",
    }),
    Faults("cuda/tile/simulator.py", [f"cuda/tile/test_{name}.py" for name in ("simulator", "pipeline", "warpgroup")], {
        "self.last_read[who, _pages(granules)] = when": "when",
        "granules.max() >> PAGE_BITS) + 1)": "granules.min() >> PAGE_BITS) + 1)",
        "self.clocks[:, by].min(1)": "self.clocks[:, by].max(1)",
    }),
    Faults("cuda/tile/emit.py", ["cuda/tile/test_integers.py"], {
        "return b.ashr(x, ir.Constant(x.type, y.constant": "return b.lshr(x, ir.Constant(x.type, y.constant",
        "return b.xor(b.udiv(b.xor(x, sign), y), sign)": "return b.udiv(x, y)",
        "b.and_(y, sign)": "ir.Constant(x.type, 0)",
    }),
    Faults("cuda/tile/integers.py", ["cuda/tile/test_integers.py"], {
        "operator.rshift: ir.IRBuilder.ashr": "operator.rshift: ir.IRBuilder.lshr",
        "operator.mod: modulo": "operator.mod: floor_divided",
        "(b.sext if signed else b.zext)": "b.zext",
        "b.icmp_signed(sign, x, y)": "b.icmp_unsigned(sign, x, y)",
        "return self if isinstance(other, types.Integer) else None": "return None",
    }),
    Faults("cuda/tile/fragment.py", ["cuda/tile/test_agreement.py"], {
        "if len({*names}) > 1:": "if False:",
        "elif not isinstance(x, A_NUMBER):": "elif False:",
        "    if both.shape != layout.shape:": "    if False:",
    }),
    Faults("cuda/tile/global_memory.py", ["cuda/tile/test_global_memory.py"], {
        "b.and_(mine, target.has_row(row))": "mine",
        'or getattr(matrix, "fold", 0) else layout.indices': 'or getattr(matrix, "fold", 0) else layout',
        'icmp_signed("<", col, target.cols)': 'icmp_signed("<=", col, target.cols)',
        'icmp_unsigned("<", col, source.cols)': 'icmp_unsigned("<=", col, source.cols)',
    }),
    Faults("cuda/tile/matrices.py", [f"cuda/tile/test_{name}.py" for name in ("matrices", "global_memory")], {
        'icmp_signed("<", row, self.rows)': 'icmp_signed("<=", row, self.rows)',
        'b.icmp_signed("<", head, self.heads), b': 'b.icmp_signed("<=", head, self.heads), b',
        'b.icmp_signed("<", query, self.rows))': 'b.icmp_signed("<=", query, self.rows))',
        "I32(log2(self.fold))": "I32(0)",
        "[b.mul(b.sext(head, I64), self.head_stride)]": "[b.mul(b.sext(head, I64), self.row_stride)]",
        "query < self.array.shape[1]": "query <= self.array.shape[1]",
        "b.sext(b.trunc(self.row_stride, I32), I64) if self.alignment else self.row_stride":
            "b.sext(b.trunc(self.row_stride, I32), I64)",
        "b.sub(end, first), cols": "end, cols",
        "(batch, head, first), strides": "(batch, head), strides",
        "b.udiv(elements, I32(cols)), I32(cols)": "elements, I32(cols)",
        "(batch, head), strides), size_of": "(head, batch), strides), size_of",
    }),
    Faults("cuda/tile/layout.py", ["cuda/tile/test_layout.py"], {
        "self._picked(0, self.fold) if self.fold": "self._picked(0, self.size) if self.fold",
        "self._picked(log2(self.fold), self.size)": "self._picked(0, self.size)",
        "offset % end >> low": "offset % end",
    }),
    Faults("cuda/kernels/decode.py", ["cuda/kernels/test_decode.py"], {
        "wait_copies(1)": "wait_copies(3)",
        "S = of_keys(dot(S_TILE, Q, sK.T), cache, work)  # Alg. 2 line 10: S = Q K^T\n                sync_warp()":
            "S = of_keys(dot(S_TILE, Q, sK.T), cache, work)",
        "minimum(end_seen, first_key(chunk + 1))": "end_seen",
        "maximum(first_seen, first_key(chunk)) // TILE_N": "first_seen // TILE_N",
        "end = number + step": "end = number",
        "            if number >= end:\n": "            if number > end:\n",
        "found = number >= last or": "found = number >= call.tiles or",
        "following.n_block + thread_index() // WARP": "following.n_block",
        "O = dot(rescaled(O, alpha), P, sV)": "O = dot(O, P, sV)",
        "            put_warps(of_sums(O, cache, work), m, row_sum(l), warp)\n            sync_threads()\n":
            "            put_warps(of_sums(O, cache, work), m, row_sum(l), warp)\n",
        "sync_threads()                                      # all have read": "# all have read",
        "        if thread_index() == 0:\n            finish(counters, grid_size())\n": "",
        "if n_ahead >= ahead.n_blocks:  ": "if n_ahead > ahead.n_blocks:  ",
        "where(fold_index(LAYOUT) == head - work.head, of_head, found)": "of_head",
        "            l = l + get": "            l = get",
    }),
    Faults("cuda/kernels/combine.py", ["cuda/kernels/test_combine.py"], {
        "range(0, chunks, PARTS)": "range(0, chunks, 2 * PARTS)",
        "where(row_index(CHUNKS, chunk) < chunks, exp2((m - full(CHUNKS, top)) * scale_log2), 0)":
            "exp2((m - full(CHUNKS, top)) * scale_log2)",
        "row_max(where(col_index(MAXIMA, chunk) < chunks, x, NONE), top)": "row_max(x, top)",
        "inverse(total, alpha) * kept_scale": "inverse(total, alpha)",
        "        if batch < batches:\n": "        if True:\n",
        "first:end, query], ROWS_OF)": ":end, query], ROWS_OF)",
    }),
    Faults("cuda/kernels/shared/packing.py", ["cuda/kernels/shared/test_packing.py"] + [
        f"cuda/kernels/test_decode.py::test_{name}"
        for name in ("keys_that_all_sequences_share", "sequences_that_differ_share_no_tile")
    ], {
        "minimum(head + COUNT, (head_k + 1) * call.group_size)": "head + COUNT",
        "head, (part + 1) * COUNT": "head, part * COUNT + 1",
        "head // call.group_size, head": "head, head",
        "heads * ((batches + COUNT - 1) // COUNT)": "heads * (batches // COUNT)",
        "if alone and not shares_keys(work)": "if alone",
        "work.mask or problem.dropout": "problem.dropout",
        "or problem.cache or differs_by_head(work.score)": "or problem.cache",
        "problem.sharers > problem.group_size": "problem.sharers > 1",
    }),
    Faults("cuda/kernels/shared/chunks.py", ["cuda/kernels/shared/test_chunks.py"], {
        "SHORTS - (MANY - keys) // LONG": "SHORTS + (keys - MANY) // LONG",
        "chunk_of(end - 1) + 1)": "chunk_of(end))",
        "(chunk - SHORTS) * LONG + MANY": "chunk * LONG",
        "row_max(load(lengths, LENGTHS, first), longest)": "row_max(load(lengths, LENGTHS, first))",
        "if \"keys\" not in mask or by_head:": "if \"keys\" not in mask:",
        ", sight.keys))[1]": ", 2**30))[1]",
    }),
    Faults("cuda/kernels/shared/cached.py", [f"cuda/kernels/test_decode.py::test_{name}" for name in (
                    "caches_of_8_bits", "small_and_large_scales")], {
        "[batch, head][:count], alignment)": "[batch, head], alignment)",
        "more = 64 if": "more = 1 if",
        "times(1 / more) if more > 1": "unscaled if more > 1",
        "scale_of_head(first + 1)": "scale_of_head(first)",
        "X * (get(allocate(PLACE, thread_index() // WARP), OF_KEYS) * MORE)": "X * MORE",
        "copy_async(allocate(PLACE, thread_index() // WARP).T": "copy_async(allocate(PLACE, 0).T",
    }),
    Faults("cuda/tile/conversion.py", ["cuda/tile/test_tensor_cores.py"], {
        "b.xor(word, _both(0x8080))": "word",
        "b.and_(pair, _both(0xFF80))": "b.and_(pair, _both(0xFF00))",
        "b.or_(b.and_(pair, _both(0x8000)), size)": "size",
        "word), 2 * i": "word), i",
    }),
    Faults("cuda/tile/tensor_cores.py", ["cuda/tile/test_tensor_cores.py"], {
        "slice(c, c + apart + 1, apart)": "slice(c, c + 2)",
        "by_fours != (found.cols.run == 4)": "False",
        "(32, 16) if right.transposed else (16, 32)": "(16, 16)",
        "for i in (0, 2) for four in fours": "for four in fours for i in (0, 2)",
        "8 * down, beside * across": "8 * down, 8 * across",
        "b.mul(first_col, I32(across))": "I32(0)",
        "starts[1] - starts[0]": "8",
        "and not layout.has_whole_rows and layout.cols.slots % 4": "and False",
        "col ^ within": "col",
        "right * beside": "right * 8",
        "(box * plan.rows + at_row)": "at_row",
    }),
    Faults("cuda/tile/shared_memory.py", ["cuda/tile/test_shared_memory.py"], {
        "cols + self.vector if self.rows > 1": "cols if self.rows > 1",
        "self.whole or self.cols": "self.cols",
        "first = int(part) * plan.cols": "first = 0",
        "b.mul(part, I32(plan.cols))": "I32(0)",
        "plan.transposed or plan.cols % (parts * plan.vector)": "plan.transposed",
        "b.mul(stage, I32(plan.stride))": "I32(0)",
        "(1, self.pitch) if self.transposed": "(1, self.cols) if self.transposed",
    }),
    Faults("cuda/tile/shared_memory.py", ["cuda/tile/test_copies.py"], {
        "down * down_step + across * across_step": "down * down_step",
    }),
    Faults("cuda/tile/boxes.py", ["cuda/tile/test_copies.py"], {
        "turn = down % PERIOD, across % plan.width": "turn = 0, across % plan.width",
        "(across // plan.width * plan.rows + down - turn[0])": "(down - turn[0])",
    }),
    Faults("cuda/tile/copies.py", ["cuda/tile/test_copies.py"], {
        "setp.le.s32 ends, $2, {down}": "setp.lt.s32 ends, $2, {down}",
        'b.icmp_signed("<", I32(x), cols_left)': 'b.icmp_signed("<=", I32(x), cols_left)',
        "rows_left, I32(0)) for x in": "rows_left, rows_left) for x in",
        "places = further * item, across * item": "places = 0, across * item",
        "to=further * item": "to=0",
        "{down}, $2;\", I64, stride, origin)": "1, $2;\", I64, stride, origin)",
        "I64, row0, stride, column)": "I64, first, stride, column)",
        "b.gep(source.data, [col0])": "b.gep(source.data, [I32(0)])",
        "b.zext(inside, I32),": "I32(1),",
        'f"cp.async.wait_group {count};" if count else "cp.async.wait_all;"': '"cp.async.wait_group 7;"',
        'f"cp.async.wait_group {count};" if count else': "",
        'asm(b, "cp.async.commit_group;", VOID, effect=True)': "pass",
        "len(run) * item >= 4": "len(run) * item >= 16",
    }),
    Faults("cuda/tile/copies.py", ["cuda/tile/test_copies.py", "cuda/tile/test_boxes.py"], {
        "    simulator.shared_memory().note_arrival(pending or None)\n": "    pass\n",
        "    simulator.shared_memory().note_group()\n": "    pass\n",
        "shared.memory.note_fetch(shared.granules_of(*places(layout)))": "pass",
    }),
    Faults("cuda/tile/shared_memory.py", ["cuda/tile/test_shared_memory.py", "cuda/tile/test_boxes.py"], {
        "self.memory.note_read(self.granules[at], work, by)": "pass",
        "plan.offset + stage * plan.stride": "plan.offset",
    }),
]
# fmt: on


# ----------------------------------------------------------------------------------------------------------- running
class Mutant(NamedTuple):
    file: str
    original: str
    faulty: str
    tests: tuple

    def __str__(self):
        return f"{self.file}: {' '.join(self.original.split())} -> {' '.join(self.faulty.split())}"


MUTANTS = [
    Mutant(f"numbattn/{group.file}", *texts, tuple(f"tests/{test}" for test in group.tests))
    for group in TABLE
    for texts in group.texts.items()
]


@contextmanager
def checkout():
    """A copy of the working tree, without what git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, text=True)
    with TemporaryDirectory() as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


def run(copy, *command, timeout=None):
    """Run Python in the copy, with a cache of compiled code of its own."""
    own = {"PYTHONPATH": str(copy), "NUMBATTN_CACHE_DIR": str(copy / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    own["CI"] = "1"  # Hypothesis tries the same examples in every run
    environment, command = os.environ | own, [sys.executable, *command]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout)


def failure(copy, *arguments, timeout=None):
    """What pytest reports first: a failed test, a signal or a timeout; None if all tests pass."""
    try:
        pytest = "-m", "pytest", "-m", "", "-q", "-n0", "-p", "no:cacheprovider"
        done = run(copy, *pytest, *arguments, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.M)
    if done.returncode not in (1, 2) or not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1]


@contextmanager
def planted(copy, mutant):
    file = copy / mutant.file
    text = file.read_text()
    if text.count(mutant.original) != 1:
        raise RuntimeError(f"{mutant.original!r} occurs {text.count(mutant.original)} times in {mutant.file}")
    file.write_text(text.replace(mutant.original, mutant.faulty))
    try:
        yield
    finally:
        file.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", nargs="+", default=[], metavar="WORD", help="only faults with all of these words")
    parser.add_argument("-n", type=int, default=1, help="how many at a time, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--skip-clean", action="store_true", help="do not first run the tests without a fault")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if all(word in str(mutant) for word in arguments.k)]
    if arguments.list:
        print(*mutants, sep="\n")
        return
    with ExitStack() as stack:
        copies = Queue()
        for _ in range(arguments.n):
            copies.put(copy := stack.enter_context(checkout()))
        assert str(copy) in run(copy, "-c", "import numbattn; print(numbattn.__file__)").stdout
        tests = {test for mutant in mutants for test in mutant.tests}
        if tests and not arguments.skip_clean and (failed := failure(copy, *sorted(tests))):
            raise SystemExit(f"without any fault: {failed}")

        def found_by(mutant):
            copy, start = copies.get(), time.perf_counter()
            try:
                with planted(copy, mutant):
                    found = failure(copy, "-x", *mutant.tests, timeout=TIMEOUT)
            finally:
                copies.put(copy)
            tqdm.write(f"{time.perf_counter() - start:5.1f} s  {mutant}\n         {found or 'NOT NOTICED'}")
            return found

        with ThreadPool(arguments.n) as pool:
            found = list(tqdm(pool.imap(found_by, mutants), total=len(mutants)))
    missed = [mutant for mutant, by in zip(mutants, found) if not by]
    print(f"{len(missed)} of {len(mutants)} faults not noticed", *missed, sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

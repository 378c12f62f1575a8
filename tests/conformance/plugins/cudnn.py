"""A plugin of pytest for the test_mhas_v2.py of cuDNN's frontend: graphs that run numbattn.

Its random configurations stay as they are, its tensors, with gaps between elements and guards around them, its
reference and its checks of two runs for equal bits.

What had to be bent: the largest score of each query, and the sum relative to it, are not asked for, since numbattn
keeps their logarithm alone; where keys and values have different numbers of heads, the fewer ones are repeated; of a
query that sees no key, lse is the sink there and -inf here; packed sequences whose windows start at the upper left are
Intervals, since Segments align windows at the lower right.

Left out are the tests of 8-bit floats, where queries have 8 bits, too. On a CPU, configurations with more than 4
million scores are skipped.
"""

import math
import os
import sys
from enum import Enum
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import numbattn as na
from numbattn.interop.torch import attention
from numbattn.interop.torch.arrays import array_of, on_device, tensor_of

from .one_gpu import HAS_GPU, arrays_in, module

SCALE = 0.125  # of all its tests
MOST_ON_CPU = 1 << 22
DROPOUT_SEED = 7


class Graph:
    """What a graph of cuDNN is to the tests."""

    def __init__(self, run):
        self.run = run

    def get_workspace_size(self):
        return 1

    def execute(self, pack, workspace, handle):
        self.run()


def create_forward_graph(cfg, tensors, handle):
    def run():
        with torch.no_grad():
            o, lse = computed(cfg, *(found(tensors, name) for name in NAMES), tensors)
        put(tensors, "o", o)
        if cfg.is_train:
            put(tensors, "stats", with_sinks(cfg, lse, tensors)[..., None])

    return Graph(run), {}


def create_backward_graph(cfg, tensors, handle, *_):
    def run():
        given = {name: x.detach().requires_grad_() for name in NAMES if (x := found(tensors, name)) is not None}
        o, _ = computed(cfg, *map(given.get, NAMES), tensors)
        grads = torch.autograd.grad(o, list(given.values()), found(tensors, "dO"))
        for name, grad in zip(given, grads):
            put(tensors, OF_GRADIENTS[name], grad)

    return Graph(run), {}


NAMES = "q", "k", "v", "bias", "sink_token"
OF_GRADIENTS = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}


def found(tensors, name):
    return tensors.get(fp16.TensorUid[name])


def put(tensors, name, x):
    """Writes a result; of packed sequences what is in them, since nothing else may be written."""
    side = "kv" if name in ("dK", "dV") else "q"
    total = int(lengths(tensors, side).sum()) if x.ndim == 3 else None
    found(tensors, name)[:total].copy_(x[:total])


def with_sinks(cfg, lse, tensors):
    if not cfg.with_sink_token:
        return lse
    inside = torch.arange(cfg.s_q, device=lse.device) < lengths(tensors, "q")[:, None] if cfg.is_padding else True
    if cfg.is_ragged:
        return lse.where(lse > -math.inf, found(tensors, "sink_token").reshape(1, -1))
    return lse.where(~(lse.isinf() & inside), found(tensors, "sink_token").reshape(1, -1, 1))


def computed(cfg, q, k, v, bias, sink, tensors):
    """o and lse, of (batch, heads, sequence, features), or of (total, heads, features) if ragged."""
    score = [] if bias is None else [na.Bias(bias)]
    score += [na.Score(tilted, arrays=[slopes(cfg.h_q).to(q.device)])] if cfg.is_alibi else []
    score += [] if sink is None else [na.Sink(sink.flatten())]
    options = {"scale": SCALE, "score": score, "deterministic": bool(cfg.is_determin), "return_lse": True}
    if cfg.is_dropout:
        options["dropout"] = na.Dropout(cfg.dropout_prob, seed=DROPOUT_SEED)
        dump(cfg, options["dropout"], len(q), len(k), tensors)
    if cfg.is_paged:
        return of_pages(cfg, q, tensors, score)
    if cfg.is_ragged:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(max(cfg.h_k, cfg.h_v) // x.shape[-3], -3) for x in (k, v))
    o, lse = attention(q, k, v, mask=mask_of(cfg, tensors), **options)
    return (o.transpose(0, 1), lse.transpose(0, 1)) if cfg.is_ragged else (o, lse)


def dump(cfg, dropout, total_q, total_k, tensors):
    """What dropout keeps, for the reference."""
    whole = found(tensors, "rng_dump")
    if not cfg.is_ragged:
        whole.copy_(torch.from_numpy(na.dropout_mask(dropout, tuple(whole.shape))))
        return
    kept = torch.from_numpy(na.dropout_mask(dropout, (cfg.h_q, total_q, total_k)))
    pieces = (pairwise(offsets(lengths(tensors, side)).tolist()) for side in ("q", "kv"))
    for one, (q0, q1), (k0, k1) in zip(whole, *pieces):
        one[:, : q1 - q0, : k1 - k0] = kept[:, q0:q1, k0:k1]


def of_pages(cfg, q, tensors, score):
    with on_device(q):
        k, v, table = (array_of(found(tensors, name)) for name in ("container_k", "container_v", "page_table_k"))
        cache = na.KVCache(k, v, array_of(lengths(tensors, "kv")[:, 0]), table.reshape(table.shape[0], -1))
        mask, score = arrays_in(band(cfg, tensors)), [arrays_in(x) for x in score]
        return tensor_of(na.attention(array_of(q), cache, mask=mask, scale=SCALE, score=score)), None


def mask_of(cfg, tensors):
    if cfg.is_ragged and cfg.diag_align.name == "TOP_LEFT":
        return from_the_left(cfg, *(offsets(lengths(tensors, side)) for side in ("q", "kv")), len(found(tensors, "q")))
    masks = [band(cfg, tensors)]
    if cfg.is_ragged:
        masks.append(na.Segments(*(offsets(lengths(tensors, side)) for side in ("q", "kv"))))
    elif cfg.is_padding:
        masks.append(na.Lengths(*(lengths(tensors, side) for side in ("kv", "q"))))
    if cfg.is_block_mask:
        bits = found(tensors, "block_mask")[..., None] >> torch.arange(8, device=found(tensors, "q").device) & 1
        blocks = bits.flatten(-2)[..., : math.ceil(cfg.s_kv / 128)].bool()
        masks.append(na.BlockSparse(blocks, (128, 128)))
    whole = None
    for mask in masks:
        whole = mask if whole is None else whole if mask is None else whole & mask
    return whole


def band(cfg, tensors):
    """The window around a diagonal from the upper left or the lower right."""
    if cfg.left_bound is None and cfg.right_bound is None:
        return None
    offset = 0
    if cfg.diag_align.name == "BOTTOM_RIGHT":
        offset = cfg.s_kv - cfg.s_q
        if cfg.is_ragged:
            offset = None  # of each sequence
        elif cfg.is_padding:
            offset = lengths(tensors, "kv") - lengths(tensors, "q")
    return na.Window(None if cfg.left_bound is None else cfg.left_bound - 1, cfg.right_bound, offset)


def from_the_left(cfg, queries, keys, total):
    """Packed sequences, with the window of each from its upper left."""
    i = torch.arange(total, device=queries.device)
    own = (torch.searchsorted(queries, i, right=True) - 1).clamp(max=len(queries) - 2)
    start, end, row = keys[own], keys[own + 1], keys[own] + i - queries[own]
    first = start if cfg.left_bound is None else start.maximum(row - cfg.left_bound + 1)
    last = end if cfg.right_bound is None else end.minimum(row + cfg.right_bound + 1)
    return na.Intervals(first.int(), last.where(i < queries[-1], first).int())


def lengths(tensors, side):
    return found(tensors, f"seq_len_{side}").reshape(-1, 1)


def offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32)[:, 0], (1, 0))


def tilted(s, batch, head, i, j, slopes):
    return s + slopes[head] * (j - i)


def slopes(heads):
    """Those of Alibi's paper."""
    n = 2 ** math.floor(math.log2(heads))
    found = [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor(found)


def validate_config(cfg):
    cfg.with_score_max = cfg.with_score_sum_exp = False
    if not HAS_GPU and cfg.batches * cfg.h_q * cfg.s_q * cfg.s_kv > MOST_ON_CPU:
        pytest.skip("too large for a CPU")


class Newest:
    """A version."""

    def __init__(self, text):
        pass

    def __lt__(self, other):
        return False


module("cudnn", diagonal_alignment=Enum("diagonal_alignment", ["TOP_LEFT", "BOTTOM_RIGHT"]),
       attention_implementation=Enum("attention_implementation", ["AUTO", "COMPOSITE", "UNIFIED"]),
       data_type=MagicMock(), cudnnGraphNotSupportedError=RuntimeError,
       backend_version=lambda: 1 << 20, backend_version_string=str)  # fmt: skip
module("looseversion", LooseVersion=Newest)
sys.path.insert(0, str(Path(os.environ["NUMBATTN_CHECKOUTS"], "cudnn-frontend", "test", "python")))
from sdpa import blocked, fp16  # noqa: E402

fp16.create_forward_graph, fp16.create_backward_graph = create_forward_graph, create_backward_graph
fp16.validate_config = validate_config
blocked.fetch_blocked_tests = lambda *_: []  # by versions of cuDNN


def pytest_addoption(parser):
    for name, value in {"dryrun": 0, "diffs": 10, "implementation": None, "perf": False, "repro": None}.items():
        parser.addoption(f"--{name}", default=value)


@pytest.fixture
def cudnn_handle():
    return None


def pytest_collection_modifyitems(config, items):
    left_out = {x for x in items if "fp8" in x.name or x.name == "test_repro"}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [x for x in items if x not in left_out]

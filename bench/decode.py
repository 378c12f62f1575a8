"""Few queries against many keys on a GPU, as in decoding: numbattn against torch's cuDNN and FlashAttention-2.

    python bench/decode.py
    python bench/decode.py --cells 1x8192x128 64x4096x128x4 --json decode.json
    python bench/decode.py --cells 16x8192x128x64 1x34816x128x2048 --peers causal "causal cache" tree

A cell is batch x keys x head_dim, and x queries if there are several; 32 query heads over 8 key heads, or as many as
--heads-k says. TB/s of K and V, each read once. lengths: numbattn with the lengths of the sequences in an array on the
GPU; ragged: with lengths from a tenth of the keys to all of them, TB/s of what is visible; pages of 16 to 256, int8 and
float8: a KVCache (TB/s as if it had q's dtype); causal: queries at the end, as when there are many; causal cache and
tree: the same with a KVCache, and with the mask of a binary tree of the last tokens; rolling: with one that stores as
many keys, the last ones of half as many more. Each call is a CUDA graph, for
small problems of several calls with different inputs: no input is in the L2 cache. Medians of interleaved rounds.
Needs tabulate and tqdm.
"""

import argparse
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np
from common import machine, save, show, show_machine
from peers import (
    DTYPE,
    PACKAGES,
    Replay,
    available,
    context_of,
    cupy,
    event_seconds,
    gpu,
    native,
    one_stream,
    release,
    require_gpu,
    torch,
)
from tqdm import tqdm

import numbattn as na

HEADS = 32
NAMES = ["numbattn", "lengths", "ragged", "cudnn", "flash"]
CACHES = {f"pages of {size}": {"page_size": size} for size in (16, 64, 256)} | {
    "int8": {"dtype": np.int8}, "float8": {"dtype": ml_dtypes.float8_e4m3fn},
}  # fmt: skip
CELLS = ["1x8192x128", "1x131072x128", "16x8192x128", "64x4096x128", "64x4096x128x4", "16x8192x64"]
OF_LAST = ["causal", "causal cache", "tree", "rolling"]
L2_BYTES = 100e6  # more than an L2 cache holds


class Cell(NamedTuple):
    batch: int
    keys: int
    head_dim: int
    queries: int = 1

    def nbytes(self, heads_k, dtype):
        return 2 * self.batch * heads_k * self.keys * self.head_dim * DTYPE[dtype].itemsize


def arrays_of(cell, heads_k, dtype, seed):
    """q, k and v. Random numbers are drawn for one sequence and shifted for the others."""
    rng = cupy.random.default_rng(seed)
    for heads, n in ((HEADS, cell.queries), (heads_k, cell.keys), (heads_k, cell.keys)):
        x = cupy.empty((cell.batch, heads, n, cell.head_dim), DTYPE[dtype])
        one = rng.standard_normal(x[0].size, dtype=np.float32).astype(x.dtype)
        for number in range(len(x)):
            x[number] = cupy.roll(one, number).reshape(x[0].shape)
        yield x


def calls_of(name, cell, sets):
    """A function that computes o by a peer, for each set of arrays."""
    if name in ("cudnn", "flash"):
        attention = torch.nn.functional.scaled_dot_product_attention
        return [partial(attention, *native(name, arrays), enable_gqa=True) for arrays in sets]
    mask, has_cache = None, name in CACHES
    if name in OF_LAST:
        parents = (np.arange(cell.queries) + 1) // 2 - 1
        mask = na.Tail(na.Bits.tree(cupy.asarray(parents))) if name == "tree" else na.Causal()
        has_cache = name != "causal"
    if has_cache:
        calls = []
        for q, k, v in sets:
            options = CACHES.get(name, {})
            make, rows = na.KVCache.zeros, cell.keys
            if name == "rolling":
                make, rows = partial(na.KVCache.rolling, chunk=cell.queries), cell.keys - cell.queries + 1
            cache = make(cell.batch, k.shape[1], rows, cell.head_dim, like=q, **options)
            if cache.table is not None:
                cache.table[...] = cupy.random.permutation(cache.table.size).reshape(cache.table.shape)
            cache.append(k, v)
            if name == "rolling":
                cache.append(k[:, :, : cell.keys // 2], v[:, :, : cell.keys // 2])
            calls.append(partial(na.attention, q, cache, mask=mask, out=cupy.empty_like(q)))
        return calls
    if name == "lengths":
        mask = na.Lengths(cupy.full((cell.batch, 1), cell.keys, np.int32))
    elif name == "ragged":
        mask = na.Lengths(cupy.asarray(ragged(cell)[:, None], np.int32))
    return [partial(na.attention, *arrays, mask=mask, out=cupy.empty_like(arrays[0])) for arrays in sets]


def ragged(cell):
    return np.linspace(cell.keys / 10, cell.keys, cell.batch).astype(int)


def all_of(calls):
    return [call() for call in calls]


def measure(cell, names, heads_k, dtype, rounds):
    """Medians of seconds by peer, and why others have failed."""
    release()
    sets = [[*arrays_of(cell, heads_k, dtype, seed)]
            for seed in range(max(1, int(L2_BYTES // cell.nbytes(heads_k, dtype) + 1)))]  # fmt: skip
    ready, failed, kept = {}, {}, []  # a graph does not keep the arrays that it reads
    for name in names:
        try:
            calls = calls_of(name, cell, sets)
            kept += calls
            with context_of(name):
                ready[name] = Replay(partial(all_of, calls))
        except Exception as error:  # a peer may refuse a problem
            failed[name] = f"{type(error).__name__}: {error}"
    counts = {name: max(1, round(0.005 / event_seconds(run, 3))) for name, run in ready.items()}
    samples = {name: [] for name in ready}
    for _ in range(rounds):
        for name, run in ready.items():
            samples[name].append(event_seconds(run, counts[name]) / len(sets))
    return {name: float(np.median(found)) for name, found in samples.items()}, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="BxNxD[xM]")
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--peers", nargs="+", default=NAMES, choices=[*NAMES, *CACHES, *OF_LAST])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    require_gpu()
    names = [name for name in options.peers if name not in ("cudnn", "flash") or available(options.dtype, [name])]
    cells = [Cell(*map(int, text.split("x"))) for text in options.cells]
    records = []
    for cell in tqdm(cells, disable=None):
        with one_stream():
            seconds, failed = measure(cell, names, options.heads_k, options.dtype, options.rounds)
        whole = cell.nbytes(options.heads_k, options.dtype)
        visible = {"ragged": whole * ragged(cell).sum() / (cell.batch * cell.keys)}
        rates = {name: visible.get(name, whole) / s / 1e12 for name, s in seconds.items()}
        records.append({**cell._asdict(), "seconds": seconds, "failed": failed, "TB/s": rates})
    described = machine(*PACKAGES) | {"gpu": gpu()}
    show_machine(described)
    rows = [{"batch": r["batch"], "keys": r["keys"], "head_dim": r["head_dim"], "queries": r["queries"],
             **{f"{name}, us": s * 1e6 for name, s in r["seconds"].items()},
             **{f"{name}, TB/s": x for name, x in r["TB/s"].items()}} for r in records]  # fmt: skip
    show(f"{HEADS} heads on {options.heads_k}, {options.dtype}", rows, floatfmt=".4g")
    if options.json:
        save(options.json, {"machine": described, "options": vars(options), "records": records})


if __name__ == "__main__":
    main()

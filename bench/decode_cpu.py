"""One query against many keys on the CPU: numbattn against NumPy's formula on the same arrays.

    python bench/decode_cpu.py
    python bench/decode_cpu.py --heads 8x8 --head-dims 64 --kinds float16 float64 --keys 1024 65536 --json decode.json

In the formula the heads of a group are rows of one product, NumPy's best; it widens other dtypes first. “cache” is a
KVCache; the formula gets its numbers as they are stored. Microseconds, the best of a few calls in a row in each of
many interleaved rounds, between which BLAS's threads fall asleep; GB/s of K and V, each read once. Needs tabulate and
tqdm.
"""

import argparse
import itertools
import math
from time import perf_counter

import ml_dtypes
import numpy as np
from common import PAUSE, machine, sampled, save, show, show_machine
from tqdm import tqdm

import numbattn as na

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
IN_A_ROW = 5
CACHES = {"float16 cache": np.float16, "int8 cache": np.int8}
KINDS = ["float32", "bfloat16", "float16", *CACHES]


def formula(q, k, v, k_scale=None, v_scale=None):
    """softmax(scale Q K^T) V, in float32 or float64."""
    work = np.float64 if q.dtype == np.float64 else np.float32
    batch, heads, seqlen_q, head_dim = q.shape
    k, v = k.astype(work, copy=False), v.astype(work, copy=False)
    if k_scale is not None:
        k, v = k * k_scale[..., None], v * v_scale[..., None]
    rows = q.astype(work, copy=False).reshape(batch, k.shape[1], -1, head_dim)  # a group's queries
    S = rows @ k.mT / math.sqrt(head_dim)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)
    return (P @ v).reshape(batch, heads, seqlen_q, -1).astype(q.dtype, copy=False)


def peers_of(kind, heads, heads_k, head_dim, keys):
    """Functions that call NumPy and numbattn, and the bytes of K and V."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, heads, 1, head_dim), np.float32)
    k, v = rng.standard_normal((2, 1, heads_k, keys, head_dim), np.float32)
    if kind in CACHES:
        q = q.astype(np.float16)
        cache = na.KVCache.zeros(1, heads_k, keys, head_dim, like=q, dtype=CACHES[kind])
        cache.append(k.astype(np.float16), v.astype(np.float16))
        ours, k, v, scales = (q, cache), cache.k, cache.v, (cache.k_scale, cache.v_scale)
    else:
        q, k, v = (x.astype(DTYPES[kind]) for x in (q, k, v))
        ours, scales = (q, k, v), ()
    calls = {"NumPy": lambda: formula(q, k, v, *scales), "numbattn": lambda: na.attention(*ours)}
    want, got = (call().astype(np.float64) for call in calls.values())
    np.testing.assert_allclose(got, want, atol=4 * float(ml_dtypes.finfo(q.dtype).eps))
    return calls, k.nbytes + v.nbytes


def timer(call):
    def seconds():
        starts = []
        for _ in range(IN_A_ROW):
            starts.append(perf_counter())
            _ = call()
        return min(np.diff([*starts, perf_counter()]))

    return seconds


def record_of(kind, heads, head_dim, keys, rounds):
    calls, nbytes = peers_of(kind, *heads, head_dim, keys)
    samples = sampled({name: timer(call) for name, call in calls.items()}, rounds, PAUSE)
    best = {name: 1e6 * min(seconds) for name, seconds in samples.items()}
    return {
        "heads": "{} on {}".format(*heads), "head_dim": head_dim, "kind": kind, "keys": keys, **best,
        "NumPy / numbattn": best["NumPy"] / best["numbattn"], "GB/s": 1e-3 * nbytes / best["numbattn"],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["32x8"], metavar="QxK", help="of queries and of keys")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--kinds", nargs="+", choices=[*DTYPES, *CACHES], default=KINDS)
    parser.add_argument("--keys", nargs="+", type=int, default=[128, 512, 2048, 16384])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    heads = [tuple(map(int, text.split("x"))) for text in options.heads]
    cases = list(itertools.product(options.kinds, heads, options.head_dims, options.keys))
    records = [record_of(*case, options.rounds) for case in tqdm(cases, disable=None)]
    described = machine("numbattn", "numpy", "numba")
    show_machine(described)
    show("Microseconds of one query", records, ["", "", "", "", ".0f", ".0f", ".2f", ".1f"])
    if options.json:
        save(options.json, {"machine": described, "options": vars(options), "records": records})


if __name__ == "__main__":
    main()

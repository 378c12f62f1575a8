"""One query against many keys on the CPU: numbattn beside NumPy's formula on the same arrays.

    python bench/decode_cpu.py
    python bench/decode_cpu.py --dtype float16 --keys 1024,16384 --rounds 50

In the formula the heads of a group are rows of one product, as good as NumPy can; half precision is widened first.
Needs tabulate.
"""

import argparse
import math
from time import perf_counter

import ml_dtypes
import numpy as np
from common import machine, sampled, show, show_machine

import numbattn as na

KEYS = [128, 512, 2048, 8192, 16384, 65536]
CASES = [(8, 8, 64), (8, 8, 128), (32, 8, 128)]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def formula(q, k, v):
    """softmax(scale Q K^T) V, in float32 or float64."""
    work = np.float64 if q.dtype == np.float64 else np.float32
    batch, heads, seqlen_q, head_dim = q.shape
    rows = q.astype(work, copy=False).reshape(batch, k.shape[1], -1, head_dim)  # a group's queries
    S = rows @ k.astype(work, copy=False).mT / math.sqrt(head_dim)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)
    return (P @ v.astype(work, copy=False)).reshape(batch, heads, seqlen_q, -1).astype(q.dtype, copy=False)


def timer(attention, *arrays):
    def seconds():
        start = perf_counter()
        _ = attention(*arrays)
        return perf_counter() - start

    return seconds


def row_of(case, keys, dtype, rounds):
    """Microseconds, the best of all rounds."""
    heads, heads_k, head_dim = case
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, heads, 1, head_dim), np.float32).astype(dtype)
    k, v = rng.standard_normal((2, 1, heads_k, keys, head_dim), np.float32).astype(dtype)
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(na.attention(q, k, v).astype(float), formula(q, k, v).astype(float), atol=tolerance)
    samples = sampled({"NumPy": timer(formula, q, k, v), "numbattn": timer(na.attention, q, k, v)}, rounds)
    best = {name: 1e6 * min(seconds) for name, seconds in samples.items()}
    return {
        "heads": f"{heads} on {heads_k}", "head_dim": head_dim, "keys": keys, **best,
        "NumPy / numbattn": best["NumPy"] / best["numbattn"], "GB/s": 2e-3 * k.nbytes / best["numbattn"],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--keys", type=lambda text: [int(n) for n in text.split(",")], default=KEYS)
    parser.add_argument("--rounds", type=int, default=30, help="the best of so many (default: 30)")
    args = parser.parse_args()
    show_machine(machine("numbattn", "numpy", "numba"))
    rows = [row_of(case, keys, DTYPES[args.dtype], args.rounds) for case in CASES for keys in args.keys]
    show(f"Microseconds of one query, {args.dtype}", rows, ["", "", "", ".0f", ".0f", ".2f", ".1f"])


if __name__ == "__main__":
    main()

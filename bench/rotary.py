"""Rotary embeddings next to a copy, and statistics of P next to lse alone, on a GPU.

    python bench/rotary.py
    python bench/rotary.py --quick --json rotary.json

"copy" moves the same bytes once; "append" writes keys into a cache, "append turned" turns them, too. Of statistics
"lse" is the forward pass without values, "o" that with values of as many features; "rows" are maxima and entropies,
"columns" sums of P by key with lse given, "all" both. Each call is a CUDA graph. Results are compared with the formula
in tests. Needs tabulate and tqdm.
"""

import argparse
from functools import partial
from itertools import product

import numpy as np
from common import machine, save, show, show_machine
from peers import DTYPE, PACKAGES, Replay, cupy, gpu, one_stream, release, require_gpu
from timing import measure, medians, progress

import numbattn as na

SHAPES = [(1, 32, 8192, 128), (1, 8, 8192, 128), (8, 32, 2048, 64), (64, 32, 1, 128)]
CALLS = [(1, 16, 4096, 64), (1, 16, 4096, 128)]
QUICK = [(1, 8, 1024, 64)]


def drawn(shape, dtype):
    return cupy.random.standard_normal(shape, np.float32).astype(DTYPE[dtype])


def rotary(shape, dtype):
    """Makers of runs."""
    batch, heads, seqlen, features = shape
    x = drawn((batch, seqlen, heads, features), dtype).swapaxes(1, 2)
    out, positions = cupy.empty_like(x), cupy.arange(seqlen)
    turns = {"halves": na.Rotary(), "interleaved": na.Rotary(interleaved=True)}
    cache = na.KVCache.zeros(batch, heads, seqlen, features, like=x)

    def copy():
        out.data.copy_from_device_async(x.data, x.nbytes)
        return (out,)

    def appended(rotary):
        cache.lengths.fill(0)
        cache.append(x, x, rotary=rotary)
        return (cache.k,)

    return {
        "copy": lambda: copy,
        **{name: lambda turn=turn: lambda: (na.rotary(x, positions, turn, out=out),) for name, turn in turns.items()},
        "append": lambda: lambda: appended(None),
        "append turned": lambda: lambda: appended(turns["halves"]),
    }


def statistics(shape, dtype, causal):
    """Makers of runs."""
    q, k = drawn(shape, dtype), drawn(shape, dtype)
    _, saved = na.attention_forward(q, k, k[..., :0], causal=causal)

    def run(**wanted):
        return lambda: lambda: tuple(x for x in na.attention_statistics(q, k, causal=causal, **wanted) if x is not None)

    return {
        "lse": lambda: lambda: (na.attention_forward(q, k, k[..., :0], causal=causal)[1].lse,),
        "o": lambda: lambda: (na.attention(q, k, k, causal=causal),),
        "rows": run(row_max=True, entropy=True),
        "columns": run(column_sums=True, saved=saved),
        "all": run(row_max=True, entropy=True, column_sums=True),
    }


def measured(cases, rounds):
    for about, makers in progress(cases):
        release()
        replays = {name: lambda make=make: Replay(make()) for name, make in makers().items()}
        samples, _, failed = measure(replays, rounds, same=False)
        yield {**about, "seconds": medians(samples), "failed": failed}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPE), default=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="small arrays, 3 rounds")
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (3 if args.quick else 5)
    return args


def main():
    args = parse()
    require_gpu()
    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    shapes, calls = (QUICK, QUICK) if args.quick else (SHAPES, CALLS)
    cases = {
        "rotary": [({"shape": shape, "dtype": dtype}, partial(rotary, shape, dtype))
                   for dtype, shape in product(args.dtype, shapes)],
        "statistics": [({"shape": shape, "dtype": dtype, "causal": causal}, partial(statistics, shape, dtype, causal))
                       for dtype, shape, causal in product(args.dtype, calls, (False, True))],
    }  # fmt: skip
    with one_stream():
        for name, some in cases.items():
            results[name] = [*measured(some, args.rounds)]
            rows = [{**{key: x for key, x in record.items() if key not in ("seconds", "failed")},
                     **{of: 1e6 * x for of, x in record["seconds"].items()}} for record in results[name]]  # fmt: skip
            show(f"{name}, microseconds", rows, ".4g")
            for record in results[name]:
                for of, why in record["failed"].items():
                    print(f"{of} {record['shape']} {record['dtype']}: {why}")
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

"""Many small attentions on a GPU: numbattn, the formula in CuPy and torch's kernels against a copy of the same bytes.

    python bench/small.py
    python bench/small.py --quick
    python bench/small.py --parts cells --dtype float32 --size 32x32 64x32 --json small.json

A size is seqlen x head_dim, for 8 heads. A call has to move q, k, v and o, or q, k, v, do and three gradients. A copy
on the GPU that reads and writes as many bytes is the limit.

cells: batches such that each array takes 128 MiB, with and without a bias (1, 8, seqlen, seqlen) that the batch shares,
and its gradient. variants: masks, scores, dropout and fewer heads of keys, over a plain call. batches: of 1, 8 and
1000, called one after the other (with the host's time, if that is longer) and as a graph of such calls (without it;
inputs are in the L2 cache, if they fit).

Passes are timed alone, by CUDA events around several calls. Results are compared with float64 before anything is timed:
a peer that is wrong is not timed, and if it is numbattn the command fails. Kernels are compiled first, on all cores.
Needs tabulate and tqdm; compares with torch and FlashAttention-4 if they are installed.
"""

import argparse
import faulthandler
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from common import machine, sampled, save, show, show_machine
from peers import (
    DTYPE,
    FA4,
    PACKAGES,
    Replay,
    available,
    context_of,
    cupy,
    event_seconds,
    gpu,
    make_forward,
    one_stream,
    release,
    require_gpu,
)
from timing import difference, medians, one_pass, progress, sample, settle, why

import numbattn as na
from numbattn import reference
from numbattn.base.compiling import keep_quiet
from numbattn.base.values import moved
from numbattn.cuda.build import build
from numbattn.cuda.launch import current_gpu
from numbattn.cuda.passes import plans
from numbattn.cuda.views import without_memory

HEADS, HEADS_K = 8, 2  # the latter for grouped queries
NBYTES = 128 << 20  # per array: more than an L2 cache holds
SIZES = [*product((16, 20, 32, 64, 128), (16, 32, 64)), *product((256,), (32, 64, 128))]
SIZES_OF_PART = {"cells": SIZES, "variants": [(64, 32), (32, 32)], "batches": [(64, 32), (32, 32)]}
QUICK = {"cells": [(32, 32), (64, 32), (128, 64)], "variants": [(64, 32)], "batches": [(64, 32)]}
BATCHES = 1, 8, 1000
TORCH = {"float32": ["efficient", "math"], "float64": ["math"], "bfloat16": ["flash", "cudnn", "efficient"]}
COPY = "copy"
ARRAYS = {"forward": 4, "backward": 7}  # number that a pass reads and writes
RUNS = {"none": ["forward", "backward"], "shared": ["forward", "backward"], "with gradient": ["backward"]}  # by bias
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}  # of the largest element of an array
SAMPLE_SECONDS, SETTLE_SECONDS = 0.005, 0.05  # less than in timing.py: there are many similar cells
LONG_SECONDS = 0.2
CALLS = 20  # in a graph
CHECKED = 3  # problems of a variant that are compared
MOST_SCORES = 1 << 26  # so many at a time in float64


class Case(NamedTuple):
    dtype: str
    batch: int
    seqlen: int
    head_dim: int

    @property
    def shape(self):
        return self.batch, HEADS, self.seqlen, self.head_dim

    @property
    def packed_shape(self):
        return 1, HEADS, self.batch * self.seqlen, self.head_dim

    def bias(self, xp):
        drawn = np.random.default_rng(1).standard_normal((1, HEADS, self.seqlen, self.seqlen), np.float32)
        return xp.asarray(drawn.astype(DTYPE[self.dtype]))


def inputs(shape, dtype, heads_k=HEADS):
    """q, k, v, do."""
    batch, _, *rest = shape
    rng, shape_k = cupy.random.default_rng(0), (batch, heads_k, *rest)
    shapes = shape, shape_k, shape_k, shape
    return [rng.standard_normal(each, np.float32).astype(DTYPE[dtype]) for each in shapes]


def full_case(dtype, seqlen, head_dim):
    return Case(dtype, NBYTES // (HEADS * seqlen * head_dim * DTYPE[dtype].itemsize), seqlen, head_dim)


def cases_of(part, args):
    """What a part runs: all dtypes, except variants, in float32 only; fewer cases in a quick run."""
    sizes = args.size or (QUICK if args.quick else SIZES_OF_PART)[part]
    all_dtypes = part == "cells" or (part == "batches" and not args.quick)
    for dtype, (seqlen, head_dim) in product(args.dtype or (list(TORCH) if all_dtypes else ["float32"]), sizes):
        if part == "batches":
            yield from (Case(dtype, batch, seqlen, head_dim) for batch in BATCHES)
        else:
            yield full_case(dtype, seqlen, head_dim)


# -------------------------------------------------------------------------------------------------------------- checks
def exact(arrays, bias):
    """o, dq, dk, dv and the gradient of a shared bias in float64; scores for a part of the batch at a time."""
    batch, heads, seqlen, _ = arrays[0].shape
    count = max(1, MOST_SCORES // (heads * seqlen**2))
    options, parts = {"score": None if bias is None else na.Bias(bias.astype(np.float64))}, []
    for start in range(0, batch, count):
        q, k, v, do = (x[start : start + count].astype(np.float64) for x in arrays)
        o, _ = reference.attention_forward(q, k, v, **options)
        grads = reference.attention_backward(do, q, k, v, **options)
        parts.append((o, *grads, *grads.score))
    o, dq, dk, dv, *dbias = zip(*parts)
    return *map(np.concatenate, (o, dq, dk, dv)), *(sum(found) for found in dbias)


def error_of(result, expected):
    """The largest error of all arrays, relative to each array's largest element; NaN stays."""
    return rounded(np.max([difference(*pair) for pair in zip(result, expected, strict=True)]))


# -------------------------------------------------------------------------------------------------------------- timing
def timed(makers, check, tolerance, rounds, graph=False, long=LONG_SECONDS):
    """Medians of seconds by name, errors, and why others are not timed: they do not run, or are wrong.

    makers[name]() prepares a run; check(name, result) is its error, None if there is nothing to compare. A run that
    takes so long is timed once.
    """
    timers, errors, failed = {}, {}, {}
    for name, make in makers.items():
        try:
            with context_of(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend does not run
                run = make()
                error = check(name, run())  # warms up, too
                if error is not None:
                    errors[name] = error
                    if not error <= tolerance:  # NaN, too
                        raise ArithmeticError(f"wrong by {error:.1e} of the largest element")
                if graph:
                    run = Replay(partial(in_turn, run))
                once = event_seconds(run)
                repetitions = max(3, math.ceil(SAMPLE_SECONDS / once))
            timers[name] = partial(sample, name, run, repetitions) if once < long else partial(float, once)
        except Exception as error:  # not running is a result, too
            failed[name] = why(error)
            if not graph:  # a graph writes to memory that torch has cached
                release()
        run = None
    settle(timers, SETTLE_SECONDS)
    seconds = medians(sampled(timers, rounds))
    return {name: rounded(s / (CALLS if graph else 1)) for name, s in seconds.items()}, errors, failed


def rounded(x):
    """Numbers rounded to four digits."""
    return float(f"{x:.4g}")


def in_turn(run):
    """Make several calls, each giving its memory back, as in a program that goes on; returns the last results."""
    for _ in range(CALLS):
        result = run()
    return result


def peers_of(case, wanted):
    """The peers that are here and take the dtype."""
    here = [*TORCH[case.dtype], "cupy"] if available("float32", ["efficient"]) else ["cupy"]
    return [name for name in ("numbattn", *here, *available(case.dtype, [FA4]))
            if name in wanted and not (name == "cupy" and case.dtype == "bfloat16")]  # fmt: skip


def copier(nbytes):
    """A function that copies, and reads and writes so many bytes in all."""
    source, target = cupy.zeros(nbytes // 2, np.uint8), cupy.empty(nbytes // 2, np.uint8)

    def run():
        cupy.copyto(target, source)
        return ()

    return run


# --------------------------------------------------------------------------------------------------------------- cells
def cells(cases, peers, rounds, graphs=(False,)):
    """One record for each case, bias and pass: seconds and errors by peer."""
    records = []
    for case in progress(cases):
        release()
        arrays, bias = inputs(case.shape, case.dtype), case.bias(cupy)
        expected = {True: exact(arrays, bias), False: exact(arrays, None)}
        for (kind, passes), graph in product(RUNS.items(), graphs):
            for of in passes:
                right = expected[kind != "none"]
                right = right[:1] if of == "forward" else right[1 : 5 if kind == "with gradient" else 4]
                makers = {name: partial(prepare, name, of, arrays, kind, bias) for name in peers_of(case, peers)}
                nbytes = ARRAYS[of] * arrays[0].nbytes
                makers[COPY] = partial(copier, nbytes)
                found = timed(makers, partial(check_peer, right), TOLERANCE[case.dtype], rounds, graph)
                records.append({**case._asdict(), "heads": HEADS, "bias": kind, "pass": of, "graph": graph,
                                "bytes": nbytes, **dict(zip(("seconds", "errors", "failed"), found))})  # fmt: skip
    return records


def prepare(name, of, arrays, kind, bias):
    """One pass of a peer as a run."""
    options = {} if kind == "none" else {"bias": bias, "bias_gradient": kind == "with gradient"}
    return one_pass(make_forward(name, arrays, **options), of)


def check_peer(expected, name, result):
    return None if name == COPY else error_of(result, expected)


def show_cells(records):
    graphs = len({record["graph"] for record in records}) > 1
    for dtype in dict.fromkeys(record["dtype"] for record in records):
        chosen = [record for record in records if record["dtype"] == dtype]
        names = list(dict.fromkeys(name for record in chosen for name in record["seconds"]))
        rows = [{**{key: record[key] for key in ("batch", "seqlen", "head_dim", "bias", "pass")},
                 **({"graph": "yes" if record["graph"] else ""} if graphs else {}),
                 **{name: scaled(record["seconds"].get(name)) for name in names},
                 "/ copy": over(record["seconds"], COPY),
                 "/ best": over(record["seconds"], *(set(names) - {"numbattn", COPY}))}
                for record in chosen]  # fmt: skip
        show(f"{dtype}, {HEADS} heads: microseconds", rows, [""] * (5 + graphs) + [".1f"] * len(names) + [".2f"] * 2)
    show_failed(records)


def scaled(seconds):
    return None if seconds is None else 1e6 * seconds


def over(seconds, *others):
    """numbattn's time over the shortest of these peers'."""
    least = min((seconds[name] for name in others if name in seconds), default=None)
    return seconds["numbattn"] / least if least and "numbattn" in seconds else None


def show_failed(records, about="{dtype}, {batch} x {seqlen} x {head_dim}, {pass}"):
    """Print each reason once, with its first occurrence. about: how a record is called."""
    met = {}
    for record in records:
        for name, reason in record["failed"].items():
            met.setdefault((name, reason), []).append(record)
    for (name, reason), found in met.items():
        print(f"{name} was not timed in {len(found)} cells, first {about.format(**found[0])}: {reason}")


# ------------------------------------------------------------------------------------------------------------ variants
class Variant(NamedTuple):
    """The options of a call, for a whole batch or for its first problems."""

    options: Callable  # for a number of problems
    heads_k: int = HEADS
    tokens: Callable | None = None  # in a number of problems, if they are packed: (1, heads, tokens, head_dim)

    def arrays(self, case):
        return inputs(case.packed_shape if self.tokens else case.shape, case.dtype, self.heads_k)

    def first(self, x, count=CHECKED):
        return x[:, :, : self.tokens(count)] if self.tokens else x[:count]


def variants_of(case, xp):
    """Variants by name. Lengths and segments are between half a seqlen and all of it, Bits show half of the keys."""
    batch, seqlen = case.batch, case.seqlen
    rng = np.random.default_rng(2)
    lengths = xp.asarray(rng.integers(-(-seqlen // 2), seqlen, (batch, 1), np.int32, endpoint=True))
    words = rng.integers(0, 1 << 32, (batch, 1, seqlen, -(-seqlen // 32)), np.uint32)
    bits = xp.asarray(words | np.uint32(1))  # the first key, so that every row sees something
    ends = np.cumsum(rng.integers(-(-seqlen // 2), seqlen, 2 * batch, endpoint=True))
    whole = ends[ends < batch * seqlen]
    offsets = np.array([0, *whole, batch * seqlen], np.int32)
    on_device = xp.asarray(offsets)
    table = xp.asarray(rng.standard_normal((HEADS, 2 * seqlen - 1), np.float32).astype(DTYPE[case.dtype]))
    same = {
        "plain": {}, "Softcap": {"score": na.Softcap(5.0)}, "Dropout": {"dropout": na.Dropout(0.1, seed=0)},
        "Bias": {"score": na.Bias(case.bias(xp))}, "RelativeBias": {"score": na.RelativeBias(table)},
    }  # fmt: skip
    return {
        **{name: Variant(lambda count, options=options: options) for name, options in same.items()},
        "Lengths": Variant(lambda count: {"mask": na.Lengths(lengths[:count], lengths[:count])}),
        "Bits": Variant(lambda count: {"mask": na.Bits(bits[:count])}),
        "Segments": Variant(lambda count: {"mask": na.Segments(on_device[: count + 1])},
                            tokens=lambda count: int(offsets[count])),
        "fewer heads of keys": Variant(lambda count: {}, heads_k=HEADS_K),
    }  # fmt: skip


def variants(cases, rounds):
    """One record for each case and pass: seconds and errors by variant. Gradients include those of scores."""
    records = []
    for case in progress(cases):
        release()
        found, on_host = (variants_of(case, xp) for xp in (cupy, np))
        arrays = {name: variant.arrays(case) for name, variant in found.items()}
        for of in ARRAYS:
            makers = {
                name: partial(prepare_variant, of, arrays[name], variant.options(2 * case.batch))
                for name, variant in found.items()
            }
            check = partial(check_variant, on_host, arrays, of)
            seconds, errors, failed = timed(makers, check, TOLERANCE[case.dtype], rounds)
            records.append({**case._asdict(), "heads": HEADS, "pass": of, "seconds": seconds, "errors": errors,
                            "failed": failed})  # fmt: skip
    return records


def prepare_variant(of, arrays, options):
    q, k, v, do = arrays

    def forward():
        o, saved = na.attention_forward(q, k, v, **options)
        return o, partial(na.attention_backward, do, saved)

    return one_pass(forward, of)


def check_variant(variants, arrays, of, name, result):
    """The error of the first problems, whose results depend on no others. The variants hold NumPy arrays."""
    variant = variants[name]
    q, k, v, do = (moved(variant.first(x), np.empty(0)) for x in arrays[name])
    options = variant.options(CHECKED)
    if of == "forward":
        expected = reference.attention_forward(q, k, v, **options)[:1]
    else:
        expected = reference.attention_backward(do, q, k, v, **options)
    return error_of([*map(variant.first, result[: len(expected)])], [moved(x, result[0]) for x in expected])


def show_variants(records):
    rows = []
    for record in records:
        plain = record["seconds"].get("plain", math.nan)
        rows.append({**{key: record[key] for key in ("dtype", "batch", "seqlen", "head_dim", "pass")},
                     "plain, us": scaled(plain),
                     **{name: s / plain for name, s in record["seconds"].items() if name != "plain"}})  # fmt: skip
    show("Time over that of a plain call", rows, [""] * 5 + [".1f"] + [".2f"] * max(map(len, rows)))
    show_failed(records)


# ------------------------------------------------------------------------------------------------------------ compiled
def kernels(device, parts):
    """The keys of numbattn's kernels for all calls of the parts; arrays take no memory."""
    calls = []
    for part, cases in parts.items():
        for case in cases:
            if part == "variants":
                calls += [(case.dtype, *shapes_of(case, variant), variant.options(2 * case.batch))
                          for variant in variants_of(case, np).values()]  # fmt: skip
            else:
                bias = case.bias(np)
                scores = None, na.Bias(bias, gradient=False), na.Bias(bias)
                calls += [(case.dtype, *[case.shape] * 2, {"score": score}) for score in scores]
    found = {}
    for dtype, q, k, options in calls:
        planned = plans(device, *(without_memory(shape, DTYPE[dtype]) for shape in (q, k, k)), **options)
        found |= {step.key: None for passed in planned for step in passed.steps}
    return [*found]


def shapes_of(case, variant):
    """Shapes of q and of k."""
    if variant.tokens:
        return case.packed_shape, case.packed_shape
    return case.shape, (case.batch, variant.heads_k, case.seqlen, case.head_dim)


def compile_all(keys):
    """Compile into the cache on disk, by a process for each core."""
    if not keys:
        return
    with ProcessPoolExecutor(min(os.cpu_count(), len(keys)), get_context("spawn"), keep_quiet) as workers:
        for _ in workers.map(build, keys):
            pass


def in_processes(most, function, tasks):
    """function(*task) for all tasks, shared out to several processes. One that dies, as some have in a compiler, says
    where, and its task and signal are told here; the others go on."""
    count, context = min(most, os.cpu_count(), len(tasks)), get_context("spawn")
    shares = [(tasks[first::count], context.RawValue("i")) for first in range(count)]
    processes = [context.Process(target=call_each, args=(function, *share), daemon=True) for share in shares]
    for process in processes:
        process.start()
    for process, (share, at) in zip(processes, shares):
        process.join()
        if process.exitcode:
            print(f"{function.__name__}{share[at.value]}: the process ended with {process.exitcode}", flush=True)


def call_each(function, tasks, at):
    """A share of `in_processes`; at: the number of the current task, in memory that both processes see."""
    faulthandler.enable()
    for at.value, task in enumerate(tasks):
        function(*task)


# -------------------------------------------------------------------------------------------------------- command line
def size(text):
    seqlen, head_dim = map(int, text.split("x"))
    return seqlen, head_dim


def parse(arguments=None):
    names = ["numbattn", *dict.fromkeys(name for found in TORCH.values() for name in found), FA4, "cupy"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(SIZES_OF_PART), default=list(SIZES_OF_PART))
    parser.add_argument("--quick", action="store_true", help="fewer sizes, without FlashAttention-4, 3 rounds")
    parser.add_argument("--dtype", nargs="+", choices=list(TORCH))
    parser.add_argument("--size", nargs="+", type=size, metavar="NxD", help="seqlen x head_dim")
    parser.add_argument("--peers", nargs="+", choices=names)
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (3 if args.quick else 5)
    args.peers = args.peers or [name for name in names if not (args.quick and name == FA4)]
    return args


def main():
    args = parse()
    require_gpu()
    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    cases = {part: [*cases_of(part, args)] for part in args.parts}
    keys, start = kernels(current_gpu().device, cases), time.perf_counter()
    compile_all(keys)
    print(f"{len(keys)} kernels in the cache after {time.perf_counter() - start:.0f} s")
    parts = {
        "cells": (partial(cells, peers=args.peers, rounds=args.rounds), show_cells),
        "batches": (partial(cells, peers=args.peers, rounds=args.rounds, graphs=(False, True)), show_cells),
        "variants": (partial(variants, rounds=args.rounds), show_variants),
    }
    with one_stream():
        for part in args.parts:
            (measured, shown), start = parts[part], time.perf_counter()
            results[part] = measured(cases[part])
            shown(results[part])
            print(f"{part}: {time.perf_counter() - start:.0f} s")
            if args.json:
                save(args.json, results)  # after each part, so that what was measured is not lost
    failed = failures({part: results[part] for part in args.parts})
    return f"numbattn is wrong or does not run in {len(failed)} cells" if failed else 0


def failures(records):
    """numbattn's failures in the records of each part."""
    return [record for part, found in records.items() for record in found
            if record["failed"] and (part == "variants" or "numbattn" in record["failed"])]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

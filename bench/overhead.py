"""Host time of one call on a GPU, from the call to its return on an idle GPU, compared with torch.

    python bench/overhead.py
    python bench/overhead.py --dtype float16 --calls 6400 --json overhead.json
    python bench/overhead.py --profile

The problem is so small that its kernels hide nothing: batch 1, 2 heads of 64, seqlen 64. After every few dozen calls
the host waits for the GPU, off the clock, so that the launch queue never fills. Needs tabulate and tqdm.
"""

import argparse
import cProfile
import pstats
import warnings
from functools import partial
from itertools import chain, repeat
from time import perf_counter_ns

import numpy as np
from common import machine, save, show, show_machine
from peers import (
    DTYPE,
    PACKAGES,
    PEERS,
    Replay,
    attention_of,
    available,
    context_of,
    cupy,
    gpu,
    inputs,
    make_forward,
    native,
    one_stream,
    require_gpu,
)
from tqdm import tqdm

import numbattn as na

SHAPE = 1, 2, 64, 64
BATCH = 32  # calls between two waits for the GPU
WARM_UP = 3  # batches; the pools then hold all that a batch needs
PROFILED = 2000
PROFILED_KINDS = "arrays reused", "fresh arrays", "forward + backward"


# --------------------------------------------------------------------------------------------------------------- calls
# Each kind of call returns a function and its arguments, endlessly: an iterator of tuples.
def reused(name, dtype, calls):
    """attention on the same arrays."""
    q, k, v, _ = native(name, inputs(SHAPE, dtype))
    return attention_of(name), repeat((q, k, v))


def option(make):
    """attention with an option that should cost next to nothing, make(): some options hold arrays on the GPU."""

    def calls_of(name, dtype, calls):
        q, k, v, _ = inputs(SHAPE, dtype)
        return partial(na.attention, **make()), repeat((q, k, v))

    return calls_of


def fresh(name, dtype, calls):
    """attention on arrays that no call has seen."""
    arrays = inputs(SHAPE, dtype)
    sets = [native(name, [x.copy() for x in arrays[:3]]) for _ in range(calls)]
    return attention_of(name), iter(sets)


def both_passes(name, dtype, calls):
    """Forward and backward on the same arrays."""
    forward = make_forward(name, inputs(SHAPE, dtype))

    def run():
        o, backward = forward()
        return o, backward()

    return run, repeat(())


def replayed(name, dtype, calls):
    """A captured attention."""
    q, k, v, _ = inputs(SHAPE, dtype)
    return Replay(partial(na.attention, q, k, v)), repeat(())


def replayed_both(name, dtype, calls):
    """A captured forward and backward."""
    run, _ = both_passes(name, dtype, calls)
    return Replay(run), repeat(())


KINDS = {
    "arrays reused": reused,
    "fresh arrays": fresh,
    "causal=True": option(lambda: {"causal": True}),
    "mask=Window(20, 0)": option(lambda: {"mask": na.Window(20, 0)}),
    "mask=Lengths(50)": option(lambda: {"mask": na.Lengths(50)}),
    "mask=Segments(offsets)": option(lambda: {"mask": na.Segments(cupy.asarray([0, 20, 64], np.int32))}),
    "score=Alibi(slopes)": option(lambda: {"score": na.Alibi(cupy.asarray([0.5, 0.25], np.float32))}),
    "dropout": option(lambda: {"dropout": na.Dropout(0.1, seed=1)}),
    "forward + backward": both_passes,
    "graph replay": replayed,
    "graph replay, both": replayed_both,
}


def peers_of(kind, dtype):
    """Peers to compare with; not the formula in CuPy, which is a dozen calls."""
    compared = reused, fresh, both_passes
    return [name for name in available(dtype) if name != "cupy"] if kind in compared else ["numbattn"]


# -------------------------------------------------------------------------------------------------------------- timing
def overhead(dtypes, calls):
    """One record for each dtype and kind of call: median and 90th percentile in microseconds by peer."""
    records = []
    for dtype, (title, kind) in tqdm([*((d, k) for d in dtypes for k in KINDS.items())], disable=None, leave=False):
        prepared, failed = {}, {}
        for name in peers_of(kind, dtype):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch says at length why a backend does not run
                    prepared[name] = warmed_up(name, kind, dtype, calls)
            except Exception as error:  # not supported: the table has a "-"
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        samples = {name: [] for name in prepared}
        for _ in range(calls // BATCH):  # peers take turns, so that a slow moment hits them all
            for name, (run, arguments) in prepared.items():
                samples[name] += batch(name, run, arguments)
        records.append({
            "dtype": dtype, "call": title,
            "median": {name: float(np.median(taken)) for name, taken in samples.items()},
            "p90": {name: float(np.percentile(taken, 90)) for name, taken in samples.items()},
            "failed": failed,
        })
    return records


def warmed_up(name, kind, dtype, calls):
    run, arguments = kind(name, dtype, calls + WARM_UP * BATCH)
    for _ in range(WARM_UP):
        batch(name, run, arguments)
    return run, arguments


def batch(name, run, arguments):
    """Microseconds of each of BATCH calls. Results are freed after the clock has stopped."""
    taken, results = [], []
    with context_of(name):
        for _ in range(BATCH):
            given = next(arguments)
            start = perf_counter_ns()
            result = run(*given)
            taken.append(1e-3 * (perf_counter_ns() - start))
            results.append(result)
        cupy.cuda.get_current_stream().synchronize()
    return taken


def table(records):
    names = [name for name in PEERS if any(name in r["median"] or name in r["failed"] for r in records)]
    return [
        {"dtype": record["dtype"], "call": record["call"],
         **dict(chain.from_iterable(((name, record["median"].get(name)), (f"{name} p90", record["p90"].get(name)))
                                    for name in names))}
        for record in records
    ]


def show_overhead(records, calls):
    rows = table(records)
    shape = "batch {}, {} heads, seqlen {}, head_dim {}".format(*SHAPE)
    show(f"Host time of a call in microseconds, median and 90th percentile of {calls} calls: {shape}", rows,
         ["", ""] + [".1f"] * (len(rows[0]) - 2))
    for record in records:
        for name, reason in record["failed"].items():
            print(f"{record['dtype']}, {record['call']}: {name} did not run: {reason}")


# ------------------------------------------------------------------------------------------------------------- profile
def profile(dtype):
    """Print where numbattn's host time goes."""
    for title, kind in ((title, KINDS[title]) for title in PROFILED_KINDS):
        run, arguments = warmed_up("numbattn", kind, dtype, PROFILED)
        profiler = cProfile.Profile()
        for i in range(PROFILED):
            given = next(arguments)
            profiler.enable()
            result = run(*given)
            profiler.disable()
            if i % BATCH == 0:
                cupy.cuda.get_current_stream().synchronize()
        del result
        print(f"\n{dtype}, {title}: {PROFILED} calls by own time\n")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


# -------------------------------------------------------------------------------------------------------- command line
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPE), default=["float16", "float32"])
    parser.add_argument("--calls", type=int, default=3200, help="how many are timed (default: 3200)")
    parser.add_argument("--profile", action="store_true", help=f"cProfile over {PROFILED} calls of numbattn instead")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    if args.calls < BATCH:
        parser.error(f"--calls: got {args.calls}, allowed {BATCH} or more")
    require_gpu()

    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    with one_stream():
        if args.profile:
            for dtype in args.dtype:
                profile(dtype)
            return
        results["overhead"] = overhead(args.dtype, args.calls)
        show_overhead(results["overhead"], args.calls // BATCH * BATCH)
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

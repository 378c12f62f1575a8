"""numbattn on a GPU against torch's kernels and standard attention in CuPy: speed, memory, errors, masks, scores.

    python bench/gpu.py
    python bench/gpu.py --speed --dtype bfloat16 --head-dim 64 128 256 --causal --seqlen 512 2048 16384
    python bench/gpu.py --memory --sparse --first-call --json gpu.json
    python bench/gpu.py --accuracy --head-dim 64 128 256 --seqlen 512 4096 --pass forward --peers numbattn flash cudnn

Speeds are medians of interleaved rounds on one stream, by CUDA events: a call whose kernels take less time than the
host needs to launch them is timed at the host's speed; --graph shows the kernels alone. Compare within one run only.
Needs tabulate and tqdm; compares with torch if it is installed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import product

import numpy as np
from cases import (
    GRAPH,
    PASSES,
    SETTINGS,
    TOKENS,
    WIDTH,
    columns_of_case,
    grouped,
    make_case,
    ran,
    scaled,
    show_failed,
    show_notes,
    visible_share,
)
from common import machine, sampled, save, show, show_machine
from features import score_speeds, show_scores, show_sparse, sparse
from peers import (
    DTYPE,
    HALF,
    PACKAGES,
    PEERS,
    array_of,
    available,
    context_of,
    cupy,
    gpu,
    make_attention,
    one_stream,
    release,
    require_gpu,
)
from timing import extra_bytes, measure, medians, prepare, progress, settle, why

import numbattn as na
from numbattn.cuda.launch import current_gpu
from numbattn.cuda.plan import tier
from numbattn.cuda.words.tiers import TIERS

WAITED = 50  # calls of a sample of --latency
FIELD_PARTS = "speed", "sparse", "score", "latency"  # parts whose default setting in half precision is "field"
DEFAULTS = {  # what each part runs by default: dtypes, head_dims, causal, seqlens
    "speed": (["float16", "float32"], [64, 128], [False, True], None),
    "memory": (["float32"], [64], [False], [1024, 2048, 4096, 8192, 16384, 32768]),
    "sparse": (["float16"], [64], [False], [4096, 16384]),
    "score": (["bfloat16"], [64, 128, 256], [False, True], [4096, 16384]),
    "accuracy": (list(HALF), [64, 128], [False, True], [512, 4096]),
    "latency": (["bfloat16"], [64, 128, 256], [False, True], [512, 1024, 2048]),
    "first call": (["float16", "float32"], [64], [False], [256]),
}
SPEED_SEQLENS = {"field": [1024, 4096, 16384], "single": [4096]}


def cases_of(part, args):
    """What the command line asks of a part, with the part's defaults for the rest."""
    dtypes, head_dims, causals, seqlens = DEFAULTS[part]
    if args.causal and part != "sparse":
        causals = args.causal
    cases = []
    for dtype in args.dtype or dtypes:
        setting = args.setting or ("field" if dtype in HALF and part in FIELD_PARTS else "single")
        for head_dim, causal in product(args.head_dim or head_dims, causals):
            for seqlen in args.seqlen or seqlens or SPEED_SEQLENS[setting]:
                cases.append(make_case(dtype, head_dim, causal, seqlen, setting, args.heads, args.heads_k))
    return cases


# --------------------------------------------------------------------------------------------------------------- speed
def speed(cases, passes, peers, rounds, graph, dropout, deterministic, window, padding):
    """One record for each case and pass: medians, samples, TFLOP/s by peer."""
    records = []
    for case, of in progress(product(cases, passes)):
        release()
        arrays = case.inputs()
        options = {"arrays": arrays, "causal": case.causal, "dropout": dropout, "deterministic": deterministic,
                   "window": window, "mask": padded(case, padding)}
        makers = {name: partial(prepare, name, of, **options) for name in available(case.dtype, peers)}
        if graph:
            makers[GRAPH] = partial(prepare, "numbattn", of, graph=True, **options)
        samples, errors, failed = measure(makers, rounds, same=not dropout and not padding)
        seconds, visible = medians(samples), visible_share(case.seqlen, window)
        records.append({
            **case._asdict(), "pass": of, "dropout": dropout, "window": window, "padding": padding, "seconds": seconds,
            "tflops": {name: visible * case.tflop(of) / s for name, s in seconds.items()}, "samples": samples,
            "errors": errors, "failed": failed,
        })
    return records


def padded(case, padding):
    """A mask by which each sequence is up to so many elements shorter than its array."""
    if not padding:
        return None
    lengths = np.random.default_rng(0).integers(case.seqlen - padding, case.seqlen + 1, (case.batch, 1), np.int32)
    return na.Lengths(cupy.asarray(lengths), cupy.asarray(lengths))


def speed_row(record, names):
    """A row of the table of one dtype and pass."""
    rates = record["tflops"]
    others = [rate for name, rate in rates.items() if name not in ("numbattn", GRAPH)]
    compared = "numbattn" in rates and others
    return {
        **columns_of_case(record),
        **{name: rates.get(name) for name in names},
        "/ best": rates["numbattn"] / max(others) if compared else None,
    }


def show_speed(records):
    for (dtype, of), chosen in grouped(records, "dtype", "pass"):
        names = ran(chosen, "tflops")
        options = "".join(f", {key} {chosen[0][key]}" for key in ("dropout", "window", "padding") if chosen[0][key])
        show(f"{dtype}, {of}{options}: TFLOP/s", [speed_row(record, names) for record in chosen],
             [""] * 6 + [".1f"] * len(names) + [".2f"])
    show_notes(records)


# ------------------------------------------------------------------------------------------------------------- latency
def latency(cases, peers, rounds):
    """One record for each case: seconds by peer from a forward call on an idle GPU to its result."""
    records = []
    for case in progress(cases):
        release()
        q, k, v, _ = case.inputs()
        timers, failed = {}, {}
        for name in available(case.dtype, peers):
            try:
                run = make_attention(name, (q, k, v), case.causal)
                waiting_seconds(name, run)
            except Exception as error:
                failed[name] = why(error)
            else:
                timers[name] = partial(waiting_seconds, name, run)
        settle(timers)
        found = {name: np.ravel(times).tolist() for name, times in sampled(timers, rounds).items()}
        records.append({**case._asdict(), "pass": "latency", "seconds": medians(found), "failed": failed})
    return records


def waiting_seconds(name, run):
    """Seconds of some calls, each waited for."""
    stream, taken = cupy.cuda.get_current_stream(), []
    with context_of(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(WAITED):
            stream.synchronize()
            start = time.perf_counter()
            run()
            stream.synchronize()
            taken.append(time.perf_counter() - start)
    return taken


def show_latency(records):
    for (dtype,), chosen in grouped(records, "dtype"):
        names = ran(chosen, "seconds")
        rows = []
        for record in chosen:
            found = record["seconds"]
            others = [seconds for name, seconds in found.items() if name != "numbattn"]
            best = min(others) / found["numbattn"] if others and "numbattn" in found else None
            rows.append({**columns_of_case(record), **{name: scaled(found.get(name), 1e6) for name in names},
                         "best / numbattn": best})
        show(f"{dtype}: microseconds from a call on an idle GPU to its result, median", rows,
             [""] * 6 + [".1f"] * len(names) + [".2f"])
        for record in chosen:
            show_failed(record)


# -------------------------------------------------------------------------------------------------------------- memory
def memory(cases, peers, dropout):
    """One record for each case: bytes that forward + backward take beyond their inputs, by peer."""
    records = []
    for case in progress(cases):
        extra, failed = {}, {}
        for name in available(case.dtype, peers):
            release()
            try:
                run = prepare(name, "both", case.inputs(), causal=case.causal, dropout=dropout)
                with context_of(name):
                    extra[name] = extra_bytes(run)
            except Exception as error:
                failed[name] = why(error)
        records.append({**case._asdict(), "bytes": extra, "failed": failed})
    return records


def show_memory(records):
    for (dtype, head_dim, causal), chosen in grouped(records, "dtype", "head_dim", "causal"):
        names = ran(chosen, "bytes")
        title = (f"Memory of forward + backward beyond the inputs, MB: {dtype}, head_dim {head_dim}, "
                 f"batch {chosen[0]['batch']}, {chosen[0]['heads']} heads{', causal' if causal else ''}")
        rows = [{"seqlen": record["seqlen"], **{name: scaled(record["bytes"].get(name), 1e-6) for name in names}}
                for record in chosen]
        show(title, rows, [""] + [".1f"] * len(names))
        for name in names:
            if exponent := growth_exponent(chosen, name):
                print(f"{name}: grows as seqlen ** {exponent:.2f} between the two longest")
        for record in chosen:
            for name, reason in record["failed"].items():
                print(f"{name} did not run at seqlen {record['seqlen']}: {reason}")


def growth_exponent(records, name):
    """Slope of log(bytes) over log(seqlen) between the two longest: 1 is linear, 2 quadratic."""
    points = sorted((record["seqlen"], record["bytes"][name]) for record in records if record["bytes"].get(name))
    if len(points) < 2:
        return None
    (n0, bytes0), (n1, bytes1) = points[-2:]
    return math.log(bytes1 / bytes0) / math.log(n1 / n0)


# ------------------------------------------------------------------------------------------------------------ accuracy
def accuracy(cases, passes, peers):
    """One record for each case and pass: by peer the RMS error and the largest error, relative to the result's RMS
    and largest element. The result is the plain formula's, in float64; of several arrays the worst counts."""
    records = []
    for case, of in progress(product(cases, passes)):
        release()
        arrays = case.inputs()
        exact = prepare("cupy", of, [x.astype(np.float64) for x in arrays], causal=case.causal)()
        errors, failed = {}, {}
        for name in available(case.dtype, peers):
            try:
                with context_of(name):
                    result = prepare(name, of, arrays, causal=case.causal)()
                errors[name] = np.max([*map(errors_of, result, exact)], axis=0).tolist()
            except Exception as error:
                failed[name] = why(error)
        records.append({**case._asdict(), "pass": of, "errors": errors, "failed": failed})
    return records


def errors_of(got, exact):
    """RMS and largest error."""
    got = array_of(got).astype(np.float64) - exact
    return [float(((got**2).mean() / (exact**2).mean()) ** 0.5), float(abs(got).max() / abs(exact).max())]


def show_accuracy(records):
    for (dtype, of), chosen in grouped(records, "dtype", "pass"):
        names = ran(chosen, "errors")
        for i, what in enumerate(("RMS", "largest")):
            rows = [{
                **columns_of_case(record),
                **{name: record["errors"].get(name, [None, None])[i] for name in names},
            } for record in chosen]  # fmt: skip
            show(f"{dtype}, {of}: {what} error, relative", rows, [""] * 6 + [".2e"] * len(names))
        for record in chosen:
            show_failed(record)


# ---------------------------------------------------------------------------------------------------------- first call
FIRST_CALL = """
import json, sys, time
import cupy, numpy as np
import numbattn as na
from numbattn.call.problem import DTYPES

name, head_dim, seqlen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dtype = next(dtype for dtype in DTYPES if dtype.name == name)
numbers = np.random.default_rng(0).standard_normal((4, 1, 2, seqlen, head_dim)).astype(dtype)
q, k, v, do = map(cupy.asarray, numbers)
cupy.cuda.Device().synchronize()
times = [time.perf_counter()]
o, saved = na.attention_forward(q, k, v, causal=bool(sys.argv[4]))
cupy.cuda.Device().synchronize()
times.append(time.perf_counter())
na.attention_backward(do, saved)
cupy.cuda.Device().synchronize()
times.append(time.perf_counter())
print(json.dumps([times[1] - times[0], times[2] - times[1]]))
"""


def first_call(cases):
    """One record for each case: seconds of a process's first forward and backward, with an empty, then a warm cache."""
    records = []
    for case in progress(cases):
        record = {key: getattr(case, key) for key in ("dtype", "head_dim", "causal", "seqlen")}
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                forward, backward = in_fresh_process(case, folder)
                record |= {f"forward, {cache} cache": forward, f"backward, {cache} cache": backward}
        records.append(record)
    return records


def in_fresh_process(case, cache_folder):
    """Seconds of the first forward and of the first backward in a fresh process."""
    arguments = [case.dtype, str(case.head_dim), str(case.seqlen), "causal" if case.causal else ""]
    environment = os.environ | {"NUMBATTN_CACHE_DIR": cache_folder}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL, *arguments], env=environment, stdout=subprocess.PIPE,
                          text=True, check=True)
    return json.loads(done.stdout)


def show_first_call(records):
    show("A process's first calls, seconds to completion", records, [""] * 4 + [".2f"] * 4)


# -------------------------------------------------------------------------------------------------------- command line
def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_argument_group("parts (default: --speed)")
    parts.add_argument("--speed", action="store_true", help="forward and backward, compared with the peers")
    parts.add_argument("--memory", action="store_true", help="what forward + backward take beyond the inputs")
    parts.add_argument("--sparse", action="store_true", help="time by share of visited blocks, and of a window")
    parts.add_argument("--score", action="store_true", help="speed by score, and a pair bias compared with CuPy")
    parts.add_argument("--accuracy", action="store_true", help="errors against float64, compared with the peers")
    parts.add_argument("--latency", action="store_true", help="one call on an idle GPU, until its result")
    parts.add_argument("--first-call", action="store_true", help="a fresh process, with an empty and a warm cache")
    cases = parser.add_argument_group("what is run (the defaults differ by part)")
    cases.add_argument("--dtype", nargs="+", choices=list(DTYPE))
    cases.add_argument("--head-dim", nargs="+", type=int, metavar="N")
    cases.add_argument("--seqlen", nargs="+", type=int, metavar="N")
    cases.add_argument("--setting", choices=["field", *SETTINGS],
                       help=f"field: batch = {TOKENS} / seqlen, heads = {WIDTH} / head_dim, the default for half "
                            "precision; single: batch 1, 16 heads, for the others and --memory; paper: 16, 12")
    cases.add_argument("--heads", type=int, metavar="N", help="instead of the setting's")
    cases.add_argument("--heads-k", type=int, metavar="N", help="of k and v, if they are fewer")
    causal = cases.add_mutually_exclusive_group()
    causal.add_argument("--causal", action="store_const", const=[True], help="causal only (except --sparse)")
    causal.add_argument("--full", action="store_const", dest="causal", const=[False], help="not causal only")
    cases.add_argument("--pass", nargs="+", choices=list(PASSES), default=["forward", "backward"], dest="passes")
    cases.add_argument("--dropout", type=float, default=0.0, metavar="P")
    cases.add_argument("--window", type=int, metavar="LEFT", help="Window(LEFT, 0) (--speed)")
    cases.add_argument("--padding", type=int, metavar="N", default=0,
                       help="numbattn's sequences end up to N elements before their arrays (--speed)")
    cases.add_argument("--deterministic", action="store_true", help="numbattn's gradients bit for bit (--speed)")
    cases.add_argument("--block-size", type=int, default=128, metavar="N", help="of --sparse (default: 128)")
    cases.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    cases.add_argument("--scores", nargs="+", metavar="NAME", help="of --score, as its table names them (default: all)")
    cases.add_argument("--tier", choices=TIERS, default=TIERS[-1],
                       help="no later kernels of numbattn than these: mma for those of Ampere on Hopper (not "
                            "--first-call)")
    cases.add_argument("--shared", type=int, metavar="KB",
                       help="plan numbattn's kernels for a GPU whose blocks have so much shared memory: 99 for 8.6, "
                            "8.9 and 12.0, 163 for 8.0")
    cases.add_argument("--graph", action="store_true", help="numbattn also as replays of a CUDA graph")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too, with all samples")
    args = parser.parse_args()
    if not (args.memory or args.sparse or args.score or args.accuracy or args.latency or args.first_call):
        args.speed = True
    return args


def main():
    args = parse()
    require_gpu()
    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    parts = {
        "speed": (args.speed, partial(speed, passes=args.passes, peers=args.peers, rounds=args.rounds, graph=args.graph,
                                      dropout=args.dropout, deterministic=args.deterministic,
                                      window=args.window, padding=args.padding), show_speed),
        "memory": (args.memory, partial(memory, peers=args.peers, dropout=args.dropout), show_memory),
        "sparse": (args.sparse, partial(sparse, passes=args.passes, rounds=args.rounds, block_size=args.block_size,
                                        dropout=args.dropout), show_sparse),
        "score": (args.score, partial(score_speeds, passes=args.passes, rounds=args.rounds, peers=args.peers,
                                      chosen=args.scores), show_scores),
        "accuracy": (args.accuracy, partial(accuracy, passes=args.passes, peers=args.peers), show_accuracy),
        "latency": (args.latency, partial(latency, peers=args.peers, rounds=args.rounds), show_latency),
        "first call": (args.first_call, first_call, show_first_call),
    }
    if args.shared is not None:
        found = current_gpu()
        found.device = found.device._replace(shared=min(found.device.shared, args.shared << 10))
    with one_stream(), tier(args.tier):
        for part, (wanted, measured, shown) in parts.items():
            if wanted:
                results[part] = measured(cases_of(part, args))
                shown(results[part])
                if args.json:
                    save(args.json, results)  # after each part, so that what was measured is not lost


if __name__ == "__main__":
    main()

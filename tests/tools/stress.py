"""A soak test: random problems on a GPU, for as long as you like, every element of every result checked.

    python -m tests.tools.stress                                  # a minute
    python -m tests.tools.stress --seconds 3600 --processes 8     # processes that share a GPU interrupt each other
    python -m tests.tools.stress --replay 3 17                    # problem 17 of process 3 again

Problems are those of tests/problems.py: all that a call can be asked for, compared with numbattn.reference in float64,
within what rounding explains. Then a problem is called again and again, on several streams at once, and each result is
compared with the first, bit for bit where that is promised. All memory that CuPy hands out is full of NaN, and so is
what lies beyond Lengths: what a kernel leaves unwritten, or must not read, shows.
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter

import cupy
import numpy as np
from tqdm import tqdm

from tests.conftest import no_gpu
from tests.problems import LIMITS, Problem
from tests.rounding import wrong_elements

REPEATS = 16  # calls of a problem after the first
ENOUGH = 5  # wrong problems, after which a process stops
PROCESSES = 1000  # a seed each, at most


# ------------------------------------------------------------------------------------------------------------ problems
def drawn(seed, process, number):
    return Problem(seed * PROCESSES + process, number, LIMITS["gpu"], cupy)


def differ(problem, name, got, want, error):
    """Which elements are not what the first call gave: bit for bit, but for what blocks add up in any order."""
    if problem.deterministic or not (name == "dq" or "score" in name):
        return bits(got) != bits(want)
    return wrong_elements(got, want.astype(np.float64), 2 * cupy.asarray(error))


def differing_elements(problem, first, streams):
    """A line for each result that is another one when it is computed again, on several streams."""
    names, (_, errors) = problem.names_of_results, problem.expected
    results = [[] for _ in streams]
    counts = [cupy.zeros(len(names), np.int64) for _ in streams]
    cupy.cuda.Device().synchronize()
    for number in range(REPEATS):
        at = number % len(streams)
        with streams[at]:
            results[at] = problem.run()
            for i, found in enumerate(zip(names, results[at], first, errors)):
                counts[at][i] += cupy.count_nonzero(differ(problem, *found))
    cupy.cuda.Device().synchronize()
    for name, count in zip(names, sum(counts).tolist()):
        if count:
            yield f"{name}, called again, {count} wrong"


def bits(x):
    return cupy.ascontiguousarray(x).view(f"u{x.itemsize}")


# ----------------------------------------------------------------------------------------------------------- processes
def full_of_nan(nbytes):
    """Memory of CuPy's pool: NaN in every dtype."""
    memory = cupy.get_default_memory_pool().malloc(nbytes)
    if nbytes:
        memory.memset_async(0xFF, nbytes)
    return memory


def check(seed, process, number, streams):
    """One problem; a line for each result that is wrong."""
    problem = drawn(seed, process, number)
    results = problem.run()
    return problem, [*problem.wrong(results), *differing_elements(problem, results, streams)]


def soak(args, process, reports):
    """One problem after the other; reports (calls, kind, text of what is wrong)."""
    cupy.cuda.set_allocator(full_of_nan)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(args.streams)]
    end, number, failures = time.monotonic() + args.seconds, 0, 0
    while time.monotonic() < end and failures < ENOUGH:
        try:
            problem, text = check(args.seed, process, number, streams)
            if text:
                text.append(repr(problem))
        except Exception:
            text = [traceback.format_exc()]
        if text:
            failures += 1
            text.insert(0, f"WRONG, --seed {args.seed} --replay {process} {number}:")
        reports.put((1 + REPEATS, (process, number // LIMITS["gpu"].run), "\n".join(text)))
        number += 1
        if number % 10 == 0:  # as in a fresh process
            cupy.get_default_memory_pool().free_all_blocks()
    reports.put(None)


def watch(processes, reports, seconds):
    """Show what they report until all have ended: problems, calls, wrong problems, kinds."""
    counts, kinds, end = Counter(), set(), time.monotonic() + seconds
    with tqdm(total=seconds, unit="s", disable=None, bar_format="{l_bar}{bar}| {n:.0f}/{total} s{postfix}") as bar:
        while counts["ended"] < len(processes):
            if not any(process.is_alive() for process in processes) and reports.empty():
                break
            report = reports.get()
            if report is None:
                counts["ended"] += 1
                continue
            calls, kind, text = report
            counts.update(problems=1, calls=calls, wrong=bool(text))
            kinds.add(kind)
            if text:
                tqdm.write(text)
            bar.n = max(0, min(seconds, seconds - (end - time.monotonic())))
            bar.set_postfix_str(f"{counts['calls']} calls, {counts['wrong']} problems wrong")
    return counts, len(kinds)


# -------------------------------------------------------------------------------------------------------- command line
def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--processes", type=int, default=1, help="at once, on one GPU (default: 1)")
    parser.add_argument("--streams", type=int, default=2, help="of each process (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, nargs=2, metavar=("PROCESS", "NUMBER"), help="one problem alone")
    return parser.parse_args()


def main():
    args = parse()
    if reason := no_gpu():
        sys.exit(f"stress needs a GPU: {reason}")
    if args.replay:
        cupy.cuda.set_allocator(full_of_nan)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(args.streams)]
        problem, wrong = check(args.seed, *args.replay, streams)
        print(problem, *wrong, sep="\n")
        return bool(wrong)
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    processes = [context.Process(target=soak, args=(args, i, reports), daemon=True) for i in range(args.processes)]
    for process in processes:
        process.start()
    counts, kinds = watch(processes, reports, args.seconds)
    died = args.processes - counts["ended"]
    print(f"{counts['calls']} calls of {counts['problems']} problems of {kinds} kinds, {args.processes} processes, "
          f"{args.streams} streams each, {args.seconds:.0f} s: {counts['wrong']} problems wrong, {died} processes died")
    return bool(counts["wrong"] or died)


if __name__ == "__main__":
    sys.exit(main())

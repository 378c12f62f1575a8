"""Sums over pairs of points: kernel products, Sinkhorn's iterations and nearest neighbours, next to other libraries.

    python bench/kernels.py
    python bench/kernels.py --quick
    python bench/kernels.py --parts products --peers numbattn keops --json kernels.json
    python bench/kernels.py --cpu

products: of a Gaussian with b of 1 and 64 columns. sinkhorn: 10 iterations at a fixed epsilon, by 20 calls of
logsumexp. nearest: the nearest of so many centres, and neighbours in a cloud. steps: of k-means, the nearest of so many
centres and the means of their points. solves: (K + ridge)^-1 b of Matern's kernel and five right sides, to residuals of
1e-5, beside a dense factor ("standard") and conjugate gradients of SciPy or CuPy for one at a time ("cg"). losses: the
cross-entropy of a vocabulary with its gradients, and bytes beyond inputs and results, beside the same four matrix
products alone, whose results are not compared. errors: against float64, of products by length, of points at the origin
and far off, and of Sinkhorn's first potential by epsilon. costs: a process's first call with an empty and with a warm
cache, a later call, and what it takes beyond its inputs.

Points are normal, of unit mean square distance from the origin. "standard" is the formula |x|^2 + |y|^2 - 2 x y in
blocks of CuPy or NumPy, "torch" the same there, up to 10^11 pairs. KeOps, flash-sinkhorn, in float32 and in TF32, which
takes bfloat16 as float32, flash-kmeans, cut-cross-entropy and liger-kernel are compared if they are installed.
Libraries take turns; the first rows are compared with float64 before anything is timed, and who is wrong is not timed;
on a GPU, what takes longer than 0.2 s is timed once. Kernels are compiled first, in several processes; KeOps compiles
when it first runs.
Needs tabulate and tqdm.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import interleaved, machine, save, show, show_machine
from cpu import peak_resident
from pairs import (
    CG,
    FLASH_SINKHORN,
    FORMULA,
    KEOPS,
    MAKERS,
    OURS,
    PACKAGES,
    PEERS,
    PRODUCTS,
    TF32,
    TORCH,
    available,
    formula_product,
    formula_sinkhorn,
    matern,
)
from peers import DTYPE, array_of, cupy, gpu, one_stream, release, require_gpu
from peers import PACKAGES as INSTALLED
from second import host_seconds
from small import in_processes, rounded, timed
from timing import extra_bytes, progress, why

from numbattn.base.values import moved

DIMENSIONS, COLUMNS = (3, 10, 64, 512), (1, 64)
LENGTHS, OFFSETS, EPSILONS = (0.1, 0.3, 1.0, 3.0), (0.0, 1e3), (1.0, 0.1, 0.01, 0.001)
EPSILON, ITERATIONS = 0.1, 10  # Sinkhorn's
CHECKED = 64  # rows that are compared with float64
ROWS = 1024  # of a block of scores in float64
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
WORKERS = 12  # processes that compile


# --------------------------------------------------------------------------------------------------------------- cases
class Product(NamedTuple):
    dtype: str
    n: int
    features: int
    columns: int
    length: float = 1.0
    offset: float = 0.0
    of = "product"

    def arguments(self, xp):
        x, y = (cloud(xp, self.dtype, self.n, self.features, seed, self.offset) for seed in (0, 1))
        return x, y, normal(xp, self.dtype, (self.n, self.columns), 2), self.length

    def expected(self, x, y, b, length):
        return formula_product(*exact(x[:CHECKED] - self.offset, y - self.offset, b), length)()

    def error(self, o, expected):
        return distance(o[:CHECKED], expected)


class Sinkhorn(NamedTuple):
    dtype: str
    n: int
    features: int
    epsilon: float = EPSILON
    iterations: int = ITERATIONS
    of = "sinkhorn"

    def arguments(self, xp):
        x, y = (cloud(xp, self.dtype, self.n, self.features, seed) for seed in (0, 1))
        return x, y, self.epsilon, self.iterations

    def expected(self, x, y, epsilon, iterations):
        return formula_sinkhorn(*exact(x, y), epsilon, iterations)()

    def error(self, potentials, expected):
        return max(map(distance, potentials, expected))


class Nearest(NamedTuple):
    dtype: str
    m: int
    n: int
    features: int
    k: int = 1
    of = "nearest"

    def arguments(self, xp):
        sizes = self.m, self.n
        return *(cloud(xp, self.dtype, n, self.features, seed) for seed, n in enumerate(sizes)), self.k

    def expected(self, x, y, k):
        """All squared distances of some x, in float64."""
        x, y = exact(x[:CHECKED], y)
        return (x * x).sum(-1)[:, None] + (y * y).sum(-1) - 2 * x @ y.T

    def error(self, j, expected):
        """By how much farther those that were found are than the nearest."""
        squares, j = host(expected), host(j[:CHECKED]).astype(np.int64)
        found = np.sort(np.take_along_axis(squares, j, -1), -1)
        if (np.diff(np.sort(j, -1)) == 0).any():
            return math.inf
        return distance(found, np.sort(np.partition(squares, self.k - 1, -1)[:, : self.k], -1))


class Step(NamedTuple):
    dtype: str
    m: int
    n: int
    features: int
    of = "step"

    def arguments(self, xp):
        return Nearest(*self).arguments(xp)[:2]

    def expected(self, x, y):
        return x, Nearest(*self).expected(x, y, 1)

    def error(self, step, expected):
        """Of the labels of some points, or of some centres that have any."""
        (labels, centres), (x, squares) = map(array_of, step), expected
        means = {j: host(x[labels == j]).mean(axis=0) for j in range(CHECKED) if (labels == j).any()}
        return max(Nearest(*self).error(labels[:, None], squares),
                   distance(centres[[*means]], np.stack([*means.values()])))  # fmt: skip


class Solve(NamedTuple):
    dtype: str
    n: int
    features: int
    columns: int = 5
    length: float = 0.5
    ridge: float = 1e-2
    tol: float = 1e-5
    of, tolerance = "solve", 1e-3

    def arguments(self, xp):
        x, b = cloud(xp, self.dtype, self.n, self.features, 0), normal(xp, self.dtype, (self.n, self.columns), 1)
        return x, b, self.length, self.ridge, self.tol

    def expected(self, x, b, length, ridge, tol):
        """Some rows of the matrix, and of b, in float64."""
        (x, some), own = exact(x, x[:CHECKED]), np.arange(CHECKED, like=x)[:, None] == np.arange(len(x), like=x)
        squares = ((some[:, None] - x) ** 2).sum(-1)
        return matern(np.sqrt(squares) / length) + ridge * own, exact(b[:CHECKED])[0]

    def error(self, found, expected):
        rows, b = map(host, expected)
        return distance(rows @ host(found), b)


class Loss(NamedTuple):
    dtype: str
    m: int
    n: int
    features: int
    of = "loss"

    def arguments(self, xp):
        x, y = (cloud(xp, self.dtype, n, self.features, seed) for seed, n in enumerate((self.m, self.n)))
        return x * x.dtype.type(16), y, xp.random.default_rng(2).integers(0, self.n, self.m)

    def expected(self, x, y, targets):
        """The loss, and the gradients of some rows of x and of y, in float64."""
        (x, y), loss, dx, dy = exact(x, y), 0, None, 0
        for at in range(0, self.m, ROWS):
            some, own = x[at : at + ROWS], targets[at : at + ROWS, None]
            S = some @ y.T
            S -= S.max(-1, keepdims=True)
            P, chosen = np.exp(S), np.take_along_axis(S, own, -1)
            sums = P.sum(-1, keepdims=True)
            loss = loss + (np.log(sums) - chosen).sum() / self.m
            P = P / sums - (np.arange(self.n, like=own) == own)
            dx = P[:CHECKED] @ y / self.m if dx is None else dx
            dy = dy + P[:, :CHECKED].T @ some / self.m
        return loss[None], dx, dy

    def error(self, found, expected):
        loss, dx, dy = found
        return max(map(distance, (loss[None], dx[:CHECKED], dy[:CHECKED]), expected))


def cloud(xp, dtype, n, features, seed, offset=0.0):
    x = normal(xp, "float32", (n, features), seed) / np.float32(math.sqrt(features)) + np.float32(offset)
    return x.astype(DTYPE[dtype])


def normal(xp, dtype, shape, seed):
    return xp.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPE[dtype])


def exact(*arrays):
    return [x.astype(np.float64) for x in arrays]


def distance(got, expected):
    """The root mean square error in parts of the root mean square; NaN stays."""
    got, expected = host(got), host(expected)
    return rounded(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


def host(x):
    """NumPy's array in float64."""
    return moved(array_of(x), np.empty(0)).astype(np.float64)


def products(args):
    many = 10_000 if args.cpu else 10**5 if args.quick else 10**6
    usual = 2_000 if args.cpu else 20_000 if args.quick else 10**5
    dimensions, columns = ((3, 64), (1,)) if args.quick else (DIMENSIONS, COLUMNS)
    return [Product(dtype, many if (dtype, d) == ("float32", 3) else usual, d, e)  # in float64 KeOps takes 46 s
            for dtype, d, e in product(dtypes(args, "float32", "float64"), args.features or dimensions, columns)]


def sinkhorns(args):
    n = 2_000 if args.cpu else 20_000 if args.quick else 50_000
    return [Sinkhorn(dtype, n, 64) for dtype in dtypes(args, "float32", *["bfloat16"] * (not args.cpu))]


def neighbours(args):
    cloud_size = 10_000 if args.cpu else 10**5
    clouds = product(dtypes(args, "float32"), [cloud_size], [cloud_size], [3], (1, 10))
    return [Nearest(*case) for case in (*steps(args), *clouds)]


def steps(args):
    points, centres = (5_000, (500,)) if args.cpu else (10**5, (1000,)) if args.quick else (10**6, (1000, 4096, 32768))
    usual = "float32" if args.cpu else "float16"
    return [Step(dtype, points, n, 128) for dtype, n in product(dtypes(args, usual), centres)]


def solves(args):
    sizes = (2_000, 4_000) if args.quick else (4_000, 20_000) if args.cpu else (20_000, 100_000)
    return [Solve(dtype, n, 3) for dtype, n in product(dtypes(args, "float64", "float32"), sizes)]


def losses(args):
    sizes = (2048, 32768, 1024) if args.quick else (8192, 131072, 4096)
    if args.cpu:
        sizes = 1024, 8192, 512
    return [Loss(dtype, *sizes) for dtype in dtypes(args, "float32" if args.cpu else "bfloat16")]


def errors(args):
    n, some = 2_000 if args.cpu else 20_000, slice(1, 3) if args.quick else slice(None)
    found = [Product(dtype, n, d, 1, length, offset)
             for dtype, d, offset, length in product(dtypes(args, "float32"), (3, 64), OFFSETS, LENGTHS[some])]
    return found + [case._replace(epsilon=epsilon, iterations=1)
                    for case, epsilon in product(sinkhorns(args), EPSILONS[some])]  # fmt: skip


def costs(args):
    n = 2_000 if args.cpu else 50_000
    found = [Product("float32", n, 3, 1), Product("float32", n, 64, 1), Sinkhorn("float32", n, 64, iterations=1),
             Nearest("float32", n, n, 3, 10)]  # fmt: skip
    return found[:1] if args.quick else found


def dtypes(args, *usual):
    return [dtype for dtype in usual if dtype in (args.dtype or usual)]


# ------------------------------------------------------------------------------------------------------------- measured
def speeds(cases, args):
    """A record for each case: seconds and errors by peer."""
    for case in progress(cases):
        tolerance, (makers, check) = getattr(case, "tolerance", TOLERANCE[case.dtype]), makers_of(case, args)
        found = (timed_on_cpu if args.cpu else timed)(makers, check, tolerance, args.rounds)
        record = {**case._asdict(), **dict(zip(("seconds", "errors", "failed"), found))}
        if case.of == "loss":
            record["memory"] = {name: memory(makers[name](), args) for name in record["seconds"] if name != PRODUCTS}
        yield record


def makers_of(case, args):
    """Makers by peer, and the check of what their runs return."""
    xp = array_library(args)
    arguments = case.arguments(xp)
    expected = case.expected(*arguments)
    if not args.cpu:
        release()
    makers = {name: partial(MAKERS[case.of][name], *arguments)
              for name in available(case.of, case.dtype, args.cpu, args.peers)}  # fmt: skip
    return makers, lambda name, result: 0.0 if name == PRODUCTS else case.error(result, expected)


def array_library(args):
    return np if args.cpu else cupy


def timed_on_cpu(makers, check, tolerance, rounds):
    """As small.timed, by the host's clock."""
    timers, errors, failed = {}, {}, {}
    for name, make in makers.items():
        try:
            run = make()
            errors[name] = check(name, run())  # warms up, too
            if not errors[name] <= tolerance:
                raise ArithmeticError(f"wrong by {errors[name]:.1e}")
            timers[name] = partial(host_seconds, run)
        except Exception as error:  # not running is a result, too
            failed[name] = why(error)
    return {name: rounded(s) for name, s in interleaved(timers, rounds).items()}, errors, failed


def accuracies(cases, args):
    """A record for each case: errors by peer."""
    for case in progress(cases):
        errors, failed = {}, {}
        makers, check = makers_of(case, args)
        for name, make in makers.items():
            try:
                with np.errstate(all="ignore"):  # the formula far from the origin
                    errors[name] = check(name, make()())
                if not math.isfinite(errors[name]):
                    raise ArithmeticError(f"wrong by {errors.pop(name)}")
            except Exception as error:
                failed[name] = why(error)
        yield {"of": case.of, **case._asdict(), "errors": errors, "failed": failed}


def calls(cases, args):
    """A record for each case: seconds of first and later calls of numbattn in a process, and bytes it takes."""
    for case in progress(cases):
        record = {"of": case.of, **case._asdict(), "failed": {}}
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                first, later, nbytes = in_fresh_process(folder, call, case, args)
                record |= {f"first, {cache} cache": first, "later": later, "bytes": nbytes}
        yield record


def in_fresh_process(cache_folder, function, *arguments):
    before = os.environ.get("NUMBATTN_CACHE_DIR")
    os.environ["NUMBATTN_CACHE_DIR"] = cache_folder
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            return fresh.submit(function, *arguments).result()
    finally:
        os.environ.pop("NUMBATTN_CACHE_DIR")
        if before is not None:
            os.environ["NUMBATTN_CACHE_DIR"] = before


def call(case, args):
    """Seconds of this process's first call and of a later one, to completion, and the bytes beyond the inputs."""
    arguments = case.arguments(array_library(args))
    run = MAKERS[case.of][OURS](*arguments)

    def seconds():
        start = time.perf_counter()
        run()
        if not args.cpu:
            cupy.cuda.runtime.deviceSynchronize()
        return rounded(time.perf_counter() - start)

    if not args.cpu:
        cupy.cuda.runtime.deviceSynchronize()
    return seconds(), seconds(), growth(run) if args.cpu else extra_bytes(run)


def memory(run, args):
    """Bytes that a run takes beyond its inputs and results."""
    results = sum(x.nbytes for x in run())  # a first time: what only that takes is not counted
    return (growth if args.cpu else extra_bytes)(run) - results


def growth(run):
    """By how many bytes a run raises this process's peak of resident memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak_resident()
    run()
    return round(1e6 * (peak_resident() - before))


PARTS = {
    "sinkhorn": (sinkhorns, speeds), "nearest": (neighbours, speeds), "steps": (steps, speeds),
    "products": (products, speeds), "solves": (solves, speeds), "losses": (losses, speeds),
    "errors": (errors, accuracies), "costs": (costs, calls),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- shown
def show_records(part, records):
    if part == "costs":
        title = "Seconds of numbattn's calls in a process, and bytes beyond the inputs"
        return show(title, [*map(about, records)], ".3g")
    measured = "errors" if part == "errors" else "seconds"
    names = [name for name in PEERS if any(name in record[measured] for record in records)]
    rows = [about(record) | {name: record[measured].get(name) for name in names} for record in records]
    if measured == "seconds":
        for row in rows:
            row |= {f"{name} / {OURS}": row[name] / row[OURS] if row[name] and row.get(OURS) else None
                    for name in names if name != OURS}  # fmt: skip
    for row, record in zip(rows, records):
        row |= {f"{name}, MB": nbytes / 1e6 for name, nbytes in record.get("memory", {}).items()}
    show(f"{part}: {'relative errors, root mean square' if part == 'errors' else 'seconds'}", rows, ".4g")
    for record in records:
        for name, reason in record["failed"].items():
            case = ", ".join(f"{key} {value}" for key, value in about(record).items())
            print(f"{name} was not measured, {case}: {reason}")


def about(record):
    return {key: value for key, value in record.items() if key not in ("seconds", "errors", "failed", "memory")}


# ------------------------------------------------------------------------------------------------------------ compiled
def prepare(cases, peers):
    """Let all compile into their caches on disk, by several processes; what does not run is seen later. Not so KeOps,
    which takes less than a second for a formula: processes have died where several were at it."""
    tasks = {(alike(case, name), name) for case in cases for name in available(case.of, case.dtype, False, peers)
             if name not in (FORMULA, TORCH, KEOPS, CG, PRODUCTS)}  # fmt: skip
    in_processes(WORKERS, first_call, sorted(tasks, key=lambda task: task[1]))


def alike(case, name):
    """A case that takes the same kernels: some peers have one for all sizes."""
    usual = {"length": 1.0, "offset": 0.0, "epsilon": EPSILON, "iterations": 1}
    if name in (FLASH_SINKHORN, TF32):
        usual |= {"n": 2000, "dtype": "float32"}
    return case._replace(**{field: value for field, value in usual.items() if field in case._fields})


def first_call(case, name):
    with suppress(Exception):
        MAKERS[case.of][name](*case.arguments(cupy))()
    release()


# --------------------------------------------------------------------------------------------------------- command line
def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="on NumPy arrays instead")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, 2 rounds")
    parser.add_argument("--dtype", nargs="+", choices=list(TOLERANCE))
    parser.add_argument("--features", nargs="+", type=int, metavar="N", help="of products")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 3)
    return args


def main():
    args = parse()
    if not args.cpu:
        require_gpu()
    about_gpu = {} if args.cpu else {"gpu": gpu()}
    results = {"machine": machine(*INSTALLED, *PACKAGES) | about_gpu, "arguments": vars(args)}
    show_machine(results["machine"])
    cases = {part: PARTS[part][0](args) for part in args.parts}
    if args.cpu:
        return sum(finish(part, cases[part], args, results) for part in args.parts)
    start = time.perf_counter()
    prepare([case for part, found in cases.items() if part != "costs" for case in found], args.peers)
    print(f"kernels are in their caches after {time.perf_counter() - start:.0f} s", flush=True)
    with one_stream():
        return sum(finish(part, cases[part], args, results) for part in args.parts)


def finish(part, cases, args, results):
    """Measure, show and save a part. Returns in how many records numbattn does not run."""
    start, results[part] = time.perf_counter(), []
    for record in PARTS[part][1](cases, args):
        results[part].append(record)
        if args.json:
            save(args.json, results)  # after each, so that what was measured is not lost
    show_records(part, results[part])
    print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    return sum(OURS in record["failed"] for record in results[part])


if __name__ == "__main__":
    sys.exit(main())

"""Sequences that are split over devices (numbattn.distributed): how close they come to perfect scaling.

    python bench/ring.py --devices 2
    python bench/ring.py --devices 8 --seqlen 65536 1048576 --causal --engine nccl --json ring.json
    python bench/ring.py --engine simulated --seqlen 512 2048 --dtype float32 --heads 4 --heads-k 2
    NUMBA_NUM_THREADS=1 mpiexec -n 2 python bench/ring.py --engine mpi --seqlen 2048 --dtype float32

Engines: devices, all GPUs driven by one process; nccl, a process for each; and on CPUs, to try it out, mpi, under
mpiexec, and simulated, whose ranks take turns. "of n devices" is the time of one device over n times the ring's; for
ranks that take turns n is 1. A call begins when all ranks are ready, and ends when the last one has its results.
Medians of interleaved rounds.

Also: memory beyond the inputs, for the rank that takes most and for one device; how far results are from one device's;
their errors against float64, at a length that float64 can afford; whether two runs with deterministic=True are equal
bit for bit. One device has to hold a whole sequence.
Needs tabulate and tqdm.
"""

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from common import machine, sampled, save, show, show_machine
from tqdm import tqdm

import numbattn as na
from numbattn import distributed as nad
from numbattn.call.problem import DTYPES
from numbattn.distributed.pieces import UNIT

DTYPE = {dtype.name: dtype for dtype in DTYPES if dtype.name != "float64"}  # dtypes whose errors can be measured
PASSES = {"forward": 1, "forward + backward": 3.5}  # work in forwards
PARTS = "speed", "checks", "errors"
NAMES = "o", "dq", "dk", "dv"
SAMPLE_SECONDS = 0.05  # a sample repeats a call for about this long
PAUSE = 0.01
EXACT = 8192  # largest seqlen whose errors are measured: float64 takes its time


class Case(NamedTuple):
    causal: bool
    seqlen: int
    dtype: str
    head_dim: int
    heads: int
    heads_k: int

    def inputs(self, xp):
        """q, k, v, do: the same on all devices of a kind. Made head by head, as float32 takes twice the room."""
        rng = xp.random.default_rng(0)
        for heads in (self.heads, self.heads_k, self.heads_k, self.heads):
            x = xp.empty((1, heads, self.seqlen, self.head_dim), DTYPE[self.dtype])
            for of_head in x[0]:
                of_head[...] = rng.standard_normal(of_head.shape, dtype=np.float32).astype(x.dtype)
            yield x

    def tflop(self, of):
        """TFLOP of a pass, as the field counts: half of the products if it is causal."""
        return 4e-12 * self.heads * self.seqlen**2 * self.head_dim * PASSES[of] / (2 if self.causal else 1)


# --------------------------------------------------------------------------------------------------------------- ranks
@dataclass(frozen=True)
class World:
    """The ranks of a ring, in this process and in others, which all do the same."""

    ring: Any
    devices: Sequence[int] = ()  # CuPy's numbers of the devices that this process drives; none: a CPU
    at_once: int = 1  # how many ranks compute at a time

    @property
    def xp(self):
        return import_module("cupy" if self.devices else "numpy")

    @property
    def rank(self):
        """This process's rank; the first if all are in one process."""
        return getattr(self.ring, "rank", 0)

    def most(self, own):
        """The largest of all processes' numbers."""
        if not hasattr(self.ring, "rank"):
            return own
        row = self.xp.full((2 * UNIT, 1), float(own))  # a multiple of the unit: a split that any order allows
        return float(self.ring.join(row).max())

    def synchronise(self):
        """Wait for the devices of this process."""
        for device in self.devices:
            self.xp.cuda.Device(device).synchronize()

    def meet(self):
        """Wait until all ranks have come here, and their devices with them."""
        self.synchronise()
        self.most(0)

    def bytes_of(self, run):
        """What a run returns, and the most memory that a device has taken in a fresh pool of CuPy; 0 on CPUs."""
        if not self.devices:
            return run(), 0
        cuda, taken = self.xp.cuda, []
        pool = cuda.MemoryPool()
        with cuda.using_allocator(pool.malloc):
            result = run()
            self.synchronise()
        for device in self.devices:
            with cuda.Device(device):
                taken.append(pool.total_bytes())
        return result, max(taken)

    def release(self):
        """Give cached memory back."""
        for device in self.devices:
            with self.xp.cuda.Device(device):
                self.xp.get_default_memory_pool().free_all_blocks()


def simulated(options):
    return measure(World(nad.Simulated(options.devices)), options)


def devices(options):
    numbers = gpus(options.devices)
    return measure(World(nad.Devices(numbers), numbers, len(numbers)), options)


def nccl(options):
    from cupy.cuda.nccl import get_unique_id

    ranks, context = len(gpus(options.devices)), multiprocessing.get_context("spawn")
    with context.Pool(ranks) as pool:  # which ends all processes when one has failed
        work = partial(nccl_rank, ranks, get_unique_id(), options)
        return next(filter(None, list(pool.imap_unordered(work, range(ranks), chunksize=1))))


def nccl_rank(ranks, unique_id, options, rank):
    """A rank in its own process."""
    import cupy
    from cupy.cuda.nccl import NcclCommunicator

    cupy.cuda.Device(rank).use()
    return measure(World(nad.Nccl(NcclCommunicator(ranks, unique_id, rank)), [rank], ranks), options)


def mpi(options):
    from mpi4py import MPI

    return measure(World(nad.Mpi(MPI.COMM_WORLD), at_once=MPI.COMM_WORLD.size), options)


ENGINES = {"devices": devices, "nccl": nccl, "mpi": mpi, "simulated": simulated}
ON_CPUS = "mpi", "simulated"


def gpus(count):
    from peers import cupy, require_gpu

    require_gpu()
    found = cupy.cuda.runtime.getDeviceCount()
    if found < count:
        sys.exit(f"--devices: got {count}, this machine has {found}")
    return list(range(count))


# ---------------------------------------------------------------------------------------------------------------- runs
def forward(attention, arrays, causal):
    q, k, v, _ = arrays
    return (attention(q, k, v, causal=causal),)


def both(attention_vjp, arrays, causal, deterministic=False):
    """o, dq, dk, dv"""
    q, k, v, do = arrays
    o, backprop = attention_vjp(q, k, v, causal=causal)
    return o, *backprop(do, deterministic=deterministic)


def nothing():
    """What other ranks do while the first one computes alone."""


def on_first(world, run, *arguments):
    return partial(run, *arguments) if world.rank == 0 else nothing


def seconds_of(world, run, repetitions=1):
    """Seconds of a call, until the last rank has its results."""
    world.meet()
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    world.synchronise()
    return world.most(time.perf_counter() - start) / repetitions


def measure(world, options):
    """Records by part, in the process of the first rank, which also computes as one device; None in the others."""
    found = {part: [] for part in PARTS}
    about = options.dtype, options.head_dim, options.heads, options.heads_k
    cases = [Case(causal, n, *about) for causal, n in product(options.causal, options.seqlen)]
    for case in tqdm(cases, disable=True if world.rank else None):
        world.release()
        arrays = [*case.inputs(world.xp)]
        parts = [world.ring.split(x) for x in arrays]
        found["checks"].append(case._asdict() | checks(world, case, arrays, parts))
        found["speed"] += [case._asdict() | x for x in speed(world, case, arrays, parts, options.rounds)]
        del arrays, parts  # before new ones are made
    for causal in options.causal:
        world.release()
        case = Case(causal, min(EXACT, max(options.seqlen)), *about)
        found["errors"].append(case._asdict() | {"rms": errors(world, case)})
    if world.rank:
        return None
    return {part: [{"ranks": world.ring.ranks, "at once": world.at_once, **x} for x in records]
            for part, records in found.items()}  # fmt: skip


def speed(world, case, arrays, parts, rounds):
    """A record for each pass."""
    ring = world.ring
    for of, (one, of_ring) in {
        "forward": (on_first(world, forward, na.attention, arrays, case.causal),
                    partial(forward, partial(nad.attention, ring), parts, case.causal)),
        "forward + backward": (on_first(world, both, na.attention_vjp, arrays, case.causal),
                               partial(both, partial(nad.attention_vjp, ring), parts, case.causal)),
    }.items():  # fmt: skip
        timers = {}
        for name, run in (("one", one), ("ring", of_ring)):
            repetitions = math.ceil(SAMPLE_SECONDS / seconds_of(world, run))
            timers[name] = partial(seconds_of, world, run, repetitions)
        samples = sampled(timers, rounds, PAUSE)  # in random orders that are the same in all processes
        seconds = {name: float(np.median(found)) for name, found in samples.items()}
        rates = {name: case.tflop(of) / x for name, x in seconds.items()}
        yield {"pass": of, "seconds": seconds, "TFLOP/s": rates, "of devices": share_of(seconds, world.at_once)}


def share_of(seconds, devices):
    return seconds["one"] / seconds["ring"] / devices


def checks(world, case, arrays, parts):
    """Memory of both passes, how far the ring is from one device, and whether it repeats itself bit for bit."""
    run = partial(both, partial(nad.attention_vjp, world.ring), parts, case.causal)
    of_ring, taken = world.bytes_of(run)
    of_ring = joined(world, of_ring)
    one, taken_by_one = world.bytes_of(on_first(world, both, na.attention_vjp, arrays, case.causal))
    apart = None if world.rank else {name: rms(*pair) for name, *pair in zip(NAMES, of_ring, one)}
    del of_ring, one
    world.release()
    first, again = (joined(world, run(deterministic=True)) for _ in range(2))
    return {"bytes": {"one": taken_by_one, "ring": world.most(taken)}, "apart": apart,
            "equal": all(map(same_bits, first, again))}  # fmt: skip


def errors(world, case):
    """Relative RMS errors of one device and of the ring."""
    arrays = [*case.inputs(world.xp)]
    parts = [world.ring.split(x) for x in arrays]
    of_ring = joined(world, both(partial(nad.attention_vjp, world.ring), parts, case.causal))
    if world.rank:
        return None
    one = both(na.attention_vjp, arrays, case.causal)
    exact = both(na.attention_vjp, [x.astype(np.float64) for x in arrays], case.causal)
    return {peer: {name: rms(*pair) for name, *pair in zip(NAMES, found, exact)}
            for peer, found in (("one", one), ("ring", of_ring))}  # fmt: skip


def rms(got, want):
    """Relative RMS errors; head by head, as there may not be room for everything in float64."""
    squares = np.zeros(2)
    for x, y in zip(got[0], want[0], strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        squares += float(((x - y) ** 2).sum()), float((y**2).sum())
    return float(math.sqrt(squares[0] / squares[1]))


def joined(world, results):
    return [world.ring.join(parts) for parts in results]


def same_bits(x, y):
    return bool((x.view(np.uint8) == y.view(np.uint8)).all())


# -------------------------------------------------------------------------------------------------------------- script
def show_all(found, options):
    title = f"{options.dtype}, {options.heads} heads of {options.head_dim} on {options.heads_k}"
    rows = [{**about(x), "pass": x["pass"], **{f"{peer}, ms": 1e3 * s for peer, s in x["seconds"].items()},
             **{f"{peer}, TFLOP/s": rate for peer, rate in x["TFLOP/s"].items()}, "of n devices": x["of devices"]}
            for x in found["speed"]]  # fmt: skip
    show(f"{title}: speed", rows, [""] * 5 + [".2f", ".2f", ".3g", ".3g", ".2f"])
    rows = [{**about(x), **{f"{peer}, GB": 1e-9 * nbytes for peer, nbytes in x["bytes"].items()}, **x["apart"],
             "equal bits": x["equal"]} for x in found["checks"]]  # fmt: skip
    show(f"{title}: memory beyond the inputs; RMS of what results are from one device's", rows,
         [""] * 4 + [".2f", ".2f"] + [".1e"] * 4)  # fmt: skip
    rows = [{**about(x), **{f"{name}, {peer}": x["rms"][peer][name] for name in NAMES for peer in ("one", "ring")},
             "worst ratio": worst_ratio(x["rms"])} for x in found["errors"]]  # fmt: skip
    show(f"{title}: RMS errors against float64", rows, [""] * 4 + [".2e"] * 8 + [".2f"])


def about(record):
    return {"engine": record["engine"], "ranks": record["ranks"], "seqlen": record["seqlen"],
            "causal": record["causal"]}  # fmt: skip


def worst_ratio(errors):
    """The largest ratio of the ring's errors to one device's."""
    return max(errors["ring"][name] / errors["one"][name] for name in NAMES)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="how many; of mpi, mpiexec's number counts")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["devices", "nccl"])
    parser.add_argument("--seqlen", nargs="+", type=int, default=[16384, 65536, 262144], metavar="N")
    parser.add_argument("--causal", action="store_const", const=[True], default=[False, True], help="causal only")
    parser.add_argument("--full", action="store_const", dest="causal", const=[False], help="not causal only")
    parser.add_argument("--dtype", choices=DTYPE, default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="medians are of so many samples (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    options = parser.parse_args(arguments)
    if "mpi" in options.engine and len(options.engine) > 1:
        parser.error("--engine mpi is run by mpiexec, which the others are not")
    return options


def main(arguments=None):
    options = parse(arguments)
    found = {part: [] for part in PARTS}
    for engine in options.engine:
        of_engine = ENGINES[engine](options)
        if of_engine is None:
            return
        for part, records in of_engine.items():
            found[part] += [{"engine": engine, **record} for record in records]
    described = machine("numbattn", "numpy", "numba")
    if not set(options.engine) <= set(ON_CPUS):
        from peers import PACKAGES, gpu

        described = machine(*PACKAGES) | {"gpu": gpu()}
    show_machine(described)
    show_all(found, options)
    if options.json:
        save(options.json, {"machine": described, "options": vars(options), **found})


if __name__ == "__main__":
    main()

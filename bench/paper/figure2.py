"""The paper's Figure 2: bytes, not FLOPs, decide how long attention takes; block sizes; block sparsity.

    python bench/paper figure2 --json figure2.json
    python bench/paper figure2 --part block-size --no-ncu

left        FLOPs, bytes and time of the standard formula in CuPy and of numbattn, GPT-2 medium: batch 64, 16 heads of
            64, 1024 tokens, float16, forward + backward.
block-size  Bytes and time of forward by the number of queries that a block keeps, batch 16, 4096 tokens: the paper's
            blocks keep B_c keys and pass over queries, numbattn's do the opposite. BLOCK_SIZES are rows of the kernel
            for any GPU, which takes from 16 to 256, and of Hopper's.
sparsity    Time of forward + backward by the share of visible blocks, and that share of dense attention's time.

Bytes are predicted by io_model.py and measured by Nsight Compute in a separate process: of DRAM, of the L2 cache, and
from L2 to the multiprocessors. If ncu is missing, or has no permission, they are recorded as not measured. On an H200
DRAM alone seems to beat Theorem 2: see io_model.py. Memory that is filled outside of kernels is not counted.
Without a GPU, times are NumPy's in float32 at small sizes, and block sizes are predicted only. Needs tabulate and tqdm.
"""

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from common import machine, sampled, save, show, show_machine, standard_vjp
from peers import PACKAGES, cupy, gpu, one_stream
from timing import one_pass, why
from tqdm import tqdm

import numbattn as na
from numbattn.base import backends
from numbattn.cuda.kernels import hopper
from numbattn.cuda.kernels.any import forward as any_gpu
from numbattn.cuda.kernels.hopper.forward_tiles import Warpgroups
from numbattn.cuda.kernels.tables import Tiles
from numbattn.cuda.passes import Passes
from numbattn.cuda.words.spec import Route, everything
from paper import io_model
from paper.figure3 import SAMPLE_SECONDS, Clock, GpuClock, is_out_of_memory, numbers

BLOCK_SIZES = [  # at head_dim 64 none spills registers
    Tiles("mma", 16, 64, 32), Tiles("mma", 32, 64, 64), Tiles("mma", 64, 64, 128), Tiles("mma", 128, 64, 128),
    Tiles("mma", 256, 64, 256), Warpgroups(64, 2, 4, 3), Warpgroups(64, 3, 4, 4), Warpgroups(64, 4, 6, 5),
]  # fmt: skip
SPECS = {Tiles: any_gpu.SPEC, Warpgroups: hopper.forward.SPEC}
SHARES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
BLOCK = 128  # of block-sparse masks
PARTS = "left", "block-size", "sparsity"
SHAPES = {"left": (64, 16, 1024, 64), "block-size": (16, 16, 4096, 64), "sparsity": (16, 16, 4096, 64)}
SMALL = {"left": (1, 2, 256, 64), "block-size": (1, 2, 256, 64), "sparsity": (1, 2, 512, 64)}
METRICS = {  # Nsight Compute's names, by what they measure
    "dram": "dram__bytes.sum", "l2": "lts__t_bytes.sum", "l2 to SM": "l1tex__m_xbar2l1tex_read_bytes.sum",
}  # fmt: skip
NCU = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--print-units",
       "base", "--page", "raw", "--csv", "--metrics", ",".join(METRICS.values())]  # fmt: skip
NCU_SECONDS = 120  # for one process, compiling included


class Case(NamedTuple):
    peer: str  # "flash" or "standard"
    of: str  # a pass
    shape: tuple
    dtype: str
    block_size: int | None = None  # an index of BLOCK_SIZES
    share: float | None = None  # of visible blocks

    @property
    def row(self):
        return None if self.block_size is None else BLOCK_SIZES[self.block_size]

    @property
    def mask(self):
        """Random blocks of BLOCK x BLOCK and the diagonal; None without a share."""
        if self.share is None:
            return None
        n = -(-self.shape[2] // BLOCK)
        seen = np.random.default_rng(0).random((1, 1, n, n)) < self.share
        return na.BlockSparse(seen | np.eye(n, dtype=bool), (BLOCK, BLOCK))


# ------------------------------------------------------------------------------------------------------------- running
def always(row, backend="cupy", current=None):
    """A context in which numbattn's forward takes this row of tiles; None: the plan's own."""
    if row is None:
        return nullcontext()
    if current is None:
        from numbattn.cuda.launch import current_gpu as current
    spec = replace(SPECS[type(row)], tiles=lambda work: (row,))
    return patch.dict(backends.BACKENDS, {backend: Passes(current, forward=(Route(everything, (spec,)),))})


def run_of(xp, case):
    """A function that does the pass."""
    q, k, v, do = numbers(xp, math.prod(case.shape)).reshape(4, *case.shape).astype(case.dtype)
    mask = case.mask if case.mask is None else na.BlockSparse(xp.asarray(case.mask.blocks), case.mask.block_size)

    def standard():
        o, backprop = standard_vjp(q, k, v)
        return o, partial(backprop, do)

    def flash():
        o, saved = na.attention_forward(q, k, v, mask=mask)
        return o, partial(na.attention_backward, do, saved)

    return one_pass(standard if case.peer == "standard" else flash, case.of)


def seconds_of(clock, case, rounds):
    with always(case.row):
        run = run_of(clock.xp, case)
        run()  # compiles
        repetitions = max(1, math.ceil(SAMPLE_SECONDS / clock.seconds(run)))
        return float(np.median(sampled({case: partial(clock.seconds, run, repetitions)}, rounds)[case]))


# --------------------------------------------------------------------------------------------------------------- bytes
def measured_bytes(case):
    """{"dram": ..., "l2": ..., "l2 to SM": ..., "kernels": how many}, or {"not measured": why}."""
    if not shutil.which(NCU[0]):
        return {"not measured": "ncu is not installed"}
    command = [*NCU, sys.executable, Path(__file__).parent, "figure2", "--profiled", json.dumps(case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"not measured": f"ncu took longer than {NCU_SECONDS} s"}
    return read_counters(done.stdout) or {"not measured": complaint(done.stdout + done.stderr)}


def read_counters(text):
    """Sums over the kernels in ncu's CSV, whose second line has the units; None if it has measured nothing."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels = list(csv.DictReader(lines))[1:]
    if not kernels or not all(metric in kernels[0] for metric in METRICS.values()):
        return None
    sums = {name: sum(float(kernel[metric].replace(",", "")) for kernel in kernels) for name, metric in METRICS.items()}
    return sums | {"kernels": len(kernels)}


def complaint(text):
    """What ncu says when it cannot, or the last line of its process."""
    lines = text.strip().splitlines() or ["ncu says nothing"]
    return next((line for line in lines if line.startswith("==ERROR==")), lines[-1])


def profiled(text):
    """In ncu's process: one pass between the marks of the profiler."""
    case = Case(*json.loads(text))
    with one_stream() as stream, always(case.row):
        run = run_of(cupy, case)
        run()
        stream.synchronize()
        cupy.cuda.runtime.profilerStart()
        run()
        stream.synchronize()
        cupy.cuda.runtime.profilerStop()


def predicted_bytes(case, cc):
    """What io_model.py predicts, for the compute capability whose plan is taken."""
    shape = io_model.Shape(*case.shape, np.dtype(case.dtype).itemsize)
    if case.peer == "standard":
        return io_model.predicted(shape, "standard", case.of)
    share = 1.0 if case.mask is None else float(case.mask.blocks.mean())
    return io_model.predicted(shape, "flash", case.of, cc=cc, row=case.row, share=share, mask=case.mask)


# --------------------------------------------------------------------------------------------------------------- parts
def cases_of(part, shape, dtype):
    if part == "left":
        return [Case(peer, "both", shape, dtype) for peer in ("standard", "flash")]
    if part == "block-size":
        return [Case("flash", "forward", shape, dtype, block_size=number) for number in range(len(BLOCK_SIZES))]
    return [Case("flash", "both", shape, dtype, share=share) for share in (None, *SHARES)]


def record_of(part, case, clock, args):
    """A case's record; seconds are None if it does not run, and `failed` says why."""
    record = {"part": part, **case._asdict(), "seconds": None, "failed": None}
    if case.row:
        record |= {"tile_m": case.row.tile_m, "tile_n": case.row.tile_n, "unit": case.row.unit}
    if case.mask is not None:
        record["visible"] = float(case.mask.blocks.mean())
    if case.row and clock.xp is np:
        record["failed"] = "tiles are a GPU's"
    else:
        try:
            record["seconds"] = seconds_of(clock, case, args.rounds)
        except Exception as error:  # not running is a result, too
            record["failed"] = "out of memory" if is_out_of_memory(error) else why(error)
        clock.release()
    record["predicted"] = predicted_bytes(case, args.cc)
    wanted = args.ncu and clock.xp is not np and record["seconds"] and part != "sparsity"
    record["measured"] = measured_bytes(case) if wanted else {"not measured": "not asked for"}
    record["predicted / measured"] = {name: record["predicted"][name] / record["measured"][name]
                                      for name in METRICS if record["measured"].get(name)}  # fmt: skip
    return record


def with_ideal(records):
    """Add the visible share of the dense time to the records by sparsity."""
    dense = next((x["seconds"] for x in records if x["part"] == "sparsity" and x["share"] is None), None)
    return [x | {"ideal": dense * x["visible"]} if dense and x.get("visible") else x for x in records]


def show_records(records):
    for part in dict.fromkeys(x["part"] for x in records):
        rows = [{
            "": x["peer"] if part == "left" else "dense" if part == "sparsity" and x["share"] is None else "",
            "unit": x.get("unit"), "block": x.get("tile_m"), "visible": x.get("visible"),
            "ms": x["seconds"] and 1e3 * x["seconds"], "ideal ms": x.get("ideal") and 1e3 * x["ideal"],
            "GFLOP": x["predicted"]["flops"] / 1e9, "DRAM, GB": scaled(x["measured"].get("dram")),
            "DRAM, predicted": scaled(x["predicted"]["dram"]), "L2 to SM, GB": scaled(x["measured"].get("l2 to SM")),
            "L2 to SM, predicted": scaled(x["predicted"]["l2 to SM"]),
        } for x in records if x["part"] == part]  # fmt: skip
        formats = ["", "", "", ".2f", ".3f", ".3f", ".1f", *[".3g"] * 4]
        kept = [i for i, key in enumerate(rows[0]) if any(row[key] not in (None, "") for row in rows)]
        rows = [{key: value for i, (key, value) in enumerate(row.items()) if i in kept} for row in rows]
        shape = next(x["shape"] for x in records if x["part"] == part)
        show(f"{part}: batch {shape[0]}, {shape[1]} heads of {shape[3]}, seqlen {shape[2]}", rows,
             [formats[i] for i in kept])
    for reason in dict.fromkeys(x["failed"] or x["measured"].get("not measured") for x in records):
        if reason:
            print(reason)


def scaled(x):
    return None if x is None else x / 1e9


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-ncu", action="store_false", dest="ncu", help="times and predictions only")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, which are taken there anyway")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    parser.add_argument("--profiled", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(clock, args, described):
    show_machine(described)
    on_gpu = clock.xp is not np
    dtype, shapes = ("float16" if on_gpu else "float32"), (SMALL if args.small or not on_gpu else SHAPES)
    cases = [(part, case) for part in args.part for case in cases_of(part, shapes[part], dtype)]
    records = with_ideal([record_of(*case, clock, args) for case in tqdm(cases, disable=None, leave=False)])
    show_records(records)
    if args.json:
        save(args.json, {"machine": described, "arguments": vars(args), "records": records})


def main(arguments=None):
    args = parse(arguments)
    if args.profiled:
        return profiled(args.profiled)
    described, args.cc = machine(*PACKAGES), (9, 0)
    if cupy is None or not cupy.is_available():
        return run(Clock(), args, described)
    described["gpu"] = gpu()
    args.cc = tuple(map(int, described["gpu"]["compute capability"].split(".")))
    with one_stream():
        return run(GpuClock(), args, described)

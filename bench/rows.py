"""The share of the tensor cores' peak that rows of the tables in kernels/hopper/forward_tiles.py reach.

    python bench/rows.py --head-dim 128
    python bench/rows.py --head-dim 64 --row 64,4,6,5 --row 128,3,3,5 --mask none causal --seqlen 2048 16384

Time is counted in cycles of the multiprocessors. Unlike TFLOP/s these do not change with a GPU's temperature and power:
half a percent shows. Work is counted as in gpu.py, for the visible part.
Needs tabulate and tqdm. A row is compiled when first used, which takes a few seconds.
"""

import argparse
import math
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
from cases import make_case
from common import machine, sampled, show, show_machine
from features import make_masks
from peers import (
    HALF,
    PACKAGES,
    Replay,
    cupy,
    dropout_of,
    event_seconds,
    gpu,
    one_stream,
    release,
    require_gpu,
)
from timing import SAMPLE_SECONDS, progress, why

import numbattn as na
from numbattn.base import backends
from numbattn.cuda.kernels.hopper.forward import SPEC
from numbattn.cuda.kernels.hopper.forward_tiles import CELLS, LONG, NARROW, USUAL, Warpgroups
from numbattn.cuda.launch import current_gpu
from numbattn.cuda.passes import Passes
from numbattn.cuda.words.spec import Route, everything

PEAK = 4096  # FLOP per cycle of a multiprocessor's tensor cores, for 2-byte elements
CALLS = 5  # in a graph
MASKS = ["none", "causal", "Window(1023, 0)", "random 10%", "random 20%", "random 50%", "random 100%", "local_global"]
TABLES = USUAL, LONG, NARROW, CELLS
CLOCKS = r"""
extern "C" __global__ void clocks(long long* found) {
    unsigned multiprocessor;
    asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    if (threadIdx.x == 0) found[multiprocessor] = clock64();
}
"""


def clocks(kernel, multiprocessors):
    """The counters of all multiprocessors, at this point of the stream."""
    found = cupy.zeros(multiprocessors, np.int64)
    kernel((4 * multiprocessors,), (512,), (found,))  # four blocks fill a multiprocessor
    return found


def cycles(read_clocks, replay, repetitions):
    """Cycles of one call, the mean over the multiprocessors."""
    before = read_clocks()
    for _ in range(repetitions):
        replay()
    return float((read_clocks() - before).mean()) / repetitions / CALLS


def always(row):
    """A context in which every plan takes this row."""
    spec = replace(SPEC, tiles=lambda work: (row,))
    return patch.dict(backends.BACKENDS, cupy=Passes(current_gpu, forward=(Route(everything, (spec,)),)))


def prepare(arrays, row, options):
    """A graph of calls, and how often a sample replays it."""
    with always(row):
        replay = Replay(lambda: [na.attention(*arrays, **options) for _ in range(CALLS)])
    return replay, math.ceil(SAMPLE_SECONDS / event_seconds(replay))


def shares(args, rows, multiprocessors):
    """One record for each mask and seqlen: the share of the peak by row, and why others do not run."""
    read_clocks = partial(clocks, cupy.RawKernel(CLOCKS, "clocks"), multiprocessors)
    records = []
    masks = {seqlen: make_masks(seqlen, block_size=128) | {"causal": (None, 1.0)} for seqlen in args.seqlen}
    for seqlen, mask in progress(product(args.seqlen, args.mask)):
        release()
        case = make_case(args.dtype, args.head_dim, mask == "causal", seqlen, "field")
        shown, visible = masks[seqlen][mask]
        options = {"causal": case.causal, "mask": shown, "dropout": dropout_of(args.dropout)}
        q, k, v, _ = case.inputs()
        timers, failed = {}, {}
        for row in rows:
            try:
                timers[row] = partial(cycles, read_clocks, *prepare((q, k, v), row, options))
            except Exception as error:  # too much shared memory, for example
                failed[row] = why(error)
        flop = 1e12 * case.tflop("forward") * visible
        reached = {row: flop / (PEAK * multiprocessors * np.median(found))
                   for row, found in sampled(timers, args.rounds).items()}
        records.append({"mask": mask, "seqlen": seqlen, "shares": reached, "failed": failed})
    return records


def show_shares(args, rows, records):
    table = [{"seqlen": record["seqlen"], "mask": record["mask"],
              **{name_of(row): record["shares"].get(row) for row in rows}} for record in records]
    dropout = f", dropout {args.dropout}" if args.dropout else ""
    show(f"{args.dtype}, forward, head_dim {args.head_dim}{dropout}: share of the tensor cores' peak, by "
         "tile_n x consumers (stages, q_stages)", table, ["", ""] + [".3f"] * len(rows))
    for record in records:
        for row, reason in record["failed"].items():
            print(f"{name_of(row)}, {record['mask']}, seqlen {record['seqlen']}: {reason}")


def name_of(row):
    return f"{row.tile_n} x {row.consumers} ({row.stages}, {row.q_stages})"


def row_of(text):
    return Warpgroups(*map(int, text.split(",")))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=USUAL, default=128)
    parser.add_argument("--row", type=row_of, action="append", metavar="TILE_N,CONSUMERS,STAGES,Q_STAGES",
                        help="default: all that the tables have for this head_dim")
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=MASKS[:3])
    parser.add_argument("--seqlen", nargs="+", type=int, metavar="N", default=[512, 16384])
    parser.add_argument("--dtype", choices=HALF, default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--rounds", type=int, default=3, help="medians are of so many samples (default: 3)")
    return parser.parse_args()


def main():
    args = parse()
    require_gpu()
    rows = args.row or list(dict.fromkeys(table[args.head_dim] for table in TABLES if args.head_dim in table))
    described = machine(*PACKAGES) | {"gpu": gpu()}
    show_machine(described)
    with one_stream():
        show_shares(args, rows, shares(args, rows, described["gpu"]["multiprocessors"]))


if __name__ == "__main__":
    main()

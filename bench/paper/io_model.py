"""Bytes and FLOPs of attention: what numbattn's plan, the standard formula and the paper's theorems predict.

    python bench/paper io_model
    python bench/paper io_model --batch 16 --heads 16 --seqlen 4096 --head-dim 128 --cc 8.0 --json io.json

A kernel that keeps a tile of queries reads K and V once for each tile: N^2 d / tile_m go from L2 to the
multiprocessors, the paper's Theta(N^2 d^2 / M) (Theorem 2; for backward Theorem 5), with M the memory of tiles.
The paper's GPUs had 40 MB of L2 and the paper counts accesses to HBM; an H200's 50 MB hold K and V of all active heads,
so that the second reader of a tile finds it there. Its DRAM traffic is the arrays themselves and seems to beat Theorem
2: the theorem's slow memory is the L2 of such a GPU. Both are predicted, and figure2.py measures both.

Small things are left out: tables of masks, tensor maps, the zeros that sums of dq start from. Runs without a GPU.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
from common import machine, save, show

from numbattn.cuda.passes import plans
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.views import without_memory

SUM = 4  # bytes of a float32, in row statistics and sums of dq
# common.standard_vjp, array by array as NumPy and CuPy run it: how many matrices are read, and written
FORWARD_N2 = np.array([0 + 1 + 1 + 1 + 1 + 1 + 1, 1 + 0 + 1 + 1 + 0 + 1 + 0])  # Q K^T, max, -, exp, sum, /, P V
FORWARD_ND = np.array([1 + 2 + 1, 1 + 0 + 1])  # scale Q, its product with K, O = P V
BACKWARD_N2 = np.array([0 + 2 + 1 + 1 + 2 + 2 + 2 + 1, 1 + 1 + 0 + 1 + 1 + 1 + 1])  # dP, P dP, sum, -, dS, dQ, dK, dV
BACKWARD_ND = np.array([2 + 1 + 1 + 1, 0 + 1 + 1 + 1])  # dP, dQ, dK, dV
PASSES = "forward", "backward", "both"


class Shape(NamedTuple):
    """The shape of q, k and v, and the bytes of an element."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    itemsize: int = 2

    @property
    def matrices(self):
        return self.batch * self.heads

    @property
    def nd(self):
        """Bytes of an N x d matrix."""
        return self.seqlen * self.head_dim * self.itemsize


class Bytes(NamedTuple):
    """Bytes that a kernel's multiprocessors read from L2 and write to it, and DRAM's if every array is moved once."""

    kernel: str
    read: int
    written: int
    dram: int


def flops(shape, of, recomputes=False, share=1.0):
    """FLOPs of the matrix products: 2 in forward, 4 in backward, and there S once more if P is recomputed."""
    products = {"forward": 2, "backward": 4 + recomputes, "both": 6 + recomputes}[of]
    return products * 2 * shape.matrices * shape.seqlen**2 * shape.head_dim * share


def standard_bytes(shape, of):
    """Bytes read and written by the standard formula, whose N x N matrices fit into no cache. Matrix products read
    their tiles from L2 more than once, which is not counted."""
    n2 = {"forward": FORWARD_N2, "backward": BACKWARD_N2, "both": FORWARD_N2 + BACKWARD_N2}[of]
    nd = {"forward": FORWARD_ND, "backward": BACKWARD_ND, "both": FORWARD_ND + BACKWARD_ND}[of]
    return (shape.matrices * (n2 * shape.seqlen**2 * shape.itemsize + nd * shape.nd)).tolist()


def flash_bytes(shape, of, cc=(9, 0), row=None, share=1.0, mask=None):
    """Bytes of each kernel of numbattn's plan, `share` of whose pairs of tiles are visited.

    `row` stands in for forward's tiles, as rows.always does.
    """
    x = without_memory(shape[:4], np.dtype(f"float{8 * shape.itemsize}"))
    found = dict(zip(PASSES, plans(DEVICES[cc], x, x, x, mask=mask)))
    chosen = [plan for name, plan in found.items() if of in (name, "both")]
    return [kernel_bytes(shape, step.key.name, row if row and step.key.name.endswith("forward") else step.tiles, share,
                         adds_dq=any(step.key.name == "round_dq" for step in plan.steps))
            for plan in chosen for step in plan.steps]  # fmt: skip


def kernel_bytes(shape, kernel, tiles, share, adds_dq=False):
    """Bytes of a kernel by its name. What it keeps it reads once, the other side's tiles once for each of its own."""
    nd, row, sums = shape.nd, SUM * shape.seqlen, SUM * shape.seqlen * shape.head_dim
    keys_kept = 2 * nd, 2 * nd, 2 * nd + 2 * row, adds_dq * sums, tiles.tile_n  # K, V; dK, dV; Q, dO; dQ
    # Read and written once; read and written for each tile that is kept; that tile's number of rows
    read, written, read_again, written_again, tile = {
        "forward": (nd, nd + row, 2 * nd, 0, tiles.tile_m),                     # Q; O, lse; K, V
        "delta": (2 * nd + row, 2 * row, 0, 0, 1),                              # O, dO, lse; delta, lse_log2
        "backward_kv": keys_kept,
        "backward": keys_kept,
        "backward_q": (2 * nd + 2 * row, nd, 2 * nd, 0, tiles.tile_m),          # Q, dO; dQ; K, V
        "round_dq": (sums, nd, 0, 0, 1),
        "tile_states": (0, 0, 0, 0, 1),
    }[kernel.removeprefix("hopper_").removeprefix("mma_")]  # fmt: skip
    visits, matrices = math.ceil(shape.seqlen / tile) * share, shape.matrices
    return Bytes(kernel, round(matrices * (read + visits * read_again)),
                 round(matrices * (written + visits * written_again)),
                 matrices * (read + written + read_again + written_again))  # fmt: skip


def theorem_bytes(shape, memory, share=1.0):
    """N^2 d^2 / M, without its constant, plus N d (Proposition 4), for a memory of so many bytes."""
    n, d, itemsize = shape.seqlen, shape.head_dim, shape.itemsize
    return shape.matrices * itemsize * (n * d + n**2 * d**2 * itemsize / memory * share)


def predicted(shape, peer, of, **options):
    """FLOPs and bytes of a peer, "flash" or "standard", as records have them."""
    if peer == "standard":
        read, written = standard_bytes(shape, of)
        return {"flops": flops(shape, of), "dram": read + written, "l2 to SM": read, "l2": read + written}
    kernels, share = flash_bytes(shape, of, **options), options.get("share", 1.0)
    read, written, dram = (sum(getattr(x, what) for x in kernels) for what in ("read", "written", "dram"))
    return {"flops": flops(shape, of, recomputes=True, share=share), "dram": dram, "l2 to SM": read,
            "l2": read + written, "kernels": [x._asdict() for x in kernels]}


def records_of(shape, cc):
    """Both peers, pass by pass."""
    theorem = theorem_bytes(shape, DEVICES[cc].shared)
    return [{"peer": peer, "pass": of, **shape._asdict(), "theorem": theorem,
             **predicted(shape, peer, of, **({"cc": cc} if peer == "flash" else {}))}
            for of in PASSES for peer in ("standard", "flash")]


def show_records(records):
    rows = [{"pass": x["pass"], "": x["peer"], "GFLOP": x["flops"] / 1e9, "DRAM, GB": x["dram"] / 1e9,
             "L2 to SM, GB": x["l2 to SM"] / 1e9, "L2, GB": x["l2"] / 1e9} for x in records]
    title = "Predicted: batch {batch}, {heads} heads of {head_dim}, seqlen {seqlen}, {itemsize} bytes an element"
    show(title.format(**records[0]), rows, ["", "", ".1f", ".2f", ".2f", ".2f"])


def cc_of(text):
    return tuple(map(int, text.split(".")))


def add_shape(parser, batch=64, heads=16, seqlen=1024, head_dim=64):
    """The options of a shape, by default the paper's of Figure 2: GPT-2 medium."""
    for name, default in (("batch", batch), ("heads", heads), ("seqlen", seqlen), ("head-dim", head_dim)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--cc", type=cc_of, default=(9, 0), help="compute capability, as in 8.0 (default: 9.0)")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    args = parser.parse_args(arguments)
    records = records_of(Shape(args.batch, args.heads, args.seqlen, args.head_dim), args.cc)
    show_records(records)
    if args.json:
        save(args.json, {"machine": machine("numbattn"), "arguments": vars(args), "records": records})

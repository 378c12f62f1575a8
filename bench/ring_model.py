"""A model on paper of a causal sequence that is split over many GPUs: kernels against messages.

    python bench/ring_model.py
    python bench/ring_model.py --seqlen 262144 --heads-k 32 --between 25 --tflops 600 500

Only the rates are measured: TFLOP/s of kernels on one GPU, by seqlen (results/speed.json), and GB/s that a GPU receives
from others in its node, by NVLink, or in other nodes. In zigzag each of n GPUs with T tokens computes n blocks of
T x T / 2 scores, one after the other, while the next block's keys and the last block's gradients arrive. A step takes
as long as the slower of the two, on the slowest GPU.

ring: keys go from each GPU to every other one, most of them to another node. two levels: keys reach each node once and
then go around in it. Ulysses in a node: its GPUs exchange tokens for heads, which nothing hides, and each is in a ring
of the nodes, for its own heads.
Needs tabulate.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import machine, save, show

SPEED = Path(__file__).resolve().parent / "results/speed.json"
PRODUCTS = {"forward": 2, "backward": 5}  # products of matrices
ELEMENT = {"forward": 2, "backward": 2 + 4}  # bytes for one of k or v: itself, and its gradient in float32


class Model(NamedTuple):
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int
    node: int  # GPUs in a node
    within: float  # bytes/s that a GPU receives from its node,
    between: float  # and from other nodes
    start: float  # seconds of a step before its kernel and its message begin
    flops: dict  # by pass: lengths, and FLOP/s at these

    def rate(self, of, length):
        """FLOP/s of a kernel."""
        lengths, rates = self.flops[of]
        return float(np.interp(np.log2(length), np.log2(lengths), rates))

    def one_gpu(self, of):
        """Seconds of the whole sequence on one GPU."""
        return PRODUCTS[of] * self.heads * self.seqlen**2 * self.head_dim / self.rate(of, self.seqlen)

    def kernel(self, of, tokens, heads):
        """Seconds of a step without its messages: a block of T x T / 2 scores for each of the heads."""
        return self.start + PRODUCTS[of] * heads * tokens**2 * self.head_dim / self.rate(of, tokens)

    def message(self, of, tokens):
        """Bytes of keys and values, and in the backward pass of gradients, of so many tokens."""
        return 2 * self.heads_k * tokens * self.head_dim * ELEMENT[of]

    def hides_from(self, of, bandwidth):
        """Tokens per GPU from which on a step's kernel takes longer than its message."""
        flop, nbytes = PRODUCTS[of] * self.heads * self.head_dim, self.message(of, 1)  # both for T = 1
        return nbytes / bandwidth * self.rate(of, self.seqlen) / flop

    # -------------------------------------------------------------------------------------------------------- schemes
    def ring(self, of, gpus):
        """Seconds."""
        tokens = self.seqlen / gpus
        bandwidth = self.within if gpus <= self.node else self.between
        return steps(gpus, self.kernel(of, tokens, self.heads), self.message(of, tokens) / bandwidth)

    def two_levels(self, of, gpus):
        tokens, node = self.seqlen / gpus, min(gpus, self.node)
        nbytes = self.message(of, tokens)
        of_node = steps(node, self.kernel(of, tokens, self.heads), nbytes / self.within)
        return steps(gpus // node, of_node, nbytes / self.between)  # a GPU receives the keys of one GPU of each node

    def ulysses(self, of, gpus):
        tokens, node = self.seqlen / gpus, min(gpus, self.node)
        rows = 2 * self.heads + 2 * self.heads_k  # of q, k, v and o; of dO, dQ, dK and dV
        exchanged = (node - 1) / node * rows * tokens * self.head_dim * ELEMENT["forward"] / self.within
        step = self.kernel(of, node * tokens, self.heads / node)
        return exchanged + steps(gpus // node, step, self.message(of, tokens) / self.between)


SCHEMES = {"ring": Model.ring, "two levels": Model.two_levels, "Ulysses in a node": Model.ulysses}


def steps(count, step, message):
    """Seconds of `count` steps; a message arrives during all of them but the last."""
    return step + (count - 1) * max(step, message)


def measured(head_dim):
    """FLOP/s by pass and length, of attention without a mask. A long block counts as fast as the fastest shorter one:
    what a hot GPU loses is not due to the length."""
    found = {}
    for record in json.loads(SPEED.read_text())["speed"]:
        if record["head_dim"] == head_dim and not record["causal"]:
            found.setdefault(record["pass"], []).append((record["seqlen"], 1e12 * record["tflops"]["numbattn"]))
    if not found:
        raise SystemExit(f"--head-dim: got {head_dim}, which {SPEED.name} does not have: --tflops tells them")
    by_pass = {of: tuple(zip(*sorted(rates))) for of, rates in found.items()}
    return {of: (lengths, np.maximum.accumulate(rates).tolist()) for of, (lengths, rates) in by_pass.items()}


def records_of(model, counts):
    """A record for each pass, number of GPUs and scheme: seconds, and the share of perfect scaling."""
    for of in PRODUCTS:
        for gpus in counts:
            tokens = model.seqlen / gpus
            kernel, nbytes = model.kernel(of, tokens, model.heads), model.message(of, tokens)
            common = {"pass": of, "gpus": gpus, "tokens": tokens, "kernel": kernel, "within": nbytes / model.within,
                      "between": nbytes / model.between}  # fmt: skip
            for scheme, seconds in SCHEMES.items():
                taken = seconds(model, of, gpus)
                yield common | {"scheme": scheme, "seconds": taken, "share": model.one_gpu(of) / (gpus * taken)}


def show_all(model, records):
    rows = [{**{name: x[name] for name in ("pass", "gpus", "tokens")},
             **{f"{name}, us": 1e6 * x[name] for name in ("kernel", "within", "between")},
             "scheme": x["scheme"], "s": x["seconds"], "of n GPUs": x["share"]} for x in records]  # fmt: skip
    title = (f"A model: {model.seqlen} causal tokens, {model.heads} heads of {model.head_dim} on {model.heads_k}; "
             "us: a block's kernel, and the message of its keys within a node and between nodes")  # fmt: skip
    show(title, rows, ["", "", ".0f", ".0f", ".0f", ".0f", "", ".4g", ".2f"])


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=1 << 20, metavar="N")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1 << n for n in range(3, 11)], metavar="N")
    parser.add_argument("--node", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tflops", nargs=2, type=float, metavar=("FORWARD", "BACKWARD"),
                        help="of kernels of any length (default: as measured, by length)")  # fmt: skip
    parser.add_argument("--within", type=float, default=278, metavar="GB/s",
                        help="default: 278, measured between two H200 by NCCL; peer copies: 370")  # fmt: skip
    parser.add_argument("--between", type=float, default=50, metavar="GB/s", help="default: 50, InfiniBand's")
    parser.add_argument("--start", type=float, default=10, metavar="MICROSECONDS",
                        help="of a step, before its kernel runs (default: 10, assumed)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    args = parser.parse_args(arguments)
    if args.heads_k % args.node:
        parser.error(f"--heads-k: got {args.heads_k}, expected a multiple of --node: Ulysses shares them out")
    if unequal := [count for count in args.gpus if count > args.node and count % args.node]:
        parser.error(f"--gpus: got {unequal[0]}, expected whole nodes of {args.node}")
    return args


def main(arguments=None):
    args = parse(arguments)
    told = {of: ([1], [1e12 * rate]) for of, rate in zip(PRODUCTS, args.tflops or ())}
    model = Model(args.seqlen, args.heads, args.heads_k, args.head_dim, args.node, 1e9 * args.within,
                  1e9 * args.between, 1e-6 * args.start, told or measured(args.head_dim))  # fmt: skip
    records = list(records_of(model, args.gpus))
    show_all(model, records)
    hides = [{"pass": of, "link": link, "tokens": model.hides_from(of, getattr(model, link))}
             for of in PRODUCTS for link in ("within", "between")]  # fmt: skip
    show("Tokens a GPU from which a step of the ring hides its message", hides, ["", "", ".0f"])
    if args.json:
        save(args.json, {"machine": machine("numbattn"), "arguments": vars(args), "hides": hides, "records": records})


if __name__ == "__main__":
    main()

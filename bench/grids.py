"""Neighbourhoods on grids, forward and backward, next to dense attention on the same tokens.

    python bench/grids.py
    python bench/grids.py --quick
    python bench/grids.py --dtype float32 --case image --json grids.json

Cases are those of NATTEN's paper, 24 heads of 128: an image of FLUX, a video of Hunyuan, each with windows for every
token and with windows for groups of neighbours, `stride`. "rate" is what pairs of boxes that are not empty take, in
TFLOP/s, over that of dense attention; "visible" the share of their pairs of tokens that are seen. "bias" adds a table
by offset, with its gradient. Some rows of o are compared with float64 before anything is timed. NATTEN itself is not
run: it is built from source, for torch.
Needs tabulate and tqdm.
"""

import argparse
import math
from itertools import product
from typing import NamedTuple

import numpy as np
from common import machine, save, show, show_machine
from peers import DTYPE, PACKAGES, cupy, gpu, one_stream, release, require_gpu
from small import error_of, show_failed, timed
from timing import progress

import numbattn as na
from numbattn.cuda.plan import tier
from numbattn.cuda.words.tiers import TIERS
from numbattn.grids.boxes import EMPTY, boxes_of

GRID, DENSE = "grid", "dense"
HEADS, HEAD_DIM = 24, 128
CHECKED = 64  # rows that are compared
CASES = {  # shape, window, strides by name
    "image": ((256, 256), (80, 80), {"": (1, 1), "strided": (16, 16)}),
    "video": ((30, 48, 80), (18, 24, 24), {"": (1, 1, 1), "strided": (16, 8, 8)}),
}
QUICK = {"image": ((64, 64), (20, 20), {"": (1, 1), "strided": (8, 8)})}
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}  # of the largest element
PRODUCTS = {"forward": 2, "backward": 5}


class Case(NamedTuple):
    name: str
    strided: str
    dtype: str
    shape: tuple
    window: tuple
    stride: tuple

    @property
    def tokens(self):
        return math.prod(self.shape)

    def mask(self):
        return na.Grid(self.shape).window(self.window, stride=self.stride)

    def shown(self, tokens):
        """Which keys these tokens see, by the rule."""
        shown = np.ones((len(tokens), *self.shape), np.bool_)
        for axis, (n, window, stride) in enumerate(zip(self.shape, self.window, self.stride)):
            at, keys = np.unravel_index(tokens, self.shape)[axis], np.arange(n)
            leader = np.minimum(at // stride * stride + stride // 2, n - 1)
            first = np.clip(leader - window // 2, 0, n - window)[:, None]
            seen = (first <= keys) & (keys < first + window)
            shown &= seen.reshape(len(tokens), *(n if other == axis else 1 for other in range(len(self.shape))))
        return shown.reshape(len(tokens), -1)

    def arrays(self):
        rng = cupy.random.default_rng(0)
        return [rng.standard_normal((HEADS, self.tokens, HEAD_DIM), np.float32).astype(DTYPE[self.dtype])
                for _ in "qkvd"]  # fmt: skip

    def shares(self):
        """Of all pairs of tokens: those in pairs of boxes that are not empty, and those that are seen."""
        boxes = boxes_of(self.mask()._windows.parts)
        in_boxes = float((boxes.states != EMPTY).mean()) * (boxes.tokens.size / self.tokens) ** 2
        return in_boxes, math.prod(self.window) / self.tokens


def cases(table, names, dtypes):
    for name, dtype in product(names, dtypes):
        shape, window, strides = table[name]
        for strided, stride in strides.items():
            yield Case(name, strided, dtype, shape, window, stride)


def makers_of(case):
    """Makers of runs by pass and peer, and the check of o."""
    q, k, v, do = case.arrays()
    mask, rng = case.mask(), np.random.default_rng(1)
    rows = np.sort(rng.choice(case.tokens, CHECKED, replace=False))
    S = np.einsum("md,nd->mn", *(x.get().astype(np.float64) for x in (q[0, rows], k[0]))) / math.sqrt(HEAD_DIM)
    P = np.exp(np.where(case.shown(rows), S, -np.inf) - S.max(1, keepdims=True))
    expected = P / P.sum(1, keepdims=True) @ v[0].get().astype(np.float64)
    table = cupy.zeros((HEADS, *(2 * window - 1 for window in case.window)), np.float32)
    bias = na.Grid(case.shape).relative_bias(table, stride=case.stride)

    def backward(**options):
        _, backprop = na.attention_vjp(q, k, v, **options)
        return lambda: backprop(do)

    makers = {
        ("forward", GRID): lambda: lambda: (na.attention(q, k, v, mask=mask),),
        ("forward", DENSE): lambda: lambda: (na.attention(q, k, v),),
        ("backward", GRID): lambda: backward(mask=mask),
        ("backward", DENSE): backward,
        ("backward", "bias"): lambda: backward(mask=mask, score=bias),
    }

    def check(which, result):
        return error_of([result[0][0, rows].get()], [expected]) if which == ("forward", GRID) else None

    return makers, check


def measured(chosen, rounds):
    """A record for each case and pass: seconds by peer, the share of dense attention's rate, and what is visible."""
    for case in progress(chosen):
        release()
        seconds, errors, failed = timed(*makers_of(case), TOLERANCE[case.dtype], rounds)
        in_boxes, visible = case.shares()
        for of in PRODUCTS:
            found = {name: value for (pass_, name), value in seconds.items() if pass_ == of}
            rate = in_boxes * found[DENSE] / found[GRID] if {GRID, DENSE} <= found.keys() else None
            yield {**case._asdict(), "pass": of, "seconds": found, "rate": rate, "visible": visible / in_boxes,
                   "errors": {name: value for (pass_, name), value in errors.items() if pass_ == of},
                   "failed": {name: why for (pass_, name), why in failed.items() if pass_ == of}}  # fmt: skip


def show_records(records):
    rows = []
    for record in records:
        about = {key: record[key] for key in ("name", "strided", "dtype", "pass")}
        rows.append({**about, **{name: 1e3 * seconds for name, seconds in record["seconds"].items()},
                     "rate": record["rate"], "visible": record["visible"]})  # fmt: skip
    show("Milliseconds", rows, ".3g")
    show_failed(records, "{name} {strided}, {dtype}, {pass}")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=list(TOLERANCE), default=["bfloat16"])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tier", choices=TIERS, default=TIERS[-1],
                        help="no later kernels than these: mma for those of Ampere on Hopper")
    parser.add_argument("--quick", action="store_true", help="a small image, 2 rounds")
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 3)
    return args


def main():
    args = parse()
    require_gpu()
    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    with one_stream(), tier(args.tier):
        chosen = cases(QUICK, QUICK, args.dtype) if args.quick else cases(CASES, args.case, args.dtype)
        results["grids"] = [*measured(chosen, args.rounds)]
    show_records(results["grids"])
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

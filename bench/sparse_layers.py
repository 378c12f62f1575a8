"""Products with block-sparse weights and their gradients, next to cuBLAS' with a dense matrix, by the share of blocks.

    python bench/sparse_layers.py
    python bench/sparse_layers.py --quick --share .1 --json sparse_layers.json

4096 features in and out; the blocks that are there are drawn at random. "dense" are CuPy's products with the whole
matrix. Both take turns; some rows of what they return, or a block, are compared with float64 before anything is timed,
and who is wrong is not timed.
Needs tabulate and tqdm.
"""

import argparse
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from common import machine, save, show, show_machine
from peers import DTYPE, PACKAGES, cupy, gpu, one_stream, release, require_gpu
from small import error_of, show_failed, timed
from timing import progress

import numbattn as na
from numbattn import sparse
from numbattn.sparse.product import run

OURS, DENSE = "numbattn", "dense"
PASSES = "forward", "dX", "dW"
CHECKED = 64  # rows that are compared
SHARES, SIZES, DTYPES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), (64, 128), ("bfloat16", "float32")
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}  # of the largest element


class Case(NamedTuple):
    dtype: str
    size: int  # of a block's rows and columns
    share: float
    rows: int = 16384
    features: int = 4096

    def pattern(self):
        side = self.features // self.size
        blocks = np.arange(side**2) < round(self.share * side**2)
        np.random.default_rng(0).shuffle(blocks)
        return sparse.Pattern(na.BlockSparse(blocks.reshape(side, side), (self.size, self.size)))

    def arrays(self, pattern):
        """x, dy and w."""
        rng, shape = cupy.random.default_rng(0), (self.rows, self.features)
        shapes = shape, shape, (pattern.count, self.size, self.size)
        return [rng.standard_normal(each, np.float32).astype(DTYPE[self.dtype]) for each in shapes]


def makers_of(case):
    """Makers of runs by pass and peer, and the check of what these return."""
    pattern = case.pattern()
    x, dy, w = case.arrays(pattern)
    dense = pattern.dense(w)
    row, column = (int(place) * case.size for place in pattern.places[-1])
    of_row, of_column, last = slice(row, row + case.size), slice(column, column + case.size), slice(-CHECKED, None)
    X, dY, W = (array.astype(np.float64) for array in (x[last], dy[last], dense))
    dW = x[:, of_row].astype(np.float64).T @ dy[:, of_column].astype(np.float64)
    expected = {"forward": X @ W, "dX": dY @ W.T, "dW": dW}
    makers = {
        ("forward", OURS): lambda: partial(run, "forward", x, w, pattern, dy.shape),
        ("forward", DENSE): lambda: lambda: x @ dense,
        ("dX", OURS): lambda: partial(run, "backward_x", dy, w, pattern, x.shape),
        ("dX", DENSE): lambda: lambda: dy @ dense.T,
        ("dW", OURS): lambda: partial(run, "backward_w", x, dy, pattern, w.shape),
        ("dW", DENSE): lambda: lambda: x.T @ dy,
    }

    def check(which, result):
        of, name = which
        found = result[last] if of != "dW" else result[-1] if name == OURS else result[of_row, of_column]
        return error_of([found], [expected[of]])

    return makers, check


def measured(cases, rounds):
    """A record for each case and pass: seconds and errors by peer."""
    for case in progress(cases):
        release()
        found = timed(*makers_of(case), TOLERANCE[case.dtype], rounds)
        for of in PASSES:
            by_name = ({name: value for (pass_, name), value in part.items() if pass_ == of} for part in found)
            yield {**case._asdict(), "pass": of, **dict(zip(("seconds", "errors", "failed"), by_name))}


def show_records(records):
    rows = []
    for record in records:
        ours, dense = (record["seconds"].get(name) for name in (OURS, DENSE))
        about = {key: record[key] for key in ("dtype", "rows", "size", "share", "pass")}
        rows.append({**about, OURS: ours, DENSE: dense, f"{DENSE} / {OURS}": dense / ours if ours and dense else None})
    show("Seconds", rows, ".4g")
    show_failed(records, "{dtype}, blocks of {size}, {share:.0%}, {pass}")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=list(TOLERANCE), default=DTYPES)
    parser.add_argument("--size", nargs="+", type=int, choices=(16, 32, 64, 128), default=SIZES, help="of blocks")
    parser.add_argument("--share", nargs="+", type=float, default=SHARES, help="of the blocks that are there")
    parser.add_argument("--quick", action="store_true", help="2048 rows, 2 rounds")
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 5)
    return args


def main():
    args = parse()
    require_gpu()
    results = {"machine": machine(*PACKAGES) | {"gpu": gpu()}, "arguments": vars(args)}
    show_machine(results["machine"])
    sizes = {"rows": 2048} if args.quick else {}
    with one_stream():
        cases = [Case(*about, **sizes) for about in product(args.dtype, args.size, args.share)]
        results["sparse_layers"] = [*measured(cases, args.rounds)]
    show_records(results["sparse_layers"])
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

"""A soak test: random problems on a GPU, for as long as you like, every element of every result checked.

    python bench/stress.py                                  # a minute
    python bench/stress.py --seconds 3600 --processes 8     # processes that share a GPU interrupt each other
    python bench/stress.py --replay 3 17                    # problem 17 of process 3 again

A problem is drawn from (seed, process, number): dtype, head_dims, heads, lengths, masks, score, dropout, layout. Its o,
lse, dq, dk, dv and the gradient of the score's array are compared with numbattn.reference in float64, on the GPU; then
it is called again and again, on several streams at once, and each result is compared with the first, bit for bit where
that is promised. All memory that CuPy hands out is full of NaN, and so is what lies beyond Lengths: what a kernel
leaves unwritten, or reads and must not, shows. Needs tqdm.
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass

import numpy as np
from peers import DTYPE, cupy, require_gpu
from tqdm import tqdm

import numbattn as na
from numbattn import reference

ELEMENTS, KEPT = 1 << 24, 1 << 20  # of S, at most; with dropout, whose mask the host makes
PROBLEMS_A_KIND = 10  # to compile a kind takes longer than to run a problem
REPEATS = 16  # calls of a problem after the first
TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}  # see Problem.allowed
NAMES = "o", "lse", "dq", "dk", "dv", "dscore"
BY_ATOMICS = "dq", "dscore"  # in any order, unless deterministic
SHOWN = 5  # wrong elements of an array
ENOUGH = 5  # wrong problems, after which a process stops


# ------------------------------------------------------------------------------------------------------------ problems
@dataclass(frozen=True)
class Kind:
    """What is compiled."""

    dtype: str
    head_dim: int
    head_dim_v: int
    masks: tuple
    score: str
    dropout: bool
    layout: str
    dlse: bool
    deterministic: bool


def draw_kind(rng):
    head_dim = int(rng.choice([8, 20, 40, 64, 96, 128, 192, 256]))
    return Kind(
        dtype=str(rng.choice(["float16", "bfloat16", "float16", "bfloat16", "float32", "float64"])),
        head_dim=head_dim,
        head_dim_v=head_dim if rng.random() < 0.7 else int(rng.choice([8, 64, 128, 256])),
        masks=draw_masks(rng),
        score=str(rng.choice(["none", "none", "none", *SCORES])),
        dropout=rng.random() < 0.25,
        layout=str(rng.choice(list(LAYOUTS))),
        dlse=rng.random() < 0.5,
        deterministic=bool(rng.random() < 0.5),
    )


def draw_masks(rng):
    """None, one or two, of which one may have segments."""
    first, second = map(str, rng.choice(list(MASKS), 2, replace=False))
    count = 1 if "segments" in first and "segments" in second else rng.choice([0, 1, 1, 2])
    return (first, second)[:count]


LENGTHS = {  # queries and keys: from, to
    "short jobs": ((1000, 100_000), (1, 100)),
    "few queries": ((1, 64), (1000, 100_000)),
    "any": ((1, 5000), (1, 5000)),
}
LAYOUTS = {  # of (batch, heads, sequence, features)
    "heads before sequence": lambda x: x,
    "sequence before heads": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "every other feature": lambda x: cupy.repeat(x, 2, axis=-1)[..., ::2],
}
MASKS = {
    "causal": lambda rng, b, h, m, n: na.Causal(),
    "window": lambda rng, b, h, m, n: na.Window(int(rng.integers(n + 1)), int(rng.integers(n + 1))),
    "narrow window": lambda rng, b, h, m, n: na.Window(int(rng.integers(20)), int(rng.integers(20))),
    "offsets": lambda rng, b, h, m, n: na.Causal(offset=rng.integers(-m, n + 1, (b, h))),
    "lengths": lambda rng, b, h, m, n: na.Lengths(rng.integers(n + 1, size=(b, 1)), rng.integers(m + 1, size=(b, h))),
    "dense": lambda rng, b, h, m, n: na.Dense(rng.random((b, 1, m, n)) < rng.random()),
    "bits": lambda rng, b, h, m, n: na.Bits.pack(rng.random((1, 1, m, n)) < rng.random()),
    "blocks": lambda rng, b, h, m, n: block_sparse(rng, h, m, n),
    "segments": lambda rng, b, h, m, n: segments(rng, m, n),
    "causal segments": lambda rng, b, h, m, n: segments(rng, m, n) & na.Causal(),
    "segments of batches": lambda rng, b, h, m, n: segments(rng, m, n, (b, 1)),
    "prefix": lambda rng, b, h, m, n: na.Prefix(rng.integers(n + 1, size=(b, h))),
    "intervals": lambda rng, b, h, m, n: na.Intervals(*rng.integers(-9, n + 9, (2, b, 1, m))),
}
SCORES = {
    "softcap": lambda rng, dtype, b, h, m, n: na.Softcap(float(rng.uniform(2, 50))),
    "alibi": lambda rng, dtype, b, h, m, n: na.Alibi(slopes(rng, dtype, h, m, n)),
    "constant alibi": lambda rng, dtype, b, h, m, n: na.Alibi(slopes(rng, dtype, h, m, n), gradient=False),
    "bias": lambda rng, dtype, b, h, m, n: na.Bias(normal(rng, dtype, 1, h, m, n)),
    "bias of keys": lambda rng, dtype, b, h, m, n: na.Bias(normal(rng, dtype, b, 1, 1, n)),
    "relative bias": lambda rng, dtype, b, h, m, n: na.RelativeBias(normal(rng, dtype, h, 33)),
    "sink": lambda rng, dtype, b, h, m, n: na.Sink(normal(rng, dtype, h)),
}


def segments(rng, m, n, batch=()):
    count = log_uniform(rng, 1, 100)
    return na.Segments(*(np.sort(rng.integers(size + 1, size=(*batch, count + 1))) for size in (m, n)))


def normal(rng, dtype, *shape):
    return cupy.random.default_rng(int(rng.integers(1 << 31))).standard_normal(shape, np.float32).astype(DTYPE[dtype])


def slopes(rng, dtype, heads, m, n):
    """Scores stay below a hundred: larger ones have few digits in float32, by any formula."""
    return cupy.asarray(rng.uniform(0, 100 / max(m, n), heads)).astype(DTYPE[dtype])


def block_sparse(rng, heads, m, n):
    rows, cols = (int(size) for size in rng.choice([16, 48, 64, 128], 2))
    return na.BlockSparse(rng.random((1, heads, -(-m // rows), -(-n // cols))) < rng.random(), (rows, cols))


def log_uniform(rng, low, high):
    return round(np.exp(rng.uniform(np.log(low), np.log(high))))


class Problem:
    """Arrays and options of a call."""

    def __init__(self, seed, process, number):
        rng = np.random.default_rng([seed, process, number])
        kinds = number // PROBLEMS_A_KIND + 1  # so far
        self.kind = kind = draw_kind(np.random.default_rng([seed, process, rng.integers(kinds)]))
        self.lengths = str(rng.choice(list(LENGTHS)))
        m, n = (log_uniform(rng, *interval) for interval in LENGTHS[self.lengths])
        heads_k, group_size = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2, 3, 4, 8]))
        most = KEPT if kind.dropout else ELEMENTS
        heads = heads_k * group_size if heads_k * group_size * m * n <= most else 1
        heads_k = min(heads, heads_k)
        if m * n > most:
            m, n = max(1, m * most // (m * n)), max(1, n * most // (m * n)) if n > m else n
        batch = max(1, min(int(rng.integers(1, 4)), most // (heads * m * n)))
        self.shape = batch, heads, heads_k, m, n
        gen, keys = cupy.random.default_rng(int(rng.integers(1 << 31))), (batch, heads_k, n)
        shapes = [(batch, heads, m, kind.head_dim), (*keys, kind.head_dim), (*keys, kind.head_dim_v),
                  (batch, heads, m, kind.head_dim_v)]  # fmt: skip
        self.q, self.k, self.v, self.do = (
            LAYOUTS[kind.layout](gen.standard_normal(shape, dtype=np.float32).astype(DTYPE[kind.dtype]))
            for shape in shapes
        )
        self.dlse = None
        if kind.dlse:
            self.dlse = gen.standard_normal((batch, heads, m), np.float64 if kind.dtype == "float64" else np.float32)
        self.options = {}
        if kind.masks:
            masks = [MASKS[name](rng, batch, heads, m, n) for name in kind.masks]
            for mask in masks:
                self.poison(mask)
            mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
            self.options["mask"] = mask._like(self.q)
        if kind.score != "none":
            self.options["score"] = SCORES[kind.score](rng, kind.dtype, batch, heads, m, n)
        if kind.dropout:
            self.options["dropout"] = na.Dropout(float(rng.uniform(0.01, 0.9)), seed=int(rng.integers(1 << 31)))

    def __repr__(self):
        batch, heads, heads_k, m, n = self.shape
        return (f"{self.kind}, batch {batch}, {heads} heads on {heads_k}, {m} queries, {n} keys ({self.lengths}), "
                f"{self.options}")

    def poison(self, mask):
        """NaN where no key is."""
        if isinstance(mask, na.Lengths):
            for batch, (keys,) in enumerate(mask.keys.tolist()):
                self.k[batch, :, keys:] = self.v[batch, :, keys:] = np.nan

    def run(self):
        """o, lse, dq, dk, dv and, if there is one, the gradient of the score's array."""
        o, saved = na.attention_forward(self.q, self.k, self.v, **self.options)
        deterministic = self.kind.deterministic
        grads = na.attention_backward(self.do, saved, dlse=self.dlse, deterministic=deterministic)
        return o, saved.lse, *grads, *present(grads.score)

    def expected(self):
        arrays = self.q, self.k, self.v
        grads = reference.attention_backward(self.do, *arrays, **self.options, dlse=self.dlse)
        return *reference.attention_forward(*arrays, **self.options), *grads, *present(grads.score)

    def wrong_elements(self, results):
        """(name, how many, the first ones) of each result that is wrong."""
        expected = self.expected()
        blind = ~cupy.isfinite(expected[NAMES.index("lse")])
        for name, got, want in zip(NAMES, results, expected):
            finite = cupy.isfinite(want)
            close = abs(got.astype(np.float64) - want) <= self.allowed(name, want)
            wrong = cupy.where(finite, ~close, got != want)
            if name in ("o", "dq"):
                wrong |= blind[..., None] & (got != 0)
            if wrong.any():
                places = cupy.argwhere(wrong)[:SHOWN].get()
                shown = [(tuple(map(int, at)), float(got[tuple(at)]), float(want[tuple(at)])) for at in places]
                yield name, int(wrong.sum()), shown

    def allowed(self, name, want):
        """The error of an element: by the largest one, and by the size of sums whose numbers may cancel."""
        batch, heads, heads_k, m, n = self.shape
        size = 1
        if name == "dk":
            size = max(1, m * heads / heads_k / n) ** 0.5
        if name == "dscore":
            farthest = m + n if "alibi" in self.kind.score else 1
            size = farthest * max(1, batch * heads * m * n / want.size) ** 0.5
        return TOLERANCE[self.kind.dtype] * cupy.maximum(size, cupy.where(cupy.isfinite(want), abs(want), 0).max())

    def differ(self, name, got, want):
        """Which elements are not what the first call gave: bit for bit, if that is promised."""
        if name not in BY_ATOMICS or self.kind.deterministic:
            return bits(got) != bits(want)
        got, want = got.astype(np.float64), want.astype(np.float64)
        return ~(abs(got - want) <= self.allowed(name, want))

    def differing_elements(self, first, streams):
        """The same, of calls on several streams, against the first results."""
        results = [[] for _ in streams]
        counts = [cupy.zeros(len(NAMES), np.int64) for _ in streams]
        cupy.cuda.Device().synchronize()
        for number in range(REPEATS):
            with streams[number % len(streams)]:
                results[number % len(streams)] = self.run()
                for i, (got, want) in enumerate(zip(results[number % len(streams)], first)):
                    counts[number % len(streams)][i] += cupy.count_nonzero(self.differ(NAMES[i], got, want))
        cupy.cuda.Device().synchronize()
        for name, count in zip(NAMES, sum(counts).tolist()):
            if count:
                yield f"{name}, called again,", count, []


def present(gradients):
    return [x for x in gradients if x is not None]


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
    """One problem; (name, how many, the first ones) of what is wrong."""
    problem = Problem(seed, process, number)
    results = problem.run()
    wrong = [*problem.wrong_elements(results), *problem.differing_elements(results, streams)]
    return problem, wrong


def soak(args, process, reports):
    """One problem after the other; reports (problems, calls, kind, text of what is wrong)."""
    cupy.cuda.set_allocator(full_of_nan)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(args.streams)]
    end, number, failures = time.monotonic() + args.seconds, 0, 0
    while time.monotonic() < end and failures < ENOUGH:
        try:
            problem, wrong = check(args.seed, process, number, streams)
            kind, text = problem.kind, [f"{name} {count} wrong {shown}" for name, count, shown in wrong]
            if text:
                text.append(repr(problem))
        except Exception:
            kind, text = None, [traceback.format_exc()]
        if text:
            failures += 1
            text.insert(0, f"WRONG, --seed {args.seed} --replay {process} {number}:")
        reports.put((1 + REPEATS, kind, "\n".join(text)))
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
    require_gpu()
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

"""Calls of many threads at once, each result compared with that of the first such call, bit for bit.

    python -m tests.tools.threads                                 # a minute, as a Python without the GIL shows most
    python -m tests.tools.threads --seconds 600 --threads 16 --seed 3

All threads begin each round with the same call, which is new and has to be compiled, into a cache that is empty at
first. Then each makes those of the last rounds in an order of its own, on arrays, masks, scores and caches that all
share and on some of its own. In between the main thread is interrupted: its calls end, or raise what the handler does.
"""

import argparse
import faulthandler
import math
import os
import random
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter
from functools import partial

import numpy as np

import numbattn as na
from numbattn import graphs, points
from tests.problems import LIMITS, Problem

RECENT = 6  # rounds whose calls are made again
ENOUGH = 5  # wrong results, after which it stops
HAS_TIMER = hasattr(signal, "setitimer")  # Windows has none


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


# --------------------------------------------------------------------------------------------------------------- calls
def some(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def gradients(seed, n=300, **options):
    """Forward and backward, by one thread or several: as much work as n is large."""
    q, k, v = some(seed, 3, 2, 4, n, 16)
    o, backprop = na.attention_vjp(q, k, v, **options)
    return o, *backprop(o)


def own_function(seed):
    """A score and a mask whose functions are as new as the seed: threads that are first compile the same at once."""
    slope = 1 + seed % 1000 / 1000

    def bent(s, batch, head, i, j):
        return slope * s / (1.0 + abs(s))

    def odd(batch, head, i, j):
        return (i + j) % 3 > 0

    return gradients(seed, 150, score=na.Score(bent), mask=na.Where(odd))


def decoding(seed):
    """A cache of the caller's own."""
    q, k, v = some(seed, 3, 2, 4, 80, 8)
    cache = na.KVCache.zeros(2, 4, 80, 8, like=q, page_size=16)
    steps = []
    for end in range(20, 81, 20):
        cache.append(k[:, :, end - 20 : end], v[:, :, end - 20 : end])
        steps.append(na.attention(q[:, :, end - 1 : end], cache))
    return steps


def on_points(seed):
    x, y, b = some(seed, 3, 400, 5)
    s, backprop = points.product(x, y, b, points.Gaussian()), points.product_vjp(x, y, b, points.Gaussian())[1]
    return s, *backprop(s), points.logsumexp(x, y, b[:, 0], points.Gaussian()), *points.nearest(x, y, 3)


def on_a_graph(seed):
    rng = np.random.default_rng(seed)
    graph, _ = graphs.Graph.from_edges(*rng.integers(60, size=(2, 500)), (60, 60))
    q, k, v = some(seed, 3, 2, 60, 8)
    o, backprop = graphs.attention_vjp(q, k, v, graph)
    return o, *backprop(o)


def on_a_grid(seed):
    side = 6 + seed % 5
    return gradients(seed, side * side, mask=na.Grid((side, side)).window(3))


def random_problem(seed):
    return Problem(seed, 0, LIMITS["cpu"]).run()


def shared_problem(seed):
    """A call on arrays, and with masks and scores, that all threads share."""
    problem = Problem(seed, 0, LIMITS["cpu"])
    problem.out = None
    return lambda seed: problem.run()


USUAL = {
    "few queries": partial(gradients, n=20), "one thread": gradients, "several threads": partial(gradients, n=700),
    "functions": own_function, "a cache": decoding, "points": on_points, "a graph": on_a_graph, "a grid": on_a_grid,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- threads
class Stress:
    """What threads compute, and what is wrong with it."""

    def __init__(self, threads):
        self.first, self.wrong, self.counts = {}, [], Counter()
        self.start, self.recent, self.threads = threading.Barrier(threads + 1), [], threads

    def check(self, name, seed, call):
        """Compare the results of call(seed) with those of the first one of this name and seed."""
        found = bits(call(seed))
        if self.first.setdefault((name, seed), found) != found:
            self.wrong.append(f"{name}, seed {seed}: another result than at first")

    def work(self, mine):
        """A thread's calls of a round; mine: the number of each."""
        self.start.wait()
        for call in mine:
            try:
                self.check(*call)
            except Exception:
                self.wrong.append(f"{call[0]}, seed {call[1]}\n{traceback.format_exc()}")

    def round(self, draw, name, seed, call):
        """The new call by all threads at once, then recent ones."""
        self.recent = [*self.recent[1 - RECENT :], (name, seed, call)]
        orders = [[self.recent[-1], *draw.sample(self.recent, len(self.recent))] for _ in range(self.threads)]
        threads = [threading.Thread(target=self.work, args=(order,), daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        self.start.wait()
        while any(thread.is_alive() for thread in threads):
            self.interrupted(draw, *draw.choice(self.recent[:-1] or self.recent))
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        self.counts.update(rounds=1, calls=sum(map(len, orders)))

    def interrupted(self, draw, *call):
        """A call of the main thread that a signal handler may end, if it was made before: Python's own imports, which
        are not to be interrupted, leave a lock taken."""
        if not HAS_TIMER or len(self.recent) == 1:
            return time.sleep(0.01)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 0.05))
                self.check(*call)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            self.counts["interrupted"] += 1
        self.counts["calls"] += 1


def bits(results):
    """All that results hold, None included."""
    return [None if x is None else np.asarray(x).tobytes() for x in results]


def new_calls(draw):
    """(name, seed, call) for ever: each usual one with the first seed, then all kinds."""
    for name in sorted(USUAL, key=lambda _: draw.random()):
        yield name, 1, USUAL[name]
    while True:
        seed = draw.randrange(1 << 20)
        kinds = {"random": random_problem, "shared": shared_problem(seed), **USUAL}
        name = draw.choice([*kinds, "random", "shared", "functions"])
        yield name, seed, kinds[name]


def stress(seconds, threads, seed=0, names=None, rounds=math.inf):
    """The Stress of so many seconds or rounds; names: only of these calls."""
    found, draw, end = Stress(threads), random.Random(seed), time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, interrupt) if HAS_TIMER else None
    try:
        for name, number, call in new_calls(draw):
            if time.monotonic() > end or len(found.wrong) >= ENOUGH or found.counts["rounds"] == rounds:
                return found
            if names is None or name in names:
                found.round(draw, name, number, call)
    finally:
        if HAS_TIMER:
            signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------------------------------------------- command line
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--threads", type=int, default=8, help="beside the main one (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=["random", "shared", *USUAL], help="only these calls")
    args = parser.parse_args()
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBATTN_CACHE_DIR"] = folder
        found = stress(args.seconds, args.threads, args.seed, args.only)
    gil = gil_of_python()
    print(*found.wrong, sep="\n")
    calls, rounds, interrupted = (found.counts[name] for name in ("calls", "rounds", "interrupted"))
    print(f"Python {sys.version.split()[0]}, {gil}, {args.threads} threads, seed {args.seed}: {calls} calls in "
          f"{rounds} rounds, {interrupted} interrupted, {len(found.wrong)} wrong")  # fmt: skip
    return bool(found.wrong) or gil == "the GIL was turned on"


def gil_of_python():
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "with the GIL"
    return "the GIL was turned on" if sys._is_gil_enabled() else "without the GIL"


if __name__ == "__main__":
    sys.exit(main())

"""numbattn on the CPU: speed against torch and the plain NumPy formula, also for small head_dims, large batches and a
pair bias; between matrix products, small calls, memory, and speed on a busy machine.

    python bench/cpu.py
    python bench/cpu.py --what speed --seqlens 1024,2048 --rounds 15 --json cpu.json
    python bench/cpu.py --what small,busy

Needs tabulate and tqdm; compares with torch if it is installed. Memory is measured on Linux only.
"""

import argparse
import math
import multiprocessing
import os
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
from common import interleaved, machine, save, show, show_machine, standard_vjp
from tqdm import tqdm

import numbattn as na

HEADS, HEAD_DIM = 8, 64
SPEED_SEQLENS = [1024, 4096]
MEMORY_SEQLENS = [1024, 2048, 4096, 8192, 16384, 32768]
SMALL = [(1, 8, 8), (4, 4, 16, 16), (2, 20, 64), (2, 60, 64), (2, 8, 100, 64)]  # shapes of q, k and v


class Size(NamedTuple):
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    pair_bias: bool = False  # for each pair of a query and a key, by head; shared by the batch
    gradient: bool = True  # whether the bias has one


SIZES = [
    Size(1, 8, 1024, 8), Size(1, 8, 1024, 16), Size(1, 8, 1024, 32), Size(1, 8, 4096, 16),  # small head_dims
    *(Size(*size, *bias)                                                                    # large batches
      for size in ((1024, 8, 16, 32), (512, 8, 32, 32), (256, 8, 64, 32), (64, 8, 128, 64))
      for bias in ((), (True, False), (True, True))),
    Size(64, 4, 128, 32, True), Size(8, 4, 512, 32, True),                                  # as in models of proteins
]  # fmt: skip
BUSY = "import numpy as np; a = np.ones((2048, 2048), np.float32)\nwhile True: a @ a"
BETWEEN = [(1, 8, 512, 64), (4, 8, 256, 32), (1, 8, 1024, 64)]  # shapes, of calls that are made between products
PAUSE = 0.3  # seconds, after which no library's threads spin any more
PARTS = "speed", "sizes", "between", "small", "memory", "busy"
PASSES = {"forward": 1, "backward": 2.5}  # work in forwards: 2 matrix products, and 5
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # relative to the largest element


def inputs(seqlen, dtype, batch=1, heads=HEADS, head_dim=HEAD_DIM):
    """q, k, v, do."""
    return np.random.default_rng(0).standard_normal((4, batch, heads, seqlen, head_dim), dtype=dtype)


# -------------------------------------------------------------------------------------------------------------- peers
# Each returns o, and a function from do to dq, dk, dv and the gradient of the bias, if that is wanted.
def numbattn_vjp(q, k, v, *, causal=False, bias=None, gradient=True):
    o, backprop = na.attention_vjp(q, k, v, causal=causal, score=None if bias is None else na.Bias(bias, gradient))

    def gradients(do):
        found = backprop(do)
        return (*found, *found.score) if gradient else found

    return o, gradients


def numpy_vjp(q, k, v, *, causal=False, bias=None, gradient=True):
    o, backprop = standard_vjp(q, k, v, bias=causal_mask(q.shape[-2], q.dtype) if causal else bias)

    def gradients(do):
        *found, dS = backprop(do, with_dS=True)
        return found if bias is None or not gradient else (*found, dS.sum(axis=0) if dS.ndim > bias.ndim else dS)

    return o, gradients


@cache
def causal_mask(seqlen, dtype):
    return np.triu(np.full((seqlen, seqlen), -np.inf, dtype), 1)


def make_torch_vjp():
    """torch's vjp, None without torch."""
    try:
        import torch  # here, so that the processes that measure memory do not load it
    except ImportError:
        return None
    torch.set_num_threads(os.cpu_count())

    def torch_vjp(q, k, v, *, causal=False, bias=None, gradient=True):
        leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        mask = None if bias is None else torch.from_numpy(bias)
        if bias is not None and gradient:
            leaves.append(mask.requires_grad_())
        o = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], mask, is_causal=causal)

        def backprop(do):
            o.backward(torch.from_numpy(do))
            return [x.grad.numpy() for x in leaves]

        return o.detach().numpy(), backprop

    return torch_vjp


def peers_here():
    peers = {"numbattn": numbattn_vjp, "torch": make_torch_vjp(), "numpy": numpy_vjp}
    return {name: vjp for name, vjp in peers.items() if vjp}


# -------------------------------------------------------------------------------------------------------------- speed
def speed(seqlens, rounds):
    """Rows of the table: GFLOP/s of every peer."""
    peers, rows = peers_here(), []
    for dtype, causal, seqlen in tqdm(list(product(TOLERANCE, (False, True), seqlens)), disable=None, leave=False):
        q, k, v, do = inputs(seqlen, dtype)
        check(peers, q, k, v, do, causal=causal)  # warms up, too
        timers = {name: partial(seconds, vjp, q, k, v, do, causal=causal) for name, vjp in peers.items()}
        medians = interleaved(timers, rounds)
        for i, (name, work) in enumerate(PASSES.items()):
            gflop = 4e-9 * HEADS * seqlen**2 * HEAD_DIM * work / (2 if causal else 1)
            rate = {peer: gflop / times[i] for peer, times in medians.items()}
            rows.append({
                "dtype": dtype, "pass": name, "causal": causal, "seqlen": seqlen,
                "numbattn": rate["numbattn"], "torch": rate.get("torch"), "numpy": rate["numpy"],
                "/ torch": rate["numbattn"] / rate["torch"] if "torch" in rate else None,
                "/ numpy": rate["numbattn"] / rate["numpy"],
            })
    return sorted(rows, key=lambda row: (row["dtype"], row["pass"] == "backward"))


def seconds(vjp, q, k, v, do, **options):
    """Seconds of forward and of backward."""
    start = perf_counter()
    _, backprop = vjp(q, k, v, **options)
    middle = perf_counter()
    _ = backprop(do)  # freed after the clock has stopped
    return middle - start, perf_counter() - middle


def check(peers, q, k, v, do, **options):
    """Check that all peers compute the same, so that nothing wrong is timed."""
    results = {}
    for name, vjp in peers.items():
        o, backprop = vjp(q, k, v, **options)
        results[name] = o, *backprop(do)
    tolerance = TOLERANCE[q.dtype.name]
    for name, result in results.items():
        for what, x, expected in zip(("o", "dq", "dk", "dv", "dbias"), result, results["numpy"]):
            atol = tolerance * abs(expected).max()
            np.testing.assert_allclose(x, expected, rtol=0, atol=atol, err_msg=f"{what} of {name}")


def matmul_ceiling(rounds, size=2048):
    """GFLOP/s of numpy.matmul for each dtype."""

    def timer(dtype):
        a = np.ones((size, size), dtype)
        a @ a

        def run():
            start = perf_counter()
            _ = a @ a
            return perf_counter() - start

        return run

    medians = interleaved({dtype: timer(dtype) for dtype in TOLERANCE}, rounds)
    return {dtype: 2e-9 * size**3 / median for dtype, median in medians.items()}


# -------------------------------------------------------------------------------------------------------------- sizes
def sizes(rounds):
    """Rows of the table: milliseconds of every peer, at other sizes than those of `speed`."""
    peers, rows = peers_here(), []
    for size in tqdm(SIZES, disable=None, leave=False):
        arrays = inputs(size.seqlen, "float32", size.batch, size.heads, size.head_dim)
        shape = size.heads, size.seqlen, size.seqlen
        bias = np.random.default_rng(1).standard_normal(shape, dtype=np.float32) if size.pair_bias else None
        options = {"bias": bias, "gradient": size.gradient}
        check(peers, *arrays, **options)
        timers = {name: partial(seconds, vjp, *arrays, **options) for name, vjp in peers.items()}
        medians = interleaved(timers, rounds)
        for i, of in enumerate(PASSES):
            taken = {name: 1e3 * float(times[i]) for name, times in medians.items()}
            over = {f"{name} / numbattn": taken[name] / taken["numbattn"] for name in taken if name != "numbattn"}
            rows.append({**size._asdict(), "pass": of, **taken, **over})
    return rows


# ------------------------------------------------------------------------------------------------------------ between
def between(rounds):
    """Rows of the table: milliseconds of a call after a pause, and right after a product of matrices of NumPy, or of
    torch for tensors, as in a model; and its page faults. Each is measured in a process of its own."""
    kinds = ["numbattn", "numpy", *["numbattn, tensors", "torch"] * bool(make_torch_vjp())]
    rows = []
    for shape, name in tqdm(list(product(BETWEEN, kinds)), disable=None, leave=False):
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            found = fresh.apply(among_products, [name, shape, rounds])
        rows += [{"shape": "x".join(map(str, shape)), "pass": of, "": name, **row} for of, row in found.items()]
    return rows


def among_products(name, shape, rounds):
    """A part of rows for each pass."""
    q, k, v, do = np.full((4, *shape), 0.5, np.float32)  # nothing is freed that later calls would have for theirs
    a, b = np.ones((1024, 512), np.float32), np.ones((512, 512), np.float32)
    if name in ("numbattn", "numpy"):
        vjp = {"numbattn": numbattn_vjp, "numpy": numpy_vjp}[name]
    else:
        import torch

        from numbattn.interop.torch import attention

        attend = {"torch": torch.nn.functional.scaled_dot_product_attention, "numbattn, tensors": attention}[name]
        a, b, do = map(torch.from_numpy, (a, b, do))
        leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]

        def vjp(*_):
            o = attend(*leaves)
            return o, partial(torch.autograd.grad, o, leaves, retain_graph=True)

    calls, found = {"forward": partial(vjp, q, k, v), "backward": partial(vjp(q, k, v)[1], do)}, {}
    for of, call in calls.items():
        for _ in range(2):
            call()
        taken, before = {"alone, ms": [], "after a product, ms": []}, page_faults()
        for how, wait in zip(taken, (lambda: sleep(PAUSE), lambda: a @ b)):
            for _ in range(rounds):
                wait()
                start = perf_counter()
                _ = call()
                taken[how].append(1e3 * (perf_counter() - start))
        alone, after = (float(np.median(x)) for x in taken.values())
        faults = (page_faults() - before) / (2 * rounds)
        found[of] = {**dict(zip(taken, (alone, after))), "slower by": after / alone, "page faults": faults}
    return found


def page_faults():
    import resource  # which Windows does not have

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# -------------------------------------------------------------------------------------------------------------- small
def small(rounds):
    """Rows of the table: microseconds of a call, and of a call with its gradients, by peer."""
    rows = []
    for shape in tqdm(SMALL, disable=None, leave=False):
        for call, runs in small_calls(shape).items():
            medians = interleaved({name: partial(microseconds, run) for name, run in runs.items()}, rounds)
            rows.append({"shape": "x".join(map(str, shape)), "call": call, **medians})
    return rows


def small_calls(shape):
    """A run of each peer by kind of call."""
    rng, (heads, seqlen) = np.random.default_rng(0), shape[-3:-1]
    q, k, v, do = rng.standard_normal((4, *shape), dtype=np.float32)
    bias = rng.standard_normal((heads, seqlen, seqlen), dtype=np.float32)
    shared, peers = {"bias": bias, "gradient": False}, peers_here()

    def forward(name, **options):
        return attention(q, k, v, **options) if name == "numbattn" else peers[name](q, k, v, **options)

    def both(name, **options):
        _, backprop = peers[name](q, k, v, **options)
        return backprop(do)

    calls = {"forward": (forward, {}), "forward, causal": (forward, {"causal": True}),
             "forward, bias": (forward, shared), "both": (both, {}), "both, bias": (both, shared),
             "both, bias and its gradient": (both, {"bias": bias})}  # fmt: skip
    return {call: {name: partial(run, name, **options) for name in peers} for call, (run, options) in calls.items()}


def attention(q, k, v, *, causal=False, bias=None, gradient=True):
    return na.attention(q, k, v, causal=causal, score=None if bias is None else na.Bias(bias, gradient))


def microseconds(run, calls=300):
    """Median microseconds of a call."""
    taken = []
    for _ in range(calls):
        start = perf_counter()
        run()
        taken.append(perf_counter() - start)
    return 1e6 * float(np.median(taken))


# --------------------------------------------------------------------------------------------------------------- busy
def busy(rounds, seqlen=1024):
    """Rows of the table: seconds of attention alone, and with a process that multiplies matrices on all cores."""
    arrays = inputs(seqlen, "float32")
    timers = {name: lambda vjp=vjp: sum(seconds(vjp, *arrays)) for name, vjp in peers_here().items()}
    for run in timers.values():
        run()
    alone = interleaved(timers, rounds)
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        sleep(1)
        contended = interleaved(timers, rounds)
    finally:
        other.kill()
    return [{"": name, "alone, ms": 1e3 * alone[name], "contended, ms": 1e3 * contended[name],
             "slower by": contended[name] / alone[name]} for name in timers]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- memory
def memory(seqlens):
    """Rows of the table: what forward + backward take beyond their inputs."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:  # a new process for each
        for seqlen in tqdm(sorted(seqlens), disable=None, leave=False):
            extra = fresh.apply(peak_growth, [seqlen])
            rows.append({
                "seqlen": seqlen, "extra MB": extra, "MB per 1000 tokens": 1000 * extra / seqlen,
                "the scores alone, MB": 4e-6 * HEADS * seqlen**2,
            })
    return rows


def peak_growth(seqlen):
    """By how many MB forward + backward raise this process's peak of resident memory, Numba's included."""
    small, (q, k, v, do) = inputs(256, "float32"), inputs(seqlen, "float32")
    seconds(numbattn_vjp, *small)  # compiled code, threads
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak_resident()
    seconds(numbattn_vjp, q, k, v, do)
    return peak_resident() - before


def peak_resident():
    """The peak of resident memory in MB. Not getrusage's ru_maxrss, which a new process inherits from its parent."""
    status = Path("/proc/self/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def growth_exponent(rows):
    """Slope of log(extra) over log(seqlen) between the two largest: 1 is linear, 2 quadratic."""
    (n0, mb0), (n1, mb1) = ((row["seqlen"], row["extra MB"]) for row in rows[-2:])
    return math.log(mb1 / mb0) / math.log(n1 / n0)


# ------------------------------------------------------------------------------------------------------- command line
def main():
    def names(text):
        return text.split(",")

    def numbers(text):
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", type=names, default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seqlens", type=numbers, help=f"default: {SPEED_SEQLENS} and {MEMORY_SEQLENS}")
    parser.add_argument("--rounds", type=int, default=7, help="speed is the median of so many (default: 7)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    if unknown := set(args.what) - set(PARTS):
        parser.error(f"--what: got {', '.join(unknown)}, takes {', '.join(PARTS)}")

    results = {"machine": machine("numbattn", "numpy", "numba", "torch"), "arguments": vars(args)}
    show_machine(results["machine"])
    setting = f"batch 1, {HEADS} heads, head_dim {HEAD_DIM}"
    if "speed" in args.what:
        results["matmul"] = matmul_ceiling(args.rounds)
        results["speed"] = speed(args.seqlens or SPEED_SEQLENS, args.rounds)
        columns = ["", "", "", "", ".0f", ".0f", ".0f", ".2f", ".2f"]
        show(f"Speed in GFLOP/s: {setting}, median of {args.rounds} rounds", results["speed"], columns)
        print("A product of 2048 x 2048 matrices in NumPy:",
              ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in results["matmul"].items()))
        if not results["machine"]["versions"]["torch"]:
            print("torch is not installed: no comparison with it")
    if "sizes" in args.what:
        results["sizes"] = sizes(args.rounds)
        columns = [""] * (len(Size._fields) + 1) + [".2f"] * 5
        show(f"Milliseconds at other sizes: float32, median of {args.rounds} rounds", results["sizes"], columns)
    if "between" in args.what:
        results["between"] = between(args.rounds)
        show(f"Calls between products of matrices: float32, median of {args.rounds} rounds, a process each",
             results["between"], ["", "", "", ".2f", ".2f", ".2f", ".0f"])  # fmt: skip
    if "small" in args.what:
        results["small calls"] = small(args.rounds)
        show(f"Microseconds of small calls: float32, median of {args.rounds} rounds", results["small calls"],
             ["", "", *[".0f"] * 3])  # fmt: skip
    if "busy" in args.what:
        results["busy"] = busy(args.rounds)
        show(f"Forward + backward on a busy machine: float32, seqlen 1024, {setting}", results["busy"],
             ["", ".1f", ".1f", ".1f"])  # fmt: skip
    if "memory" in args.what:
        results["memory"] = memory(args.seqlens or MEMORY_SEQLENS)
        show(f"Peak memory of forward + backward beyond the inputs: float32, {setting}",
             results["memory"], ["", ".1f", ".2f", ".0f"])
        if len(results["memory"]) > 1:
            results["growth exponent"] = growth_exponent(results["memory"])
            print(f"It grows as seqlen ** {results['growth exponent']:.2f} between the two longest")
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

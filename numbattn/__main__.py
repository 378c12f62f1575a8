"""python -m numbattn: what this machine can run, checked against the reference; bench; plan and compile, for GPUs."""

import argparse
import math
import os
import platform
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from time import perf_counter, sleep

import numpy as np

import numbattn as na
from numbattn import cache, reference
from numbattn.problem import DTYPES

PACKAGES = "numpy", "numba", "ml_dtypes", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x"
NEEDED = {"cupy": "CuPy", "numba_cuda": "numba-cuda"}  # for a GPU: modules, packages
HEAD_DIMS = 40, 24  # of the problem that is checked
CORES = {"wgmma": "tensor cores", "mma": "tensor cores", "fma": "CUDA cores"}
TOLERANCES = dict(zip(DTYPES, (4e-3, 3e-2, 2e-5, 1e-12)))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m numbattn", description=__doc__.partition(": ")[2])
    parser.add_argument("--version", action="version", version=f"numbattn {na.__version__}")
    parser.add_argument("--clear-cache", action="store_true", help="remove the compiled code that is kept on disk")
    commands = parser.add_subparsers(dest="command", metavar=" | ".join(COMMANDS))
    for name, (_, about) in COMMANDS.items():
        _add_options(commands.add_parser(name, help=about, description=about), name)
    args = parser.parse_args(arguments)
    if args.clear_cache:
        _say(f"removed: {_kept()}")
        cache.clear()
        return 0
    if args.command is None:
        return check()
    command, _ = COMMANDS[args.command]
    try:
        return command(args)
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _add_options(parser, command):
    if command == "bench":
        parser.add_argument("--seconds", type=float, default=30.0, help="for about so long (default: 30)")
        return
    several = {"nargs": "+"} if command == "compile" else {}
    default = (lambda value: [value]) if several else (lambda value: value)
    parser.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], default=default("float16"), **several)
    parser.add_argument("--head-dim", type=int, default=default(128), metavar="D", **several)
    parser.add_argument("--seqlen", type=int, default=default(4096), metavar="N", **several,
                        help="of queries and keys; kernels for long and short sequences differ on some GPUs")
    parser.add_argument("--mask", choices=MASKS, default=default("none"), **several)
    parser.add_argument("--score", choices=SCORES, nargs="+", default=[], metavar="PART",
                        help=f"parts of the score, in this order: {', '.join(SCORES)}; their arrays have the dtype")
    parser.add_argument("--no-gradient", action="store_true", help="of the arrays in the score")
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="gradients equal bit for bit from call to call")
    parser.add_argument("--cc", type=_cc, help="compute capability, as in 9.0 (default: that of this machine's GPU)")
    if command == "plan":
        parser.add_argument("--batch", type=int, default=1)
        parser.add_argument("--heads", type=int, default=16)
        parser.add_argument("--heads-k", type=int, help="default: as many")
        parser.add_argument("--head-dim-v", type=int, metavar="D", help="default: head_dim")
        parser.add_argument("--seqlen-k", type=int, metavar="N", help="of keys; default: seqlen")
        parser.add_argument("--devices", type=int, metavar="N",
                            help="show instead what so many, over which sequences are split, compute and send")
        parser.add_argument("--order", choices=["zigzag", "contiguous"], default="zigzag",
                            help="which pieces of it each device has")
    else:
        parser.add_argument("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
        parser.add_argument("-j", type=int, default=os.cpu_count(), metavar="N", help="processes (default: all cores)")


def _cc(text):
    from numbattn.cuda.plan.planner import DEVICES

    cc = tuple(map(int, text.split(".")))
    if cc not in DEVICES:
        raise argparse.ArgumentTypeError(f"got {text}, known are {', '.join(f'{x}.{y}' for x, y in DEVICES)}")
    return cc


# ------------------------------------------------------------------------------------------------------ plan, compile
MASKS = {
    "none": lambda m, n: None,
    "causal": lambda m, n: na.Causal(),
    "window": lambda m, n: na.Window(n // 8, 0),
    "lengths": lambda m, n: na.Lengths(np.full((1, 1), n)),
    "first": lambda m, n: na.First(np.full((1, 1), 4)),
    "segments": lambda m, n: na.Segments(*_offsets(m, n)),
    "causal-segments": lambda m, n: na.Causal() & na.Segments(*_offsets(m, n)),
    "window-segments": lambda m, n: na.Window(n // 8, 0) & na.Segments(*_offsets(m, n)),
    "prefix": lambda m, n: na.Prefix(np.full((1, 1), n // 4)),
    "intervals": lambda m, n: na.Intervals(*np.broadcast_to(np.array([0, n])[:, None, None, None], (2, 1, 1, m))),
    "dense": lambda m, n: na.Dense(np.broadcast_to(True, (1, 1, m, n))),
    "bits": lambda m, n: na.Bits(np.broadcast_to(np.uint32(1), (1, 1, m, -(-n // 32)))),
    "blocks": lambda m, n: na.BlockSparse(np.ones((1, 1, -(-m // 128), -(-n // 128)), bool), (128, 128)),
}
SCORES = {
    "softcap": lambda shape, dtype, gradient: na.Softcap(30.0),
    "alibi": lambda shape, dtype, gradient: na.Alibi(np.ones(shape[:1], dtype), gradient),
    "bias": lambda shape, dtype, gradient: na.Bias(np.zeros(shape, dtype), gradient),
    "bias-of-keys": lambda shape, dtype, gradient: na.Bias(np.zeros(shape[-1:], dtype), gradient),
    "relative": lambda shape, dtype, gradient: na.RelativeBias(np.zeros((shape[0], 257), dtype), gradient),
    "sink": lambda shape, dtype, gradient: na.Sink(np.ones(shape[:1], dtype), gradient),
    "function": lambda shape, dtype, gradient: na.Score(_far),
}
PASSES = ["forward", "backward"]


def _offsets(m, n):
    """Of eight segments: those of queries, and those of keys if they are others."""
    return [np.linspace(0, length, 9).astype(np.int32) for length in ([m] if m == n else [m, n])]


def _far(s, batch, head, i, j):
    return s / (1 + abs(i - j))


def _device(cc):
    """The Device with this compute capability; the current one if it is None."""
    from numbattn.cuda.plan.planner import DEVICES

    if cc is not None:
        return DEVICES[cc]
    if why_not := _why_no_gpu():
        raise SystemExit(f"no GPU: {why_not}. --cc says for which one")
    return import_module("numbattn.cuda.launch").current_gpu().device


def _plans(device, dtype, q, k, v, mask, dropout, deterministic=False, score=(), gradient=True):
    """Both passes for arrays of these shapes, of which there is no memory."""
    from numbattn.cuda.passes import plans
    from numbattn.cuda.plan.views import without_memory

    arrays, options = [without_memory(shape, dtype) for shape in (q, k, v)], _call(dtype, q, k, mask, score, gradient)
    dropout = na.Dropout(0.1, seed=0) if dropout else None
    return dict(zip(PASSES, plans(device, *arrays, deterministic=deterministic, dropout=dropout, **options)))


def _call(dtype, q, k, mask, score, gradient):
    """The mask and the score of a call on arrays of these shapes."""
    scores = *q[-3:-1], k[-2]  # their shape
    return {"mask": MASKS[mask](*scores[1:]), "score": [SCORES[part](scores, dtype, gradient) for part in score]}


def plan(args):
    """Print the plans of both passes."""
    dtype = np.dtype(args.dtype)
    n, d, heads_k = args.seqlen_k or args.seqlen, args.head_dim, args.heads_k or args.heads
    q, k, v = ((args.batch, args.heads, args.seqlen, d), (args.batch, heads_k, n, d),
               (args.batch, heads_k, n, args.head_dim_v or d))  # fmt: skip
    more = ", score " * bool(args.score) + " ".join(args.score) + ", dropout" * args.dropout
    shown = f"q {q}, k {k}, v {v}, {dtype}, mask {args.mask}{more}"
    if args.devices is not None:
        options = _call(dtype, q, k, args.mask, args.score, not args.no_gradient)
        return _plan_of_devices(args.devices, args.order, shown, dtype, (q, k, v), options)
    device = _device(args.cc)
    print(f"compute capability {device.cc[0]}.{device.cc[1]}: {device.multiprocessors} multiprocessors, "
          f"{device.shared >> 10} KB of shared memory for a block")
    print(shown)
    for name, planned in _plans(device, dtype, q, k, v, args.mask, *_options(args)).items():
        print(f"\n{name}")
        for x in planned.stand_ins:
            print(f"  {'from' if x.is_result else 'to'} {x.shape} of {x.dtype}: {x.name} {x.why}")
        rows = [_row(step, device) for step in planned.steps]
        print(textwrap.indent(_table(rows), "  "))
        for x in planned.temporaries:
            zeros = ", zeros at first" * x.is_zero
            print(f"  temporary: {x.name}, {x.shape} of {x.dtype}, {x.nbytes:,} bytes{zeros}")
    return 0


def _plan_of_devices(count, order, shown, dtype, shapes, options):
    """Print what ranks have, compute and send by each plan of `numbattn.distributed`."""
    from numbattn.distributed import Simulated
    from numbattn.distributed.plan import costs_of, shares_of

    share, *_ = shares_of(Simulated(count, order), dtype, *shapes, **options)
    costs, taken, why = costs_of(share)
    print(f"{count} devices, {order}\n{shown}")
    heads = share.problem.heads // count
    for name, cost in costs.items():
        print(f"\n{name}: the busiest device has {cost.busiest:.2f} times the mean work")
        rows = [{
            "device": rank, "queries": " ".join(f"{a.first}:{a.end}" for a in share.queries[rank]),
            "keys": " ".join(f"{b.first}:{b.end}" for b in share.keys[rank]),
            **({"heads": f"{rank * heads}:{(rank + 1) * heads}"} if name == "heads" else {}),
            "pairs": f"{pairs:.3g}", "of all": f"{pairs / (sum(cost.pairs) or 1):.1%}",
            "forward sends": f"{forward / 1e6:,.1f} MB", "backward": f"{backward / 1e6:,.1f} MB",
        } for rank, (pairs, forward, backward) in enumerate(zip(*cost))]  # fmt: skip
        print(textwrap.indent(_table(rows), "  "))
    print(f"\ntaken: {taken}, {why}")
    return 0


def _options(args):
    """Of _plans, but for the mask."""
    return args.dropout, args.deterministic, args.score, not args.no_gradient


def _row(step, device):
    from numbattn.cuda.build import build

    binary, tiles = build(step.key), step.tiles
    report, threads, most = binary.report, binary.threads, MOST_THREADS.get(device.cc, 2048)
    room = [most // threads, 65536 // max(report.registers * threads, 1)]
    shared = binary.shared + report.shared
    if shared:
        room.append((device.shared + 1024) // (shared + 1024))
    return {
        "kernel": step.key.factory.rpartition(".")[2].replace(":", "."),
        "tile_m": tiles.tile_m, "tile_n": tiles.tile_n, "blocks": step.blocks, "threads": threads,
        "registers": report.registers, "shared": f"{shared / 1024:.1f} KB",
        "waves": f"{step.blocks / device.multiprocessors / max(min(room), 1):.2f}",
    }  # fmt: skip


MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of a multiprocessor, others 2048


def compile_kernels(args):
    """Build the kernels of all plans for these kinds of calls, by several processes."""
    from numbattn.cuda.build import build

    device, keys = _device(args.cc), {}
    for dtype, d, n, mask in product(args.dtype, args.head_dim, args.seqlen, args.mask):
        shape = 1, 2, n, d
        planned = _plans(device, np.dtype(dtype), shape, shape, shape, mask, *_options(args))
        keys |= {step.key: None for name in args.passes for step in planned[name].steps}
    with ProcessPoolExecutor(min(args.j, len(keys)), get_context("spawn"), cache.keep_quiet) as workers:
        built = [workers.submit(build, key) for key in keys]
        for found in _progress(as_completed(built), total=len(built), unit="kernel"):
            found.result()
    _say(f"{len(keys)} kernels for compute capability {device.cc[0]}.{device.cc[1]}")
    _say(f"cache: {_kept()}")
    return 0


# -------------------------------------------------------------------------------------------------------------- bench
SHAPES = {"cpu": (1, 8, 64), "cuda": (1, 16, 128)}  # batch, heads, head_dim
BENCHED = {"cpu": (("float32", 256), ("float32", 1024), ("float64", 512)),
           "cuda": (("float16", 1024), ("float16", 4096), ("float32", 2048))}  # fmt: skip
PAUSE = 0.05  # seconds; the last one's threads spin for a while before they sleep


def bench(args):
    """Time both passes beside the standard formula and torch, and print the speed-ups."""
    tiers, load = {"cpu": np} if _why_no_gpu() else {"cpu": np, "cuda": import_module("cupy")}, _load()
    cases = [(tier, *case) for tier in tiers for case in product(BENCHED[tier], (False, True), ("forward", "both"))]
    rows, ups = [], {}
    for tier, (dtype, n), causal, of in _progress(cases, unit="case"):
        batch, heads, d = SHAPES[tier]
        numbers = np.random.default_rng(0).standard_normal((4, batch, heads, n, d)).astype(dtype)
        runs = _runs(tiers[tier], *map(tiers[tier].asarray, numbers), causal, backward=of == "both")
        ms = {name: 1e3 * seconds for name, seconds in _shortest(runs, args.seconds / len(cases)).items()}
        over = {f"/ {name}": taken / ms["numbattn"] for name, taken in ms.items() if name != "numbattn"}
        for name, up in over.items():
            ups.setdefault((tier, name), []).append(up)
        rows.append({"tier": tier, "dtype": dtype, "seqlen": n, "causal": causal, "passes": of,
                     **{name: f"{x:.2f}" for name, x in (ms | over).items()}})  # fmt: skip
    shapes = ", ".join(f"{heads} heads of {d} on {tier}" for tier, (_, heads, d) in SHAPES.items() if tier in tiers)
    _say(f"numbattn {na.__version__} on {_cpu()}{', '.join(['', *map(str, _gpus())]) if 'cuda' in tiers else ''}")
    _say(f"shortest milliseconds, batch 1, {shapes}; then the others' times over numbattn's")
    if load > 0.5:
        _say(f"others use {load:.1f} cores: timings vary, most of all the formula's, whose threads wait for each other")
    print(f"\n{_table(rows)}\n")
    for (tier, name), found in ups.items():
        print(f"{tier}: {math.exp(np.log(found).mean()):.2f} times as fast as {name[2:]}, the geometric mean")
    return 0


def _load():
    """How many cores were busy in the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _runs(xp, q, k, v, do, causal, backward):
    """By name what computes forward, or both passes, and waits for it."""
    wait = (lambda: None) if xp is np else xp.cuda.Device().synchronize
    found = {
        "numbattn": partial(_numbattn, q, k, v, do if backward else None, causal),
        "formula": partial(_formula, q, k, v, do if backward else None, _hidden(xp, q) if causal else None),
    }
    if find_spec("torch"):
        torch = import_module("torch")
        if xp is np or torch.cuda.is_available():
            tensors = [torch.from_dlpack(x).requires_grad_(backward) for x in (q, k, v)]
            found["torch"] = partial(_torch, torch, tensors, torch.from_dlpack(do), causal, backward)
            wait = wait if xp is np else torch.cuda.synchronize  # of the device, too
    return {name: partial(_waited, run, wait) for name, run in found.items()}


def _waited(run, wait):
    _ = run()
    wait()


def _numbattn(q, k, v, do, causal):
    if do is None:
        return na.attention(q, k, v, causal=causal)
    o, backprop = na.attention_vjp(q, k, v, causal=causal)
    return o, *backprop(do)


def _formula(q, k, v, do, bias):
    """Standard attention, as one writes it: the paper's Algorithms 0 and 3."""
    scale = 1 / math.sqrt(q.shape[-1])
    S = scale * q @ k.mT
    S = S if bias is None else S + bias
    P = np.exp(S - S.max(axis=-1, keepdims=True))  # of CuPy arrays it is cupy.exp
    P = P / P.sum(axis=-1, keepdims=True)
    if do is None:
        return P @ v
    dP = do @ v.mT
    dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    return P @ v, scale * dS @ k, scale * dS.mT @ q, P.mT @ do


def _hidden(xp, q):
    return xp.triu(xp.full(2 * q.shape[-2:-1], -np.inf, q.dtype), 1)


def _torch(torch, tensors, do, causal, backward):
    o = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    return (o, *torch.autograd.grad(o, tensors, do)) if backward else o


def _shortest(runs, seconds):
    """Seconds of each run, in rounds of all of them, for so long in all; the first, which may compile, is left out."""
    end, taken = perf_counter() + seconds, {name: [] for name in runs}
    for run in runs.values():
        run()
    while not taken["numbattn"] or perf_counter() < end:
        for name, run in runs.items():
            sleep(PAUSE)
            start = perf_counter()
            run()
            taken[name].append(perf_counter() - start)
    return {name: min(found) for name, found in taken.items()}


# ------------------------------------------------------------------------------------------------------------- output
def _progress(items, **options):
    """A bar, where tqdm is installed and somebody looks."""
    return import_module("tqdm").tqdm(items, disable=None, leave=False, **options) if find_spec("tqdm") else items


def _table(rows):
    """By tabulate, where that is installed."""
    if find_spec("tabulate"):
        return import_module("tabulate").tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True)
    return "\n".join("\t".join(map(str, line)) for line in (rows[0], *(row.values() for row in rows)))


COMMANDS = {
    "bench": (bench, "Show how fast this machine is beside the standard formula, and torch if it is installed."),
    "plan": (plan, "Show what a call does on a GPU, here or not: kernels, tiles, registers, memory."),
    "compile": (compile_kernels, "Build kernels before they are needed. The cache that they go to may be copied."),
}


# -------------------------------------------------------------------------------------------------------------- check
def check():
    """0 if all results of this machine are right."""
    _say(f"numbattn {na.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        _say(f"  {name:13}{_version(name)}")
    _say(f"CPU: {_cpu()}, {os.cpu_count()} cores")
    why_not = _why_no_gpu()
    for line in [f"none: {why_not}"] if why_not else _gpus():
        _say(f"GPU: {line}")
    print("\ntier   dtype     pass      error    allowed")
    tiers, wrong = {"cpu": np} if why_not else {"cpu": np, "cuda": import_module("cupy")}, 0
    for tier, xp in tiers.items():
        for dtype, allowed in TOLERANCES.items():
            for name, error in _errors(xp, dtype).items():
                right = error <= allowed  # False for NaN
                wrong += not right
                by = f"  {_unit(_device(None), name, dtype)}" if tier == "cuda" else ""
                print(f"{tier:6} {dtype.name:9} {name:8} {error:7.0e} {allowed:10.0e}{by}{'' if right else '  WRONG'}")
    if why_not:
        print("cuda   not checked: there is no GPU to check")
    print()
    _say(f"cache: {_kept()}")
    print(f"\n{wrong} results are wrong" if wrong else "\nall results agree with the reference in float64")
    return 1 if wrong else 0


def _say(text):
    print(textwrap.fill(text, 80, subsequent_indent="    "))


def _errors(xp, dtype):
    """The largest error of each pass, relative to the largest value, on a small problem with all a kernel can do."""
    (d, e), rng = HEAD_DIMS, np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype)
                   for shape in ((2, 4, 300, d), (2, 2, 270, d), (2, 2, 270, e), (2, 4, 300, e)))
    options = {
        "mask": na.Window(200, 60) & na.Lengths(keys=np.array([[270], [150]])) & (rng.random((1, 4, 300, 270)) < 0.9),
        "dropout": na.Dropout(0.1, seed=1),
    }
    o, saved = na.attention_forward(*map(xp.asarray, (q, k, v)), **options)
    grads = na.attention_backward(xp.asarray(do), saved)
    o_exact, _ = reference.attention_forward(q, k, v, **options)
    exact = reference.attention_backward(do, q, k, v, **options)
    return {"forward": _error(o, o_exact), "backward": max(map(_error, grads, exact))}


def _error(got, exact):
    got = got if isinstance(got, np.ndarray) else got.get()
    return np.abs(got.astype(np.float64) - exact).max() / np.abs(exact).max()


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _why_no_gpu():
    """Why CuPy arrays cannot be computed with here; None where they can."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        return (f"{' and '.join(missing)} not installed; pip install 'numbattn[cu13]', "
                "or 'numbattn[cu12]' for a driver of CUDA 12")
    cuda = import_module("cupy").cuda.runtime
    try:
        count = cuda.getDeviceCount()
    except cuda.CUDARuntimeError as error:  # no driver, or one that is too old, or no device
        return str(error)
    return None if count else "CuPy finds no device"


def _gpus():
    cuda = import_module("cupy").cuda.runtime
    for i in range(cuda.getDeviceCount()):
        about = cuda.getDeviceProperties(i)
        yield (f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}, "
               f"{about['totalGlobalMem'] / 2**30:.0f} GiB, "
               f"{about['sharedMemPerBlockOptin'] >> 10} KB of shared memory for a block")


def _unit(device, name, dtype):
    """Which cores compute a pass of `_errors`."""
    shapes = [(2, heads, n, d) for heads, n, d in zip((4, 2, 2), (300, 270, 270), (HEAD_DIMS[0], *HEAD_DIMS))]
    planned = _plans(device, dtype, *shapes, mask="dense", dropout=True)[name]
    units = {step.tiles.unit for step in planned.steps if hasattr(step.tiles, "unit")}
    return " and ".join(sorted({CORES[unit] for unit in units}, reverse=True))


def _kept():
    """Where compiled code is kept, and how much."""
    kept = (f"{len(sizes)} for the {kind}, {sum(sizes) / 1e6:.1f} MB"
            for kind, sizes in zip(("CPU", "GPU"), cache.sizes().values()))  # fmt: skip
    try:
        return f"{cache.cache_dir()}, kernels: {'; '.join(kept)}"
    except OSError as error:
        return f"none, {error}"


if __name__ == "__main__":
    sys.exit(main())

"""python -m numbattn: what this machine can run, checked against the reference; bench; plan and compile ahead."""

import argparse
import math
import os
import platform
import re
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from time import perf_counter, sleep

import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.base import cache
from numbattn.call.problem import DTYPES
from numbattn.command.ahead import MASKS, PASSES, SCORES, USUAL, capability, compile_kernels, device_of, plan, plans
from numbattn.command.machine import cpu, gpus, kept, progress, say, table, why_no_gpu

ABOUT = __doc__ or ""  # python -OO takes it away
PACKAGES = "numpy", "numba", "ml_dtypes", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x"
SHORT = r"^(b?)fp?(\d+)$", r"\1float\2"  # names of dtypes, as bf16 and fp16
HEAD_DIMS = 40, 24  # of q and v in the problem that is checked
MOST_DEVICES = 512
CORES = {"wgmma": "tensor cores", "mma": "tensor cores", "fma": "CUDA cores"}
TOLERANCES = dict(zip(DTYPES, (4e-3, 3e-2, 2e-5, 1e-12)))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m numbattn", description=ABOUT.partition(": ")[2])
    parser.add_argument("--version", action="version", version=f"numbattn {na.__version__}")
    parser.add_argument("--clear-cache", action="store_true", help="remove the compiled code that is kept on disk")
    commands = parser.add_subparsers(dest="command", metavar=" | ".join(COMMANDS))
    for name, (_, about) in COMMANDS.items():
        _add_options(commands.add_parser(name, help=about, description=about), name)
    try:
        args = parser.parse_args(arguments)  # checking --cc needs the packages of an extra
        if args.clear_cache:
            say(f"removed: {kept()}")
            cache.clear()
            return 0
        command, _ = COMMANDS.get(args.command, (check, ""))
        return command(args)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _add_options(parser, command):
    if command == "bench":
        parser.add_argument("--seconds", type=seconds, default=30.0, help="for about so long (default: 30)")
        return
    several = {"nargs": "+"} if command == "compile" else {}
    default = (lambda value: [value]) if several else (lambda value: value)
    parser.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], type=partial(re.sub, *SHORT),
                        default=default("float16"), **several)  # fmt: skip
    parser.add_argument("--head-dim", type=size, default=default(128), metavar="D", **several)
    parser.add_argument("--seqlen", type=size, default=default(4096), metavar="N", **several,
                        help="of queries and keys; kernels for long and short sequences differ on some GPUs")
    parser.add_argument("--mask", choices=MASKS, default=default("none"), **several)
    parser.add_argument("--score", choices=SCORES, nargs="+", default=[], metavar="PART",
                        help=f"parts of the score, in this order: {', '.join(SCORES)}; their arrays have the dtype")
    parser.add_argument("--no-gradient", action="store_true", help="leave out the gradients of the arrays in the score")
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=USUAL, dest="passes",
                        help=f"default: {' '.join(USUAL)}; the others are tangents of these")
    parser.add_argument("--deterministic", action="store_true", help="gradients equal bit for bit from call to call")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--cc", type=capability,
                        help="compute capability, as in 9.0 (default: that of this machine's GPU)")  # fmt: skip
    if command == "plan":
        parser.add_argument("--batch", type=size, default=1)
        parser.add_argument("--heads", type=size, default=16)
        parser.add_argument("--heads-k", type=size, help="default: as many")
        parser.add_argument("--head-dim-v", type=size, metavar="D", help="default: head_dim")
        parser.add_argument("--seqlen-k", type=size, metavar="N", help="of keys; default: seqlen")
        parser.add_argument("--devices", type=few, metavar="N",
                            help="show instead what N devices, over which sequences are split, compute and send")
        parser.add_argument("--order", choices=["zigzag", "contiguous"], default="zigzag",
                            help="which pieces of a sequence each device has")
    else:
        target.add_argument("--cpu", action="store_true",
                            help="for CPUs like this one, or the one that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name; "
                                 "its kernels are the same for all head_dims, seqlens, masks and dropouts")  # fmt: skip
        parser.add_argument("-j", type=size, default=os.cpu_count(), metavar="N", help="processes (default: all cores)")


def size(text, most=2**31 - 1):
    """The number in an option."""
    if not 0 < (found := int(text)) <= most:
        raise argparse.ArgumentTypeError(f"got {text}, allowed 1 to {most}")
    return found


def few(text):
    """A number of devices: what each computes with the keys of each takes half a minute for the most."""
    return size(text, MOST_DEVICES)


def seconds(text):
    """The time in an option."""
    if not 0 < (found := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, allowed are seconds above 0")
    return found


# -------------------------------------------------------------------------------------------------------------- bench
SHAPES = {"cpu": (1, 8, 64), "cuda": (1, 16, 128)}  # batch, heads, head_dim
BENCHED = {"cpu": (("float32", 256), ("float32", 1024), ("float64", 512)),
           "cuda": (("float16", 1024), ("float16", 4096), ("float32", 2048))}  # fmt: skip
PAUSE = 0.05  # seconds; the last run's threads spin for a while before they sleep


def bench(args):
    """Time both passes, the standard formula and torch, and print the speed-ups."""
    tiers, load = {"cpu": np} if why_no_gpu() else {"cpu": np, "cuda": import_module("cupy")}, _load()
    cases = [(tier, *case) for tier in tiers for case in product(BENCHED[tier], (False, True), ("forward", "both"))]
    rows, ups = [], {}
    for tier, (dtype, n), causal, of in progress(cases, unit="case"):
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
    say(f"numbattn {na.__version__} on {cpu()}{', '.join(['', *map(str, gpus())]) if 'cuda' in tiers else ''}")
    say(f"shortest milliseconds, batch 1, {shapes}; then the others' times over numbattn's")
    if load > 0.5:
        say(f"others use {load:.1f} cores: timings vary, most of all the formula's, whose threads wait for each other")
    print(f"\n{table(rows)}\n")
    for (tier, name), found in ups.items():
        print(f"{tier}: {math.exp(np.log(found).mean()):.2f} times as fast as {name[2:]}, the geometric mean")
    return 0


def _load():
    """How many cores were busy in the last minute, if the system knows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _runs(xp, q, k, v, do, causal, backward):
    """Functions by name that compute forward, or both passes, and wait for the result."""
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
    P = np.exp(S - S.max(axis=-1, keepdims=True))  # for CuPy arrays it is cupy.exp
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
    """Shortest seconds of each run, in interleaved rounds for `seconds`; first runs, which may compile, do not
    count."""
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


COMMANDS = {
    "bench": (bench, "Compare this machine's speed with the standard formula's, and with torch's if it is installed."),
    "plan": (plan, "Show what a call does on a GPU, here or not: kernels, tiles, registers, memory."),
    "compile": (compile_kernels, "Build kernels before they are needed. The cache that they go to may be copied."),
}


# -------------------------------------------------------------------------------------------------------------- check
def check(args):
    """Check this machine against the reference. Returns 0 if all results are right."""
    say(f"numbattn {na.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        say(f"  {name:13}{_version(name)}")
    say(f"CPU: {cpu()}, {os.cpu_count()} cores")
    why_not = why_no_gpu()
    for line in [f"none: {why_not}"] if why_not else gpus():
        say(f"GPU: {line}")
    print("\ntier dtype    pass              error allowed")
    tiers, wrong = {"cpu": np} if why_not else {"cpu": np, "cuda": import_module("cupy")}, 0
    for tier, xp in tiers.items():
        for dtype, allowed in TOLERANCES.items():
            for name, error in _errors(xp, dtype).items():
                right = error <= allowed  # False for NaN
                wrong += not right
                by = f"  {_unit(device_of(None), name, dtype)}" if tier == "cuda" else ""
                print(f"{tier:4} {dtype.name:8} {name:16} {error:6.0e}  {allowed:6.0e}{by}{'' if right else '  WRONG'}")
    if why_not:
        print("cuda   not checked: there is no GPU to check")
    print()
    say(f"cache: {kept()}")
    print(f"\n{wrong} results are wrong" if wrong else "\nall results agree with the reference in float64")
    return 1 if wrong else 0


def _errors(xp, dtype):
    """The largest error of each pass, relative to the largest value, on a small problem with all options."""
    (d, e), rng = HEAD_DIMS, np.random.default_rng(0)
    of_q, of_k, of_v, of_o = (2, 4, 300, d), (2, 2, 270, d), (2, 2, 270, e), (2, 4, 300, e)
    q, k, v, do, tq, tk, tv, tdo = (rng.standard_normal(shape).astype(dtype)
                                    for shape in (of_q, of_k, of_v, of_o, of_q, of_k, of_v, of_o))
    options = {
        "mask": na.Window(200, 60) & na.Lengths(keys=np.array([[270], [150]])) & (rng.random((1, 4, 300, 270)) < 0.9),
        "dropout": na.Dropout(0.1, seed=1),
    }
    on = xp.asarray
    o, saved = na.attention_forward(on(q), on(k), on(v), **options)
    found = {"forward": [o], "backward": na.attention_backward(on(do), saved)}
    exact = {"forward": [reference.attention_forward(q, k, v, **options)[0]],
             "backward": reference.attention_backward(do, q, k, v, **options)}  # fmt: skip
    along = tq, tk, tv
    _, to, saved, tsaved = na.attention_forward_jvp(on(q), on(k), on(v), *map(on, along), **options)
    found["tangent"] = to, tsaved.tlse
    exact["tangent"] = reference.attention_jvp(q, k, v, *along, **options)
    _, found["backward_tangent"] = na.attention_backward_jvp(on(do), saved, tsaved, tdo=on(tdo))
    exact["backward_tangent"] = reference.attention_backward_jvp(do, q, k, v, *along, tdo=tdo, **options)
    several = [x[None] for x in along]
    found["laplacian"] = na.attention_laplacian(on(q), on(k), on(v), *map(on, several), **options)
    exact["laplacian"] = reference.attention_laplacian(q, k, v, *several, **options)
    return {name: max(map(_error, arrays, exact[name])) for name, arrays in found.items()}


def _error(got, exact):
    got = got if isinstance(got, np.ndarray) else got.get()
    return np.abs(got.astype(np.float64) - exact).max() / np.abs(exact).max()


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _unit(device, name, dtype):
    """Which cores compute a pass of `_errors`."""
    shapes = [(2, heads, n, d) for heads, n, d in zip((4, 2, 2), (300, 270, 270), (HEAD_DIMS[0], *HEAD_DIMS))]
    planned = plans(device, dtype, *shapes, mask="dense", dropout=True, passes=[name])[name]
    units = {step.tiles.unit for step in planned.steps if hasattr(step.tiles, "unit")}
    return " and ".join(sorted({CORES[unit] for unit in units}, reverse=True))


if __name__ == "__main__":
    sys.exit(main())

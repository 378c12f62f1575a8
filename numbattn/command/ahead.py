"""`python -m numbattn plan` and `compile`: plan calls, and compile for them, before they are made, here or for another
machine."""

import argparse
import math
import textwrap
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from itertools import product
from multiprocessing import get_context

import numpy as np

import numbattn as na

from ..base.checks import dtype_of_sums
from ..base.compiling import keep_quiet
from ..base.values import kinds
from ..call.order import order_of
from ..call.passes import ARRAYS, BACKWARD, BACKWARD_TANGENT, FORWARD, PASSES, run_pass
from ..call.problem import describe
from ..call.tangents import checked_tangents
from ..scores import Part
from .machine import cpu, kept, progress, say, table, why_no_gpu


def _examples(base):
    """(name, function that makes it) of each sample of a mask, or of a part of a score, by name."""
    return sorted(sample for kind in kinds(base) for sample in vars(kind).get("_examples", ()))


def _image(m, n):
    """Windows of a quarter of an image's rows and columns, of as many tokens."""
    rows = next(x for x in range(math.isqrt(m), 0, -1) if m % x == 0)
    shape = rows, m // rows
    return na.Grid(shape).window([-(-size // 4) for size in shape])


MOST_PROCESSES = 61  # that a pool may have on Windows
MASKS = {"none": lambda m, n: None, "grid": _image, **dict(_examples(na.Mask))}
SCORES = dict(_examples(Part))
USUAL = [FORWARD.name, BACKWARD.name]


def capability(text):
    from numbattn.cuda.plan.planner import DEVICES

    cc = tuple(map(int, f"{text}.0".split(".")[:2]))
    if cc not in DEVICES:
        raise argparse.ArgumentTypeError(f"got {text}, known are {', '.join(f'{x}.{y}' for x, y in DEVICES)}")
    return cc


def device_of(cc, otherwise=""):
    """The Device with this compute capability; the current one if it is None."""
    from numbattn.cuda.plan.planner import DEVICES

    if cc is not None:
        return DEVICES[cc]
    if why_not := why_no_gpu():
        raise ValueError(f"no GPU: {why_not}. --cc says for which one{otherwise}")
    return import_module("numbattn.cuda.launch").current_gpu().device


def plans(device, dtype, q, k, v, mask, dropout, deterministic=False, score=(), gradient=True, passes=USUAL):
    """Plans of passes by name for arrays of these shapes, which take no memory."""
    from numbattn.cuda.passes import plans as plans_of
    from numbattn.cuda.views import without_memory

    options, shapes = _call(dtype, q, k, mask, score, gradient), (q, k, v)
    found = order_of(options["mask"], options["score"], np.empty(0)) if mask == "grid" and not dropout else None
    if found is not None:
        order, options["score"] = found
        options["mask"], shapes = order.mask, [(*lead, len(order.given), width) for *lead, _, width in shapes]
    arrays = [without_memory(shape, dtype) for shape in shapes]
    dropout = na.Dropout(0.1, seed=0) if dropout else None
    chosen = [PASSES[name] for name in passes]
    found = plans_of(device, *arrays, deterministic=deterministic, passes=chosen, dropout=dropout, **options)
    return dict(zip(passes, found))


def _call(dtype, q, k, mask, score, gradient):
    """The mask and the score of a call on arrays of these shapes."""
    scores = *q[-3:-1], k[-2]  # the scores' shape
    return {"mask": MASKS[mask](*scores[1:]), "score": [SCORES[part](scores, dtype, gradient) for part in score]}


def plan(args):
    """Print the plans of passes."""
    dtype = np.dtype(args.dtype)
    n, d, heads_k = args.seqlen_k or args.seqlen, args.head_dim, args.heads_k or args.heads
    q, k, v = ((args.batch, args.heads, args.seqlen, d), (args.batch, heads_k, n, d),
               (args.batch, heads_k, n, args.head_dim_v or d))  # fmt: skip
    more = ", score " * bool(args.score) + " ".join(args.score) + ", dropout" * args.dropout
    shown = f"q {q}, k {k}, v {v}, {dtype}, mask {args.mask}{more}"
    if args.devices is not None:
        options = _call(dtype, q, k, args.mask, args.score, not args.no_gradient)
        return _plan_of_devices(args.devices, args.order, shown, dtype, (q, k, v), options)
    device = device_of(args.cc)
    print(f"compute capability {device.cc[0]}.{device.cc[1]}: {device.multiprocessors} multiprocessors, "
          f"{device.shared >> 10} KB of shared memory for a block")
    print(shown)
    for name, planned in plans(device, dtype, q, k, v, args.mask, *_options(args)).items():
        print(f"\n{name}")
        for x in planned.stand_ins:
            print(f"  {'from' if x.is_result else 'to'} {x.shape} of {x.dtype}: {x.name} {x.why}")
        rows = [_row(step, device) for step in planned.steps]
        print(textwrap.indent(table(rows), "  "))
        for x in planned.temporaries:
            zeros = ", zeros at first" * x.is_zero
            print(f"  temporary: {x.name}, {x.shape} of {x.dtype}, {x.nbytes:,} bytes{zeros}")
    return 0


def _plan_of_devices(count, order, shown, dtype, shapes, options):
    """Print what ranks hold, compute and send by each plan of `numbattn.distributed`."""
    from numbattn.distributed import Simulated
    from numbattn.distributed.costs import costs_of, shares_of

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
        print(textwrap.indent(table(rows), "  "))
    print(f"\ntaken: {taken}, {why}")
    return 0


def _options(args):
    """The arguments of `plans` after the mask."""
    return args.dropout, args.deterministic, args.score, not args.no_gradient, args.passes


def _row(step, device):
    from numbattn.cuda.build import build

    binary, tiles = build(step.key), step.tiles
    report, threads, most = binary.report, binary.threads, MOST_THREADS.get(device.cc, 2048)
    room = [most // threads, 65536 // max(report.registers * threads, 1)]
    shared = binary.shared + report.shared
    if shared:
        room.append((device.shared + 1024) // (shared + 1024))
    module, _, name = step.key.factory.partition(":")
    return {
        "kernel": name, "in cuda/kernels": f"{module.partition('.kernels.')[2].replace('.', '/')}.py",
        "tile_m": tiles.tile_m, "tile_n": tiles.tile_n, "blocks": step.blocks, "threads": threads,
        "registers": report.registers, "shared": f"{shared / 1024:.1f} KB",
        "waves": f"{step.blocks / device.multiprocessors / max(min(room), 1):.2f}",
    }  # fmt: skip


MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # per multiprocessor; 2048 elsewhere


def compile_kernels(args):
    """Build the kernels for all combinations of the options, in several processes."""
    say(_compile_for_cpus(args) if args.cpu else _compile_for_gpu(args))
    say(f"cache: {kept()}")
    return 0


def _compile_for_gpu(args):
    device, keys = device_of(args.cc, "; --cpu compiles for CPUs"), {}
    for dtype, d, n, mask, batch in product(args.dtype, args.head_dim, args.seqlen, args.mask, (1, 2)):
        shape = batch, 2, n, d                                  # gradients that a batch shares may be summed in parts
        planned = plans(device, np.dtype(dtype), shape, shape, shape, mask, *_options(args))
        keys |= {(step.key,): None for passed in planned.values() for step in passed.steps}
    _in_processes(args.j, import_module("numbattn.cuda.build").build, keys, unit="kernel", start=know_functions)
    return f"{len(keys)} kernels for compute capability {device.cc[0]}.{device.cc[1]}"


def _compile_for_cpus(args):
    sums = {dtype_of_sums(np.dtype(name)).name: None for name in args.dtype}  # 16-bit dtypes are read as float32
    has_own_kernels = import_module("numbattn.cpu.bfloat16").has_pairs()
    own = {"bfloat16"} & set(args.dtype) if has_own_kernels else ()
    jobs = [(name, dtype, args.score, not args.no_gradient) for dtype in (*sums, *own) for name in args.passes]
    _in_processes(args.j, make_calls, jobs, unit="pass")
    return f"{' and '.join(args.passes)} with sums in {' and '.join(sums)}, for the CPU: {cpu()}"


def make_calls(name, dtype, score, gradient):
    """Run a pass on small arrays; forward also one with few queries, which has its own kernel."""
    shape, pass_ = (1, 2, 32, 8), PASSES[name]
    options = _call(dtype, shape, shape, "none", score, gradient)
    x = np.zeros(shape, dtype)
    problem, inputs = describe(x, x, x, **options)
    if pass_ is FORWARD:
        na.attention(x, x, x, **options)
        na.attention(x[..., :1, :], x, x, **_call(dtype, (1, 2, 1, 8), shape, "none", score, gradient))
        return
    if pass_ is BACKWARD_TANGENT:  # who calls it calls both
        make_calls(BACKWARD.name, dtype, score, gradient)
    given = {taken: np.zeros(*ARRAYS[taken](problem)) if taken in ARRAYS else None for taken in pass_.takes}
    given = {taken: a if a is None or taken[0] != "t" else a[None] for taken, a in given.items()}
    tangents = checked_tangents(inputs, x, x, x)[0] if "tq" in given else None
    run_pass(pass_, problem, inputs, given, tangents)


def know_functions():
    """Register the samples' functions in a worker process, where kernels find them by digest; and log no compiling."""
    keep_quiet()
    shape, float32 = (1, 1, 32, 16), np.dtype("float32")
    plans(device_of((8, 0)), float32, shape, shape, shape, "where", False, score=["function"], passes=["forward"])


def _in_processes(most, function, jobs, unit, start=keep_quiet):
    with ProcessPoolExecutor(min(most, len(jobs), MOST_PROCESSES), get_context("spawn"), start) as workers:
        started = [workers.submit(function, *job) for job in jobs]
        for found in progress(as_completed(started), total=len(started), unit=unit):
            found.result()

"""Tangents of attention and of its gradients: speed next to forward and backward, to the formula and to others.

    python bench/second.py
    python bench/second.py --quick
    python bench/second.py --parts speed --dtype bfloat16 --head-dim 128 --seqlen 4096 --json second.json
    python bench/second.py --cpu

A pass takes so many products of seqlen x seqlen x head_dim: forward 2, backward 5, tangent (attention_jvp, with o) 6,
backward_tangent (what attention_backward_jvp takes for the tangents of dq, dk and dv, without tdo) 10. The plain
formula in CuPy keeps its matrices from the tangent of the forward pass for that of the backward pass; for bfloat16,
which CuPy does not multiply in stacks, it runs in float16.

speed: lengths from 1024 on, with a constant number of tokens. small: thousands of small problems. particles: Laplacians
of particles, with `particle` and as tangents of all rows. --cpu: the passes on NumPy arrays and the formula in NumPy,
and particles. Passes and peers take turns. The first head of the first sequence is compared with float64 before
anything is timed, and a peer that is wrong is not timed; on a GPU, what takes longer than 0.2 s is timed once.
"numbattn, mma" has the kernels for Ampere. jvp-flash-attention and fa4-jax are compared if they are installed; fa4-jax
runs on a stream of its own, so each of its calls is waited for. Kernels are compiled first, on all cores.
Needs tabulate and tqdm.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import numpy as np
from cases import Case, columns_of_case, grouped, make_case
from common import interleaved, machine, save, show, show_machine
from peers import (
    DTYPE,
    HALF,
    array_of,
    cupy,
    event_seconds,
    gpu,
    import_jax,
    one_stream,
    release,
    require_gpu,
    tensor_of,
)
from peers import PACKAGES as INSTALLED
from small import compile_all, error_of, in_processes, show_failed, timed
from timing import progress

import numbattn as na
from numbattn import reference
from numbattn.base.values import moved as in_library_of
from numbattn.call import passes
from numbattn.cuda.plan import tier
from numbattn.cuda.words.tiers import MMA as MMA_TIER
from numbattn.cuda.words.tiers import TIERS

PRODUCTS = {"forward": 2, "backward": 5, "tangent": 6, "backward_tangent": 10}
BASE = {"tangent": "forward", "backward_tangent": "backward"}  # what each is compared with
OURS, MMA, FORMULA, JVP_FLASH, FA4_JAX = "numbattn", "numbattn, mma", "cupy", "jvp-flash-attention", "fa4-jax"
NUMPY = "numpy"  # the formula on a CPU
PEERS = OURS, MMA, FORMULA, JVP_FLASH, FA4_JAX
MODULES = {JVP_FLASH: "jvp_flash_attention", FA4_JAX: "fa4_jax"}
PACKAGES = [*INSTALLED, JVP_FLASH, FA4_JAX]
SEQLENS, QUICK_SEQLENS = (1024, 2048, 4096, 8192, 16384), (1024, 4096)
WIDTH = {"float32": 512}  # heads * head_dim; as cases.py has it in half precision
SMALL, QUICK_SMALL = [*product((32, 64, 128), (32, 64))], [(64, 32)]  # seqlen, head_dim
NBYTES, SMALL_HEADS = 64 << 20, 8  # of an array of small problems
CPU = [(64, 32, 32), (1, 256, 64), (1, 1024, 64), (1, 2048, 64)]  # batch, seqlen, head_dim; 8 heads
QUICK_CPU = [(2, 64, 32)]
PARTS = "speed", "small", "particles"
PARTICLES, QUICK_PARTICLES = (16, 32, 64, 128), (16,)  # each a row of 4 heads, head_dim 64, moved along 3 coordinates
ROWS_OF_PARTICLES = 8192  # of all walkers of a GPU, so that it is busy; on a CPU there is one walker
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 2e-2}  # of the largest element of an array
MATRICES = 8  # that the formula keeps at a time


class Arrays(NamedTuple):
    q: object
    k: object
    v: object
    do: object
    tq: object
    tk: object
    tv: object

    @property
    def primal(self):
        return self.q, self.k, self.v

    @property
    def tangents(self):
        return self.tq, self.tk, self.tv


def arrays_of(case, xp):
    rng, shape = xp.random.default_rng(0), (case.batch, case.heads, case.seqlen, case.head_dim)
    return Arrays(*(rng.standard_normal(shape, np.float32).astype(DTYPE[case.dtype]) for _ in Arrays._fields))


# ---------------------------------------------------------------------------------------------------------------- peers
def standard_jvp(q, k, v, tq, tk, tv, *, bias=None):
    """The formula and its tangent, as one writes it in NumPy or CuPy: o, to, and a function from do to the tangents of
    dq, dk and dv, which uses the matrices that are there."""
    scale = 1 / math.sqrt(q.shape[-1])
    S = scale * q @ k.mT
    if bias is not None:
        S = S + bias
    P = np.exp(S - S.max(axis=-1, keepdims=True))  # for CuPy arrays it is cupy.exp
    P = P / P.sum(axis=-1, keepdims=True)
    tS = scale * (tq @ k.mT + q @ tk.mT)
    tP = P * (tS - (P * tS).sum(axis=-1, keepdims=True))

    def tangents_of_gradients(do):
        dP, tdP = do @ v.mT, do @ tv.mT
        dS, tdS = dP - (P * dP).sum(axis=-1, keepdims=True), tdP - (tP * dP + P * tdP).sum(axis=-1, keepdims=True)
        dS, tdS = P * dS, tP * dS + P * tdS
        return scale * (tdS @ k + dS @ tk), scale * (tdS.mT @ q + dS.mT @ tq), tP.mT @ do

    return P @ v, tP @ v + P @ tv, tangents_of_gradients


def ours(of, x, causal):
    """A pass as a run."""
    if of == "tangent":
        return partial(na.attention_jvp, *x.primal, *x.tangents, causal=causal)
    if of == "forward":
        def run():
            return na.attention_forward(*x.primal, causal=causal)[:1]  # with lse, as backward needs it
        return run
    if of == "backward":
        _, saved = na.attention_forward(*x.primal, causal=causal)
        return partial(na.attention_backward, x.do, saved)
    _, _, saved, along = na.attention_forward_jvp(*x.primal, *x.tangents, causal=causal)
    given = saved, x.do, None, along.tangents, along.to[None], along.tlse[None]
    return lambda: [grad[0] for grad in passes.backward_tangent(*given)]


def ours_in_tier(of, x, causal, name=MMA_TIER):
    with tier(name):
        inner = ours(of, x, causal)

    def run():
        with tier(name):
            return inner()

    return run


def formula(of, x, causal):
    if (need := MATRICES * math.prod(x.q.shape[:3]) * x.q.shape[2] * x.q.dtype.itemsize) > bytes_here(x.q):
        raise MemoryError(f"the formula keeps {need / 1e9:.0f} GB")
    if x.q.dtype == DTYPE["bfloat16"]:
        x = Arrays(*(array.astype(np.float16) for array in x))
    run = partial(standard_jvp, *x.primal, *x.tangents, bias=causal_bias(x.q) if causal else None)
    if of == "tangent":
        return lambda: run()[:2]
    return partial(run()[2], x.do)


def causal_bias(q):
    n, xp = q.shape[-2], np if isinstance(q, np.ndarray) else cupy
    return xp.where(xp.tri(n, dtype=bool), xp.float32(0), xp.float32(-math.inf)).astype(q.dtype)


def bytes_here(x):
    """How much memory there is for arrays like x, if a fifth is left for what a pool wastes."""
    if isinstance(x, np.ndarray):
        return math.inf
    release()
    return 0.8 * cupy.cuda.Device().mem_info[0]


def jvp_flash(of, x, causal):
    from jvp_flash_attention.jvp_attention import JVPAttn
    from torch.autograd import forward_ad

    primal, tangents = ([*map(tensor_of, arrays)] for arrays in (x.primal, x.tangents))

    def run():
        with forward_ad.dual_level():
            dual = JVPAttn.fwd_dual(*map(forward_ad.make_dual, primal, tangents), causal=causal)
            return [*map(array_of, forward_ad.unpack_dual(dual))]

    return run


def fa4_jax(of, x, causal):
    jax = import_jax()
    from fa4_jax import flash_attn

    primal, tangents = ([jax.numpy.asarray(array.get().swapaxes(1, 2)) for array in arrays]  # sequence before heads
                        for arrays in (x.primal, x.tangents))  # fmt: skip
    call = jax.jit(partial(jax.jvp, partial(flash_attn, causal=causal)))

    def run():
        found = jax.block_until_ready(call(primal, tangents))
        return [cupy.from_dlpack(array.view(np.uint16)).view(x.q.dtype).swapaxes(1, 2) for array in found]

    return run


MAKERS = {OURS: ours, MMA: ours_in_tier, FORMULA: formula, JVP_FLASH: jvp_flash, FA4_JAX: fa4_jax}
PASSES_OF = {OURS: [*PRODUCTS], MMA: [*PRODUCTS], FORMULA: [*BASE], JVP_FLASH: ["tangent"], FA4_JAX: ["tangent"]}


def runs_of(case, peers):
    """(pass, peer) of all that this machine has and that is for the dtype."""
    half = case.dtype in HALF
    here = [name for name in peers if name in (OURS, FORMULA) or (half and (name == MMA or find_spec(MODULES[name])))]
    return [(of, name) for of in PRODUCTS for name in here if of in PASSES_OF[name]]


# ------------------------------------------------------------------------------------------------------------- measured
def measured(cases, peers, rounds):
    """One record for each case and pass: seconds, TFLOP/s and errors by peer."""
    records = []
    for case in progress(cases):
        release()
        x = arrays_of(case, cupy)
        expected = exact(first_head(x), case.causal)
        makers = {(of, name): partial(MAKERS[name], of, x, case.causal) for of, name in runs_of(case, peers)}
        found = timed(makers, partial(check, expected), TOLERANCE[case.dtype], rounds)
        records += records_of(case, *found)
    return records


def first_head(x):
    return Arrays(*(array[:1, :1].astype(np.float64) for array in x))


def exact(x, causal):
    """What each pass returns, in float64."""
    q, k, v, do, *tangents = x
    o, _ = reference.attention_forward(q, k, v, causal=causal)
    to, _ = reference.attention_jvp(q, k, v, *tangents, causal=causal)
    return {"forward": (o,), "backward": reference.attention_backward(do, q, k, v, causal=causal), "tangent": (o, to),
            "backward_tangent": reference.attention_backward_jvp(do, q, k, v, *tangents, causal=causal)}


def check(expected, of_and_name, result):
    return error_of([array[:1, :1] for array in result], expected[of_and_name[0]])


def records_of(case, seconds, errors, failed):
    """A record for each pass, of what was measured by pass and peer."""
    records = []
    for of in PRODUCTS:
        taken, wrong_by, why_not = ({name: value for (pass_, name), value in found.items() if pass_ == of}
                                    for found in (seconds, errors, failed))  # fmt: skip
        tflop = case.tflop("forward") * PRODUCTS[of] / PRODUCTS["forward"]
        records.append({**case._asdict(), "pass": of, "seconds": taken,
                        "tflops": {name: float(f"{tflop / s:.4g}") for name, s in taken.items()},
                        "errors": wrong_by, "failed": why_not})  # fmt: skip
    return records


# ------------------------------------------------------------------------------------------------------------------ CPU
def on_cpu(cases, rounds):
    """One record for each case and pass on NumPy arrays, the formula's seconds among them."""
    records = []
    for case in progress(cases):
        x = arrays_of(case, np)
        expected, timers, errors = exact(first_head(x), case.causal), {}, {}
        for of, peer in runs_of(case, [OURS, FORMULA]):
            run, key = MAKERS[peer](of, x, case.causal), (of, NUMPY if peer == FORMULA else peer)
            errors[key] = check(expected, key, run())  # warms up, too
            if not errors[key] <= TOLERANCE[case.dtype]:
                raise ArithmeticError(f"{of} of {peer} is wrong by {errors[key]:.1e} of the largest element")
            timers[key] = partial(host_seconds, run)
        medians = {key: float(f"{taken:.4g}") for key, taken in interleaved(timers, rounds).items()}
        records += records_of(case, medians, errors, {})
    return records


def of_particles(args, moved=np.asarray):
    """One record for each number of particles and dtype: seconds of a Laplacian with and without `particle`."""
    on_cpu = moved is np.asarray
    records, seconds_of = [], host_seconds if on_cpu else event_seconds
    numbers, dtypes = QUICK_PARTICLES if args.quick else PARTICLES, args.dtype or ["float32", "float64"]
    for dtype, n in progress([*product(dtypes, numbers)]):
        rng, walkers = np.random.default_rng(0), 1 if on_cpu else ROWS_OF_PARTICLES // n
        primal, seconds = rng.standard_normal((2, 3, walkers, 4, n, 64)).astype(dtype)
        firsts = rng.standard_normal((3, 3, walkers, 4, n, 64)).astype(dtype)
        one = [x[..., :1, :1, :, :].astype(np.float64) for x in (*primal, *firsts, *seconds)]
        primal, firsts, seconds = map(moved, (primal, firsts, seconds))
        dense = np.zeros_like(firsts, shape=(3, n, *firsts.shape[1:]))
        for p in range(n):
            dense[:, p, ..., p, :] = firsts[..., p, :]
        dense = dense.reshape(3, 3 * n, *primal.shape[1:])
        runs = {"particle": partial(na.attention_laplacian, *primal, *firsts, *seconds, particle=range(n)),
                "dense": partial(na.attention_laplacian, *primal, *dense, *seconds)}  # fmt: skip
        wrong_by = error_of([in_library_of(x[..., :1, :1, :, :], one[0]) for x in runs["particle"]()],
                            reference.attention_laplacian(*one, particle=range(n)))  # fmt: skip
        if not wrong_by <= TOLERANCE[dtype]:
            raise ArithmeticError(f"the Laplacian of {n} particles is wrong by {wrong_by:.1e} of the largest element")
        runs["dense"]()  # warms up, as the first one is
        found = interleaved({name: partial(seconds_of, run) for name, run in runs.items()}, args.rounds)
        records.append({"dtype": dtype, "particles": n, "walkers": walkers, "errors": wrong_by,
                        **{name: float(f"{taken:.4g}") for name, taken in found.items()}})  # fmt: skip
        del primal, firsts, seconds, dense, runs
        if not on_cpu:
            release()
    return records


def show_particles(records):
    rows = [{"dtype": x["dtype"], "particles": x["particles"], "walkers": x["walkers"],
             "particle, ms": 1e3 * x["particle"], "dense, ms": 1e3 * x["dense"], "times": x["dense"] / x["particle"]}
            for x in records]  # fmt: skip
    show("Laplacians of particles", rows, ["", "", "", ".3g", ".3g", ".1f"])


def host_seconds(run):
    start = time.perf_counter()
    result = run()
    taken = time.perf_counter() - start
    del result  # freed after the clock has stopped
    return taken


# ---------------------------------------------------------------------------------------------------------------- shown
def show_records(records):
    """Tables by dtype and pass: TFLOP/s of all peers, and ratios."""
    forwards = {(*key_of(record), record["pass"]): record["tflops"] for record in records}
    for (dtype, of), chosen in grouped(records, "dtype", "pass"):
        names = [name for name in (*PEERS, NUMPY) if any(name in record["tflops"] for record in chosen)]
        ratios = [name for name in (OURS, MMA) if of in BASE and name in names]
        rows = []
        for record in chosen:
            rates, base = record["tflops"], forwards.get((*key_of(record), BASE.get(of)), {})
            rows.append({**columns_of_case(record), **{name: rates.get(name) for name in names},
                         **{f"{name} / {BASE[of]}": over(rates, name, base, name) for name in ratios},
                         **{f"/ {name}": over(rates, OURS, rates, name) for name in names if name not in (OURS, MMA)}})
        others = len(names) - len({OURS, MMA} & {*names})
        show(f"{dtype}, {of}: TFLOP/s", rows, [""] * 6 + [".4g"] * len(names) + [".2f"] * (len(ratios) + others))
    show_failed(records)


def key_of(record):
    return record["dtype"], record["head_dim"], record["causal"], record["batch"], record["seqlen"]


def over(rates, name, others, other):
    return rates[name] / others[other] if name in rates and other in others else None


# ------------------------------------------------------------------------------------------------------------- compiled
def kernels(device, cases):
    """The keys of numbattn's kernels for all calls; arrays take no memory."""
    from numbattn.call.passes import PASSES
    from numbattn.cuda.passes import plans
    from numbattn.cuda.views import without_memory

    found = {}
    for case in cases:
        x = without_memory((case.batch, case.heads, case.seqlen, case.head_dim), DTYPE[case.dtype])
        for name in TIERS if case.dtype in HALF else TIERS[-1:]:
            with tier(name):
                planned = plans(device, x, x, x, passes=[PASSES[of] for of in PRODUCTS], causal=case.causal)
            found |= {step.key: None for passed in planned for step in passed.steps}
    return [*found]


def compile_peers(cases, peers):
    """Let Triton compile into its own cache on disk, by several processes; that a peer does not run is seen later."""
    in_processes(8, first_call, [(case,) for case in cases if ("tangent", JVP_FLASH) in runs_of(case, peers)])


def first_call(case):
    with suppress(Exception):
        jvp_flash("tangent", arrays_of(case, cupy), case.causal)()


# --------------------------------------------------------------------------------------------------------- command line
def cases_of(part, args):
    if part == "cpu":
        sizes = QUICK_CPU if args.quick else CPU
        return [Case(dtype, d, causal, n, batch, 8, 8)
                for dtype, (batch, n, d), causal in product(args.dtype or ["float32", "float64"], sizes, (False, True))]
    if part == "small":
        return [Case(dtype, d, False, n, NBYTES // (SMALL_HEADS * n * d * DTYPE[dtype].itemsize), *[SMALL_HEADS] * 2)
                for dtype, (n, d) in product(args.dtype or ["float32", "float64"], QUICK_SMALL if args.quick else SMALL)
                if dtype not in HALF]  # fmt: skip
    options = product(args.dtype or ["bfloat16", "float32"], args.head_dim or (64, 128), args.causal or (False, True),
                      args.seqlen or (QUICK_SEQLENS if args.quick else SEQLENS))  # fmt: skip
    return [make_case(dtype, d, causal, n, "field", WIDTH[dtype] // d if dtype in WIDTH else None)
            for dtype, d, causal, n in options if dtype != "float64"]  # fmt: skip


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cpu", action="store_true", help="on NumPy arrays instead")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, 2 rounds")
    parser.add_argument("--dtype", nargs="+", choices=list(TOLERANCE))
    parser.add_argument("--head-dim", nargs="+", type=int, metavar="N")
    parser.add_argument("--seqlen", nargs="+", type=int, metavar="N")
    causal = parser.add_mutually_exclusive_group()
    causal.add_argument("--causal", action="store_const", const=[True], help="causal only")
    causal.add_argument("--full", action="store_const", dest="causal", const=[False], help="not causal only")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.parts = ["cpu"] if args.cpu else args.parts
    return args


def main():
    args = parse()
    if not args.cpu:
        require_gpu()
    results = {"machine": machine(*PACKAGES) | ({} if args.cpu else {"gpu": gpu()}), "arguments": vars(args)}
    show_machine(results["machine"])
    cases = {part: cases_of(part, args) for part in args.parts if part != "particles"}
    if args.cpu:
        wrong = finish(args, results, "cpu", partial(on_cpu, cases["cpu"], args.rounds))
        finish(args, results, "particles", partial(of_particles, args), show_particles)
        return wrong
    start, everything = time.perf_counter(), [case for found in cases.values() for case in found]
    prepare(everything, args.peers)
    print(f"kernels are in the cache after {time.perf_counter() - start:.0f} s")
    with one_stream():
        if "particles" in args.parts:
            finish(args, results, "particles", partial(of_particles, args, cupy.asarray), show_particles)
        return sum(finish(args, results, part, partial(measured, found, args.peers, args.rounds))
                   for part, found in cases.items())  # fmt: skip


def prepare(cases, peers):
    from numbattn.cuda.launch import current_gpu

    compile_all(kernels(current_gpu().device, cases))
    compile_peers(cases, peers)


def finish(args, results, part, measure: Callable, show_part: Callable = show_records):
    """Measure, show and save a part. Returns in how many records numbattn does not run."""
    start = time.perf_counter()
    results[part] = measure()
    show_part(results[part])
    print(f"{part}: {time.perf_counter() - start:.0f} s")
    if args.json:
        save(args.json, results)  # after each part, so that what was measured is not lost
    return sum(OURS in record.get("failed", ()) for record in results[part])


if __name__ == "__main__":
    sys.exit(main())

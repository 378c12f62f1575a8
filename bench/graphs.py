"""Attention over the edges of graphs, its gradients and those of its gradients, next to the memory's speed and others.

    python bench/graphs.py
    python bench/graphs.py --quick
    python bench/graphs.py --dtype float32 --size 8x16 --degree 32 power --json graphs.json
    python bench/graphs.py --cpu

A size is heads x head_dim. Queries have as many edges as `--degree` says, each to any key; "power": by a power law, 32
on average, and keys are as popular as that. "edges": with a bias, a factor and what is added to keys and values, too.
The bound is the time in which a copy, of the same run, moves as many bytes as a row of k and one of v for each edge and
head, and the lists and arrays of edges. k and v that fit in a cache may take less, and here they do unless they are
beyond it. "double" are the gradients of a function of all gradients, by all arrays and do.

"torch" gathers rows by index_select and adds by index_add, with autograd; "pyg" is what TransformerConv sends along
edges, without its projections; "dense" is scaled_dot_product_attention with a boolean mask, and its plain formula for
double, where matrices fit. Peers take turns, and are compared with float64, by the first head of all results, before
anything is timed; who is wrong is not timed, and what takes longer than 20 ms is timed once. Each dtype and size has a
process of its own on a GPU: they compile at the same time, and then measure one after the other.
Needs tabulate and tqdm; compares with torch and torch_geometric if they are installed.
"""

import argparse
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from common import interleaved, machine, save, show, show_machine
from peers import DTYPE, array_of, cupy, event_seconds, gpu, one_stream, release, require_gpu, tensor_of, torch
from peers import PACKAGES as INSTALLED
from second import host_seconds
from small import error_of, rounded, show_failed, timed
from timing import extra_bytes, progress, why

from numbattn import graphs
from numbattn.graphs.problem import AXES

OURS, TORCH, PYG, DENSE = "numbattn", "torch", "pyg", "dense"
MODULES = {TORCH: "torch", PYG: "torch_geometric", DENSE: "torch"}
PACKAGES = [*INSTALLED, "torch_geometric"]
PASSES = "forward", "backward", "double"
DTYPES, SIZES, DEGREES, MEAN = ("float32", "float64", "bfloat16"), ((4, 32), (8, 16), (8, 64)), (8, 32, 128), 32
EDGES, CPU_EDGES, FIRST_EDGES = 2**20, 2**17, 2**12  # the last of the calls that compile
POWER, ALPHA = "power", 1.5  # of Pareto's law
MOST_DENSE, MATRICES = 30 << 30, 12  # bytes of matrices (heads, nodes, nodes), and how many double keeps
STEP = 2.0**-40  # of tangents as imaginary parts: its square is lost
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}  # of the largest element of an array
INDEX = 4  # bytes of a number in a list
COPIED = 1 << 30  # bytes that the copy reads
LONG_SECONDS = 0.02
SHARED = []  # by the processes: the barrier after compiling, and the lock of who measures


class Case(NamedTuple):
    dtype: str
    heads: int
    head_dim: int
    degree: object  # or POWER
    of_edges: bool = False  # whether there are arrays of edges
    edges: int = EDGES

    @property
    def nodes(self):
        return self.edges // (MEAN if self.degree == POWER else self.degree)

    def ends(self):
        """The query and the key of each edge, the queries ascending."""
        rng = np.random.default_rng(0)
        if self.degree != POWER:  # each edge to a key of another part of all, so that there is no other one between two
            places = (np.arange(self.degree) + rng.random((self.nodes, self.degree))) / self.degree
            return np.repeat(np.arange(self.nodes), self.degree), (places * self.nodes).astype(int).ravel()
        popular = 1 + rng.pareto(ALPHA, self.nodes)
        i, j = rng.choice(self.nodes, (2, self.edges), p=popular / popular.sum())
        return np.sort(i), j

    def arrays(self, xp):
        """Those of the call by name, and do; drawn again, what multiplies its gradients, without do."""
        rng, n, d = xp.random.default_rng(0), self.nodes, self.head_dim
        shapes = dict.fromkeys("qkv", (n, d))
        if self.of_edges:
            shapes |= {name: (self.edges, d)[:own] for name, own in AXES.items()}

        def drawn(shape):
            return rng.standard_normal((self.heads, *shape), np.float32).astype(DTYPE[self.dtype])

        x, along = ({name: drawn(shape) for name, shape in shapes.items()} for _ in range(2))
        return x, drawn((n, d)), along

    def nbytes(self):
        """What forward has to read of edges."""
        of_edge = 2 * self.head_dim + self.of_edges * (2 * self.head_dim + 2)
        return self.edges * (self.heads * of_edge * DTYPE[self.dtype].itemsize + INDEX)


# ---------------------------------------------------------------------------------------------------------------- peers
def ours(case, ends, x, do, along, of):
    """A pass as a run, as from all peers: it returns o, or gradients in the order of the arrays, those by do last."""
    g, _ = graphs.Graph.from_edges(*ends, (case.nodes, case.nodes))
    call = tuple(x[name] for name in "qkv"), {name: array for name, array in x.items() if name in AXES}
    if of == "forward":
        return lambda: graphs.attention_forward(*call[0], g, **call[1])[:1]  # with lse, as backward needs it
    _, saved = graphs.attention_forward(*call[0], g, **call[1])

    def in_order(grads):
        return *grads[:3], *(getattr(grads, name) for name in call[1]), *grads[3:]

    if of == "backward":
        return lambda: in_order(graphs.attention_backward(do, saved))
    _, backprop2 = graphs.attention_backward_vjp(do, saved)
    given = {name if name in "qkv" else f"dd{name}": array for name, array in along.items()}
    nodes = [given.pop(name) for name in "qkv"]
    return lambda: in_order(backprop2(*nodes, **given))


def by_autograd(attention, names, tensors, do, along, of, double=nullcontext):
    """A pass of a function of torch's tensors as a run."""
    leaves = [tensors[name].requires_grad_(of != "forward") for name in names]
    call = partial(attention, *leaves[:3], **dict(zip(names[3:], leaves[3:])))
    if of == "forward":
        return lambda: (call(),)
    if of == "backward":
        return partial(torch.autograd.grad, call(), leaves, do, retain_graph=True)
    with double():
        grads = torch.autograd.grad(call(), leaves, do.requires_grad_(), create_graph=True)
    return partial(torch.autograd.grad, grads, [*leaves, do], [along[name] for name in names], retain_graph=True)


def with_torch(case, ends, x, do, along, of, message_passing=None):
    """Rows of all heads side by side, as is usual in torch: heads are the second axis."""
    tensors, along = ({name: rows_of(array) for name, array in arrays.items()} for arrays in (x, along))
    i, j = (tensor_of(rows) for rows in ends)
    attention = partial(gathered, i, j) if message_passing is None else message_passing(case, i, j)
    return by_autograd(attention, [*x], tensors, rows_of(do), along, of)


def rows_of(x):
    return tensor_of(x).movedim(0, 1).contiguous()


def gathered(i, j, q, k, v, bias=None, factor=None, k_edge=0, v_edge=0):
    """The plain formula on gathered rows."""
    S = (q.index_select(0, i) * (k.index_select(0, j) + k_edge)).sum(-1) / math.sqrt(q.shape[-1])
    if bias is not None:
        S = S + bias
    m = S.new_full(q.shape[:2], -math.inf).scatter_reduce(0, i[:, None].expand_as(S), S.detach(), "amax")
    P = (S - m.index_select(0, i)).exp()
    l = S.new_zeros(q.shape[:2]).index_add(0, i, P)
    P = P / l.index_select(0, i)
    if factor is not None:
        P = P * factor
    return torch.zeros_like(v).index_add(0, i, P[..., None] * (v.index_select(0, j) + v_edge))


def transformer_conv(case, i, j):
    from torch_geometric.nn import TransformerConv

    layer = TransformerConv(case.head_dim, case.head_dim, case.heads, root_weight=False)
    edges = torch.stack([j, i])

    def attention(q, k, v):
        o = layer.propagate(edges, query=q, key=k, value=v, edge_attr=None)
        layer._alpha = None  # which it keeps
        return o

    return attention


def dense(case, ends, x, do, along, of):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    need = MATRICES * case.heads * case.nodes**2 * DTYPE[case.dtype].itemsize
    if need > MOST_DENSE:
        raise MemoryError(f"{MATRICES} matrices take {need / 1e9:.0f} GB")
    tensors, along = ({name: tensor_of(array)[None] for name, array in arrays.items()} for arrays in (x, along))
    i, j = (tensor_of(rows) for rows in ends)
    mask = torch.zeros(case.nodes, case.nodes, dtype=torch.bool, device=i.device)
    mask[i, j] = True
    attention = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
    run = by_autograd(attention, [*x], tensors, tensor_of(do)[None], along, of, partial(sdpa_kernel, SDPBackend.MATH))
    return lambda: [array[0] for array in run()]


MAKERS = {OURS: ours, TORCH: with_torch, PYG: partial(with_torch, message_passing=transformer_conv), DENSE: dense}


def names_of(case, peers):
    """The peers that are here, and that have what the case needs."""
    here = [name for name in peers if name not in MODULES or find_spec(MODULES[name])]
    if case.of_edges:
        return [name for name in here if name not in (PYG, DENSE)]
    return [name for name in here if name != DENSE or case.degree != POWER]  # where several edges are between two nodes


# --------------------------------------------------------------------------------------------------------------- checks
def exact(case, ends, x, do, along):
    """What each pass returns for the first head, in float64. The gradients of a function of gradients are the tangents
    of these along its own, and those by do the tangent of o: here imaginary parts, as all steps are analytic."""
    (i, j), work = ends, np.complex128
    x = {name: array[0].astype(np.float64) + 1j * STEP * along[name][0].astype(np.float64) for name, array in x.items()}
    do, scale = do[0].astype(work), 1 / math.sqrt(case.head_dim)

    def added(terms, rows):
        parts = terms.reshape(len(terms), -1).view(np.float64)  # CuPy adds no complex numbers
        sums = np.zeros((case.nodes, parts.shape[1]), parts.dtype, like=parts)
        (np if isinstance(parts, np.ndarray) else cupy).add.at(sums, rows, parts)
        return sums.view(work).reshape(case.nodes, *terms.shape[1:])

    K, V, factor = x["k"][j] + x.get("k_edge", 0), x["v"][j] + x.get("v_edge", 0), x.get("factor", work(1))
    P = np.exp(scale * (x["q"][i] * K).sum(-1) + x.get("bias", 0))
    P = P / added(P, i)[i]
    o = added((factor * P)[:, None] * V, i)
    dP = (do[i] * V).sum(-1)
    dS = P * (factor * dP - (do * o).sum(-1)[i])
    dk_edge, dv_edge = scale * dS[:, None] * x["q"][i], (factor * P)[:, None] * do[i]
    grads = {"q": added(scale * dS[:, None] * K, i), "k": added(dk_edge, j), "v": added(dv_edge, j), "bias": dS,
             "factor": P * dP, "k_edge": dk_edge, "v_edge": dv_edge}  # fmt: skip
    grads = [grads[name] for name in x]
    return {"forward": [o.real], "backward": [dx.real for dx in grads],
            "double": [dx.imag / STEP for dx in [*grads, o]]}  # fmt: skip


def check(expected, of_and_name, result):
    of, name = of_and_name
    heads = (slice(None), 0) if name in (TORCH, PYG) else 0
    return error_of([array_of(x)[heads] for x in result], expected[of])


# ------------------------------------------------------------------------------------------------------------- measured
def bytes_per_second(xp):
    """Of a copy, read and written."""
    x = xp.ones(COPIED // 4, np.float32)
    y = xp.empty_like(x)
    copy = partial(np.copyto if xp is np else cupy.copyto, y, x)
    copy()
    seconds = min(host_seconds(copy) if xp is np else event_seconds(copy, 20) for _ in range(5))
    return 2 * COPIED / seconds


def prepared(case, peers, xp):
    """Makers of runs by pass and peer, and the check of what these return."""
    ends = tuple(xp.asarray(rows) for rows in case.ends())
    given = case, ends, *case.arrays(xp)
    makers = {(of, name): partial(MAKERS[name], *given, of) for of in PASSES for name in names_of(case, peers)}
    return makers, partial(check, exact(*given))


def measured(cases, peers, rounds, rate):
    """A record for each case and pass: seconds and errors by peer, and the bound."""
    for case in cases:
        release()
        makers, checked = prepared(case, peers, cupy)
        release()
        for of in PASSES:  # one after the other: autograd keeps much memory
            chosen = {key: make for key, make in makers.items() if key[0] == of}
            try:
                found = timed(chosen, checked, TOLERANCE[case.dtype], rounds, long=LONG_SECONDS)
                extra = extra_of(makers[of, OURS]) if (of, OURS) in found[0] else None
            except Exception as error:  # as where there is too little memory for all together
                found, extra = ({}, {}, dict.fromkeys(chosen, why(error))), None
            yield record_of(case, of, rate, *found) | {"extra": extra}
            release()


def extra_of(make):
    """Bytes beyond arguments, lists of the graph, and results."""
    run = make()
    results = sum(x.nbytes for x in run())
    return extra_bytes(run) - results


def on_cpu(cases, peers, rounds, rate):
    for case in progress(cases):
        makers, checked = prepared(case, peers, np)
        for of in PASSES:
            timers, errors, failed = {}, {}, {}
            for key in [key for key in makers if key[0] == of]:
                try:
                    run = makers[key]()
                    errors[key] = checked(key, run())  # warms up, too
                except MemoryError as error:
                    failed[key] = str(error)
                    continue
                if not errors[key] <= TOLERANCE[case.dtype]:
                    raise ArithmeticError(f"{of} of {key[1]} is wrong by {errors[key]:.1e} of the largest element")
                timers[key] = partial(host_seconds, run)
            yield [record_of(case, of, rate, interleaved(timers, rounds), errors, failed)]


def record_of(case, of, rate, seconds, errors, failed):
    """What was measured of a pass; rate: bytes per second of a copy."""
    seconds, errors, failed = ({name: value for (_, name), value in found.items()}
                               for found in (seconds, errors, failed))  # fmt: skip
    bound, lists = rounded(case.nbytes() / rate), INDEX * (3 * case.edges + 2 * case.nodes)
    seconds = {name: rounded(s) for name, s in seconds.items()}
    return {**case._asdict(), "nodes": case.nodes, "pass": of, "bound": bound, "lists": lists, "seconds": seconds,
            "errors": errors, "failed": failed}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ processes
def in_turn(cases, peers, rounds, rate):
    """The records of `measured`, by a process for each kind of call: Numba takes a second for each kernel."""
    kinds = {}
    for case in cases:
        kinds.setdefault(case._replace(degree=MEAN, edges=FIRST_EDGES), []).append(case)
    spawned, count = get_context("spawn"), len(kinds)
    with ProcessPoolExecutor(count, spawned, share, (spawned.Barrier(count), spawned.Lock())) as pool:
        found = [pool.submit(after_first_calls, *kind, peers, rounds, rate) for kind in kinds.items()]
        yield from (each.result() for each in as_completed(found))


def share(*objects):
    SHARED.extend(objects)


def after_first_calls(first, cases, peers, rounds, rate):
    """The records of a kind: when all processes have compiled, and while no other one measures."""
    compiled, turn = SHARED
    with one_stream():
        try:
            makers, _ = prepared(first, peers, cupy)
            for make in makers.values():
                with suppress(Exception):  # that it does not run is seen later
                    make()()
            del makers
            release()
        except BaseException:
            compiled.abort()
            raise
        compiled.wait()
        with turn:
            return [*measured(cases, peers, rounds, rate)]


# ---------------------------------------------------------------------------------------------------------------- shown
def show_records(records):
    """Milliseconds of all peers, and what our own are over the bound, over forward and over backward."""
    for of, under in zip(PASSES, ("bound", *PASSES)):
        rows = []
        for record, base in zip(select(records, of), select(records, under if under in PASSES else of)):
            ms, ours = record["seconds"], record["seconds"].get(OURS)
            below = base["seconds"].get(OURS) if under in PASSES else record["bound"]
            rows.append({**{key: record[key] for key in Case._fields}, "bound": 1e3 * record["bound"],
                         **{name: 1e3 * ms[name] if name in ms else None for name in MAKERS},
                         f"{OURS} / {under}": ours / below if ours and below else None})  # fmt: skip
        show(f"{of}: milliseconds", rows, ".3g")
    show_failed(records, "{dtype}, {heads} x {head_dim}, degree {degree}, {pass}")


def select(records, of):
    return [record for record in records if record["pass"] == of]


# --------------------------------------------------------------------------------------------------------- command line
def size(text):
    heads, head_dim = map(int, text.split("x"))
    return heads, head_dim


def degree(text):
    return text if text == POWER else int(text)


def cases_of(args):
    edges = (CPU_EDGES if args.cpu else EDGES) // (8 if args.quick else 1)
    for dtype in args.dtype:
        for (heads, head_dim), degree in product(args.size, args.degree):
            yield Case(dtype, heads, head_dim, degree, edges=edges)
        if dtype == args.dtype[0]:
            yield Case(dtype, *args.size[0], MEAN, True, edges)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on NumPy arrays instead, and an eighth of the edges")
    parser.add_argument("--quick", action="store_true", help="one size, two degrees, an eighth of the edges, 2 rounds")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--size", nargs="+", type=size, metavar="HxD", help="heads x head_dim")
    parser.add_argument("--degree", nargs="+", type=degree, metavar="N", help="edges of a query, or power")
    parser.add_argument("--peers", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--rounds", type=int, help="medians are of so many samples (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.dtype = args.dtype or DTYPES[: 1 if args.quick else 2 if args.cpu else 3]
    args.size = args.size or SIZES[: 1 if args.quick else None]
    args.degree = args.degree or (MEAN, POWER) if args.quick else args.degree or (*DEGREES, POWER)
    return args


def main():
    args = parse()
    if not args.cpu:
        require_gpu()
    results = {"machine": machine(*PACKAGES) | ({} if args.cpu else {"gpu": gpu()}), "arguments": vars(args)}
    show_machine(results["machine"])
    cases, start, xp = [*cases_of(args)], time.perf_counter(), np if args.cpu else cupy
    results |= {"bytes_per_second": rounded(bytes_per_second(xp)), "graphs": []}
    run = on_cpu if args.cpu else in_turn
    for found in run(cases, args.peers, args.rounds, results["bytes_per_second"]):
        records = [*results["graphs"], *found]
        results["graphs"] = sorted(records, key=lambda x: cases.index(Case(*map(x.get, Case._fields))))
        if args.json:
            save(args.json, results)  # after each part, so that what was measured is not lost
    show_records(results["graphs"])
    print(f"a copy moves {results['bytes_per_second'] / 1e12:.3g} TB/s; {time.perf_counter() - start:.0f} s in all")
    return sum(OURS in record["failed"] for record in results["graphs"])


if __name__ == "__main__":
    sys.exit(main())

"""Random calls over the edges of graphs, compared with the formula; its tangents are those of complex numbers."""

import numpy as np

import numbattn as na
from numbattn import graphs
from numbattn.base.checks import dtype_of_sums
from numbattn.graphs import edge, formula
from numbattn.graphs.problem import AXES, EdgeArrays

from ..accuracy import assert_accurate, assert_equal, to_numpy

STEP = 2.0**-40  # of tangents: its square is lost
COMPLEX = {"float32": np.complex64, "float64": np.complex128, "longdouble": np.clongdouble}


class Drawn:
    """A call of any kind: queries and keys without edges, several edges between two nodes, a hub or no edge at all;
    arrays of edges for all heads, for some or for each; grouped heads, axes that broadcast, any strides."""

    def __init__(self, seed, dtype, xp=np, most=60):
        self.rng, self.dtype, self.xp = np.random.default_rng(seed), np.dtype(dtype), xp
        rng, one_of = self.rng, self.one_of
        m, n, edges = (int(x) for x in rng.integers(1, most, 3))
        m, n = (n, n) if one_of(True, False) else (m, n)
        i, j = rng.integers(m, size=edges), rng.integers(n, size=edges)
        if one_of(True, False, False):  # a hub, and few others
            i, j = np.where(rng.random((2, edges)) < 0.8, rng.integers(min(m, n)), (i, j))
        edges = one_of(0, *[edges] * 9)
        i, j = i[:edges], j[:edges]
        d, e, heads, group = one_of(1, 3, 8, 16), one_of(1, 4, 8, 20), one_of(1, 2), one_of(1, 1, 3)
        lead = one_of((), (2,)) if group * heads > 1 else one_of(None, (), (2,))
        shapes = {"q": (m, d), "k": (n, d), "v": (n, e)}
        rows = len(i)
        own = {"bias": (rows,), "factor": (rows,), "k_edge": (rows, d), "v_edge": (rows, e)}
        self.of_edges = [name for name in own if one_of(True, False)]
        leads = {name: self.lead_of(name, lead, heads, group) for name in shapes}
        self.arrays = {name: self.array(leads[name], shape) for name, shape in shapes.items()}
        self.batch = () if lead is None else (*np.broadcast_shapes(*(x[:-1] for x in leads.values())), heads * group)
        for name in self.of_edges:
            start = one_of(*range(len(self.batch) + 1))
            self.arrays[name] = self.array([one_of(1, x) for x in self.batch[start:]], own[name])
        self.softmax = one_of(True, True, False)
        self.graph, _ = graphs.Graph.from_edges(xp.asarray(i), xp.asarray(j), (m, n))
        dropout = na.Dropout(0.3, seed=seed) if one_of(True, False, False) else None
        self.options = {"softmax": self.softmax, "scale": one_of(None, 0.3), "dropout": dropout}

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    def lead_of(self, name, lead, heads, group):
        if lead is None:
            return ()
        own = heads * group if name == "q" else heads
        return (*(self.one_of(1, x) for x in lead), own)

    def array(self, lead, own):
        """Of any strides."""
        shape = *lead, *own
        x = self.rng.standard_normal(shape).astype(self.dtype)
        order = self.one_of(None, None, "swapped", "backwards")
        if order == "swapped" and len(shape) > 1:
            x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1] if order == "backwards" else x

    def like(self, shape, dtype=None):
        return self.rng.standard_normal(shape).astype(dtype or self.dtype)

    def given(self, arrays):
        """Positional arguments and options of a call."""
        arrays = {name: self.xp.asarray(x) for name, x in arrays.items()}
        return [arrays.pop(name) for name in "qkv"], arrays


def check(seed, dtype, xp=np, again=True, **sizes):
    """All passes of a call: twice the plain formula's error, in the dtype of sums, is allowed. again: also those of
    `attention_backward_vjp`, which are the same, and a second call has the same bits."""
    drawn = Drawn(seed, dtype, xp, **sizes)
    (q, k, v), of_edges = drawn.given(drawn.arrays)
    o, backprop = graphs.attention_vjp(q, k, v, drawn.graph, **of_edges, **drawn.options)
    saved, softmax = backprop.saved, drawn.softmax
    do, tdo = drawn.like(o.shape), drawn.like(o.shape)
    dlse, tdlse = (drawn.like(saved.lse.shape, saved.lse.dtype) if softmax else None for _ in range(2))
    moves = {name: drawn.like(x.shape) for name, x in drawn.arrays.items() if name == "q" or drawn.one_of(True, False)}
    rows = [None if x is None else xp.asarray(x) for x in (do, dlse, tdo, tdlse)]
    tangents = [None if name not in moves else xp.asarray(moves[name]) for name in "qkv"]
    t_of_edges = {f"t{name}": xp.asarray(x) for name, x in moves.items() if name in AXES}
    _, to, _, tsaved = graphs.attention_forward_jvp(
        q, k, v, drawn.graph, *tangents, **of_edges, **t_of_edges, **drawn.options
    )
    grads, tgrads = graphs.attention_backward_jvp(
        rows[0], saved, tsaved, dlse=rows[1], tdo=rows[2], tdlse=rows[3]
    )
    found = {"o": o, "lse": saved.lse, "to": to, "tlse": tsaved.tlse, **named(grads, "d"), **named(tgrads, "td")}
    found = {name: to_numpy(x) for name, x in found.items() if x is not None}
    compare(drawn, saved, found, (do, dlse, tdo, tdlse), moves)
    if not again:
        return
    _check_second(drawn, backprop, rows, moves)
    for one, other in zip(backprop(rows[0], rows[1]), grads):
        assert_equal(one, other)


def _check_second(drawn, backprop, rows, moves):
    """The gradients of a function of gradients: <moves, gradients>, whose derivative in any direction is known."""
    _, backprop2 = backprop.vjp(rows[0], rows[1])
    tangents = [None if name not in moves else drawn.xp.asarray(moves[name]) for name in "qkv"]
    second = backprop2(*tangents, **{f"dd{name}": drawn.xp.asarray(x) for name, x in moves.items() if name in AXES})
    saved = backprop.saved
    of_edges = {f"t{name}": drawn.xp.asarray(x) for name, x in moves.items() if name in AXES}
    (q, k, v), edges = drawn.given(drawn.arrays)
    *_, tsaved = graphs.attention_forward_jvp(q, k, v, drawn.graph, *tangents, **edges, **of_edges, **drawn.options)
    _, wanted = graphs.attention_backward_jvp(rows[0], saved, tsaved, dlse=rows[1])
    for one, other in zip((*second[:3], *(getattr(second, name) for name in AXES)),
                          (*wanted, *(getattr(wanted, name) for name in AXES))):  # fmt: skip
        assert (one is None) == (other is None)
        if one is not None:
            assert_equal(one, other)
    assert_equal(second.gdo, tsaved.to)
    if tsaved.tlse is not None:
        assert_equal(second.dlse, tsaved.tlse)


def check_laplacian(seed, dtype, xp=np, **sizes):
    """By two coordinates, of all arrays."""
    drawn = Drawn(seed, dtype, xp, **sizes)
    moves = [{name: drawn.like(x.shape) for name, x in drawn.arrays.items()} for _ in range(3)]
    first = {name: np.stack([each[name] for each in moves[:2]]) for name in drawn.arrays}
    (nodes, edges), (of_nodes, j), (l_of_nodes, l) = map(drawn.given, (drawn.arrays, first, moves[2]))
    along = {f"{prefix}{name}": x for prefix, each in (("j", j), ("l", l)) for name, x in each.items()}
    found = graphs.attention_laplacian(*nodes, drawn.graph, *of_nodes, *l_of_nodes, **edges, **along, **drawn.options)
    found = dict(zip(("o", "jo", "lo"), map(to_numpy, found)))
    _, saved = graphs.attention_forward(*nodes, drawn.graph, **edges, **drawn.options)
    sums = dtype_of_sums(drawn.dtype)
    kinds = sums.type, np.longdouble if sums == np.float64 else np.float64
    plain, exact = (dict(zip(found, laplacian(drawn, saved, moves, work))) for work in kinds)
    largest = float(max(np.abs(x).max(initial=1) for x in exact.values()))
    for name, got in found.items():
        want, other = (x[name].reshape(got.shape) for x in (exact, plain))
        assert got.dtype == drawn.dtype
        assert_accurate(name, got, want, other.astype(dtype), got.dtype, bits=16, largest=largest)


def laplacian(drawn, saved, moves, work):
    """o, its derivatives and its Laplacian in a dtype, as numbattn.graphs.edge has it."""
    problem = saved.problem
    wide = {name: x.astype(work) for name, x in drawn.arrays.items()}
    graph = graphs.Graph(to_numpy(drawn.graph.indptr), to_numpy(drawn.graph.indices), drawn.graph.keys)
    inputs = saved.inputs._replace(**{name: wide.pop(name) for name in "qkv"}, graph=graph, of_edges=EdgeArrays(**wide))
    o, _, (q, k, v, factor, Z, P, i, j) = formula.forward(problem, inputs, work)
    slopes, scale, tos, lo = (P, P) if drawn.softmax else (np.ones_like(P), np.zeros_like(P)), work(inputs.scale), [], 0
    for t in moves:
        t = {name: formula.heads(x if AXES.get(name, 2) == 2 else x[..., None], problem, work) for name, x in t.items()}
        tq, tk, tv = t["q"][:, :, i], t["k"][:, :, j] + t.get("k_edge", 0), t["v"][:, :, j] + t.get("v_edge", 0)
        tbias, tfactor = (t[name][..., 0] if name in t else np.zeros_like(P) for name in ("bias", "factor"))
        tS, S2 = scale * (tq * k + q * tk).sum(-1) + tbias, 2 * scale * (tq * tk).sum(-1)
        P2, of_v, of_tv = edge.second(P, *slopes, Z * factor, Z * tfactor, tS, S2)
        of_o = Z * (tfactor * P + factor * slopes[0] * tS)
        terms = of_o[..., None] * v + (Z * factor * P)[..., None] * tv, of_v[..., None] * v + of_tv[..., None] * tv
        to, o2, sums = (formula.added(x, i, problem.seqlen_q) for x in (*terms, np.stack([P * tS, P2], axis=-1)))
        if drawn.softmax:
            tlse, total = sums[..., :1], sums[..., 1:]
            to = to - tlse * o
            o2 = o2 - total * o - 2 * tlse * to
        tos.append(to)
        lo = lo + (o2 if len(tos) < len(moves) else to)
    return o, np.stack(tos[:-1]), lo


def named(grads, prefix):
    return {f"{prefix}{name}": x for name, x in {**dict(zip("qkv", grads)), **vars(grads)}.items() if name != "score"}


def compare(drawn, saved, found, rows, moves):
    sums = dtype_of_sums(drawn.dtype)
    plain = computed(drawn, saved, rows, moves, sums.name)
    exact = computed(drawn, saved, rows, moves, "longdouble" if sums == np.float64 else "float64")
    largest = float(max(np.abs(x[np.isfinite(x)]).max(initial=1) for x in exact.values()))  # terms may cancel
    for name, got in found.items():
        want = exact[name].reshape(got.shape)
        assert got.dtype == (sums if "lse" in name else drawn.dtype), name
        other = plain[name].astype(got.dtype).reshape(got.shape)
        assert_accurate(name, got, want, other, got.dtype, bits=16, largest=largest)


def computed(drawn, saved, rows, moves, work):
    """All results by the formula, in this dtype."""
    kind, problem = COMPLEX[work], saved.problem
    wide = {name: x.astype(kind) for name, x in drawn.arrays.items()}
    for name, x in moves.items():
        wide[name] = wide[name] + kind(1j * STEP) * x.astype(kind)
    do, dlse, tdo, tdlse = (None if x is None else x.astype(kind) for x in rows)
    do = do + kind(1j * STEP) * tdo
    dlse = None if dlse is None else dlse + kind(1j * STEP) * tdlse
    edges = {name: wide.get(name) for name in AXES}
    graph = graphs.Graph(to_numpy(drawn.graph.indptr), to_numpy(drawn.graph.indices), drawn.graph.keys)
    inputs = saved.inputs._replace(**{name: wide[name] for name in "qkv"}, graph=graph, of_edges=EdgeArrays(**edges))
    o, lse, _ = formula.forward(problem, inputs, kind)
    found = {"o": o, "lse": lse, **{f"d{name}": x for name, x in
                                    formula.backward(problem, inputs, do, dlse, kind).items()}}  # fmt: skip
    found = {name: x for name, x in found.items() if x is not None}
    return {**{name: x.real for name, x in found.items()}, **{f"t{name}": x.imag / STEP for name, x in found.items()}}

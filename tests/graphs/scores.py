"""A call with scores, all its results by name."""

import numpy as np

from numbattn import graphs

from ..accuracy import to_numpy


def of_kind(s, batch, head, edge, i, j, weight, kind):
    """It bends, also by entries, reads them twice, and depends on all that it is told."""
    of_key = weight[j % 2, 0]
    return s + weight[kind[edge], head] * s * s * 0.1 + of_key * of_key * 0.1 + 0.05 * i + 0.1 * batch


def bent(s, batch, head, edge, i, j, strength):
    return s + strength[head % 2] * s * s * 0.1


def hiding(s, batch, head, edge, i, j, strength):
    return bent(s, batch, head, edge, i, j, strength) if edge % 5 else -np.inf


class Call:
    """Of float64; `moved` is a like call whose arrays are further along the tangents."""

    def __init__(self, rng, nodes=7, edges=30, softmax=True):
        i, j = rng.integers(nodes, size=(2, edges))
        self.graph, _ = graphs.Graph.from_edges(i, j, (nodes, nodes))
        shapes = {"q": (2, 4, nodes, 4), "k": (2, 2, nodes, 4), "v": (2, 2, nodes, 5), "bias": (edges,),
                  "factor": (4, edges), "weight": (2, 4), "strength": (2,), "do": (2, 4, nodes, 5),
                  "dlse": (2, 4, nodes)}  # fmt: skip
        self.x, self.t = ({name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2))
        self.kind, self.softmax = rng.integers(2, size=edges), softmax

    def moved(self, step):
        made = object.__new__(Call)
        vars(made).update(vars(self), x={name: x + step * self.t[name] for name, x in self.x.items()})
        return made

    def rounded(self, dtype):
        made = self.moved(0)
        made.x, made.t = ({name: x.astype(dtype).astype(np.float64) for name, x in each.items()}
                          for each in (self.x, self.t))  # fmt: skip
        return made

    def given(self, xp, dtype):
        """Arrays and tangents by name, those in the score as there, the graph, and the score."""
        x, t = ({name: xp.asarray(a.astype(dtype)) for name, a in each.items()} for each in (self.x, self.t))
        for found, each in ((x, self.x), (t, self.t)):
            wide = np.promote_types(dtype, np.float32)
            found |= {name: xp.asarray(each[name].astype(wide)) for name in ("weight", "strength")}
        own = graphs.EdgeScore(of_kind, arrays=[x["weight"], xp.asarray(self.kind)], gradient=[True, False])
        other = graphs.EdgeScore(hiding if self.softmax else bent, arrays=[x["strength"]], gradient=True)
        return x, t, graphs.Graph(xp.asarray(self.graph.indptr), xp.asarray(self.graph.indices)), [own, other]

    def second(self, xp=np, dtype=np.float64):
        """The tangent and the second derivative of o along the tangents, by name."""
        x, t, graph, score = self.given(xp, dtype)
        t = {name: a[None] for name, a in t.items()}
        _, jo, lo = graphs.attention_laplacian(
            *(x[name] for name in "qkv"), graph, *(t[name] for name in "qkv"), bias=x["bias"], factor=x["factor"],
            jbias=t["bias"], jfactor=t["factor"], jscore=[t["weight"], None, t["strength"]], softmax=self.softmax,
            score=score,
        )  # fmt: skip
        return {name: to_numpy(a).astype(np.float64) for name, a in (("to", jo[0]), ("o2", lo))}

    def results(self, xp=np, dtype=np.float64):
        x, t, graph, score = self.given(xp, dtype)
        names, edges = "qkv", {name: x[name] for name in ("bias", "factor")}
        o, to, saved, tsaved = graphs.attention_forward_jvp(
            *(x[name] for name in names), graph, *(t[name] for name in names), **edges, tbias=t["bias"],
            tfactor=t["factor"], tscore=[t["weight"], None, t["strength"]], softmax=self.softmax, score=score,
        )  # fmt: skip
        lse = {"dlse": x["dlse"], "tdlse": t["dlse"]} if self.softmax else {}
        grads, tgrads = graphs.attention_backward_jvp(x["do"], saved, tsaved, tdo=t["do"], **lse)
        found = {"o": o, "to": to, "lse": saved.lse, "tlse": tsaved.tlse}
        for prefix, each in (("d", grads), ("td", tgrads)):
            found |= {f"{prefix}{name}": a for name, a in {**dict(zip(names, each)), **vars(each)}.items()}
            found[f"{prefix}weight"], none, found[f"{prefix}strength"] = found.pop(f"{prefix}score")
            assert none is None
        return {name: to_numpy(a).astype(np.float64) for name, a in found.items() if a is not None}


def assert_close(found, wanted, tolerance):
    """Relative to the largest number of each."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        sees = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(found[name]), sees, err_msg=name)
        largest = np.abs(want[sees]).max()
        np.testing.assert_allclose(found[name][sees], want[sees], rtol=0, atol=tolerance * largest, err_msg=name)


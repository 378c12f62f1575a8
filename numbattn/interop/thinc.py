"""Attention as a layer of thinc, with parameters for the arrays in its score.

thinc's layers are functions that return their own backpropagation; it has no second derivatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from thinc.api import Model

from .. import graphs
from ..api import attention_vjp
from ..base.checks import Array, flag, integer, words_for
from ..dropout import Dropout
from ..masks import All, Mask, Segments, as_mask
from ..scores import ArrayPart, Part, Scores, as_parts


def attention(
    heads: int,
    *,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
    deterministic: bool = False,
) -> Model[Any, Any]:
    """A layer of attention within each of several sequences.

    Parameters
    ----------
    heads : int
        1 or more.
    causal, mask, scale, score
        As in `numbattn.attention`. The sequences of a batch are packed, one after the other: masks and scores are
        aligned within each, and arrays in them only have an axis of heads.
    dropout : Dropout, optional
        In training only. Its offset is increased by one for each call; `thinc.api.set_dropout_rate` changes p.
    deterministic : bool, optional
        As in `numbattn.attention_backward`.

    Returns
    -------
    Model
        It maps a list of arrays (seqlen, 3 * width), queries, keys and values side by side, each by head, to a list of
        (seqlen, width); or one array to one. Arrays are NumPy's or CuPy's, depending on `model.ops`. The arrays in the
        score whose gradients are wanted are parameters, in float32 and with an axis, as thinc's optimisers have them:
        "bias", "slopes", "table" or "logits", numbered from the second of a kind on.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.attention`; when called, for widths that 3 * heads does not divide.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> from numbattn.interop.thinc import attention
    >>> model = attention(2, causal=True, score=na.Alibi([0.5, 0.25]))
    >>> ys, backprop = model.begin_update([np.ones((5, 12), "f"), np.ones((3, 12), "f")])
    >>> [y.shape for y in ys], [dx.shape for dx in backprop(ys)]
    ([(5, 4), (3, 4)], [(5, 12), (3, 12)])
    >>> model.get_grad("slopes").shape
    (2,)
    """
    mask = as_mask(mask)
    if mask._segments is not None:
        raise ValueError("mask: got Segments, expected a mask within each sequence: the layer packs them itself")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout: got {words_for(dropout)}, expected a numbattn.Dropout(p, seed)")
    parts = as_parts(score)
    names = names_of(parts)
    attrs = {
        "heads": integer("heads", heads, low=1),
        "options": {"causal": flag("causal", causal), "mask": mask, "scale": scale},
        "deterministic": flag("deterministic", deterministic),
        "score": parts,
        "names": names,
        "dropout": dropout,
        "dropout_rate": 0.0 if dropout is None else dropout.p,
    }
    model: Model[Any, Any] = Model("attention", forward, params=dict.fromkeys(filter(None, names)), attrs=attrs)
    for name, part in zip(names, parts):
        if name:
            (x,) = part._weights
            model.set_param(name, model.ops.asarray(x, dtype="float32").reshape(x.shape or (1,)))
    return model


def graph_attention(
    heads: int, *, softmax: bool = True, scale: float | None = None, dropout: Dropout | None = None,
    score: Scores = None,
) -> Model[Any, Any]:  # fmt: skip
    """A layer of attention over the edges of a graph.

    Parameters
    ----------
    heads : int
        1 or more.
    softmax, scale, score
        As in `numbattn.graphs.attention`.
    dropout : Dropout, optional
        As in `attention`.

    Returns
    -------
    Model
        It maps (x, graph, edges) to an array (nodes, width). x, (nodes, 3 * width), holds queries, keys and values side
        by side, each by head; graph is a `numbattn.graphs.Graph` of the library of `model.ops`, and edges has arrays of
        edges by name, as "bias". Backpropagation returns (dx, None, gradients of edges by name). The arrays in the
        score whose gradients are wanted are parameters in float32, "array0" and so on.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `numbattn.graphs.attention`; when called, for widths that 3 * heads does not divide.

    Examples
    --------
    >>> import numpy as np
    >>> from numbattn.graphs import Graph
    >>> from numbattn.interop.thinc import graph_attention
    >>> ring, x = Graph(np.arange(4), np.array([1, 2, 0])), np.ones((3, 12), "f")
    >>> y, backprop = graph_attention(2).begin_update((x, ring, {"bias": np.zeros(3, "f")}))
    >>> dx, _, edges = backprop(y)
    >>> y.shape, dx.shape, edges["bias"].shape
    ((3, 4), (3, 12), (3,))
    """
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout: got {words_for(dropout)}, expected a numbattn.Dropout(p, seed)")
    parts = as_parts(score)
    trained = [x for part in parts for x, wanted in zip(part._weights, part._wanted) if wanted]
    names = [f"array{number}" for number in range(len(trained))]
    attrs = {
        "heads": integer("heads", heads, low=1), "score": parts, "names": names, "dropout": dropout,
        "options": {"softmax": flag("softmax", softmax), "scale": scale},
        "dropout_rate": 0.0 if dropout is None else dropout.p,
    }  # fmt: skip
    model: Model[Any, Any] = Model("graph_attention", forward_over_graph, params=dict.fromkeys(names), attrs=attrs)
    for name, x in zip(names, trained):
        model.set_param(name, model.ops.asarray(x, dtype="float32").reshape(x.shape or (1,)))
    return model


def forward_over_graph(model: Model[Any, Any], inputs: Any, is_train: bool) -> tuple[Any, Callable[[Any], Any]]:
    x, graph, edges = inputs
    (q, k, v), names = heads_of(model, x), iter(model.attrs["names"])
    score = []
    for part in model.attrs["score"]:
        given = zip(part._weights, part._wanted)
        arrays = [model.get_param(next(names)) if wanted else array for array, wanted in given]
        score.append(part._again(arrays, part._wanted) if arrays else part)
    options = {**model.attrs["options"], **edges, "score": score, "dropout": dropout_of(model, is_train)}
    o, graph_back = graphs.attention_vjp(q, k, v, graph, **options)

    def backprop(dy: Any) -> Any:
        grads = graph_back(dy.reshape(len(x), model.attrs["heads"], -1).swapaxes(0, 1))
        for name, gradient in zip(model.attrs["names"], filter(is_wanted, grads.score)):
            model.inc_grad(name, gradient)
        dx = model.ops.xp.stack(grads).transpose(2, 0, 1, 3).reshape(x.shape)
        return dx, None, {name: getattr(grads, name) for name in edges}

    return o.swapaxes(0, 1).reshape(len(x), -1), backprop


def heads_of(model: Model[Any, Any], packed: Any) -> Any:
    """q, k and v, of which each has heads in front."""
    heads, width = model.attrs["heads"], packed.shape[-1]
    if width % (3 * heads):
        raise ValueError(f"sequences: got the width {width}, expected a multiple of {3 * heads}: queries, keys and "
                         f"values of {heads} heads")  # fmt: skip
    return packed.reshape(len(packed), 3, heads, width // (3 * heads)).transpose(1, 2, 0, 3)


def names_of(parts: Sequence[Part]) -> list[str | None]:
    """The name of the parameter of each part of a score, or None."""
    names, seen = list[str | None](), Counter[str]()
    for part in parts:
        if isinstance(part, ArrayPart) and part.gradient:
            seen[part._name] += 1
            names.append(part._name + (str(seen[part._name]) if seen[part._name] > 1 else ""))
        else:
            names.append(None)
    return names


def forward(model: Model[Any, Any], sequences: Any, is_train: bool) -> tuple[Any, Callable[[Any], Any]]:
    if not isinstance(sequences, list | tuple):
        ys, backprop_all = forward(model, [sequences], is_train)
        return ys[0], lambda dy: backprop_all([dy])[0]
    heads, lengths = model.attrs["heads"], [len(x) for x in sequences]
    packed = model.ops.flatten(sequences)
    q, k, v = heads_of(model, packed)
    tokens, head_dim = q.shape[1:]
    ends = model.ops.asarray([0, *lengths], dtype="int32").cumsum(dtype="int32")
    options = dict(model.attrs["options"])
    options["mask"] = All((Segments(ends), *options["mask"]._parts))
    o, attention_back = attention_vjp(q, k, v, score=score_of(model), dropout=dropout_of(model, is_train), **options)

    def backprop(dys: Any) -> Any:
        do = model.ops.flatten(dys).reshape(tokens, heads, head_dim).swapaxes(0, 1)
        grads = attention_back(do, deterministic=model.attrs["deterministic"])
        for name, gradient in zip(filter(None, model.attrs["names"]), filter(is_wanted, grads.score)):
            model.inc_grad(name, gradient)
        dqkv = model.ops.xp.stack(grads).transpose(2, 0, 1, 3)
        return model.ops.unflatten(dqkv.reshape(packed.shape), lengths)

    return model.ops.unflatten(o.swapaxes(0, 1).reshape(tokens, heads * head_dim), lengths), backprop


def is_wanted(gradient: Any) -> bool:
    return gradient is not None


def score_of(model: Model[Any, Any]) -> list[Part]:
    """The score with the parameters as they are now."""
    found: Sequence[Any] = model.attrs["score"]
    return [replace(part, **{part._name: model.get_param(name)}) if name else part
            for name, part in zip(model.attrs["names"], found)]  # fmt: skip


def dropout_of(model: Model[Any, Any], is_train: bool) -> Dropout | None:
    """The dropout of this call, with an offset of its own."""
    dropout, rate = model.attrs["dropout"], model.attrs["dropout_rate"]
    if not is_train or dropout is None:
        return None
    model.attrs["dropout"] = replace(dropout, offset=(dropout.offset + 1) % 2**32)
    return replace(dropout, p=rate)

"""Many small attentions on a GPU, compared with a copy of the same bytes."""

from itertools import product

from tabulate import tabulate

from .basics import (
    OURS,
    STYLES,
    finish,
    geometric_mean,
    label_of,
    listed,
    logarithmic,
    panels,
    powers_of_two,
    select,
    sorted_names,
    span,
    speedups,
    table,
    values,
)

COPY, TORCH = "copy", ("flash", "cudnn", "efficient", "math")
KINDS = {  # pass and bias: what it is called
    ("forward", "none"): "forward", ("forward", "shared"): "forward, bias", ("backward", "none"): "backward",
    ("backward", "shared"): "backward, bias", ("backward", "with gradient"): "backward, bias and its gradient",
}  # fmt: skip
DRAWN = {"forward": "forward", "backward": "backward",  # as the title calls them
         "backward, bias and its gradient": "with a bias and its gradient"}  # fmt: skip
CALLED = {False: "called", True: "in a graph"}


def small(results):
    """Shares of a copy's bandwidth by seqlen; the marks are means over head_dims, the lines span all of them."""
    cells = _cells(results)
    dtypes, seqlens = list(dict.fromkeys(cell["dtype"] for cell in cells)), values(cells, "seqlen")
    figure, axes = panels(len(DRAWN), len(dtypes), 1.6, sharex=True, sharey=True)
    names = sorted_names(name for cell in cells for name in cell["seconds"] if name != COPY)
    for (kind, dtype), axis in zip(product(DRAWN, dtypes), axes.flat):
        chosen = select(cells, kind=kind, dtype=dtype)
        for name in names:
            label, colour, marker, _ = STYLES[name]
            shares = {n: _ratios(select(chosen, seqlen=n), COPY, name) for n in seqlens}
            shares = {n: found for n, found in shares.items() if found}
            axis.plot([*shares], [*map(geometric_mean, shares.values())], color=colour, marker=marker, label=label,
                      linewidth=1.2, zorder=2 + (name != OURS))  # fmt: skip
            least, most = ([*map(which, shares.values())] for which in (min, max))
            axis.vlines([*shares], least, most, color=colour, linewidth=1)
        axis.axhline(1, linestyle="--", color="black", linewidth=1, label="a copy of the same bytes")
        axis.set_title(f"{dtype}, {kind}")
        powers_of_two(axis, seqlens)
        if axis in axes[-1]:
            axis.set_xlabel("seqlen")
    logarithmic(axes[0, 0], "y", 100)
    figure.supylabel("% of a copy's bandwidth", fontsize=8)
    told = ", ".join(f"{words} {share:.0%}" for words, share in zip(DRAWN.values(), _shares(cells)))
    title = f"Speed relative to a copy of the same bytes: {told}"
    groups = {f"{kind}, {dtype}": [cell["seconds"] for cell in select(cells, kind=kind, dtype=dtype)]
              for kind, dtype in product(KINDS.values(), dtypes)}  # fmt: skip
    for x in results.get("batches", []):
        groups.setdefault(f"batch {x['batch']}, {CALLED[x['graph']]}", []).append(_one_torch(x["seconds"]))
    parts = [_settings(cells), speedups(groups), _variants(results.get("variants", [])), table(_rows(cells, names))]
    return finish(figure, title), "\n\n".join(filter(None, parts))


def readme_sentence(results):
    cells = _cells(results)
    forward, backward, with_gradient = _shares(cells)
    sizes, dtypes = span(values(cells, "seqlen"), 0), listed(dict.fromkeys(cell["dtype"] for cell in cells))
    return (
        f"On an {results['machine']['gpu']['name']}, many small problems in one call, {sizes} tokens in {dtypes}, run "
        f"on average at {forward:.0%} of the speed of a copy of the same bytes forward, {backward:.0%} backward and "
        f"{with_gradient:.0%} with the gradient of a bias that the batch shares "
        "([more](bench/README.md#many-small-attentions)); [example 13](examples/13_molecule.py) trains this way."
    )


def _cells(results):
    """The records in which both numbattn and the copy ran, each with its kind, and torch as one peer."""
    cells = [{**record, "kind": KINDS[record["pass"], record["bias"]], "seconds": _one_torch(record["seconds"])}
             for record in results["cells"]]  # fmt: skip
    return [cell for cell in cells if OURS in cell["seconds"] and COPY in cell["seconds"]]


def _shares(cells):
    """Geometric means of numbattn's speed over the copy's, for each kind in DRAWN."""
    return [geometric_mean(_ratios(select(cells, kind=kind), COPY, OURS)) for kind in DRAWN]


def _one_torch(seconds):
    """The fastest of torch's kernels stands for torch."""
    theirs = [seconds[name] for name in TORCH if name in seconds]
    others = {name: s for name, s in seconds.items() if name not in TORCH}
    return {**others, "torch": min(theirs)} if theirs else others


def _ratios(records, over, under):
    return [record["seconds"][over] / record["seconds"][under] for record in records
            if over in record["seconds"] and under in record["seconds"]]  # fmt: skip


def _settings(cells):
    first = cells[0]
    return (
        f"{first['heads']} heads of {span(values(cells, 'head_dim'), 0)}, in batches such that each array takes "
        f"{_array_bytes(first) >> 20} MiB, or in small ones, called one after the other or as a CUDA graph of many "
        "calls, which takes no host time. A bias is a number for each head and pair of a query and a key, the same for "
        "the whole batch. The limit is a copy on the GPU, in the same run, that reads and writes as many bytes as q, "
        "k, v and o have, or, backward, q, k, v, do and three gradients. Marks are geometric means over head_dims, "
        "lines span the range; torch is the fastest of its kernels."
    )


def _array_bytes(cell):
    return cell["bytes"] // (4 if cell["pass"] == "forward" else 7)


def _variants(records):
    """A table of what masks and scores add."""
    names = dict.fromkeys(name for record in records for name in record["seconds"])
    rows = [{"microseconds": "{dtype}, {batch} x {heads} x {seqlen} x {head_dim}, {pass}".format(**x),
             **{name: f"{1e6 * x['seconds'][name]:.0f}" for name in names if name in x["seconds"]}} for x in records]
    return tabulate(rows, headers="keys", tablefmt="github")


def _rows(cells, names):
    """A row for each size; a cell has the microseconds of a copy and of all peers."""
    rows = {}
    head = f"microseconds: {' / '.join(['copy', *map(label_of, names)])} (batch x seqlen, head_dim)"
    for cell in cells:
        size = "{dtype}, {batch} x {seqlen}, {head_dim}".format(**cell)
        row = rows.setdefault(size, {head: size, **dict.fromkeys(KINDS.values())})
        row[cell["kind"]] = " / ".join(f"{1e6 * cell['seconds'][name]:.0f}" if name in cell["seconds"] else "-"
                                       for name in (COPY, *names))  # fmt: skip
    return [*rows.values()]

"""Attention over the edges of graphs, on a GPU and on a CPU."""

from itertools import pairwise, product

from tabulate import tabulate

from .basics import (
    OURS,
    STYLES,
    finish,
    geometric_mean,
    label_of,
    logarithmic,
    panels,
    select,
    sorted_names,
    span,
    speedups,
    table,
)

PASSES = {"forward": "forward", "backward": "backward", "double": "double backward"}
BOUND = "bound"
NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def graphs(results, where=""):
    """Milliseconds of each case, a column for each dtype, a row for each pass, and the bound of forward."""
    records = results["graphs"]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    figure, axes = panels(len(PASSES), len(dtypes), 1.7, sharex="col", sharey="row")
    for (of, dtype), axis in zip(product(PASSES, dtypes), axes.flat):
        chosen = select(records, **{"pass": of, "dtype": dtype})
        for name in sorted_names(name for record in chosen for name in record["seconds"]):
            label, colour, marker, _ = STYLES[name]
            times = [(x, 1e3 * record["seconds"][name]) for x, record in enumerate(chosen) if name in record["seconds"]]
            axis.plot(*zip(*times), color=colour, marker=marker, linestyle="", label=label)
        if of == "forward":
            bounds = [1e3 * record[BOUND] for record in chosen]
            axis.plot(bounds, color="k", linewidth=0.8, drawstyle="steps-mid", label="a copy of forward's bytes")
        axis.set_xticks(range(len(chosen)), map(case_of, chosen), rotation=90, fontsize=5)
        axis.set_title(f"{PASSES[of]}, {dtype}")
        logarithmic(axis)
    figure.supylabel("ms", fontsize=8)
    found = {of: faster(select(records, **{"pass": of})) for of in PASSES}
    told = ", ".join(f"{PASSES[of]} {geometric_mean(ratios):.1f}" for of, ratios in found.items() if ratios)
    title = f"Graphs{where}: {told} times as fast as the best of the others" if told else f"Graphs{where}"
    groups = {f"{PASSES[of]}, {dtype}": [record["seconds"] for record in select(records, **{"pass": of, "dtype": dtype})
                                         if OURS in record["seconds"]]
              for of, dtype in product(PASSES, dtypes)}  # fmt: skip
    shown = about(results), over(records, dtypes), speedups(groups), table(rows(records))
    return finish(figure, title), "\n\n".join(filter(None, shown))


def graphs_cpu(results):
    """The same on NumPy arrays."""
    return graphs(results, " on a CPU")


def case_of(record):
    by = {"power": "power law"}.get(record["degree"], f"degree {record['degree']}")
    return f"{record['heads']} x {record['head_dim']}, {by}" + ", edges" * record["of_edges"]


def about(results):
    records = results["graphs"]
    sizes = [record["nodes"] * record["heads"] * record["head_dim"] * NBYTES[record["dtype"]] for record in records]
    smallest, largest = (f"{1e-6 * size:.3g}" for size in (min(sizes), max(sizes)))
    return (f"{records[0]['edges']:,} edges, k and v of {smallest} to {largest} MB; heads x head_dim, and edges of "
            "a query, or a power law with a mean of 32; "
            "“edges”: with a bias, a factor and what is added to keys and values. The bound is what a copy in the same "
            "run takes for a row of k and of v of each edge and head, and for what edges have, once: it moves "
            f"{results['bytes_per_second'] / 1e12:.3g} TB/s. Where k and v fit in the cache, times may be below it. "
            "torch gathers by index_select and adds by index_add; PyG is what TransformerConv sends along edges; dense "
            "is torch's attention with a boolean mask. Double backward are the gradients of a function of gradients."
            + memory(records))  # fmt: skip


def memory(records):
    """A sentence, where it was measured."""
    found = [record["extra"] / record["lists"] for record in records if record.get("extra") is not None]
    return f" Beyond arguments and results, numbattn takes {span(found)} times the graph's lists." if found else ""


def faster(records):
    """How many times as fast as the best of the others, in each case that one of these can do."""
    found = [{**record["seconds"]} for record in records]
    return [1 / seconds.pop(OURS) * min(seconds.values()) for seconds in found if {OURS} < seconds.keys()]


def over(records, dtypes):
    """A table: each pass over the one before, and forward over the bound: geometric means and ranges."""
    found = []
    for dtype in dtypes:
        row = {"numbattn": dtype}
        for below, of in pairwise((BOUND, *PASSES)):
            chosen, base = (select(records, **{"pass": name, "dtype": dtype}) for name in (of, below))
            under = [record[BOUND] for record in chosen] if below == BOUND else [s["seconds"].get(OURS) for s in base]
            ratios = [record["seconds"][OURS] / s for record, s in zip(chosen, under)
                      if s and OURS in record["seconds"]]  # fmt: skip
            if ratios:
                row[f"{PASSES[of]} / {PASSES.get(below, BOUND)}"] = f"{geometric_mean(ratios):.2f} ({span(ratios)})"
        found.append(row)
    return tabulate(found, headers="keys", tablefmt="github", missingval="-")


def rows(records):
    """A row for each case; a cell has milliseconds of all in a pass."""
    names = sorted_names(name for record in records for name in record["seconds"])
    head, found = f"milliseconds: {' / '.join(map(label_of, names))}", {}
    for record in records:
        case = f"{record['dtype']}, {case_of(record)}"
        row = found.setdefault(case, {head: case, BOUND: f"{1e3 * record[BOUND]:.3g}"})
        times = (record["seconds"].get(name) for name in names)
        row[PASSES[record["pass"]]] = " / ".join("-" if s is None else f"{1e3 * s:.3g}" for s in times)
    return [*found.values()]

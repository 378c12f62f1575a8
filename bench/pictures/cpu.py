"""Attention and decoding on a CPU."""

from itertools import product

from .basics import (
    MARKERS,
    OURS,
    TINTS,
    bars,
    finish,
    geometric_mean,
    group_of,
    inverse,
    label_of,
    listed,
    logarithmic,
    panels,
    powers_of_two,
    select,
    span,
    speedups,
    table,
    values,
)


# ----------------------------------------------------------------------------------------------------------------- CPU
def cpu(results):
    """GFLOP/s on the CPU, with those of a matrix product as a limit."""
    records = results["speed"]
    kinds = [*product(values(records, "dtype"), dict.fromkeys(record["pass"] for record in records))]
    figure, axes = panels(1, len(kinds), 2)
    rates = []
    for (dtype, of), axis in zip(kinds, axes[0]):
        chosen = select(records, dtype=dtype, **{"pass": of})
        names = [name for name in (OURS, "torch", "numpy") if any(record.get(name) for record in chosen)]
        rates += [{name: record[name] for name in names} for record in chosen]
        bars(axis, [group_of(record, "seqlen") for record in chosen],
             {name: [record[name] for record in chosen] for name in names})
        if "matmul" in results:
            axis.axhline(results["matmul"][dtype], linestyle="--", color="black", linewidth=1,
                         label="matrix product in NumPy")  # fmt: skip
        axis.set_title(f"{dtype}, {of}")
        axis.set_xlabel("seqlen")
    axes[0, 0].set_ylabel("GFLOP/s")
    over = {name: [found[OURS] / found[name] for found in rates if name in found] for name in ("torch", "numpy")}
    over = {name: found for name, found in over.items() if found}
    title = ", ".join(f"{geometric_mean(found):.1f} times as fast as {LIBRARIES[name]}" for name, found in over.items())
    parts = ["Batch 1, 8 heads of 64."]
    if memory := results.get("memory"):
        last = memory[-1]
        parts.append(f"Forward and backward take {last['extra MB']:.0f} MB beyond the inputs at seqlen "
                     f"{last['seqlen']}, where the scores alone would take {last['the scores alone, MB']:.0f} MB.")
    if busy := results.get("busy"):
        slower = ", ".join(f"{label_of(row[''])} {row['slower by']:.1f}" for row in busy)
        parts.append(f"With an equally busy process on the same cores, a call is slower by a factor of: {slower}.")
    groups = {f"{dtype}, {of}": [inverse(_of_libraries(x)) for x in select(records, dtype=dtype, **{"pass": of})]
              for dtype, of in kinds}  # fmt: skip
    sizes, calls = results.get("sizes", []), results.get("small calls", [])
    for x in sizes:
        groups.setdefault(f"float32, other sizes, {x['pass']}", []).append(_of_libraries(x))
    for x in calls:
        groups.setdefault(f"float32, small calls, {x['call']}", []).append(_of_libraries(x))
    between = _between(results.get("between", []))
    tables = speedups(groups), *map(table, filter(None, (between, _other_sizes(sizes), _small_calls(calls))))
    return finish(figure, f"CPU: {title}"), "\n\n".join([" ".join(parts), *tables])


def readme_sentence(results):
    speed, cpu = results["speed"], results["machine"]
    over = [f"{geometric_mean([x[OURS] / x[name] for x in speed if name in x]):.1f} times as fast as {said}"
            for name, said in (("torch", f"torch {cpu['versions'].get('torch', '')}"), ("numpy", LIBRARIES["numpy"]))]
    return (f"On {cpu['cores']} cores of a CPU, {cpu['cpu']}, attention and its gradients are {listed(over)}, "
            "geometric means over 8 heads of 64 in float32 and float64 ([more](bench/README.md#cpu)).")


LIBRARIES = {"torch": "torch", "numpy": "the formula in NumPy"}


def _of_libraries(record):
    return {name: record[name] for name in (OURS, *LIBRARIES) if name in record}


def _other_sizes(records):
    """A row for each size and pass."""
    return [{"batch x heads x seqlen, head_dim": "{batch} x {heads} x {seqlen}, {head_dim}".format(**x),
             "pair bias": _bias_of(x), "pass": x["pass"],
             **{f"{label_of(name)}, ms": f"{value:.2f}" for name, value in _of_libraries(x).items()}}
            for x in records]  # fmt: skip


def _bias_of(record):
    return ("yes" if record.get("gradient", True) else "without gradient") if record["pair_bias"] else ""


def _between(records):
    """A row for each shape, pass and library: calls between products of matrices, each in a process of its own."""
    return [{"between products: q, k and v": x["shape"], "pass": x["pass"], "": label_of(x[""]),
             "alone, ms": f"{x['alone, ms']:.2f}", "after a product, ms": f"{x['after a product, ms']:.2f}",
             "slower by": f"{x['slower by']:.2f}", "page faults": f"{x['page faults']:.0f}"}
            for x in records]  # fmt: skip


def _small_calls(records):
    """A row for each shape and call."""
    return [{"q, k and v": x["shape"], "call": x["call"],
             **{f"{label_of(name)}, us": f"{value:.0f}" for name, value in _of_libraries(x).items()}}
            for x in records]  # fmt: skip


def decoding_cpu(results):
    """One query's speed relative to NumPy's formula, by the number of keys."""
    records = results["records"]
    cells = list(dict.fromkeys((record["heads"], record["head_dim"]) for record in records))
    figure, axes = panels(1, len(cells), 2.1, sharey=True)
    kinds, keys = list(dict.fromkeys(record["kind"] for record in records)), values(records, "keys")
    for (heads, head_dim), axis in zip(cells, axes[0]):
        for i, kind in enumerate(kinds):
            chosen = select(records, heads=heads, head_dim=head_dim, kind=kind)
            axis.plot([record["keys"] for record in chosen], [record["NumPy / numbattn"] for record in chosen],
                      color=TINTS[i % 3], marker=MARKERS[i], linestyle=("-", "--")[i // 3], label=kind)  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.8)
        powers_of_two(axis, keys)
        logarithmic(axis)
        axis.set_title(f"{heads} heads, head_dim {head_dim}")
        axis.set_xlabel("keys")
    axes[0, 0].set_ylabel("time of NumPy / numbattn")
    ratios = [record["NumPy / numbattn"] for record in records]
    title = f"One query on a CPU: {span(ratios, 1)} times as fast as the formula in NumPy"
    fastest = max(record["GB/s"] for record in records)
    text = (f"One query on a CPU, at up to {fastest:.0f} GB/s of K and V, each read once. “cache” is a KVCache; the "
            "formula gets its numbers as they are stored.")
    return finish(figure, title), text

"""Tangents of attention and of its gradients, on a GPU and on a CPU."""

from itertools import product

from .basics import (
    OURS,
    TINTS,
    bars,
    finish,
    geometric_mean,
    inverse,
    label_of,
    lines,
    panels,
    powers_of_two,
    select,
    sorted_names,
    speedups,
    table,
    values,
)

CALLED = {"tangent": "tangent of o", "backward_tangent": "tangents of dq, dk, dv"}
BASE = {"tangent": "forward", "backward_tangent": "backward"}
MMA = "numbattn, mma"
MANY = 128  # problems in a batch


def second(results):
    """TFLOP/s of both tangents by seqlen, those of forward or backward as a limit."""
    records = results["speed"]
    full = [record for record in records if not record["causal"]] or records
    columns = list(dict.fromkeys((record["dtype"], record["head_dim"]) for record in full))
    seqlens = values(full, "seqlen")
    figure, axes = panels(len(CALLED), len(columns), 1.8, sharex=True)
    for (of, (dtype, head_dim)), axis in zip(product(CALLED, columns), axes.flat):
        by_seqlen = {record["seqlen"]: record for record in select(full, dtype=dtype, head_dim=head_dim)
                     if record["pass"] == of}  # fmt: skip
        names = {name for record in by_seqlen.values() for name in record["tflops"]}
        lines(axis, seqlens, {name: [rate_of(by_seqlen.get(n), name) for n in seqlens] for name in names})
        base = {record["seqlen"]: record for record in select(full, dtype=dtype, head_dim=head_dim)
                if record["pass"] == BASE[of]}  # fmt: skip
        axis.plot(seqlens, [rate_of(base.get(n), OURS) or float("nan") for n in seqlens], color=TINTS[1], linewidth=1,
                  linestyle="--", label="numbattn, forward or backward")  # fmt: skip
        axis.set_title(f"{dtype}, {head_dim}\n{CALLED[of]}")
        axis.set_ylim(bottom=0)
        powers_of_two(axis, seqlens)
        if axis in axes[-1]:
            axis.set_xlabel("seqlen")
    figure.supylabel("TFLOP/s", fontsize=8)
    ratios = {of: ratios_of(records, of, OURS) for of in CALLED}
    told = [f"{CALLED[of]} at {geometric_mean(found):.2f} of {BASE[of]}'s" for of, found in ratios.items() if found]
    title = f"TFLOP/s of second derivatives: {', '.join(told)}"
    records = [*records, *results.get("small", [])]
    shown = table(_rows(records))
    return finish(figure, title), f"{COUNTED}\n\n{_speedups(records)}\n\n{shown}"


def rate_of(record, name):
    return record["tflops"].get(name) if record else None


def ratios_of(records, of, name):
    """The rate of a tangent over that of the pass, in each case where both have run."""
    base = {_case(record): record["tflops"].get(name) for record in records if record["pass"] == BASE[of]}
    return [rate / base[_case(record)] for record in records
            if record["pass"] == of and (rate := record["tflops"].get(name)) and base.get(_case(record))]  # fmt: skip


def _case(record):
    return tuple(record[key] for key in ("dtype", "head_dim", "causal", "seqlen", "batch", "heads"))


COUNTED = ("Products of matrices that are counted: 2 forward, 5 backward, 6 for the tangent of o, with o, 10 for the "
           "tangents of dq, dk and dv; half of them in causal attention. The formula computes in float16 instead of "
           "bfloat16; where its memory, which is quadratic, does not suffice, there is no number of it.")


def _speedups(records):
    """By pass and dtype, large problems apart from many small ones."""
    groups = {}
    for record in records:
        if record["pass"] in CALLED:
            many = ", many small problems" * (record["batch"] >= MANY)
            group = f"{CALLED[record['pass']]}, {record['dtype']}{many}"
            groups.setdefault(group, []).append(inverse(record["tflops"]))
    return speedups(groups)


def _rows(records, unit="TFLOP/s", factor=1):
    """A row for each case; a cell has the rates of all peers in a pass, in units of 1 / factor TFLOP/s."""
    names = sorted_names(name for record in records for name in record["tflops"])
    head = f"{unit}: {' / '.join(map(label_of, names))}"
    rows = {}
    for record in records:
        case = "{dtype}, {batch} x {heads} x {seqlen}, {head_dim}".format(**record) + ", causal" * record["causal"]
        row = rows.setdefault(case, {head: case, **dict.fromkeys([*BASE.values(), *CALLED.values()])})
        rates = [f"{factor * record['tflops'][name]:.3g}" if name in record["tflops"] else "-" for name in names]
        row[CALLED.get(record["pass"], record["pass"])] = " / ".join(rates)
    return [*rows.values()]


def second_cpu(results):
    """GFLOP/s of both tangents on a CPU."""
    records = results["cpu"]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    figure, axes = panels(1, len(CALLED) * len(dtypes), 2)
    for (of, dtype), axis in zip(product(CALLED, dtypes), axes[0]):
        chosen = [record for record in select(records, dtype=dtype) if record["pass"] == of]
        bars(axis, [f"{record['batch']} x {record['seqlen']}" + "\ncausal" * record["causal"] for record in chosen],
             {name: [1e3 * record["tflops"][name] for record in chosen] for name in (OURS, "numpy")})
        axis.tick_params(axis="x", labelsize=5, rotation=90)
        axis.set_title(f"{dtype}, {CALLED[of]}")
    axes[0, 0].set_ylabel("GFLOP/s")
    over = [record["tflops"][OURS] / record["tflops"]["numpy"] for record in records if record["pass"] in CALLED]
    title = f"Second derivatives on a CPU: {geometric_mean(over):.1f} times as fast as the formula in NumPy"
    shown = table(_rows(records, "GFLOP/s", 1000))
    return finish(figure, title), f"8 heads. {COUNTED}\n\n{_speedups(records)}\n\n{shown}{_of_particles(results)}"


def particles(results):
    """How many times as fast a Laplacian is that knows whose tangents are, by the number of particles."""
    records = results["particles"]
    figure, axes = panels(1, 2, 1.6, sharey=True)
    for dtype, axis in zip(values(records, "dtype"), axes.flat):
        found = {record["particles"]: record["dense"] / record["particle"] for record in select(records, dtype=dtype)}
        axis.plot(found.keys(), found.values(), color=TINTS[0], marker="o", markersize=3)
        axis.set_title(dtype)
        axis.set_xlabel("particles")
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("times as fast")
    most = max(record["dense"] / record["particle"] for record in records)
    title = f"Laplacians with particle=, up to {most:.0f} times as fast as along the coordinates of all rows"
    return finish(figure, title), _of_particles(results).strip()


def _of_particles(results):
    """A table of Laplacians of particles."""
    rows = [{"particles": f"{x['dtype']}, {x['walkers']} x {x['particles']}",
             "`particle=`, ms": f"{1e3 * x['particle']:.3g}", "of all rows, ms": f"{1e3 * x['dense']:.3g}",
             "times as fast": f"{x['dense'] / x['particle']:.1f}"} for x in results.get("particles", ())]  # fmt: skip
    return f"\n\nLaplacians of particles, walkers x particles, 4 heads, head_dim 64:\n\n{table(rows)}" if rows else ""

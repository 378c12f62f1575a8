"""Windows of neighbours on grids, next to dense attention."""

from .basics import TINTS, finish, geometric_mean, panels, select, table, values

GRID, DENSE, BIAS = "grid", "dense", "bias"
CALLED = {
    DENSE: ("dense attention", "#b0b0b0"), GRID: ("windows", TINTS[0]), BIAS: ("with a table's gradient", TINTS[1]),
}  # fmt: skip


def grids(results):
    """Milliseconds of each case, a panel for each pass."""
    records = results["grids"]
    figure, axes = panels(1, 2, 2.4)
    for axis, of in zip(axes.flat, ("forward", "backward")):
        chosen = select(records, **{"pass": of})
        for place, (name, (label, colour)) in enumerate(CALLED.items()):
            heights = [1e3 * record["seconds"].get(name, 0) for record in chosen]
            if any(heights):
                places = [x + 0.27 * (place - 1) for x in range(len(chosen))]
                axis.bar(places, heights, 0.27, color=colour, label=label)
        axis.set_xticks(range(len(chosen)), [case_of(record) for record in chosen])
        axis.set_title(of)
    figure.supylabel("ms", fontsize=8)
    faster = ", ".join(f"{of} {speedup(records, of):.1f}" for of in values(records, "pass"))
    said = (
        "24 heads of 128. Windows of 80 x 80 on an image of 256 x 256 tokens, of 18 x 24 x 24 on a video of 30 x "
        "48 x 80; strided, groups of 16 x 16 and 16 x 8 x 8 neighbours see the same window. Rate: what pairs of "
        "boxes that are not empty take, over dense attention's TFLOP/s; visible: the share of their pairs of tokens."
    )
    title = f"Windows on grids: {faster} times as fast as dense attention"
    return finish(figure, title), f"{said}\n\n{table([*rows(records)])}"


def case_of(record):
    return " ".join(filter(None, (record["name"], record["strided"])))


def speedup(records, of):
    found = (record["seconds"] for record in select(records, **{"pass": of}))
    return geometric_mean([seconds[DENSE] / seconds[GRID] for seconds in found if {DENSE, GRID} <= seconds.keys()])


def rows(records):
    for record in records:
        times = (record["seconds"].get(name) for name in CALLED)
        about = f"{case_of(record)}, {record['dtype']}, {record['pass']}"
        yield {"milliseconds": about,
               **{label: "-" if s is None else f"{1e3 * s:.3g}" for (label, _), s in zip(CALLED.values(), times)},
               "rate": f"{record['rate'] or 0:.2f}", "visible": f"{record['visible']:.2f}"}  # fmt: skip

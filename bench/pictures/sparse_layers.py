"""Products with block-sparse weights by the share of blocks that are there."""

from itertools import product

from .basics import OURS, TINTS, finish, geometric_mean, logarithmic, panels, select, table, values

DENSE = "dense"
CALLED = {"forward": "Y = X W", "dX": "dX = dY W^T", "dW": "dW = X^T dY"}
SHARE = 0.1  # of which the title speaks


def sparse_layers(results):
    """Milliseconds by share, each block size a line, cuBLAS' dense product beside them."""
    records = results["sparse_layers"]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    figure, axes = panels(len(dtypes), len(CALLED), 1.9, sharex=True, sharey="row")
    for (dtype, of), axis in zip(product(dtypes, CALLED), axes.flat):
        chosen = [record for record in select(records, dtype=dtype) if record["pass"] == of]
        for size, colour in zip(values(chosen, "size"), TINTS[::-1]):
            draw(axis, select(chosen, size=size), OURS, color=colour, marker="o", label=f"numbattn, blocks of {size}")
        largest = select(chosen, size=max(values(chosen, "size")))
        draw(axis, largest, DENSE, color="#b0b0b0", linestyle="--", label="cuBLAS, dense")
        axis.set_title(f"{CALLED[of]}, {dtype}")
        logarithmic(axis)
        logarithmic(axis, "x", 100)
    for axis in axes[-1]:
        axis.set_xlabel("blocks that are there, %")
    figure.supylabel("ms", fontsize=8)
    title = f"Block-sparse products: {ratios_of(records) or 'milliseconds'}"
    said = (f"{records[0]['rows']:,} rows, {records[0]['features']:,} features in and out; the blocks that are there "
            "are drawn at random. cuBLAS multiplies by the whole matrix.")
    return finish(figure, title), f"{said}\n\n{table(rows(records))}"


def draw(axis, records, name, **style):
    found = [(record["share"], 1e3 * record["seconds"][name]) for record in records if name in record["seconds"]]
    axis.plot(*zip(*sorted(found)), **style)


def faster(records):
    return [record["seconds"][DENSE] / record["seconds"][OURS] for record in records
            if {OURS, DENSE} <= record["seconds"].keys()]  # fmt: skip


def ratios_of(records):
    found = {dtype: faster(select(records, share=SHARE, dtype=dtype))
             for dtype in dict.fromkeys(record["dtype"] for record in records)}  # fmt: skip
    means = ", ".join(f"{dtype} {geometric_mean(ratios):.1f}" for dtype, ratios in found.items() if ratios)
    return f"at {SHARE:.0%} of the blocks {means} times as fast as cuBLAS' dense ones" if means else ""


def rows(records):
    """A row for each case: milliseconds of numbattn / dense by pass."""
    found = {}
    for record in records:
        case = "{dtype}, blocks of {size}, ".format(**record) + f"{record['share']:.0%}"
        times = (record["seconds"].get(name) for name in (OURS, DENSE))
        row = found.setdefault(case, {"milliseconds: numbattn / cuBLAS, dense": case})
        row[CALLED[record["pass"]]] = " / ".join("-" if s is None else f"{1e3 * s:.3g}" for s in times)
    return [*found.values()]

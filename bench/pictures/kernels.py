"""Sums over pairs of points, on a GPU and on a CPU."""

from itertools import product

from .basics import OURS, PEAKS, bars, finish, geometric_mean, label_of, lines, logarithmic, panels, select, span, table

FORMULAS = "standard", "torch"
PAIRS = 1e10  # those of products
WRONG = 1.0  # an error of no digit right
HALF = "float16"


def kernels(results):
    """Seconds of products, of Sinkhorn's iterations and of nearest neighbours, and errors."""
    figure, axes = panels(2, 4, 2)
    draw_products(axes[0], results.get("products", []))
    draw_others(axes[1], results)
    ratios = over(results.get("products", []), "keops")
    title = "Sums over pairs of points" + f": {geometric_mean(ratios):.1f} times as fast as KeOps" * bool(ratios)
    said = " ".join([*of_products(results.get("products", [])), *of_sinkhorn(results.get("sinkhorn", [])),
                     *of_nearest(results), *of_errors(results.get("errors", [])), *of_costs(results.get("costs", []))])
    return finish(figure, title), f"{POINTS} {said}\n\n{table(rows(results))}"


def kernels_cpu(results):
    """The same on NumPy arrays."""
    return kernels(results)


POINTS = ("Points are normal, of unit mean square distance from the origin. The standard formula is |x|² + |y|² - 2 xy "
          "in blocks of pairs.")  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- drawn
def draw_products(axes, records):
    cells = product(("float32", "float64"), (1, 64))
    for (dtype, columns), axis in zip(cells, axes):
        chosen = select(records, dtype=dtype, columns=columns)
        names = {name for record in chosen for name in record["seconds"]}
        by_features = {record["features"]: {name: PAIRS / record["n"] ** 2 * s for name, s in record["seconds"].items()}
                       for record in chosen}  # fmt: skip
        at = range(len(by_features))
        lines(axis, at, {name: [found.get(name) for found in by_features.values()] for name in names})
        axis.set_xticks(at, [*by_features])
        axis.set_title(f"product, {dtype}\n{columns} column{'s' * (columns > 1)}")
        axis.set_xlabel("features")
        finish_axis(axis, by_features)
    axes[0].set_ylabel("seconds for 10¹⁰ pairs")


def draw_others(axes, results):
    sinkhorn, nearest, errors = (results.get(part, []) for part in ("sinkhorn", "nearest", "errors"))
    draw_bars(axes[0], sinkhorn, "dtype", "seconds", "Sinkhorn, 10 iterations")
    axes[0].set_ylabel("seconds")
    draw_bars(axes[1], [record for record in nearest if record["features"] > 3], "n", "seconds", "nearest of n centres")
    products = [record for record in errors if record["of"] == "product" and record["offset"]]
    draw_bars(axes[2], select(products, features=3), "length", "errors", "errors by length, far off")
    potentials = [record for record in errors if record["of"] == "sinkhorn" and record["dtype"] == "float32"]
    draw_bars(axes[3], potentials, "epsilon", "errors", "errors of potentials\nby epsilon, float32")


def draw_bars(axis, records, by, measured, title):
    names = {name for record in records for name in record[measured]}
    if names:
        bars(axis, [f"{record[by]:g}" if not isinstance(record[by], str) else record[by] for record in records],
             {name: [clipped(record[measured].get(name), measured) for record in records] for name in names})
    axis.set_title(title)
    finish_axis(axis, names)


def clipped(x, measured):
    return min(x, WRONG) if x is not None and measured == "errors" else x


def finish_axis(axis, found):
    axis.set_visible(bool(found))
    if found:
        logarithmic(axis)
    axis.tick_params(labelsize=6)


# ---------------------------------------------------------------------------------------------------------------- told
def over(records, *others):
    """The least of these peers' seconds over numbattn's, where both have run."""
    found = [(record["seconds"].get(OURS), [record["seconds"][name] for name in others if name in record["seconds"]])
             for record in records]  # fmt: skip
    return [min(theirs) / ours for ours, theirs in found if ours and theirs]


def of_products(records):
    """How fast products are next to each other peer, in few dimensions and in many."""
    for name in ("keops", *FORMULAS):
        told = [f"{words}, {geometric_mean(ratios):.1f} ({span(ratios, 1)})"
                for words, chosen in (("less than 64 features", [r for r in records if r["features"] < 64]),
                                      ("64 and more", [r for r in records if r["features"] >= 64]))
                if (ratios := over(chosen, name))]  # fmt: skip
        if told:
            yield f"Speed of products over that of {label_of(name)}, geometric means and ranges: {'; '.join(told)}."


def of_sinkhorn(records):
    for record in records:
        told = ", ".join(f"{label_of(name)} {milliseconds(s)}" for name, s in record["seconds"].items())
        yield (f"{record['iterations']} iterations of Sinkhorn between {record['n']:,} points of {record['features']} "
               f"features, {record['dtype']}, milliseconds: {told}.")  # fmt: skip


def of_nearest(results):
    peak = peak_of(results)
    for record in results.get("nearest", []):
        told = ", ".join(f"{label_of(name)} {milliseconds(s)}" for name, s in record["seconds"].items())
        what = "neighbour" if record["k"] == 1 else f"{record['k']} neighbours"
        said = f"Nearest {what} of {record['m']:,} points among {record['n']:,}, {record['features']} features, "
        said += f"{record['dtype']}, milliseconds: {told}"
        if record["dtype"] == HALF and OURS in record["seconds"]:
            rate = 2e-12 * record["m"] * record["n"] * record["features"] / record["seconds"][OURS]
            said += f"; numbattn's products run at {rate:.0f} TFLOP/s"
            said += f", {rate / peak:.2f} of the peak" if peak else ""
        yield f"{said}."


def milliseconds(seconds):
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def peak_of(results):
    name = results.get("machine", {}).get("gpu", {}).get("name", "")
    return next((peak for known, (peak, _) in PEAKS.items() if name.endswith(known)), None)


def of_errors(records):
    """The largest error of each peer: of products at the origin and far off, and of potentials."""
    chosen = {
        "products": [r for r in records if r["of"] == "product" and not r["offset"]],
        "products of points moved by 1000": [r for r in records if r["of"] == "product" and r["offset"]],
        **{f"potentials, {dtype}": [r for r in records if r["of"] == "sinkhorn" and r["dtype"] == dtype]
           for dtype in dict.fromkeys(r["dtype"] for r in records)},
    }  # fmt: skip
    for what, found in chosen.items():
        if found:
            largest = {name: max(r["errors"].get(name, WRONG) for r in found) for r in found for name in r["errors"]}
            told = ", ".join(f"{label_of(name)} {words_for(error)}" for name, error in largest.items())
            yield f"Largest relative error of {what}: {told}."


def words_for(error):
    return f"{error:.1e}" if error < WRONG else "no digit right"


def of_costs(records):
    for record in records:
        yield (f"A process's first call, {record['of']}, {record['n']:,} points, {record['features']} features: "
               f"{record['first, empty cache']:.1f} s, with compiled kernels in the cache "
               f"{record['first, warm cache']:.1f} s, later {milliseconds(record['later'])} ms; it takes "
               f"{record['bytes'] / 1e6:.1f} MB beyond its inputs.")  # fmt: skip


def rows(results):
    """A row for each case: seconds by peer."""
    found = []
    for part in ("products", "sinkhorn", "nearest"):
        for record in results.get(part, []):
            case = ", ".join(f"{key} {record[key]}" for key in ("m", "n", "features", "columns", "k") if key in record)
            row = {"": f"{part}, {record['dtype']}, {case}"}
            found.append(row | {f"{label_of(name)}, ms": milliseconds(s) for name, s in record["seconds"].items()})
    return found

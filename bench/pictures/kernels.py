"""Sums over pairs of points, on a GPU and on a CPU."""

from itertools import product

from tabulate import tabulate

from .basics import (
    OURS,
    bars,
    finish,
    geometric_mean,
    label_of,
    lines,
    logarithmic,
    panels,
    select,
    sorted_names,
    speedups,
    table,
)

PARTS = "products", "sinkhorn", "nearest", "steps", "solves"
PRODUCTS = "products alone"
PAIRS = 1e10  # those of products
WRONG = 1.0  # an error of no digit right


def kernels(results, where=""):
    """Seconds of products, of Sinkhorn's iterations, of nearest neighbours, of solves and of losses, and errors."""
    figure, axes = panels(2, 4, 2)
    draw_products(axes[0], results.get("products", []))
    draw_others(axes[1], results)
    title = f"Sums over pairs of points{where}"
    if found := [record["seconds"]["keops"] / record["seconds"][OURS] for record in results.get("products", [])
                 if {OURS, "keops"} <= record["seconds"].keys()]:  # fmt: skip
        title += f": {geometric_mean(found):.1f} times as fast as KeOps"
    return finish(figure, title), told(results)


def kernels_cpu(results):
    """The same on NumPy arrays."""
    return kernels(results, " on a CPU")


def transport(results):
    """Seconds of Sinkhorn's iterations, of nearest neighbours and of solves."""
    figure, axes = panels(1, 2, 1.8)
    draw_transport(axes[0], results)
    found = over_others(results["sinkhorn"] + results["nearest"])
    return finish(figure, f"Transport and nearest points: {found}"), told(results)


def cross_entropy(results):
    """Seconds of a vocabulary's cross-entropy with its gradients."""
    own = {"losses": results["losses"]}
    figure, axes = panels(1, 1, 1.8)
    draw_bars(axes[0, 0], own["losses"], "dtype", "seconds", "cross-entropy with its gradients")
    axes[0, 0].set_ylabel("seconds")
    rate = min(record["seconds"][PRODUCTS] / record["seconds"][OURS] for record in own["losses"])
    return finish(figure, f"Cross-entropy of a vocabulary at {rate:.2f} of the rate of its products alone"), told(own)


def clusters(results):
    """Seconds of steps of k-means."""
    figure, axes = panels(1, 1, 1.8)
    draw_bars(axes[0, 0], results["steps"], "n", "seconds", "step of k-means")
    axes[0, 0].set_xlabel("clusters")
    axes[0, 0].set_ylabel("seconds")
    return finish(figure, f"Steps of k-means: {over_others(results['steps'])}"), told(results)


def over_others(records):
    """How much faster numbattn is, in words."""
    found = [min(s for name, s in record["seconds"].items() if name != OURS) / record["seconds"][OURS]
             for record in records]  # fmt: skip
    return f"{geometric_mean(found):.1f} times as fast as the best of others"


def told(results):
    """Ratios and tables."""
    parts = (tell(results.get(tell.__name__, [])) for tell in (losses, errors, costs))
    numbers = rows(results)
    return "\n\n".join(filter(None, (POINTS, ratios(results), *parts, numbers and table(numbers))))


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


def draw_transport(axes, results):
    draw_bars(axes[0], results.get("sinkhorn", []), "dtype", "seconds", "Sinkhorn, 10 iterations")
    axes[0].set_ylabel("seconds")
    nearest = [record for record in results.get("nearest", []) if record["features"] > 3]
    draw_bars(axes[1], nearest, "n", "seconds", "nearest centre")
    axes[1].set_xlabel("centres")


def draw_others(axes, results):
    draw_transport(axes, results)
    errors = results.get("errors", [])
    products = [record for record in errors if record["of"] == "product" and record["offset"]]
    draw_bars(axes[2], select(products, features=3), "length", "errors", "products far from the origin")
    axes[2].set_xlabel("length")
    axes[2].set_ylabel("relative error")
    potentials = [record for record in errors if record["of"] == "sinkhorn" and record["dtype"] == "float32"]
    draw_bars(axes[3], potentials, "epsilon", "errors", "potentials, float32")
    axes[3].set_xlabel("epsilon")


def draw_bars(axis, records, by, measured, title):
    names = {name for record in records for name in record[measured]}
    if names:
        heights = {name: [clipped(record[measured].get(name), measured) for record in records] for name in names}
        bars(axis, [f"{record[by]:g}" if not isinstance(record[by], str) else record[by] for record in records],
             heights)
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(x for found in heights.values() for x in found if x) / 4)  # or the least is not seen
    axis.set_title(title)
    finish_axis(axis, names)


def clipped(x, measured):
    return min(x, WRONG) if x is not None and measured == "errors" else x


def finish_axis(axis, found):
    axis.set_visible(bool(found))
    if found:
        logarithmic(axis)
    axis.tick_params(labelsize=6)


# --------------------------------------------------------------------------------------------------------------- tables
def ratios(results):
    """Speed over that of others, of products by the number of features."""
    groups = {}
    for part in PARTS:
        for record in results.get(part, []):
            few = {"products": ", less than 64 features" if record["features"] < 64 else ", 64 features and more",
                   "nearest": f", {record['features']} features"}.get(part, "")  # fmt: skip
            groups.setdefault(f"{part}{few}, {record['dtype']}", []).append(record["seconds"])
    return speedups(groups)


def milliseconds(seconds):
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def losses(records):
    """Time, memory and errors of each library, beside the products alone."""
    shown = []
    for record in records:
        seconds = record["seconds"]
        case = "{dtype}, {m:,} rows, {n:,} classes, {features:,} features".format(**record)
        for name in sorted_names(seconds):
            row = {"cross-entropy with its gradients": case, "by": label_of(name), "ms": milliseconds(seconds[name])}
            if PRODUCTS in seconds:
                row["rate of the products alone"] = f"{seconds[PRODUCTS] / seconds[name]:.0%}"
            if name != PRODUCTS:
                row |= {"MB beyond inputs and results": f"{record['memory'][name] / 1e6:,.0f}",
                        "relative error": f"{record['errors'][name]:.1e}"}  # fmt: skip
            shown.append(row)
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def errors(records):
    """The largest of each library: of products at the origin and far off, and of potentials."""
    largest = {}
    for record in records:
        what = "potentials" if record["of"] == "sinkhorn" else f"products, {record['offset']:g} from the origin"
        row = largest.setdefault((what, record["dtype"]), {"largest relative error": f"{what}, {record['dtype']}"})
        for name, error in record["errors"].items():
            row[label_of(name)] = max(row.get(label_of(name), 0), error)
    shown = [{key: x if isinstance(x, str) else f"{x:.1e}" if x < WRONG else "no digit right" for key, x in row.items()}
             for row in largest.values()]  # fmt: skip
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def costs(records):
    """Of a process's first call, and of any."""
    shown = [{"first call": "{dtype}, {of}".format(**record),
              **{f"{cache} cache, s": f"{record[f'first, {cache} cache']:.1f}" for cache in ("empty", "warm")},
              "MB beyond the inputs": f"{record['bytes'] / 1e6:.1f}"} for record in records]  # fmt: skip
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def rows(results):
    """A row for each case: seconds by peer."""
    found = []
    for part in PARTS:
        for record in results.get(part, []):
            case = ", ".join(f"{key} {record[key]}" for key in ("m", "n", "features", "columns", "k") if key in record)
            row = {"": f"{part}, {record['dtype']}, {case}"}
            found.append(row | {f"{label_of(name)}, ms": milliseconds(s) for name, s in record["seconds"].items()})
    return found

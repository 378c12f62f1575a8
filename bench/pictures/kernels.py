"""Sums over pairs of points, on a GPU and on a CPU."""

from itertools import product

from .basics import OURS, PEAKS, bars, finish, geometric_mean, label_of, lines, logarithmic, panels, select, span, table

FORMULAS = "standard", "torch"
PAIRS = 1e10  # those of products
WRONG = 1.0  # an error of no digit right
HALF = "float16"


def kernels(results, where=""):
    """Seconds of products, of Sinkhorn's iterations and of nearest neighbours, and errors."""
    figure, axes = panels(2, 4, 2)
    draw_products(axes[0], results.get("products", []))
    draw_others(axes[1], results)
    ratios = over(results.get("products", []), "keops")
    title = f"Sums over pairs of points{where}"
    if ratios:
        title += f": {geometric_mean(ratios):.1f} times as fast as KeOps"
    parts = ([POINTS, *of_products(results.get("products", []))], of_sinkhorn(results.get("sinkhorn", [])),
             of_nearest(results), of_errors(results.get("errors", [])), of_costs(results.get("costs", [])))  # fmt: skip
    said = filter(None, map(" ".join, parts))
    return finish(figure, title), "\n\n".join([*said, table(rows(results))])


def kernels_cpu(results):
    """The same on NumPy arrays."""
    return kernels(results, " on a CPU")


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
    draw_bars(axes[1], [record for record in nearest if record["features"] > 3], "n", "seconds", "nearest centre")
    axes[1].set_xlabel("centres")
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
        yield (f"{record['iterations']} iterations of Sinkhorn between {record['n']:,} points of {record['features']} "
               f"features, {record['dtype']}: {by_peer([record])}.")  # fmt: skip


def of_nearest(results):
    """The nearest centres of many points, and neighbours within a cloud."""
    peak, records = peak_of(results), results.get("nearest", [])
    for dtype, features in dict.fromkeys((record["dtype"], record["features"]) for record in records):
        chosen = select(records, dtype=dtype, features=features)
        m, n, k = (span([record[key] for record in chosen], 0) for key in ("m", "n", "k"))
        said = f"Nearest {k} of {n} for {m} points, {features} features, {dtype}: {by_peer(chosen)}"
        if dtype == HALF:
            rates = [2e-12 * r["m"] * r["n"] * features / r["seconds"][OURS] for r in chosen if OURS in r["seconds"]]
            if rates:
                said += f"; numbattn's products run at {span(rates, 0)} TFLOP/s"
                said += f", {span([rate / peak for rate in rates])} of the peak" if peak else ""
        yield f"{said}."


def by_peer(records):
    """Speed over that of each other."""
    others = dict.fromkeys(name for record in records for name in record["seconds"] if name != OURS)
    told = [f"{label_of(name)} {span(ratios, 1)}" for name in others if (ratios := over(records, name))]
    return f"speed over that of others: {'; '.join(told)}" if told else "nobody else has run"


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
    if records:
        empty, warm = (span([record[f"first, {cache} cache"] for record in records], 1) for cache in ("empty", "warm"))
        most = max(record["bytes"] for record in records) / 1e6
        yield (f"A process's first call takes {empty} s, {warm} s with compiled kernels in the cache. Calls take at "
               f"most {most:.1f} MB beyond their inputs.")  # fmt: skip


def rows(results):
    """A row for each case: seconds by peer."""
    found = []
    for part in ("products", "sinkhorn", "nearest"):
        for record in results.get(part, []):
            case = ", ".join(f"{key} {record[key]}" for key in ("m", "n", "features", "columns", "k") if key in record)
            row = {"": f"{part}, {record['dtype']}, {case}"}
            found.append(row | {f"{label_of(name)}, ms": milliseconds(s) for name, s in record["seconds"].items()})
    return found

"""How all pictures look, and the wording they share."""

import math

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from tabulate import tabulate

matplotlib.rcParams.update({
    "font.size": 8, "axes.titlesize": 8, "figure.titlesize": 10, "figure.titleweight": "bold", "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
    "lines.markersize": 4.5, "lines.linewidth": 1.4, "hatch.linewidth": 0.4,
})  # fmt: skip
WIDTH = 8.8  # inches
OURS = "numbattn"
STYLES = {  # by the name in results: label, colour, marker, hatch of bars
    OURS: ("numbattn", "#08306b", "o", ""),
    "fa4": ("FlashAttention 4", "#b5385a", "^", "////"),
    "fa3": ("FlashAttention 3", "#c0602f", "<", "\\\\"),
    "ffpa": ("FFPA", "#8f9a3c", ">", "**"),
    "cudnn": ("cuDNN", "#2f9e6e", "D", "...."),
    "flash": ("FlashAttention 2", "#f0a830", "s", "\\\\\\\\"),
    "efficient": ("torch, memory-efficient", "#6fb3d9", "v", "xxxx"),
    "math": ("torch, plain formula", "#9a86c9", "P", "++++"),
    "torch": ("torch", "#6fb3d9", "v", "xxxx"),
    "block-sparse": ("numbattn, block-sparse", "#4a7ab5", "p", "oo"),
    "rabe-staats": ("Rabe and Staats", "#c0602f", "<", "|||"),
    "linformer": ("Linformer", "#8f9a3c", ">", "**"),
    "linear": ("linear attention", "#d59ac0", "*", "OO"),
    "numbattn, mma": ("numbattn, kernels for Ampere", "#4a7ab5", "h", "oooo"),
    "jvp-flash-attention": ("jvp-flash-attention", "#c0602f", "d", "||"),
    "fa4-jax": ("fa4-jax", "#b5385a", "8", "//"),
    "keops": ("KeOps", "#c0602f", "H", "++"),
    "flash-sinkhorn": ("flash-sinkhorn", "#2f9e6e", "x", ".."),
    "flash-sinkhorn, TF32": ("flash-sinkhorn, TF32", "#8f9a3c", "1", "xx"),
    "flash-kmeans": ("flash-kmeans", "#f0a830", "2", "\\\\"),
    "cut-cross-entropy": ("cut-cross-entropy", "#b5385a", "4", "OO"),
    "cut-cross-entropy, unfiltered": ("cut-cross-entropy, unfiltered", "#d59ac0", "+", "**"),
    "liger-kernel": ("Liger", "#2f9e6e", "|", "//"),
    "products alone": ("its products alone, by cuBLAS", "#9a86c9", "_", "--"),
    "cg": ("conjugate gradients", "#6fb3d9", "3", "oo"),
    "pyg": ("PyG", "#c0602f", "8", "||"),
    "dense": ("torch, dense", "#9a86c9", "P", "++++"),
} | dict.fromkeys(("standard", "cupy", "numpy", "NumPy"), ("standard formula", "#b0b0b0", "X", "----"))
TINTS = "#08306b", "#4a7ab5", "#8fb3d9"  # variants of numbattn
MARKERS = "osD^vPX*<>"
PEAKS = {  # TFLOP/s of dense bfloat16 products and TB/s of memory, from data sheets, by what CUDA calls the GPU
    "H200": (989, 4.8), "H100 80GB HBM3": (989, 3.35), "B200": (2250, 8.0), "A100-SXM4-80GB": (312, 2.04),
    "RTX 4090": (165, 1.01),
}  # fmt: skip
WORK = {"forward": (4, 4), "backward": (10, 8)}  # FLOP over batch heads seqlen^2 head_dim, and arrays read or written


def panels(rows, columns, height, width=WIDTH, **options):
    """A figure and its axes in two dimensions; the height is that of a row, in inches."""
    figure = Figure((width, 0.6 + height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def finish(figure, title):
    """A title to the left; one legend for all axes, each name once."""
    figure.suptitle(title, x=0.01, ha="left")
    found = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    if found:
        rows = -(-len(found) // 7)
        figure.legend(found.values(), found, loc="outside lower center", ncols=-(-len(found) // rows))
    return figure


def label_of(name):
    return STYLES[name][0] if name in STYLES else name


def sorted_names(found):
    """numbattn first, then as STYLES has them, then the others."""
    order = list(STYLES)
    return sorted(dict.fromkeys(found), key=lambda name: (order.index(name) if name in order else len(order)))


def lines(axis, xs, series):
    """A line for each name; None marks a missing value."""
    for name in sorted_names(series):
        label, colour, marker, _ = STYLES[name]
        ys = [math.nan if y is None else y for y in series[name]]
        width = 2.4 if name == OURS else 1.2  # and below: where lines meet, both are seen
        axis.plot(xs, ys, color=colour, marker=marker, label=label, linewidth=width, zorder=2 + (name != OURS))


def bars(axis, groups, series):
    """A bar for each name in each group."""
    width = 0.85 / len(series)
    for i, name in enumerate(sorted_names(series)):
        label, colour, _, hatch = STYLES[name]
        at = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        heights = [math.nan if y is None else y for y in series[name]]
        axis.bar(at, heights, width, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="x", visible=False)


def powers_of_two(axis, xs):
    """An axis of lengths."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(xs, [f"{x // 1024}k" if x >= 1024 else f"{x}" for x in xs])
    axis.minorticks_off()


def logarithmic(axis, which="y", factor=1):
    """A logarithmic axis with ordinary numbers: 1, 2, 5, 10, or 1, 10, 100; call it when everything is drawn."""
    getattr(axis, f"set_{which}scale")("log")
    side, (low, high) = getattr(axis, f"{which}axis"), getattr(axis, f"get_{which}lim")()
    side.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{factor * value:,.10g}"))
    side.set_minor_locator(NullLocator())


def table(rows, fold="Numbers"):
    """A table that the page shows when it is unfolded."""
    shown = tabulate(rows, headers="keys", tablefmt="github", missingval="-")
    return f"<details><summary>{fold}</summary>\n\n{shown}\n\n</details>"


def speedups(groups, first="numbattn's speed over that of"):
    """A table: geometric means and ranges over the cases of a group, which are seconds by library."""
    names = sorted_names(name for cases in groups.values() for seconds in cases for name in seconds if name != OURS)
    rows = []
    for group, cases in groups.items():
        found = {label_of(name): [seconds[name] / seconds[OURS] for seconds in cases if {OURS, name} <= seconds.keys()]
                 for name in names}  # fmt: skip
        if any(found.values()):
            told = {name: f"{geometric_mean(x):.2f}" + f" ({span(x)})" * (len(x) > 1) if x else None
                    for name, x in found.items()}  # fmt: skip
            rows.append({first: group, **told})
    return tabulate(rows, headers="keys", tablefmt="github", missingval="-")


def inverse(rates):
    """Seconds, but for a factor, by rate."""
    return {name: 1 / rate for name, rate in rates.items()}


def select(records, **wanted):
    return [record for record in records if all(record[key] == value for key, value in wanted.items())]


def values(records, key):
    """The records' values of a key, each once, sorted."""
    return sorted({record[key] for record in records})


def geometric_mean(numbers):
    """The geometric mean, NaN of no numbers."""
    return math.exp(np.log(numbers).mean()) if numbers else math.nan


def span(numbers, digits=2):
    low, high = (f"{x:.{digits}f}" for x in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def summary(ratios):
    """The smallest to the largest ratio, and their geometric mean."""
    return f"{span(ratios)} times (geometric mean {geometric_mean(ratios):.2f})"


def listed(names):
    *others, last = map(label_of, names) if names else ["nobody"]
    return f"{', '.join(others)} and {last}" if others else last


def over_best(rates):
    """numbattn's rate over the fastest peer's, and that peer's name; None where one of them has not run."""
    others = {name: rate for name, rate in rates.items() if name != OURS}
    if OURS not in rates or not others:
        return None, None
    best = max(others, key=others.get)
    return rates[OURS] / others[best], best


def machine_of(results):
    """The GPU's short name, or "CPU"."""
    gpu = results.get("machine", {}).get("gpu", {}).get("name")
    return gpu.removeprefix("NVIDIA ").split()[0] if gpu else "CPU"


def setting_of(record):
    return f"head_dim {record['head_dim']}" + ", causal" * record["causal"]


def group_of(record, key):
    return f"{record[key]}" + "\ncausal" * record["causal"]


def roofline(gpu, of, causal, seqlens):
    """TFLOP/s that products in bfloat16 and memory allow, each array read or written once; None for an unknown GPU."""
    for name, (peak, bandwidth) in PEAKS.items():
        if gpu["name"].endswith(name):
            flop, arrays = WORK[of]
            intensity = flop * np.asarray(seqlens) / (2 * arrays) / (2 if causal else 1)  # FLOP for a byte
            return np.minimum(peak, bandwidth * intensity)
    return None


def bandwidth_of(gpu):
    return next((bandwidth for name, (_, bandwidth) in PEAKS.items() if gpu["name"].endswith(name)), None)

"""Half precision, float32 and float64 on a GPU: speed compared with the peers, and errors."""

import math
from itertools import product

import numpy as np
from tabulate import tabulate

from .basics import (
    OURS,
    bars,
    finish,
    geometric_mean,
    group_of,
    inverse,
    label_of,
    lines,
    listed,
    over_best,
    panels,
    powers_of_two,
    roofline,
    select,
    setting_of,
    sorted_names,
    speedups,
    summary,
    table,
    values,
)


# --------------------------------------------------------------------------------------------------------------- speed
def speed(results):
    """Heat maps of the ratio to the fastest other."""
    records = results["speed"]
    passes, seqlens = list(dict.fromkeys(record["pass"] for record in records)), values(records, "seqlen")
    settings = [(d, causal) for d, causal in product(values(records, "head_dim"), values(records, "causal"))]
    figure, axes = panels(1, len(passes), 0.42 * len(settings), sharey=True)
    found = {of: [] for of in passes}
    for of, axis in zip(passes, axes[0]):
        ratios = np.full((len(settings), len(seqlens)), math.nan)
        for record in select(records, **{"pass": of}):
            place = settings.index((record["head_dim"], record["causal"])), seqlens.index(record["seqlen"])
            rates = record["tflops"]
            ratio, best = over_best(rates)
            text = f"{rates[OURS]:.0f}" if OURS in rates else "-"
            if ratio:
                ratios[place] = ratio
                found[of].append(ratio)
                text = f"{ratio:.2f}\n{text}" + f" < {label_of(best)}".replace("FlashAttention ", "FA") * (ratio < 1)
            axis.annotate(text, place[::-1], ha="center", va="center", fontsize=6.8 if len(text) < 16 else 5.6,
                          color="white" if ratio and ratio > 1.2 else "black",
                          style="italic" if ratio and ratio < 1 else "normal")  # fmt: skip
        shown = axis.imshow(ratios, cmap="YlGnBu", vmin=0.8, vmax=1.5, aspect="auto")
        axis.set_title(f"{of}: {summary(found[of])}" if found[of] else of)
        axis.set_xticks(range(len(seqlens)), seqlens)
        axis.set_yticks(range(len(settings)), [f"{d}{', causal' * causal}" for d, causal in settings])
        axis.set_xlabel("seqlen")
        axis.grid(visible=False)
    axes[0, 0].set_ylabel("head_dim")
    figure.colorbar(shown, ax=axes, label="speed / the fastest other's", pad=0.01, fraction=0.03)
    peers = sorted_names(name for record in records for name in record["tflops"] if name != OURS)
    ratios, first = [x for of in passes for x in found[of]], records[0]
    title = "TFLOP/s of numbattn"
    if ratios:
        others = f"the best of {len(peers)} others" if len(peers) > 1 else label_of(*peers)
        title = (f"{geometric_mean(ratios):.2f} times as fast as {others}, the geometric mean of {len(ratios)} cells; "
                 f"slower in {sum(ratio < 1 for ratio in ratios)}")  # fmt: skip
    text = (
        f"In {first['dtype']}, batch * seqlen = {first['batch'] * first['seqlen']} tokens, heads * head_dim = "
        f"{first['heads'] * first['head_dim']}, compared with {listed(peers)}. The upper number in a cell, and "
        "its colour, is numbattn's speed over that of the fastest of them; the lower number is numbattn's TFLOP/s, "
        "with causal attention counted as half the work. Where another library is faster, the cell is in italics and "
        "names it. Times include everything that a call does.\n\n"
        + table(speed_rows(records))
    )
    return finish(figure, title), text


def deterministic(results):
    """The same for gradients that are equal bit for bit from call to call."""
    figure, text = speed(results)
    return figure, f"numbattn runs with deterministic=True, the others with their defaults. {text}"


def mma(results):
    """The same for the kernels of GPUs before and after Hopper."""
    figure, text = speed(results)
    gpu = results["machine"]["gpu"]
    own = " in place of Hopper's own (--tier mma)" if gpu.get("compute capability") == "9.0" else ""
    return figure, (f"The half-precision kernels for compute capability 8.0 and later, by mma.sync, on an "
                    f"{gpu['name']}{own}; other GPUs were not measured. {text}")  # fmt: skip


def wide(results):
    """The same for head_dims beyond 256."""
    figure, text = speed(results)
    version = results["machine"]["versions"]["ffpa-attn"]
    return figure, (f"Head_dims beyond 256, for which FFPA {version} has kernels; numbattn's gradients of long "
                    f"sequences are products of cuBLAS. {text}")  # fmt: skip


def fa3(results):
    """The same beside FlashAttention 3, without what it gets wrong."""
    wrong = [round(record["tflops"][name]) for record in results["speed"]
             for name, error in record["errors"].items() if math.isnan(error)]  # fmt: skip
    records = [record | {"tflops": {name: rate for name, rate in record["tflops"].items()
                                    if not math.isnan(record["errors"].get(name, math.nan))}}
               for record in results["speed"]]  # fmt: skip
    figure, text = speed(results | {"speed": records})
    if wrong:
        text = (f"Where its results are NaN, in {len(wrong)} cells of {min(wrong)} to {max(wrong)} TFLOP/s, nothing is "
                f"compared. {text}")  # fmt: skip
    version = results["machine"]["versions"]["flash-attn3-jax"]
    return figure, (f"FlashAttention 3's kernels are those of flash-attn3-jax {version}, for JAX, up to a head_dim of "
                    f"128. {text}")  # fmt: skip


def speed_rows(records, where=""):
    """TFLOP/s, numbattn / each peer."""
    peers = sorted_names(name for record in records for name in record["tflops"])
    rows = {}
    for record in records:
        row = rows.setdefault((record["pass"], record["head_dim"], record["causal"]), {
            f"TFLOP/s{where}: {' / '.join(map(label_of, peers))}": f"{record['pass']}, {setting_of(record)}"})
        row[f"{record['seqlen']}"] = rates_of(record, peers)
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0] != "forward", key))]


def readme_table(results, head_dim=128, seqlens=(1024, 4096, 16384)):
    records = [record for record in select(results["speed"], head_dim=head_dim) if record["seqlen"] in seqlens]
    rows = speed_rows(records, f" on an {results['machine']['gpu']['name']}")
    return tabulate(rows, headers="keys", tablefmt="github")


def rates_of(record, peers):
    return " / ".join(f"{record['tflops'][name]:.0f}" if name in record["tflops"] else "-" for name in peers)


def rooflines(results):
    """TFLOP/s by seqlen at the usual head_dim, under what the GPU allows."""
    head_dims = values(results["speed"], "head_dim")
    head_dim = 128 if 128 in head_dims else head_dims[-1]
    records = select(results["speed"], head_dim=head_dim)
    kinds = [*product(dict.fromkeys(record["pass"] for record in records), values(records, "causal"))]
    figure, axes = panels(1, len(kinds), 2.2, sharey=True)
    shares = []
    for (of, causal), axis in zip(kinds, axes[0]):
        chosen = sorted(select(records, causal=causal, **{"pass": of}), key=lambda record: record["seqlen"])
        seqlens = [record["seqlen"] for record in chosen]
        peers = {name for record in chosen for name in record["tflops"]}
        lines(axis, seqlens, {name: [record["tflops"].get(name) for record in chosen] for name in peers})
        between = np.geomspace(seqlens[0], seqlens[-1])
        ceiling = roofline(results["machine"]["gpu"], of, causal, between)
        if ceiling is not None:
            axis.plot(between, ceiling, "--", color="black", linewidth=1,
                      label="roofline of products and memory" if axis is axes[0, -1] else None)  # after all peers
            shares.append((of, max(chosen[-1]["tflops"][name] for name in {OURS} & peers) / ceiling[-1]))
        axis.set_title(f"{of}{', causal' * causal}")
        powers_of_two(axis, seqlens)
        axis.set_xlabel("seqlen")
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("TFLOP/s")
    best = {of: max(share for name, share in shares if name == of) for of, _ in shares}
    reached = ", ".join(f"{of} {share:.0%}" for of, share in best.items())
    title = f"head_dim {head_dim}" + f", long sequences: {reached} of what the GPU can do" * bool(best)
    text = (f"The same at head_dim {head_dim}. The roofline is the data sheet's TFLOP/s for matrix products and its "
            "memory bandwidth, with every array read or written once; exponentials are not included.")
    return finish(figure, title), text


# ------------------------------------------------------------------------------------------------------------ accuracy
def accuracy(results):
    """RMS error against float64 by seqlen, the worst of head_dims and masks."""
    records = results["accuracy"]
    passes, dtypes = list(dict.fromkeys(record["pass"] for record in records)), values(records, "dtype")
    figure, axes = panels(len(passes), len(dtypes), 1.5, sharex=True)
    for (of, dtype), axis in zip(product(passes, dtypes), axes.flat):
        chosen = select(records, dtype=dtype, **{"pass": of})
        seqlens, names = values(chosen, "seqlen"), {name for record in chosen for name in record["errors"]}
        rms = {name: [max((record["errors"][name][0] for record in select(chosen, seqlen=n)
                           if name in record["errors"]), default=None) for n in seqlens] for name in names}
        lines(axis, seqlens, rms)
        powers_of_two(axis, seqlens)
        axis.ticklabel_format(axis="y", scilimits=(0, 0))
        axis.set_ylim(0, 1.1 * max(axis.get_ylim()))
        axis.set_title(f"{dtype}, {of}", loc="right")
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    figure.supylabel("RMS error / RMS of the result", fontsize=8)
    ratios = {dtype: [inverse({name: rms for name, (rms, _) in record["errors"].items()})
                      for record in select(records, dtype=dtype)] for dtype in dtypes}  # fmt: skip
    best = [errors[OURS][0] / min(others) for errors in (record["errors"] for record in records)
            if (others := [rms for name, (rms, _) in errors.items() if name != OURS])]  # fmt: skip
    text = (f"Errors against the plain formula in float64, with {records[0]['heads']} heads at head_dim "
            f"{' and '.join(map(str, values(records, 'head_dim')))}, causal and not; the worst of o, or of dq, dk, dv."
            "\n\n" + speedups(ratios, "numbattn's RMS error over that of"))
    title = f"RMS errors are on average {geometric_mean(best):.2f} times those of the most exact other"
    return finish(figure, title), text


# ----------------------------------------------------------------------------------------------------- float32, float64
def floats(results):
    """TFLOP/s in dtypes for which there are no hand-tuned kernels."""
    records = results["speed"]
    kinds = [*product(values(records, "dtype"), dict.fromkeys(record["pass"] for record in records))]
    figure, axes = panels(1, len(kinds), 2)
    ratios = {}
    for (dtype, of), axis in zip(kinds, axes[0]):
        chosen = select(records, dtype=dtype, **{"pass": of})
        names = {name for record in chosen for name in record["tflops"]}
        bars(axis, [group_of(record, "head_dim") for record in chosen],
             {name: [record["tflops"].get(name) for record in chosen] for name in names})
        ratios[dtype, of] = [ratio for ratio, _ in (over_best(record["tflops"]) for record in chosen) if ratio]
        axis.set_title(f"{dtype}, {of}")
        axis.set_xlabel("head_dim")
    axes[0, 0].set_ylabel("TFLOP/s")
    ratios = {key: found for key, found in ratios.items() if found}
    means = {}
    for (dtype, of), found in ratios.items():
        means.setdefault(dtype, []).append(f"{of} {geometric_mean(found):.1f}")
    means = "; ".join(f"{dtype} {', '.join(told)}" for dtype, told in means.items())
    groups = {f"{dtype}, {of}": [inverse(record["tflops"]) for record in select(records, dtype=dtype, **{"pass": of})]
              for dtype, of in kinds}  # fmt: skip
    text = ("Batch {batch}, {heads} heads, seqlen {seqlen}; causal attention counts as half the "
            "work.").format(**records[0])  # fmt: skip
    return finish(figure, f"Speed over the fastest other's: {means}"), f"{text}\n\n{speedups(groups)}"

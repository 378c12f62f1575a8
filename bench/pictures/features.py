"""Scores, masks, packed sequences and decoding on a GPU."""

import math
from itertools import product

import numpy as np
from tabulate import tabulate

from .basics import (
    MARKERS,
    OURS,
    STYLES,
    TINTS,
    bandwidth_of,
    bars,
    finish,
    geometric_mean,
    label_of,
    listed,
    logarithmic,
    over_best,
    panels,
    select,
    sorted_names,
    span,
    speedups,
    table,
    values,
)


# ----------------------------------------------------------------------------------------------------- scores and masks
def scores(results):
    figure, axes = panels(1, 2, 2.8)
    most, cost = _scores(axes[0, 0], results["score"][:-1])
    shown = _masks(axes[0, 1], results["sparse"])
    pairs = results["score"][-1]
    title = f"With a score, a pass takes up to {most:.1f} times as long; what a mask hides is not computed"
    shared = [{"pair bias": label_of(name), "ms": f"{1e3 * s:.3g}", "MB": f"{pairs['bytes'][name] / 1e6:.0f}"}
              for name, s in pairs["seconds"].items()]  # fmt: skip
    chosen = CHOSEN if "chosen 10%" in results["sparse"][0]["shares"] else ""
    text = (
        f"Left: {cost}; the dot is the largest head_dim and seqlen, the line spans all of them; backward includes the "
        "gradients of a score's arrays, if it has any; FlashAttention 4's time is relative to numbattn's without a "
        "score. Right: the time with a mask relative to the time without, against the share of the scores that it "
        f"shows ({shown}). {chosen}In the table a pair bias shared by {pairs['batch']} rows of a batch, forward and "
        f"backward with its gradient: {pairs['dtype']}, {pairs['heads']} heads of {pairs['head_dim']}, seqlen "
        f"{pairs['seqlen']}.\n\n{tabulate(shared, headers='keys', tablefmt='github')}"
    )
    return finish(figure, title), text


CHOSEN = ("Blocks are of 128; those of “chosen” are of 64, each head chooses its own; “Where” is a function of the "
          "user's. ")
PASS_STYLES = {"forward": {"marker": "o", "color": "#08306b", "markerfacecolor": "#08306b"},
               "backward": {"marker": "s", "color": "#4a7ab5", "markerfacecolor": "white"}}  # fmt: skip
SCORES = {"Alibi": "Alibi, no gradient", "Alibi, gradient": "Alibi", "Score as Alibi": "Score, a function like Alibi",
          "Softcap(50), fa4": "Softcap(50), FlashAttention 4"}  # fmt: skip


def _scores(axis, records):
    """The largest cost, and what was measured."""
    names = list(dict.fromkeys(name for record in records for name in record["seconds"] if name != "plain"))
    for (of, style), shift in zip(PASS_STYLES.items(), (-0.15, 0.15)):
        chosen = sorted(select(records, **{"pass": of}), key=lambda record: (record["head_dim"], record["seqlen"]))
        for i, name in enumerate(names):
            found = [record["seconds"][name] / record["seconds"]["plain"] for record in chosen
                     if name in record["seconds"] and "plain" in record["seconds"]]  # fmt: skip
            if found:
                axis.plot([min(found), max(found)], [i + shift] * 2, color=style["color"], linewidth=1)
                axis.plot(found[-1], i + shift, linestyle="", label=of if i == 0 else None, **style)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), [SCORES.get(name, name) for name in names])
    axis.invert_yaxis()
    axis.set_xlim(left=0.9)
    axis.set_xlabel("time / time without a score")
    most = max(record["seconds"][name] / record["seconds"]["plain"] for record in records
               for name in record["seconds"] if "fa4" not in name and "plain" in record["seconds"])  # fmt: skip
    head_dims, seqlens = (listed([*map(str, values(records, key))]) for key in ("head_dim", "seqlen"))
    return most, f"scores in {records[0]['dtype']}, head_dim {head_dims}, seqlen {seqlens}"


ON_THE_RIGHT = {"butterfly": (5, 4), "Window(1023, 0)": (5, -10), "Where, as Window": (5, -9),
                "chosen 10%": (5, -3)}  # of the mark, in points: the left is crowded


def _masks(axis, records):
    seqlen, head_dim = max(values(records, "seqlen")), max(values(records, "head_dim"))
    for of, style in PASS_STYLES.items():
        for record in select(records, seqlen=seqlen, head_dim=head_dim, **{"pass": of}):
            whole = record["seconds"]["none"]
            found = {name: (record["shares"][name], seconds / whole)
                     for name, seconds in record["seconds"].items() if name != "none"}  # fmt: skip
            axis.plot(*zip(*found.values()), linestyle="", label=of, **style)
            if of == "forward":
                for name, place in found.items():
                    right = name in ON_THE_RIGHT
                    axis.annotate(name.replace("random", "blocks,").replace("_", " "), place,
                                  ON_THE_RIGHT.get(name, (-5, 1)), textcoords="offset points", fontsize=6.5,
                                  ha="left" if right else "right")  # fmt: skip
    least = min(min(record["shares"].values()) for record in records)
    axis.plot([least, 1], [least, 1], "--", color="black", linewidth=0.8, label="time in proportion to what is visible")
    logarithmic(axis, "x", 100)
    logarithmic(axis, "y", 100)
    axis.set_xlim(least * 0.25, 1.3)
    axis.set_xlabel("visible scores, %")
    axis.set_ylabel("time / time without a mask, %")
    return f"{records[0]['dtype']}, seqlen {seqlen}, head_dim {head_dim}"


# -------------------------------------------------------------------------------------------------------------- packed
def packed(results):
    """TFLOP/s on what is visible by the kind of lengths."""
    records = results["speed"]
    kinds = [*product(dict.fromkeys(record["pass"] for record in records), values(records, "causal"))]
    head_dims, ratios = values(records, "head_dim"), {}
    figure, axes = panels(len(head_dims), len(kinds), 1.7, sharey="row", sharex=True)
    for (head_dim, (of, causal)), axis in zip(product(head_dims, kinds), axes.flat):
        chosen = select(records, head_dim=head_dim, causal=causal, **{"pass": of})
        rates = [{RENAMED.get(name, name): rate for name, rate in record["tflops"].items() if name not in WITHIN}
                 for record in chosen]  # fmt: skip
        bars(axis, [record["lengths"].removeprefix("all").replace("_", " ") for record in chosen],
             {name: [found.get(name) for found in rates] for name in {name for found in rates for name in found}})
        for found in rates:
            if over_best(found)[0]:
                ratios.setdefault(of, []).append(over_best(found)[0])
        axis.tick_params(axis="x", rotation=35)
        if axis in axes[-1]:
            axis.set_xlabel("lengths of the sequences")
        if axis in axes[0]:
            axis.set_title(f"{of}{', causal' * causal}")
    for head_dim, axis in zip(head_dims, axes[:, 0]):
        axis.set_ylabel(f"TFLOP/s, head_dim {head_dim}")
    told = ", ".join(f"{of} {geometric_mean(found):.2f}" for of, found in ratios.items())
    title = f"Packed sequences: {told} times as fast as the fastest of the others" if told else "Packed sequences"
    groups = {f"{of}, head_dim {head_dim}": [record["seconds"] for record in select(
        records, head_dim=head_dim, **{"pass": of})] for of, head_dim in product(ratios, head_dims)}  # fmt: skip
    lengths = ", ".join(said for name, said in LENGTHS.items() if select(records, lengths=name))
    text = (f"32768 tokens of 2048 features in {records[0]['dtype']}, TFLOP/s on what is visible: sequences {lengths}. "
            "numbattn itself, too: as an array with a batch axis, where all lengths are equal "
            "(dense), and padded to the longest, with Lengths (padded); torch is torch.nn.attention.varlen.")
    return finish(figure, title), f"{text}\n\n{speedups(groups)}"


LENGTHS = {
    "all512": "of 512", "all4096": "of 4096", "uniform": "of 3 to 2047 (uniform)",
    "lognormal": "of 40 to 3413 (lognormal)", "one_long": "of 16 with one of 31744 (one long)",
    "molecules": "of 5 to 60 (molecules)",
}  # fmt: skip
RENAMED = {"torch": "flash"}  # torch.nn.attention.varlen is that
WITHIN = "dense", "padded"  # ways to call numbattn


# ------------------------------------------------------------------------------------------------------------ decoding
def decoding(results):
    """TB/s of K and V by cell, compared with the peers; and numbattn's variants."""
    records, options = results["records"], results["options"]
    cells = ["{batch} x {keys}, {head_dim}".format(**r) + f", {r['queries']} queries" * (r["queries"] > 1)
             for r in records]  # fmt: skip
    names = list(dict.fromkeys(name for record in records for name in record["TB/s"]))
    figure, axes = panels(1, 2, 0.34 * len(cells) + 0.4, sharey=True)
    at = np.arange(len(cells))
    for name in sorted_names(set(names) & STYLES.keys()):
        label, colour, marker, _ = STYLES[name]
        axes[0, 0].plot([record["TB/s"].get(name, math.nan) for record in records], at, linestyle="", marker=marker,
                        color=colour, label=label)  # fmt: skip
    for i, name in enumerate(name for name in names if name not in STYLES):
        longer = [record["TB/s"][OURS] / record["TB/s"].get(name, math.nan) for record in records]
        axes[0, 1].plot(longer, at, linestyle="", marker=MARKERS[i], color=TINTS[i % 3], label=name,
                        markerfacecolor="none")  # fmt: skip
    if bandwidth := bandwidth_of(results["machine"]["gpu"]):
        axes[0, 0].axvline(bandwidth, linestyle="--", color="black", linewidth=1, label="data sheet's bandwidth")
    axes[0, 1].axvline(1, color="black", linewidth=0.8)
    logarithmic(axes[0, 1], "x")
    axes[0, 0].set_xlim(left=0)
    axes[0, 0].set_xlabel("TB/s of K and V, each read once")
    axes[0, 1].set_xlabel("time / numbattn's with plain arrays, for as many keys")
    axes[0, 0].set_yticks(at, cells)
    axes[0, 0].set_ylabel("batch x keys, head_dim")
    axes[0, 0].invert_yaxis()
    rates = [{name: rate for name, rate in record["TB/s"].items() if name in STYLES} for record in records]
    ratios = [ratio for ratio, _ in map(over_best, rates) if ratio]
    title = (f"Decoding reads up to {max(found[OURS] for found in rates):.1f} TB/s"
             + (f", {span(ratios)} times the fastest other's" if ratios else ""))  # fmt: skip
    text = (f"One query, unless stated otherwise, for each of 32 query heads over {options['heads_k']} key heads in "
            f"{options['dtype']}; K and V come from memory, not from the L2 cache. Right: with the lengths of "
            "the sequences in an array on the GPU, all equal (lengths) or from a tenth of the keys to all of them "
            "(ragged, relative to what is visible); with a KVCache, in pages of so many tokens, or in 8 bits.\n\n"
            + table([{"batch x keys, head_dim": cell, **{label_of(name): f"{record['TB/s'][name]:.2f}"
                                                         for name in names if name in record["TB/s"]}}
                     for cell, record in zip(cells, records)]))  # fmt: skip
    return finish(figure, title), text

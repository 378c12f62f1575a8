"""What else a call costs on a GPU: memory, latency, host time, the first call."""

import math

import numpy as np

from .basics import (
    OURS,
    STYLES,
    TINTS,
    finish,
    lines,
    logarithmic,
    panels,
    powers_of_two,
    select,
    sorted_names,
    span,
    values,
)


# --------------------------------------------------------------------------------------------------------------- costs
def costs(results):
    """Memory, latency, first calls."""
    figure, axes = panels(1, 4, 2.4, width_ratios=(1.1, 1, 1, 1.2))
    exponent, memory = _memory(axes[0, 0], results["memory"])
    latency = _latency(axes[0, 1:3], results["latency"])
    first = _first_calls(axes[0, 3], results["first call"])
    title = "Memory, latency, and the first call of a process"
    said = (f"{memory} It grows as seqlen^{exponent:.2f}. {latency} The first forward call of a process, timed to "
            f"completion, takes {max(first['empty']):.1f} s at most, {max(first['warm']):.1f} s with its kernels in "
            "the cache.")
    return finish(figure, title), said


def _memory(axis, records):
    seqlens = values(records, "seqlen")
    names = {name for record in records for name in record["bytes"]}
    lines(axis, seqlens, {name: [record["bytes"].get(name) and record["bytes"][name] / 1e6 for record in records]
                          for name in names})  # fmt: skip
    powers_of_two(axis, seqlens)
    logarithmic(axis)
    axis.set_xlabel("seqlen")
    axis.set_ylabel("MB beyond the inputs")
    axis.set_title(f"forward + backward, {records[0]['dtype']}")
    last, before = records[-1], records[-2]
    exponent = (math.log(last["bytes"][OURS] / before["bytes"][OURS]) / math.log(last["seqlen"] / before["seqlen"]))
    text = (f"Forward and backward ({last['dtype']}, {last['heads']} heads of {last['head_dim']}) take "
            f"{last['bytes'][OURS] / 1e6:.0f} MB beyond the inputs at seqlen {last['seqlen']}.")  # fmt: skip
    return exponent, text


def _latency(axes, records):
    head_dims = values(records, "head_dim")
    head_dim = 128 if 128 in head_dims else head_dims[-1]
    axes[1].sharey(axes[0])
    for causal, axis in zip((False, True), axes):
        chosen = select(records, head_dim=head_dim, causal=causal)
        seqlens, names = [record["seqlen"] for record in chosen], {name for r in chosen for name in r["seconds"]}
        lines(axis, seqlens, {name: [record["seconds"].get(name, math.nan) * 1e6 for record in chosen]
                              for name in names})  # fmt: skip
        powers_of_two(axis, seqlens)
        axis.set_xlabel("seqlen")
        axis.set_title(f"from call to result{', causal' * causal}")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("microseconds")
    longer = [min(others) / record["seconds"][OURS] for record in records
              if (others := [seconds for name, seconds in record["seconds"].items() if name != OURS])]
    first = records[0]
    text = (f"Latency is the time from a forward call on an idle GPU to its result, in {first['dtype']}, head_dim "
            f"{head_dim}, {first['batch'] * first['seqlen']} tokens")
    return f"{text}; the fastest other takes {span(longer)} times as long." if longer else f"{text}."


def _first_calls(axis, records):
    """Seconds of forward by the state of the cache."""
    for i, record in enumerate(records):
        at = np.arange(4) + (i - (len(records) - 1) / 2) * 0.4
        heights = [record[f"{of}, {cache} cache"] for cache in CACHES for of in ("forward", "backward")]
        axis.bar(at, heights, 0.38, color=TINTS[i], hatch=("", "////")[i % 2], edgecolor="white", label=record["dtype"])
    axis.set_xticks(range(4), [f"{of}\n{cache}" for cache in CACHES for of in ("forward", "backward")], fontsize=6)
    axis.set_ylabel("seconds")
    axis.set_xlabel("pass, cache of kernels")
    axis.grid(axis="x", visible=False)
    axis.set_title("first call of a process")
    return {cache: [record[f"forward, {cache} cache"] for record in records] for cache in CACHES}


CACHES = "empty", "warm"


# ----------------------------------------------------------------------------------------------------------- host time
def host(results):
    """Microseconds of a call by its options."""
    records = results["overhead"]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    calls = list(dict.fromkeys(record["call"] for record in records))
    figure, axes = panels(1, len(dtypes), 0.18 * len(calls) + 0.3, sharex=True, sharey=True)
    for dtype, axis in zip(dtypes, axes[0]):
        chosen = {record["call"]: record for record in select(records, dtype=dtype)}
        for name in sorted_names(name for record in chosen.values() for name in record["median"]):
            label, colour, marker, _ = STYLES[name]
            at = [i for i, call in enumerate(calls) if name in chosen[call]["median"]]
            median, p90 = ([chosen[calls[i]][key][name] for i in at] for key in ("median", "p90"))
            axis.plot(median, at, linestyle="", marker=marker, color=colour, label=label, zorder=3 - (name != OURS))
            axis.hlines(at, median, p90, color=colour, linewidth=0.8)
        axis.set_title(dtype)
        axis.set_xlabel("host time of a call, microseconds")
    logarithmic(axes[0, 0], "x")
    axes[0, 0].set_yticks(range(len(calls)), calls)
    axes[0, 0].invert_yaxis()
    first = [record for record in records if record["call"] == calls[0]]
    others = [min(seconds for name, seconds in record["median"].items() if name != OURS)
              for record in first if len(record["median"]) > 1]  # fmt: skip
    title = f"A call keeps the host busy for {span([record['median'][OURS] for record in first], 0)} microseconds"
    title += f", the fastest other for {span(others, 0)}" if others else ""
    text = ("Time from a call to its return, on arrays so small that the GPU hides nothing: batch 1, 2 heads of 64, "
            "seqlen 64. Marks are medians; the lines end at the 90th percentile.")
    return finish(figure, title), text

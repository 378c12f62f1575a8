"""What the FlashAttention paper shows, measured again."""

import math

from .basics import OURS, STYLES, bars, finish, label_of, lines, logarithmic, panels, powers_of_two, select, values

APPROXIMATIONS = "linformer", "linear", "block-sparse"


def figure3(results):
    """Time of both passes for each setting, and memory, by seqlen."""
    records = results["records"]
    settings, seqlens = list(dict.fromkeys(record["setting"] for record in records)), values(records, "seqlen")
    figure, axes = panels(1, len(settings) + 1, 2.6)
    for setting, axis in zip(settings, axes[0]):
        _by_seqlen(axis, select(records, setting=setting), lambda record: 1e3 * record["seconds"]["both"])
        axis.set_title(setting.replace("none", "plain").replace("+", ", "))
        axis.sharey(axes[0, 0])
    axes[0, 0].set_ylabel("ms, forward + backward")
    first = select(records, setting=settings[0])
    _by_seqlen(axes[0, -1], first, lambda record: record["bytes"] / 1e6)
    axes[0, -1].set_ylabel("MB beyond the inputs")
    axes[0, -1].set_title(f"memory, {settings[0].replace('+', ', ')}")
    ran = {(record["peer"], record["seqlen"]): record for record in first if not record["failed"]}
    longest = max(n for n in seqlens if (OURS, n) in ran and ("standard", n) in ran)
    ours, standard = ran[OURS, longest], ran["standard", longest]
    faster, smaller = standard["seconds"]["both"] / ours["seconds"]["both"], standard["bytes"] / ours["bytes"]
    title = f"At seqlen {longest} {faster:.1f} times as fast as the standard formula, in 1/{smaller:.0f} of its memory"
    overtaken = [f"{label_of(name)} from {n}" for name in APPROXIMATIONS if (n := _overtakes(ran, name, seqlens))]
    shape = ours | {"batch": max(values(records, "batch"))}
    text = ("{heads} heads of {head_dim}, {dtype}, a batch of at most {batch}; a line ends where memory does, and who does "
            "not know a setting is not in it. Rabe and Staats, Linformer and linear attention are written as formulas "
            "of arrays.").format(**shape)
    if overtaken:
        text += f" In the first setting what approximates is faster than exact attention: {', '.join(overtaken)}."
    return finish(figure, title), text


def _by_seqlen(axis, records, value):
    seqlens = values(records, "seqlen")
    names = dict.fromkeys(record["peer"] for record in records if not record["failed"])
    found = {(record["peer"], record["seqlen"]): value(record) for record in records if not record["failed"]}
    lines(axis, seqlens, {name: [found.get((name, n)) for n in seqlens] for name in names if name in STYLES})
    powers_of_two(axis, seqlens[:: math.ceil(len(seqlens) / 5)])
    logarithmic(axis)
    axis.set_xlabel("seqlen")


def _overtakes(ran, name, seqlens):
    """From which length on it is faster than numbattn; None if it is not at the longest."""
    found = None
    for n in seqlens:
        if (name, n) in ran and (OURS, n) in ran:
            faster = ran[name, n]["seconds"]["both"] < ran[OURS, n]["seconds"]["both"]
            found = (found or n) if faster else None
    return found


def io_model(results):
    """Predicted work and traffic, pass by pass."""
    records = results["records"]
    passes = list(dict.fromkeys(record["pass"] for record in records))
    by = {(record["peer"], record["pass"]): record for record in records}
    figure, axes = panels(1, 3, 2)
    for axis, key, unit in zip(axes[0], ("flops", "l2", "dram"), ("GFLOP", "GB, L2 to multiprocessors", "GB, DRAM")):
        bars(axis, passes, {name: [by[peer, of][key] / 1e9 for of in passes]
                            for name, peer in ((OURS, "flash"), ("standard", "standard"))})  # fmt: skip
        axis.set_ylabel(unit)
    ours, standard = by["flash", passes[-1]], by["standard", passes[-1]]
    title = (f"{ours['flops'] / standard['flops']:.2f} times the FLOPs of the standard formula, "
             f"{standard['dram'] / ours['dram']:.0f} times less traffic of DRAM")  # fmt: skip
    text = ("Predicted of numbattn's plans, not measured: batch {batch}, {heads} heads of {head_dim}, seqlen {seqlen}, "
            "{itemsize} bytes an element. Backward computes S once more, and no matrix of seqlen x seqlen is ever "
            "written.").format(**ours)
    return finish(figure, title), text

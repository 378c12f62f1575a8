"""What the FlashAttention paper shows, measured again."""

import math
from itertools import accumulate

from .basics import (
    OURS,
    STYLES,
    bars,
    finish,
    label_of,
    lines,
    logarithmic,
    machine_of,
    panels,
    powers_of_two,
    select,
    table,
    values,
)

UNITS = {"mma": ("kernel for any GPU", "o", "#4a7ab5"), "wgmma": ("Hopper's kernel", "D", "#08306b")}
ENDED = "out of memory", "takes too long"  # why there is no time
LISTOPS = 0.376  # right, in the paper's Table 3


def figure2(results):
    """FLOPs, bytes and time relative to the standard formula; time by the size of blocks, and by sparsity."""
    parts = {part: select(results["records"], part=part) for part in ("left", "block-size", "sparsity")}
    figure, axes = panels(1, 3, 2.4)
    over, left = _work(axes[0, 0], parts["left"])
    moved = _block_sizes(axes[0, 1], parts["block-size"])
    _sparsity(axes[0, 2], parts["sparsity"])
    title = "Bytes decide: {GFLOP:.2f} times the FLOPs, {bytes:.2f} of the bytes, {ms:.2f} of the time".format(**over)
    shapes = {part: shape_words(records[0]["shape"]) for part, records in parts.items()}
    text = (f"Left: forward and backward, {shapes['left']}, relative to the standard formula, with the "
            f"numbers themselves above the bars; {left}. Middle: forward by the number of queries that a block keeps, "
            f"{shapes['block-size']}; dashed: bytes from L2 to the multiprocessors, {moved}. Right: both passes by the "
            f"share of blocks that are visible, {shapes['sparsity']}, with that share of dense attention's time.")
    return finish(figure, title), text


def bytes_of(records, counter="dram", predicted="dram"):
    """The bytes of each record, and where they are from: measured if all of them are, predicted if not."""
    if all(counter in record["measured"] for record in records):
        return [record["measured"][counter] for record in records], "measured"
    return [record["predicted"][predicted] for record in records], "predicted"


TO_MULTIPROCESSORS = "l2 to SM", "l2"


def shape_words(shape):
    batch, heads, seqlen, head_dim = shape
    return f"batch {batch}, {heads} heads of {head_dim}, seqlen {seqlen}"


def _work(axis, records):
    """Draw numbattn's work over the standard formula's; returns the ratios, and where the bytes are from."""
    found, (nbytes, where) = {}, bytes_of(records)
    for record, count in zip(records, nbytes):
        found[record["peer"]] = {"GFLOP": record["predicted"]["flops"] / 1e9, "GB of DRAM": count / 1e9,
                                 "ms": record["seconds"] and 1e3 * record["seconds"]}  # fmt: skip
    kinds = [kind for kind in found["flash"] if found["flash"][kind] and found["standard"][kind]]
    shares = [found["flash"][kind] / found["standard"][kind] for kind in kinds]
    bars(axis, kinds, {OURS: shares, "standard": [1.0] * len(kinds)})
    for i, (kind, share) in enumerate(zip(kinds, shares)):
        for x, height, peer in ((i - 0.21, share, "flash"), (i + 0.21, 1, "standard")):
            axis.annotate(f"{found[peer][kind]:.3g}", (x, height), (0, 2), textcoords="offset points", ha="center")
    axis.set_ylabel("over the standard formula's")
    axis.set_title("forward + backward")
    axis.margins(y=0.12)  # for the numbers
    over = dict.fromkeys(("GFLOP", "GB of DRAM", "ms"), math.nan) | dict(zip(kinds, shares))
    return over | {"bytes": over["GB of DRAM"]}, f"bytes of DRAM are {where}"


def _block_sizes(axis, records):
    """Draw time and bytes by block size; returns where the bytes are from."""
    other = axis.twinx()
    records = sorted(records, key=lambda record: record["tile_m"])
    nbytes, where = bytes_of(records, *TO_MULTIPROCESSORS)
    for unit, (label, marker, colour) in UNITS.items():
        chosen = select(records, unit=unit)
        sizes = [record["tile_m"] for record in chosen]
        axis.plot(sizes, [1e3 * (record["seconds"] or math.nan) for record in chosen], marker=marker, color=colour,
                  label=f"time, {label}")  # fmt: skip
        moved = [n / 1e9 for n, record in zip(nbytes, records) if record["unit"] == unit]
        other.plot(sizes, moved, "--", marker=marker, color=colour, markerfacecolor="none",
                   linewidth=1, label=f"bytes, {label}")  # fmt: skip
    powers_of_two(axis, values(records, "tile_m"))
    axis.tick_params(axis="x", rotation=90)
    axis.set_ylim(bottom=0)
    other.set_ylim(bottom=0)
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    axis.set_title("forward")
    axis.set_xlabel("queries of a block")
    axis.set_ylabel("ms")
    other.set_ylabel("GB, L2 to multiprocessors")
    return where


def _sparsity(axis, records):
    seen = [record for record in records if record.get("visible") and record["seconds"]]
    shares = [100 * record["visible"] for record in seen]
    lines(axis, shares, {"block-sparse": [1e3 * record["seconds"] for record in seen]})
    axis.plot(shares, [1e3 * record["ideal"] for record in seen if "ideal" in record], "--", color="black", linewidth=1,
              label="that share of the dense time")  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.set_title("forward + backward")
    axis.set_xlabel("visible blocks, %")
    axis.set_ylabel("ms")


def figure3(results):
    """Time of both passes for each setting, and memory, by seqlen."""
    records = results["records"]
    settings, seqlens = list(dict.fromkeys(record["setting"] for record in records)), values(records, "seqlen")
    figure, axes = panels(1, len(settings) + 1, 2.6)
    for setting, axis in zip(settings, axes[0]):
        _by_seqlen(axis, select(records, setting=setting), lambda record: 1e3 * record["seconds"]["both"])
        axis.set_title(setting.replace("none", "plain").replace("+", ", "))
        axis.sharey(axes[0, 0])
        axis.tick_params(labelleft=axis is axes[0, 0])
    axes[0, 0].autoscale(axis="y")  # to what is in all of them
    axes[0, 0].set_ylabel("ms, forward + backward")
    first = select(records, setting=settings[0])
    _by_seqlen(axes[0, -1], first, lambda record: record["bytes"] / 1e6)
    axes[0, -1].set_ylabel("MB beyond the inputs")
    axes[0, -1].set_title(f"memory, {settings[0].replace('+', ', ')}")
    ran = {(record["peer"], record["seqlen"]): record for record in first if not record["failed"]}
    longest = max(n for n in seqlens if (OURS, n) in ran and ("standard", n) in ran)
    ours, standard = ran[OURS, longest], ran["standard", longest]
    faster, smaller = standard["seconds"]["both"] / ours["seconds"]["both"], standard["bytes"] / ours["bytes"]
    title = (f"{machine_of(results)}, seqlen {longest}: {faster:.1f} times as fast as the standard formula, in "
             f"1/{smaller:.0f} of its memory")  # fmt: skip
    shape = ours | {"batch": max(values(records, "batch"))}
    text = ("{heads} heads of {head_dim}, {dtype}, a batch of at most {batch}. A line ends where memory does, or "
            "after a length that takes more than a second; peers that do not support a setting are left out of it. "
            "Rabe and Staats, Linformer and linear attention are written as array formulas. In the table: ms of "
            "forward and backward / MB beyond the inputs.").format(**shape)
    return finish(figure, title), f"{text}\n\n{table(_rows(records))}"


def _rows(records):
    """ms of both passes / MB beyond the inputs, by peer."""
    rows = {}
    for x in records:
        about = {"setting": x["setting"].replace("none", "plain").replace("+", ", "), "seqlen": x["seqlen"],
                 "batch": x["batch"]}  # fmt: skip
        found = x["failed"] if x["failed"] in ENDED else None
        if not x["failed"]:
            found = f"{1e3 * x['seconds']['both']:#.3g} / {x['bytes'] / 1e6:.0f}"
        rows.setdefault((x["setting"], x["seqlen"]), about)[label_of(x["peer"])] = found
    return [*rows.values()]


def _by_seqlen(axis, records, value):
    seqlens = values(records, "seqlen")
    names = dict.fromkeys(record["peer"] for record in records if not record["failed"])
    found = {(record["peer"], record["seqlen"]): value(record) for record in records if not record["failed"]}
    lines(axis, seqlens, {name: [found.get((name, n)) for n in seqlens] for name in names if name in STYLES})
    powers_of_two(axis, seqlens[:: math.ceil(len(seqlens) / 5)])
    logarithmic(axis)
    axis.set_xlabel("seqlen")


def listops(results):
    """The share of right answers by the time that training takes, with each attention."""
    records, recipe = {record["attention"]: record for record in results["records"]}, results["recipe"]
    figure, axes = panels(1, 1, 2)
    axis = axes[0, 0]
    for name, record in records.items():
        curve = record["curve"]
        lines(axis, [*accumulate(x["seconds"] for x in curve)], {name: [100 * x["right"] for x in curve]})
    axis.axhline(100 * LISTOPS, color="black", linestyle="--", linewidth=1, label="the paper's, after training")
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("right, %")
    ours, standard = records[OURS], records["standard"]
    title = (f"{machine_of(results)}: ListOps is learnt {standard['seconds'] / ours['seconds']:.1f} times as fast as "
             "with the standard formula")  # fmt: skip
    (share, count), (other, _) = ours["held_out"], standard["held_out"]
    noise = math.sqrt(share * (1 - share) / count)
    near = "within" if abs(share - other) < noise else "beyond"
    text = ("Nested expressions of {shortest} to {longest} tokens, whose values a transformer of {layers} layers, "
            "{heads} heads of {head_dim}, learns from batches of {tokens} tokens, the same with both attentions, one "
            "training after the other; none is seen twice. The share of right answers is that of the last {every} "
            "steps. ").format(**recipe, **recipe["size"])  # fmt: skip
    text += (f"Of {count} other expressions {share:.2%} are right after {ours['steps']} steps with numbattn, "
             f"{1e3 * ours['seconds']:.1f} ms each, {other:.2%} after {standard['steps']} steps with the standard "
             f"formula, {1e3 * standard['seconds']:.1f} ms each: {near} the noise, {noise:.1%}, of each other. The "
             f"paper has {LISTOPS:.1%}. ")  # fmt: skip
    if max(ours["steps"], standard["steps"]) < recipe["steps"]:
        text += f"Time ended both before the {recipe['steps']} steps of the whole training."
    return finish(figure, title), text

"""Sequences that are split over devices."""

from itertools import product

from .basics import MARKERS, TINTS, finish, panels, powers_of_two, select, span, table, values

ENGINES = {"devices": "one process", "nccl": "a process for each, NCCL", "mpi": "processes, MPI",
           "simulated": "ranks that take turns"}  # fmt: skip
STYLES = {True: ("-", "full", "causal"), False: ("--", "none", "full")}  # line, marker, what it is called


# ---------------------------------------------------------------------------------------------------------------- ring
def ring(results):
    """Of as many times one device's speed, by seqlen."""
    records, options = results["speed"], results["options"]
    passes, engines = (list(dict.fromkeys(record[key] for record in records)) for key in ("pass", "engine"))
    seqlens = values(records, "seqlen")
    figure, axes = panels(1, len(passes), 2.4, sharey=True)
    for of, axis in zip(passes, axes[0]):
        for (number, engine), (causal, (line, fill, masked)) in product(enumerate(engines), STYLES.items()):
            chosen = sorted(select(records, engine=engine, causal=causal, **{"pass": of}), key=lambda x: x["seqlen"])
            if chosen:
                xs, ys = zip(*((x["seqlen"], x["of devices"]) for x in chosen))
                axis.plot(xs, ys, line, color=TINTS[number % 3], marker=MARKERS[number], fillstyle=fill,
                          label=f"{ENGINES[engine]}, {masked}")  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.8)
        powers_of_two(axis, seqlens)
        axis.set_xlabel("seqlen")
        axis.set_title(of)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("of as many times one device's speed")
    longest = select(records, seqlen=seqlens[-1])
    told = ", ".join(f"{of} {span([x['of devices'] for x in select(longest, **{'pass': of})])}" for of in passes)
    ranks = records[0]["ranks"]
    text = (
        f"A sequence split in zigzag over {ranks} devices, {options['heads']} heads of {options['head_dim']} on "
        f"{options['heads_k']} of keys in {options['dtype']}: the time of one device with all of it, over {ranks} "
        f"times that of the ring, until the last rank has its results. {_memory(results['checks'])}Relative RMS "
        f"errors against float64, at seqlen {span(values(results['errors'], 'seqlen'), 0)}, the worst of o, dq, dk and "
        f"dv: {span([_worst_ratio(x['rms']) for x in results['errors']])} times one device's. Two runs with "
        f"deterministic=True are equal bit for bit in {sum(x['equal'] for x in results['checks'])} of "
        f"{len(results['checks'])} cases.\n\n" + table([*map(_row, records)])
    )
    return finish(figure, f"{ranks} devices, {seqlens[-1]} tokens: {told} of {ranks} times one's speed"), text


def _memory(checks):
    largest = max(checks, key=lambda x: (x["seqlen"], x["bytes"]["ring"]))
    one, of_ring = (1e-9 * largest["bytes"][peer] for peer in ("one", "ring"))
    if not one:
        return ""
    return (f"Both passes of {largest['seqlen']} tokens take {one:.1f} GB beyond the inputs on one device, at most "
            f"{of_ring:.1f} GB on each of the ring. ")  # fmt: skip


def _worst_ratio(errors):
    return max(errors["ring"][name] / error for name, error in errors["one"].items())


def _row(record):
    return {"engine": ENGINES[record["engine"]], "pass": record["pass"] + ", causal" * record["causal"],
            "seqlen": record["seqlen"], "one, ms": f"{1e3 * record['seconds']['one']:.2f}",
            "ring, ms": f"{1e3 * record['seconds']['ring']:.2f}", "TFLOP/s": f"{record['TFLOP/s']['ring']:.3g}",
            "of all devices": f"{record['of devices']:.2f}"}  # fmt: skip

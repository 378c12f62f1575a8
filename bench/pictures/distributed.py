"""Sequences that are split over devices."""

from itertools import product

from .basics import MARKERS, TINTS, finish, panels, powers_of_two, select, span, table, values

ENGINES = {"devices": "one process", "nccl": "a process for each, NCCL", "mpi": "processes, MPI",
           "simulated": "ranks that take turns"}  # fmt: skip
MASKS = {True: ("-", "full", "causal"), False: ("--", "none", "full")}  # line, marker, what it is called


def ring(results):
    """The share of perfect scaling by seqlen."""
    records, options = results["speed"], results["options"]
    passes, engines = (list(dict.fromkeys(record[key] for record in records)) for key in ("pass", "engine"))
    seqlens = values(records, "seqlen")
    figure, axes = panels(1, len(passes), 2.4, sharey=True)
    for of, axis in zip(passes, axes[0]):
        for (number, engine), (causal, (line, fill, masked)) in product(enumerate(engines), MASKS.items()):
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
    axes[0, 0].set_ylabel("speed / n times one device's")
    longest = select(records, seqlen=seqlens[-1])
    told = ", ".join(f"{of} {span([100 * x['of devices'] for x in select(longest, **{'pass': of})], 0)}%"
                     for of in passes)  # fmt: skip
    ranks, devices = records[0]["ranks"], records[0]["at once"]
    text = (
        f"A sequence split in zigzag over {ranks} ranks, {options['heads']} query heads of {options['head_dim']} over "
        f"{options['heads_k']} key heads in {options['dtype']}: the time of one device for the whole sequence over "
        f"{devices} times the ring's, until the last rank has its results. Two runs with deterministic=True are equal "
        f"bit for bit in {sum(x['equal'] for x in results['checks'])} of {len(results['checks'])} cases.\n\n"
        + "\n\n".join([table([*map(_row, records)]), table([*map(_memory, results["checks"])], "Memory"),
                       table([*map(_errors, results["errors"])], "Errors")])
    )
    return finish(figure, f"{ranks} ranks, {seqlens[-1]} tokens: {told} of perfect scaling"), text


def _memory(record):
    """Beyond the inputs, on one device and at most on each of the ring's."""
    return {"engine": ENGINES[record["engine"]], "causal": record["causal"], "seqlen": record["seqlen"],
            **{f"{peer}, GB": f"{1e-9 * nbytes:.2f}" for peer, nbytes in record["bytes"].items()}}  # fmt: skip


def _errors(record):
    """Relative RMS errors against float64, the worst of o, dq, dk and dv."""
    return {"engine": ENGINES[record["engine"]], "causal": record["causal"], "seqlen": record["seqlen"],
            **{peer: f"{max(found.values()):.3e}" for peer, found in record["rms"].items()}}  # fmt: skip


def _row(record):
    return {"engine": ENGINES[record["engine"]], "pass": record["pass"] + ", causal" * record["causal"],
            "seqlen": record["seqlen"], "one, ms": f"{1e3 * record['seconds']['one']:.2f}",
            "ring, ms": f"{1e3 * record['seconds']['ring']:.2f}", "TFLOP/s": f"{record['TFLOP/s']['ring']:.3g}",
            "of all devices": f"{record['of devices']:.2f}"}  # fmt: skip

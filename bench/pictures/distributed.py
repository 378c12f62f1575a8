"""Sequences that are split over devices."""

from itertools import product

from .basics import MARKERS, STYLES, TINTS, finish, logarithmic, panels, powers_of_two, select, span, table, values

ENGINES = {"devices": "one process", "nccl": "a process for each, NCCL", "mpi": "processes, MPI",
           "simulated": "ranks that take turns"}  # fmt: skip
MASKS = {True: ("-", "full", "causal"), False: ("--", "none", "full")}  # line, marker, what it is called


# ---------------------------------------------------------------------------------------------------------------- ring
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
        f"{devices} times the ring's, until the last rank has its results. {_memory(results['checks'])}Relative RMS "
        f"errors against float64 at seqlen {span(values(results['errors'], 'seqlen'), 0)}, the worst of o, dq, dk and "
        f"dv, are {span([_worst_ratio(x['rms']) for x in results['errors']])} times one device's. Two runs with "
        f"deterministic=True are equal bit for bit in {sum(x['equal'] for x in results['checks'])} of "
        f"{len(results['checks'])} cases.\n\n" + table([*map(_row, records)])
    )
    return finish(figure, f"{ranks} ranks, {seqlens[-1]} tokens: {told} of perfect scaling"), text


def _memory(checks):
    largest = max(checks, key=lambda x: (x["seqlen"], x["bytes"]["ring"]))
    one, of_ring = (1e-9 * largest["bytes"][peer] for peer in ("one", "ring"))
    if not one:
        return ""
    return (f"Both passes of {largest['seqlen']} tokens take {one:.1f} GB beyond the inputs on one device, and at "
            f"most {of_ring:.1f} GB on each device of the ring. ")  # fmt: skip


def _worst_ratio(errors):
    return max(errors["ring"][name] / error for name, error in errors["one"].items())


def _row(record):
    return {"engine": ENGINES[record["engine"]], "pass": record["pass"] + ", causal" * record["causal"],
            "seqlen": record["seqlen"], "one, ms": f"{1e3 * record['seconds']['one']:.2f}",
            "ring, ms": f"{1e3 * record['seconds']['ring']:.2f}", "TFLOP/s": f"{record['TFLOP/s']['ring']:.3g}",
            "of all devices": f"{record['of devices']:.2f}"}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- model
def ring_model(results):
    """Kernels and messages by the number of GPUs, and the speed that follows in three schemes."""
    records, args = results["records"], results["arguments"]
    gpus, schemes = values(records, "gpus"), list(dict.fromkeys(record["scheme"] for record in records))
    figure, axes = panels(1, 3, 2.4)
    steps = select(records, scheme=schemes[0], **{"pass": "forward"})
    for name, (label, number) in {"kernel": ("kernel of a step", 0), "within": ("its message within a node", 1),
                                  "between": ("its message between nodes", 2)}.items():  # fmt: skip
        axes[0, 0].plot(gpus, [1e3 * x[name] for x in steps], color=PEN[number], marker=MARKERS[number], label=label)
    logarithmic(axes[0, 0])
    axes[0, 0].set_ylabel("ms, forward")
    axes[0, 0].set_title("a block of T x T / 2 scores")
    for of, axis in zip(("forward", "backward"), axes[0, 1:]):
        for number, scheme in enumerate(schemes):
            chosen = select(records, scheme=scheme, **{"pass": of})
            axis.plot(gpus, [x["share"] for x in chosen], "--", color=PEN[number], marker=MARKERS[3 + number],
                      label=scheme)  # fmt: skip
        axis.set_ylim(0, 1.05)
        axis.set_title(of)
    axes[0, 1].set_ylabel("share of perfect scaling")
    for axis in axes[0]:
        powers_of_two(axis, gpus)
        axis.set_xlabel("GPUs")
    last = {x["scheme"]: x["share"] for x in select(records, gpus=gpus[-1], **{"pass": "forward"})}
    told = ", ".join(f"{scheme} {share:.0%}" for scheme, share in last.items())
    hides = {x["link"]: select(results["hides"], link=x["link"]) for x in results["hides"]}
    within, between = (f"{forward['tokens']:.0f} ({backward['tokens']:.0f} in backward)"
                       for forward, backward in (hides["within"], hides["between"]))  # fmt: skip
    rates = "{:.0f} and {:.0f} TFLOP/s".format(*args["tflops"]) if args["tflops"] else "see above"
    text = (
        f"Only the rates are measured here: a model of {args['seqlen']} causal tokens in zigzag, {args['heads']} query "
        f"heads of {args['head_dim']} over {args['heads_k']} key heads in bfloat16, on nodes of {args['node']} GPUs. "
        f"Kernels run as fast as on one GPU at such lengths ({rates}); a GPU receives {args['within']:.0f} GB/s from "
        f"its node and {args['between']:.0f} GB/s from others; a step is assumed to start in {args['start']:.0f} "
        f"microseconds. A step of the ring hides its message within a node from {within} tokens per GPU on, and "
        f"between nodes from {between} on. Ring: keys go from each GPU to every other one, as `numbattn.distributed` "
        "sends them. Two levels: keys reach each node once and then go around in it. Ulysses in a node: its GPUs "
        "exchange tokens for heads, and the ring is one of nodes. The last two are not implemented.\n\n"
        + table([{"pass": of, "GPUs": n, "tokens a GPU": f"{model[0]['tokens']:.0f}",
                  "kernel / message within / between, ms": " / ".join(f"{1e3 * model[0][x]:.3f}" for x in LINKS),
                  **{x["scheme"]: f"{x['share']:.2f}" for x in model}}
                 for of, n in product(("forward", "backward"), gpus)
                 if (model := select(records, gpus=n, **{"pass": of}))])
    )  # fmt: skip
    return finish(figure, f"On paper, with {gpus[-1]} GPUs: {told} of perfect scaling"), text


LINKS = "kernel", "within", "between"
PEN = [STYLES[name][1] for name in ("numbattn", "flash", "fa4")]  # colours

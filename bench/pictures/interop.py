"""What a call from a framework takes on top of numbattn's own."""

from .basics import TINTS, finish, panels, select, table


def interop(results):
    """Microseconds of host time, by framework, device and kind of call."""
    records = results["interop"]
    kinds = list(dict.fromkeys((record["framework"], record["device"]) for record in records))
    figure, axes = panels(1, len(kinds), 1.6)
    named = [framework for framework, _ in kinds]
    for number, ((framework, device), axis) in enumerate(zip(kinds, axes[0])):
        chosen = select(records, framework=framework, device=device)
        at = range(len(chosen))
        axis.barh(at, [record["own"] for record in chosen], color=TINTS[0], label="numbattn's own")
        left = [record["own"] for record in chosen]
        for name, part, colour in (("an empty function", empty, TINTS[2]), ("the rest", rest, "#b5385a")):
            widths = [part(record) for record in chosen]
            axis.barh(at, widths, left=left, color=colour, label=name)
            left = [x + width for x, width in zip(left, widths)]
        is_first = named.index(framework) == number
        axis.set_yticks(at, [record["call"] * is_first for record in chosen])
        axis.invert_yaxis()
        axis.set_title(f"{framework}, {device.removeprefix('NVIDIA ').split()[0]}")
        axis.set_xlabel("microseconds")
    plain = [record for record in records if record["call"] == "no gradients"]
    least = min(plain, key=on_top)
    title = f"Host time of a call from torch and JAX: {on_top(least):.0f} microseconds or more on top of numbattn's own"
    rows = [record | {"on top": on_top(record)} for record in records]
    text = ("Host time, float32, batch 1, 2 heads, seqlen 16, head_dim 16. An empty function is what torch takes to "
            "record and to differentiate one that computes nothing, on a GPU in a thread of its own. What JAX takes to "
            "trace derivatives outside of jit is in the rest.")
    return finish(figure, title), f"{text}\n\n{table(rows)}"


def on_top(record):
    return record["framework's"] - record["own"]


def empty(record):
    return record.get("empty", 0)


def rest(record):
    return max(on_top(record) - empty(record), 0)

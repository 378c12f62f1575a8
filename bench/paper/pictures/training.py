"""Models that are trained, as in the FlashAttention paper's Tables 2 to 6."""

import math

import numpy as np
from pictures.basics import OURS, STYLES, finish, label_of, lines, logarithmic, panels, powers_of_two, select, values

SMOOTHED = 20  # steps
TASKS = {"listops": "ListOps", "pathfinder": "Pathfinder"}
PATH_X = 128 * 128
SURE = 3  # standard errors


# ------------------------------------------------------------------------------------------------------------ training
def training(results):
    """Tokens a second and memory by context; the losses of both, and how far apart they are."""
    ran = {(record["attention"], record["context"]): record for record in results["records"] if not record["failed"]}
    contexts = values(results["records"], "context")
    both = [n for n in contexts if (OURS, n) in ran and ("standard", n) in ran]
    figure, axes = panels(1, 4, 2.6, width_ratios=(1, 1, 1.5, 1.5))
    _by(axes[0, 0], "context", ran, contexts, lambda record: tokens_per_second(record) / 1e3)
    axes[0, 0].set_ylabel("1000 tokens/s")
    _by(axes[0, 1], "context", ran, contexts, lambda record: record["bytes"] / 1e9)
    axes[0, 1].set_ylabel("GB of a step")
    distances = _losses(axes[0, 2], axes[0, 3], ran, both)
    times = {n: tokens_per_second(ran[OURS, n]) / tokens_per_second(ran["standard", n]) for n in both}
    title = (f"Trains {times[both[-1]]:.1f} times as fast at context {both[-1]}; losses are at most "
             f"{max(distances):.3f} bits apart")
    options, (shortest, longest) = results["arguments"], (both[0], both[-1])
    long = tokens_per_second(ran[OURS, longest]) / tokens_per_second(ran["standard", shortest])
    held_out = ", ".join(f"{ran[OURS, n]['validation']:.3f} at {n}" for n in contexts if (OURS, n) in ran)
    text = (f"{options['layers']} layers of {options['heads']} heads of 64, {options['dtype']} products, on bytes; "
            f"a step has {options['tokens']} tokens, or one sequence. Speed relative to the standard formula: "
            f"{', '.join(f'{x:.2f} times at context {n}' for n, x in times.items())}; at context {longest}, {long:.2f} "
            f"times the standard formula's at {shortest}. Averaged over {SMOOTHED} steps, the losses differ by at most "
            f"{max(distances):.4f} bits per byte. On held-out text, after at most {options['steps']} steps: "
            f"{held_out}.")  # fmt: skip
    full = [f"{words(record['attention'])} at {record['context']}" for record in results["records"]
            if record["failed"]]  # fmt: skip
    return finish(figure, title), text + (f" Out of memory: {', '.join(full)}." if full else "")


def words(attention):
    return "the " * (attention == "standard") + label_of(attention)


def tokens_per_second(record):
    return record["batch"] * record["context"] / record["seconds"]


def _losses(axis, difference, ran, contexts):
    """Draw losses and their differences; returns the largest difference at each context."""
    found = []
    for n, colour in zip(contexts, ["#08306b", "#f0a830", "#2f9e6e", "#b5385a", "#9a86c9"]):
        ours, standard = (smoothed(ran[name, n]["losses"]) for name in (OURS, "standard"))
        axis.plot(standard, color=colour, linewidth=3, alpha=0.35)
        axis.plot(ours, color=colour, linewidth=1)
        common = min(len(ours), len(standard))
        apart = np.subtract(ours[:common], standard[:common])
        difference.plot(apart, color=colour, linewidth=1, label=f"context {n}")
        found.append(abs(apart).max())
    axis.set_ylabel("bits per byte")
    axis.set_title("loss; broad lines: the standard formula")
    difference.set_title("loss, numbattn - standard formula")
    for side in (axis, difference):
        side.set_xlabel("step")
    return found


def smoothed(losses):
    """Means over SMOOTHED steps, or over all if there are fewer."""
    count = min(SMOOTHED, len(losses))
    return np.convolve(losses, np.full(count, 1 / count), "valid")


def _by(axis, key, ran, xs, value):
    names = dict.fromkeys(name for name, _ in ran)
    lines(axis, xs, {name: [value(ran[name, x]) if (name, x) in ran else None for x in xs] for name in names})
    powers_of_two(axis, xs)
    logarithmic(axis)
    axis.set_xlabel(key)


# ---------------------------------------------------------------------------------------------------------- long range
def long_range(results):
    """Accuracy by seconds of training; time and memory of a step by the pixels of an image."""
    tasks, steps = select(results["records"], part="tasks", failed=None), select(results["records"], part="steps")
    names = list(dict.fromkeys(record["task"] for record in tasks))
    figure, axes = panels(1, len(names) + 2, 2.4)
    held_out = results["arguments"]["held_out"]
    reached = [_curves(axis, select(tasks, task=name), held_out) for axis, name in zip(axes[0], names)]
    ran = {(record["attention"], record["seqlen"]): record for record in steps if not record["failed"]}
    seqlens = values(steps, "seqlen")
    time, memory = axes[0, -2:]
    _by(time, "pixels", ran, seqlens, lambda record: 1e3 * record["seconds"])
    time.set_ylabel("ms a step")
    _by(memory, "pixels", ran, seqlens, lambda record: record["bytes"] / 1e9)
    memory.set_ylabel("GB of a step")
    at = min(seqlens, key=lambda n: abs(n - PATH_X))
    full = values([record for record in steps if record["failed"]], "seqlen")
    options, name = results["arguments"], "Path-X" if at == PATH_X else f"{at} pixels"
    if ("standard", at) in ran:
        ours, standard = ran[OURS, at], ran["standard", at]
        title = (f"A step on {name} takes the standard formula {standard['seconds'] / ours['seconds']:.1f} times as "
                 f"long and {standard['bytes'] / ours['bytes']:.1f} times the memory")
    else:
        title = f"On {name} a step takes {1e3 * ran[OURS, at]['seconds']:.0f} ms; the standard formula does not fit"
    text = (f"{options['layers']} layers of {options['heads']} heads of 64, {options['dtype']} products, "
            f"{options['tokens']} tokens a step. {' '.join(reached)} Path-X has {PATH_X} pixels.")
    if full:
        text += f" The standard formula runs out of memory from {full[0]} pixels on."
    text += " Trained from random weights on labels alone, transformers do not learn Path-X (arXiv 2310.02980)."
    return finish(figure, title), text


def _curves(axis, records, held_out):
    """Draw accuracies; returns a sentence."""
    first, said = records[0], []
    for record in records:
        (label, colour, marker, _), name = STYLES[record["attention"]], words(record["attention"])
        seconds, steps, accuracies = zip(*record["curve"])
        axis.plot(seconds, [100 * x for x in accuracies], color=colour, marker=marker, label=label)
        said.append(f"{100 * accuracies[-1]:.1f}% with {name} after {steps[-1]} steps, {seconds[-1]:.0f} s")
    axis.axhline(100 * first["guess"], color="black", linestyle="--", linewidth=1, label="the most frequent answer")
    axis.set_xlabel("s of training")
    axis.set_ylabel("accuracy, %")
    task = TASKS[first["task"]]
    axis.set_title(f"{task}, {first['seqlen']} tokens")
    in_vain = "" if any(is_learned(record, held_out) for record in records) else "; nothing is learned in this time"
    return f"{task}: {', '.join(said)}; always giving the most frequent answer: {100 * first['guess']:.1f}%{in_vain}."


def is_learned(record, held_out):
    """Whether more of so many held-out samples are right than by always giving the most frequent answer."""
    guess = record["guess"]
    return record["curve"][-1][2] > guess + SURE * math.sqrt(guess * (1 - guess) / held_out)


def documents(results):
    """Accuracy by the length that is read, and how many documents a second are trained on."""
    records = sorted(select(results["records"], part="documents", failed=None), key=lambda record: record["seqlen"])
    seqlens = [record["seqlen"] for record in records]
    accuracies = [100 * record["curve"][-1][2] for record in records]
    figure, axes = panels(1, 3, 2.4)
    left, middle, right = axes[0]
    lines(left, seqlens, {OURS: accuracies})
    guess = [100 * record["guess"] for record in records]
    left.plot(seqlens, guess, "--", color="black", linewidth=1, label="the most frequent answer")
    left.set_ylabel("accuracy, %")
    left.set_ylim(bottom=0)
    lines(middle, seqlens, {OURS: [record["batch"] * record["seqlen"] / record["seconds"] / 1e6 for record in records]})
    middle.set_ylabel("millions of tokens/s")
    middle.set_ylim(bottom=0)
    for axis in (left, middle):
        powers_of_two(axis, seqlens)
        axis.set_xlabel("bytes of a document")
    for record, colour in zip(records, np.linspace(0.75, 0, len(records))):
        seconds, _, curve = zip(*record["curve"])
        right.plot(seconds, [100 * x for x in curve], color=f"{colour:.2f}", label=f"{record['seqlen']} bytes")
    right.set_xlabel("s of training")
    right.set_ylabel("accuracy, %")
    best, options = max(range(len(seqlens)), key=accuracies.__getitem__), results["arguments"]
    title = (f"{accuracies[best]:.0f}% of documents of {seqlens[best]} bytes are recognised, and "
             f"{accuracies[0]:.0f}% of those of {seqlens[0]} bytes")
    seconds = math.ceil(max(record["curve"][-1][0] for record in records))
    text = (f"Which of {records[0]['classes']} packages of Python's standard library a held-out text comes from; "
            f"{options['layers']} layers of {options['heads']} heads of 64, {options['tokens']} tokens a "
            f"step, at most {seconds} s of training for each length: "
            f"{', '.join(f'{x:.1f}% at {n}' for x, n in zip(accuracies, seqlens))}.")  # fmt: skip
    return finish(figure, title), text

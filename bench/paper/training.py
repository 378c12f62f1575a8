"""The paper's Tables 2 and 4: training of GPT-2 small by context length, with numbattn and with the standard formula.

    python bench/paper training --json training.json
    python bench/paper training --layers 24 --heads 16 --contexts 1024 --minutes 30    # GPT-2 medium

A model of that size, 12 layers of 12 heads of 64 with rotary positions, on bytes: the sources of Python's standard
library, of which every fourth file is held out.
Both start from the same weights and see the same batches of --tokens bytes, or of one sequence if that is longer.
Products are float16, accumulated in float32; weights, sums, norms and losses are float32. The standard formula is
that of model.py in CuPy, with S and P in float16.

A record has the loss of each step, and of the held-out text, in bits per byte; the median time of a step; the memory
that a step takes beyond weights and moments. The runs share --minutes: a run with no time left makes fewer steps.
Without a GPU the arrays are NumPy's, float32, small, and memory is what tracemalloc sees. Needs tabulate and tqdm.
"""

import argparse
import math
import time
from functools import partial
from itertools import product

import numpy as np
from common import show
from tqdm import tqdm

import numbattn as na
from paper import model, tasks
from paper.figure3 import OUT_OF_MEMORY, is_out_of_memory, measure_and_show
from paper.model import Adam, Size, Transformer

ATTENTIONS = {"numbattn": na.attention_vjp, "standard": model.standard_attention}
SMALL = {"contexts": [32, 64], "layers": 1, "heads": 1, "tokens": 128, "steps": 20, "validated": 512, "minutes": 0.2}
LARGE = {"contexts": [1024, 2048, 4096, 8192, 16384], "layers": 12, "heads": 12, "tokens": 8192, "steps": 300,
         "validated": 2**18, "minutes": 7}  # fmt: skip
HEAD_DIM, BYTES = 64, 256


def windows(xp, text, starts, context):
    """Inputs, (len(starts), context), and the byte after each of them, in one row."""
    window = xp.asarray(text[starts[:, None] + np.arange(context + 1)].astype(int))
    return window[:, :-1], window[:, 1:].ravel()


def held_out_loss(xp, gpt, weights, text, context, batch):
    """Bits per byte of the text in windows that each start without context."""
    starts, total = np.arange(0, len(text) - context, context), 0.0
    for first in range(0, len(starts), batch):
        some = starts[first : first + batch]
        inputs, targets = windows(xp, text, some, context)
        logits = gpt(inputs, weights)[0]  # backprop, which holds P of all layers, is dropped before the next batch
        total += float(model.cross_entropy(logits, targets)[0]) * len(some)
    return total / len(starts) / math.log(2)


def trained(clock, name, context, args, seconds):
    """The record of a run that takes at most so many seconds."""
    xp, size = clock.xp, Size(args.layers, args.heads, HEAD_DIM)
    text, held_out = tasks.split(list(tasks.library().values()))
    rotation = model.rotations(xp, tasks.text_coordinates(context), size.head_dim)
    gpt = Transformer(partial(ATTENTIONS[name], causal=True), size.heads, rotation, dtype=np.dtype(args.dtype))
    adam = Adam(model.init_weights(xp, size, BYTES, BYTES), args.lr)
    rng, batch, end = np.random.default_rng(0), max(1, args.tokens // context), time.monotonic() + seconds

    def step():
        """Take a step; returns the loss and the time: reading the loss waits for the GPU."""
        inputs, targets = windows(xp, text, rng.integers(len(text) - context, size=batch), context)
        start = time.perf_counter()
        return float(model.train(gpt, adam, inputs, targets)), time.perf_counter() - start

    made = [step()]
    with tqdm(total=args.steps, initial=1, desc=f"{name}, {context}", disable=None, leave=False) as bar:
        while len(made) < args.steps and time.monotonic() < end:
            made.append(step())
            bar.update()
    losses, times = zip(*made)
    validation = held_out_loss(xp, gpt, adam.weights, held_out[: args.validated + 1], context, batch)
    clock.release()
    return {"batch": batch, "losses": [round(loss, 5) for loss in losses], "seconds": float(np.median(times)),
            "validation": validation, "bytes": int(clock.extra_bytes(step))}  # fmt: skip


def records_of(clock, args):
    runs = [{"context": context, "attention": name} for context, name in product(args.contexts, args.attentions)]
    return in_turn(clock, runs, args.minutes, lambda run, seconds: trained(
        clock, run["attention"], run["context"], args, seconds))  # fmt: skip


# ----------------------------------------------------------------------------- what the scripts that train share
def in_turn(clock, runs, minutes, measure):
    """Each run, a dict, with what measure(run, seconds) adds. They share the minutes: later runs get what earlier ones
    leave. Running out of memory is a result, too."""
    end, records = time.monotonic() + 60 * minutes, []
    for i, run in enumerate(runs):
        try:
            found = measure(run, (end - time.monotonic()) / (len(runs) - i))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = {"failed": OUT_OF_MEMORY}
        records.append({**run, "failed": None, **found})
        clock.release()
    return records


def parser_of(doc, on_gpu):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, metavar="N")
    parser.add_argument("--heads", type=int, metavar="N")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a step")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16" if on_gpu else "float32",
                        help="of products")
    parser.add_argument("--minutes", type=float, help="for all runs")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    return parser


# -------------------------------------------------------------------------------------------------------- command line
def row_of(record):
    if record["failed"]:
        return {name: record[name] for name in ("context", "attention", "failed")}
    return {
        "context": record["context"], "attention": record["attention"], "batch": record["batch"],
        "steps": len(record["losses"]), "tokens/s": record["batch"] * record["context"] / record["seconds"],
        "MB": record["bytes"] / 1e6, "bits per byte": np.mean(record["losses"][-20:]),
        "held out": record["validation"],
    }  # fmt: skip


def show_records(records):
    show("Training", [row_of(record) for record in records], ["", "", "", "", ",.0f", ",.0f", ".4f", ".4f"])


def parse(arguments, on_gpu):
    parser = parser_of(__doc__, on_gpu)
    parser.add_argument("--contexts", nargs="+", type=int, metavar="N")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--steps", type=int, metavar="N", help="of a run")
    parser.add_argument("--validated", type=int, metavar="N", help="bytes of the held-out text")
    parser.set_defaults(lr=1e-3, **(LARGE if on_gpu else SMALL))
    args = parser.parse_args(arguments)
    args.contexts.sort()
    return args


def main(arguments=None):
    measure_and_show(parse, records_of, show_records, arguments)

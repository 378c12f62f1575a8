"""The paper's Tables 3, 5 and 6: tasks of the Long Range Arena, long documents, and steps at the lengths of Path-X.

    python bench/paper long_range --json long_range.json
    python bench/paper long_range --parts tasks --tasks pathfinder --side 64 --minutes 60

A transformer encoder, 4 layers of 4 heads of 64, that classifies the mean over all tokens; a step has --tokens tokens.
steps: time and memory of a step on Pathfinder's images, pixel by pixel, with numbattn, with the butterfly's blocks of
128, and with the standard formula in CuPy. 128 x 128 pixels are Path-X, 256 x 256 Path-256.
tasks: accuracy on ListOps and Pathfinder by the time of training, with numbattn and with the standard formula, which
see the same batches. documents: which package of Python's standard library a text is from, by length.

tasks.py makes the tasks. Accuracy is reached in minutes of training from random weights on labels alone, which does not
teach transformers Path-X: they are pretrained, on the images (Amos et al., arXiv 2310.02980) or, in the paper, on
smaller ones. The runs share --minutes. Without a GPU the arrays are NumPy's, float32, small, and memory is what
tracemalloc sees. Needs tabulate and tqdm.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from common import show

import numbattn as na
from paper import model, tasks
from paper.figure3 import butterfly, measure_and_show
from paper.model import Adam, Size, Transformer
from paper.training import in_turn, parser_of

PARTS = {  # and their peers
    "steps": ["numbattn", "block-sparse", "standard"], "tasks": ["numbattn", "standard"], "documents": ["numbattn"],
}  # fmt: skip
ATTENTIONS = PARTS["steps"]
TASKS = {"listops": "length", "pathfinder": "side"}  # and the option that says how large they are
SMALL = {"sides": [12, 16], "side": 12, "length": 32, "contexts": [32, 64], "layers": 1, "heads": 1, "tokens": 512,
         "held_out": 32, "minutes": 0.1}  # fmt: skip
LARGE = {"sides": [32, 64, 128, 256], "side": 32, "length": 2048, "contexts": [2**n for n in range(9, 15)], "layers": 4,
         "heads": 4, "tokens": 32768, "held_out": 1024, "minutes": 7}  # fmt: skip
HEAD_DIM, SAMPLES = 64, 5
POINTS = 8  # in a curve of accuracies


class Run(NamedTuple):
    part: str
    task: str
    size: int  # a side or a length
    attention: str

    def make_task(self):
        return getattr(tasks, self.task)(self.size)


def runs_of(args):
    what = {
        "steps": [("pathfinder", side) for side in args.sides],
        "tasks": [(name, getattr(args, TASKS[name])) for name in args.tasks],
        "documents": [("documents", context) for context in args.contexts],
    }
    return [Run(part, *task, name) for part in args.parts for task, name in product(what[part], PARTS[part])
            if name in args.attentions]  # fmt: skip


def attention_of(xp, name, seqlen):
    if name == "standard":
        return model.standard_attention
    if name == "numbattn":
        return na.attention_vjp
    return partial(na.attention_vjp, mask=butterfly(xp, seqlen))


class Learner:
    """A transformer, its weights, and the batches that it sees."""

    def __init__(self, xp, name, task, args):
        self.xp, size = xp, Size(args.layers, args.heads, HEAD_DIM)
        rotation = model.rotations(xp, task.coordinates, HEAD_DIM)
        attention = attention_of(xp, name, task.seqlen)
        self.model = Transformer(attention, size.heads, rotation, pooled=True, dtype=np.dtype(args.dtype))
        self.adam = Adam(model.init_weights(xp, size, task.symbols, task.classes), args.lr)
        self.batch = max(1, args.tokens // task.seqlen)
        self.next = partial(task.sample, np.random.default_rng(0), self.batch)

    def put(self, *arrays):
        return [self.xp.asarray(x.astype(int)) for x in arrays]

    def step(self, sampled):
        """Take a step; returns its seconds: reading the loss waits for the GPU."""
        tokens, labels = self.put(*sampled)
        start = time.perf_counter()
        float(model.train(self.model, self.adam, tokens, labels))
        return time.perf_counter() - start

    def accuracy(self, tokens, labels):
        right = 0
        for i in range(0, len(tokens), self.batch):
            some, wanted = self.put(tokens[i : i + self.batch], labels[i : i + self.batch])
            logits = self.model(some, self.adam.weights)[0]  # backprop is dropped before the next batch
            right += int((logits.argmax(axis=1) == wanted).sum())
        return right / len(tokens)


# ---------------------------------------------------------------------------------------------------------- measuring
def stepped(clock, run, args, seconds):
    """Time and memory of a step."""
    learner = Learner(clock.xp, run.attention, run.make_task(), args)
    sampled = learner.next()
    learner.step(sampled)  # compiles
    times = [learner.step(sampled) for _ in range(SAMPLES)]
    clock.release()
    nbytes = int(clock.extra_bytes(partial(learner.step, sampled)))
    return {"batch": learner.batch, "seconds": float(np.median(times)), "bytes": nbytes}


def trained(clock, run, args, seconds):
    """Accuracy on held-out samples by seconds of training, for so many seconds in all."""
    task, end = run.make_task(), time.monotonic() + seconds
    held_out = task.sample(np.random.default_rng(1), args.held_out, held_out=True)
    learner, times, curve = Learner(clock.xp, run.attention, task, args), [], []
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(learner.next)
        for point in range(POINTS):
            until = end - seconds * (1 - (point + 1) / POINTS)
            while not times or time.monotonic() < until:
                sampled, coming = coming.result(), ahead.submit(learner.next)
                times.append(learner.step(sampled))
            if not curve or curve[-1][1] < len(times):
                curve.append([round(sum(times), 3), len(times), learner.accuracy(*held_out)])
    guess = np.bincount(held_out[1]).max() / args.held_out
    return {"batch": learner.batch, "seconds": float(np.median(times)), "curve": curve, "guess": float(guess),
            "classes": task.classes}  # fmt: skip


def records_of(clock, args):
    runs = [run._asdict() | {"seqlen": run.make_task().seqlen} for run in runs_of(args)]

    def measure(found, seconds):
        run = Run(*(found[name] for name in Run._fields))
        return (stepped if run.part == "steps" else trained)(clock, run, args, seconds)

    return in_turn(clock, runs, args.minutes, measure)


# -------------------------------------------------------------------------------------------------------- command line
def row_of(record):
    row = {name: record[name] for name in ("task", "seqlen", "attention", "failed")}
    if record["failed"]:
        return row
    row |= {"batch": record["batch"], "ms a step": 1e3 * record["seconds"]}
    if record["part"] == "steps":
        return row | {"MB": record["bytes"] / 1e6}
    seconds, steps, accuracy = record["curve"][-1]
    return row | {"steps": steps, "s": seconds, "accuracy": accuracy, "guess": record["guess"]}


def show_records(records):
    for part in dict.fromkeys(record["part"] for record in records):
        show(part, [row_of(record) for record in records if record["part"] == part], ".3f")


def parse(arguments, on_gpu):
    parser = parser_of(__doc__, on_gpu)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
    parser.add_argument("--sides", nargs="+", type=int, metavar="N", help="of the steps' images")
    parser.add_argument("--side", type=int, metavar="N", help="of the task's images")
    parser.add_argument("--length", type=int, metavar="N", help="of ListOps' expressions")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="N", help="of the documents")
    parser.add_argument("--held-out", type=int, metavar="N", help="samples")
    parser.set_defaults(lr=5e-4, **(LARGE if on_gpu else SMALL))
    return parser.parse_args(arguments)


def main(arguments=None):
    measure_and_show(parse, records_of, show_records, arguments)

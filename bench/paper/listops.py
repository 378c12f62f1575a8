"""The paper's Table 3: ListOps of the Long Range Arena, learnt with numbattn and with the standard formula.

    python bench/paper listops --json listops.json
    python bench/paper listops --small
    python bench/paper listops --numbattn 2200 --standard 0 --checkpoints FOLDER

Both learn from the same expressions, none of which is seen twice; others are held out. With --checkpoints, a training
that was stopped continues bit for bit.
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import machine, save, show_machine
from peers import PACKAGES, cupy, gpu

from paper import encoder
from paper.attentions import ATTENTIONS
from paper.encoder import Encoder, Size
from paper.expressions import SYMBOLS, VALUES, sample

TRAINED, HELD_OUT = 0, 1  # seeds
DECAY, BETAS, CLIP = 0.01, (0.9, 0.98), 1.0  # of Adam, CLIP is the largest norm of gradients
LOSS_SCALE = 4096  # keeps gradients within float16's range


class Recipe(NamedTuple):
    size: Size
    shortest: int   # lengths of expressions
    longest: int
    tokens: int     # of a batch
    steps: int
    warm_up: int    # steps
    lr: float
    every: int      # steps between reports
    held_out: int   # batches

    def batches(self, seed, numbers, pool):
        """Made ahead, by threads."""
        lengths = self.shortest, self.longest
        return pool.map(lambda number: sample(np.random.default_rng((seed, number)), self.tokens, *lengths), numbers)


LARGE = Recipe(Size(2, 4, 32, 256), 500, 2000, tokens=32768, steps=3200, warm_up=200, lr=1e-3, every=100, held_out=340)
SMALL = Recipe(Size(2, 2, 8, 24), 2, 12, tokens=400, steps=40, warm_up=10, lr=1e-2, every=20, held_out=2)


class Learner:
    """An encoder, its weights, Adam's moments of their gradients, and the steps made."""

    def __init__(self, xp, recipe, attention):
        self.xp, self.recipe = xp, recipe
        self.attention = partial(ATTENTIONS[attention], xp, longest=recipe.longest)
        self.shapes = recipe.size.shapes(SYMBOLS, VALUES)
        weights = xp.asarray(encoder.init_weights(recipe.size, self.shapes))
        self.state = xp.stack([weights, *xp.zeros((2, len(weights)), np.float32)])
        self.steps = 0
        features = xp.asarray(encoder.sinusoids(recipe.longest, recipe.size.width))
        self.encoder = Encoder(recipe.size, features, np.float32 if xp is np else np.float16)

    def logits(self, batch):
        """Of a batch, with what their gradients need, and the values."""
        xp, (tokens, offsets, values) = self.xp, batch
        position = np.zeros(len(tokens), np.int32)
        position[: offsets[-1]] = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        arrays = xp.asarray(tokens.astype(np.int32)), xp.asarray(offsets), xp.asarray(position)
        weights = encoder.views(self.state[0], self.shapes)
        return *self.encoder(*arrays, self.attention(offsets), weights), xp.asarray(values)

    def step(self, batch):
        """Learn from a batch. Returns the loss and the share of right answers, on the device."""
        xp, recipe = self.xp, self.recipe
        weights, mean, square = self.state
        logits, backprop, values = self.logits(batch)
        loss, dlogits = encoder.cross_entropy(logits, values)
        g = xp.empty_like(weights)
        backprop(LOSS_SCALE * dlogits, encoder.views(g, self.shapes))
        g *= xp.minimum(1 / LOSS_SCALE, CLIP / xp.linalg.norm(g))
        self.steps += 1
        for moment, beta, x in zip((mean, square), BETAS, (g, g * g)):
            moment *= beta
            moment += (1 - beta) * x
        unbias, root = (1 - beta**self.steps for beta in BETAS)
        lr = recipe.lr * min(self.steps / recipe.warm_up, 1.02 - self.steps / recipe.steps)
        weights *= 1 - lr * DECAY
        weights -= lr * (mean / unbias / (np.sqrt(square / root) + 1e-8))
        return xp.stack([loss, (logits.argmax(axis=1) == values).mean().astype(loss.dtype)])

    def held_out(self, pool):
        """The share of right answers for expressions that are not learnt from, and how many these are."""
        right = count = 0
        for batch in self.recipe.batches(HELD_OUT, range(self.recipe.held_out), pool):
            logits, _, values = self.logits(batch)
            right, count = right + (logits.argmax(axis=1) == values).sum(), count + len(values)
        return round(float(right) / count, 4), count

    def save(self, path, curve):
        """At once: who is stopped leaves the last checkpoint whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"new-{path.name}")
        state = self.state if self.xp is np else self.state.get()
        np.savez(new, steps=self.steps, state=state, curve=json.dumps(curve))
        new.replace(path)

    def load(self, path):
        """Returns the curve."""
        with np.load(path) as saved:
            self.steps, self.state[:] = int(saved["steps"]), self.xp.asarray(saved["state"])
            return json.loads(str(saved["curve"]))


def train(learner, steps, pool, path=None):
    """Learn until so many steps are made, from the checkpoint if there is one. Returns the curve: of every so many
    steps their seconds, and means of the loss and of the share of right answers, before they were learnt from."""
    curve = learner.load(path) if path and path.exists() else []
    batches = learner.recipe.batches(TRAINED, range(learner.steps, steps), pool)
    while learner.steps < steps:
        start = time.monotonic()
        found = [learner.step(batch) for batch in islice(batches, learner.recipe.every)]
        loss, right = map(float, sum(found) / len(found))  # waits for the GPU
        curve.append({"steps": learner.steps, "seconds": round(time.monotonic() - start, 3), "loss": round(loss, 4),
                      "right": round(right, 4)})  # fmt: skip
        print(curve[-1], flush=True)
        if path:
            learner.save(path, curve)
    return curve


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ATTENTIONS:
        parser.add_argument(f"--{name}", type=int, metavar="STEPS", default=LARGE.steps,
                            help="stop the training with it there; 0: without it (default: the last step)")
    parser.add_argument("--small", action="store_true", help="short expressions, for a CPU")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="of trainings, to be continued there")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    return parser.parse_args(arguments)


def main(arguments=None):
    args, described = parse(arguments), machine(*PACKAGES)
    os.environ.setdefault("CUPY_TF32", "1")  # float32 products by tensor cores
    xp = cupy if cupy is not None and cupy.is_available() else np
    described |= {"gpu": gpu()} if xp is cupy else {}
    show_machine(described)
    recipe, records = SMALL if args.small else LARGE, []
    with ThreadPoolExecutor() as pool:
        for name in filter(vars(args).get, ATTENTIONS):
            learner = Learner(xp, recipe, name)
            path = Path(args.checkpoints) / f"{name}.npz" if args.checkpoints else None
            curve = train(learner, min(vars(args)[name], recipe.steps), pool, path)
            seconds = float(np.median([x["seconds"] for x in curve]) / recipe.every)
            records.append({"attention": name, "steps": learner.steps, "seconds": seconds,
                            "held_out": learner.held_out(pool), "curve": curve})  # fmt: skip
            print({key: x for key, x in records[-1].items() if key != "curve"}, flush=True)
    if args.json:
        recipe = recipe._asdict() | {"size": recipe.size._asdict()}
        save(args.json, {"machine": described, "arguments": vars(args), "recipe": recipe, "records": records})

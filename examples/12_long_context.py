"""Train the transformer of example 02 on sequences that are split over ranks, each of which holds a part of the tokens.

    python examples/12_long_context.py                                              # ranks that take turns, to try it
    python examples/12_long_context.py --devices 2 --seqlen 65536                   # GPUs of this machine
    mpiexec -n 2 python examples/12_long_context.py --mpi                           # processes, also on many machines

Everything in the model but attention looks at one token at a time: each rank does that for its tokens, with a copy of
the weights, whose gradients are summed. For attention the ranks meet. The code of a rank is a generator that yields
what it wants to call, and goes on with the answer when all ranks have come to that call. The loss and its gradients are
those of a single device, which is asserted before and after the training.
"""

import argparse
import math
import time
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from numbattn import distributed as nad

model = import_module("02_transformer")  # `import` takes no name that starts with a digit
LAYERS, HEADS, WIDTH = 2, 4, 64


# -------------------------------------------------------------------------------------------------------------- ranks
class Ranks(NamedTuple):
    """A ring, and the ranks in this process: all of them, or one."""

    ring: nad.Ring
    places: list[Any]  # a context for each rank of this process, in which it computes
    communicator: Any = None  # MPI's, if each rank is a process

    def split(self, x):
        """The parts of x that this process's ranks have."""
        parts = self.ring.split(x, axis=0)
        return parts if self.communicator is None else [parts]

    def call(self, function, arguments):
        """Call a function of numbattn.distributed: what each rank gets for its arguments."""
        if self.communicator is None:
            return list(zip(*function(self.ring, *map(list, zip(*arguments)))))
        return [function(self.ring, *arguments[0])]

    def run(self, generators):
        """Run the ranks' generators, which all call the same functions in the same order; returns what they return."""
        answers, results = [None] * len(generators), []
        while not results:
            wanted = []
            for place, generator, answer in zip(self.places, generators, answers):
                with place:
                    try:
                        wanted.append(generator.send(answer))
                    except StopIteration as end:
                        results.append(end.value)
            if wanted:
                functions, arguments = zip(*wanted)
                answers = self.call(functions[0], arguments)
        return results

    def copies(self, weights):
        """A copy of the weights for each rank of this process, where it computes."""
        found = []
        for place in self.places:
            with place:
                found.append({name: model.xp.asarray(weight) for name, weight in weights.items()})
        return found

    def sum(self, values):
        """The sum over all ranks, of this process's values and of all others."""
        total = sum(map(model.xp.asarray, values))
        return total if self.communicator is None else self.communicator.allreduce(total)


def make_ranks(args):
    if args.mpi:
        from mpi4py import MPI

        return Ranks(nad.Mpi(MPI.COMM_WORLD), [nullcontext()], MPI.COMM_WORLD)
    if args.devices:
        import cupy

        model.xp = cupy
        return Ranks(nad.Devices(range(args.devices)), [cupy.cuda.Device(number) for number in range(args.devices)])
    return Ranks(nad.Simulated(args.ranks), [nullcontext()] * args.ranks)


# -------------------------------------------------------------------------------------------------------------- model
def attention(x, w_qkv, w_out, rotation):
    """As in example 02, but the attention of all ranks is yielded, here and in backprop."""
    x, norm_back = model.rmsnorm(x)
    qkv, qkv_back = model.linear(x, w_qkv)
    qkv = qkv.reshape(1, len(x), 3, HEADS, -1)
    model.rotate(qkv, rotation)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    o, saved = yield partial(nad.attention_forward, causal=True), (q, k, v)
    y, out_back = model.linear(o.swapaxes(1, 2).reshape(x.shape), w_out)

    def backprop(dy):
        do, dw_out = out_back(dy)
        do = do.reshape(1, len(x), HEADS, -1).swapaxes(1, 2)
        grads = yield nad.attention_backward, (do, saved)
        dqkv = model.xp.stack([d.swapaxes(1, 2) for d in grads], axis=2)
        model.rotate(dqkv, rotation.conj())
        dx, dw_qkv = qkv_back(dqkv.reshape(len(x), -1))
        return norm_back(dx), dw_qkv, dw_out

    return y, backprop


def rank_step(weights, tokens, targets, rotation, seqlen):
    """What a rank adds to the mean loss of all tokens, and to its gradients."""
    layers, backs = range(len(weights["qkv"])), []
    x, embed_back = model.embed(tokens, weights["embed"])
    for i in layers:
        y, attention_back = yield from attention(x, weights["qkv"][i], weights["out"][i], rotation)
        x = x + y
        y, mlp_back = model.mlp(x, weights["up"][i], weights["down"][i])
        x = x + y
        backs.append((attention_back, mlp_back))
    x, norm_back = model.rmsnorm(x)
    logits, head_back = model.linear(x, weights["head"])
    loss, loss_back = model.cross_entropy(logits, targets)
    share = len(targets) / seqlen

    grads = {name: model.xp.empty_like(weight) for name, weight in weights.items()}
    dx, grads["head"] = head_back(share * loss_back())
    dx = norm_back(dx)
    for i in reversed(layers):
        attention_back, mlp_back = backs[i]
        dy, grads["up"][i], grads["down"][i] = mlp_back(dx)
        dx += dy
        dy, grads["qkv"][i], grads["out"][i] = yield from attention_back(dx)
        dx += dy
    grads["embed"] = embed_back(dx)
    return share * loss, grads


def split_step(ranks, weights, inputs, targets):
    """The loss and its gradients for a sequence that is split over the ranks."""
    rotations = model.rotations(len(inputs), WIDTH // HEADS, weights["embed"].dtype)  # by position: split like tokens
    parts = ranks.copies(weights), *map(ranks.split, (inputs, targets, rotations))
    losses, grads = zip(*ranks.run([rank_step(*own, len(inputs)) for own in zip(*parts)]))
    return ranks.sum(losses), {name: ranks.sum(of_rank[name] for of_rank in grads) for name in weights}


def whole_step(weights, inputs, targets):
    """The same on a single device, by example 02."""
    logits, transformer_back = model.transformer(inputs[None], weights, HEADS)
    loss, loss_back = model.cross_entropy(logits, targets)
    return loss, transformer_back(loss_back())


def assert_as_on_one_device(weights, inputs, targets, loss, grads):
    expected, expected_grads = whole_step(weights, inputs, targets)
    assert abs(loss - expected) < 1e-5 * expected, (loss, expected)
    for name, grad in grads.items():
        distance, size = (float(model.xp.linalg.norm(x)) for x in (grad - expected_grads[name], expected_grads[name]))
        assert distance <= 1e-4 * size, (name, distance, size)


# ------------------------------------------------------------------------------------------------------------ training
def parse_args():
    parser = argparse.ArgumentParser(
        description="Train a small transformer on sequences that are split over ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, default=4, help="simulated ranks, which take turns on the CPU")
    where.add_argument("--devices", type=int, metavar="N", help="GPUs of this machine in place of them")
    where.add_argument("--mpi", action="store_true", help="processes in place of them, under mpiexec")
    parser.add_argument("--seqlen", type=int, default=2000, help="bytes in a sequence, of which a step has one")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sequences")
    parser.add_argument("--no-check", action="store_true", help="for sequences that one device does not hold")
    return parser.parse_args()


def main():
    args = parse_args()
    ranks = make_ranks(args)
    say = print if getattr(ranks.ring, "rank", 0) == 0 else lambda *_: None
    rng = np.random.default_rng(args.seed)
    text, _ = model.read_text()
    if args.seqlen >= len(text):
        raise SystemExit(f"--seqlen: got {args.seqlen}, there are {len(text)} bytes of text")
    weights = model.init_weights(rng, WIDTH, LAYERS)
    adam = model.Adam(weights)
    start, every = time.perf_counter(), max(1, args.steps // 10)
    for step in range(args.steps):
        inputs, targets = model.windows(text, rng.integers(len(text) - args.seqlen, size=1), args.seqlen)
        loss, grads = split_step(ranks, weights, inputs[0], targets)
        if step in (0, args.steps - 1) and not args.no_check:
            assert_as_on_one_device(weights, inputs[0], targets, loss, grads)
        adam.step(weights, grads, args.lr * model.schedule((step + 0.5) / args.steps))
        if step % every == 0 or step == args.steps - 1:
            say(f"step {step + 1}: {float(loss) / math.log(2):.3f} bits per byte")
    speed = args.steps * args.seqlen / (time.perf_counter() - start)
    here = " and ".join(f"{len(part)}" for part in ranks.split(inputs[0]))
    say(f"{ranks.ring.ranks} ranks, here {here} of {args.seqlen} tokens; {speed:,.0f} tokens/s")
    if not args.no_check:
        say("the loss and its gradients are those of one device, in the first step and in the last")


if __name__ == "__main__":
    main()

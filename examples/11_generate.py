"""Write text with the transformer of example 02 in three ways, and compare their speed: the text is the same.

    python examples/11_generate.py
    python examples/11_generate.py --xp cupy

recomputed: for each new byte the model reads everything before it. cached: a KVCache for each layer keeps keys and
values, and the model reads only the newest byte. speculative: a table of which byte follows which few, counted in the
training text, drafts a tree of continuations, and the model verifies all of it in one call; the longest path on which
every byte is the model's own choice is accepted. Decoding is greedy, and exact up to rounding: the texts could differ
only where two bytes are equally likely up to the last digits of float32. Greedy texts soon repeat themselves.
"""

import argparse
import heapq
import time
from collections import Counter, defaultdict
from importlib import import_module

import numpy as np
from tqdm import tqdm

import numbattn as na

model = import_module("02_transformer")  # `import` takes no name that starts with a digit
LAYERS, HEADS, WIDTH, BATCH, SEQLEN = 2, 2, 64, 8, 256
CONTEXT = 4  # number of bytes from which the draft guesses the next one
PROMPT = b"The "


def train(text, steps, rng):
    weights = model.init_weights(rng, WIDTH, LAYERS)
    adam = model.Adam(weights)
    for step in tqdm(range(steps), unit=" steps"):
        inputs, targets = model.windows(text, rng.integers(len(text) - SEQLEN, size=BATCH), SEQLEN)
        logits, transformer_back = model.transformer(inputs, weights, HEADS)
        _, loss_back = model.cross_entropy(logits, targets)
        adam.step(weights, transformer_back(loss_back()), 2e-2 * model.schedule((step + 0.5) / steps))
    return weights


class Reader:
    """The transformer with a cache for each layer."""

    def __init__(self, weights, capacity):
        head_dim = WIDTH // HEADS
        self.weights = weights
        self.caches = [na.KVCache.zeros(1, HEADS, capacity, head_dim, like=weights["embed"]) for _ in range(LAYERS)]
        self.rotations = model.rotations(capacity, head_dim, weights["embed"].dtype)

    def read(self, tokens, positions, mask):
        """Append tokens to the caches; returns the likeliest byte after each of them."""
        weights, rotations = self.weights, self.rotations[model.xp.asarray(positions)]
        x = weights["embed"][model.xp.asarray(tokens)]
        for i, cache in enumerate(self.caches):
            y, _ = model.rmsnorm(x)
            qkv = (y @ weights["qkv"][i]).reshape(1, len(tokens), 3, HEADS, WIDTH // HEADS)
            model.rotate(qkv, rotations)
            q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # each (1, HEADS, tokens, head_dim)
            cache.append(k, v)
            o = na.attention(q, cache, mask=mask)
            x += o.swapaxes(1, 2).reshape(x.shape) @ weights["out"][i]
            y, _ = model.mlp(x, weights["up"][i], weights["down"][i])
            x += y
        x, _ = model.rmsnorm(x)
        return (x @ weights["head"]).argmax(axis=-1).tolist()


def count_followers(text):
    """How often each byte follows any CONTEXT bytes."""
    followers = defaultdict(Counter)
    for i in range(CONTEXT, len(text)):
        followers[text[i - CONTEXT : i]][text[i]] += 1
    return followers


def draft(followers, text, nodes):
    """A tree of at most `nodes` tokens, the likeliest first: tokens and parents. Its root ends the text."""
    tokens, parents = [], []
    candidates = [(-1.0, -1, text[-CONTEXT:])]  # -probability, parent, what has been written then
    while candidates and len(tokens) < nodes:
        p, parent, context = heapq.heappop(candidates)
        node = len(tokens)
        tokens.append(context[-1])
        parents.append(parent)
        counts = followers.get(context, Counter())  # none if the training text has no such bytes
        for byte, count in counts.items():
            child = context[1:] + bytes([byte])
            heapq.heappush(candidates, (p * count / counts.total(), node, child))
    return tokens, parents


def longest_path(tokens, parents, choices):
    """The path from the root on, as long as a child is what the model chooses after its parent."""
    path = [0]
    for node in range(1, len(tokens)):  # parents come before their children
        if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
            path.append(node)
    return path


# The three ways: each returns the text and how many times it called the model.
def recomputed(count, weights):
    text = PROMPT
    for _ in range(count):
        logits, _ = model.transformer(model.xp.asarray(list(text))[None], weights, HEADS)
        text += bytes([int(logits[-1].argmax())])
    return text, count


def cached(count, weights):
    text, new = PROMPT, PROMPT
    reader = Reader(weights, SEQLEN)
    for _ in range(count):
        *_, choice = reader.read(list(new), range(len(text) - len(new), len(text)), na.Causal())
        new = bytes([choice])
        text += new
    return text, count


def speculative(count, weights, followers, nodes):
    text, calls = PROMPT, 1
    reader = Reader(weights, SEQLEN + nodes)
    *_, choice = reader.read(list(text), range(len(text)), na.Causal())
    text += bytes([choice])  # not in the caches yet: the newest byte is the root of the next tree
    while len(text) < len(PROMPT) + count:
        tokens, parents = draft(followers, text, nodes)
        tree = na.Tail(na.Bits.tree(parents))
        choices = reader.read(tokens, len(text) - 1 + tree.positions, tree)
        path = longest_path(tokens, parents, choices)
        for cache in reader.caches:
            cache.keep([path], len(tokens))
        text += bytes(choices[node] for node in path)  # the bytes of the path after its root, and one more
        calls += 1
    return text[: len(PROMPT) + count], calls


def measured(way, count, *given):
    """Print how fast a text is written; returns the text."""
    way(2, *given)  # a GPU's kernels are compiled when first used
    start = time.perf_counter()
    text, calls = way(count, *given)
    speed = count / (time.perf_counter() - start)
    print(f"{way.__name__:<12} {speed:8,.0f} tokens/s  {count / calls:5.2f} tokens per call of the model")
    return text


if __name__ == "__main__":
    longest = SEQLEN - len(PROMPT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps, %(default)s unless given")
    parser.add_argument("--count", type=int, default=longest, choices=range(1, longest + 1), metavar="COUNT",
                        help="bytes to write, %(default)s unless given: beyond the model has learned no positions")
    parser.add_argument("--nodes", type=int, default=16, help="tokens of a tree at most, %(default)s unless given")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="where to compute: CPU or GPU")
    args = parser.parse_args()
    model.xp = import_module(args.xp)
    training_text, _ = model.read_text()
    weights = train(training_text, args.steps, np.random.default_rng(args.seed))
    followers = count_followers(bytes(training_text.tolist()))
    text = measured(recomputed, args.count, weights)
    assert measured(cached, args.count, weights) == text
    assert measured(speculative, args.count, weights, followers, args.nodes) == text
    print("The text is the same in all three ways:", text.decode("ascii", "backslashreplace"), sep="\n")

"""Attention as a thinc layer over sequences of different lengths, in a model that learns to find the largest digit.

    python examples/06_thinc.py
"""

import numpy as np
from thinc.api import Adam, Embed, Linear, Softmax, chain, fix_random_seed, with_array

import numbattn as na
from numbattn.interop.thinc import attention


def draw(rng, batch):
    """Sequences of 1 to 40 digits, and what to say at each digit: the largest digit of its sequence."""
    digits = [rng.integers(10, size=seqlen) for seqlen in rng.integers(1, 41, size=batch)]
    return digits, [np.full(len(x), x.max()) for x in digits]


if __name__ == "__main__":
    fix_random_seed(0)  # for the weights
    rng = np.random.default_rng(0)
    embed, project, classify = (with_array(layer) for layer in (Embed(32, 10), Linear(96, 32), Softmax(10, 32)))
    distances = na.RelativeBias(np.zeros((4, 2 * 40 - 1), np.float32))  # a number by head and distance, learned, too
    model = chain(embed, project, attention(heads=4, score=distances), classify)
    model.initialize()
    adam = Adam(0.01)
    for step in range(201):
        digits, largest = draw(rng, 32)
        probabilities, backprop = model.begin_update(digits)
        if step % 100 == 0:
            right = np.concatenate(probabilities).argmax(axis=1) == np.concatenate(largest)
            print(f"step {step}: {right.mean():.0%} right")
        # thinc's Softmax takes the gradient of the cross-entropy with respect to the logits
        backprop([(p - np.eye(10, dtype="f")[y]) / 32 for p, y in zip(probabilities, largest)])
        model.finish_update(adam)

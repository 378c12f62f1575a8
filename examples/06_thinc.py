"""Attention as a thinc layer over sequences of different lengths, in a model that learns to find the largest digit.

    python examples/06_thinc.py
"""

import numpy as np
from thinc.api import Adam, Embed, Linear, Model, Softmax, chain, fix_random_seed, with_array

import numbattn as na


def Attention(heads):
    """From a list of (seqlen, 3 * width), queries, keys and values side by side, to a list of (seqlen, width)."""
    return Model("attention", forward, attrs={"heads": heads})


def forward(model, sequences, is_train):
    lengths = [len(qkv) for qkv in sequences]
    visible = na.Lengths(keys=np.array(lengths)[:, None])  # by sequence; the heads' axis has size 1
    padded = model.ops.pad(sequences)
    qkv = padded.reshape(*padded.shape[:2], 3, model.attrs["heads"], -1).transpose(2, 0, 3, 1, 4)
    o, attention_back = na.attention_vjp(*qkv, mask=visible)  # (batch, heads, seqlen, head_dim), like q, k and v

    def backprop(dys):
        do = model.ops.pad(dys).reshape(o.swapaxes(1, 2).shape).swapaxes(1, 2)
        dqkv = model.ops.xp.stack(attention_back(do))
        return model.ops.unpad(dqkv.transpose(1, 3, 0, 2, 4).reshape(padded.shape), lengths)

    y = o.swapaxes(1, 2).reshape(*padded.shape[:2], -1)
    return model.ops.unpad(y, lengths), backprop


def draw(rng, batch):
    """Sequences of 1 to 40 digits, and what to say at each digit: the largest digit of its sequence."""
    digits = [rng.integers(10, size=seqlen) for seqlen in rng.integers(1, 41, size=batch)]
    return digits, [np.full(len(x), x.max()) for x in digits]


if __name__ == "__main__":
    fix_random_seed(0)  # for the weights
    rng = np.random.default_rng(0)
    embed, project, classify = (with_array(layer) for layer in (Embed(32, 10), Linear(96, 32), Softmax(10, 32)))
    model = chain(embed, project, Attention(heads=4), classify)
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

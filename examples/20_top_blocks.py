"""Attend to the blocks of keys that matter, as MoBA, NSA and VSA do: chosen by pooled scores, and to means of others.

    python examples/20_top_blocks.py
    python examples/20_top_blocks.py --xp cupy --seqlen 40960 --heads 16 --dim 128

Coarse: queries and keys are averaged over blocks of 64 tokens, and the products of these means say which blocks matter
to which. Each block of queries keeps the most promising ones, those next to it (local) and the first (global). Fine:
exact attention within the chosen blocks, and, merged with it by lse, attention to the means of all others. The sequence
changes its subject from block to block; a subject comes back every now and then, anywhere.
"""

import argparse
import math
import time
from importlib import import_module

import numpy as np

import numbattn as na

BLOCK = 64  # tokens


def pooled(x):
    """The mean of each block of tokens."""
    *lead, seqlen, dim = x.shape
    return x.reshape(*lead, seqlen // BLOCK, BLOCK, dim).mean(axis=-2, dtype=np.float32)


def promising(q, k, count):
    """The blocks of keys that each block of queries attends to, `count` of them."""
    scores = pooled(q) @ pooled(k).swapaxes(-2, -1)
    block = xp.arange(scores.shape[-1])
    scores[..., abs(block[:, None] - block) <= 1] = scores[..., 0] = np.inf  # local, global
    return xp.argsort(scores, axis=-1)[..., -count:]


def fine(q, k, v, blocks):
    """Attention within these blocks of keys, and its mask."""
    mask = na.BlockSparse.from_indices(blocks, shape=(q.shape[-2], k.shape[-2]), block_size=(BLOCK, BLOCK))
    return na.attention_forward(q, k, v, mask=mask), mask


def coarse_to_fine(q, k, v, count):
    """Attention to `count` blocks and the means of all others; and its gradients as a closure: the choice has none."""
    exact, mask = fine(q, k, v, promising(q, k, count))
    means = [pooled(x).astype(x.dtype) for x in (k, v)]
    others = na.BlockSparse(~mask.blocks, block_size=(BLOCK, 1))  # each block is seen once, as it is or as its mean
    rough = na.attention_forward(q, *means, mask=others)
    lse_rough = rough[1].lse + math.log(BLOCK)  # a mean stands for so many keys
    (o, _), merge_back = na.merge_vjp([(exact[0], exact[1].lse), (rough[0], lse_rough)])

    def backprop(do):
        (do, dlse), (do_rough, dlse_rough) = merge_back(do)
        dq, dk, dv = na.attention_backward(do, exact[1], dlse=dlse)
        dq_rough, *dmeans = na.attention_backward(do_rough, rough[1], dlse=dlse_rough)
        dk_rough, dv_rough = (x.repeat(BLOCK, axis=-2) / BLOCK for x in dmeans)
        return dq + dq_rough, dk + dk_rough, dv + dv_rough

    return o, backprop


def sequence(rng, heads, seqlen, dim):
    """q, k, v of tokens on the same subject within a block: one of so many that each comes back a few times."""
    blocks = seqlen // BLOCK
    subjects = rng.standard_normal((3, heads, blocks // 4, dim)) * math.sqrt(6 / math.sqrt(dim))
    subjects[1] = subjects[0]  # queries look for keys of their own subject
    of_block = subjects[:, :, rng.integers(blocks // 4, size=blocks)].repeat(BLOCK, axis=2)
    noisy = of_block + rng.standard_normal((3, heads, seqlen, dim))
    return [xp.asarray(x, np.float32 if xp is np else np.float16) for x in noisy]


def error(o, wanted):
    o, wanted = o.astype(np.float32), wanted.astype(np.float32)
    return float(xp.linalg.norm(o - wanted) / xp.linalg.norm(wanted))


def seconds(function):
    """What it takes once it is compiled."""
    for _ in range(2):
        start = time.perf_counter()
        function()
        if xp is not np:
            xp.cuda.Device().synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens, a multiple of 64; %(default)s unless given")
    parser.add_argument("--heads", type=int, default=4, help="%(default)s unless given")
    parser.add_argument("--dim", type=int, default=64, help="of a head, %(default)s unless given")
    parser.add_argument("--keep", type=float, default=0.15, help="share of blocks, %(default)s unless given")
    parser.add_argument("--xp", choices=["numpy", "cupy"], default="numpy", help="%(default)s unless given")
    args = parser.parse_args()
    xp, rng = import_module(args.xp), np.random.default_rng(0)

    q, k, v = sequence(rng, args.heads, args.seqlen, args.dim)
    blocks = args.seqlen // BLOCK
    count = max(round(args.keep * blocks), 1)
    o, saved = na.attention_forward(q, k, v)
    at_random = xp.asarray(rng.random((args.heads, blocks, blocks)).argsort(axis=-1)[..., :count])
    print(f"{args.seqlen:,} tokens, {count} of {blocks} blocks; relative error of o")
    for name, found in (("blocks at random", fine(q, k, v, at_random)[0][0]),
                        ("promising blocks", fine(q, k, v, promising(q, k, count))[0][0]),
                        ("and the means of others", coarse_to_fine(q, k, v, count)[0])):  # fmt: skip
        print(f"{name:24}{error(found, o):.3f}")

    full = seconds(lambda: na.attention_backward(o, na.attention_forward(q, k, v)[1]))
    sparse = seconds(lambda: coarse_to_fine(q, k, v, count)[1](o))
    print(f"forward and backward: {1e3 * full:.1f} ms, coarse to fine {1e3 * sparse:.1f} ms")

"""Masks for calls of several tiles each way, with tails."""

import numpy as np

import numbattn as na

from ..accuracy import random

B, H, M, N = 2, 4, 150, 270


def sorted_integers(rng, largest, *shape):
    return np.sort(rng.integers(0, largest + 1, shape))


SEGMENTS = {
    "segments": lambda rng: na.Segments([5, 5, 140, 141, 141, 148], [0, 17, 210, 211, 230, 260]),
    "segments by batch": lambda rng: na.Segments(sorted_integers(rng, M, B, 1, 8), sorted_integers(rng, N, B, 1, 8)),
    "segments by head": lambda rng: na.Segments(sorted_integers(rng, M, 1, H, 8), sorted_integers(rng, N, B, H, 8)),
}
MASKS = SEGMENTS | {
    "prefix": lambda rng: na.Prefix(90),
    "prefix offsets": lambda rng: na.Prefix(rng.integers(0, N, (B, 1)), rng.integers(-M, N, (1, H))),
    "intervals": lambda rng: na.Intervals(rng.integers(-9, N, (B, H, M)), rng.integers(-9, N + 9, (1, H, M))),
    "monotone intervals": lambda rng: na.Intervals(*sorted_integers(rng, N, 2, 1, 1, M)),
}
OTHER_MASKS = {
    "causal": lambda rng: na.Causal(),
    "causal offset": lambda rng: na.Causal(100),
    "window": lambda rng: na.Window(40, 30),
    "lengths": lambda rng: na.Lengths(rng.integers(0, N + 1, (B, 1)), rng.integers(0, M + 1, (B, H))),
    "dense": lambda rng: na.Dense(rng.random((B, 1, M, N)) < 0.3),
    "bits": lambda rng: na.Bits.pack(rng.random((1, H, M, N)) < 0.5),
    "blocks": lambda rng: na.BlockSparse(rng.random((B, H, 3, 6)) < 0.4, block_size=(64, 48)),
}
UNIONS = {
    "stream": lambda rng: na.Causal() & (na.Window(9, 0) | na.Lengths(keys=4)),
    "by batch": lambda rng: na.Lengths(rng.integers(0, N, (B, 1)), rng.integers(0, M, (1, H))) | na.Window(9, None, 0),
    "segments": lambda rng: na.Segments([0, 30, M], [0, N - 110, N]) & (na.Window(5, 0) | na.Prefix(2)),
    "sinks": lambda rng: SEGMENTS["segments by batch"](rng) & na.Causal() & (
        na.Window(9, 0) | na.First(rng.integers(0, 60, (B, 1)))
    ),
    "two gaps": lambda rng: (na.Window(9, 0) | na.Lengths(keys=4)) & (na.Window(60, 0) | na.Prefix(10, -100)),
    "intervals": lambda rng: na.Intervals(*rng.integers(-9, N, (2, B, H, M))) | na.Intervals([3], [7]) | na.Lengths(0),
    "dense": lambda rng: na.Causal() & (na.Window(9, 0) | (rng.random((H, 1, N)) < 0.1)),
}


def by_place(s, batch, head, i, j):
    return s * s / (1 + i + j)


def slope_by_place(s, batch, head, i, j):
    return 2 * s / (1 + i + j)


SCORES = {  # whose arrays have the dtype of q: see cuda/test_scores.py
    "bias": lambda rng, dtype: na.Bias(random(rng, (M, N), dtype)),
    "biases": lambda rng, dtype: na.Bias(random(rng, (B, 1, M, N), dtype)),
    "nonlinear": lambda rng, dtype: [na.Softcap(2.0), na.Bias(random(rng, (H, 1, N), dtype)),
                                     na.Score(by_place, slope_by_place)],
    "sums": lambda rng, dtype: [na.Alibi(random(rng, H, dtype) / 50), na.RelativeBias(random(rng, (H, 41), dtype)),
                                na.Sink(random(rng, H, dtype))],
}  # fmt: skip
ONE_KEY = 16  # bits: where many queries see one key, whose dS is 0, delta = rowsum(dO * O) is that far from dP


def qkv(rng, dtype=np.float32, heads_k=H, d=24, e=24):
    return (random(rng, (B, H, M, d), dtype), random(rng, (B, heads_k, N, d), dtype),
            random(rng, (B, heads_k, N, e), dtype))  # fmt: skip

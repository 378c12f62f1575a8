"""Examples that the texts compute by hand, computed by numbattn on a CPU, or by its planner."""

import math

import numpy as np

import numbattn as na
from paper import io_model


def attend(q, k, v, **options):
    """numbattn's attention of one head on the CPU, with scores q k^T."""
    width = max(len(v[0]), len(k[0]))
    q, k, v = (np.pad(np.asarray(x, np.float32), [(0, 0), (0, width - len(x[0]))])[None, None] for x in (q, k, v))
    return na.attention(q, k, v, **{"scale": 1.0, **options})[0, 0]


def printed(row, digits=4):
    return f"[{', '.join(f'{x:.{digits}f}' for x in row)}]"


def online_softmax():
    return printed(attend([[1]], [[2], [5], [1], [4]], np.eye(4))[0])


def online_attention():
    return printed(attend([[1, 0]], [[0.5, 0.3], [0.8, -0.2], [0.1, 0.7]], [[1, 0], [0, 1], [0.5, 0.5]])[0, :2])


def tiles():
    q, k, v = [[1, 0.5], [0.8, -0.1]], [[0.3, 0.7], [0.6, 0.2]], [[1, 0], [0, 1]]
    return ", ".join(printed(row[:2], 3) for row in attend(q, k, v, mask=na.Causal(), scale=2**-0.5))


def large_scores():
    """The weight of a score of 85 relative to that of 90."""
    first, second = attend([[1]], [[90], [85]], np.eye(2))[0]
    return f"{second / first:.4f}"


def padding():
    """The largest difference that NaN beyond the keys makes."""
    k, v = np.random.default_rng(0).standard_normal((2, 5, 4), np.float32)
    expected = attend(k[:1], k[:3], v[:3])
    k[3:] = v[3:] = math.nan
    found = attend(k[:1], k, v, mask=na.Lengths(np.array([[3]])))
    return f"a difference of {abs(found - expected).max():.0f} with NaN in the padding"


def tree_of_tokens():
    visible = na.Bits.tree([-1, 0, 1, 1, 2, 2, 3, 3, 4]).dense(9, 9)
    seen = ", ".join(letter for letter, sees in zip("ABCDEFGHI", visible[3]) if sees)
    return f"{visible.sum()} of {visible.size} pairs are visible; D sees {seen}"


def kernels():
    return f"{len(io_model.flash_bytes(io_model.Shape(64, 16, 1024, 64), 'forward'))} kernel, planned for Hopper"


def bits_of_a_mask():
    return f"{na.Bits.tree(np.arange(256) - 1).words.nbytes / 1024:.0f} KB"


def base_two():
    return f"{math.log2(math.e):.6f}"

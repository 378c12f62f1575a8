"""Shapes of attention to measure, and tables of what was measured for them."""

from typing import NamedTuple

import numpy as np
from peers import PEERS, inputs

PASSES = {"forward": 1, "backward": 2.5, "both": 3.5}  # work in forwards: 2 matrix products, and 5
TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-3, "float64": 1e-10}  # relative to the largest element
TOKENS, WIDTH = 16384, 2048  # setting "field", that of published kernels: batch * seqlen, heads * head_dim
SETTINGS = {"single": (1, 16), "paper": (16, 12)}  # batch, heads
GRAPH = "numbattn graph"


class Case(NamedTuple):
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_k: int

    def inputs(self):
        """q, k, v, do"""
        return inputs((self.batch, self.heads, self.seqlen, self.head_dim), self.dtype, self.heads_k)

    def tflop(self, of):
        """TFLOP of a pass, as the field counts: half of the products if it is causal."""
        return 4e-12 * self.batch * self.heads * self.seqlen**2 * self.head_dim * PASSES[of] / (2 if self.causal else 1)


def make_case(dtype, head_dim, causal, seqlen, setting, heads=None, heads_k=None):
    field = max(1, TOKENS // seqlen), max(1, WIDTH // head_dim)
    batch, usual = SETTINGS.get(setting, field)
    heads = heads or usual
    return Case(dtype, head_dim, causal, seqlen, batch, heads, heads_k or heads)


def visible_share(seqlen, window):
    """The share of the scores that is visible in a window to the left."""
    return 1.0 if window is None else float(np.minimum(np.arange(seqlen) + 1, window + 1).sum() / seqlen**2)


def grouped(records, *keys):
    """(values of the keys, records that have these values) for each group, in the order of first records."""
    groups = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups.items()


def ran(records, results):
    """The peers of these records in PEERS' order, including those that never ran."""
    found = {name for record in records for name in (*record[results], *record["failed"])}
    return [name for name in ("numbattn", GRAPH, *PEERS[1:]) if name in found]


def columns_of_case(record):
    return {key: record[key] for key in ("head_dim", "causal", "seqlen", "batch", "heads", "heads_k")}


def words_of_case(record):
    return "{dtype} {pass}, head_dim {head_dim}, causal {causal}, seqlen {seqlen}".format(**record)


def show_notes(records, words=words_of_case):
    """Print why there is a "-" in a table, and which results differ."""
    for record in records:
        show_failed(record, words)
        for name, error in record["errors"].items():
            if not error <= TOLERANCE[record["dtype"]]:  # NaN, too
                print(f"{words(record)}: {name} DIFFERS by {error:.1e} of the largest element")


def show_failed(record, words=words_of_case):
    for name, reason in record["failed"].items():
        print(f"{words(record)}: {name} did not run: {reason}")


def scaled(x, factor):
    return None if x is None else factor * x

"""Does every kind of kernel compile? Calls of all kinds are planned and what they launch is typed and lowered to PTX,
without ptxas and without a GPU.

    python -m tests.tools.kinds                     # of all options each pair of values
    python -m tests.tools.kinds --strength 3 -j 8   # each three of them
    python -m tests.tools.kinds --first 1200        # goes on with kernel 1200: their order is always the same

All values of all options together are some hundred million calls; faults come of two or three that meet.
"""

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import ml_dtypes
import numpy as np
from tqdm import tqdm

import numbattn as na
from numbattn.cuda.build import compile_ptx
from numbattn.cuda.plan.planner import DEVICES
from tests.problems import bent, distance, looked_up, squared

from .device import on

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float16", "bfloat16", "float32", "float64")}
LEADS = {  # axes of q, of k and v
    "no": ((), ()), "one": ((4,), (4,)), "groups": ((4,), (2,)), "batches": ((2, 4), (2, 2)), "shared": ((2, 4), ()),
}  # fmt: skip
OFFSETS = np.array([0, 0, 1])  # of segments, of queries and keys


def zeros(*shape):
    return np.zeros(shape, np.int32)


def axes(batch, *full):
    """A shape with all axes of the batch, of size 1 but for those at the end."""
    return (1,) * (len(batch) - len(full)) + full


MASKS = {  # of batch, m, n
    "none": lambda b, m, n: None,
    "causal": lambda b, m, n: na.Causal(),
    "offsets": lambda b, m, n: na.Causal(zeros(*axes(b))) if b else na.Causal(3),
    "window of arrays": lambda b, m, n: na.Window(3, 4, zeros(*axes(b))) if b else na.Window(3, 4),
    "keys": lambda b, m, n: na.Lengths(zeros(*axes(b)) + 1) if b else na.Lengths(1),
    "queries": lambda b, m, n: na.Lengths(n, zeros(*axes(b)) + 1) if b else na.Lengths(n, 1),
    "dense": lambda b, m, n: na.Dense(np.ones((m, n), bool)),
    "bits": lambda b, m, n: na.Bits.pack(np.ones((*axes(b), m, n), bool)),
    "blocks": lambda b, m, n: na.BlockSparse(np.ones((*axes(b), -(-m // 64), -(-n // 64)), bool)),
    "segments": lambda b, m, n: na.Segments(OFFSETS * m, OFFSETS * n),
    "causal segments": lambda b, m, n: na.Segments(OFFSETS * m, OFFSETS * n) & na.Causal(),
    "segments of heads": lambda b, m, n: na.Segments(*(OFFSETS * x + zeros(*axes(b), 1) for x in (m, n))),
    "stream of segments": lambda b, m, n: na.Segments(OFFSETS * m, OFFSETS * n) & (na.Window(3, 0) | na.First(1)),
    "prefix": lambda b, m, n: na.Prefix(1),
    "intervals": lambda b, m, n: na.Intervals(zeros(*axes(b), m), zeros(*axes(b), m) + n),
    "two grids": lambda b, m, n: na.Dense(np.ones((m, n), bool)) & na.Bits.pack(np.ones((*axes(b), m, n), bool)),
}
PARTS = {  # of batch, m, n, the dtype of its array, whether its gradient is wanted
    "none": lambda b, m, n, of, wanted: [],
    "softcap": lambda b, m, n, of, wanted: [na.Softcap(3.0)],
    "slopes": lambda b, m, n, of, wanted: [na.Alibi(np.zeros(b[-1:], of), wanted)],
    "slopes of batches": lambda b, m, n, of, wanted: [na.Alibi(np.zeros(b, of), wanted)],
    "one slope": lambda b, m, n, of, wanted: [na.Alibi(np.zeros((), of), wanted)],
    "two slopes": lambda b, m, n, of, wanted: [na.Alibi(np.zeros(b[-1:], of), wanted) for _ in range(2)],
    "bias": lambda b, m, n, of, wanted: [na.Bias(np.zeros((*b, m, n), of), wanted)],
    "bias of heads": lambda b, m, n, of, wanted: [na.Bias(np.zeros((*b[-1:], m, n), of), wanted)],
    "odd bias": lambda b, m, n, of, wanted: [na.Bias(np.zeros((m, n + 1), of)[:, 1:], wanted)],
    "bias of keys": lambda b, m, n, of, wanted: [na.Bias(np.zeros((*axes(b, *b[-1:]), 1, n), of), wanted)],
    "bias of queries": lambda b, m, n, of, wanted: [na.Bias(np.zeros((m, 1), of), wanted)],
    "one bias": lambda b, m, n, of, wanted: [na.Bias(np.zeros((1, 1), of), wanted)],
    "table": lambda b, m, n, of, wanted: [na.RelativeBias(np.zeros((*b[-1:], 9), of), wanted)],
    "table of all": lambda b, m, n, of, wanted: [na.RelativeBias(np.zeros(9, of), wanted)],
    "sink": lambda b, m, n, of, wanted: [na.Sink(np.zeros(b[-1:], of), wanted)],
    "function": lambda b, m, n, of, wanted: [na.Score(bent)],
    "function with derivative": lambda b, m, n, of, wanted: [na.Score(squared, squared)],
    "shift": lambda b, m, n, of, wanted: [na.Score(distance(0.5))],
    "shift by a table": lambda b, m, n, of, wanted: [na.Score(looked_up, arrays=[np.zeros((m, n), np.float32)])],
}
OPTIONS = {
    "device": list(DEVICES),
    "dtype": list(DTYPES),
    "head_dim": [8, 64, 72, 128, 160, 256],
    "head_dim_v": [None, 8, 128],
    "seqlens": [(1, 70), (40, 70), (70, 70), (40, 2500)],
    "batch": list(LEADS),
    "mask": list(MASKS),
    "part": list(PARTS),
    "of": list(DTYPES),
    "wanted": [True, False],
    "before": ["none", "softcap", "function", "sink", "table"],
    "after": ["none", "softcap", "shift", "bias"],
    "dropout": [False, True],
    "deterministic": [False, True],
    "lse": ["", "saved", "dlse"],
    "aligned": [True, False],
}


# ------------------------------------------------------------------------------------------------------------- calls
def covering(options, strength, rng, candidates=20):
    """Rows of values, one of each option, in which all combinations of so many options' values occur; the rows that
    cover most are first."""
    groups = list(itertools.combinations(range(len(options)), strength))
    left = {(group, values) for group in groups for values in itertools.product(*(options[at] for at in group))}
    order = sorted(left, key=repr)
    rng.shuffle(order)
    while left:
        while order[-1] not in left:
            order.pop()
        group, values = order[-1]
        best, covered = None, ()
        for _ in range(candidates):
            row = [choices[rng.integers(len(choices))] for choices in options]
            for at, value in zip(group, values):
                row[at] = value
            found = {(group, tuple([row[at] for at in group])) for group in groups}
            found &= left
            if len(found) > len(covered):
                best, covered = row, found
        left -= covered
        yield best


def call(keys, device, dtype, head_dim, head_dim_v, seqlens, batch, mask, part, of, wanted, before, after, dropout,
         deterministic, lse, aligned):  # fmt: skip
    """Both passes, but for the kernels, whose keys are added to a dict."""
    (m, n), (lead, lead_k), e = seqlens, LEADS[batch], head_dim_v or head_dim
    q, k, v = (np.empty((*x, size + (not aligned)), DTYPES[dtype])[..., -size:]
               for *x, size in ((*lead, m, head_dim), (*lead_k, n, head_dim), (*lead_k, n, e)))
    score = [made for name, gradient in ((before, False), (part, wanted), (after, wanted))
             for made in PARTS[name](lead, m, n, DTYPES[of], gradient)]
    if sum(isinstance(made, na.Sink) for made in score) > 1:
        score = score[1:]
    options = {"mask": MASKS[mask](lead, m, n), "score": score, "dropout": na.Dropout(0.1, 1) if dropout else None}
    with on(DEVICES[device], lambda key, *others: keys.update({key: None})), np.errstate(all="ignore"):
        na.attention(q, k, v, **options) if not lse else None
        o, saved = na.attention_forward(q, k, v, **options)
        na.attention_backward(o, saved, dlse=saved.lse if lse == "dlse" else None, deterministic=deterministic)


def calls(strength, seed=0):
    for row in covering(list(OPTIONS.values()), strength, np.random.default_rng(seed)):
        yield dict(zip(OPTIONS, row))


def planned(rows):
    """The keys of all kernels that these calls launch, each with one of them; and the calls that fail."""
    keys, failed = {}, []
    for row in rows:
        try:
            call(found := {}, **row)
        except Exception as error:
            failed.append((row, error))
        keys |= {key: row for key in found if key not in keys}
    return keys, failed


def compiled(key):
    """What is wrong with a kernel, or None."""
    try:
        compile_ptx(key.source(), key.cc, key.name)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:2000]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strength", type=int, default=2, help="how many options' values meet (default: 2)")
    parser.add_argument("--first", type=int, default=0, help="kernel to begin with (default: 0)")
    parser.add_argument("-j", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args()
    keys, failed = planned(tqdm(list(calls(args.strength)), unit="call", disable=None))
    for row, error in failed:
        print(f"{row}\n  {type(error).__name__}: {error}")
    wrong, some = len(failed), list(keys)[args.first :]
    print(f"{len(keys)} kernels", flush=True)
    with ProcessPoolExecutor(args.j, get_context("fork")) as workers:  # who have the functions of scores, too
        found = {workers.submit(compiled, key): key for key in some}
        for done in tqdm(as_completed(found), total=len(found), unit="kernel", disable=None):
            if done.result():
                wrong += 1
                tqdm.write(f"{found[done]}\n  of {keys[found[done]]}\n  {done.result()}")
    print(f"{wrong} calls and kernels fail")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

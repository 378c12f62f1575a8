"""Masks that skip, and scores: the speed of numbattn's features, as gpu.py measures it with --sparse and --score."""

import math
from functools import partial
from itertools import product

import numpy as np
from cases import Case, columns_of_case, grouped, scaled, show_failed, visible_share
from common import show
from peers import DTYPE, FA4, available, cupy, release
from timing import extra_bytes, measure, medians, prepare, progress

import numbattn as na

LARGEST_BIAS = 1 << 31  # elements
SOFTCAP = "Softcap(50)"
PAIRS = Case("float16", 32, False, 512, 128, 8, 8)  # as in models of proteins: a bias for pairs, rows as a batch


# --------------------------------------------------------------------------------------------------------------- sparse
def sparse(cases, passes, rounds, block_size, dropout):
    """One record for each case and pass: numbattn's time by mask, and the share of the scores that each shows."""
    records = []
    for case, of in progress(product(cases, passes)):
        release()
        masks, arrays = make_masks(case.heads, case.seqlen, block_size), case.inputs()
        makers = {name: partial(prepare, "numbattn", of, arrays, mask=mask, dropout=dropout)
                  for name, (mask, _) in masks.items()}
        samples, _, failed = measure(makers, rounds, same=False)
        records.append({
            **case._asdict(), "pass": of, "block_size": block_size, "dropout": dropout, "seconds": medians(samples),
            "samples": samples, "shares": {name: share for name, (_, share) in masks.items()}, "failed": failed,
        })
    return records


def near(batch, head, i, j):
    """numbattn.Window(1023, 0) again, as a function of the user's."""
    return i - 1023 <= j <= i


def make_masks(heads, seqlen, block_size):
    """Masks by name, each with the share of the scores that is visible."""
    shape, size = (1, 1, seqlen, seqlen), (block_size, block_size)
    blocks = -(-seqlen // block_size)
    order = np.random.default_rng(0).permutation(blocks**2).reshape(1, 1, blocks, blocks)
    found = {f"random {share:.0%}": na.BlockSparse(order < share * blocks**2, size) for share in (0.1, 0.2, 0.5, 1)}
    found["butterfly"] = na.BlockSparse.butterfly(shape, size)
    found["local_global"] = na.BlockSparse.local_global(shape, size)
    on_device = {name: (na.BlockSparse(cupy.asarray(mask.blocks), size), float(mask.blocks.mean()))
                 for name, mask in found.items()}
    share = visible_share(seqlen, 1023)
    windows = {"Window(1023, 0)": (na.Window(1023, 0), share), "Where, as Window": (na.Where(near), share)}
    return {"none": (None, 1.0), **on_device, "chosen 10%": chosen(heads, seqlen), **windows}


def chosen(heads, seqlen):
    """A tenth of all blocks of 64 keys, chosen by each head for each 64 queries, and the share that is visible."""
    blocks = seqlen // 64
    order = np.random.default_rng(0).random((1, heads, blocks, blocks)).argsort(axis=-1)
    indices = cupy.asarray(order[..., : max(1, blocks // 10)].astype(np.int32))
    return na.BlockSparse.from_indices(indices, shape=(seqlen, seqlen)), indices.shape[-1] / blocks


def sparse_rows(record):
    """Rows of the table; TFLOP/s count the visible part."""
    seconds, dense = record["seconds"], record["seconds"].get("none")
    tflop = Case(*(record[field] for field in Case._fields)).tflop(record["pass"])
    rows = []
    for name, share in record["shares"].items():
        took = seconds.get(name)
        rate = took and share * tflop / took
        rows.append({
            "seqlen": record["seqlen"], "mask": name, "visible": share, "ms": scaled(took, 1e3),
            "time / dense": took / dense if took and dense else None, "TFLOP/s": rate,
            "TFLOP/s / dense": rate * dense / tflop if rate and dense else None,
        })
    return rows


def show_sparse(records):
    for (dtype, head_dim, of), chosen in grouped(records, "dtype", "head_dim", "pass"):
        show(f"Masks that skip: {dtype}, {of}, head_dim {head_dim}, blocks of {chosen[0]['block_size']}; "
             "TFLOP/s of the visible part", [row for record in chosen for row in sparse_rows(record)],
             ["", "", ".3f", ".3f", ".3f", ".1f", ".2f"])
        for record in chosen:
            for name, reason in record["failed"].items():
                print(f"mask {name}, seqlen {record['seqlen']}: did not run: {reason}")


# --------------------------------------------------------------------------------------------------------------- scores
def alibi(s, batch, head, i, j, slopes):
    """numbattn.Alibi again, as a function of the user's."""
    return s - slopes[head] * abs(i - j)


def scores_of(case):
    """Scores by name."""
    gen, shape = cupy.random.default_rng(0), (case.heads, case.seqlen, case.seqlen)
    slopes = cupy.asarray(2.0 ** (-8 * (np.arange(case.heads) + 1) / case.heads), np.float32)
    found = {
        "plain": None, SOFTCAP: na.Softcap(50.0), "Alibi": na.Alibi(slopes, gradient=False),
        "Score as Alibi": na.Score(alibi, arrays=[slopes]), "Alibi, gradient": na.Alibi(slopes),
        "Sink": na.Sink(slopes),
        "RelativeBias": na.RelativeBias(gen.standard_normal((case.heads, 129), np.float32)),
    }  # fmt: skip
    if math.prod(shape) < LARGEST_BIAS:
        found["Bias"] = na.Bias(gen.standard_normal(shape, np.float32).astype(DTYPE[case.dtype]))
    return found


def score_speeds(cases, passes, rounds, peers, chosen):
    """One record for each case and pass: numbattn's time by score, and FlashAttention-4's with the one that it knows.

    Gradients include those of the score's arrays.
    """
    records = []
    for case, of in progress(product(cases, passes)):
        release()
        arrays, scores = case.inputs(), scores_of(case)
        runs = [*product(["numbattn"], scores), *product(available(case.dtype, {FA4} & {*peers}), [SOFTCAP])]
        makers = {
            name if peer == "numbattn" else f"{name}, {peer}":
                partial(prepare, peer, of, arrays, causal=case.causal, score=scores[name])
            for peer, name in runs if chosen is None or name in chosen
        }  # fmt: skip
        samples, _, failed = measure(makers, rounds, same=False)
        seconds = medians(samples)
        tflops = {name: case.tflop(of) / s for name, s in seconds.items()}
        records.append({**case._asdict(), "pass": of, "seconds": seconds, "tflops": tflops, "failed": failed})
    return [*records, pair_bias(rounds)]


def pair_bias(rounds):
    """Forward + backward with a bias that is broadcast over the batch, by numbattn and by the formula in CuPy."""
    release()
    arrays, gen = PAIRS.inputs(), cupy.random.default_rng(0)
    bias = gen.standard_normal((PAIRS.heads, PAIRS.seqlen, PAIRS.seqlen), np.float32).astype(DTYPE[PAIRS.dtype])

    options = {"bias": bias[None], "bias_gradient": True}
    peers = {name: prepare(name, "both", arrays, **options) for name in ("numbattn", "cupy")}
    extra = {name: extra_bytes(run) for name, run in peers.items()}
    samples, _, failed = measure({name: lambda run=run: run for name, run in peers.items()}, rounds, same=False)
    return {**PAIRS._asdict(), "pass": "both", "seconds": medians(samples), "bytes": extra, "failed": failed}


def show_scores(records):
    *records, pairs = records
    for (dtype, of), chosen in grouped(records, "dtype", "pass"):
        names = list(dict.fromkeys(name for record in chosen for name in (*record["tflops"], *record["failed"])))
        rows = [{**columns_of_case(record), **{name: record["tflops"].get(name) for name in names}}
                for record in chosen]
        show(f"{dtype}, {of}, with a score: TFLOP/s", rows, [""] * 6 + [".1f"] * len(names))
        for record in chosen:
            show_failed(record)
    rows = [{"": name, "ms": 1e3 * seconds, "MB": scaled(pairs["bytes"].get(name), 1e-6)}
            for name, seconds in pairs["seconds"].items()]
    show("Forward + backward with a pair bias: {dtype}, batch {batch}, {heads} heads of {head_dim}, seqlen {seqlen}"
         .format(**pairs), rows, ["", ".2f", ".1f"])

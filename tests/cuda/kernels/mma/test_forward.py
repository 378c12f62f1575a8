"""In tiles of 32 queries and keys; then calls on Ampere, or on Hopper by this tier, in tiles of the tables."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda import kernels
from numbattn.cuda.kernels.mma.forward import mma_forward
from numbattn.cuda.kernels.mma.tiles import ForwardTiles
from numbattn.cuda.plan import tier
from numbattn.cuda.tile import rescaled, thread_index
from tests.accuracy import assert_accurate, exact, plain, random
from tests.tools.device import AMPERE, HOPPER, on
from tests.tools.launch import launch, mostly_simulated, poisoned, simulated_only

from ..calls import call

TILE, THREADS = 32, 64


def check(case, held=True, at_once=1, tile_n=TILE):
    """o and lse. Returns what is known of the PTX, see `launch`."""
    dtype = case.q.dtype
    source = mma_forward(
        dtype=dtype.name, out_dtypes=(dtype.name,), head_dim=64, head_dim_v=64,
        tiles=ForwardTiles(TILE, tile_n, THREADS, held), mask=case.kinds, score=(), dropout=case.kept_scale != 1,
    )  # fmt: skip
    o, lse = poisoned(case.do.shape, dtype), poisoned(case.lse.shape)
    batches, heads, m = lse.shape
    found = launch(
        source.function, (batches * heads * -(-m // TILE), 1, 1), THREADS, source.shared, case.q, case.k, case.v, o,
        (), lse, case.mask_of("q", TILE, tile_n), (), case.drops, case.group_size, case.scale_log2, case.kept_scale,
        np.int32(at_once),
    )  # fmt: skip
    for name, got in (("o", o), ("lse", lse)):
        assert_accurate(name, got, case.wanted[name], case.plain[name], got.dtype)
    return found


def small(rng, dtype=np.float16, **options):
    """Columns end before the rounded head_dims."""
    return call(rng, dtype, **{"d": 56, "e": 40} | options)


@pytest.mark.parametrize(("held", "tile_n"), [(True, 32), (False, 16)])
def test_tiles_and_groups(rng, held, tile_n):
    """The last tiles end before 32; two warps share K and V; O is staged where V was, if there are fewer keys."""
    found = check(small(rng, heads=4, heads_k=2, m=40, n=75), held, at_once=3, tile_n=tile_n)
    if found:
        visits, words = 8 * -(-75 // tile_n), 2 * tile_n * 64       # tiles of queries and keys; elements of K and V
        executed = {op.split(".")[0]: n for op, n in found.executed.items() if op.startswith("mma")}
        assert executed == {"mma": visits * words * TILE // 2 // (16 * 8 * 16)}
        matrices = sum(n for op, n in found.executed.items() if "ldmatrix" in op)
        assert matrices == visits * (words // 256 + (0 if held else 64 // 16))
        assert not sum(found.conflicts.values()), found.conflicts
        assert not found.split_lines


MASKS = {
    "causal": {"causal": True},
    "window": {"mask": na.Window(20, 9)},
    "lengths": {"mask": na.Lengths(np.array([[16, 53]]), np.array([[19, 0]])) & na.Window(20, 9), "poison": np.nan},
    "one length": {"mask": na.Lengths(39, 17), "poison": np.nan},
    "blocks": {"mask": na.BlockSparse(np.array([[[[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]]], bool), (32, 22))},
}


@simulated_only
@pytest.mark.parametrize("mask", MASKS)
def test_masks(rng, mask):
    check(small(rng, heads=2, m=70, n=75, **MASKS[mask]), held=mask != "causal")


@simulated_only
def test_tiles_that_are_empty_are_skipped(rng, monkeypatch):
    """At the start, in between, and a row of them."""
    visits = []

    def counted(x, factor):
        visits.append(thread_index())
        return rescaled(x, factor)

    monkeypatch.setattr(kernels.mma.forward, "rescaled", counted)
    blocks = np.array([[[[0, 0, 1], [0, 0, 0], [1, 0, 1]]]], bool)
    check(small(rng, m=70, n=75, mask=na.BlockSparse(blocks, (TILE, TILE))))
    assert visits.count(0) == 3


@simulated_only
def test_dropout(rng):
    check(small(rng, batch=2, heads=2, m=40, n=40, dropout=na.Dropout(0.3, seed=5)))


# -------------------------------------------------------------------------------------------------------------- calls
def check_call(device, q, k, v, **options):
    with on(device) as gpu, tier("mma"):
        o, saved = na.attention_forward(q, k, v, **options)
    (program,) = gpu.programs.values()
    assert program.plan.steps[-1].key.name == "mma_forward"
    wants, others = (formula(np.zeros_like(o), q, k, v, **options) for formula in (exact, plain))
    for name, got, want, other in zip(("o", "lse"), (o, saved.lse), wants, others):
        assert_accurate(name, got, want, other, got.dtype)
    return program.plan


def qkv(rng, dtype="float16", batch=1, heads=2, heads_k=1, m=70, n=75, d=64, e=64):
    shapes = (batch, heads, m, d), (batch, heads_k, n, d), (batch, heads_k, n, e)
    return [random(rng, shape, np.dtype(dtype)) for shape in shapes]


@mostly_simulated
@pytest.mark.parametrize(("device", "dtype", "d", "e"), [
    (AMPERE, "bfloat16", 128, 72), (HOPPER, "float16", 40, 256),
], ids=["Ampere", "Hopper"])  # fmt: skip
def test_head_dims(rng, device, dtype, d, e):
    """Each row of a table once, beside the others' tests; Q held and not."""
    check_call(device, *qkv(rng, dtype, d=d, e=e), causal=True)


@mostly_simulated
def test_packed(rng):
    """Tiles begin and end with their segment; tokens in none, and a segment without keys."""
    q, k, v = qkv(rng, m=190, n=170)
    k[..., :9, :] = v[..., :9, :] = np.nan                      # after nobody's key
    mask = na.Segments(np.array([5, 12, 90, 100, 185]), np.array([9, 40, 120, 120, 165])) & na.Causal()
    planned = check_call(AMPERE, q, k, v, mask=mask, score=na.Alibi(np.array([0.3, 0.02], np.float32)))
    assert len(planned.steps) == 1


@simulated_only
@pytest.mark.parametrize("score", [
    na.RelativeBias(np.linspace(-2, 2, 31, dtype=np.float32)), na.Sink(np.array([0.5, -1], np.float32)),
    [na.Softcap(2.0), na.Bias(np.linspace(-1, 1, 70 * 75, dtype=np.float16).reshape(70, 75))],
], ids=["relative", "sink", "softcap and bias"])  # fmt: skip
def test_scores(rng, score):
    check_call(AMPERE, *qkv(rng), score=score, causal=True)


@simulated_only
def test_strides(rng):
    """What lies as vectors is read where it lies, broadcast and with heads inside; other columns are copied."""
    q, k, v = qkv(rng, batch=2, heads_k=2, d=32, e=32)
    q, k = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k))
    assert not check_call(AMPERE, q, k, np.broadcast_to(v[:1, :1], v.shape)).stand_ins
    wide = np.zeros((2, 2, 75, 44), np.float16)[..., 3:35]
    wide[...] = v
    (copied,) = check_call(AMPERE, q, k, wide).stand_ins
    assert (copied.name, copied.is_result) == ("v", False)


FAULTS = {
    "cuda/test_origin.py::test_wide": {
        "IS_STAGED = out_dtypes == (dtype.name,)": "IS_STAGED = True",
    },
    ("test_masks", "test_tiles_and_groups", "test_dropout", "test_tiles_that_are_empty_are_skipped"): {
        "wait_copies()\n        sync_threads()                                          # K":
            "sync_threads()                                          # K",
        "sync_threads()                                          # K": "pass  # K",
        "wait_copies()\n        sync_threads()                                          # V":
            "sync_threads()                                          # V",
        "sync_threads()                                          # V": "pass  # V",
        "sync_threads()                                          # all": "pass  # all",
        "        sync_threads()\n        save(aligned": "        save(aligned",
        "at=SHARED_V if held else None": "at=SHARED_V",
        "if tested(": "if not tested(",
        "tile.m0 + TILE_M, n0, n_end)": "tile.m0 + 1, n0, n_end)",
        "(end + TILE_N - 1) // TILE_N": "end // TILE_N",
        "next_n_block(tile, mask, first // TILE_N)": "first // TILE_N",
        "next_n_block(tile, call.mask, n_block + 1)": "n_block + 1",
        "n_block + steps(": "n_block + 0 * steps(",
        "O = rescaled(O, alpha)": "O = O * 1",
        "part_sum(P, l * alpha)": "part_sum(P, l)",
        "tile.batch, tile.head, tile.m0, n0)     #": "tile.batch, tile.head, n0, tile.m0)     #",
        "tile.head // group_size": "tile.head",
        "m_blocks - 1 - number": "m_blocks - number",
        "segment.first_key + maximum(tile.band[3], 1)": "segment.first_key + segment.keys",
        "(inverse(total, alpha) * kept_scale)": "inverse(total, alpha)",
        "m * (scale_log2 * LN2)": "m * scale_log2",
        "get(sQ, Q_TILE) if HELD else sQ": "sQ",
    },
    "test_packed": {
        "tile.segment.first_key + n0": "n0",
        "mV[batch, head_k][segment.first_key : keys]": "mV[batch, head_k][:keys]",
        "mQ[batch, head][first : first +": "mQ[batch, head][: first +",
        "mO[batch, head][first:end]": "mO[batch, head][first:]",
        "scores_of(scores, segment)": "scores",
        "packs=True": "packs=False",
    },
    "cuda/kernels/mma/tiles.py": {
        "cuda/plan/test_planner.py": {
            "WITH_LESS_ROOM.get((work.device.shared, size), TILES[size])": "TILES[size]",
            "ForwardTiles(128, 32, 128, False)": "ForwardTiles(128, 64, 128, False)",
            "problem.group_size * min": "min",
            "max(1, L2_BYTES // max(nbytes, 1))": "L2_BYTES",
            "min(max(1, L2_BYTES": "max(max(1, L2_BYTES",
        },
    },
}

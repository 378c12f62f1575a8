"""Few queries, their keys in chunks; both ways to load them. Large problems are in test_attention.py."""

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.caches.eight_bits import FLOAT8
from numbattn.caches.masked import masked
from numbattn.cuda.kernels.any import decode
from numbattn.cuda.kernels.any.decode import LONG
from numbattn.cuda.kernels.shared.chunks import SIZES
from numbattn.cuda.kernels.shared.schedule import next_number
from numbattn.cuda.plan.planner import DEVICES as GPUS
from numbattn.masks import as_mask
from tests.accuracy import assert_accurate, exact, plain, random
from tests.caches.test_kv_cache import laid_out
from tests.tools.device import AMPERE, HOPPER, on
from tests.tools.launch import compiled_only, mostly_simulated, simulated_only

DEVICES = {"cp.async": AMPERE, "TMA": HOPPER}
simulated = simulated_only
BY_BOTH = pytest.mark.parametrize(  # and compiled by one
    "device", [pytest.param("cp.async", marks=simulated), "TMA"], indirect=True
)
BY_ONE = pytest.mark.parametrize("device", ["TMA"], indirect=True)  # what does not depend on how keys are loaded
HALF = np.dtype(np.float16)


@pytest.fixture(params=DEVICES)
def device(request, world):
    return DEVICES[request.param]


def qkv(rng, batch=1, heads=4, heads_k=2, m=1, n=70, d=32, e=32, dtype=HALF):
    return (random(rng, (batch, heads, m, d), dtype), random(rng, (batch, heads_k, n, d), dtype),
            random(rng, (batch, heads_k, n, e), dtype))  # fmt: skip


def not_at_all(*step):
    """How steps are executed where only their plan is looked at."""


def check(device, q, k, v, **options):
    """o and lse."""
    with on(device) as gpu:
        o, saved = na.attention_forward(q, k, v, **options)
    (program,) = gpu.programs.values()
    assert [step.key.name.removeprefix("hopper_") for step in program.plan.steps][-2:] == ["decode", "combine"]
    wants, others = (formula(np.zeros_like(o), q, k, v, **options) for formula in (exact, plain))
    for name, got, want, other in zip(("o", "lse"), (o, saved.lse), wants, others):
        assert_accurate(name, got, want, other, got.dtype)


@BY_BOTH
def test_a_query(rng, device):
    check(device, *qkv(rng))


@simulated
@pytest.mark.parametrize(("device", "m"), [("cp.async", 2), ("TMA", 3), ("cp.async", 16)], indirect=["device"])
def test_heads_of_a_group_are_packed(rng, device, m):
    """With 3 queries a head has 4 rows; with 16 it has a work tile of its own; 6 heads do not fill the last one."""
    check(device, *qkv(rng, heads=6, heads_k=1, m=m), causal=True)


@mostly_simulated
@BY_BOTH
def test_several_chunks_and_work_tiles_of_a_block(rng, device):
    """The last chunk has fewer tiles than the block has warps. Blocks draw: what there is none of, and the end."""
    lengths = np.array([[SIZES[0] + 40], [0], [2 * SIZES[0]]], np.int32)
    one_block = device._replace(multiprocessors=1)
    check(one_block, *qkv(rng, batch=3, heads=2, heads_k=1, n=2 * SIZES[0] + 7), mask=na.Lengths(lengths))


@simulated
@BY_ONE
def test_work_tiles_behind_those_that_are_empty(rng, device):
    """A block draws many at once, and does all of them."""
    lengths = np.repeat([0, 35, 0, 35], [LONG + 5, 3, 2, 8]).astype(np.int32)
    one_block = device._replace(multiprocessors=1)
    check(one_block, *qkv(rng, batch=len(lengths), heads=1, heads_k=1, n=40), mask=na.Lengths(lengths[:, None]))


@simulated
@pytest.mark.parametrize(("lengths", "draws"), [([[70], [5]], 1), ([[7], [SIZES[0] + 1]], 3), ([[70, 5], [1, 70]], 11)])
def test_chunks_behind_the_longest_sequence(rng, device, lengths, draws, monkeypatch):
    """None is drawn, but where heads have lengths of their own. The block starts with two numbers, one is the end."""
    drawn = []

    def counted(counters, first, count=1):
        drawn.append(count)
        return next_number(counters, first, count)

    monkeypatch.setattr(decode, "next_number", counted)
    one_block = device._replace(multiprocessors=1)
    mask = na.Lengths(np.array(lengths, np.int32))
    check(one_block, *qkv(rng, batch=2, heads=2, heads_k=1, n=3 * SIZES[0]), mask=mask)
    assert sum(drawn) == draws


@simulated
@BY_ONE
def test_nothing_is_drawn_where_each_work_tile_has_a_block(rng, device, monkeypatch):
    monkeypatch.setattr(decode, "next_number", None)
    monkeypatch.setattr(decode, "finish", None)
    check(device, *qkv(rng, n=SIZES[0] + 5))


@simulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes(rng, world, dtype):
    check(AMPERE, *qkv(rng, m=2, dtype=np.dtype(dtype)), causal=True)


@pytest.mark.slow
@compiled_only
@pytest.mark.parametrize(("device", "d", "e"), [
    ("TMA", 250, 130), ("cp.async", 100, 256),
], indirect=["device"])  # fmt: skip
def test_large_head_dims(rng, device, d, e):
    check(device, *qkv(rng, heads=2, heads_k=1, n=40, d=d, e=e))


MASKS = {
    "window": lambda rng: {"mask": na.Window(70, 0)},
    "lengths": lambda rng: {"mask": na.Lengths(np.array([[40], [101]], np.int32))},
    "lengths of heads": lambda rng: {"mask": na.Lengths(rng.integers(0, 120, (2, 4)).astype(np.int32))},
    "dense": lambda rng: {"mask": na.Dense(rng.random((2, 4, 3, 120)) < 0.5)},
    "blocks": lambda rng: {"mask": na.BlockSparse(rng.random((1, 1, 1, 4)) < 0.5, (3, 32))},
    "prefix": lambda rng: {"mask": na.Prefix(np.array([[70], [110]], np.int32))},
    "tail": lambda rng: {"mask": na.Tail(na.Bits.tree([-1, 0, 0]))},
}
SCORES = {
    "softcap": lambda rng: na.Softcap(2.0),
    "alibi and sink": lambda rng: [na.Alibi(np.linspace(0.1, 0.4, 4)), na.Sink(np.linspace(-1, 2, 4))],
    "table": lambda rng: na.RelativeBias(rng.standard_normal((4, 31))),
    "bias": lambda rng: na.Bias(rng.standard_normal((2, 4, 3, 120)).astype(np.float32)),
    "function": lambda rng: na.Score(lambda s, b, h, i, j: s + 0.1 * h - 0.01 * (j - i)),
}


@simulated
@pytest.mark.parametrize(("device", "name"), list(zip(["cp.async", "TMA"] * 4, MASKS)), indirect=["device"])
def test_masks(rng, device, name):
    check(device, *qkv(rng, batch=2, m=3, n=120), **MASKS[name](rng))


@pytest.mark.parametrize(("device", "name"), [
    pytest.param(*which, marks=mostly_simulated) for which in (
        ("TMA", "table"), ("TMA", "function"), ("TMA", "softcap"), ("cp.async", "alibi and sink"), ("cp.async", "bias"),
    )
], indirect=["device"])  # fmt: skip
def test_scores(rng, device, name):
    """Each head by its own numbers, though several share a work tile. How keys are loaded makes no difference."""
    check(device, *qkv(rng, batch=2, m=3, n=120), score=SCORES[name](rng))


@simulated
@BY_ONE
def test_dropout(rng, device):
    check(device, *qkv(rng, batch=2, m=3, n=120), dropout=na.Dropout(0.3, seed=5))


@simulated
@BY_ONE  # test_a_cache_in_pages by the other
def test_values_beyond_the_length_are_not_read(rng, device):
    q, k, v = qkv(rng, batch=2, n=150)
    mask = na.Lengths(np.array([[33], [150]], np.int32))
    with on(device):
        want = na.attention(q, k, v, mask=mask)
        k[0, :, 33:], v[0, :, 33:] = np.nan, np.inf
        got = na.attention(q, k, v, mask=mask)
    assert (got == want).all()


@simulated
@BY_ONE
def test_bits_depend_on_the_sequence_alone(rng, device):
    """Not on the batch, the capacity, or how many blocks there are."""
    n, capacity = SIZES[0] + 70, 2 * SIZES[0] + 300
    q, k, v = qkv(rng, batch=3, heads=2, heads_k=1, n=capacity)
    lengths = np.array([[200], [n], [capacity]], np.int32)
    with on(device._replace(multiprocessors=2)):
        o, saved = na.attention_forward(q, k, v, mask=na.Lengths(lengths))
    with on(device):
        alone, saved_alone = na.attention_forward(q[1:2], k[1:2, :, :n], v[1:2, :, :n])
    np.testing.assert_array_equal(o[1:2], alone)
    np.testing.assert_array_equal(saved.lse[1:2], saved_alone.lse)


@pytest.mark.parametrize(("device", "batch", "heads", "heads_k", "m", "of_batch"), [
    pytest.param("TMA", 3, 4, 1, 1, False, marks=mostly_simulated),
    pytest.param("cp.async", 3, 2, 1, 3, True, marks=simulated),
    pytest.param("TMA", 5, 2, 2, 3, True, marks=mostly_simulated),
], indirect=["device"])  # fmt: skip
def test_keys_that_all_sequences_share(rng, device, batch, heads, heads_k, m, of_batch):
    """A tile has rows of several sequences, if these are more than the heads of a group; the bits are the same."""
    q, k, v = qkv(rng, batch, heads, heads_k, m, n=70)
    with on(device._replace(multiprocessors=5)) as gpu:
        o, saved = na.attention_forward(q, k[:1], np.broadcast_to(v[:1], v.shape), causal=True, score=na.Softcap(4.0))
    (program,) = gpu.programs.values()
    parameters = dict(program.plan.steps[-2].key.parameters)
    assert parameters["tiles"].of_batch == of_batch
    assert parameters["tiles"].queries == {1: 1, 3: 4}[m]
    k[1:], v[1:] = k[:1], v[:1]
    with on(device):
        want, saved_want = na.attention_forward(q, k, v, causal=True, score=na.Softcap(4.0))
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(saved.lse, saved_want.lse)


@pytest.mark.parametrize("option", ["mask", "dropout", "score"])
def test_sequences_that_differ_share_no_tile(rng, option):
    q, k, v = qkv(rng, batch=5)
    options = {"mask": na.Lengths(np.arange(5, 10, dtype=np.int32)[:, None]), "dropout": na.Dropout(0.5, 1),
               "score": na.Alibi(np.ones(4))}  # fmt: skip
    with on(HOPPER, not_at_all) as gpu:
        na.attention(q, k[:1], v[:1], **{option: options[option]})
    (program,) = gpu.programs.values()
    assert not dict(program.plan.steps[-2].key.parameters)["tiles"].of_batch


@pytest.mark.slow  # test_a_cache_in_pages compares with one
@mostly_simulated
@BY_ONE
def test_a_cache_without_pages(rng, device):
    """Its lengths are where the keys end, and where masks are aligned."""
    q, k, v = qkv(rng, batch=2, m=3, n=100)
    lengths = np.array([77, 100], np.int32)
    with on(device):
        o = na.attention(q, na.KVCache(k, v, lengths), causal=True)
        for b, n in enumerate(lengths):
            rows = slice(b, b + 1)
            want = na.attention(q[rows], k[rows, :, :n], v[rows, :, :n], causal=True)
            np.testing.assert_array_equal(o[rows], want)


@pytest.mark.parametrize(("device", "page_size"), [
    pytest.param("TMA", 16, marks=mostly_simulated), pytest.param("cp.async", 40, marks=simulated),
    pytest.param("TMA", 128, marks=pytest.mark.slow),
], indirect=["device"])  # fmt: skip
def test_a_cache_in_pages(rng, device, page_size):
    """The same bits as without pages, whatever pages there are after the lengths, and whatever is on them."""
    lengths = [50, 0, 90]
    q, k, v = qkv(rng, batch=3, m=3, n=max(lengths), d=64, e=64)
    caches = [laid_out(rng, k, v, lengths, size) for size in (None, page_size)]
    with on(device):
        want, got = (na.attention(q, cache, causal=True) for cache in caches)
    np.testing.assert_array_equal(got, want)


def test_which_pages_are_loaded_by_tma():
    """Those that are parts of tiles or consist of them; on Hopper and nowhere else."""
    q = np.zeros((1, 2, 1, 128), HALF)
    for device, page_size, by_tma in (HOPPER, 8, True), (HOPPER, 192, True), (HOPPER, 24, False), (AMPERE, 64, False):
        with on(device, not_at_all) as gpu:
            na.attention(q, na.KVCache.zeros(1, 1, 20, 128, like=q, page_size=page_size))
        (program,) = gpu.programs.values()
        assert bool(program.plan.steps[-2].key.source().tensor_maps) == by_tma


# ----------------------------------------------------------------------------------- caches of fewer bits than queries
def of_fewer_bits(rng, held, lengths, page_size=None, heads_k=2, d=64, e=32, size=1.0):
    """A cache; beyond the lengths is NaN, scales too."""
    shape = len(lengths), heads_k, max(lengths) + 9
    k, v = (size * rng.standard_normal((*shape, features)) for features in (d, e))
    written = na.KVCache.zeros(*shape, d, like=k, head_dim_v=e, dtype=held)
    scales = [x for x in (written.k_scale, written.v_scale) if x is not None]
    if held != FLOAT8:
        written.append(k, v)
        return laid_out(rng, written.k, written.v, lengths, page_size, scales)
    scales = size * np.linspace(0.25, 2, 2 * heads_k).astype(np.float32).reshape(2, heads_k)
    written = na.KVCache(written.k, written.v, written.lengths, None, *scales)
    written.append(k, v)
    found = laid_out(rng, written.k, written.v, lengths, page_size)
    return na.KVCache(found.k, found.v, found.lengths, found.table, *scales)


def check_cache(device, q, cache, mask=None, **options):
    with on(device) as gpu:
        o, saved = na.attention_forward(q, cache, mask=mask, **options)
    (program,) = gpu.programs.values()
    *_, step, merge = program.plan.steps
    assert (step.key.name, merge.key.name) == ("decode", "combine")
    assert dict(step.key.parameters)["held"] == cache.k.dtype.name
    want = reference.attention_forward(q, cache, mask=mask, **options)
    k, v = (np.nan_to_num(x).astype(q.dtype) for x in cache._dense())
    mask = masked(cache, cache.lengths, as_mask(mask), None, q.shape[-2])
    other = plain(np.zeros_like(o), q, k, v, mask=mask, **options)
    for name, got, *rest in zip(("o", "lse"), (o, saved.lse), want, other):
        assert_accurate(name, got, *rest, got.dtype)


@pytest.mark.parametrize(("device", "held", "page_size", "dtype"), [
    ("TMA", FLOAT8, 16, "float16"),
    pytest.param("cp.async", np.int8, 16, "bfloat16", marks=mostly_simulated),
    pytest.param("cp.async", FLOAT8, None, "bfloat16", marks=mostly_simulated),
    pytest.param("cp.async", np.int8, None, "float16", marks=pytest.mark.slow),
    pytest.param("cp.async", FLOAT8, 16, "float16", marks=pytest.mark.slow),
    pytest.param("TMA", FLOAT8, None, "bfloat16", marks=pytest.mark.slow),
], indirect=["device"])  # fmt: skip
def test_caches_of_8_bits(rng, device, held, page_size, dtype):
    """Heads of a group, an empty sequence, ragged ones; newer GPUs convert float8 in one step."""
    lengths = [37, 0, 150] if dtype == "float16" else [150, 3]
    q = random(rng, (len(lengths), 4, 1 if page_size else 3, 64), np.dtype(dtype))
    check_cache(device, q, of_fewer_bits(rng, held, lengths, page_size), None if page_size else na.Causal())


@pytest.mark.parametrize(("device", "held", "page_size"), [
    ("TMA", ml_dtypes.bfloat16, 16),
    pytest.param("cp.async", np.float16, None, marks=mostly_simulated),
    pytest.param("cp.async", np.int8, 16, marks=mostly_simulated),
    pytest.param("cp.async", FLOAT8, None, marks=mostly_simulated),
], indirect=["device"])  # fmt: skip
def test_caches_beside_float32(rng, device, held, page_size):
    """They are read in place; heads of a group, ragged sequences."""
    q = random(rng, (2, 4, 1 if page_size else 3, 64), np.dtype(np.float32))
    check_cache(device, q, of_fewer_bits(rng, held, [150, 3], page_size), None if page_size else na.Causal())


@simulated
@pytest.mark.parametrize("held", [np.int8, FLOAT8])
def test_caches_of_8_bits_of_any_size(rng, world, held):
    """Head_dims that are no vectors, pages that are no powers of two, 16 queries, a score, dropout."""
    q = random(rng, (2, 2, 16, 24), HALF)
    options = {"score": na.Softcap(3.0), "dropout": na.Dropout(0.3, seed=5)}
    check_cache(AMPERE, q, of_fewer_bits(rng, held, [70, 33], 7, d=24, e=20), na.Window(50, 0), **options)


@simulated
@pytest.mark.parametrize("held", [np.int8, FLOAT8])
@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_small_and_large_scales(rng, world, held, size):
    """P is rounded to float16 as it is multiplied."""
    q = random(rng, (1, 2, 1, 64), HALF) / np.float16(size if size > 1 else 1)
    check_cache(AMPERE, q, of_fewer_bits(rng, held, [200], size=size))


@simulated
@pytest.mark.parametrize("held", [np.int8, np.float16])
def test_a_cache_of_which_no_tiles_fit_is_copied(rng, world, held):
    """On GPUs with little shared memory."""
    q = random(rng, (1, 1, 1, 256), HALF)
    cache = na.KVCache.zeros(1, 1, 32, 256, like=q, dtype=held, page_size=16)
    cache.append(*random(rng, (2, 1, 1, 20, 256), HALF))
    with on(GPUS[8, 6]):
        o = na.attention(q, cache)
    np.testing.assert_allclose(o, reference.attention_forward(q, cache)[0], atol=2e-3)


FAULTS = {
    "S = of_keys(dot(S_TILE, Q, sK.T), cache, work)  # Alg. 2 line 10: S = Q K^T\n                sync_warp()":
        "S = of_keys(dot(S_TILE, Q, sK.T), cache, work)",
    "minimum(end_seen, first_key(chunk + 1))": "end_seen",
    "maximum(first_seen, first_key(chunk)) // TILE_N": "first_seen // TILE_N",
    "end = number + step": "end = number",
    "            if number >= end:\n": "            if number > end:\n",
    "found = number >= last or": "found = number >= call.tiles or",
    "following.n_block + thread_index() // WARP": "following.n_block",
    "O = dot(rescaled(O, alpha), P, sV)": "O = dot(O, P, sV)",
    "            put_warps(of_sums(O, cache, work), m, row_sum(l), warp)\n            sync_threads()\n":
        "            put_warps(of_sums(O, cache, work), m, row_sum(l), warp)\n",
    "sync_threads()                                      # all have read": "# all have read",
    "            finish(counters, grid_size())\n": "            pass\n",
    "test_nothing_is_drawn_where_each_work_tile_has_a_block": {
        "following.number < tiles": "following.number <= tiles",
        "tiles > grid_size()": "True",
    },
    "if n_ahead >= ahead.n_blocks:  ": "if n_ahead > ahead.n_blocks:  ",
    "where(fold_index(LAYOUT) == head - work.head, of_head, found)": "of_head",
    "            l = l + get": "            l = get",
    "cuda/kernels/any/decode_loads.py": {"wait_copies(1)": "wait_copies(3)"},
    "cuda/kernels/shared/cached.py": {
        ("test_caches_of_8_bits", "test_small_and_large_scales"): {
            "[batch, head][:count], alignment)": "[batch, head], alignment)",
            "more = 64 if": "more = 1 if",
            "times(1 / more) if more > 1": "unscaled if more > 1",
            "scale_of_head(first + 1)": "scale_of_head(first)",
            "X * (get(allocate(PLACE, thread_index() // WARP), OF_KEYS) * MORE)": "X * MORE",
            "copy_async(allocate(PLACE, thread_index() // WARP).T": "copy_async(allocate(PLACE, 0).T",
        },
    },
}

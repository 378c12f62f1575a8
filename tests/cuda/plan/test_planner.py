"""What is planned fits the device."""

from itertools import product

import numpy as np
import pytest

import numbattn as na
from numbattn.call.passes import PASSES
from numbattn.cuda.kernels import hopper, tables
from numbattn.cuda.kernels.any import backward, forward
from numbattn.cuda.kernels.hopper.forward_tiles import CELLS, LONG, MANY, NARROW, USUAL, Warpgroups, heads_per_tile
from numbattn.cuda.kernels.mma import backward as mma_backward
from numbattn.cuda.kernels.mma import forward as mma_forward
from numbattn.cuda.passes import plans
from numbattn.cuda.plan.planner import DEVICES
from numbattn.cuda.words.steps import At
from tests.cuda.works import HOPPER, NAMED, array, kernels, score_of, work

GENERAL = {"forward": forward.SPEC, "backward_kv": backward.SPEC_KV, "backward_q": backward.SPEC_Q}
EVERY = list(product(GENERAL, DEVICES.values(), NAMED, tables.HEAD_DIMS, tables.HEAD_DIMS))


# ------------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize(("head_dim", "rounded"), [(0, 32), (1, 32), (32, 32), (33, 64), (129, 192), (193, 256)])
def test_head_dims_are_rounded_up(head_dim, rounded):
    assert tables.rounded("head_dim", head_dim) == rounded


def test_larger_head_dims_are_refused():
    with pytest.raises(ValueError, match="head_dim_v: got 257, at most 256 on a GPU"):
        tables.rounded("head_dim_v", 257)


def test_cuda_cores_where_there_are_no_others():
    for name, device, dtype, d, e in EVERY:
        for tiles in GENERAL[name].tiles(work(dtype, d, e, device=device)):
            assert tiles.unit == "fma" or device.cc >= (8, 0)


@pytest.mark.parametrize(("options", "under_pressure"), [
    ({}, False), ({"mask": ("lo", "hi", "keys")}, False), ({"mask": ("dense",)}, True), ({"dropout": True}, True),
])  # fmt: skip
def test_what_takes_registers_beside_the_tiles_has_rows_of_its_own(options, under_pressure):
    (first, *_) = backward.SPEC_Q.tiles(work(d=64, e=64, device=DEVICES[8, 0], **options))
    assert first == (backward.UNDER_PRESSURE_Q if under_pressure else backward.TILES_Q)[2, 64][0]
    (first, *_) = mma_backward.SPEC.tiles(work(d=192, e=64, device=DEVICES[8, 0], **options))
    assert first == (mma_backward.UNDER_PRESSURE if under_pressure else mma_backward.TILES)[256][0]


@pytest.mark.parametrize(("seqlens", "segments", "longest"), [
    ((20, 32), 0, 32), ((33, 20), 0, 64), ((64, 64), 0, 64), ((65, 1), 0, 256), ((256, 256), 0, 256),
    ((257, 1), 0, None), ((6400, 3200), 102, 64), ((6401, 3200), 102, 256), ((30, 30), 2, 32), ((30, 30), 1, 32),
])  # fmt: skip
def test_short_sequences_have_rows_of_their_own(seqlens, segments, longest):
    """On average, where they are packed; longer ones keep their rows."""
    found = work("float32", seqlen_q=seqlens[0], seqlen_k=seqlens[1])._replace(segments=segments)
    tables_of = (forward.SPEC, forward.SHORT, forward.TILES), (backward.SPEC_Q, backward.SHORT_Q, backward.TILES_Q)
    for spec, short, usual in tables_of:
        first = [short[longest, 4][64]] if longest else []
        assert spec.tiles(found) == (*first, *usual[4, 64])


@pytest.mark.parametrize("seqlen", [64, 100])
def test_short_sequences_under_register_pressure(seqlen):
    """Blocks have the registers that they want, and rows that leave none are not taken."""
    found = work("float32", seqlen_q=seqlen, seqlen_k=seqlen, mask=("dense",))
    (first, *_) = forward.SPEC.tiles(found)
    short, (usual, *_) = forward.SHORT[64, 4][64], forward.TILES[4, 64]
    assert first == (short._replace(blocks=1) if seqlen == 64 else usual)


def test_tiles_have_all_keys_of_a_sequence():
    for (longest, _), table in backward.ALL_KEYS.items():
        assert all(row.tile_n >= longest for row in table.values())


@pytest.mark.parametrize(("size", "rounded"), [(1, 64), (64, 64), (65, 128), (130, 192), (256, 256)])
def test_head_dims_on_hopper_are_multiples_of_64(size, rounded):
    found = work(d=size, e=8)
    assert hopper.forward.SPEC.parameters(found, hopper.forward.SPEC.fitting(found))["head_dim"] == rounded


def row(head_dim, keys=1000, seqlen_k=1000, **others):
    """Of as many queries as fill all work tiles, and work tiles as keep all multiprocessors busy, if not of others."""
    sizes = {"seqlen_k": seqlen_k, "seqlen_q": 1536, "batch": (HOPPER.multiprocessors,)} | others
    found, _ = hopper.forward.SPEC.tiles(work(d=head_dim, keys=keys, **sizes))
    return found


def test_the_row_on_hopper_is_that_of_so_many_keys():
    few, many = MANY - 1, MANY
    for size, usual in USUAL.items():
        long, narrow = (table.get(size, usual) for table in (LONG, NARROW))
        assert [row(size, n, n) for n in (0, few, many, 10 * many)] == [usual, usual, long, long]
        assert [row(size, n, 20 * many) for n in (1, few, many)] == [narrow, narrow, long]
        assert row(size, many, 20 * many, mask=("dense",)) == CELLS[size]
        assert row(size, many, 20 * many, mask=("keys",), dropout=True) == CELLS[size]


@pytest.mark.parametrize(("queries", "keys", "kinds", "table"), [
    (512, 512, (na.Causal,), NARROW), (300, 512, (na.Causal,), NARROW), (512, 512, (na.Lengths,), USUAL),
    (512, 512, (), USUAL), (1024, 1024, (na.Causal,), USUAL), (128, 512, (na.Causal,), USUAL),
    (256, 256, (na.Causal,), USUAL),
])  # fmt: skip
def test_short_causal_sequences_have_the_row_of_narrow_bands(queries, keys, kinds, table):
    assert row(128, keys, keys, seqlen_q=queries, mask_kinds=kinds) == table[128]


@pytest.mark.parametrize(("consumers", "group_size", "seqlen_q", "together"), [
    (4, 8, 1, 4), (4, 8, 64, 4), (4, 8, 65, 2), (4, 8, 129, 1), (4, 1, 1, 1), (4, 6, 1, 2), (3, 6, 64, 3), (2, 3, 1, 1),
])  # fmt: skip
def test_heads_share_a_work_tile_that_has_room_for_them(consumers, group_size, seqlen_q, together):
    tiles, sizes = Warpgroups(64, consumers, 2, 2), {"group_size": group_size, "seqlen_q": seqlen_q}
    assert heads_per_tile(tiles, work(**sizes)) == together
    assert heads_per_tile(tiles, work(**sizes, mask=("keys",))) == 1


@pytest.mark.parametrize("keys", [MANY - 1, MANY])
def test_few_queries_have_the_row_in_which_most_heads_share(keys):
    def found(head_dim, group_size, seqlen_q, *mask):
        return row(head_dim, keys, 10 * MANY, group_size=group_size, seqlen_q=seqlen_q, mask=mask)

    instead = (NARROW if keys < MANY else LONG)[128]
    assert (instead.consumers, USUAL[128].consumers) == (3, 2)
    assert found(128, 3, 64) == found(128, 1, 192) == instead
    assert found(128, 8, 64) == found(128, 2, 1) == found(128, 3, 64, "keys") == USUAL[128]
    assert found(64, 8, 128) == USUAL[64]


@pytest.mark.parametrize(("batch", "queries", "options", "table"), [
    ((4, 16), 4096, {}, LONG),                                # 11 waves of 192, 16 of 128
    ((16,), 4096, {}, USUAL),                                 # 3, 4
    ((16,), 2048, {}, USUAL),                                 # 2, 2
    ((16,), 2048, {"mask_kinds": (na.Causal,)}, LONG),        # light tiles fill up what is left
    ((16,), 2048, {"mask_kinds": (na.Window,), "seqlen_k": 8192}, USUAL),
    ((1,), 192, {}, USUAL), ((264,), 192, {}, LONG),          # 256 rows for 192 queries
])  # fmt: skip
def test_multiprocessors_do_not_wait_for_a_last_few_tiles(batch, queries, options, table):
    assert row(128, MANY, **{"seqlen_k": MANY} | options, batch=batch, seqlen_q=queries) == table[128]


@pytest.mark.parametrize(("cc", "dtype", "takes"), [
    ((9, 0), "float16", True), ((9, 0), "bfloat16", True), ((9, 0), "float32", False), ((8, 0), "float16", False),
    ((10, 0), "bfloat16", False),
])  # fmt: skip
def test_warpgroups_are_for_hopper(cc, dtype, takes):
    assert hopper.is_for_hopper(work(dtype, device=DEVICES[cc])) == takes


@pytest.mark.parametrize(("cc", "size", "row"), [
    ((8, 0), 128, (128, 64, 128, False)), ((10, 0), 65, (128, 64, 128, False)), ((8, 6), 128, (128, 32, 128, False)),
    ((12, 0), 64, (128, 64, 128, True)), ((8, 9), 192, (64, 64, 128, False)), ((9, 0), 32, (128, 64, 128, True)),
    ((8, 0), 256, (128, 64, 256, False)), ((9, 0), 129, (64, 64, 128, False)),
])  # fmt: skip
def test_tiles_of_mma_sync(cc, size, row):
    """By the card's shared memory."""
    found = work(d=size, e=32, device=DEVICES[cc])
    assert mma_forward.SPEC.fitting(found) == row


def test_heads_go_over_their_keys_while_these_are_in_l2():
    def at_once(seqlen_k, group_size):
        return mma_forward.SPEC.numbers(work(seqlen_k=seqlen_k, group_size=group_size), None)["at_once"]

    assert [at_once(n, g) for n, g in ((1 << 10, 1), (1 << 10, 4), (1 << 20, 4), (0, 1))] == [64, 256, 4, 64]


@pytest.mark.parametrize(("options", "expected"), [
    ({}, 2), ({"mask_kinds": (na.Dense,)}, 2), ({"mask_kinds": (na.Causal,)}, 8),
    ({"mask_kinds": (na.Causal,), "seqlen_q": 3000}, 5),
    ({"mask_kinds": (na.Causal, na.Dense), "seqlen_q": 1 << 16}, 4),
])  # fmt: skip
def test_matrices_whose_gradients_are_computed_at_once(options, expected):
    """Fewer where all blocks take equally long, or what they read is large."""
    assert mma_backward.SPEC.numbers(work(d=128, e=128, **{"seqlen_q": 0} | options), None) == {"at_once": expected}


# -------------------------------------------------------------------------------------------------------------- plans
Q = array(2, 8, 1000, 64)


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
@pytest.mark.parametrize("dtype", NAMED)
def test_every_plan_fits_its_device(device, dtype):
    for d, e, cells in [(1, 256, False), (32, 32, True), (100, 64, False), (256, 128, True), (256, 256, False)]:
        q, k, v = (array(1, 2, 300, size, dtype=NAMED[dtype]) for size in (d, d, e))
        mask = na.Dense(np.ones((300, 300), bool)) if cells else None
        for planned in plans(device, q, k, v, mask=mask, passes=PASSES.values()):
            assert all(step.key.source().shared <= device.shared for step in planned.steps)


def test_steps_in_their_order():
    forward, backward = plans(DEVICES[8, 0], Q, Q, Q, causal=True)
    assert kernels(forward) == ["mma_forward"]
    assert kernels(backward) == ["delta", "mma_backward", "round_dq"]
    assert forward.temporaries == ()
    sums, *lines = [(x.name, x.shape) for x in backward.temporaries]
    assert sums == ("sums of dq", (2, 8, 1024 * 64))
    assert lines == [("delta", (2, 8, 1024)), ("lse_log2", (2, 8, 1024))]
    assert not forward.uses_counters


def test_blocks_of_a_mask_are_looked_up_first():
    mask = na.BlockSparse(np.ones((1, 1, 10, 10), bool), (100, 100))
    forward, backward = plans(HOPPER, Q, Q, Q, mask=mask)
    assert kernels(forward) == ["tile_states", "hopper_forward"]
    assert kernels(backward) == ["delta", "tile_states", "hopper_backward_kv", "tile_states", "hopper_backward_q"]
    for planned in forward, backward:
        for states, step in zip(planned.steps, planned.steps[1:]):
            assert states.key.name != "tile_states" or states.tiles == step.tiles


@pytest.mark.parametrize(("size", "tile_m", "blocks"), [((64, 64), 64, 2), ((128, 64), 64, 2), ((128, 128), 128, 1)])
def test_small_blocks_of_a_mask_are_tiles(size, tile_m, blocks):
    """Of kernels of which a multiprocessor holds two."""
    q = array(2, 16, 2560, 128)
    mask = na.BlockSparse(np.ones((1, 1, 2560 // size[0], 2560 // size[1]), bool), size)
    forward, backward = plans(HOPPER, q, q, q, mask=mask)
    assert forward.steps[-1].tiles.tile_m == tile_m
    assert forward.steps[-1].blocks == blocks * HOPPER.multiprocessors
    kept = {step.key.name: step.tiles for step in backward.steps}
    assert kept["hopper_backward_kv"].tile_n == tile_m
    assert blocks == 1 or kept["hopper_backward_q"].tile_m == tile_m


@pytest.mark.parametrize(("seqlen", "group_size", "forward", "backward"), [
    (40960, 1, 1, 1), (40960, 4, 4, 1), (8192, 1, 8, 8), (8192, 4, 32, 8), (1000, 1, 32, 8), (1 << 20, 1, 1, 1),
])  # fmt: skip
def test_matrices_of_which_blocks_are_read_stay_in_l2(seqlen, group_size, forward, backward):
    found = work(d=128, e=128, seqlen_q=seqlen, seqlen_k=seqlen, group_size=group_size, mask=("blocks",),
                 cells=((64, 64),))  # fmt: skip
    assert hopper.forward.SPEC.numbers(found, hopper.forward.SPEC.fitting(found))["at_once"] == forward
    assert hopper.backward_q.SPEC.numbers(found, None) == {"at_once": backward}


KV_SUMS, KV_AND_Q = ["hopper_backward_kv", "round_dq"], ["hopper_backward_kv", "hopper_backward_q"]
WIDE_AND_Q = ["hopper_backward_wide", "hopper_backward_q"]


@pytest.mark.parametrize(("d", "e", "deterministic", "names"), [
    (64, 64, False, KV_SUMS), (100, 100, False, KV_SUMS),
    (128, 64, False, KV_SUMS), (64, 128, False, KV_AND_Q),
    (64, 64, True, KV_SUMS), (64, 128, True, KV_AND_Q),
    (192, 64, False, WIDE_AND_Q), (256, 256, True, WIDE_AND_Q),
])  # fmt: skip
def test_dq_is_added_up_where_a_consumer_has_room(d, e, deterministic, names):
    q, v = array(2, 8, 1000, d), array(2, 8, 1000, e)
    _, backward = plans(HOPPER, q, q, v, deterministic=deterministic)
    assert kernels(backward) == ["delta", *names]
    zeroed, others = ({x.shape for x in backward.temporaries if x.is_zero == zero} for zero in (True, False))
    sums, turns, statistics = (2, 8, 1024 * (-(-d // 64) * 64)), (2, 8, 1024 // 64), (2, 8, 1024)
    if "round_dq" not in names:
        assert (zeroed, others) == (set(), {statistics})
    elif deterministic:
        assert (zeroed, others) == ({turns}, {statistics, sums})
    else:
        assert (zeroed, others) == ({sums}, {statistics})


@pytest.mark.parametrize(("options", "name"), [
    ({"mask": na.Window(50, 0) & na.Lengths(np.zeros((2, 1), int))}, "round_dq"),
    ({"score": na.Softcap(20.0)}, "round_dq"),
    ({"mask": na.BlockSparse(np.zeros((1, 1, 10, 10), bool), (100, 100))}, "hopper_backward_q"),
    ({"score": na.Bias(np.zeros((1000, 1000), np.float16), gradient=False)}, "hopper_backward_q"),
])  # fmt: skip
def test_tiles_of_keys_take_turns_where_a_band_says_which(options, name):
    """And where shared memory has room for a second dQ."""
    q = array(2, 8, 1000, 128)
    assert name in kernels(plans(HOPPER, q, q, q, deterministic=True, **options)[1])


@pytest.mark.parametrize(("d", "seqlen", "at_once"), [
    (64, 512, 64), (64, 1024, 32), (128, 512, 32), (128, 4096, 16), (128, 16384, 4), (64, 16384, 8), (128, 10**6, 2),
])  # fmt: skip
def test_matrices_that_are_computed_in_turn_stay_in_the_cache(d, seqlen, at_once):
    """So many that few tiles of one start together."""
    found = work("float16", d, d, seqlen_q=seqlen)
    assert hopper.backward_kv.SPEC_TURNS.numbers(found, None) == {"at_once": at_once}


@pytest.mark.parametrize(("batch", "at_once"), [((1,), 2), ((2,), 2), ((3,), 4), ((2, 2, 2), 8)])
def test_no_more_matrices_than_there_are_are_computed_in_turn(batch, at_once):
    """An even number."""
    found = work("float16", 64, 64, seqlen_q=512, batch=batch, group_size=3)
    assert hopper.backward_kv.SPEC_TURNS.numbers(found, None) == {"at_once": at_once}


@pytest.mark.parametrize(("d", "deterministic", "names"), [
    (64, False, KV_SUMS), (64, True, KV_SUMS),
    (128, False, KV_SUMS), (192, False, WIDE_AND_Q),
])  # fmt: skip
def test_dropout_leaves_room_for_both_sums_of_small_head_dims(d, deterministic, names):
    q = array(2, 8, 1000, d)
    _, backward = plans(HOPPER, q, q, q, deterministic=deterministic, dropout=na.Dropout(0.1, seed=1))
    assert kernels(backward) == ["delta", *names]


@pytest.mark.parametrize(("d", "names"), [(32, KV_AND_Q), (40, KV_SUMS)])
def test_no_sums_that_are_much_larger_than_dq(d, names):
    q = array(2, 8, 2000, d)
    _, backward = plans(HOPPER, q, q, q)
    assert kernels(backward) == ["delta", *names]


@pytest.mark.parametrize(("n", "d", "options", "names"), [
    (1024, 32, {}, ["mma_backward", "round_dq"]),
    (1025, 32, {}, KV_AND_Q),
    (1024, 40, {}, KV_SUMS),
    (1024, 32, {"deterministic": True}, KV_AND_Q),
    (1024, 32, {"score": na.Softcap(9.0)}, KV_AND_Q),
], ids=str)  # fmt: skip
def test_short_sequences_of_few_features_have_kernels_for_ampere(n, d, options, names):
    """Hopper's would multiply as many zeros."""
    q = array(2, 8, n, d)
    _, backward = plans(HOPPER, q, q, q, **options)
    assert kernels(backward) == ["delta", *names]


ALIBI = na.Alibi(np.zeros(8, np.float32))


OF_BIAS = ["bias_gradient", "sum_parts"]


@pytest.mark.parametrize(("score", "names"), [
    ([na.RelativeBias(np.zeros(9))], ["diagonal_sums", "sum_parts"]),
    ([na.Bias(np.zeros((8, 1, 1)))], OF_BIAS),
    ([na.Bias(np.zeros((1000, 1000))), na.Bias(np.zeros((8, 1, 1000)))], [*OF_BIAS, *OF_BIAS]),
], ids=["table", "bias", "two"])  # fmt: skip
@pytest.mark.parametrize("mask", [na.BlockSparse(np.ones((1, 1, 10, 10), bool), (100, 100)), na.Segments(
    np.array([0, 300, 1000]))], ids=["blocks", "segments"])  # fmt: skip
def test_kernels_of_gradients_look_up_which_tiles_are_empty(score, names, mask):
    _, backward = plans(HOPPER, Q, Q, Q, mask=mask, score=score)
    found = kernels(backward)
    assert found[-len(names) :] == names
    states = [x.name for x in backward.temporaries if x.name.startswith("states of")]
    assert found.count("tile_states") == len(states)            # once for all kernels of such tiles
    sizes = {(step.tiles.tile_m, step.tiles.tile_n) for step in backward.steps if step.key.name == names[0]}
    assert len(sizes) == 1


@pytest.mark.parametrize(("score", "options", "name"), [
    ([na.RelativeBias(np.zeros(9))], {}, "hopper_diagonal_sums"),
    ([na.Softcap(2.0), na.RelativeBias(np.zeros(9)), ALIBI, na.Sink(0.0)], {"causal": True}, "hopper_diagonal_sums"),
    ([na.RelativeBias(np.zeros(9))], {"dropout": na.Dropout(0.1, 1)}, "diagonal_sums"),
    ([na.RelativeBias(np.zeros(9)), na.Bias(np.zeros((1000, 1000)), gradient=False)], {}, "diagonal_sums"),
    ([na.Bias(array(8, 1000, 1000))], {}, "hopper_bias_gradient"),
    ([na.Bias(array(8, 1000, 1000))], {"dropout": na.Dropout(0.1, 1)}, "bias_gradient"),
], ids=["table", "others", "dropout", "beside a bias", "bias", "bias, dropout"])  # fmt: skip
@pytest.mark.parametrize("d", [64, 256])
def test_gradients_by_warpgroups(score, options, name, d):
    """Where nothing else is looked up, and the kernel of dK and dV does not sum them."""
    q = array(2, 8, 1000, d)
    _, backward = plans(HOPPER, q, q, q, score=score, deterministic=True, **options)
    assert name in kernels(backward)


BIAS = na.Bias(array(8, 1000, 1000), gradient=False)
CAP, LINE = na.Softcap(2.0), np.zeros((1, 1, 1000), np.int32)


@pytest.mark.parametrize(("d", "options", "kernel"), [
    (64, {"score": CAP}, "kv"), (64, {"score": CAP, "dropout": na.Dropout(0.1, 1)}, "kv"),
    (128, {"score": CAP, "dropout": na.Dropout(0.1, 1)}, "wide"),
    (128, {"score": CAP, "mask": na.Dense(np.ones((1000, 1000), bool))}, "wide"),
    (128, {"score": [CAP, BIAS]}, "wide"),
    (128, {"score": BIAS, "dropout": na.Dropout(0.1, 1)}, "kv"),
    (64, {"mask": na.Intervals(LINE, LINE)}, "wide"), (128, {"mask": na.Intervals(LINE, LINE)}, "kv"),
    (64, {"mask": na.Dense(np.ones((1000, 1000), bool))}, "kv"),
])  # fmt: skip
def test_a_consumer_has_registers_for_both_sums_unless_much_is_looked_up(d, options, kernel):
    q = array(2, 8, 1000, d)
    _, backward = plans(HOPPER, q, q, q, **options)
    assert f"hopper_backward_{kernel}" in kernels(backward)


@pytest.mark.parametrize(("score", "options", "bias_dtype"), [
    ([BIAS], {}, "float16"), ([na.Alibi(np.zeros(8)), BIAS, na.Softcap(2.0)], {"mask": na.Window(30, 5)}, "float16"),
    ([na.Bias(array(1000, 1000, dtype=np.dtype("bfloat16")), False)], {}, "bfloat16"),
    ([BIAS, BIAS], {}, ""), ([BIAS, na.RelativeBias(np.zeros(9), gradient=False)], {}, ""),
    ([BIAS], {"dropout": na.Dropout(0.1, 1)}, ""), ([BIAS], {"mask": na.Dense(np.ones((1000, 1000), bool))}, ""),
    ([na.Bias(array(1000, 1000, dtype=np.float32), False)], {}, ""),
    ([na.Bias(array(1000, 1001)[:, 1:], gradient=False)], {}, ""),
], ids=["alone", "with others", "bfloat16", "two", "a table", "dropout", "a grid", "float32",
        "rows of odd length"])  # fmt: skip
def test_biases_that_tma_loads(score, options, bias_dtype):
    """Of two bytes an element and aligned, where nothing else is looked up."""
    q = array(2, 8, 1000, 64)
    forward, backward = plans(HOPPER, q, q, q, score=score, **options)
    found = [dict(step.key.parameters)["bias_dtype"] for step in (*forward.steps, *backward.steps)
             if "bias_dtype" in dict(step.key.parameters)]  # fmt: skip
    assert {*found} == {bias_dtype}


@pytest.mark.parametrize(("score", "options", "names"), [
    ([ALIBI, na.Sink(np.zeros(8))], {}, ["sum_parts"]), ([ALIBI, ALIBI], {}, [*OF_BIAS, "sum_parts"]),
    ([ALIBI, na.RelativeBias(np.zeros((8, 9)))], {"causal": True}, [*OF_BIAS, "sum_parts"]),
    ([ALIBI], {"dropout": na.Dropout(0.1, 1)}, OF_BIAS), ([na.Alibi(np.zeros(8), gradient=False)], {}, []),
], ids=["sink", "two", "table", "dropout", "given"])  # fmt: skip
def test_slopes_get_their_gradient_beside_that_of_keys_or_from_a_kernel_of_its_own(score, options, names):
    """The sink's comes with delta."""
    q = array(2, 8, 1000, 64)
    _, backward = plans(HOPPER, q, q, q, score=score, **options)
    assert kernels(backward) == ["delta", *KV_SUMS, *names]


OFFSETS, BY_HEAD = np.array([0, 300, 1000], np.int32), np.zeros((2, 8, 3), np.int32)
PACKED_STEPS = ["hopper_forward"], ["delta", *KV_SUMS]
FORWARD_STEPS = ["intervals", "tile_states", "hopper_forward"]
BACKWARD_STEPS = ["delta", "intervals", "tile_states", "hopper_backward_wide", "tile_states", "hopper_backward_q"]
STEPS_OF_ALL = FORWARD_STEPS, BACKWARD_STEPS


@pytest.mark.parametrize(("options", "names"), [
    ({}, PACKED_STEPS), ({"causal": True}, PACKED_STEPS), ({"score": na.Sink(np.zeros(8))}, PACKED_STEPS),
    ({"deterministic": True}, PACKED_STEPS),
    ({"score": [na.Sink(np.zeros(8)), na.Alibi(np.zeros(8), gradient=False)]}, PACKED_STEPS),
    ({"score": na.Alibi(np.zeros(8))}, (PACKED_STEPS[0], None)),
    ({"score": [na.Alibi(np.zeros(8)), na.Softcap(2.0)]}, (PACKED_STEPS[0], None)),
    ({"score": na.RelativeBias(np.zeros(9))}, (PACKED_STEPS[0], None)),
    ({"score": na.Softcap(2.0)}, PACKED_STEPS),
    ({"dropout": na.Dropout(0.1, 1)}, STEPS_OF_ALL), ({"score": na.Bias(np.zeros((1000, 1000)), False)}, STEPS_OF_ALL),
    ({"mask": na.Segments(BY_HEAD)}, STEPS_OF_ALL), ({"mask": na.Segments(OFFSETS) & na.Prefix(3)}, STEPS_OF_ALL),
    ({"mask": na.Segments(OFFSETS) & na.First(3)}, STEPS_OF_ALL),
    ({"mask": na.Segments(OFFSETS) & na.Lengths(np.zeros((2, 1), int))}, STEPS_OF_ALL),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else "")  # fmt: skip
def test_packed_arrays_are_computed_by_segment(options, names):
    """Where tiles may begin anywhere."""
    forward, backward = plans(HOPPER, Q, Q, Q, **{"mask": na.Segments(OFFSETS)} | options)
    assert kernels(forward) == names[0]
    if names[1] is None:  # its gradient is that of the whole matrix
        assert "tile_states" in kernels(backward)
    else:
        assert kernels(backward) == names[1]
    forward, _ = plans(DEVICES[8, 0], Q, Q, Q, **{"mask": na.Segments(OFFSETS)} | options)
    assert kernels(forward) == [name.replace("hopper", "mma") for name in names[0]]


OF_WHOLE_MATRIX = ["delta", "intervals", "tile_states", "mma_backward", "round_dq", "tile_states", *OF_BIAS]


@pytest.mark.parametrize(("options", "names"), [
    ({}, ["delta", "mma_backward", "round_dq"]), ({"deterministic": True}, ["delta", "mma_backward", "backward_q"]),
    ({"score": na.Alibi(np.zeros(8))}, OF_WHOLE_MATRIX),
], ids=["sums", "deterministic", "slopes"])  # fmt: skip
def test_packed_arrays_on_other_gpus(options, names):
    """Slopes get their gradient from a kernel of its own, of the whole matrix."""
    _, backward = plans(DEVICES[8, 0], Q, Q, Q, mask=na.Segments(OFFSETS), **options)
    assert kernels(backward) == names


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_packed_arrays_of_words(device):
    q = array(2, 8, 1000, 64, dtype=np.float32)
    found = plans(device, q, q, q, mask=na.Segments(OFFSETS))
    assert [*map(kernels, found)] == [["forward"], ["delta", "backward_kv", "backward_q"]]


UNEQUAL = np.array([0, 500, 1000], np.int32)


@pytest.mark.parametrize(("mask", "offset", "which"), [
    (None, None, ""), (na.Segments(OFFSETS), None, ""), (na.Segments(OFFSETS, UNEQUAL), 3, ""),
    (na.Segments(OFFSETS, UNEQUAL), None, "segment"), (None, np.zeros((1, 8), np.int32), "matrix"),
    (na.Segments(OFFSETS, UNEQUAL) & na.Prefix(3), None, "query"),
], ids=["none", "equal", "number", "segment", "matrix", "query"])  # fmt: skip
def test_what_offsets_depend_on(mask, offset, which):
    """On a tile's segment or a query only where those of keys are others."""
    score = [na.Alibi(np.zeros(8), False, offset=offset), na.RelativeBias(np.zeros(9), False, offset=offset)]
    for planned in plans(HOPPER, Q, Q, Q, mask=mask, score=score):
        found = {dict(step.key.parameters)["score"] for step in planned.steps if "score" in dict(step.key.parameters)}
        assert found == {score_of(f"alibi {which}, relative {which}")}


def test_another_offset_compiles_nothing():
    def keys(offset):
        score = [na.Alibi(np.zeros(8), False, offset=offset), na.RelativeBias(np.zeros(9), offset=offset)]
        return {step.key for planned in plans(HOPPER, Q, Q, Q, score=score) for step in planned.steps}

    assert keys(None) == keys(-70)
    assert keys(np.zeros((2, 1), int)) >= keys(np.ones((2, 8), np.int8))    # whose sums need no parts


@pytest.mark.parametrize(("mask", "names", "kinds"), [
    (na.Causal() & (na.Window(3, 0) | na.Lengths(2)), STEPS_OF_ALL, ("intervals", "gap")),
    (na.Segments(OFFSETS) & (na.Window(3, 0) | na.First(2)), STEPS_OF_ALL, ("intervals", "gap")),
    (na.Window(3, 0) | na.Lengths(2) | na.Causal(-9), None, ("bits",)),
    (na.Window(3, 0) | np.ones((1000, 1000), bool), None, ("bits",)),
], ids=repr)  # fmt: skip
def test_two_intervals_and_more(mask, names, kinds):
    """The first are computed by kernels; no number compiles anything."""
    found = plans(HOPPER, Q, Q, Q, mask=mask)
    assert names is None or tuple(map(kernels, found)) == names
    masks = {dict(step.key.parameters).get("mask") for plan in found for step in plan.steps}
    assert {mask for mask in masks if mask} == {kinds}
    other = na.Causal() if mask._segments is None else na.Segments(OFFSETS)
    one, another = (plans(HOPPER, Q, Q, Q, mask=other & (na.Window(n, n) | na.First(n))) for n in (1, 200))
    assert [step.key for step in one[1].steps] == [step.key for step in another[1].steps]


NUMBERS = 3, np.ones((2, 1), np.int32), np.ones((1, 8), np.int64)


@pytest.mark.parametrize("n", NUMBERS, ids=lambda n: getattr(n, "dtype", "int"))
@pytest.mark.parametrize("joined", [
    lambda mask: mask, lambda mask: na.Causal() & (na.Window(9, 0) | mask), lambda mask: mask & na.Segments(OFFSETS)
], ids=["alone", "stream", "packed"])  # fmt: skip
def test_first_keys_are_planned_as_lengths(n, joined):
    """Without segments no kernel is another one."""
    first, lengths = (plans(HOPPER, Q, Q, Q, mask=joined(mask)) for mask in (na.First(n), na.Lengths(n)))
    assert (first == lengths) == (joined(na.Causal())._segments is None)


def test_padded_lines_have_room_for_the_slots_of_all_segments():
    _, backward = plans(HOPPER, Q, Q, Q, mask=na.Segments(OFFSETS))
    slots = 1000 // 128 + len(OFFSETS) + 1
    assert {x.shape for x in backward.temporaries if not x.is_zero} == {(2, 8, slots * 128)}
    assert [x.shape for x in backward.temporaries if x.is_zero] == [(2, 8, slots * 128 * 64)]


def test_a_stand_in_is_what_all_steps_take():
    """delta could read dO as it lies, tensor maps cannot: both get the copy."""
    _, backward = plans(HOPPER, Q, Q, array(2, 8, 1000, 60))
    (copy,) = (x for x in backward.stand_ins if x.name == "do")
    views = [x.view for step in backward.steps for x in step.arguments if isinstance(x, At) and x.array == "do"]
    assert len(views) == 2
    assert all(view.strides[-2] == copy.shape[-1] * 2 for view in views)


IN_ONE, IN_TWO = ["delta", "backward_kv"], ["delta", "backward_kv", "backward_q"]


@pytest.mark.parametrize(("dtype", "m", "n", "d", "device", "names"), [
    ("float32", 128, 128, 64, (9, 0), IN_ONE), ("float32", 20, 100, 32, (8, 6), IN_ONE),
    ("float32", 128, 129, 64, (9, 0), IN_TWO), ("float32", 129, 128, 64, (9, 0), IN_TWO),
    ("float32", 128, 128, 65, (9, 0), IN_TWO), ("float32", 128, 128, 64, (8, 6), IN_TWO),
    ("float64", 128, 128, 64, (9, 0), IN_ONE), ("float64", 128, 128, 64, (8, 0), IN_TWO),
    ("float32", 20, 20, 32, (7, 5), IN_TWO),
])  # fmt: skip
def test_a_block_that_has_all_keys_computes_dq(dtype, m, n, d, device, names):
    """Where its shared memory has room for them."""
    q, k = array(2, 8, m, d, dtype=np.dtype(dtype)), array(2, 8, n, d, dtype=np.dtype(dtype))
    _, backward = plans(DEVICES[device], q, k, k)
    assert kernels(backward) == names


def test_packed_sequences_are_never_all_of_a_block():
    q, offsets = array(2, 8, 100, 32, dtype=np.float32), np.arange(0, 101, 20, dtype=np.int32)
    _, backward = plans(HOPPER, q, q, q, mask=na.Segments(offsets, offsets))
    assert kernels(backward) == IN_TWO


@pytest.mark.parametrize(("lengths", "options", "are_small"), [
    ([20, 0, 64], {}, (True, True)), ([20, 0, 65], {}, (False, False)),
    ([5, 7], {"score": na.Alibi([1.0], gradient=False)}, (True, True)),
    ([5, 7], {"score": na.Alibi(np.ones(1, np.float32))}, (True, False)),
    ([5, 7], {"dropout": na.Dropout(0.5, 1)}, (False, False)),
])  # fmt: skip
def test_short_packed_sequences_are_small_matrices(lengths, options, are_small):
    """Where segments are not longer than a tile; gradients of a score, and dropout, are of the whole matrix."""
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q = array(1, 1, offsets[-1], 32, dtype=np.float32)
    forward, backward = plans(HOPPER, q, q, q, mask=na.Segments(offsets), **options)
    assert ({*kernels(forward)} == {"small_forward"}, {*kernels(backward)} == {"small_backward"}) == are_small


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_head_dims_of_words_take_one(dtype):
    q = array(2, 8, 1000, 256, dtype=np.dtype(dtype))
    _, backward = plans(DEVICES[8, 0], q, q, q)
    assert kernels(backward) == ["delta", "backward_kv", "backward_q"]


def test_what_tensor_maps_cannot_move_is_copied():
    x = array(2, 8, 1000, 68)[..., :60]
    forward, backward = plans(HOPPER, x, Q[..., :60], array(2, 8, 1000, 60))
    assert {(y.name, y.is_result) for y in forward.stand_ins} == {("q", False), ("k", False), ("v", False), ("o", True)}
    assert {y.shape for y in forward.stand_ins} == {(2, 8, 1000, 64)}
    assert {(y.name, y.is_result) for y in backward.stand_ins} == {(name, False) for name in ("q", "k", "v", "do")}


def test_what_is_not_aligned_is_copied_for_cp_async():
    """Of half precision; of float32 it is loaded element by element."""
    x, y = array(2, 8, 1000, 60), array(2, 8, 1000, 60, dtype=np.float32)
    forward, _ = plans(DEVICES[8, 0], x, Q[..., :60], x)
    assert {(y.name, y.shape[-1]) for y in forward.stand_ins} == {(name, 64) for name in "qkvo"}
    assert not plans(DEVICES[8, 0], y, y, y)[0].stand_ins


def test_gradients_are_summed_over_broadcast_axes():
    _, backward = plans(HOPPER, Q, Q[:1], Q)
    ((name, shape, dtype, why, is_result),) = backward.stand_ins
    assert (name, shape, dtype, is_result) == ("dk", Q.shape, np.float32, True)
    assert "summed" in why


def test_matrices_without_features_get_a_column():
    forward, backward = plans(DEVICES[8, 0], *(array(2, 500, d) for d in (0, 0, 8)))
    assert [x.name for x in forward.stand_ins] == ["q", "k"]
    assert [x.name for x in backward.stand_ins] == ["q", "k", "dk", "dq"]


@pytest.mark.parametrize(("device", "dtype"), [
    ((9, 0), "bfloat16"), ((8, 0), "float16"), ((8, 0), "float32"), ((7, 5), "float16"),
])  # fmt: skip
def test_v_without_features_takes_nothing(device, dtype):
    """Kernels of the forward pass compute lse alone, for few queries, too; others take a column of zeros."""
    q, v = (array(2, 500, size, dtype=NAMED[dtype]) for size in (64, 3))
    forward, backward = plans(DEVICES[device], q, q, v[..., :0])
    ((key, *_),) = forward.steps
    found = {"nbytes": 16} | dict(key.parameters)               # how v is aligned makes no difference
    assert (forward.stand_ins, found["head_dim_v"], found["nbytes"]) == ((), 0, 16)
    assert {x.name for x in backward.stand_ins} >= {"v", "do", "dv"}
    few, _ = plans(DEVICES[8, 0], q[:, :1], q, v[..., :0])
    assert few.stand_ins == ()
    assert {dict(step.key.parameters)["head_dim_v"] for step in few.steps} == {0}


def test_a_batch_that_is_no_single_stride_takes_a_launch_a_piece():
    forward, _ = plans(HOPPER, array(2, 3, 8, 200, 64), array(1, 3, 8, 200, 64), array(2, 3, 8, 200, 64))
    assert kernels(forward) == ["hopper_forward", "hopper_forward"]
    assert [[x.view.pointer for x in step.arguments if isinstance(x, At)][:2] for step in forward.steps] == [
        [0, 0], [3 * 8 * 200 * 64 * 2, 0]]  # fmt: skip
    elements = [step.arguments[step.arguments.index("key_high") + 1] for step in forward.steps]
    assert elements == [0, 3]                               # the number of the first one, for dropout


def test_blocks_that_draw_work_are_one_a_multiprocessor():
    q = array(8, 16, 1000, 64)
    forward, _ = plans(HOPPER, q, q, q)
    assert forward.steps[0].blocks == HOPPER.multiprocessors
    assert forward.uses_counters
    few, _ = plans(HOPPER, Q[:1, :1], Q[:1, :1], Q[:1, :1])
    assert few.steps[0].blocks == -(-1000 // few.steps[0].tiles.tile_m)


def test_temporaries_lie_one_behind_another_in_one_block():
    score = [na.RelativeBias(np.zeros(9, np.float32))]
    for planned in plans(HOPPER, Q, Q, Q, score=score, mask=na.Intervals(np.zeros(1000, int), np.full(1000, 9))):
        nbytes, zeros, offsets = planned.workspace
        assert len(offsets) == len(planned.temporaries) > 1
        end = 0
        for x, offset in zip(planned.temporaries, offsets):
            assert offset == -(-end // 512) * 512
            end = offset + x.nbytes
            assert (offset < zeros) == x.is_zero
        assert nbytes == -(-end // 512) * 512


FAULTS = {
    "test_random.py::test_without_a_gpu[a bias, then a function]": {
        "if any(array_of_part(number) not in self.layouts": "if any(False",
    },
    (
        "test_steps_in_their_order",
        "test_what_tensor_maps_cannot_move_is_copied",
        "test_gradients_are_summed_over_broadcast_axes",
        "test_blocks_of_a_mask_are_looked_up_first",
        "test_blocks_that_draw_work_are_one_a_multiprocessor",
        "test_a_batch_that_is_no_single_stride_takes_a_launch_a_piece",
        "test_matrices_without_features_get_a_column",
    ): {
        '"first": piece.first': '"first": 0',
        "-(-shape[-1] // columns) * columns": "shape[-1]",
        "if spec.persistent else math.inf": "if not spec.persistent else math.inf",
        "and shape[:-2] != (whole := self.batch(heads))": "and not (whole := self.batch(heads))",
        "if has_states(work.mask) and MASK in spec.arguments": "if MASK in spec.arguments",
        "if not shape[-1]": "if False",
    },
    "cuda/kernels/hopper/forward_tiles.py": {
        "min(sizes) < 2 * ROWS": "max(sizes) < 2 * ROWS",
        "Causal in problem.mask_kinds and all(": "all(",
        "SHORT // 2 < n <= SHORT": "n <= SHORT",
        "scattered(work) * work.problem.group_size": "scattered(work)",
    },
    "cuda/kernels/shared/schedule.py": {
        "features * problem.dtype.itemsize": "problem.dtype.itemsize",
        "max(SCATTERED_BYTES // max(nbytes, 1), 1)": "SCATTERED_BYTES // max(nbytes, 1)",
    },
    "cuda/kernels/hopper/forward.py": {
        "resident=lambda work, tiles: tiles.blocks,": "",
    },
    "test_v_without_features_takes_nothing": {
        " or (may_be_empty and not self.layouts[name].shape[-1])": "",
        "(layout := self.layouts[name]).shape[-1]]": "(layout := self.layouts[name])]",
    },
    "test_kernels_of_gradients_look_up_which_tiles_are_empty": {
        "if name in self.temporaries:": "if False:",
    },
    ("test_what_offsets_depend_on", "cuda/plan/test_score_gradients.py::test_the_gradient_of_a_table_by_its_offset"): {
        "BY_SEGMENT if segments else BY_QUERY": "BY_QUERY",
    },
    ("test_packed_arrays_are_computed_by_segment", "test_packed_arrays_on_other_gpus"): {
        " if number != self.sink]": "]",
        "if part.gradient and gradient_of_part(number) in self.layouts": "if part.gradient",
        "self.problem.dropout or self.wanted or not": "self.problem.dropout or not",
    },
    "cuda/plan/masks.py": {
        (
            "cuda/test_passes.py::test_saved_or_not[warps]",
            "cuda/test_passes.py::test_beyond_one_length_for_all_nothing_leaks[warpgroups]",
            "cuda/test_passes.py::test_masks[compiled-edges in int32-warps]",
            "cuda/test_passes.py::test_masks[compiled-two edges of a side-warps]",
            "cuda/test_passes.py::test_shapes[simulated-pieces]",
        ): {
            "else band.keys\n": "else seqlen_k\n",
            "shifts[side] = max(-FARTHEST, min(shift, FARTHEST))": "pass",
            "getattr(band_of(found, *sizes), side)": "found[0].at",
        },
    },
    "cuda/kernels/tables.py": {
        "if size >= max(": "if size > max(",
        "longest <= seqlen": "longest < seqlen",
        "and not (scarce and seqlen > MANY)": "",
        "row._replace(blocks=1) if scarce else row": "row",
        "work.segments - 2": "work.segments - 1",
    },
}

"""What a plan chooses fits the device, and ptxas finds room for all of it in registers."""

from itertools import product
from types import SimpleNamespace
from zlib import crc32

import pytest

from numbattn.cuda import plan
from numbattn.cuda.build import assemble, compile_ptx
from numbattn.cuda.tile import SIMULATED

KB = 1024
DEVICES = {cc: SimpleNamespace(cc=cc, shared=shared) for cc, shared in (
    ((7, 5), 64 * KB), ((8, 0), 163 * KB), ((8, 6), 99 * KB), ((9, 0), 227 * KB), ((10, 0), 227 * KB),
    ((12, 0), 99 * KB),
)}  # fmt: skip
DTYPES = tuple(plan.ITEM_BYTES)
MASKS = ("band",), ("bands",), ("band", "dense"), ("band", "bits"), ("band", "blocks"), ("bands", "blocks", "dense")
EVERY = list(product(plan.PASSES, DEVICES.values(), DTYPES, plan.HEAD_DIMS, plan.HEAD_DIMS))
SHARE = 13  # one in so many is compiled


def shared_bytes(factory, tiles, dtype, d, e):
    item = plan.ITEM_BYTES[dtype]
    return plan.PASSES[factory][-1](tiles, item, max(item, 4), d, e)


@pytest.mark.parametrize(("head_dim", "rounded"), [(0, 32), (1, 32), (32, 32), (33, 64), (129, 256)])
def test_head_dims_are_rounded_up(head_dim, rounded):
    assert plan.rounded("head_dim", head_dim) == rounded


def test_larger_head_dims_are_refused():
    with pytest.raises(ValueError, match="head_dim_v: got 257, at most 256 on a GPU"):
        plan.rounded("head_dim_v", 257)


@pytest.mark.parametrize(("factory", "dtype"), [(factory, dtype) for factory in plan.PASSES for dtype in DTYPES])
def test_every_plan_fits_its_device(factory, dtype):
    for device, d, e, crowded in product(DEVICES.values(), plan.HEAD_DIMS, plan.HEAD_DIMS, (False, True)):
        tiles = plan.tiles_of(factory, device, dtype, d, e, crowded)
        assert shared_bytes(factory, tiles, dtype, d, e) <= device.shared
        assert tiles.unit == "fma" or device.cc >= (8, 0)


def choices():
    """A part of all that a plan can choose, the same in each run; mask, dropout and alignment are drawn."""
    for i, (factory, device, dtype, d, e) in enumerate(EVERY):
        draw = crc32(str(i).encode())
        if draw % SHARE:
            continue
        draw //= SHARE
        kernel = factory.split(":")[1]
        more = {"backward_kv": {"out_dtypes": (dtype, dtype)}, "backward_q": {"out_dtypes": (dtype,)}}.get(kernel, {})
        if kernel == "backward_kv":
            more["sums_of"] = plan.sums_of_kv(device, dtype, d, e)[-(draw % 2)]
        tiles, key = plan.plan(
            factory, device, dtype, d, e, mask=MASKS[draw % 6], dropout=bool(draw // 6 % 2),
            nbytes=(0, 16, 16)[draw // 12 % 3], **more,
        )  # fmt: skip
        name = f"{kernel} sm_{''.join(map(str, device.cc))} {dtype} {d} {e} {'+'.join(MASKS[draw % 6])}"
        yield pytest.param(factory, tiles, key, id=name)


def hopper_choices():
    """Every row that a plan can choose on Hopper, for one kind of mask, and dropout, of each."""
    kinds = "plain", "long", "narrow", "dropout", "cells", "cells dropout"
    for i, (d, e, of) in enumerate(product(range(64, 257, 64), range(64, 257, 64), kinds)):
        narrow, cells, dropout = (word in of for word in ("narrow", "cells", "dropout"))
        table = plan.HOPPER_LONG if of == "long" else plan.HOPPER_NARROW if narrow else plan.HOPPER_FORWARD
        missing = max(d, e) not in table
        if missing or (d != e and (i % 4 and (d, e) != (192, 128))):
            continue
        dtype, bands = ("float16", "bfloat16")[i % 2], MASKS[:1] if narrow else MASKS[:2]
        mask = MASKS[2 + i % 4] if cells else bands[i % len(bands)]
        keys = plan.LONG if of == "long" else 100
        tiles, key = plan.hopper_plan(dtype, d, e, keys, narrow, mask, dropout, group_size=1, seqlen_q=keys)
        yield pytest.param(tiles, key, id=f"{of} {dtype} {d} {e} {'+'.join(mask)}")


@pytest.mark.skipif(SIMULATED, reason="looks at PTX")
@pytest.mark.parametrize(("tiles", "key"), list(hopper_choices()))
def test_nothing_is_spilled_on_hopper(tiles, key):
    """Nor are products of warpgroups serialised, nor the registers not dealt out anew."""
    source = key.source()
    ptx = compile_ptx(source, key.cc, key.name)
    _, report = assemble(ptx, key.cc)
    assert (report.spills, report.stack, report.losses) == (0, 0, ())
    assert source.shared <= DEVICES[9, 0].shared
    assert all(word in ptx for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "mbarrier.try_wait"))


@pytest.mark.parametrize(("size", "rounded"), [(1, 64), (64, 64), (65, 128), (130, 192), (256, 256)])
def test_head_dims_on_hopper_are_multiples_of_64(size, rounded):
    _, key = plan.hopper_plan("float16", size, 8, 1, False, ("band",), dropout=False, group_size=1, seqlen_q=1)
    assert dict(key.parameters)["head_dim"] == rounded


def test_the_row_on_hopper_is_that_of_so_many_keys():
    def row(keys, narrow, *grids, head_dim, bands="band", dropout=False):
        return plan.hopper_plan("float16", head_dim, 64, keys, narrow, (bands, *grids), dropout, 1, 1000)[0]

    few, many = plan.LONG - 1, plan.LONG
    for size, usual in plan.HOPPER_FORWARD.items():
        long, narrow = (table.get(size, usual) for table in (plan.HOPPER_LONG, plan.HOPPER_NARROW))
        assert [row(n, False, head_dim=size) for n in (0, few, many, 10 * many)] == [usual, usual, long, long]
        assert [row(n, True, head_dim=size) for n in (1, few, many)] == [narrow, narrow, long]
        assert row(many, True, "dense", head_dim=size) == plan.HOPPER_CELLS[size]
        assert row(many, True, head_dim=size, bands="bands", dropout=True) == plan.HOPPER_CELLS[size]


@pytest.mark.parametrize(("consumers", "group_size", "seqlen_q", "abreast"), [
    (4, 8, 1, 4), (4, 8, 64, 4), (4, 8, 65, 2), (4, 8, 129, 1), (4, 1, 1, 1), (4, 6, 1, 2), (3, 6, 64, 3), (2, 3, 1, 1),
])  # fmt: skip
def test_heads_share_a_job_that_has_room_for_them(consumers, group_size, seqlen_q, abreast):
    row = plan.Warpgroups(64, consumers, 2, 2)
    assert plan.heads_abreast(row, ("band",), group_size, seqlen_q) == abreast
    assert plan.heads_abreast(row, ("bands",), group_size, seqlen_q) == 1


@pytest.mark.parametrize("keys", [plan.LONG - 1, plan.LONG])
def test_few_queries_have_the_row_in_which_most_heads_share(keys):
    def row(head_dim, group_size, seqlen_q, bands="band"):
        narrow = keys < plan.LONG
        return plan.hopper_plan("float16", head_dim, 64, keys, narrow, (bands,), False, group_size, seqlen_q)[0]

    instead = (plan.HOPPER_NARROW if keys < plan.LONG else plan.HOPPER_LONG)[128]
    assert (instead.consumers, plan.HOPPER_FORWARD[128].consumers) == (3, 2)
    assert row(128, 8, 64) == row(128, 2, 1) == plan.HOPPER_FORWARD[128]
    assert {row(128, *others) for others in [(1, 1), (3, 64), (8, 65), (8, 64, "bands")]} == {instead}
    assert row(64, 8, 128) == plan.HOPPER_FORWARD[64]


@pytest.mark.parametrize(("cc", "dtype", "expected"), [
    ((9, 0), "float16", plan.HOPPER), ((9, 0), "bfloat16", plan.HOPPER), ((9, 0), "float32", "forward_simt:forward"),
    ((8, 0), "float16", "forward_simt:forward"), ((10, 0), "bfloat16", "forward_simt:forward"),
])  # fmt: skip
def test_warpgroups_are_for_hopper(cc, dtype, expected):
    assert plan.forward_factory(DEVICES[cc], plan.ITEM_BYTES[dtype]) == expected


def tight(factory, cc, dtype, head_dim, head_dim_v, nbytes, **others):
    """Bytes that ptxas spills whatever the tiles: float64 on Turing, the longest rows where they are not aligned."""
    if not factory.endswith("backward_kv"):
        return 0
    if cc < (8, 0) and dtype == "float64":
        return 64
    return 128 if max(head_dim, head_dim_v) == 256 and not nbytes else 0


@pytest.mark.skipif(SIMULATED, reason="looks at PTX")
@pytest.mark.parametrize(("factory", "tiles", "key"), list(choices()))
def test_nothing_is_spilled(factory, tiles, key):
    source = key.source()
    _, report = assemble(compile_ptx(source, key.cc, key.name), key.cc)
    allowed = tight(factory, key.cc, **dict(key.parameters))
    assert report.spills <= allowed
    assert report.stack <= allowed
    assert not report.losses
    sizes = (dict(key.parameters)[name] for name in ("dtype", "head_dim", "head_dim_v"))
    assert source.shared == shared_bytes(factory, tiles, *sizes), "plan.py counts the bytes otherwise than the kernel"

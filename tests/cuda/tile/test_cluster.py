"""Blocks of a cluster that fill each other's stages."""

import re

import numpy as np
import pytest

from numbattn.cuda.build import Source, compile_ptx
from numbattn.cuda.compiler import types
from numbattn.cuda.tile import (
    WARPGROUP,
    DeadlockError,
    Pipeline,
    RaceError,
    SharedMemory,
    acquire,
    advance,
    allocate,
    block_index,
    cluster_rank,
    columns,
    device,
    dot,
    fence_async_proxy,
    full,
    get,
    init_pipelines,
    load,
    put,
    put_in_peer,
    release_in_peer,
    save,
    simt,
    simulate,
    stage,
    sync_cluster,
    sync_warpgroup,
    thread_index,
    wait,
    warpgroup_index,
    wgmma,
    wgmma_wait,
)
from tests.tools.launch import MISUSED, compiled_only, launch, simulated, simulated_only
from tests.tools.ptx import AccessError
from tests.tools.ptx import DeadlockError as InterpretedDeadlock

HOPPER = 9, 0, "a"
ROUNDS = 5


def run(kernel, *arrays, shared, clusters=1, warpgroups=1):
    launch(kernel, (2 * clusters, 1, 1), WARPGROUP * warpgroups, shared.nbytes, *arrays, cc=HOPPER, cluster=2)
    return arrays[-1]


def test_where_a_block_is():
    def kernel(y):
        warpgroup = warpgroup_index()
        if thread_index() == WARPGROUP:
            y[block_index()] = 10 * cluster_rank() + warpgroup
        sync_cluster()

    y = run(kernel, np.zeros(6), shared=SharedMemory(), clusters=3, warpgroups=2)
    np.testing.assert_array_equal(y, [1, 11] * 3)


def exchange_of(place, layout, acquires=acquire, releases=release_in_peer):
    """A kernel in which each block gives its peer the rows of its own, and saves what comes, round after round."""
    shared, slots = place
    PIPELINE = Pipeline.within(shared, slots, readers=1, in_cluster=True)

    def kernel(x, y):
        init_pipelines(PIPELINE)
        sync_cluster()
        S = stage(PIPELINE, warpgroup_index())
        for number in range(ROUNDS):
            first = ((number * 2 + cluster_rank()) * 2 + warpgroup_index()) * 64
            acquires(S)
            put_in_peer(S, S.tile, load(x, layout, first))
            wait(S)
            save(y, get(S.tile, layout), first)
            sync_warpgroup()
            releases(S)
            S = advance(S, 2)
        sync_cluster()

    return kernel


PLACES = {
    "float32": (np.float32, 64, lambda shared: shared.tile(64, 64, np.float32, stages=4)),
    "float16": (np.float16, 64, lambda shared: shared.tile(64, 64, np.float16, stages=4)),
    "boxes": (np.float16, 128, lambda shared: shared.boxes(64, 128, np.float16, stages=4)),
    "a stage": (np.float16, 64, lambda shared: shared.boxes(64, 64, np.float16, stages=2)),
}


@pytest.mark.parametrize("name", PLACES)
def test_exchange(rng, name):
    """By two warpgroups, through stages of their own: sums of a warpgroup go 16 bytes at a time to boxes."""
    dtype, cols, of = PLACES[name]
    shared = SharedMemory()
    kernel = exchange_of((shared, of(shared)), wgmma(cols))
    x = rng.standard_normal((ROUNDS * 2 * 2 * 64, cols)).astype(dtype).astype(np.float32)
    y = run(kernel, x, np.zeros_like(x), shared=shared, warpgroups=2)
    np.testing.assert_array_equal(y.reshape(ROUNDS, 2, 2, -1), x.reshape(ROUNDS, 2, 2, -1)[:, ::-1])


def test_statistics(rng):
    """A number for each row, held by four lanes, into a line."""
    shared, VECTOR = SharedMemory(), wgmma(64).row_vector()
    PIPELINE = Pipeline.within(shared, shared.tile(1, 64, np.float32), readers=1, in_cluster=True)

    def kernel(x, y):
        init_pipelines(PIPELINE)
        sync_cluster()
        S = stage(PIPELINE, 0)
        put_in_peer(S, S.tile.T, load(x, VECTOR, 64 * cluster_rank()))
        wait(S)
        save(y, get(S.tile.T, VECTOR), 64 * cluster_rank())
        sync_cluster()

    x = rng.standard_normal(128).astype(np.float32)
    y = run(kernel, x, np.zeros_like(x), shared=shared)
    np.testing.assert_array_equal(y, np.roll(x, 64))


def product_of(fence):
    """A kernel that multiplies what comes from the peer by warpgroups."""
    shared = SharedMemory()
    RIGHT = shared.boxes(16, 64, np.float16)
    PIPELINE = Pipeline.within(shared, shared.boxes(64, 64, np.float16), readers=1, in_cluster=True)
    SUMS, PART = wgmma(64), simt(16, 64, WARPGROUP, 4, 16)

    def kernel(x, z):
        init_pipelines(PIPELINE)
        put(allocate(RIGHT), load(x, PART, 0))
        fence_async_proxy()
        sync_cluster()
        S = stage(PIPELINE, 0)
        put_in_peer(S, S.tile, load(x, SUMS, 64 * cluster_rank()))
        wait(S)
        fence()
        z0 = wgmma_wait(dot(SUMS, columns(S.tile, 1, 4), allocate(RIGHT)), 0)
        save(z, z0, 64 * cluster_rank())
        sync_cluster()

    return kernel, shared


@device
def no_fence():
    pass


def test_products(rng):
    kernel, shared = product_of(fence_async_proxy)
    x = rng.standard_normal((128, 64)).astype(np.float16)
    z = run(kernel, x, np.zeros((128, 64), np.float32), shared=shared)
    np.testing.assert_allclose(z, np.roll(x, 64, 0)[:, 16:32].astype(np.float64) @ x[:16], atol=1e-3)


def test_a_product_of_what_comes_needs_a_fence(rng):
    kernel, shared = product_of(no_fence)
    error, text = (RaceError, "fence_async_proxy") if simulated() else (AccessError, "the peer stored without a fence")
    with pytest.raises(error, match=text):
        run(kernel, np.ones((128, 64), np.float16), np.zeros((128, 64), np.float32), shared=shared)


@device
def nobody(stage):
    pass


def test_nobody_releases():
    shared = SharedMemory()
    kernel = exchange_of((shared, shared.tile(64, 64, np.float32, stages=2)), wgmma(64), releases=nobody)
    x = np.zeros((ROUNDS * 2 * 2 * 64, 64), np.float32)
    with pytest.raises(DeadlockError if simulated() else InterpretedDeadlock, match=r"wait for .*(free|mbarrier)"):
        run(kernel, x, np.zeros_like(x), shared=shared, warpgroups=2)


@simulated_only
def test_nobody_acquires():
    """The peer may still read what is overwritten then."""
    shared = SharedMemory()
    kernel = exchange_of((shared, shared.tile(64, 64, np.float32, stages=2)), wgmma(64), acquires=nobody)
    x = np.zeros((ROUNDS * 2 * 2 * 64, 64), np.float32)
    with pytest.raises(RaceError, match=r"no barrier between|cannot know"):
        simulate(kernel, (2, 1, 1), 2 * WARPGROUP, shared.nbytes, x, np.zeros_like(x), cluster=2)


def test_one_block_waits_for_the_cluster():
    def kernel(y):
        if cluster_rank() == 0:
            sync_cluster()
            wait(stage(PIPELINE, 0))

    shared = SharedMemory()
    PIPELINE = Pipeline.within(shared, shared.tile(1, 128, np.float32), readers=1, in_cluster=True)
    with pytest.raises((DeadlockError, InterpretedDeadlock, RaceError)):
        run(kernel, np.zeros(1), shared=shared)


def test_only_whole_tiles():
    shared, LAYOUT, ZERO = SharedMemory(), wgmma(64), np.float32(0)
    PIPELINE = Pipeline.within(shared, shared.tile(2, 64, np.float32), readers=1, in_cluster=True)

    def kernel(y):
        S = stage(PIPELINE, 0)
        put_in_peer(S, S.tile, full(LAYOUT, ZERO))

    with pytest.raises(MISUSED, match=r"put_in_peer: a tile of .* is not"):
        run(kernel, np.zeros(1), shared=shared)


@compiled_only
def test_the_kernel_says_how_large_clusters_are():
    def kernel(y):
        sync_cluster()

    found = [compile_ptx(Source(kernel, types.void(types.float32[:]), 32, cluster=n), HOPPER) for n in (1, 2)]
    assert [re.findall(r"^\.reqnctapercluster (.*)$", ptx, re.M) for ptx in found] == [[], ["2, 1, 1"]]


FAULTS = {
    "    filled.arrive(known)\n": "",
    "    known[0, unit] = number\n": "",
    "there = there.T if shared.plan.transposed else there": "pass",
    "stage.barrier(True, 1 - simulator.rank()).arrive()": "stage.barrier(True).arrive()",
    "simulator.block().cluster.meet()": "pass",
    "b.xor(emit_rank(b), I32(1))": "emit_rank(b)",
    "b.select(is_odd, x, y)": "b.select(is_odd, y, x)",
    "lane * 8 + ": "lane * 4 + ",
    "cuda/tile/pipeline.py": {
        "                emit_arrival_of_bytes(b, filled, I32(stage.pipeline.tile.size))\n": "                pass\n",
        "WARPGROUP if pipeline.in_cluster else pipeline.fills": "pipeline.fills",
    },
    "cuda/tile/races.py": {
        "        self.clocks[1, me, units] = self.clocks[0, me, units]\n": "",
    },
}

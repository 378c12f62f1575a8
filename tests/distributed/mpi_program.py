"""What processes of MPI do in test_mpi.py: `mpiexec -n 2 python -m tests.distributed.mpi_program same`."""

import os
import signal
import sys
import time
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn.distributed import mpi

from .alarms import Alarm, alarmed

Q, K, V, DO = np.random.default_rng(0).standard_normal((4, 2, 300, 16))


def same(ring, world):
    """As on one device, and as on as many simulated ranks, bit for bit."""
    score = [na.Alibi(np.array([0.1, 0.2])), na.Sink(0.5), na.Score(lambda s, batch, head, i, j: s - 0.01 * abs(i - j))]
    options = {"causal": True, "dropout": na.Dropout(0.3, 1), "score": score}
    want_o, want = na.attention_vjp(Q, K, V, **options)
    for plan in ("ring", "heads"):
        o, backprop = nad.attention_vjp(ring, *map(ring.split, (Q, K, V)), plan=plan, **options)
        grads = backprop(ring.split(DO))
        got = [*map(ring.join, (o, *grads)), *grads.score]
        for x, y in zip(got, (want_o, *want(DO), *want(DO).score), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    own = na.KVCache(*(x[None] for x in map(ring.split, (K, V))), np.array([ring.split(K).shape[1]], np.int32))
    o = nad.attention_over_keys(ring, Q[None, :, -4:], own, score=na.Sink(0.5))
    np.testing.assert_allclose(o[0], na.attention(Q[:, -4:], K, V, score=na.Sink(0.5)), rtol=1e-12, atol=1e-12)
    bits = [x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)]
    simulated = nad.Simulated(ring.ranks)
    alike = simulated.join(nad.attention(simulated, *map(simulated.split, bits)))
    found = ring.join(nad.attention(ring, *map(ring.split, bits)))
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tobytes() == alike.tobytes()
    differs(ring, world)


def differs(ring, world):
    """An error on all ranks, which then go on."""
    parts = ring.split(Q)
    with pytest.raises(ValueError, match=r"scale: got 0.5 on rank 0, 1.5 on rank 1, expected the same on all ranks"):
        nad.attention(ring, *[parts] * 3, scale=0.5 + ring.rank)
    with pytest.raises(ValueError, match=r"call: got forward on rank 0, over_keys on rank 1, expected the same"):
        (nad.attention_over_keys if ring.rank else nad.attention)(ring, *[parts] * 3)
    with pytest.raises(ValueError, match=r"parts: got .*\(2, \.\.\., 16\) on rank 0, .*\(2, \.\.\., 8\) on rank 1"):
        ring.join(parts[..., : 16 - 8 * ring.rank])
    with pytest.raises((TypeError, ValueError), match=r"parts: got .* of object, expected arrays of numpy, of numbers"):
        ring.join(parts.astype(object) if ring.rank else parts)
    np.testing.assert_array_equal(ring.join(parts), Q)
    other = nad.Mpi(world, "contiguous" if ring.rank else "zigzag")
    for call in (nad.attention, nad.attention_over_keys):
        with pytest.raises(ValueError, match="order: got zigzag on rank 0, contiguous on rank 1"):
            call(other, *[parts] * 3)


# ------------------------------------------------------------------------------------------- calls that end halfway
def interrupted(ring, world):
    """Ranks that time out, are interrupted, or leave out a call."""
    check(ring)
    for scene in (leaves_out_a_call, others_wait, is_interrupted_while_it_waits, does_not_reset, makes_another_ring,
                  alarms):  # fmt: skip
        world.Barrier()
        usual, ring.timeout = ring.timeout, 0.2
        scene(ring, world)
        ring.timeout = usual
        world.Barrier()
        ring.reset()
        check(ring)
    assert not any(mpi.UNFINISHED)


def results(ring, seed=0, plan="ring"):
    scale = 1 + seed
    o, backprop = nad.attention_vjp(ring, *map(ring.split, (Q, K, V)), scale=scale, score=na.Sink(0.5), plan=plan)
    grads = backprop(ring.split(DO))
    return [*map(ring.join, (o, *grads)), *grads.score]


def check(ring, seed=0, plan="ring"):
    o, backprop = na.attention_vjp(Q, K, V, scale=1 + seed, score=na.Sink(0.5))
    grads = backprop(DO)
    for x, y in zip(results(ring, seed, plan), (o, *grads, *grads.score), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def is_refused(ring):
    for call in (partial(results, ring), partial(ring.join, ring.split(Q))):
        with pytest.raises(nad.Interrupted, match=r"All ranks have to call its reset\(\), or make a new ring"):
            call()


def leaves_out_a_call(ring, world):
    """One notices by its time-out, and tells all others: who waits, and who comes later."""
    if ring.rank != 1:
        with pytest.raises((TimeoutError, nad.Interrupted), match=r"has waited 0\.2 s for all others|of rank"):
            results(ring)
    world.Barrier()
    is_refused(ring)


def others_wait(ring, world):
    """For what a rank has not sent. They are told at once."""
    def begun(_):
        raise Alarm

    ring.timeout = 30.0
    if ring.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "_begun", begun)
            with pytest.raises(Alarm):
                results(ring)
    else:
        with pytest.raises(nad.Interrupted, match="halfway: that of rank"):
            results(ring)
    is_refused(ring)


def is_interrupted_while_it_waits(ring, world):
    """MPI does not write into memory that has another use by then."""
    if ring.rank == 0:
        with pytest.raises(Alarm), alarmed(0.05, 0.05):
            results(ring)
    world.Barrier()
    is_refused(ring)
    others = [np.zeros(n) for n in [1, 2] * 20 + [ring.split(K).size] * 5]
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        world.Iprobe()
    assert not any(x.any() for x in others)


def does_not_reset(ring, world):
    if ring.rank != 1:
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"has waited 0\.2 s for all others"):
                ring.reset()
        is_refused(ring)
    world.Barrier()


def makes_another_ring(ring, world):
    if ring.rank == 0:
        with pytest.raises(Alarm), alarmed(0.05, 0.05):
            results(ring)
    check(nad.Mpi(world))
    is_refused(ring)


def alarms(ring, world):
    """At random moments, in random ranks, once or again and again."""
    rng = np.random.default_rng(0)
    for _ in range(6):
        seed, who = rng.integers(3), rng.integers(1, 2**ring.ranks)
        plan = "ring" if ring.ranks > 2 else rng.choice(["ring", "heads"])
        delay, again = rng.uniform(1e-5, 5e-3), rng.choice([0, 2e-4])
        try:
            with alarmed(delay if who >> ring.rank & 1 else 0, again):
                check(ring, seed, plan)
            check(ring, seed, plan)  # as a program that has not been told
        except (Alarm, TimeoutError, nad.Interrupted):
            pass
        world.Barrier()
        ring.timeout = 30.0
        ring.reset()
        check(ring, seed, plan)
        world.Barrier()
        ring.timeout = 0.2


def killed(ring, world):
    nad.attention(ring, *map(ring.split, (Q, K, V)))
    if ring.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    nad.attention(ring, *map(ring.split, (Q, K, V)))


def main(name):
    from mpi4py import MPI

    ring = nad.Mpi(MPI.COMM_WORLD, timeout=30.0)
    {"same": same, "interrupted": interrupted, "killed": killed}[name](ring, MPI.COMM_WORLD)
    sys.stdout.write(f"done {ring.rank}\n")  # at once, or lines of both are mixed


if __name__ == "__main__":
    main(sys.argv[1])

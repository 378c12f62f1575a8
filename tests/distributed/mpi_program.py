"""What processes of MPI do in test_mpi.py: `mpiexec -n 2 python -m tests.distributed.mpi_program same`."""

import os
import signal
import sys

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad

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


def differs(ring, world):
    with pytest.raises(ValueError, match=r"scale: got 0.5 on rank 0, 1.5 on rank 1, expected the same on all ranks"):
        nad.attention(ring, *map(ring.split, (Q, K, V)), scale=0.5 + ring.rank)


def gone(ring, world):
    """A rank that does something else: the other one does not wait for ever."""
    if ring.rank == 0:
        with pytest.raises(TimeoutError, match="rank 0 has waited 5 s for all others"):
            nad.attention(ring, *map(ring.split, (Q, K, V)))
    world.Barrier()
    os._exit(0)  # MPI's own end would wait for what has not arrived


def killed(ring, world):
    nad.attention(ring, *map(ring.split, (Q, K, V)))
    if ring.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    nad.attention(ring, *map(ring.split, (Q, K, V)))


def main(name):
    from mpi4py import MPI

    ring = nad.Mpi(MPI.COMM_WORLD, timeout=5.0)
    {"same": same, "differs": differs, "gone": gone, "killed": killed}[name](ring, MPI.COMM_WORLD)
    sys.stdout.write(f"done {ring.rank}\n")  # at once, or lines of both are mixed


if __name__ == "__main__":
    main(sys.argv[1])

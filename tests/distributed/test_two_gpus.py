"""Two ranks, on two GPUs by each driver of GPUs. Simulated ones do the same on a CPU: what is asked for is right."""

import os
import time
import warnings
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn import distributed as nad
from numbattn import reference

from ..accuracy import assert_all_accurate, random
from .pair import Pair

M, N, HEADS, HEADS_K = 301, 333, 4, 2  # of the whole: lengths that are multiples of nothing
DIM = {"float32": 32, "bfloat16": 64}  # of the latter Hopper adds dQ up by atomics, unless it is to be deterministic
DTYPE = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


# ---------------------------------------------------------------------------------------------------- where ranks are
@pytest.fixture(scope="module")
def pair():
    found = Pair()
    yield found
    found.stop()


def simulated(pair):
    return lambda work, *arguments: work(nad.Simulated(2), np, *arguments)


def devices(pair):
    cupy = cupy_of_two_gpus()
    return lambda work, *arguments: work(nad.Devices([0, 1]), cupy, *arguments)


def nccl(pair):
    cupy_of_two_gpus()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, where there is none
        from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("no NCCL")

    def run(work, *arguments):
        answers = pair.answers(work, *arguments)
        assert answers == ["", ""], "\n".join(answers)

    return run


def cupy_of_two_gpus():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    return cupy


def drivers(*some):
    """For tests that have work(ring, xp, *arguments) run, in each process that has ranks."""
    marks = {simulated: [], devices: [pytest.mark.gpu], nccl: [pytest.mark.gpu]}
    return pytest.mark.parametrize("driver", [pytest.param(x, marks=marks[x], id=x.__name__) for x in some])


def own(ring, by_rank):
    """Of a list for all ranks what is this process's."""
    return by_rank[ring.rank] if hasattr(ring, "rank") else by_rank


def each(ring, make, parts):
    """make(part) on the device of each part of this process."""
    if hasattr(ring, "rank"):
        return make(parts)
    found = []
    for rank, part in enumerate(parts):
        with ring._at(rank):
            found.append(make(part))
    return found


def on_host(x):
    if isinstance(x, np.ndarray):
        return x
    with x.device:
        return x.get()


# ------------------------------------------------------------------------------------------------------------ results
class Case(NamedTuple):
    """options: of a generator of random numbers, and what places an array."""

    options: Any
    plan: str = "ring"
    dtype: str = "float32"


def biased(rng, on):
    return {"score": [na.Bias(on(rng.random((M, N)))), na.Alibi(on(rng.random(HEADS)))]}


CASES = {  # of few kinds of kernels, which take their time to compile
    "full": Case(lambda rng, on: {}),
    "causal": Case(lambda rng, on: {"causal": True}),
    "window": Case(lambda rng, on: {"mask": na.Window(70, 5)}),
    "offsets": Case(lambda rng, on: {"mask": na.Causal(on(rng.integers(-M, N, (1, HEADS))))}),
    "segments": Case(lambda rng, on: {"mask": na.Segments([0, 100, 250, M], [0, 90, 91, N]) & na.Causal()}),
    "dropout": Case(lambda rng, on: {"causal": True, "dropout": na.Dropout(0.2, seed=3)}),
    "sink": Case(lambda rng, on: {"causal": True, "score": [na.Softcap(3.0), na.Sink(rng.random(HEADS))]}),
    "bias": Case(biased),
    "heads": Case(lambda rng, on: {"causal": True}, plan="heads"),
    "bias by heads": Case(biased, plan="heads"),
    "half": Case(lambda rng, on: {"causal": True}, dtype="bfloat16"),
    "half by heads": Case(lambda rng, on: {"causal": True}, plan="heads", dtype="bfloat16"),
}


def inputs(dtype):
    """do, q, k, v, dlse: the same in all processes."""
    rng = np.random.default_rng(1)
    others = [random(rng, (1, *shape, DIM[dtype]), DTYPE[dtype]) for shape in [(HEADS, M)] * 2 + [(HEADS_K, N)] * 2]
    return *others, random(rng, (1, HEADS, M), np.float32)


def split(ring, xp, arrays):
    *others, dlse = map(xp.asarray, arrays)
    return *map(ring.split, others), ring.split(dlse, axis=-1)


def results(ring, parts, deterministic=False, **options):
    """o, lse, dq, dk, dv and the gradients of the score, in whole."""
    do, q, k, v, dlse = parts
    o, saved = nad.attention_forward(ring, q, k, v, **options)
    grads = nad.attention_backward(ring, do, saved, dlse=dlse, deterministic=deterministic)
    lse = ring.join([of_rank.lse for of_rank in saved] if isinstance(saved, list) else saved.lse, axis=-1)
    return [ring.join(o), lse, *map(ring.join, grads), *grads.score]


def check_case(ring, xp, name, on=None):
    """on: what places the arrays of masks and scores."""
    options, plan, dtype = CASES[name]
    arrays = inputs(dtype)
    found = results(ring, split(ring, xp, arrays), plan=plan, **options(np.random.default_rng(2), on or xp.asarray))
    assert_all_accurate([*map(on_host, found)], *arrays, **options(np.random.default_rng(2), np.asarray))
    return found


@drivers(simulated, devices, nccl)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(pair, driver, name):
    driver(pair)(check_case, name)


def check_deterministic(ring, xp):
    parts = split(ring, xp, inputs("bfloat16"))
    one, other = (results(ring, parts, causal=True, plan="ring", deterministic=True) for _ in range(2))
    assert [on_host(x).tobytes() for x in one] == [on_host(x).tobytes() for x in other]


@drivers(devices, nccl)
def test_gradients_are_equal_bit_for_bit(pair, driver):
    driver(pair)(check_deterministic)


# ----------------------------------------------------------------------------------------------------------- decoding
def check_decoding(ring, xp, dtype):
    """Over arrays, and over caches: the first rank's has nothing of the second sequence."""
    rng, dim = np.random.default_rng(3), DIM[dtype]
    q, k, v = (random(rng, (2, heads, n, dim), DTYPE[dtype]) for heads, n in ((HEADS, 3), (HEADS_K, N), (HEADS_K, N)))
    tokens = [np.array([100, 0]), np.array([N - 100, N])]

    def cache(rank):
        found = na.KVCache.zeros(2, HEADS_K, 352, dim, like=xp.asarray(q))
        first, end = (sum(tokens[:n], np.zeros(2, int)) for n in (rank, rank + 1))
        packed = (np.concatenate([x[b, :, first[b] : end[b]] for b in range(2)], axis=1) for x in (k, v))
        found.append(*map(xp.asarray, packed), segments=np.append(0, tokens[rank].cumsum()))
        return found

    queries, options = each(ring, xp.asarray, own(ring, [q, q])), {"causal": True, "score": na.Sink(0.5)}
    exact = reference.attention_forward(q, k, v, **options)[0]
    of_arrays = nad.attention_over_keys(ring, queries, *(ring.split(xp.asarray(x)) for x in (k, v)), **options)
    of_caches = nad.attention_over_keys(ring, queries, each(ring, cache, own(ring, [0, 1])), **options)
    for found in (of_arrays, of_caches):
        for o in map(on_host, found if isinstance(found, list) else [found]):
            assert o.dtype == DTYPE[dtype]
            np.testing.assert_allclose(o.astype(np.float64), exact, atol=1e-5 if dtype == "float32" else 2e-2)


@drivers(simulated, devices, nccl)
@pytest.mark.parametrize("dtype", DTYPE)
def test_decoding(pair, driver, dtype):
    driver(pair)(check_decoding, dtype)


# ----------------------------------------------------------------------------------------------- streams and devices
@contextmanager
def own_streams(ring, cupy):
    """A stream that waits for no other one, current on each device of this process."""
    numbers, streams = getattr(ring, "devices", [cupy.cuda.Device().id]), []
    for number in numbers:
        with cupy.cuda.Device(number) as device:
            device.synchronize()
            streams.append(cupy.cuda.Stream(non_blocking=True))
            streams[-1].use()
    try:
        yield
    finally:
        for number in numbers:
            with cupy.cuda.Device(number) as device:
                device.synchronize()
                cupy.cuda.Stream.null.use()


def check_streams(ring, cupy):
    """What a call is given is written on the current streams, and late."""
    arrays = inputs("float32")
    parts = split(ring, cupy, arrays)

    def written_late(part):
        busy, found = cupy.ones((4096, 4096), np.float32), cupy.full_like(part, np.nan)
        for _ in range(10):
            busy = busy @ busy / 4096
        found[...] = part
        return found

    with own_streams(ring, cupy):
        late = [each(ring, written_late, x) for x in parts]
        found = [on_host(x) for x in results(ring, late, causal=True, plan="ring")]
    assert_all_accurate(found, *arrays, causal=True)


@drivers(devices, nccl)
def test_current_streams(pair, driver):
    driver(pair)(check_streams)


def check_second_device(ring, cupy):
    """Which has the arrays of masks and scores: gradients of these are there, too."""
    def on(x):
        with cupy.cuda.Device(1):
            return cupy.asarray(x)

    check_case(ring, cupy, "offsets", on)
    for name in ("bias", "bias by heads"):
        assert [x.device.id for x in check_case(ring, cupy, name, on)[5:]] == [1, 1]


@drivers(devices)
def test_arrays_of_the_second_device(pair, driver):
    driver(pair)(check_second_device)


# -------------------------------------------------------------------------------------------------------------- errors
def check_another_shape(ring, xp):
    x = each(ring, lambda rank: xp.zeros((3, 32, 8 + 8 * rank), np.float32), own(ring, [0, 1]))
    with pytest.raises(ValueError, match=r"q: got .*, 8\) on rank 0, .*, 16\) on rank 1, expected the same on all ran"):
        nad.attention(ring, x, x, x)


@drivers(simulated, devices, nccl)
def test_a_rank_with_another_shape(pair, driver):
    driver(pair)(check_another_shape)


def one_is_gone(ring, cupy):
    """All that a rank knows after one call is that the other one has to send something in the next."""
    x = cupy.zeros((2, 64, DIM["float32"]), np.float32)
    nad.attention(ring, x, x, x, plan="ring")
    ring.synchronize(timeout=60)
    if ring.rank == 1:
        time.sleep(1)  # so that all of it has arrived
        os._exit(1)
    nad.attention(ring, x, x, x, plan="ring")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 0 has waited 5 s for all others"):
        ring.synchronize(timeout=5)
    assert time.monotonic() - start < 20


@drivers(nccl)
def test_a_rank_that_is_gone(pair, driver):
    driver(pair)
    assert pair.answers(one_is_gone) == ["", "gone"]


def raise_at(number, usual):
    """The method, but for one of its calls."""
    count = iter(range(10**6))

    def method(*given):
        if next(count) == number:
            raise KeyboardInterrupt
        return usual(*given)

    return method


def check_reset(ring, xp):
    arrays = inputs("float32")
    parts = split(ring, xp, arrays)
    for number in (0, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "_begun", raise_at(number, ring._begun))
            with pytest.raises(KeyboardInterrupt):
                results(ring, parts, causal=True, plan="ring")
        with pytest.raises(nad.Interrupted):
            ring.join(parts[0])
        ring.reset()
        found = results(ring, parts, causal=True, plan="ring")
    assert_all_accurate([*map(on_host, found)], *arrays, causal=True)


@drivers(simulated, devices)
def test_a_call_that_ends_halfway(pair, driver):
    driver(pair)(check_reset)


def one_is_interrupted(ring, cupy):
    """Before it has sent anything, which the other one waits for."""
    x = cupy.zeros((2, 64, DIM["float32"]), np.float32)
    nad.attention(ring, x, x, x, plan="ring")
    ring.synchronize(timeout=60)
    if ring.rank == 1:
        ring._exchanged = raise_at(0, ring._exchanged)
        with pytest.raises(KeyboardInterrupt):
            nad.attention(ring, x, x, x, plan="ring")
    else:
        nad.attention(ring, x, x, x, plan="ring")
        with pytest.raises(TimeoutError, match="rank 0 has waited 5 s for all others"):
            ring.synchronize(timeout=5)
    for call in (lambda: nad.attention(ring, x, x, x), ring.reset):
        with pytest.raises(nad.Interrupted):
            call()
    assert not (x + 1 - 1).any()  # this process's GPU is free


@drivers(nccl)
def test_a_rank_that_is_interrupted(pair, driver):
    driver(pair)
    try:
        assert pair.answers(one_is_interrupted) == ["", ""]
    finally:
        pair.stop()

"""Timing on a GPU: fair rounds on a busy device, checked results, and the memory that a run takes."""

import math
import time
import warnings
from functools import partial

import numpy as np
from common import sampled
from peers import Replay, array_of, available, context_of, cupy, event_seconds, make_forward, release, torch
from tqdm import tqdm

SAMPLE_SECONDS = 0.01  # a sample repeats a run for about this long
SETTLE_SECONDS = 0.3  # of work before a case's samples: a cool GPU runs up to a tenth faster, for a moment


def measure(makers, rounds, same):
    """Samples in seconds by name, largest errors relative to the first peer that runs, and why others do not run.

    makers[name]() prepares a run, a function without arguments that returns a tuple of arrays. same: all of them should
    return the same, so that nothing wrong is timed.
    """
    timers, errors, failed, expected = {}, {}, {}, None
    for name, make in makers.items():
        try:
            with context_of(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend does not run
                run = make()
                result = run()  # warms up, too
                if same:
                    expected = expected or result
                    errors[name] = float(np.max([*map(difference, result, expected)]))  # NaN stays
                repetitions = max(3, math.ceil(SAMPLE_SECONDS / event_seconds(run)))
            timers[name] = partial(sample, name, run, repetitions)
        except Exception as error:  # out of memory or not supported: not running is a result, too
            failed[name] = why(error)
        run = result = None
        if name in failed:
            release()
    del expected
    settle(timers)
    return sampled(timers, rounds), errors, failed


def settle(timers, seconds=SETTLE_SECONDS):
    """Keep the GPU busy until its clock has settled."""
    end = time.perf_counter() + seconds
    while timers and time.perf_counter() < end:
        for run in timers.values():
            run()


def sample(name, run, repetitions):
    with context_of(name):
        return event_seconds(run, repetitions)


def prepare(name, of, arrays, graph=False, **options):
    """One pass of a peer as a run."""
    run = one_pass(make_forward(name, arrays, **options), of)
    return Replay(run) if graph else run


def one_pass(forward, of):
    """A pass as a run; forward() returns o and backward, see peers."""
    if of == "forward":
        def run():
            return (forward()[0],)
    elif of == "both":
        def run():
            o, backward = forward()
            return o, *backward()
    else:
        _, run = forward()
    return run


def difference(got, expected):
    """The largest difference, relative to the largest expected element."""
    got, expected = (x.astype(np.promote_types(x.dtype, np.float32)) for x in map(array_of, (got, expected)))
    return float(abs(got - expected).max() / abs(expected).max())


def medians(samples):
    return {name: float(np.median(seconds)) for name, seconds in samples.items()}


def why(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


def progress(items):
    return tqdm(list(items), disable=None, leave=False)


def extra_bytes(run):
    """What a fresh pool of CuPy has taken from the GPU at the end, plus the growth of torch's peak."""
    pool = cupy.cuda.MemoryPool()
    torch_runs = bool(available("float32", ["efficient"]))
    if torch_runs:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with cupy.cuda.using_allocator(pool.malloc):
        run()
        cupy.cuda.get_current_stream().synchronize()
    nbytes = pool.total_bytes()
    pool.free_all_blocks()  # or they stay as long as the process
    return nbytes + (torch.cuda.max_memory_allocated() - before if torch_runs else 0)

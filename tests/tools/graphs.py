"""Calls in CUDA graphs."""

from contextlib import contextmanager

import cupy


@contextmanager
def own_stream():
    """A stream that waits for no other one, made current when all that was started before is done."""
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def capture(run):
    """What run() returns, and the graph that computes it: nothing is computed before that is launched."""
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    stream.begin_capture()
    results = run()
    return results, stream.end_capture()

"""Run a kernel on several threads, until it is done or a signal handler raises."""

import threading
from _thread import start_new_thread
from contextlib import suppress

import numba
import numpy as np
from numba.np.ufunc import parallel

# units of `work`, see `launch`: a thread does 1e10 to 5e10 in a second
SERIAL = 5e7  # a thread takes as much at once; less than twice that is done before a second thread would help
NEVER = np.zeros(1, np.int32)  # a `stop` that is not set
SHORT = 2e9  # less is done before a signal handler would have to wait


def launch(kernel, blocks, work, scratch):
    """Call kernel(first, last, stop, scratch()) for all blocks, a few at a time, on as many threads as are worthwhile.

    work: roughly the number of multiplications. scratch: allocates the memory of a thread. The kernel checks stop[0]
    before each tile, and returns if it is set. Python runs signal handlers in its main thread, between two bytecodes:
    so if there is much work the calling thread leaves all of it to others, and waits.
    """
    if work < 2 * SERIAL:
        kernel(0, blocks, NEVER, scratch())
        return
    threads = max(1, min(_threads(), blocks, int(work / SERIAL)))
    step = max(1, blocks // (8 * threads), int(blocks * SERIAL / work))
    run = Run(kernel, blocks, step, scratch)
    try:
        run.start(threads, takes_part=work < SHORT)
        run.finish()
    except BaseException:
        run.stop[0] = 1
        run.finish_at_once()
        raise
    if run.error:
        raise run.error


def _threads():
    """As many threads as Numba may use. Asking Numba starts its threads, so it is asked only if they are running."""
    return numba.get_num_threads() if parallel._is_initialized else numba.config.NUMBA_NUM_THREADS


class Run:
    """The blocks of one call; threads take `step` of them at a time."""

    def __init__(self, kernel, blocks, step, scratch):
        self.kernel, self.blocks, self.step, self.scratch = kernel, blocks, step, scratch
        self.next = self.active = 0  # block; threads in the kernel
        self.stop, self.error, self.changed = np.zeros(1, np.int32), None, threading.Condition()

    def start(self, threads, takes_part):
        """takes_part: whether this thread is one of them."""
        for _ in range(threads - takes_part):
            try:
                start_new_thread(self.work, ())
            except RuntimeError:  # too many threads, or the interpreter shuts down
                takes_part = True
        if takes_part:
            self.work()

    def work(self):
        scratch = None
        while (first := self.take()) is not None:
            try:
                scratch = self.scratch() if scratch is None else scratch  # there may be no memory
                self.kernel(first, min(first + self.step, self.blocks), self.stop, scratch)
            except BaseException as error:
                self.error, self.stop[0] = error, 1
            with self.changed:
                self.active -= 1
                self.changed.notify_all()

    def take(self):
        """The first of the next blocks; None if there are none left, or if the call is stopped."""
        with self.changed:
            if self.stop[0] or self.next >= self.blocks:
                return None
            first = self.next
            self.next, self.active = first + self.step, self.active + 1
            return first

    def finish(self):
        """Wait until no thread is in the kernel, nor will be."""
        with self.changed:
            self.changed.wait_for(lambda: not self.active and (self.stop[0] or self.next >= self.blocks))

    def finish_at_once(self):
        """As `finish`, whatever the handlers of further signals raise."""
        while self.active:
            with suppress(BaseException):
                self.finish()

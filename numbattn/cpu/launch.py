"""Run a kernel on several threads, until it is done or a signal handler raises."""

from _thread import start_new_thread
from collections import deque
from contextlib import suppress
from queue import SimpleQueue

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
        run.finish_at_once()
        raise
    if run.error:
        raise run.error


def _threads():
    """As many threads as Numba may use. Asking Numba starts its threads, so it is asked only if they are running."""
    return numba.get_num_threads() if parallel._is_initialized else numba.config.NUMBA_NUM_THREADS


class Run:
    """The blocks of one call; threads take `step` of them at a time.

    A handler may raise between any two bytecodes of the calling thread. So it takes no lock, and the others count
    themselves, each step a single native call: who has entered, and who has left. What is counted only grows.
    """

    def __init__(self, kernel, blocks, step, scratch):
        self.kernel, self.blocks, self.step, self.scratch = kernel, blocks, step, scratch
        self.firsts, self.stop, self.error = deque(range(0, blocks, step)), np.zeros(1, np.int32), None
        self.entered, self.left, self.woken = [], [], SimpleQueue()

    def start(self, threads, takes_part):
        """takes_part: whether this thread is one of them."""
        for _ in range(threads - takes_part):
            try:
                start_new_thread(self.help, ())
            except RuntimeError as error:  # too many threads, or the interpreter shuts down
                if "new thread" not in str(error):  # it is a handler's
                    raise
                takes_part = True
        if takes_part:
            self.work()

    def help(self):
        """What another thread does."""
        self.entered.append(True)  # before it takes a block: see `finish`
        try:
            self.work()
        except BaseException as error:
            self.error = error
            self.end()
        self.left.append(True)
        self.woken.put(True)

    def work(self):
        scratch = None
        while (first := self.take()) is not None:
            scratch = self.scratch() if scratch is None else scratch  # there may be no memory
            self.kernel(first, min(first + self.step, self.blocks), self.stop, scratch)

    def take(self):
        """The first of the next blocks; None if there are none left."""
        with suppress(IndexError):
            return self.firsts.popleft()

    def end(self):
        """Start no more blocks, and end those that have started."""
        self.stop[0] = 1
        self.firsts.clear()

    def finish(self):
        """Wait until no other thread is in the kernel, nor will be."""
        while self.firsts or len(self.left) < len(self.entered):  # in this order
            self.woken.get()

    def finish_at_once(self):
        """End, whatever the handlers of further signals raise. Other threads hold all memory that they use."""
        while True:
            try:
                self.end()
                return self.finish()
            except BaseException:
                continue

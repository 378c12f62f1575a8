"""Run a kernel on several threads, until it is done or a signal handler raises."""

import os
from _thread import start_new_thread
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import get_ident, main_thread

import numba
from numba.np.ufunc import parallel

from ..base import teams
from . import scratch
from .compile import BLOCKS, NBYTES, OBJECTS, STEP, STEPS, STOP

# units of `work`, see `launch`: a thread does 1e10 to 5e10 in a second
SERIAL = 5e7  # a thread takes as much at once; less than twice that is done before a second thread would help
SHORT = 2e9  # a thread does less before a signal handler would have to wait
PATIENCE = 0.1 if os.name == "nt" else None  # seconds: on Windows no signal ends a longer wait


def launch(call, blocks, work, nbytes, arrays=()):
    """Run a Call for all blocks, a few at a time, on as many threads as are worthwhile.

    work: roughly the number of multiplications; nbytes: the memory of a thread; arrays: those that the Call lacks. The
    kernel checks stop[0] before each tile, and returns if it is set. Python runs signal handlers in its main thread,
    between two bytecodes: so if there is much work the main thread leaves all of it to others, and waits.
    """
    if is_one_step(work):
        memory = scratch.take(nbytes)
        words = words_of(call, blocks, max(1, blocks), nbytes, (memory, *arrays))
        call.function.ctypes(words.buffer_info()[0])
    else:
        limit = _threads()
        threads = max(1, min(limit, blocks, int(work / SERIAL)))
        step = max(1, blocks // (8 * threads), int(blocks * SERIAL / work))
        takes_part = work < threads * SHORT or get_ident() != main_thread().ident
        team = teams.team() if threads > 1 else None
        size = team.size(threads, limit, takes_part) if team else 0
        memory = scratch.take((size or threads) * nbytes)
        words = words_of(call, blocks, step, nbytes, (memory, *arrays))
        run = Run(call, words, (memory, arrays))
        if size:
            run.compute, threads = partial(team.run, call.function.address, run.address, size), 1
        try:
            run.start(threads, takes_part)
            run.finish()
        except BaseException:
            run.finish_at_once()
            raise
        if run.error:
            raise run.error
    scratch.give(memory)


def is_one_step(work):
    """Whether so much work is done in a single native call, which no signal handler can end."""
    return work < 2 * SERIAL


def words_of(call, blocks, step, nbytes, arrays):
    """What an entry reads, which finds the addresses of arrays faster than Python does: see `compile.Kernel`."""
    words = call.words[:]
    if len(arrays) != words[OBJECTS]:
        raise ValueError(f"arrays: got {len(arrays)}, expected {words[OBJECTS]}")
    words.fromlist([*map(id, arrays)])
    words[BLOCKS], words[STEP], words[NBYTES] = blocks, step, nbytes
    return words


def _threads():
    """As many threads as Numba may use. Asking Numba starts its threads, so it is asked only if they are running."""
    return numba.get_num_threads() if parallel._is_initialized else numba.config.NUMBA_NUM_THREADS


class Run:
    """The blocks of one call; each thread takes some of them at a time, in one native call.

    A handler may raise between any two bytecodes of the calling thread. So it takes no lock, and the others count
    themselves, each step a single native call: who has entered, and who has left. What is counted only grows. Each
    locks its queue: who counts sees what was written before, without the GIL, too.
    """

    def __init__(self, call, words, held):
        self.words, self.address, self.held, self.error = words, words.buffer_info()[0], (call, held), None
        self.compute = partial(call.function.ctypes, self.address)
        self.entered, self.left, self.woken = SimpleQueue(), SimpleQueue(), SimpleQueue()

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
            self.compute()

    def help(self):
        """What another thread does."""
        self.entered.put(True)  # before it takes a block: see `finish`
        try:
            self.compute()
        except BaseException as error:
            self.error, self.words[STOP] = error, 1
        self.left.put(True)
        self.woken.put(True)

    def has_blocks(self):
        """Whether a thread is still to take some."""
        return not self.words[STOP] and self.words[STEPS] * self.words[STEP] < self.words[BLOCKS]

    def finish(self):
        """Wait until no other thread is in the kernel, nor will be."""
        while self.has_blocks() or self.left.qsize() < self.entered.qsize():  # in this order
            with suppress(Empty):
                self.woken.get(timeout=PATIENCE)

    def finish_at_once(self):
        """End, whatever the handlers of further signals raise. Other threads hold all memory that they use."""
        while True:
            try:
                self.words[STOP] = 1
                return self.finish()
            except BaseException:
                continue

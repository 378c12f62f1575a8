"""Blocks of a CPU kernel, without its threads."""

from threading import Timer

from numbattn.cpu import scratch
from numbattn.cpu.compile import STEPS, STOP
from numbattn.cpu.launch import words_of


def run_blocks(call, first, end, nbytes, arrays=(), stop_after=None):
    """Run blocks [first, end) of a Call, one after the other; arrays: those that it lacks. It is told to stop after so
    many seconds."""
    memory = scratch.take(nbytes)
    words = words_of(call, end, 1, nbytes, (memory, *arrays))
    words[STEPS] = first
    if stop_after is not None:
        Timer(stop_after, words.__setitem__, (STOP, 1)).start()
    call.function.ctypes(words.buffer_info()[0])

"""Exceptions that come from outside, at any moment of a call: as Ctrl-C."""

import gc
import signal
from contextlib import contextmanager
from pathlib import Path

import numbattn

PACKAGE = str(Path(numbattn.__file__).parent)


class Alarm(BaseException):
    pass


@contextmanager
def alarmed(seconds, again=0.0):
    """An Alarm is raised so many seconds later, and again and again, where numbattn runs then; for 0 there is none. Not
    in finalizers of what other tests have left, from which no exception comes: garbage waits."""
    gc.disable()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def handler(_, frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            raise Alarm
        frame = frame.f_back

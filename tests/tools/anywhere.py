"""A signal handler's exception between any two instructions of Python, one after the other and without signals.

The hard case that signals seldom hit is found at once, and a failure can be repeated.
"""

import sys


class Stop(BaseException):
    pass


def stopped(call, at, path):
    """Whether a Stop at instruction number `at`, of those that this thread executes in files that begin with `path`,
    ends call()."""
    try:
        instructions(call, path, at)
    except Stop:
        return True
    return False


def instructions(call, path, stop=None):
    """How many of them call() executes."""
    number = 0

    def trace(frame, event, _):
        nonlocal number
        if not frame.f_code.co_filename.startswith(path):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if number == stop:
                raise Stop  # which also ends the tracing
            number += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return number

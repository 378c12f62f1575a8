"""Functions that run in turn, each until it switches to another one, as greenlets do.

Where greenlet is not installed they are threads of the system; to switch takes these ten times as long.
"""

import threading

try:
    from greenlet import getcurrent as current
    from greenlet import greenlet as Fiber
except ImportError:

    class Fiber:
        """A function that runs when it is switched to. At its end its parent, which made it, goes on."""

        def __init__(self, run=None):
            self.run, self.baton = run, threading.Lock()
            self.baton.acquire()
            self.parent, self.thread = run and current(), run and threading.Thread(target=self._start, daemon=True)

        def _start(self):
            _here.fiber = self
            self.run = self.run()  # None: it has ended
            self.parent.baton.release()

        def switch(self):
            """Run it until it, or another one, switches back."""
            me = current()
            if self.thread and not self.thread.ident:
                self.thread.start()
            else:
                self.baton.release()
            me.baton.acquire()
            if self.thread and not self.run:
                self.thread.join()

    _here = threading.local()  # .fiber: that of this thread

    def current():
        """The fiber that runs."""
        if not hasattr(_here, "fiber"):
            _here.fiber = Fiber()
        return _here.fiber


__all__ = ["Fiber", "current"]

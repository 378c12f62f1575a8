"""Races: who has read and written what in simulated shared memory, and what each thread can know of that.

Every thread has a vector clock, and barriers merge these. Reading what nobody wrote, and two accesses that no barrier
orders, are errors that name the threads, in whatever order the threads happened to run. Units that copy or multiply in
the background count as threads of their own.
"""

import mmap

import numpy as np

GRANULE = 2  # bytes of shared memory that share one record
WORKERS = 32  # the most units of a block that work in the background
NOBODY = -1  # the number of a thread, after all others
NOTHING = np.int32(-1)  # known at no time
BARRIERS, BARRIERS_OR_WAITS = slice(1), slice(None, None, 2)  # of clocks, see WatchedMemory
PAGE_BITS = 10  # of granules in a page: pages quickly show that nobody has read something lately


class RaceError(RuntimeError):
    """Two threads touch the same shared memory with no barrier between.

    >>> ROWS = simt(2, 4, 32, 1, 4)
    >>> def kernel(x):
    ...     put(allocate(PLACE), load(x, ROWS, 0))
    ...     get(allocate(PLACE), TILE)
    >>> try:
    ...     run(kernel, ARRAY)
    ... except RaceError as error:
    ...     print(error)
    thread 1 reads what thread 0 wrote at byte 4 of shared memory, with no barrier between
    """


class WatchedMemory:
    """Bytes of shared memory, and for each granule and thread the time of the last access.

    Each thread counts its own time: clocks[0, t, u] is the time of thread u up to which thread t is sure that all has
    happened, clocks[1, t, u] the time up to which it has also been shared with the units that work in the
    background, clocks[2, t, u] the time up to which at least thread u no longer waits for a barrier. A unit in the
    background is a thread of its own, known by a name. Its time is the number of its last piece of work: a thread that
    has seen the end of (unit, number) knows everything up to that number.

    me: returns the number of the calling thread.
    """

    def __init__(self, nbytes, threads, me, workers=WORKERS):
        self.me, self.threads = me, threads
        granules = -(-nbytes // GRANULE)
        self.bytes = np.full(granules * GRANULE, 0xFF, np.uint8)
        self.granules = np.arange(granules)
        self.writer = np.full(granules, NOBODY, np.int32)
        self.written = np.zeros(granules, np.int32)
        pages = mmap.mmap(-1, 4 * (threads + workers) * granules + 1)  # zeros that take no time until they are touched
        self.read = np.ndarray((threads + workers, granules), np.int32, pages)
        self.last_read = np.zeros(((granules >> PAGE_BITS) + 1, threads + workers), np.int32)  # per page
        self.fetched_by = np.full(granules, -1, np.int32)  # who waits for what is on its way to a granule
        self.fetches = {}  # what each thread fetches: group by group, the last one open
        self.clocks = np.zeros((3, threads + workers + 1, threads + workers + 1), np.int32)
        self.clocks[..., NOBODY] = -1  # no thread knows of writes that are still to come
        np.fill_diagonal(self.clocks[0, :threads, :threads], 1)
        self.numbers = {f"thread {number}": number for number in range(threads)}  # and the units' numbers, after them
        self.tiles, self.pipelines = {}, {}  # see shared_memory.allocate, pipeline.init_pipelines

    def merge(self, threads, told=NOTHING):
        """Merge the clocks of these threads at a barrier: each knows what all have done so far, and what others have
        told there. Returns it."""
        known = np.maximum(self.clocks[:, threads].max(axis=1), told)
        self.clocks[:, threads] = known[:, None]
        self.clocks[0, threads, threads] += 1
        return known

    def merge_waits(self, threads):
        """Like `merge`, for a slice, but each learns only that none of the others waits any more."""
        now = self.clocks[0, threads, threads].diagonal()
        self.clocks[2, threads, threads] = now
        self.clocks[0, threads, threads] += np.eye(len(now), dtype=np.int32)

    def tell(self):
        """What this thread knows now, for others to `learn`."""
        me = self.me()
        known = self.clocks[:, me].copy()
        self.clocks[0, me, me] += 1
        return known

    def learn(self, known):
        mine = self.clocks[:, self.me()]
        np.maximum(mine, known, out=mine)

    def who_does_not_know(self, known, threads):
        """The threads that have not yet seen every event in `known`."""
        return [thread for thread in threads if np.count_nonzero(known[0] > self.clocks[0, thread])]

    def share(self):
        """Share what this thread has written, and what has come to it in the background, with the units that work
        there."""
        me, units = self.me(), slice(self.threads, None)
        self.clocks[1, me, me] = self.clocks[0, me, me]
        self.clocks[1, me, units] = self.clocks[0, me, units]
        self.clocks[0, me, me] += 1

    def unit(self, name):
        """The number of a unit that works in the background."""
        return self.numbers.setdefault(name, len(self.numbers))

    def start_work(self, name):
        unit = self.unit(name)
        self.clocks[0, unit, unit] += 1
        return unit, self.clocks[0, unit, unit]

    def note_end(self, unit, number):
        """This thread now knows that a unit's work has ended up to this number."""
        mine = self.clocks[:, self.me(), unit]
        np.maximum(mine, number, out=mine)

    def note_fetch(self, granules):
        """Record that what was written just now arrives when this thread waits for it."""
        self.fetched_by[granules] = self.me()
        self.fetches.setdefault(self.me(), [[]])[-1].append(granules)

    def note_group(self):
        """Begin another group for what this thread fetches from now on."""
        self.fetches.setdefault(self.me(), [[]]).append([])

    def note_arrival(self, pending=None):
        """All that this thread has fetched has arrived, except the last `pending` groups and the open one."""
        groups = self.fetches.pop(self.me(), [[]])
        end = len(groups) if pending is None else max(len(groups) - 1 - pending, 0)
        for granules in (x for group in groups[:end] for x in group):
            self.fetched_by[granules] = -1
        if end < len(groups):
            self.fetches[self.me()] = groups[end:]

    def _demand_arrival(self, granules):
        on_the_way = self.fetched_by[granules]
        if (on_the_way >= 0).any():
            at, by = GRANULE * int(granules[on_the_way >= 0].flat[0]), on_the_way.max()
            what = f"thread {self.me()} touches byte {at} of shared memory"
            raise RaceError(f"{what}, which thread {by} has fetched and not waited for")

    def note_read(self, granules, pages, work=None, by=None):
        """Record a read by this thread, or by work that it starts, or that the threads in the slice `by` start
        together. pages: those that the granules are in, see `pages_of`."""
        if self.fetches:
            self._demand_arrival(granules)
        me = self.me()
        self._demand_written(granules, "reads what {} wrote", work, by)
        who, when = work or (me, self.clocks[0, me, me])
        self.read[who, granules] = self.last_read[pages, who] = when

    def note_write(self, granules, pages, work=None, of=BARRIERS, needs_fence=True):
        """Record a write. of: which clocks must know of the readers, see WatchedMemory; one of these is enough.
        needs_fence: whether work takes place where what was written has to be shared."""
        if self.fetches:
            self._demand_arrival(granules)
        me = self.me()
        self._demand_written(granules, "overwrites what {} wrote", needs_fence and work)
        known = self.clocks[of, me, :NOBODY].max(0)
        (readers,) = (self.last_read[pages].max(0) > known).nonzero()
        if len(readers):
            missed = self.read[readers[:, None], granules.ravel()] > known[readers, None]
            self._demand(~missed.any(0), granules.ravel(), readers[missed.argmax(0)], "overwrites what {} reads")
        self.writer[granules], self.written[granules] = work or (me, self.clocks[0, me, me])

    def _demand_written(self, granules, what, work, by=None):
        """Check that this thread, or all in `by`, know of it; and where work begins, that it has been shared."""
        writer, written = self.writer[granules], self.written[granules]
        for time in range(1 + bool(work)):
            known = self.clocks[time, self.me()] if by is None else self.clocks[time, by].min(0)
            late = written > known[writer]
            if np.count_nonzero(late):
                self._say_what_is_late(time, granules, late, what, by)

    def _say_what_is_late(self, time, granules, late, what, by):
        me, writer = self.me(), self.writer[granules]
        if what.startswith("reads") and (writer == NOBODY).any():
            at = GRANULE * int(granules[writer == NOBODY].flat[0])
            raise RaceError(f"thread {me} reads byte {at} of shared memory, which nobody has written")
        late &= writer != NOBODY
        if late.any():
            who = me
            if by is not None:
                who = by.start + self.clocks[time, by, writer[late].flat[0]].argmin()
            missing = ("barrier between", "fence_async_proxy() before the barrier")[time]
            self._demand(~late, granules, writer, what, missing, who)

    def _demand(self, known, granules, other, what, missing="barrier between", who=None):
        if not known.all():
            at, other = GRANULE * int(granules[~known].flat[0]), list(self.numbers)[int(other[~known].flat[0])]
            who = self.me() if who is None else who
            raise RaceError(f"thread {who} {what.format(other)} at byte {at} of shared memory, with no {missing}")


def pages_of(granules):
    """The pages of some granules, and those in between. More of them than are touched make a write slower, not wrong.
    """
    return slice(granules.min() >> PAGE_BITS, (granules.max() >> PAGE_BITS) + 1) if granules.size else slice(1)

"""Two processes, each with a GPU, that are the ranks of a ring by NCCL."""

import multiprocessing
import time
import traceback
from multiprocessing.connection import wait

from numbattn import distributed as nad

LIMIT = 100  # seconds in which processes have to do what they are asked for, and start
LAST = 20  # when one has failed, for which others may wait for ever


class Pair:
    """They start when they are first asked, and again after one has failed."""

    def __init__(self):
        self.processes, self.pipes = [], []

    def answers(self, work, *arguments):
        """What comes of work(ring, cupy, *arguments) in each process: "" or what went wrong."""
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((work, *arguments))
        found, end = dict.fromkeys(self.pipes, "no answer"), time.monotonic() + LIMIT
        waiting = list(self.pipes)
        while waiting and (ready := wait(waiting, end - time.monotonic())):
            for pipe in ready:
                waiting.remove(pipe)
                found[pipe] = received(pipe)
                if found[pipe]:
                    end = min(end, time.monotonic() + LAST)
        if any(found.values()):
            self.stop()
        return list(found.values())

    def start(self):
        from cupy.cuda.nccl import get_unique_id

        context, unique_id = multiprocessing.get_context("spawn"), get_unique_id()
        for rank in range(2):
            pipe, other_end = context.Pipe()
            process = context.Process(target=serve, args=(rank, unique_id, other_end), daemon=True)
            process.start()
            other_end.close()  # so that the pipe ends with the process
            self.pipes.append(pipe)
            self.processes.append(process)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def received(pipe):
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return "gone"


def serve(rank, unique_id, pipe):
    """In a process of its own."""
    import cupy
    from cupy.cuda.nccl import NcclCommunicator

    cupy.cuda.Device(rank).use()
    ring = nad.Nccl(NcclCommunicator(2, unique_id, rank))
    while True:
        work, *arguments = pipe.recv()
        try:
            work(ring, cupy, *arguments)
            pipe.send("")
        except BaseException:  # that of pytest.raises, too
            pipe.send(traceback.format_exc())

"""Numbers in global memory by which blocks tell one another how far they are.

    one block                               another block
    bulk_add(...)                           wait_for_post(turns, 3, 1)
    tma_store_complete()                    bulk_add(...)
    post(turns, 3, 1)

Blocks run in no known order, and not all at once: a block may wait only for work that was drawn before its own, see
`kernels.shared.schedule.next_number`. In plain Python blocks run one after the other.
"""

from ..compiler import TypingError, types
from . import simulator
from .emit import I64, VOID, asm
from .fragment import name_of
from .synchronisation import emit_element
from .world import primitive


class Posted:
    """Who of a block waits for a number to grow, in plain Python."""

    def __init__(self, what, count):
        self.what, self.waiting = what, []


def _posted():
    return simulator.barrier("a post", 1, Posted)


def _check(word, array):
    if array.ndim != 1 or name_of(array.dtype) != "uint32":
        raise TypingError(f"{word}: got {array.dtype} of {array.ndim} axes, expected uint32 of 1")


@primitive
def post(array, index, number):
    """Set a number, by one thread: whoever waits for it sees what this thread has stored before.

    >>> def kernel(turns):
    ...     if thread_index() == 1:
    ...         post(turns, 0, 5)
    ...     if thread_index() == 0:
    ...         wait_for_post(turns, 0, 5)
    >>> run(kernel, np.zeros(1, np.uint32))
    array([5], dtype=uint32)
    """
    _check("post", array)
    array[index], posted = number, _posted()
    simulator.block().ready.extend(posted.waiting)
    posted.waiting = []


@post.lowering
def post(array, index, number):
    _check("post", array)

    def generate(b, *values):
        at = b.ptrtoint(emit_element(b, array, *values[:2]), I64)
        asm(b, "st.release.gpu.global.u32 [$0], $1;", VOID, at, values[2], effect=True)

    return types.void(array, types.int32, types.int32), generate


@primitive
def wait_for_post(array, index, number):
    """Wait until a number is at least this one, by one thread. See `posts`.

    >>> def kernel(turns, y):
    ...     if thread_index() == 0:
    ...         wait_for_post(turns, 0, 5)
    ...         y[0] = turns[0]
    ...     if thread_index() == 1:
    ...         post(turns, 0, 7)
    >>> run(kernel, np.zeros(1, np.uint32), np.zeros(1))
    array([7.])
    """
    _check("wait_for_post", array)
    while array[index] < number:
        _posted().waiting.append(simulator.thread())
        simulator.block().wait(_posted())


@wait_for_post.lowering
def wait_for_post(array, index, number):
    _check("wait_for_post", array)
    text = """{
        .reg .pred there;
        .reg .u32 found;
    again:
        ld.acquire.gpu.global.u32 found, [$0];
        setp.ge.u32 there, found, $1;
        @there bra done;
        bra again;
    done:
        fence.proxy.async.global;
    }"""

    def generate(b, *values):
        at = b.ptrtoint(emit_element(b, array, *values[:2]), I64)
        asm(b, text, VOID, at, values[2], effect=True)

    return types.void(array, types.int32, types.int32), generate

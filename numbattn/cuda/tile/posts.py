"""Numbers in global memory by which blocks tell one another how far they are: what a block has stored before it posts
one, TMA's stores too once they are complete, is there for whoever has waited for it.

Blocks run in no known order, and not all at once: a block may wait only for what was drawn before its own work.
"""

from ..compiler import types
from . import simulator
from .emit import I64, VOID, asm
from .synchronisation import check_atomic, emit_element
from .world import primitive


class Waiting(list):
    """The threads of a block that wait for a post, in plain Python, where blocks run one after the other."""

    what = "a post"


def _waiting():
    return simulator.barrier(Waiting.what, 1, lambda what, count: Waiting())


def _lower(word, text):
    def lower(array, index, number):
        check_atomic(word, array, {"uint32"})

        def generate(b, matrix, index, number):
            asm(b, text, VOID, b.ptrtoint(emit_element(b, array, matrix, index), I64), number, effect=True)

        return types.void(array, types.int32, types.int32), generate

    return lower


@primitive
def post(array, index, number):
    """Set an element of an array of uint32, by one thread. See `posts`.

    >>> def kernel(turns):
    ...     if thread_index() == 1:
    ...         post(turns, 0, 5)
    >>> run(kernel, np.zeros(1, np.uint32))
    array([5], dtype=uint32)
    """
    check_atomic("post", array, {"uint32"})
    array[index] = number
    simulator.block().ready.extend(_waiting())
    _waiting().clear()


post = post.lowering(_lower("post", "st.release.gpu.global.u32 [$0], $1;"))


@primitive
def wait_for_post(array, index, number):
    """Wait until an element is at least this number, by one thread. See `posts`.

    >>> def kernel(turns):
    ...     if thread_index() == 0:
    ...         wait_for_post(turns, 0, 5)
    ...         post(turns, 0, 6)
    ...     if thread_index() == 1:
    ...         post(turns, 0, 5)
    >>> run(kernel, np.zeros(1, np.uint32))
    array([6], dtype=uint32)
    """
    check_atomic("wait_for_post", array, {"uint32"})
    while array[index] < number:
        _waiting().append(simulator.thread())
        simulator.block().wait(_waiting())


wait_for_post = wait_for_post.lowering(_lower("wait_for_post", """{
    .reg .pred there;
    .reg .u32 found;
again:
    ld.acquire.gpu.global.u32 found, [$0];
    setp.ge.u32 there, found, $1;
    @there bra done;
    bra again;
done:
    fence.proxy.async.global;
}"""))  # fmt: skip

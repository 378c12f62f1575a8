"""The skeleton of a warp-specialised kernel: the last warpgroup is the producer, the others are consumers."""

from functools import reduce

from ...build import Source, TensorMapArgument
from ...tile import (
    WARP,
    WARPGROUP,
    decrease_registers,
    device,
    increase_registers,
    init_pipelines,
    sync_threads,
    thread_index,
    warpgroup_index,
)
from .schedule import overlap_launches

REGISTERS = 65536  # of a multiprocessor


def warp_specialised(pipelines, consumers, registers, consume, *producers, blocks=1, helpers=()):
    """Device functions that begin and end such a kernel: () waits until barriers are ready and the results of earlier
    kernels are there; (arguments of `consume`, a tuple of arguments for each producer) lets every warp take its role.

    registers: of a thread of the producer, and of a consumer. consume: a device function, called by whole warpgroups;
    producers: each called by one thread, the first of a warp of its own. The first producer may also `release` stages,
    since it is the first thread of its warpgroup. blocks: per multiprocessor. helpers: how many of the next warps help,
    and a device function, called by each of them with its number and a last tuple of arguments after the producers'.
    """
    check_registers(registers, consumers, blocks)
    PIPELINES, CONSUMERS, (PRODUCER_REGISTERS, CONSUMER_REGISTERS) = tuple(pipelines), consumers, registers
    first = WARPGROUP * consumers
    threads = [(first + WARP * number, number, function) for number, function in enumerate(producers)]
    produce = reduce(then_by_thread, threads, nobody)
    if helpers:
        produce = then_by_warps(produce, first // WARP, len(producers), *helpers)

    @device
    def begin():
        init_pipelines(*PIPELINES)
        overlap_launches()

    @device
    def part(of_consumers, of_producers):
        sync_threads()                                          # all barriers are ready
        if warpgroup_index() == CONSUMERS:
            decrease_registers(PRODUCER_REGISTERS)
            produce(of_producers)
        else:
            increase_registers(CONSUMER_REGISTERS)
            consume(*of_consumers)

    return begin, part


def check_registers(registers, consumers, blocks):
    """Warpgroups share the registers that a block is launched with: one that asks for more waits for ever."""
    producer, consumer = registers
    wanted, groups = producer + consumers * consumer, consumers + 1
    given = REGISTERS // blocks // (WARPGROUP * groups) // 8 * 8 * groups
    if wanted > given:
        raise ValueError(f"registers: got {producer} and {consumers} times {consumer}, at most {given} in all")


def then_by_thread(before, producer):
    THREAD, NUMBER, function = producer

    @device
    def produce(arguments):
        before(arguments)
        if thread_index() == THREAD:
            function(*arguments[NUMBER])

    return produce


def then_by_warps(before, first, producers, count, function):
    FIRST, PRODUCERS, COUNT = first + producers, producers, count

    @device
    def produce_and_help(arguments):
        before(arguments)
        number = thread_index() // WARP - FIRST
        if 0 <= number < COUNT:
            function(number, *arguments[PRODUCERS])

    return produce_and_help


@device
def nobody(arguments):
    pass


def source_of(kernel, signature, consumers, shared, tiles, blocks=1, cluster=1):
    """The Source of such a kernel. tiles: of the tensor maps among its first arguments, None for one that is not a
    tensor map; blocks: per multiprocessor; cluster: blocks that run together."""
    maps = tuple(TensorMapArgument(i, tile.box) for i, tile in enumerate(tiles) if tile is not None)
    threads = WARPGROUP * (consumers + 1)
    about = {"shared": shared.nbytes, "overlaps": True, "tensor_maps": maps, "blocks": blocks, "cluster": cluster}
    return Source(kernel, signature, threads, **about)

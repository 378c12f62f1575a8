"""`logsumexp` of points of more dimensions than fit into shared memory: their products chunk by chunk, see `chunks`."""

import numpy as np

from ...tile import SharedMemory, device, shape, wgmma
from ...words.arguments import Statistic
from ...words.signatures import signature_of
from ...words.spec import Spec
from ..shared.layouts import DTYPES
from ..shared.warps import source_of, warp_specialised
from .chunks import ChunkSizes, ChunkTiles, chunk_steps
from .logsumexp import MOST, is_gaussian, softmax_of_tiles, whole_steps
from .pairs import REGISTERS
from .parts import LINE_OF_X, LINE_OF_Y, PARTS_OF_X, PARTS_OF_Y, WIDTH, whole_boxes


def hopper_wide_logsumexp(*, tile_n, consumers, stages, y_stages):
    """The kernel for tiles of 64 points x a consumer and tile_n points y.

    stages: of parts of points; y_stages: of numbers that come with y.
    """
    ACC, S_TILE, shared = np.float32, wgmma(tile_n), SharedMemory()
    tiles = ChunkTiles(tile_n, consumers, stages, y_stages)
    pipelines, producers, consumer_of, of_points = chunk_steps(shared, S_TILE, tiles, ACC)
    _, *scales = whole_steps(ACC)
    no_tile, add_tile, save_lse = softmax_of_tiles(S_TILE, ACC, *scales)

    @device
    def start(given, batch, head, m0):
        return no_tile()

    @device
    def add(found, S, line, Y, n0, given):
        return add_tile(found, S, line, n0, given)

    @device
    def finish(found, given, batch, head, m0):
        save_lse(found, (), given, batch, head, m0)

    compute = consumer_of(start, add, finish)
    begin, take_roles = warp_specialised(pipelines, consumers, REGISTERS[consumers], compute, *producers)

    def kernel(mX, mY, mLineX, mLineY, mLse, seqlen_k, chunks):
        (batches, heads, seqlen_q), (_, _, apart_x), (_, _, apart_y) = shape(mLse), shape(mLineX), shape(mLineY)
        begin()
        sizes = ChunkSizes(seqlen_q, seqlen_k, heads, batches * heads, chunks, apart_x, apart_y)
        take_roles(((mLineX, mLse, ()), sizes), ((mX, mY, sizes), ((), mLineY, sizes)))

    signature = signature_of(kernel, SPEC.arguments, DTYPES["bfloat16"], ACC)
    return source_of(kernel, signature, consumers, shared, of_points)


TILES = ChunkTiles(192, 2, 5, 2)


def fits(problem, kind):
    return is_gaussian(problem, kind) and problem.head_dim > MOST


def takes(work):
    return work.device.cc == (9, 0) and fits(work.problem, work.kind)


SPEC = Spec(
    hopper_wide_logsumexp,
    (PARTS_OF_X.map, PARTS_OF_Y.map, LINE_OF_X, LINE_OF_Y, Statistic("lse"), "seqlen_k", "chunks"),
    tiles=lambda work: (TILES,),
    parameters=lambda work, tiles: tiles._asdict(),
    numbers=lambda work, tiles: {"chunks": whole_boxes(work.problem.head_dim) // WIDTH},
    persistent=True,
    arch="a",
)

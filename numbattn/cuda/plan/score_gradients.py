"""The steps for gradients of a score's arrays. They write to the gradient itself, or to sums that a few array
operations turn into it, see `scores.finish_gradients`; or to partial sums of either, if one matrix of the array serves
many."""

import math
from functools import partial

import numpy as np

from ...call.passes import gradient_of_part
from ..build import Key
from ..kernels import bias_gradients, diagonal_sums
from ..kernels.any.function_gradient import spec_of as spec_of_function
from ..kernels.any.score_gradient import OWN_NUMBERS, entry_sums, spec_of
from ..kernels.any.sum_parts import TILES as SUMMED_AT_ONCE
from ..kernels.any.sum_parts import sum_parts
from ..kernels.any.table_gradient import TILES as ENTRIES_AT_ONCE
from ..kernels.any.table_gradient import table_gradient
from ..kernels.scores import ALIGNED, BY_MATRIX, ENTRIES, READS, kind, place_of_part
from ..kernels.shared.exact_sums import SIZE
from ..kernels.shared.visibility import has_states
from ..views import View, contiguous, fits_tensor_map
from ..words.arguments import Own, TmaMatrix
from ..words.steps import (
    SUMS_OF_DS,
    At,
    Step,
    array_of_offset,
    partial_sums,
    sums_of_part,
)

SCRATCH, DIAGONALS_A_MULTIPROCESSOR = "scratch of diagonals", 4
THREADS = 256  # that a multiprocessor holds, however many registers they take
EVEN = 4  # most parts, if blocks fill a GPU once or twice anyway, but not evenly


def add_gradient(planner, number):
    """The steps of the gradient of a part's array."""
    own, kind_of_part = gradient_of_part(number), kind(planner.score[number])
    if partial_sums(own) in planner.temporaries:  # a kernel of the pass writes them
        add_sum(planner, own)
        return
    if kind_of_part.gradient == READS:
        add_gradient_of_function(planner, number, own)
        return
    if SUMS_OF_DS in planner.temporaries:
        if kind_of_part.gradient == ENTRIES:
            add_table_of_sums(planner, number, own)
        return
    shape = planner.layouts[own].shape
    about = {"after": place_of_part(planner.score, number)}
    if kind_of_part.gradient == ENTRIES:
        add_gradient_of_table(planner, number, kind_of_part.offset, shape, about)
        return
    is_matrix = kind_of_part.own_axes == 2
    rows, cols = (1,) * (2 - len(shape)) + shape[-2:] if is_matrix else (1, 1)
    lead = shape[:-2] if is_matrix else shape
    sizes = planner.problem.seqlen_q, planner.problem.seqlen_k
    sums_cols, sums_rows = cols < sizes[1], cols == sizes[1] and rows < sizes[0]
    about |= {"sums_cols": sums_cols, "sums_rows": sums_rows}
    tiles = planner.fitting(gradient_spec(planner, own, **about))
    rounded_twice = planner.layouts[own].dtype != planner.problem.sum_dtype and len(planner.axes) > 1
    fits = is_matrix and len(shape) > 1 and (rows, cols) == (sizes[0], 1 if sums_cols else sizes[1])
    if sums_rows or rounded_twice or not fits:
        own = sums_of_part(number)
        shape = *lead, tiles.tile_m if sums_rows else sizes[0], 1 if sums_cols else sizes[1]
        planner.add_temporary(own, shape, planner.problem.sum_dtype)
    m_blocks, n_blocks = planner.tiles_of(tiles, planner.work(gradient_spec(planner, own, **about)))
    blocks = (1 if sums_rows else m_blocks) * (1 if sums_cols else n_blocks)
    add_own(planner, partial(gradient_spec, planner, **about), tiles, own, shape, blocks)


def add_gradient_of_function(planner, number, own):
    """The steps of the gradients of a function's arrays, one after the other in one array."""
    ((elements,), _, dtype, _), exact = planner.layouts[own], planner.call.deterministic
    about = {"after": place_of_part(planner.score, number), "wanted": planner.call.score[number].gradient,
             "sum_dtype": dtype.name, "exact": exact}  # fmt: skip
    if exact:
        name = sums_of_part(number)
        planner.add_temporary(name, (1, elements * SIZE), np.dtype(np.int64), is_zero=True)
        planner.add(spec_of_function(name, **about))
        return
    planner.add_sums_of_reads(own, dtype)
    planner.add(spec_of_function(partial_sums(own), **about))
    add_sum(planner, own)


def gradient_spec(planner, own, **about):
    """The Spec of the kernel for the gradient of a bias, or of slopes, which writes to an array of this name."""
    about |= {"out_dtype": planner.layouts[own].dtype.name}
    return first_spec(planner, bias_gradients(own, **about))


def add_gradient_of_table(planner, number, offset, shape, about):
    """The steps of the gradient of a RelativeBias' table; offset: its kind."""
    name, (*lead, entries) = sums_of_part(number), shape
    if offset == BY_MATRIX:
        lead = np.broadcast_shapes(lead, planner.layouts[array_of_offset(number)].shape)
    if offset != ALIGNED:
        add_diagonal_sums(planner, name, lead, about)
        return
    spec = partial(spec_of, entry_sums, **about)
    tiles = planner.fitting(spec(name))
    planner.add_temporary(name, (*lead, tiles.tile_m, entries), planner.problem.sum_dtype)
    add_own(planner, spec, tiles, name, (*lead, tiles.tile_m, entries), entries)


def diagonals_spec(planner, own, **about):
    """The Spec of the kernel for sums by diagonal, which writes to an array of this name."""
    return first_spec(planner, diagonal_sums(own, **about))


def first_spec(planner, routes):
    """The Spec of the first Route that takes the work, and whose TMA takes the matrices with their present layouts."""

    def fits(route):
        matrices = (planner.layouts[x.name] for x in route.specs[0].arguments if isinstance(x, TmaMatrix))
        return all(map(fits_tensor_map, matrices))

    (spec,) = planner.first_of(*filter(fits, routes))
    return spec


def add_diagonal_sums(planner, name, lead, about):
    """For a table: sums by diagonal, which `kernels.scores.relative` turns into the gradient."""
    spec = diagonals_spec(planner, name, **about)
    tiles, dtype = planner.fitting(spec), planner.problem.sum_dtype
    m_blocks, n_blocks = planner.tiles_of(tiles, planner.work(spec))
    most = DIAGONALS_A_MULTIPROCESSOR * planner.device.multiprocessors
    width, diagonals = tiles.tile_m + tiles.tile_n, tiles.tile_m // tiles.tile_n * (m_blocks - 1) + n_blocks
    planner.add_temporary(name, (*lead, diagonals, width // tiles.tile_n, tiles.tile_n), dtype)
    planner.add_temporary(SCRATCH, (most, tiles.tile_m, width), dtype, is_zero=True)
    size = dtype.itemsize
    step, pitch = tiles.tile_m * width * size, width * size
    skewed = View((tiles.tile_m - 1) * size, size, (most, tiles.tile_m, tiles.tile_n), (step, pitch - size, size))
    plain = View(0, size, (most, tiles.tile_m, width), (step, pitch, size))
    scratch, shape = {"skewed": At(SCRATCH, skewed), "plain": At(SCRATCH, plain)}, (*lead, diagonals, width)
    add_own(planner, partial(diagonals_spec, planner, **about), tiles, name, shape, diagonals, scratch, most)


def add_own(planner, spec_of_target, tiles, name, shape, blocks, scratch=None, most=math.inf):
    """The steps of a kernel for an array (*lead, rows, cols), with `blocks` blocks for each of its matrices. If the GPU
    has room for more, the matrices that it is broadcast to are divided into parts, whose sums are then added up.

    spec_of_target: (name of the array that the kernel writes to) -> its Spec; scratch: At, by name.
    """
    *lead, rows, cols = shape
    planner.layouts[name] = contiguous((*lead, 1, rows, cols), planner.layouts[name].dtype)
    spec, target = spec_of_target(name), name
    work = planner.work(spec)
    if has_states(work.mask):
        planner.find_states(spec, tiles, work)
    if (parts := parts_of(planner, spec, tiles, blocks)) > 1:
        target = partial_sums(name)
        planner.add_temporary(target, (*lead, parts, rows, cols), planner.problem.sum_dtype)
        spec = spec_of_target(target)
    key = Key.of(spec.factory, spec.cc(planner.device), **spec.parameters(work, tiles))
    arguments, launches = launches_of(planner, spec)
    for piece, numbers in launches:
        own = numbers["own_batches"] * numbers["own_heads"]
        given = planner.arguments_of(piece, arguments, **numbers, **scratch or {})
        planner.steps.append(Step(key, tiles, min(own * parts * blocks, most), given))
    if parts > 1:
        add_sum(planner, name)


def launches_of(planner, spec):
    """The arguments of a kernel for an Own array; and for each launch the piece of the batch and its OWN_NUMBERS."""
    work, later, found, seen = planner.work(spec), {name: name for name in OWN_NUMBERS}, [], set()
    arguments = [x for argument in spec.arguments for x in planner.flat(argument, later, work)]
    (name,) = (argument.name for argument in spec.arguments if isinstance(argument, Own))
    place = next(i for i, x in enumerate(arguments) if isinstance(x, At) and x.array == name)
    for piece in planner.pieces(arguments):
        pointer, _, (batch, heads, *_), strides = piece.views[place]
        own = batch if strides[0] else 1, heads if strides[1] else 1
        found.append((piece, dict(zip(OWN_NUMBERS, (*own, int(pointer in seen)), strict=True))))
        seen.add(pointer)
    return arguments, found


def parts_of(planner, spec, tiles, blocks):
    """How many parts the matrices that one matrix of an Own array serves are divided into: the fewest that take the
    least time, which is the time of the longest part times the number of waves."""
    source = spec.factory(**spec.parameters(planner.work(spec), tiles))
    resident = min(max(source.blocks, THREADS // source.threads), planner.device.holds(source.shared))
    room = planner.device.multiprocessors * resident
    _, ((piece, numbers), *_) = launches_of(planner, spec)
    own = numbers["own_batches"] * numbers["own_heads"]
    blocks, served = own * blocks, piece.batch * planner.problem.heads // own
    most = min(max(room // blocks, EVEN if blocks < 2 * room else 1), served)
    return min(range(1, most + 1), key=lambda parts: -(-blocks * parts // room) * -(-served // parts))


def add_sum(planner, name):
    """The step that adds up the partial sums of an array, (*lead, parts, rows, cols) or (parts, elements), into it:
    both are contiguous."""
    parts_name, tile = partial_sums(name), SUMMED_AT_ONCE
    shape = planner.layouts[parts_name].shape
    *lead, parts, rows, cols = shape if len(shape) > 2 else (*shape, 1)
    matrices, elements, dtypes = math.prod(lead), rows * cols, [planner.layouts[x].dtype for x in (parts_name, name)]

    arguments = whole(parts_name, dtypes[0], matrices, parts, elements), whole(name, dtypes[1], matrices, elements)
    key = Key.of(sum_parts, planner.device.cc, dtype=dtypes[0].name, out_dtype=dtypes[1].name)
    planner.steps.append(Step(key, tile, matrices * -(-elements // tile.tile_n), arguments))


def add_table_of_sums(planner, number, own):
    """The step for the gradient of a RelativeBias' table from sums of dS over one or more heads for each of the table's
    heads."""
    sums, grad, tile = planner.layouts[SUMS_OF_DS], planner.layouts[own], ENTRIES_AT_ONCE
    *lead, entries = grad.shape
    *heads, seqlen_q, seqlen_k = sums.shape
    tables = math.prod(lead)
    matrices, name = math.prod(heads) // tables, array_of_offset(number)
    if by_matrix := name in planner.layouts:
        of_heads = planner.at(name, own=0).view
        strides = of_heads.strides[-1:] * 2  # one of the axes has one element
        offset = At(name, of_heads._replace(shape=(tables, matrices), strides=strides), has_batch=False)
    else:
        (offset,) = planner.call.score[number].numbers
    dS = whole(SUMS_OF_DS, sums.dtype, tables, matrices, seqlen_q * seqlen_k)
    arguments = dS, whole(own, grad.dtype, tables, entries), offset, seqlen_q, seqlen_k
    dtypes = {"dtype": sums.dtype.name, "out_dtype": grad.dtype.name}
    key = Key.of(table_gradient, planner.device.cc, **dtypes, by_matrix=by_matrix)
    planner.steps.append(Step(key, tile, tables * -(-entries // tile.tile_n), arguments))


def whole(name, dtype, *shape):
    """A contiguous array that is not laid out by batch and head, in another shape."""
    return At(name, View(0, dtype.itemsize, shape, contiguous(shape, dtype).strides), has_batch=False)

"""The steps for gradients of a score's arrays. They write to the gradient itself, or to sums that a few array
operations turn into it, see `scores.finish_gradients`; or to partial sums of either, if one matrix of the array serves
many."""

import math
from functools import partial

import numpy as np

from ...call.order import gradient_of_part
from ..build import Key
from ..kernels import bias_gradients, diagonal_sums
from ..kernels.any.function_gradient import spec_of as spec_of_reads
from ..kernels.any.score_gradient import OWN_NUMBERS
from ..kernels.any.sum_parts import TILES as SUMMED_AT_ONCE
from ..kernels.any.sum_parts import sum_parts
from ..kernels.any.table_gradient import TILES as ENTRIES_AT_ONCE
from ..kernels.any.table_gradient import table_gradient
from ..kernels.scores import ALIGNED, BY_MATRIX, ENTRIES, READS, place_of_part
from ..kernels.shared.exact_sums import SIZE
from ..kernels.shared.visibility import has_states
from ..views import View, contiguous, fits_tensor_map
from ..words.arguments import Own, TmaMatrix
from ..words.spec import fewest_parts
from ..words.steps import (
    SUMS_OF_DS,
    At,
    Step,
    array_of_offset,
    partial_sums,
    sums_of_part,
)

SCRATCH, DIAGONALS_A_MULTIPROCESSOR = "scratch of diagonals", 4


def is_of_reads(kind):
    """Whether the gradient of a part of this kind is that of what the elements of S read: a function's arrays, or a
    table whose offsets differ between queries."""
    return kind.gradient == READS or (kind.gradient == ENTRIES and kind.offset == ALIGNED)


def add_gradient(planner, number):
    """The steps of the gradient of a part's array."""
    own, kind_of_part = gradient_of_part(number), planner.score[number]
    if partial_sums(own) in planner.temporaries:  # a kernel of the pass writes them
        add_sum(planner, own)
        return
    if is_of_reads(kind_of_part):
        add_gradient_of_reads(planner, number, own, kind_of_part)
        return
    is_table = kind_of_part.gradient == ENTRIES
    if SUMS_OF_DS in planner.temporaries:
        if is_table:
            add_table_of_sums(planner, number, own)
        return
    shape = planner.layouts[own].shape
    about = {"after": place_of_part(planner.score, number)}
    if is_table:
        add_diagonal_sums(planner, number, kind_of_part.offset, shape, about)
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
    m_blocks, n_blocks = planner.work(gradient_spec(planner, own, **about)).counts(tiles)
    blocks = (1 if sums_rows else m_blocks) * (1 if sums_cols else n_blocks)
    add_own(planner, partial(gradient_spec, planner, **about), tiles, own, shape, blocks)


def add_gradient_of_reads(planner, number, own, kind_of_part):
    """The steps of a gradient that `is_of_reads`; that of a function's arrays is one array, one after the other."""
    (shape, _, dtype, _), exact, axes = planner.layouts[own], planner.call.deterministic, 1
    if kind_of_part.gradient != READS:
        dtype, axes = planner.problem.sum_dtype, kind_of_part.own_axes
    about = {"after": place_of_part(planner.score, number), "wanted": planner.call.score[number].gradient,
             "sum_dtype": dtype.name, "exact": exact}  # fmt: skip
    if exact:
        name = sums_of_part(number)
        planner.add_temporary(name, (1, math.prod(shape) * SIZE), np.dtype(np.int64), is_zero=True)
        planner.add(spec_of_reads(name, own, axes, **about))
        return
    planner.add_sums_of_reads(own, dtype)
    planner.add(spec_of_reads(partial_sums(own), own, axes, **about))
    add_sum(planner, own)


def gradient_spec(planner, own, **about):
    """The Spec of the kernel for the gradient of a bias, or of slopes, which writes to an array of this name."""
    about |= {"out_dtype": planner.layouts[own].dtype.name}
    return first_spec(planner, bias_gradients(own, **about))


def first_spec(planner, routes):
    """The Spec of the first Route that takes the work, and whose TMA takes the matrices with their present layouts."""

    def fits(route):
        matrices = (planner.layouts[x.name] for x in route.specs[0].arguments if isinstance(x, TmaMatrix))
        return all(map(fits_tensor_map, matrices))

    (spec,) = planner.first_of(*filter(fits, routes))
    return spec


def add_diagonal_sums(planner, number, offset, shape, about):
    """For a RelativeBias' table of this shape: sums by diagonal, which `kernels.scores.relative` turns into the
    gradient. offset: its kind."""
    name, (*lead, _), problem = sums_of_part(number), shape, planner.problem
    if offset == BY_MATRIX:
        lead = np.broadcast_shapes(lead, planner.layouts[array_of_offset(number)].shape)
    partials, dtype = partial_sums(name), problem.sum_dtype
    spec, size = first_spec(planner, diagonal_sums(partials, **about)), dtype.itemsize
    tiles = planner.fitting(spec)
    m_blocks, n_blocks = planner.work(spec).counts(tiles)
    most = DIAGONALS_A_MULTIPROCESSOR * planner.device.multiprocessors
    width, diagonals = tiles.tile_m + tiles.tile_n, tiles.tile_m // tiles.tile_n * (m_blocks - 1) + n_blocks
    rows, cols = width // tiles.tile_n, m_blocks * tiles.tile_m + n_blocks * tiles.tile_n
    planner.add_temporary(partials, (*lead, 1, rows, cols), dtype, is_zero=True)
    if (parts := parts_of(planner, spec, tiles, diagonals)) > 1:
        planner.add_temporary(partials, (*lead, parts, rows, cols), dtype, is_zero=True)
    planner.add_temporary(SCRATCH, (most, tiles.tile_m, width), dtype, is_zero=True)
    step, pitch = tiles.tile_m * width * size, width * size
    skewed = View((tiles.tile_m - 1) * size, size, (most, tiles.tile_m, tiles.tile_n), (step, pitch - size, size))
    plain = View(0, size, (most, tiles.tile_m, width), (step, pitch, size))
    add_own_launches(planner, spec, tiles, parts * diagonals, most,
                     skewed=At(SCRATCH, skewed), plain=At(SCRATCH, plain))  # fmt: skip
    count, before = problem.seqlen_q + problem.seqlen_k - 1, m_blocks * tiles.tile_m - problem.seqlen_q
    planner.add_temporary(name, (*lead, count), dtype)
    shape, strides = (math.prod(lead), parts * rows, count), (parts * rows * cols * size, cols * size, size)
    add_sum_of(planner, name, At(partials, View(before * size, size, shape, strides), has_batch=False))


def add_own(planner, spec_of_target, tiles, name, shape, blocks):
    """The steps of a kernel for an array (*lead, rows, cols), with `blocks` blocks for each of its matrices. If the GPU
    has room for more, the matrices that it is broadcast to are divided into parts, whose sums are then added up.

    spec_of_target: (name of the array that the kernel writes to) -> its Spec.
    """
    (*lead, rows, cols), spec = shape, spec_of_target(name)
    planner.layouts[name] = contiguous((*lead, 1, rows, cols), planner.layouts[name].dtype)
    if (parts := parts_of(planner, spec, tiles, blocks)) > 1:
        planner.add_temporary(partial_sums(name), (*lead, parts, rows, cols), planner.problem.sum_dtype)
        spec = spec_of_target(partial_sums(name))
    add_own_launches(planner, spec, tiles, parts * blocks)
    if parts > 1:
        add_sum(planner, name)


def add_own_launches(planner, spec, tiles, blocks, most=math.inf, **scratch):
    """The steps of a kernel for an Own array, with so many blocks for each of its matrices. scratch: see BlockScratch.
    """
    key = Key.of(spec.factory, spec.cc(planner.device), **spec.parameters(planner.work(spec), tiles))
    arguments, launches = launches_of(planner, spec)
    for piece, numbers in launches:
        own = numbers["own_batches"] * numbers["own_heads"]
        given = planner.arguments_of(piece, arguments, **numbers, **scratch)
        planner.steps.append(Step(key, tiles, min(own * blocks, most), given))


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
    """How many parts the matrices that one matrix of an Own array serves are divided into."""
    work = planner.work(spec)
    if has_states(work.mask):
        planner.find_states(spec, tiles, work)
    _, ((piece, numbers), *_) = launches_of(planner, spec)
    own = numbers["own_batches"] * numbers["own_heads"]
    return fewest_parts(spec.room(work, tiles), own * blocks, piece.batch * planner.problem.heads // own)


def add_sum(planner, name):
    """The step that adds up the partial sums of an array, (*lead, parts, rows, cols) or (parts, elements), into it:
    both are contiguous."""
    partials = partial_sums(name)
    shape, _, dtype, _ = planner.layouts[partials]
    *lead, parts, rows, cols = shape if len(shape) > 2 else (*shape, 1)
    add_sum_of(planner, name, whole(partials, dtype, math.prod(lead), parts, rows * cols))


def add_sum_of(planner, name, parts):
    """The step that adds up parts, (matrices, parts, elements), an At, into a contiguous array of this name."""
    (matrices, _, elements), tile = parts.view.shape, SUMMED_AT_ONCE
    dtypes = [planner.layouts[x].dtype for x in (parts.array, name)]
    arguments = parts, whole(name, dtypes[1], matrices, elements)
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

"""X W, X W^T and X^T dY by the kernels for a GPU."""

import numpy as np

from ..kernel import TensorMap, launch
from ..kernels.shared.layouts import sum_type
from . import any as on_any
from . import hopper

HOPPER, TENSOR_CORES = (9, 0), (8, 0)
SUMS_IN_CHUNKS = 4  # how long it takes to leave the sums of a part, in chunks of the depth
MOST_PARTS = 32


class Products:
    """The backend. `current` returns the GPU of a call, normally a launch.GPU. x and dy are (rows, features), w
    (blocks, height, width)."""

    def __init__(self, current):
        self.current = current

    @property
    def device(self):
        return self.current().device

    def forward(self, x, w, pattern):
        """Y = X W."""
        lists = self.on_device("by_column", pattern, x, lambda: pattern._by_column)
        return self.product(x, w, lists, pattern.block_size, pattern.shape[1])

    def backward_x(self, dy, w, pattern):
        """dX = dY W^T."""
        lists = self.on_device("by_row", pattern, dy, lambda: pattern._by_row)
        return self.product(dy, w, lists, pattern.block_size[::-1], pattern.shape[0], transposed=True)

    def backward_w(self, x, dy, pattern):
        """dW = X^T dY, the blocks that are there. Rows of X are divided into parts where there are few blocks."""
        dw = np.empty((pattern.count, *pattern.block_size), x.dtype, like=x)
        with self.scratch_memory():
            x, dy = self.laid_out(x=x, dy=dy)
            if self.by_warpgroups(x.dtype, pattern.block_size):
                self.gradient_by_warpgroups(x, dy, dw, pattern)
            else:
                self.gradient(x, dy, dw, pattern)
        return dw

    # ------------------------------------------------------------------------------------------------------- products
    def product(self, x, w, lists, block_size, features, transposed=False):
        y = np.empty((len(x), features), x.dtype, like=x)
        with self.scratch_memory():
            x, w = self.laid_out(x=x, w=w)
            by = self.product_by_warpgroups if self.by_warpgroups(x.dtype, block_size) else self.product_by_warps
            by(x, w, y, lists, block_size, transposed)
        return y

    def product_by_warps(self, x, w, y, lists, block_size, transposed):
        (depth, width), (rows, features) = block_size, y.shape
        kernel, chunk = on_any.product(x.dtype, self.unit, depth, width, transposed), on_any.chunk_of(x.dtype, depth)
        grid = -(-rows // on_any.TILE_M), features // width
        start(kernel, grid, panels(x, chunk), chunks(w, chunk, transposed), panels(y, width), *lists)

    def product_by_warpgroups(self, x, w, y, lists, block_size, transposed):
        (depth, width), (rows, features) = block_size, y.shape
        consumers = self.consumers(rows, features // width)
        kernel, places = hopper.product(x.dtype, depth, width, transposed, consumers)
        arrays = panels(x, hopper.CHUNK), chunks(w, hopper.CHUNK, transposed), panels(y, width)
        maps = [TensorMap(array, place.box) for array, place in zip(arrays, places)]
        tiles = -(-rows // (hopper.ROWS * consumers)) * (features // width)
        counter = np.zeros(1, np.uint32, like=x)
        start(kernel, min(tiles, self.device.multiprocessors), *maps, *lists, np.int32(rows), counter)

    def consumers(self, rows, columns):
        """As many as leave a tile for each multiprocessor."""
        return next((n for n in (4, 2) if rows // (hopper.ROWS * n) * columns >= self.device.multiprocessors), 1)

    # ------------------------------------------------------------------------------------------------------ gradients
    def gradient(self, x, dy, dw, pattern):
        (places,) = self.on_device("places", pattern, x, lambda: (pattern.places,))
        kernel = on_any.gradient(x.dtype, self.unit, *pattern.block_size)
        count, rows_of_part = self.parts(len(x), len(places), on_any.CHUNK_ROWS[x.dtype.itemsize])
        arrays = [panels(array, size) for array, size in zip((x, dy), pattern.block_size)]
        sums = sums_of_parts(count, dw)
        start(kernel, (len(places), count), *arrays, sums, places, np.int32(rows_of_part))
        add_up(sums, dw)

    def gradient_by_warpgroups(self, x, dy, dw, pattern):
        height, _ = pattern.block_size
        members = max(hopper.MOST_CONSUMERS * hopper.ROWS // height, 1)
        kernel, places = hopper.gradient(x.dtype, *pattern.block_size, members)
        (groups,) = self.on_device(("groups", members), pattern, x, lambda: (pattern._groups(members),))
        count, rows_of_part = self.parts(len(x), len(groups), hopper.CHUNK)
        arrays = zip((x, dy), pattern.block_size, places)
        maps = [TensorMap(panels(array, size), place.box) for array, size, place in arrays]
        sums, grid = sums_of_parts(count, dw), min(count * len(groups), self.device.multiprocessors)
        start(kernel, grid, *maps, sums, groups, np.int32(rows_of_part), np.int32(len(x)))
        add_up(sums, dw)

    def parts(self, rows, tiles, chunk):
        """Into how many parts rows are divided so that all multiprocessors are busy to the end, and how many rows a
        part has."""
        steps = -(-rows // chunk)

        def duration(count):
            return -(-tiles * count // self.device.multiprocessors) * (-(-steps // count) + SUMS_IN_CHUNKS)

        steps_of_part = -(-steps // min(range(1, min(MOST_PARTS, steps) + 1), key=duration))
        return -(-steps // steps_of_part), steps_of_part * chunk

    # ------------------------------------------------------------------------------------------------------ the device
    @property
    def unit(self):
        return "mma" if self.device.cc >= TENSOR_CORES else "fma"

    def by_warpgroups(self, dtype, block_size):
        return self.device.cc == HOPPER and dtype.itemsize == 2 and set(block_size) <= set(hopper.SIZES)

    def scratch_memory(self):
        gpu = self.current()
        return gpu.scratch_memory(gpu.stream().is_capturing())

    def laid_out(self, **arrays):
        """Arrays as kernels take them, contiguous and aligned, copied if they are not."""
        found = []
        for name, x in arrays.items():
            _, odd = self.current().addresses({name: x})
            found.append(x.copy() if odd or not x.flags.c_contiguous else x)
        return found

    def on_device(self, name, pattern, like, make):
        """A pattern's lists, copied to the GPU once."""
        return pattern._kept((name, type(like), self.device), lambda: [np.asarray(x, like=like) for x in make()])


def sums_of_parts(count, dw):
    """Where sums of so many parts go, (parts, blocks, height, width): to dw itself if that is all."""
    return dw[None] if count == 1 else np.empty((count, *dw.shape), sum_type(dw.dtype), like=dw)


def add_up(sums, dw):
    count, blocks, height, width = sums.shape
    if count > 1:
        rows = blocks * height
        grid = -(-rows // on_any.ROWS_OF_SUM)
        start(on_any.sum_of_parts(width), grid, sums.reshape(count, rows, width), dw.reshape(rows, width))


def start(kernel, grid, *arguments):
    launch(kernel.function, grid, kernel.threads, kernel.shared_bytes, *arguments)


def panels(x, size):
    """A matrix as panels of so many columns, (1, panels, rows, size), not copied."""
    return x.reshape(len(x), -1, size).swapaxes(0, 1)[None]


def chunks(w, size, transposed):
    """Blocks as panels of so many rows, (blocks, panels, size, width); or transposed, of so many columns (blocks,
    panels, height, size)."""
    blocks, height, width = w.shape
    return w.reshape(blocks, height, -1, size).swapaxes(1, 2) if transposed else w.reshape(blocks, -1, size, width)

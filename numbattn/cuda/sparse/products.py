"""X W, X W^T and X^T dY by the kernels for a GPU."""

import numpy as np

from ..kernel import NO_NUMBERS, loaded, padded
from ..kernels.shared.layouts import sum_type
from . import any as on_any
from . import hopper

HOPPER, TENSOR_CORES = (9, 0), (8, 0)
SUMS_IN_CHUNKS = 4  # the time to write the sums of a part, in chunks of the depth
MOST_PARTS = 32


class SparseBackend:
    """The backend. `current` returns the GPU of a call, normally a launch.GPU. x and dy are (rows, features), w
    (blocks, height, width)."""

    def __init__(self, current):
        self.current = current

    def forward(self, x, w, pattern):
        """Y = X W."""
        return SparseCall(self.current()).product(x, w, pattern)

    def backward_x(self, dy, w, pattern):
        """dX = dY W^T."""
        return SparseCall(self.current()).product(dy, w, pattern, transposed=True)

    def backward_w(self, x, dy, pattern):
        """dW = X^T dY, for the blocks of the pattern."""
        return SparseCall(self.current()).gradient(x, dy, pattern)


class SparseCall:
    """A call on a GPU, on its current stream."""

    def __init__(self, gpu):
        self.gpu, self.device, self.stream = gpu, gpu.device, gpu.stream()
        self.capturing = self.stream.is_capturing()
        self.unit = "mma" if gpu.device.cc >= TENSOR_CORES else "fma"

    def product(self, x, w, pattern, transposed=False):
        depth, width = pattern.block_size[::-1] if transposed else pattern.block_size
        columns, lists = (0, "_by_row") if transposed else (1, "_by_column")
        y = self.gpu.empty((len(x), pattern.shape[columns]), x.dtype)
        with self.scratch_memory():
            x, w = self.laid_out(x=x, w=w)
            arrays = x, w, y, *self.lists(lists, pattern, x, lambda: getattr(pattern, lists))
            if self.by_warpgroups(x.dtype, pattern):
                consumers = self.consumers(len(x), pattern.blocks.shape[columns], width)
                kernel = hopper.product(x.dtype, depth, width, transposed, consumers)
                self.start(kernel, arrays, self.gpu.counters(self.stream.ptr, self.capturing))
            else:
                self.start(on_any.product(x.dtype, self.unit, depth, width, transposed), arrays)
        return y

    def gradient(self, x, dy, pattern):
        """dW. If there are few blocks, the rows of X are divided into parts, whose sums are added up."""
        dw = self.gpu.empty((pattern.count, *pattern.block_size), x.dtype)
        with self.scratch_memory():
            x, dy = self.laid_out(x=x, dy=dy)
            if self.by_warpgroups(x.dtype, pattern):
                members = max(hopper.MOST_CONSUMERS * hopper.ROWS // pattern.block_size[0], 1)
                kernel, chunk = hopper.gradient(x.dtype, *pattern.block_size, members), hopper.CHUNK
                (tiles,) = self.lists(("groups", members), pattern, x, lambda: [pattern._groups(members)])
            else:
                kernel = on_any.gradient(x.dtype, self.unit, *pattern.block_size)
                chunk = on_any.CHUNK_ROWS[x.dtype.itemsize]
                (tiles,) = self.lists("places", pattern, x, lambda: [pattern.places])
            count = self.parts(-(-len(x) // chunk), len(tiles))
            sums = dw[None] if count == 1 else self.gpu.empty((count, *dw.shape), np.dtype(sum_type(x.dtype)))
            self.start(kernel, (x, dy, sums, tiles))
            if count > 1:
                self.start(on_any.sum_of_parts(dw.dtype, pattern.block_size[1]), (sums, dw))
        return dw

    # --------------------------------------------------------------------------------------------------------- choices
    def by_warpgroups(self, dtype, pattern):
        return self.device.cc == HOPPER and dtype.itemsize == 2 and set(pattern.block_size) <= hopper.SIZES

    def consumers(self, rows, columns, width):
        """As many consumers as leave a tile for each multiprocessor."""
        *several, one = hopper.OF_A_PRODUCT[width]
        tiles = rows * columns // hopper.ROWS
        return next((n for n in several if tiles // n >= self.device.multiprocessors), one)

    def parts(self, steps, tiles):
        """How many parts to divide steps into so that all multiprocessors are busy to the end: the fewest of the
        fastest, none of them empty."""
        def duration(count):
            return -(-tiles * count // self.device.multiprocessors) * (-(-steps // count) + SUMS_IN_CHUNKS)

        return min(range(1, min(MOST_PARTS, steps) + 1), key=duration)

    # -------------------------------------------------------------------------------------------------------- launches
    def scratch_memory(self):
        return self.gpu.scratch_memory(self.capturing)

    def laid_out(self, **arrays):
        """Arrays as kernels take them, contiguous and aligned, copied if they are not."""
        _, odd = self.gpu.addresses(arrays)
        return [x.copy() if odd or not x.flags.c_contiguous else x for x in arrays.values()]

    def lists(self, name, pattern, like, make):
        """A pattern's lists, copied to the GPU once, for all streams."""
        def copied():
            found = [np.asarray(x, like=like) for x in make()]
            self.stream.synchronize()
            return found

        return pattern._kept((name, type(like), self.device), copied)

    def start(self, kernel, arrays, *counters):
        """Launch a kernel. Everything that only depends on shapes is kept with the GPU."""
        key = kernel.function, *[x.shape for x in arrays]
        program = self.gpu.programs.get(key)
        if program is None:
            grid, arguments = kernel.lay_out(self.device, *arrays)
            program = loaded(self.gpu, kernel.function, padded(grid), kernel.threads, kernel.shared_bytes, arguments)
            self.gpu.keep(key, program)
        addresses, _ = self.gpu.addresses(dict(enumerate(arrays)))
        program.launch([*addresses, *counters, self.gpu.scrap], NO_NUMBERS, self.stream.ptr)

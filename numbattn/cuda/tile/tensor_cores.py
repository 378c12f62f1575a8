"""Products by mma.sync, warp by warp: float16, bfloat16, float32 in three products of TF32, float64."""

from copy import copy
from functools import partial
from itertools import chain, product

from ..compiler import TypingError, capability, loop, types
from .boxes import Boxes
from .conversion import HALVES, emit_widened, emit_widened_words
from .emit import F32, I32, Index, in_own_block, load_vector
from .fragment import BYTES, FLOATS, HALF_FLOATS, FragmentType, element_type, is_tile, name_of
from .fragment import registers as unpack
from .layout import Layout
from .pieces import Pieces, bits_of_lane, ldmatrix, matrix_lane, mma_sync, warp_col, warp_row


def check_mma(layout, total, x, right):
    """Check a product, in both worlds. layout, total: the sum's; x: the left operand; right: the right one's place."""
    dtype, left = name_of(right.factor), x.layout if is_tile(x) else getattr(x, "plan", None)
    wants = "float64" if dtype == "float64" else "float32"
    given = name_of(x.dtype if is_tile(x) else left.dtype) if left else None
    takes = {dtype, wants} if is_tile(x) and dtype in HALF_FLOATS else {wants if is_tile(x) else dtype}
    if dtype not in HALF_FLOATS | FLOATS or given not in takes or total != wants:
        raise TypingError("dot: tensor cores multiply float16, bfloat16 or float32 and add in float32, or use float64")
    if is_tile(x) and (left.rows != layout.rows or left.unit != "mma" or not left.has_whole_rows):
        raise TypingError(f"dot: {left} is no left operand of {layout}")
    if dtype in HALF_FLOATS and not layout.has_whole_rows and layout.cols.slots % 4:
        raise TypingError(f"dot: warps that share rows add to 16 columns each: {layout}")
    if dtype not in HALF_FLOATS and (isinstance(left, Boxes) or isinstance(right, Boxes)):
        raise TypingError(f"dot: {left if isinstance(left, Boxes) else right} is for warpgroups")
    check_order(layout, left, right)
    (depth, cols), step = right.shape, 16 if dtype in HALF_FLOATS else 8
    steps = (step, step) if not is_in_fours(right) else (32, 16) if right.transposed else (16, 32)
    if depth % steps[0] or cols % steps[1]:
        raise TypingError("dot: tensor cores take right operands in multiples of {}x{}, ".format(*steps)
                          + f"not {depth}x{cols}")


def is_in_fours(right):
    """Whether registers of a right operand are read with four elements each: 8 bits that are widened to 16."""
    return right.is_widened and right.factor.itemsize == 2


def check_order(layout, left, right):
    """Check that a register of an 8-bit right operand has four neighbours in a row: in k, or in the sum's columns."""
    in_fours = is_in_fours(right)
    if in_fours and not isinstance(left, Layout):
        raise TypingError(f"dot: with {right}, which is widened, the left operand is a fragment")
    for what, found, along in (("the left operand", left, right.transposed), ("the sum", layout, not right.transposed)):
        by_fours = in_fours and along
        if isinstance(found, Layout) and by_fours != (found.cols.run == 4):
            raise TypingError(f"dot: with {right}, {what} is {'not ' * (not by_fours)}of a layout by_fours")


def emit_mma(acc, lefts, y):
    """As `product.emit_fma`. The pieces of several sums are one another's rows."""
    fills_words = y.plan.factor.itemsize > 2
    emit = emit_words if fills_words else emit_bytes if name_of(y.dtype) in BYTES else emit_halves

    def generate(b, registers, values, y_pointer):
        sums = Pieces(acc.layout, registers)
        if isinstance(lefts[0], FragmentType):
            rows = [row for x, value in zip(lefts, values) for row in unpack(b, x, value)]
            left = Pieces(lefts[0].layout, rows)
        else:
            left = [*zip(lefts, values)]
        emit(b, sums, left, y, y_pointer)
        return sums.registers

    return generate


# ------------------------------------------------------------------------------- tensor cores: float16 and bfloat16
def emit_halves(b, sums, left, y, y_pointer):
    kind, depth, starts = HALVES[y.dtype], y.plan.shape[0], sums.layout.cols.offsets[::2]
    read_y = right_reader(b, y, y_pointer, warp_col(b, sums.layout), starts[1] - starts[0])
    if isinstance(left, Pieces):
        left_operand = partial(left.left_operand, b, y.dtype)
    else:
        readers = [left_reader(b, *tile, warp_row(b, sums.layout)) for tile in left]

        def left_operand(r, k):
            which, slot = divmod(r, sums.layout.rows.slots)
            return readers[which](sums.layout.rows.offsets[slot], k)

    for k in range(0, depth, 16):
        lefts = [(r, left_operand(r, k)) for r in sums.row_slots]
        for i in range(0, len(starts), 2):
            rights = read_y(k, starts[i])
            for (r, a), (half, n) in product(lefts, enumerate(starts[i : i + 2])):
                d = sums.get(r, n)
                sums.put(r, n, mma_sync(b, "m16n8k16", kind, d, a, rights[2 * half : 2 * half + 2]))


def left_reader(b, tile, pointer, first_row):
    """A reader of the 2x2 matrices at (row, k) of a left operand; a thread gets neighbours in a row."""
    if isinstance(tile.plan, Boxes):
        return boxes_reader(b, tile.plan, pointer, (first_row, I32(0)), 8, tile.plan.transposed)
    down, across = tile.plan.steps()
    lane = matrix_lane(b, max(down, across), 8 * down, 8 * across)
    start = b.gep(pointer, [b.add(lane, b.mul(first_row, I32(down)))])
    return lambda row, k: ldmatrix(b, start, row * down + k * across, transposed=across != 1)


def right_reader(b, tile, pointer, first_col, beside):
    """A reader of those of a right operand, at (k, column), neighbours in a column; matrices of a row are `beside`
    columns apart: 8, or more if those in between are other warps'."""
    if isinstance(tile.plan, Boxes):
        return boxes_reader(b, tile.plan, pointer, (I32(0), first_col), beside, not tile.plan.transposed)
    down, across = tile.plan.steps()
    lane = matrix_lane(b, max(down, across), 8 * down, beside * across)
    start = b.gep(pointer, [b.add(lane, b.mul(first_col, I32(across)))])
    return lambda k, col: ldmatrix(b, start, k * down + col * across, transposed=across == 1)


def boxes_reader(b, plan, pointer, first, beside, transposed):
    """Either reader for an operand in boxes, with the warp's rows and columns from `first` on: 64 bytes of a row have
    an address for each 16 columns, since the swizzle is an exclusive or; rows and boxes are one addition away."""
    line, below, right = (Index(b, bits_of_lane(b, *bits)) for bits in ((0, 3), (3, 1), (4, 1)))
    row, col = Index(b, first[0]) + below * 8, Index(b, first[1]) + right * beside
    if plan.transposed:
        row, col = col, row
    row, starts = row + line, {}

    def read(at_row, at_col):
        if plan.transposed:
            at_row, at_col = at_col, at_row
        box, within = divmod(at_col, plan.width)
        if within not in starts:  # which has no bit of a lane's columns
            starts[within] = b.gep(pointer, [plan.place(row, col ^ within).value])
        return ldmatrix(b, starts[within], (box * plan.rows + at_row) * plan.width, transposed)

    return read


# ------------------------------------------------------------------------- tensor cores: 8 bits, widened in registers
def emit_bytes(b, sums, left, y, y_pointer):
    factor, (depth, cols) = element_type(y.plan.factor), y.plan.shape
    read = bytes_reader(b, y, factor, y_pointer)
    step_k, step_n = (32, 16) if y.plan.transposed else (16, 32)
    for k in range(0, depth, step_k):
        lefts = {(r, i): left.left_operand(b, factor, r, k + i) for i in range(0, step_k, 16) for r in sums.row_slots}
        for n in range(0, cols, step_n):
            for col, i, right in read(k, n):
                for r in sums.row_slots:
                    d = sums.get(r, n + col)
                    sums.put(r, n + col, mma_sync(b, "m16n8k16", HALVES[factor], d, lefts[r, i], right))


def bytes_reader(b, tile, factor, pointer):
    """A reader of what four right operands of 16x8 are made of, at (k, n): yields for each its first column of the sum,
    its first k, counted from there, and its registers.

    A lane gets four neighbours in a key's row, all for one column's k; or transposed, as 16-bit pairs, two neighbours
    in each of two rows, the first of which belong to one operand and the others to another one.
    """
    down, across = tile.plan.steps()
    pitch = max(down, across)
    by_key = tile.plan.transposed
    lane = matrix_lane(b, pitch, *((16, 8 * pitch) if by_key else (8 * pitch, 16)))
    start = b.gep(pointer, [lane])

    def widened(word, i, j):
        return emit_widened(b, tile.dtype, factor, word, i, j)

    def read(k, n):
        words = ldmatrix(b, start, k * down + n * across, transposed=not by_key)
        for half in range(2):
            two = words[2 * half : 2 * half + 2]
            if by_key:
                for i, word in enumerate(two):
                    yield 8 * half, 16 * i, [widened(word, 0, 1), widened(word, 2, 3)]
            else:
                for i in range(2):
                    yield 16 * half + i, 0, [widened(word, i, i + 2) for word in two]

    return read


# -------------------------------------------------------------------------------- tensor cores: float32 and float64
def emit_words(b, sums, left, y, y_pointer):
    """The product of elements that fill registers, 8 of k per instruction: added chunk by chunk of k, see WORDS."""
    in_registers, depth = isinstance(left, Pieces), y.plan.shape[0]
    add, chunk = WORDS[element_type(y.plan.factor)]
    order = order_of_k(y, in_registers)
    ys = WordReader(b, y, y_pointer, 1, warp_col(b, sums.layout), order, (0, 8))
    if in_registers:  # the sums of one product are the left operand of the next
        for k in range(0, depth, chunk):
            ks = range(k, min(k + chunk, depth), 8)
            add(b, sums, [[left_words(left.get(r, i)) for i in ks] for r in sums.row_slots], ys.at(I32(k)))
        return
    readers = [WordReader(b, *tile, 0, warp_row(b, sums.layout), order, (8, 0)) for tile in left]

    def turn(k, registers, length=chunk):
        part, rows = Pieces(sums.layout, registers), sums.layout.rows.offsets[::2]
        lefts = [[left_words([*chain(*x_here.blocks(row, i, 2))]) for i in range(0, length, 8)]
                 for x_here in (xs.at(k) for xs in readers) for row in rows]  # fmt: skip
        add(b, part, lefts, ys.at(k))
        return part.registers

    rest = depth % chunk
    if depth > rest:  # ptxas moves loads up as far as it can and runs out of registers: not beyond a turn
        sums.registers = loop(b, range(0, depth - rest, chunk), sums.registers, turn)
    if rest:
        sums.registers = turn(I32(depth - rest), sums.registers, rest)


def by_columns(b, sums, add):
    """add(n) for every 8 columns of a warp, 16 columns in each basic block."""
    starts = sums.layout.cols.offsets[::2]
    for i in range(0, len(starts), 2):
        columns = starts[i : i + 2]
        pieces = [(r, n) for n in columns for r in sums.row_slots]

        def registers(pieces=pieces):
            return [register for piece in pieces for register in sums.get(*piece)]

        def compute(columns=columns, registers=registers):
            for n in columns:
                add(n)
            return registers()

        found = in_own_block(b, registers(), compute)
        for i, piece in enumerate(pieces):
            sums.put(*piece, found[4 * i : 4 * i + 4])


def left_words(words):
    """Two words of a line and two of the line 8 below, in the order of the instruction."""
    return [*words[::2], *words[1::2]]


def add_singles(b, sums, lefts, ys):
    """Add a chunk's product, lefts[row of pieces][step of k], by 3xTF32.

    x = hi + lo in TF32 each, x y = hi hi + (hi lo + lo hi), good to a float32's last bit. Tensor cores cut off what
    does not fit into a sum, so that long sums come out too small. What they add up is therefore short, starts from zero
    and has the small terms in a sum of their own. Of y that was widened there is no lo.
    """
    lefts, split_y = [[split(b, words) for words in row] for row in lefts], exact if ys.is_widened else split

    def add(n):
        rights = (split_y(b, words) for words in ys.blocks(n, 0, len(lefts[0])))
        for r, terms in zip(sums.row_slots, products(b, lefts, rights)):
            sums.put(r, n, [b.fadd(d, b.fadd(*two)) for d, *two in zip(sums.get(r, n), *terms)])

    by_columns(b, sums, add)


def products(b, lefts, rights):
    """The sums over k of the large and the small terms of lefts[row of pieces][k] times rights[k]."""
    found = [([F32(0.0)] * 4, [F32(0.0)] * 4) for _ in lefts]
    for (y_high, y_low), *xs in zip(rights, *lefts):
        for i, (x_high, x_low) in enumerate(xs):
            large, small = found[i]
            small = mma_tf32(b, small, x_high, y_low) if y_low else small
            small = mma_tf32(b, small, x_low, y_high)
            found[i] = mma_tf32(b, large, x_high, y_high), small
    return found


def mma_tf32(b, d, a, c):
    return mma_sync(b, "m16n8k8", "tf32", d, a, c)


def split(b, values):
    """float32 registers as sums of two TF32 numbers: the nearest ones, with 10 bits of mantissa, and the rest.

    The unit drops a 12th bit of the rest, whose sign is as good as random. Two cvt.rna.tf32, six instructions in all,
    are no better.
    """
    bits = [b.bitcast(x, I32) for x in values]
    highs = [b.and_(b.add(x, I32(0x1000)), I32(0xFFFFE000)) for x in bits]
    rests = [b.fsub(x, b.bitcast(high, F32)) for x, high in zip(values, highs)]
    return highs, [b.bitcast(rest, I32) for rest in rests]


def exact(b, values):
    """The same of numbers that TF32 holds."""
    return [b.bitcast(x, I32) for x in values], []


def add_doubles(b, sums, lefts, ys):
    """Add a chunk's product, lefts[row of pieces][step of k]. Sums are rounded to nearest, as on CUDA cores."""

    def add(n):
        for i, right in enumerate(ys.blocks(n, 0, len(lefts[0]))):
            for r, row in zip(sums.row_slots, lefts):
                sums.put(r, n, mma_f64(b, sums.get(r, n), row[i], right))

    by_columns(b, sums, add)


def mma_f64(b, d, a, c):
    """d + a @ c, 16x8 by 8x8 elements. The instruction of 8.x does a quarter of it: half of the rows, half of k."""
    if capability() >= (9, 0):
        return mma_sync(b, "m16n8k8", "f64", d, a, c)
    halves = [d[:2], d[2:]]
    for k, row in product(range(2), range(2)):
        halves[row] = mma_sync(b, "m8n8k4", "f64", halves[row], [a[2 * k + row]], [c[k]])
    return halves[0] + halves[1]


WORDS = {types.float32: (add_singles, 64), types.float64: (add_doubles, 32)}  # how chunks of k are added; their length


def order_of_k(y, in_registers):
    """The order of k that suits the right operand, which is more to read, unless x is in registers already."""
    if in_registers or y.plan.steps()[0] != 1:
        return 2
    if y.dtype == types.float32:
        return 1
    return 4 if y.plan.shape[0] % 16 == 0 else 2


class WordReader:
    """A reader of float32 or float64 in blocks of 8 lines, rows of the left operand or columns of the right one, by 8
    of k.

    Lane 4g + t gets two elements of line g. Any two will do, if both operands agree. By `order`:

    1: k = t and t + 4, what ldmatrix gives for float32 if k is contiguous.
    2: k = 2t and 2t + 1, what lanes hold of a sum; and if lines are contiguous all lanes read from different banks.
    4: k = 4t and 4t + 1, in the next block 4t + 2 and 4t + 3: if k is contiguous, lanes read 16 bytes of float64 from
       different banks.
    """

    def __init__(self, b, tile, pointer, along, first_line, order, apart):
        """`along` is the tile's axis of the lines, `apart` the step from a block's (line, k) to the next one's."""
        steps = tile.plan.steps()
        self.b, self.line_step, self.k_step = b, steps[along], steps[1 - along]
        self.order, self.apart = order, apart
        self.dtype, self.is_widened = tile.dtype, tile.plan.is_widened
        first = b.mul(first_line, I32(self.line_step))
        group, lane = bits_of_lane(b, 2, 3), bits_of_lane(b, 0, 2)
        word = b.add(b.mul(group, I32(self.line_step)), b.mul(lane, I32(self.k_step * order)))
        self.words = b.gep(pointer, [b.add(first, word)])
        self.matrices = b.gep(pointer, [b.add(first, matrix_lane(b, self.line_step, 4, self.offset(*apart)))])

    def at(self, k):
        """The reader that starts at k."""
        moved, step = copy(self), self.b.mul(k, I32(self.k_step))
        moved.words, moved.matrices = (self.b.gep(start, [step]) for start in (self.words, self.matrices))
        return moved

    def offset(self, line, k):
        if self.order == 4 and k % 16:
            k += 2 - 8  # the second half of 16 columns lies between those of the first
        return line * self.line_step + k * self.k_step

    def blocks(self, line, k, count):
        """The elements of `count` blocks, one after the other, loaded on demand."""
        places = [(line + i * self.apart[0], k + i * self.apart[1]) for i in range(count)]
        if self.k_step == 1 and self.order == 1:
            for place, _ in zip(places[::2], places[1::2]):
                words = ldmatrix(self.b, self.matrices, self.offset(*place))
                words = [self.b.bitcast(word, F32) for word in words]
                yield words[:2]
                yield words[2:]
            places = places[count // 2 * 2 :]
        for place in places:
            yield self.block(self.offset(*place))

    def block(self, offset):
        def load(i, width):
            found = load_vector(self.b, self.b.gep(self.words, [I32(offset + i * self.k_step)]), width)
            return emit_widened_words(self.b, self.dtype, found) if self.is_widened else found

        if self.order > 1 and self.k_step == 1:
            return load(0, 2)
        return [*load(0, 1), *load(4 if self.order == 1 else 1, 1)]

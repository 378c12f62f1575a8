"""LLVM for one thread: the few idioms that all lowerings are built from."""

from contextlib import nullcontext
from functools import reduce

from ..compiler import computed_if, ir
from .alignment import VECTOR_BYTES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64, VOID = ir.FloatType(), ir.DoubleType(), ir.VoidType()
LETTERS = {I16: "h", I32: "r", I64: "l", F32: "f", F64: "d"}
GLOBAL, SHARED = 1, 3  # address spaces
SHARED_MEMORY, ZEROS = "numbattn_shared", "numbattn_zeros"


def asm(b, text, result, *operands, effect=False):
    """One PTX instruction on registers: asm(b, "ex2.approx.ftz.f32 $0, $1;", F32, x). A list of types: many results.

    `effect`: it touches memory or other threads and therefore stays where it is.
    """
    results = result if isinstance(result, list) else [] if result == VOID else [result]
    constraints = ["=" + LETTERS[r] for r in results] + [LETTERS[o.type] for o in operands] + ["~{memory}"] * effect
    returned = ir.LiteralStructType(results) if isinstance(result, list) else result
    value = b.asm(
        ir.FunctionType(returned, [o.type for o in operands]), text, ",".join(constraints), list(operands), effect
    )
    if effect:
        value.attributes.add("convergent")  # not to be moved into a branch, where some threads of a warp are missing
    return [b.extract_value(value, i) for i in range(len(results))] if isinstance(result, list) else value


def asm_in_place(b, text, values, *operands):
    """As `asm`, with effect, for an instruction that changes `values`: $0... in its text; operands come after them.

    Where a value is None, it is a result only.
    """
    kinds = [F32 if value is None else value.type for value in values]
    old = [(i, value) for i, value in enumerate(values) if value is not None]
    constraints = ["=" + LETTERS[kind] for kind in kinds] + [LETTERS[o.type] for o in operands]
    constraints += [str(i) for i, _ in old] + ["~{memory}"]
    given = [*operands, *(value for _, value in old)]
    function = ir.FunctionType(ir.LiteralStructType(kinds), [x.type for x in given])
    found = b.asm(function, text, ",".join(constraints), given, True)
    found.attributes.add("convergent")
    return [b.extract_value(found, i) for i in range(len(kinds))]


def call(b, name, result, *operands):
    """Call a function of LLVM or libdevice."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [o.type for o in operands]), name)
    return b.call(function, operands)


def special_register(b, name):
    """The value of %tid, %ctaid or %nctaid, in such a way that LLVM knows it is not negative."""
    found = call(b, f"llvm.nvvm.read.ptx.sreg.{name}", I32)
    found.set_metadata("range", b.module.add_metadata([I32(0), I32(2**31 - 1)]))
    return found


def thread_index(b):
    return special_register(b, "tid.x")


def floor_divided(b, x, y):
    """x // y of signed integers, rounded down; y is positive."""
    if is_power_of_two(y):
        return b.ashr(x, ir.Constant(x.type, y.constant.bit_length() - 1))
    sign = sign_of(b, x)
    return b.xor(b.udiv(b.xor(x, sign), y), sign)


def modulo(b, x, y):
    """x % y of signed integers, from 0 on; y is positive."""
    if is_power_of_two(y):
        return b.and_(x, ir.Constant(x.type, y.constant - 1))
    sign = sign_of(b, x)
    return b.add(b.xor(b.urem(b.xor(x, sign), y), sign), b.and_(y, sign))


def is_power_of_two(x):
    return isinstance(x, ir.Constant) and x.constant > 0 and x.constant & (x.constant - 1) == 0


def sign_of(b, x):
    """-1 for negative x, else 0: a negative x is divided as ~x. LLVM drops it if it knows that x is not negative."""
    return b.ashr(x, ir.Constant(x.type, x.type.width - 1))


class Index:
    """A 32-bit LLVM value with the operators that positions in layouts and in memory are computed with."""

    def __init__(self, b, value):
        self.b, self.value = b, value

    def __rshift__(self, n):
        return Index(self.b, self.b.lshr(self.value, I32(n)))

    def __and__(self, n):
        return Index(self.b, self.b.and_(self.value, I32(n)))

    def __mul__(self, n):
        return Index(self.b, self.b.mul(self.value, I32(n)))

    def __add__(self, other):
        return Index(self.b, self.b.add(self.value, other.value if isinstance(other, Index) else I32(other)))

    __radd__ = __add__

    def __xor__(self, other):
        return Index(self.b, self.b.xor(self.value, other.value if isinstance(other, Index) else I32(other)))


def base(b, axis):
    """This thread's base position on an axis."""
    found = axis.base(Index(b, thread_index(b)))
    return found.value if isinstance(found, Index) else I32(found)


def is_first_holder(b, layout):
    """Whether this thread is the first of those that hold the same elements; None if there are no others."""
    idle = sum(1 << bit for bit in layout.idle_bits())
    return b.icmp_unsigned("==", b.and_(thread_index(b), I32(idle)), I32(0)) if idle else None


def if_first_holder(b, layout):
    """The context of what only the first of the threads does that hold the same elements."""
    mine = is_first_holder(b, layout)
    return nullcontext() if mine is None else b.if_then(mine)


def if_first_of(b, threads):
    """The context of what only the first thread of each warp does, or of other groups of so many, a power of two."""
    return b.if_then(b.icmp_unsigned("==", b.and_(thread_index(b), I32(threads - 1)), I32(0)))


def any_lane(b, truths):
    """Whether any of these holds in any lane of the warp."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    chains = [reduce(b.or_, truths[i::4]) for i in range(min(4, len(truths)))]    # which do not wait for each other
    truth = b.zext(reduce(b.or_, chains), I32)
    return b.icmp_unsigned("!=", asm(b, text, I32, truth, effect=True), I32(0))


def shuffle_xor(b, x, mask):
    """The value x of the lane whose number differs in the bits of `mask`."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
    if x.type not in (F64, I64):
        return asm(b, text, x.type, x, effect=True)
    halves = b.bitcast(x, ir.VectorType(I32, 2))
    for i in range(2):
        halves = b.insert_element(halves, asm(b, text, I32, b.extract_element(halves, I32(i)), effect=True), I32(i))
    return b.bitcast(halves, x.type)


def size_of(element):
    return {F32: 4, F64: 8}.get(element) or max(1, element.width // 8)


def word_of(element):
    """The type that vectors are made of: 16-bit elements go in pairs, or eight of them would take two instructions."""
    return (I32, 2) if element == I16 else (element, 1)


def load_vector(b, place, width, inside=None):
    """List of `width` consecutive elements, by one load aligned to its size; 0 where not `inside`."""
    element, space = place.type.pointee, place.type.addrspace
    word, per_word = word_of(element) if width > 1 else (element, 1)
    if width == 1:
        words = [b.load(place, align=size_of(element))]
    else:
        vector = ir.VectorType(word, width // per_word)
        loaded = b.load(b.bitcast(place, ir.PointerType(vector, space)), align=width * size_of(element))
        words = [b.extract_element(loaded, I32(i)) for i in range(width // per_word)]
    if inside is not None:
        zero = ir.Constant(word, 0 if isinstance(word, ir.IntType) else 0.0)
        words = [b.select(inside, x, zero) for x in words]
    if per_word == 1:
        return words
    pairs = [b.bitcast(x, ir.VectorType(element, 2)) for x in words]
    return [b.extract_element(pair, I32(i)) for pair in pairs for i in range(2)]


def load_vector_or_zeros(b, inside, place, width):
    """`load_vector` from global memory, or from a few zeros there. If vectors were selected after loads instead, ptxas
    would load one after the other into the same registers, each when the one before it is there."""
    zeros = b.module.globals.get(ZEROS)
    if zeros is None:
        zeros = ir.GlobalVariable(b.module, ir.ArrayType(I8, VECTOR_BYTES), ZEROS, GLOBAL)
        zeros.linkage, zeros.align, zeros.initializer = "internal", VECTOR_BYTES, ir.Constant(zeros.value_type, None)
    return load_vector(b, b.select(inside, place, b.bitcast(zeros, place.type)), width)


def vector_of(b, values):
    vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        vector = b.insert_element(vector, value, I32(i))
    return vector


def store_vector(b, values, place):
    """Store consecutive elements by one store aligned to its size."""
    element, space = place.type.pointee, place.type.addrspace
    if len(values) == 1:
        b.store(values[0], place, align=size_of(element))
        return
    word, per_word = word_of(element)
    if per_word == 2:
        values = [b.bitcast(vector_of(b, values[i : i + 2]), word) for i in range(0, len(values), 2)]
    vector = vector_of(b, values)
    b.store(vector, b.bitcast(place, ir.PointerType(vector.type, space)), align=len(values) * size_of(word))


def shared_memory(b, offset):
    """Pointer to a byte of the block's dynamic shared memory."""
    memory = b.module.globals.get(SHARED_MEMORY)
    if memory is None:
        memory = ir.GlobalVariable(b.module, ir.ArrayType(I8, 0), SHARED_MEMORY, SHARED)
        memory.linkage, memory.align = "external", 1024
    return b.gep(memory, [I32(0), I32(offset)])


def in_own_block(b, values, compute):
    """compute(), which returns values like `values`, in its own basic block.

    Within a block ptxas moves loads up as far as it can, and runs out of registers. So this one is entered by a branch
    that is always taken, which ptxas cannot know; if it were not, the result would be `values`.
    """
    return computed_if(b, always(b), values, compute)


def always(b):
    """A condition that always holds, which ptxas cannot know."""
    size = asm(b, "mov.u32 $0, %dynamic_smem_size;", I32)
    return b.icmp_unsigned("!=", size, ir.Constant(I32, -1))

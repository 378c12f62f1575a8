"""Run the PTX of a kernel in NumPy: all threads of a block at once, diverged ones by the lowest program counter first.

It checks what no compiler does and no GPU tells: that each access is aligned and lies within an array, that nothing is
read before it is written, registers and shared memory alike, and how many bank conflicts there are. It knows the
instructions that the kernels use, and refuses others. It runs in lockstep, so it sees no races: `simulate` does.
"""

import math
import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from numbattn.cuda.tile.alignment import VECTOR_BYTES
from numbattn.cuda.tile.emit import ZEROS

from .hopper import DeadlockError, Hopper, bits_of, members, run_together, truncated
from .memory import GLOBAL_BASE, AccessError, Memory, Places, Shared, TensorMap, bounds

__all__ = ["AccessError", "DeadlockError", "Kernel", "TensorMap", "interpret"]
TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64,
    "s64": np.int64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
KINDS = {  # registers by the letters of their names, as ptx declares them
    "pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64,
    "u16": np.uint16, "s16": np.uint16, "u32": np.uint32, "s32": np.uint32, "u64": np.uint64, "s64": np.uint64,
}  # fmt: skip
DTYPES = {kind: np.dtype(dtype) for kind, dtype in TYPES.items()}
BOOL = np.dtype(bool)
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
WARP, BANKS, LINE = 32, 32, 128
TF32 = np.uint32(0xFFFFE000)  # the bits of a float32 that tensor cores look at
STATEMENT = re.compile(r"""
    (?P<line>//.*|\.(?:loc|file)\b.*) | (?P<directive>\.[^;]*;) | (?P<brace>[{}]) | (?P<label>[\w$]+)\s*: |
    (?P<instruction>[^\s;{}][^;]*;)
""", re.X)  # fmt: skip
FUNCTION = re.compile(r"""  # its result, name and parameters, the registers that it declares, and the rest
    ^\.func\s+\([^)]*\b(\w+)\)\s+(\w+)\(([^)]*)\)\s*\{((?:\s*\.reg[^;]*;)*)(.*?)^\}
""", re.X | re.S | re.M)  # fmt: skip
CALL = re.compile(r"\bcall\.uni\s+\((\w+)\),\s*(\w+),\s*\(([^)]*)\)\s*;")


class Instruction(NamedTuple):
    guard: str | None
    negated: bool
    op: list  # the parts of its name
    operands: list
    name: str
    line: str  # as the text has it


class Kernel:
    """The one kernel of a PTX text."""

    def __init__(self, ptx):
        body = FUNCTION.sub("", ptx[ptx.index(".visible .entry") :])
        head, body = body[: body.index("{")], body[body.index("{") + 1 : body.rindex("}")]
        body = inlined(body, FUNCTION.findall(ptx))
        self.cluster = int(next(iter(re.findall(r"\.reqnctapercluster (\d+)", head)), 1))
        self.parameters = re.findall(r"\.param (?:\.align \d+ )?\.\w+ (\w+)", head)
        self.kinds, self.blocks, self.labels = {}, [[]], {}
        statements = list(self._statements(body))
        for scope, kind, text in statements:
            if kind == "label":
                self.blocks.append([])
                self.labels[scope.rename(text)] = len(self.blocks) - 1
            else:
                self._add(scope, text)
        self.has_zeros = ZEROS in ptx
        self.conflicts = Counter()  # wavefronts beyond the fewest possible, by instruction
        self.split_lines = 0  # by cp.async, see _count_split_lines
        self.executed = Counter()  # how often all threads that were at an instruction went through it

    def _statements(self, body):
        """(Scope, "label" or "instruction", text) of each; a scope knows all its names once the last one is there."""
        scope, count = Scope(), 0
        for match in STATEMENT.finditer(body):
            kind, text = match.lastgroup, match[match.lastgroup]
            if text == "{":
                count += 1
                scope = Scope(f".{count}", scope)
            elif text == "}":
                scope = scope.outer
            elif kind == "directive" and (found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*?)\s*;", text, re.S)):
                for name in re.split(r"\s*,\s*", found[2]):
                    self.kinds[scope.add(name.partition("<")[0])] = KINDS[found[1]]
            elif kind in ("label", "instruction"):
                if kind == "label":
                    scope.add(text)
                yield scope, kind, text

    def _add(self, scope, line):
        match = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*?)\s*;", line, re.S)
        if not match:
            raise NotImplementedError(line)
        negated, guard, op, operands = match.groups()
        full_name, op = op, op.split(".")
        name = op[0]
        tries = op[:2] in (["mbarrier", "try_wait"], ["ld", "acquire"])
        if tries and self.blocks[-1]:
            self.blocks.append([])  # where threads come again
        if name == "wgmma" and op[1] in ("fence", "wait_group"):  # where the warps wait for each other
            self.blocks[-1].append(Instruction(None, False, ["meet"], [], "meet", ""))
            self.blocks.append([])
        if scope.outer:
            operands = re.sub(r"[%$\w]+", lambda name: scope.rename(name[0]), operands)
            guard = guard and scope.rename(guard)
        self.blocks[-1].append(Instruction(guard, bool(negated), op, split_operands(operands), full_name, line))
        if name in ("bra", "ret", "bar", "barrier") or tries:
            self.blocks.append([])

    def count(self, pattern):
        """How many instructions there are that match."""
        return sum(bool(re.search(pattern, found.line)) for block in self.blocks for found in block)

    def kind_of(self, register):
        if register not in self.kinds:
            self.kinds[register] = self.kinds[re.match(r"%[a-zA-Z_]+", register)[0]]
        return self.kinds[register]

    def run(self, grid, threads, shared_bytes, values, memory):
        parameters = dict(zip(self.parameters, values, strict=True))
        for z, y, first in np.ndindex(*grid[:0:-1], grid[0] // self.cluster):
            places = ((first * self.cluster + rank, y, z) for rank in range(self.cluster))
            run_together([Block(self, at, grid, threads, shared_bytes, parameters, memory) for at in places])


def inlined(body, functions):
    """The body of a kernel with these functions of libdevice in place of their calls; parameters become registers."""
    registers, by_name = "", {}
    for result, name, parameters, own, inside in functions:
        registers += own.replace("%", "%in_")
        names = [result, *re.findall(r"(\w+)\s*(?:,|\Z)", parameters)]
        by_name[name] = names, inside.replace("%", "%in_").replace("ret;", "")

    def in_place(call):
        result, name, given = call.groups()
        names, inside = by_name[name]
        here = dict(zip(names, [result, *re.findall(r"\w+", given)]))
        return re.sub(r"\w+", lambda word: here.get(word[0], word[0]), inside)

    body = CALL.sub(in_place, re.sub(r"\.param (\.\w+ \w+;)", r".reg \1", body))
    body = re.sub(r"\bst\.param\.(\w+)\s*\[(\w+)\+0\]", r"mov.\1 \2", body)
    body = re.sub(r"\bld\.param\.(\w+)\s+(\S+),\s*\[((?:param|retval)\d+)(?:\+0)?\]", r"mov.\1 \2, \3", body)
    return registers + body


class Scope:
    """Names between braces, those of the whole kernel as they are, others made unique."""

    def __init__(self, suffix="", outer=None):
        self.suffix, self.outer, self.names = suffix, outer, {}

    def add(self, name):
        self.names[name] = f"%{name.strip('%')}{self.suffix}" if self.outer else name
        return self.names[name]

    def rename(self, name):
        return self.names.get(name) or (self.outer.rename(name) if self.outer else name)


@lru_cache(4096)
def split_address(token):
    """The base and the offset in "[%rd1+16]"."""
    base, offset = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", token).groups()
    return base, int(offset or 0)


@lru_cache(1024)
def conflicts(pattern, lanes, size):
    """Wavefronts beyond one that groups of so many lanes need for accesses at these addresses, an int64 each."""
    addresses = np.frombuffer(pattern, np.int64)
    words = addresses[:, None] // 4 + np.arange(max(1, size // 4))
    words = np.sort(words.reshape(-1, lanes * words.shape[1]))
    new = np.ones(words.shape, bool)
    new[:, 1:] = words[:, 1:] != words[:, :-1]
    row, _ = np.nonzero(new)
    wanted = np.bincount(row * BANKS + words[new] % BANKS, minlength=len(words) * BANKS)
    return int((wanted.reshape(-1, BANKS).max(1) - 1).sum())


def split_operands(text):
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def numbers_of(array, address):
    """What a kernel takes of an array."""
    return 0, 0, array.size, array.itemsize, address, *array.shape, *array.strides


def interpret(ptx, grid, threads, shared_bytes, *arguments, numbers_of=numbers_of):
    """Launch a kernel on NumPy arrays, in place, TensorMaps of them, scalars of NumPy's types and tuples of them.

    numbers_of: of compilers which pass arrays otherwise. Returns the Kernel, which has counts.
    """
    kernel, memory = ptx if isinstance(ptx, Kernel) else Kernel(ptx), Memory(1 << 16, GLOBAL_BASE)
    arrays = [x for x in (getattr(x, "array", x) for x in flat(arguments)) if isinstance(x, np.ndarray)]
    added = {id(x): memory.add(x) for x in sorted(arrays, key=lambda x: np.subtract(*bounds(x)))}
    if kernel.has_zeros:
        memory.zeros, _ = memory.add(np.zeros(VECTOR_BYTES, np.uint8))
    values = []
    for argument in flat(arguments):
        if isinstance(argument, np.ndarray):
            address, _ = added[id(argument)]
            values += map(np.int64, numbers_of(argument, address))
        elif isinstance(argument, TensorMap):
            address, _ = added[id(argument.array)]
            values.append(np.int64(memory.add_map(argument, address)))
        else:
            values.append(np.asarray(argument))
    kernel.run(grid, threads, shared_bytes, values, memory)
    for array in arrays:
        if array.flags.writeable:
            _, read = added[id(array)]
            array[...] = read()
    return kernel


def flat(arguments):
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from flat(argument)
        else:
            yield argument


def round_to_tf32(x):
    """The bits of float32 rounded to 10 of mantissa, to the nearest, ties away from zero."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), (x.view(np.uint32) + np.uint32(0x1000)) & TF32)


class Block(Hopper):
    """One block of threads; a register is an array with an element for each thread.

    `mask` says which threads are at the instruction; `bits` says the same.
    """

    types = TYPES

    def __init__(self, kernel, index, grid, threads, shared_bytes, parameters, memory):
        self.kernel, self.n, self.parameters, self.memory = kernel, threads, parameters, memory
        self.index, self.shared = index, Shared(shared_bytes)
        self.special = {"%tid.x": np.arange(threads), "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads}
        self.special["%dynamic_smem_size"] = shared_bytes
        for axis, at, extent in zip("xyz", index, grid):
            self.special[f"%ctaid.{axis}"], self.special[f"%nctaid.{axis}"] = at, extent
        self.everyone = (1 << threads) - 1
        self.only(np.ones(threads, bool))
        self.values, self.defined = {}, {}  # of registers; the threads, as bits, that have written them
        self.constants, self.groups = {}, {}  # known operands; groups of threads that were whole
        self.on_the_way = []  # by cp.async: for each copy of some threads these, their groups, places and values
        self.committed = np.zeros(threads, np.int64)  # groups of copies, by each thread
        self.pc, self.pcs, self.done = 0, np.zeros(threads, np.int64), np.zeros(threads, bool)
        self.waiting = np.zeros(threads, np.int64)  # for what, see Hopper
        super().__init__()

    def advance(self):
        """Run until every thread has ended or waits for others. Whether any could go on."""
        went_on = False
        with np.errstate(all="ignore"):
            while True:
                ready = ~self.done & (self.waiting == 0)
                if ready.any():
                    self.pc = self.pcs[ready].min()
                    self._step(ready & (self.pcs == self.pc))
                elif not self.pass_block():
                    return went_on
                went_on = True

    def _step(self, active):
        """Run these threads through the basic block that they are at."""
        self.only(active)
        bits = self.bits
        self.pcs[active] = self.pc + 1
        if self.pc >= len(self.kernel.blocks):
            self.done |= active
            return
        for guard, negated, op, operands, name, line in self.kernel.blocks[self.pc]:
            try:
                if guard:
                    self.only(active & (self.get(guard, "pred") ^ negated))
                if op[0] == "bra":
                    self.pcs[self.mask] = self.kernel.labels[operands[-1]]
                elif op[0] == "ret":
                    self.done |= self.mask
                else:
                    self.kernel.executed[name] += 1
                    getattr(self, f"op_{op[0]}")(op, operands)
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"in {line}")
                raise
            self.mask, self.bits = active, bits

    def only(self, mask):
        self.mask, self.bits = mask, bits_of(mask)

    # ------------------------------------------------------------------------------------------------- registers
    def get(self, token, kind, bits=None):
        """An operand that these threads read. Not to be written to."""
        value = self.values.get(token)
        if value is None:
            return self._constant(token, kind, bits)
        bits = self.bits if bits is None else bits
        if bits & ~self.defined[token]:
            raise AccessError(f"{token} is read before it is written")
        if token in self.sums:
            self.demand_finished(self.sums, token, "is read", bits)
        dtype = DTYPES[kind]
        if value.dtype == dtype or value.dtype == BOOL or dtype == BOOL:
            return value
        if value.itemsize == dtype.itemsize:
            return value.view(dtype)
        return value.astype(f"u{value.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)

    def _constant(self, token, kind, bits):
        """What is no register, or one that nobody has written yet."""
        if (token, kind) not in self.constants:
            if token[0] == "%" and token not in self.special:
                if bits == 0:
                    return np.zeros(self.n, DTYPES[kind])
                raise AccessError(f"{token} is read before it is written")
            constant = np.broadcast_to(self._number(token, DTYPES[kind]), self.n).copy()
            constant.flags.writeable = False
            self.constants[token, kind] = constant
        return self.constants[token, kind]

    def _number(self, token, dtype):
        if token in self.special:
            return np.asarray(self.special[token], np.uint32).view(dtype)
        if token.startswith(("0f", "0d")):
            bits, of = (np.uint32, np.float32) if token[1] == "f" else (np.uint64, np.float64)
            return np.asarray(int(token[2:], 16), bits).view(of)
        if token == "numbattn_shared":
            return np.asarray(self.shared.at, dtype)
        if token.startswith(ZEROS):
            return np.asarray(self.memory.zeros, dtype)
        if token in self.parameters:  # the address of a tensor map
            return np.asarray(self.parameters[token]).view(dtype)
        if dtype == BOOL:
            return np.asarray(bool(int(token, 0)))
        bits = 8 * dtype.itemsize
        return np.asarray(int(token, 0) % 2**bits, f"u{bits // 8}").view(dtype)

    def register(self, token):
        if token not in self.values:
            self.values[token], self.defined[token] = np.zeros(self.n, self.kernel.kind_of(token)), 0
        return self.values[token]

    def put(self, token, value):
        if token == "_":
            return
        register = self.values.get(token)
        if register is None:
            register = self.register(token)
        home = register.dtype
        if value.dtype != home:
            if value.itemsize != home.itemsize:
                wide = value.astype(np.int64) if value.dtype.kind == "i" else value.view(f"u{value.itemsize}")
                value = wide.astype(f"u{home.itemsize}")
            value = value.view(home)
        for registers in (self.sums, self.lefts):
            if token in registers:
                self.demand_finished(registers, token, "is overwritten", self.bits)
        if self.bits == self.everyone:
            register[:] = value
        else:
            np.copyto(register, value, where=self.mask)
        self.defined[token] |= self.bits

    # ----------------------------------------------------------------------------------------------- arithmetic
    def elementwise(function):
        def op(self, op, args):
            kind = op[-1]
            if not kind.endswith("x2"):
                self.put(args[0], function(*[self.get(arg, kind) for arg in args[1:]]))
                return
            half = TYPES[kind[:-2]]
            pairs = [self.get(arg, "u32").view(half).astype(np.float64) for arg in args[1:]]
            self.put(args[0], function(*pairs).astype(half).view(np.uint32))

        return op

    op_sub = elementwise(lambda a, b: a - b)
    op_and = elementwise(lambda a, b: a & b)
    op_or = elementwise(lambda a, b: a | b)
    op_xor = elementwise(lambda a, b: a ^ b)
    op_not = elementwise(lambda a: ~a)
    op_max = elementwise(np.fmax)

    def op_min(self, op, args):
        smaller = np.minimum if "NaN" in op else np.fmin
        self.put(args[0], smaller(*(self.get(arg, op[-1]) for arg in args[1:])))

    op_neg = elementwise(lambda a: -a)
    op_abs = elementwise(np.abs)
    op_ex2 = elementwise(np.exp2)
    op_lg2 = elementwise(np.log2)
    op_rcp = elementwise(lambda a: (1 / a).astype(a.dtype))
    op_add = elementwise(lambda a, b: a + b)
    op_fma = elementwise(lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(a.dtype))
    op_rem = elementwise(np.fmod)
    op_sqrt = elementwise(np.sqrt)
    op_rsqrt = elementwise(lambda a: (1 / np.sqrt(a)).astype(a.dtype))
    op_copysign = elementwise(lambda sign, size: np.copysign(size, sign))
    op_popc = elementwise(np.bitwise_count)
    del elementwise

    def op_mul(self, op, args, plus=None):
        kind = op[-1]
        a, b = (self.get(arg, kind) for arg in args[1:3])
        if op[1] == "wide":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            product, kind = a.astype(TYPES[wide]) * b.astype(TYPES[wide]), wide
        elif op[1] == "hi":
            bits = 8 * a.itemsize
            whole = a.astype(object) * b.astype(object)
            product = np.array([int(x) >> bits for x in whole], object).astype(TYPES[kind])
        else:
            product = a * b
        self.put(args[0], product if plus is None else product + self.get(plus, kind))

    def op_mad(self, op, args):
        self.op_mul(op, args, args[3])

    def op_div(self, op, args):
        a, b = (self.get(arg, op[-1]) for arg in args[1:])
        if op[-1] in ("f32", "f64"):
            return self.put(args[0], a / b)
        exact = [int(math.copysign(abs(x) // abs(y), x * y)) if y else 0 for x, y in zip(a.tolist(), b.tolist())]
        self.put(args[0], np.array(exact, a.dtype))

    def op_shl(self, op, args):
        a, n = self.get(args[1], op[-1]), self.get(args[2], "u32")
        self.put(args[0], np.where(n < 8 * a.itemsize, a << n.astype(a.dtype), 0).astype(a.dtype))

    def op_shr(self, op, args):
        a, n = self.get(args[1], op[-1]), self.get(args[2], "u32")
        self.put(args[0], a >> np.minimum(n, 8 * a.itemsize - 1).astype(a.dtype) if op[-1][0] == "s" else
                 np.where(n < 8 * a.itemsize, a >> n.astype(a.dtype), 0).astype(a.dtype))  # fmt: skip

    def op_shf(self, op, args):
        low, high, n = (self.get(arg, "u32").astype(np.uint64) for arg in args[1:])
        both = high << np.uint64(32) | low
        n = n & np.uint64(31) if op[2] == "wrap" else np.minimum(n, np.uint64(32))
        self.put(args[0], (both << n >> np.uint64(32) if op[1] == "l" else both >> n).astype(np.uint32))

    def op_prmt(self, op, args):
        a, b, select = (self.get(arg, "u32").astype(np.uint64) for arg in args[1:])
        both, out = b << np.uint64(32) | a, np.zeros(self.n, np.uint64)
        for i in range(4):
            nibble = select >> np.uint64(4 * i) & np.uint64(15)
            if (nibble[self.mask] > 7).any():
                raise NotImplementedError("prmt that spreads a sign")
            out |= (both >> (nibble * np.uint64(8)) & np.uint64(255)) << np.uint64(8 * i)
        self.put(args[0], out.astype(np.uint32))

    def op_lop3(self, op, args):
        a, b, c = (self.get(arg, "b32") for arg in args[1:4])
        table, out = int(args[4], 0), np.zeros(self.n, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.put(args[0], out)

    def op_bfe(self, op, args):
        a, at, size = self.get(args[1], op[-1]), int(args[2]), int(args[3])
        bits = 8 * a.itemsize
        self.put(args[0], (a << a.dtype.type(bits - at - size)) >> a.dtype.type(bits - size))

    def op_bfi(self, op, args):
        a, b = (self.get(arg, op[-1]) for arg in args[1:3])
        at, size = int(args[3]), int(args[4])
        field = a.dtype.type(((1 << size) - 1) << at)
        self.put(args[0], (b & ~field) | (a << a.dtype.type(at) & field))

    def op_mov(self, op, args):
        if args[0][0] == "{":
            parts = members(args[0])
            whole = np.ascontiguousarray(self.get(args[1], op[-1]))
            for name, value in zip(parts, whole.view(f"u{whole.itemsize // len(parts)}").reshape(self.n, -1).T):
                self.put(name, value.copy())
        elif args[1][0] == "{":
            parts = members(args[1])
            kind = f"b{8 * np.dtype(TYPES[op[-1]]).itemsize // len(parts)}"
            whole = np.stack([self.get(name, kind) for name in parts], 1)
            self.put(args[0], whole.view(TYPES[op[-1]])[:, 0])
        elif args[1] in self.sums:
            self.copy_of_sum(*args, op[-1])
        else:
            self.put(args[0], self.get(args[1], op[-1]))

    def op_cvt(self, op, args):
        to, source = op[-2], op[-1]
        if source == "e4m3x2":
            pairs = self.get(args[1], "u16").view(ml_dtypes.float8_e4m3fn)
            return self.put(args[0], pairs.astype(np.float16).view(np.uint32))
        if to in ("f16x2", "bf16x2"):
            values = [self.get(arg, source) for arg in args[:0:-1]]
            if "relu" in op:
                values = [np.maximum(value, 0) for value in values]
            halves = [value.astype(TYPES[to[:-2]]).view(np.uint16) for value in values]
            return self.put(args[0], np.stack(halves, 1).view(np.uint32)[:, 0])
        value = self.get(args[1], source)
        if to == "tf32":
            return self.put(args[0], round_to_tf32(value))
        if source[0] in "bf" and op[1] in ("rni", "rzi", "rmi", "rpi"):
            rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[op[1]]
            value = rounding(value)
        self.put(args[0], value.astype(TYPES[to]))

    def op_cvta(self, op, args):
        self.put(args[0], self.get(args[1], "u64"))

    def op_setp(self, op, args):
        a, b = (self.get(arg, op[-1]) for arg in args[1:3])
        how = op[1]
        if how in ("nan", "num"):
            result = (np.isnan(a) | np.isnan(b)) == (how == "nan")
        elif how in COMPARE:
            result = COMPARE[how](a, b)
            if op[-1][0] == "f" and how == "ne":
                result &= ~(np.isnan(a) | np.isnan(b))
        else:  # ltu, geu, ...: true where unordered
            result = COMPARE[how[:2]](a, b) | np.isnan(a) | np.isnan(b)
        if op[2] in ("and", "or", "xor"):
            other = self.get(args[3], "pred")
            result = {"and": result & other, "or": result | other, "xor": result ^ other}[op[2]]
        self.put(args[0], result)

    def op_selp(self, op, args):
        # the value that is not chosen may be undefined
        chosen = self.get(args[3], "pred")
        bits = bits_of(chosen)
        yes, no = self.get(args[1], op[-1], self.bits & bits), self.get(args[2], op[-1], self.bits & ~bits)
        self.put(args[0], np.where(chosen, yes, no))

    # ------------------------------------------------------------------------------------------- warp operations
    def _whole(self, size, what):
        """Which warps, or groups of another size, are here, all of their threads."""
        if (self.bits, size) not in self.groups:
            groups = np.resize(self.mask, (-(-self.n // size), size))
            if self.n % size or (groups.any(1) != groups.all(1)).any():
                raise RuntimeError(f"{what} that not all {size} threads come to")
            self.groups[self.bits, size] = np.flatnonzero(groups.any(1))
        return self.groups[self.bits, size]

    def op_shfl(self, op, args):
        self._whole(WARP, "a shuffle")
        thread, lane = np.arange(self.n), self.get(args[2], "u32").astype(np.int64)
        if op[2] not in ("bfly", "idx"):
            raise NotImplementedError("shfl." + op[2])
        source = thread ^ lane if op[2] == "bfly" else thread // WARP * WARP + lane % WARP
        self.put(args[0], self.get(args[1], "b32")[source])

    def op_brev(self, op, args):
        bits = np.unpackbits(self.get(args[1], "u32").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        self.put(args[0], np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32).ravel())

    def op_clz(self, op, args):
        word = self.get(args[1], "u32").astype(np.float64)
        self.put(args[0], 32 - np.where(word > 0, np.frexp(word)[1], 0))

    def op_vote(self, op, args):
        self._whole(WARP, "a vote")
        mine = (self.get(args[1], "pred") & self.mask).reshape(-1, WARP)
        if op[2] not in ("any", "ballot"):
            raise NotImplementedError("vote." + op[2])
        result = mine.any(1) if op[2] == "any" else np.packbits(mine, axis=1, bitorder="little").view(np.uint32)
        self.put(args[0], np.repeat(result, WARP))

    def op_griddepcontrol(self, op, args):
        pass  # kernels run one after the other

    def op_prefetch(self, op, args):
        """Changes nothing."""

    def op_trap(self, op, args):
        if self.mask.any():
            raise RuntimeError("trap")

    def op_ldmatrix(self, op, args):
        self._whole(WARP, "ldmatrix")
        address, here = self.address(args[1]), self.mask.reshape(-1, WARP)[:, 0]
        places = self.shared.places(address[self.mask], 16, "ldmatrix", read=True)
        rows = np.zeros((self.n // WARP, 4, 8, 8), np.uint16)  # warp, matrix, row, column
        rows[here] = places.of(self.shared.bytes).view(np.uint16).reshape(-1, 4, 8, 8)
        self._count_conflicts(".".join(op), address[self.mask].reshape(-1, 8), 16)
        if "trans" in op:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        words = rows.view(np.uint32).reshape(-1, 4, WARP)  # a lane has two of a row's elements
        for i, name in enumerate(members(args[0])):
            self.put(name, words[:, i].reshape(-1))

    def op_stmatrix(self, op, args):
        self._whole(WARP, "stmatrix")
        address, names = self.address(args[0]), members(args[1])
        rows = np.zeros((self.n // WARP, 4, 8, 4), np.uint32)  # warp, matrix, row, two columns
        for i, name in enumerate(names):
            rows[:, i] = self.get(name, "b32").reshape(-1, 8, 4)
        if "trans" in op:
            rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
        here = self.mask.reshape(-1, WARP)[:, 0]
        places = self.shared.places(address[self.mask], 16, "stmatrix", read=False)
        self.shared.write(places, rows[here].reshape(-1, 4).view(np.uint8), np.flatnonzero(self.mask))
        self._count_conflicts(".".join(op), address[self.mask].reshape(-1, 8), 16)

    def op_mma(self, op, args):
        self._whole(WARP, "mma")
        kind, (d, a, b, c) = op[-3], map(members, args)
        height, depth = map(int, re.fullmatch(r"m(\d+)n8k(\d+)", op[3]).groups())
        pair = 2 if kind in ("f16", "bf16") else 1  # elements in a register

        def operand(names):
            """Elements [..., warp, lane // 4, lane % 4, element] of registers, which lie along k, then along rows."""
            bits = np.stack([self.get(name, "b64" if kind == "f64" else "b32") for name in names])
            values = (bits & TF32).view(np.float32) if kind == "tf32" else bits.view(TYPES[kind])
            return values.astype(np.float64).reshape(-1, height // 8, self.n // WARP, 8, 4, pair)

        # the smallest form, m8n8k4, has only the first register of each operand and the first row of the sums
        A = operand(a).transpose(2, 1, 3, 0, 4, 5).reshape(-1, height, depth)
        B = operand(b).reshape(-1, self.n // WARP, 8, 4, pair).transpose(1, 0, 3, 4, 2).reshape(-1, depth, 8)
        sums = (A @ B).reshape(-1, height // 8, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(len(d), self.n)
        sums = sums + np.stack([self.get(name, op[-1]) for name in c])
        for name, found in zip(d, sums if kind == "f64" else truncated(sums)):
            self.put(name, found)

    # ------------------------------------------------------------------------------------------------- memory
    def address(self, token):
        name, offset = split_address(token)
        kind = "u64" if name[0] == "%" and self.register(name).itemsize == 8 else "u32"
        return self.get(name, kind).astype(np.int64) + offset

    def op_ld(self, op, args):
        if "param" in op:
            value = self.parameters[args[1].strip("[]")].tobytes().ljust(8, b"\0")
            return self.put(args[0], np.full(self.n, np.frombuffer(value, TYPES[op[-1]])[0]))
        if "acquire" in op:
            self.try_number()
        self._access(op, members(args[0]), args[1], read=True)

    def op_st(self, op, args):
        if op[1] == "async":
            self.store_in_peer(op, args)
            return
        self._access(op, members(args[1]), args[0], read=False)
        if "release" in op:
            self.have_posted()

    def op_cp(self, op, args):
        """cp.async: what is copied arrives when it is waited for, at the latest moment that there may be."""
        if "bulk" in op[2:4]:
            return self.bulk(op, args)
        active = self.mask
        if op[2] == "commit_group":
            self.committed[active] += 1
            return
        if op[2] in ("wait_all", "wait_group"):
            self.finish_copies(active, self.committed + 1 if op[2] == "wait_all" else self.committed - int(args[0]))
            return
        if not active.any():
            return
        size = int(args[2])
        whole = ~self.get(args[3], "pred")[active]  # else zeros
        target, source = self.address(args[0])[active], self.address(args[1])[active]
        places = self.shared.places(target, size, ".".join(op), read=False)
        values = np.zeros((len(target), size), np.uint8)
        values[whole] = self.memory.places(source[whole], size, ".".join(op), read=True).of(self.memory.bytes)
        self.shared.write(places, 0, np.flatnonzero(active))
        places.set(self.shared.written, False)  # until it has arrived
        self._wavefronts(".".join(op), self.address(args[0]), size)
        self._count_split_lines(*(self.address(place) for place in args[:2]), size)
        threads = np.flatnonzero(active)
        self.on_the_way.append((threads, self.committed[threads], places, values))

    def finish_copies(self, active, end):
        """What active threads have copied in groups before number `end`, of each thread, is there."""
        left = []
        for threads, groups, places, values in self.on_the_way:
            here = active[threads] & (groups < end[threads])
            arrived = Places(places.size, places.rows[here])
            arrived.set(self.shared.bytes, values[here])
            arrived.set(self.shared.written, True)
            if not here.all():
                left.append((threads[~here], groups[~here], Places(places.size, places.rows[~here]), values[~here]))
        self.on_the_way = left

    def _access(self, op, names, place, read):
        dtype, active = np.dtype(TYPES[op[-1]]), self.mask
        if not active.any():
            return
        memory, size = self.shared if "shared" in op else self.memory, dtype.itemsize * len(names)
        address = self.address(place)
        places = memory.places(address[active], size, ".".join(op), read, parts=len(names))
        if memory is self.shared:
            self._wavefronts(".".join(op), address, size)
        if not read:
            values = np.stack([self.get(name, op[-1])[active] for name in names], 1)
            memory.write(places, values.view(np.uint8), np.flatnonzero(active))
            return
        values = places.of(memory.bytes).view(dtype)
        written = places.of(memory.written).reshape(len(values), len(names), -1).all(2)
        everything = written.all()
        for i, name in enumerate(names):
            value = np.zeros(self.n, dtype)
            value[active] = values[:, i]
            self.put(name, value)
            if not everything and name != "_":  # it may be padding, of which nothing may be made
                unwritten = active.copy()
                unwritten[active] = ~written[:, i]
                self.defined[name] &= ~bits_of(unwritten)

    def op_atom(self, op, args):
        kind, memory = np.dtype(TYPES[op[-1]]), self.shared if "shared" in op else self.memory
        change = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and,
                  "exch": lambda old, new: new, "inc": lambda old, last: old + 1 if old < last else 0}  # fmt: skip
        change = next(change[part] for part in op[1:] if part in change)
        address, given, found = self.address(args[1]), self.get(args[2], op[-1]), np.zeros(self.n, kind)
        for thread in np.flatnonzero(self.mask):
            places = memory.places(address[thread : thread + 1], kind.itemsize, ".".join(op), read=True)
            found[thread] = places.of(memory.bytes).view(kind)[0, 0]
            value = np.asarray(change(found[thread], given[thread]), kind).reshape(1, 1)
            memory.write(places, value.view(np.uint8), np.array([thread]))
        self.put(args[0], found)

    def op_red(self, op, args):
        if op[-2] != "v4":
            return self.op_atom(op, ["_", *args])
        base, offset = split_address(args[0])
        if (self.address(args[0])[self.mask] % 16).any():
            raise AccessError(f"{'.'.join(op)}: not aligned to 16 bytes")
        for i, name in enumerate(members(args[1])):
            self.op_atom((*op[:-2], op[-1]), ["_", f"[{base}+{offset + 4 * i}]", name])

    def op_membar(self, op, args):
        """All see all memory at once."""

    def _wavefronts(self, name, address, size):
        """A warp's access goes in groups of lanes that make 128 bytes; in each a bank serves one word at a time."""
        lanes = max(1, min(WARP, 128 // size))
        whole = self.mask.reshape(-1, WARP).all(1)
        self._count_conflicts(name, address.reshape(-1, WARP)[whole].reshape(-1, lanes), size)

    def _count_split_lines(self, target, source, size):
        """What lanes copy of one line of global memory, and what does not arrive in one line of shared memory."""
        lanes = LINE // size
        whole = self.mask.reshape(-1, lanes).all(1)
        targets, sources = (x.reshape(-1, lanes)[whole] // LINE for x in (target, source))
        one_line = (sources == sources[:, :1]).all(1)
        self.kernel.split_lines += int((targets != targets[:, :1])[one_line].any(1).sum())

    def _count_conflicts(self, name, addresses, size):
        """Of each row of addresses. Where a row begins makes no difference."""
        pattern = addresses - addresses[:, :1] // 4 * 4
        self.kernel.conflicts[name] += conflicts(pattern.tobytes(), addresses.shape[1], size)

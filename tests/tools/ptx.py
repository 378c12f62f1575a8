"""Run the PTX of a kernel in NumPy: all threads of a block at once, diverged ones by the lowest program counter first.

It checks what no compiler does and no GPU tells: that each access is aligned and lies within an array, that nothing is
read before it is written, registers and shared memory alike, and how many bank conflicts there are. It knows the
instructions that the kernels use, and refuses others. It runs in lockstep, so it sees no races: `simulate` does.
"""

import math
import re
from collections import Counter

import ml_dtypes
import numpy as np

from .hopper import DeadlockError, Hopper, members, truncated
from .memory import GLOBAL_BASE, AccessError, Memory, Shared, TensorMap, bounds

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
WARP, BANKS = 32, 32
TF32 = np.uint32(0xFFFFE000)  # the bits of a float32 that tensor cores look at
STATEMENT = re.compile(r"""
    (?P<line>//.*|\.(?:loc|file)\b.*) | (?P<directive>\.[^;]*;) | (?P<brace>[{}]) | (?P<label>[\w$]+)\s*: |
    (?P<instruction>[^\s;{}][^;]*;)
""", re.X)  # fmt: skip


class Kernel:
    """The one kernel of a PTX text."""

    def __init__(self, ptx):
        body = ptx[ptx.index(".visible .entry") :]
        head, body = body[: body.index("{")], body[body.index("{") + 1 : body.rindex("}")]
        self.parameters = re.findall(r"\.param (?:\.align \d+ )?\.\w+ (\w+)", head)
        self.kinds, self.blocks, self.labels = {}, [[]], {}
        statements = list(self._statements(body))
        for scope, kind, text in statements:
            if kind == "label":
                self.blocks.append([])
                self.labels[scope.rename(text)] = len(self.blocks) - 1
            else:
                self._add(scope, text)
        self.conflicts = Counter()  # wavefronts beyond the fewest possible, by instruction
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
        name, *_ = op = op.split(".")
        if op[:2] == ["mbarrier", "try_wait"] and self.blocks[-1]:
            self.blocks.append([])  # where threads come again
        if name == "wgmma" and op[1] in ("fence", "wait_group"):  # where the warps wait for each other
            self.blocks[-1].append((None, False, ["meet"], [], ""))
            self.blocks.append([])
        operands = split_operands(re.sub(r"[%$\w]+", lambda name: scope.rename(name[0]), operands))
        self.blocks[-1].append((guard and scope.rename(guard), bool(negated), op, operands, line))
        if name in ("bra", "ret", "bar", "barrier") or op[:2] == ["mbarrier", "try_wait"]:
            self.blocks.append([])

    def count(self, pattern):
        """How many instructions there are that match."""
        return sum(bool(re.search(pattern, line)) for block in self.blocks for *_, line in block)

    def run(self, grid, threads, shared_bytes, values, memory):
        parameters = dict(zip(self.parameters, values, strict=True))
        for z, y, x in np.ndindex(grid[::-1]):
            Block(self, (x, y, z), grid, threads, shared_bytes, parameters, memory).run()


class Scope:
    """Names between braces, those of the whole kernel as they are, others made unique."""

    def __init__(self, suffix="", outer=None):
        self.suffix, self.outer, self.names = suffix, outer, {}

    def add(self, name):
        self.names[name] = f"%{name.strip('%')}{self.suffix}" if self.outer else name
        return self.names[name]

    def rename(self, name):
        return self.names.get(name) or (self.outer.rename(name) if self.outer else name)


def split_operands(text):
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def interpret(ptx, grid, threads, shared_bytes, *arguments):
    """Launch a kernel on NumPy arrays, in place, TensorMaps of them, scalars of NumPy's types and tuples of them.

    Returns the Kernel, which has counts.
    """
    kernel, memory = ptx if isinstance(ptx, Kernel) else Kernel(ptx), Memory(1 << 16, GLOBAL_BASE)
    arrays = [x for x in (getattr(x, "array", x) for x in flat(arguments)) if isinstance(x, np.ndarray)]
    added = {id(x): memory.add(x) for x in sorted(arrays, key=lambda x: np.subtract(*bounds(x)))}
    values = []
    for argument in flat(arguments):
        if isinstance(argument, np.ndarray):
            address, _ = added[id(argument)]
            numbers = 0, 0, argument.size, argument.itemsize, address, *argument.shape, *argument.strides
            values += map(np.int64, numbers)
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
    """One block of threads; a register is an array with an element for each thread."""

    types = TYPES

    def __init__(self, kernel, index, grid, threads, shared_bytes, parameters, memory):
        self.kernel, self.n, self.parameters, self.memory = kernel, threads, parameters, memory
        self.index, self.shared = index, Shared(shared_bytes)
        self.special = {"%tid.x": np.arange(threads), "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads}
        self.special["%dynamic_smem_size"] = shared_bytes
        for axis, at, extent in zip("xyz", index, grid):
            self.special[f"%ctaid.{axis}"], self.special[f"%nctaid.{axis}"] = at, extent
        self.values, self.mask = {}, np.ones(threads, bool)
        self.defined = {}
        self.on_the_way = []
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
        self.mask = active
        self.pcs[active] = self.pc + 1
        if self.pc >= len(self.kernel.blocks):
            self.done |= active
            return
        for guard, negated, op, operands, line in self.kernel.blocks[self.pc]:
            taken = active if guard is None else active & (self.get(guard, "pred") ^ negated)
            try:
                if op[0] == "bra":
                    self.pcs[taken] = self.kernel.labels[operands[-1]]
                elif op[0] == "ret":
                    self.done |= taken
                else:
                    self.mask = taken
                    self.kernel.executed[".".join(op)] += 1
                    getattr(self, f"op_{op[0]}")(op, operands)
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"in {line}")
                raise
            self.mask = active

    # ------------------------------------------------------------------------------------------------- registers
    def kind_of(self, name):
        return self.kernel.kinds.get(name) or self.kernel.kinds[re.match(r"%[a-zA-Z_]+", name)[0]]

    def get(self, token, kind):
        dtype = np.dtype(TYPES[kind])
        if token in self.special:
            return np.broadcast_to(np.asarray(self.special[token], np.uint32), self.n).view(dtype)
        if token in self.values:
            if token in self.sums:
                self.demand_finished(self.sums, token, "is read")
            if not self.defined[token][self.mask].all():
                raise AccessError(f"{token} is read before it is written")
            value = self.values[token]
            if value.dtype == np.bool_ or dtype == np.bool_:
                return value
            if value.itemsize == dtype.itemsize:
                return value.view(dtype)
            return value.astype(f"u{value.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)
        if token.startswith(("0f", "0d")):
            bits, of = (np.uint32, np.float32) if token[1] == "f" else (np.uint64, np.float64)
            return np.full(self.n, int(token[2:], 16), bits).view(of)
        if token == "numbattn_shared":
            return np.full(self.n, self.shared.at, dtype)
        if token in self.parameters:  # the address of a tensor map
            return np.full(self.n, self.parameters[token]).view(dtype)
        if token.startswith("%"):
            raise AccessError(f"{token} is read before it is written")
        if dtype == np.bool_:
            return np.full(self.n, bool(int(token, 0)))
        bits = 8 * dtype.itemsize
        return np.full(self.n, int(token, 0) % 2**bits, f"u{bits // 8}").view(dtype)

    def put(self, token, value):
        if token == "_":
            return
        home, value = np.dtype(self.kind_of(token)), np.broadcast_to(value, self.n)
        if home != np.bool_:
            if value.itemsize != home.itemsize:
                wide = value.astype(np.int64) if value.dtype.kind == "i" else value.view(f"u{value.itemsize}")
                value = wide.astype(f"u{home.itemsize}")
            value = value.view(home)
        for registers in (self.sums, self.lefts):
            if token in registers:
                self.demand_finished(registers, token, "is overwritten")
        old = self.values.get(token)
        if old is None:
            old, self.defined[token] = np.zeros(self.n, home), np.zeros(self.n, bool)
        self.values[token] = np.where(self.mask, value, old)
        self.defined[token] = self.defined[token] | self.mask

    # ----------------------------------------------------------------------------------------------- arithmetic
    def elementwise(function):
        def op(self, op, args):
            self.put(args[0], function(*(self.get(arg, op[-1]) for arg in args[1:])))

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
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
                   "hs": np.greater_equal}  # fmt: skip
        how = op[1]
        if how in ("nan", "num"):
            result = (np.isnan(a) | np.isnan(b)) == (how == "nan")
        elif how in compare:
            result = compare[how](a, b)
            if op[-1][0] == "f" and how == "ne":
                result &= ~(np.isnan(a) | np.isnan(b))
        else:  # ltu, geu, ...: true where unordered
            result = compare[how[:2]](a, b) | np.isnan(a) | np.isnan(b)
        if op[2] in ("and", "or", "xor"):
            other = self.get(args[3], "pred")
            result = {"and": result & other, "or": result | other, "xor": result ^ other}[op[2]]
        self.put(args[0], result)

    def op_selp(self, op, args):
        # the value that is not chosen may be undefined
        chosen, mask = self.get(args[3], "pred"), self.mask
        self.mask = mask & chosen
        yes = self.get(args[1], op[-1]) if self.mask.any() else np.zeros(self.n, TYPES[op[-1]])
        self.mask = mask & ~chosen
        no = self.get(args[2], op[-1]) if self.mask.any() else np.zeros(self.n, TYPES[op[-1]])
        self.mask = mask
        self.put(args[0], np.where(chosen, yes, no))

    # ------------------------------------------------------------------------------------------- warp operations
    def _whole(self, size, what):
        """Which warps, or groups of another size, are here, all of their threads."""
        groups = np.resize(self.mask, (-(-self.n // size), size))
        if self.n % size or (groups.any(1) != groups.all(1)).any():
            raise RuntimeError(f"{what} that not all {size} threads come to")
        return np.flatnonzero(groups.any(1))

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
        rows[here] = self.shared.bytes[places].view(np.uint16).reshape(-1, 4, 8, 8)
        for quarter in address[self.mask].reshape(-1, 8):
            self._count_conflicts(".".join(op), quarter, 16, 8)
        lane = np.arange(WARP)
        for i, name in enumerate(members(args[0])):
            matrix = rows[:, i].swapaxes(1, 2) if "trans" in op else rows[:, i]
            low, high = (matrix[:, lane // 4, 2 * (lane % 4) + half].astype(np.uint32) for half in range(2))
            self.put(name, (low | high << 16).reshape(-1))

    def op_stmatrix(self, op, args):
        self._whole(WARP, "stmatrix")
        address, names = self.address(args[0]), members(args[1])
        rows = np.zeros((self.n // WARP, 4, 8, 8), np.uint16)  # warp, matrix, row, column
        lane = np.arange(WARP)
        for i, name in enumerate(names):
            words = self.get(name, "b32").reshape(-1, WARP)
            for half in range(2):
                rows[:, i, lane // 4, 2 * (lane % 4) + half] = words >> 16 * half & 0xFFFF
        here = self.mask.reshape(-1, WARP)[:, 0]
        places = self.shared.places(address[self.mask], 16, "stmatrix", read=False)
        self.shared.write(places, rows[here].reshape(-1, 8).view(np.uint8), np.flatnonzero(self.mask))
        for quarter in address[self.mask].reshape(-1, 8):
            self._count_conflicts(".".join(op), quarter, 16, 8)

    def op_mma(self, op, args):
        self._whole(WARP, "mma")
        kind, (d, a, b, c) = op[-3], map(members, args)
        height, depth = map(int, re.fullmatch(r"m(\d+)n8k(\d+)", op[3]).groups())
        per_register = 2 if kind in ("f16", "bf16") else 1
        lane, half = np.arange(WARP)[:, None], np.arange(per_register)
        line, k = lane // 4, per_register * (lane % 4) + half
        middle = depth // 2

        def operand(shape, names, places):
            out = np.zeros((self.n // WARP, *shape), np.float64)
            for name, (rows, cols) in zip(names, places):
                bits = np.ascontiguousarray(self.get(name, "b64" if kind == "f64" else "b32"))
                values = (bits & TF32).view(np.float32) if kind == "tf32" else bits.view(TYPES[kind])
                out[:, rows, cols] = values.reshape(-1, WARP, per_register)
            return out

        # the smallest form, m8n8k4, has only the first register of each operand and the first row of the sums
        A = operand((height, depth), a, ((line, k), (line + 8, k), (line, k + middle), (line + 8, k + middle)))
        B = operand((depth, 8), b, ((k, line), (k + middle, line)))
        products = A @ B
        for out, add, (row, half) in zip(d, c, ((0, 0), (0, 1), (8, 0), (8, 1))):
            found = products[:, lane // 4 + row, 2 * (lane % 4) + half].reshape(-1) + self.get(add, op[-1])
            self.put(out, found if kind == "f64" else truncated(found))

    # ------------------------------------------------------------------------------------------------- memory
    def address(self, token):
        name, offset = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", token).groups()
        kind = "u64" if name[0] == "%" and np.dtype(self.kind_of(name)).itemsize == 8 else "u32"
        return self.get(name, kind).astype(np.int64) + int(offset or 0)

    def op_ld(self, op, args):
        if "param" in op:
            value = self.parameters[args[1].strip("[]")].tobytes().ljust(8, b"\0")
            return self.put(args[0], np.full(self.n, np.frombuffer(value, TYPES[op[-1]])[0]))
        self._access(op, members(args[0]), args[1], read=True)

    def op_st(self, op, args):
        self._access(op, members(args[1]), args[0], read=False)

    def op_cp(self, op, args):
        """cp.async: what is copied arrives when it is waited for, at the latest moment that there may be."""
        if "bulk" in op[2:4]:
            return self.bulk(op, args)
        if op[2] == "wait_all":
            for places, values in self.on_the_way:
                self.shared.bytes[places], self.shared.written[places] = values, True
            self.on_the_way = []
            return
        active = self.mask
        if not active.any():
            return
        size, used = int(args[2]), self.get(args[3], "u32")[active]
        target, source = self.address(args[0])[active], self.address(args[1])[active]
        places = self.shared.places(target, size, ".".join(op), read=False)
        values = np.zeros(places.shape, np.uint8)
        whole = used == size
        if not (whole | (used == 0)).all():
            raise NotImplementedError("cp.async of a part")
        values[whole] = self.memory.bytes[self.memory.places(source[whole], size, ".".join(op), read=True)]
        self.shared.write(places, 0, np.flatnonzero(active))
        self.shared.written[places] = False  # until it has arrived
        self.on_the_way.append((places, values))

    def _access(self, op, names, place, read):
        dtype, active = np.dtype(TYPES[op[-1]]), self.mask
        if not active.any():
            return
        memory, size = self.shared if "shared" in op else self.memory, dtype.itemsize * len(names)
        address = self.address(place)
        places = memory.places(address[active], size, ".".join(op), read, parts=len(names))
        if memory is self.shared:
            self._wavefronts(".".join(op), address, size)
        for i, name in enumerate(names):
            at = places[:, i * dtype.itemsize : (i + 1) * dtype.itemsize]
            if read:
                value = np.zeros(self.n, dtype)
                value[active] = memory.bytes[at].view(dtype)[:, 0]
                self.put(name, value)
                if name != "_":  # it may be padding, of which nothing may be made
                    self.defined[name][active] = memory.written[at].all(1)
            else:
                values = np.ascontiguousarray(self.get(name, op[-1])[active])
                memory.write(at, values[:, None].view(np.uint8), np.flatnonzero(active))

    def op_atom(self, op, args):
        kind, memory = np.dtype(TYPES[op[-1]]), self.shared if "shared" in op else self.memory
        change = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and,
                  "exch": lambda old, new: new, "inc": lambda old, last: old + 1 if old < last else 0}  # fmt: skip
        change = next(change[part] for part in op[1:] if part in change)
        address, given, found = self.address(args[1]), self.get(args[2], op[-1]), np.zeros(self.n, kind)
        for thread in np.flatnonzero(self.mask):
            places = memory.places(address[thread : thread + 1], kind.itemsize, ".".join(op), read=True)
            found[thread] = memory.bytes[places].view(kind)[0, 0]
            value = np.asarray(change(found[thread], given[thread]), kind).reshape(1, 1)
            memory.write(places, value.view(np.uint8), np.array([thread]))
        self.put(args[0], found)

    def op_red(self, op, args):
        self.op_atom(op, ["_", *args])

    def op_membar(self, op, args):
        """All see all memory at once."""

    def _wavefronts(self, name, address, size):
        """A warp's access goes in groups of lanes that make 128 bytes; in each a bank serves one word at a time."""
        lanes = max(1, min(WARP, 128 // size))
        for warp, active in zip(address.reshape(-1, WARP), self.mask.reshape(-1, WARP)):
            if active.all():
                for group in warp.reshape(-1, lanes):
                    self._count_conflicts(name, group, size, lanes)

    def _count_conflicts(self, name, addresses, size, lanes):
        words = {int(a) // 4 + i for a in addresses for i in range(max(1, size // 4))}
        degree = max(Counter(word % BANKS for word in words).values())
        self.kernel.conflicts[name] += degree - 1

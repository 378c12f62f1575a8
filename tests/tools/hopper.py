"""What blocks of Hopper can do, for the interpreter of PTX: barriers in memory, boxes, warpgroups' products.

Copies and products have their values at once; what a program may know of them comes at the latest moment there may be.
A box that is copied arrives when no thread can go on without one, and those that were started last arrive first. Until
a product is waited for, its sums must not be read, nor its left operand in registers or its tiles in shared memory be
overwritten.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .memory import ATOM, CHUNK, PEER, ROW, AccessError, swizzled

WARP, WARPGROUP = 32, 128
NAMED_BARRIERS = 16
# What threads wait for: these, a named barrier's number + 1, an mbarrier's address
OF_WARP, OF_WARPGROUP, OF_POST, OF_CLUSTER = 17, 18, 19, 20
WHOLE = (1 << WARPGROUP) - 1  # of a warpgroup, all threads as bits
DEPTH = 16  # of a product
HALVES = ("f16", "bf16")
OF_BLOCK = 1 << 28  # added to addresses in the shared memory of a cluster's block, once more than its rank
CACHE_POLICIES = (0x12F0000000000000,)  # evict_first, of all lines


class DeadlockError(RuntimeError):
    """No thread can go on."""


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    thread: int  # that has initialised it
    pending: int  # arrivals that this phase still waits for
    nbytes: int = 0  # that are still to come
    phase: int = 0
    fenced: bool = False  # whether the TMA may use it


@dataclass
class Group:
    """Of asynchronous work, how much has been started, and what it reads in shared memory."""

    number: int = 1  # of the work that is not committed yet
    finished: int = 0  # the last number that has been waited for
    fenced: bool = False  # whether the registers of the products that are not committed yet are ready
    reads: list = field(default_factory=list)  # (number, places)

    def read(self, shared, places):
        places.set(shared.users, places.of(shared.users) + 1)
        self.reads.append((self.number, places))

    def commit(self):
        self.number += 1

    def wait(self, shared, later):
        self.finished = max(self.finished, self.number - 1 - later)
        for number, places in self.reads:
            if number <= self.finished:
                places.set(shared.users, places.of(shared.users) - 1)
        self.reads = [(number, places) for number, places in self.reads if number > self.finished]


@lru_cache(4096)
def members(vector):
    """The names in "{%r1, %r2}"."""
    return tuple(part.strip() for part in vector.strip("{}").split(","))


def bits_of(mask):
    """Threads as bits of an int: what is done for every instruction is cheapest so."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def truncated(x):
    """float64 to float32 as tensor cores round their sums, which is towards zero; what is too large is infinite."""
    nearest = x.astype(np.float32)
    return np.where((np.abs(nearest) > np.abs(x)) & np.isfinite(nearest), np.nextafter(nearest, np.float32(0)), nearest)


def ranges(mask):
    """Which are set: "0-127, 256"."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return ", ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in edges.reshape(-1, 2))


def registers_of_sums(sums):
    """64 x cols sums of a warpgroup as [register, thread]: see the manual's figure of wgmma's accumulator."""
    return sums.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, WARPGROUP)


def run_together(blocks):
    """Run the blocks of a cluster, or the one of none, until all threads have ended."""
    for rank, block in enumerate(blocks):
        block.cluster, block.special["%cluster_ctarank"] = blocks, rank
    while not all(block.done.all() for block in blocks):
        went_on = [block.advance() for block in blocks]
        if any(went_on) or pass_cluster(blocks):
            continue
        if not any(block.receive() for block in blocks):
            raise DeadlockError("nobody can go on:\n" + "\n".join(who for block in blocks for who in block.waits()))
    if any(block.arriving for block in blocks):
        raise AccessError("a block ends while boxes are on their way to it")


def pass_cluster(blocks):
    """Whether all threads of a cluster waited for each other."""
    if not all((block.waiting == OF_CLUSTER).all() for block in blocks):
        return False
    for block in blocks:
        block.waiting[:] = 0
    return True


class Hopper:
    """A part of Block."""

    def __init__(self):
        self.barriers, self.named = {}, {}  # by address; by number: arrivals so far and arrivals that it takes
        self.arriving = []  # boxes on their way here: the address of their barrier, places, values
        self.tried = np.full(self.n, -1)  # where a thread was told that a phase is not over, or loaded a number
        self.products = [Group() for _ in range(-(-self.n // WARPGROUP))]
        self.stores = {}  # by thread: a Group
        self.finished = np.zeros(self.n, np.int64)  # of each thread's products
        self.sums, self.lefts = {}, {}  # registers of products on their way: numbers of the products, by thread

    # ------------------------------------------------------------------------------------------------- waiting
    def waits(self):
        """Who waits for what, in words."""
        for key in np.unique(self.waiting[~self.done]).tolist():
            who = f"block {self.index}: threads {ranges((self.waiting == key) & ~self.done)} wait"
            if key == OF_WARP:
                yield f"{who} for their warp"
            elif key == OF_WARPGROUP:
                yield f"{who} for their warpgroup"
            elif key == OF_CLUSTER:
                yield f"{who} for their cluster"
            elif key == OF_POST:
                yield f"{who} for a number in global memory"
            elif key <= NAMED_BARRIERS:
                arrived, count = self.named.get(key - 1, ("not all", self.n))
                yield f"{who} at barrier {key - 1}, where {arrived} of {count} have arrived"
            else:
                it = self.barriers[key]
                yield (f"{who} for the mbarrier at {key:#x}, byte {key - self.shared.at}: phase {it.phase} lacks "
                       f"{it.pending} of {it.count} arrivals and {it.nbytes} bytes")  # fmt: skip

    def op_bar(self, op, args):
        if op[1] == "warp":
            self._meet(OF_WARP, WARP)
            return
        numbers = self.get(args[0], "u32")
        if (numbers[self.mask] >= NAMED_BARRIERS).any():
            raise RuntimeError(f"barrier {numbers[self.mask].max()} of {NAMED_BARRIERS}")
        for number in np.unique(numbers[self.mask]).tolist():
            here = self.mask & (numbers == number)
            if op[1] == "sync":
                self.waiting[here] = number + 1
            if len(args) > 1:
                self._arrive_at(number, here, self.get(args[1], "u32")[here])

    def _meet(self, key, size):
        """Wait until all threads of the warp, or of a group of another size, are here or have ended."""
        self.waiting[self.mask] = key
        here = self.waiting == key
        whole = (here | self.done).reshape(-1, size).all(1)
        self.waiting[here & np.repeat(whole, size)] = 0

    def op_meet(self, op, args):
        """Before a warpgroup's products, which its warps come to one by one."""
        self._whole(WARP, "wgmma")
        self._meet(OF_WARPGROUP, WARPGROUP)

    def _arrive_at(self, number, here, counts):
        """Come to a barrier that takes so many threads; without a count it takes the whole block."""
        self._whole(WARP, "bar")
        count = int(counts[0])
        arrived, wanted = self.named.get(number, (0, count))
        arrived += int(here.sum())
        if (counts != wanted).any() or count % WARP or arrived > wanted:
            raise RuntimeError(f"barrier {number} of {wanted} threads: {arrived} come, for one of {count}")
        self.named[number] = arrived, wanted
        if arrived == wanted:
            if not (self.waiting == number + 1).any():
                raise RuntimeError(f"barrier {number}: {arrived} threads have arrived, nobody waits")
            self.waiting[self.waiting == number + 1] = 0
            del self.named[number]

    def pass_block(self):
        """Whether all live threads waited at one barrier of the whole block."""
        live = self.waiting[~self.done]
        if not len(live) or (live != live[0]).any() or live[0] > NAMED_BARRIERS or live[0] - 1 in self.named:
            return False
        self.waiting[:] = 0
        return True

    def op_barrier(self, op, args):
        if op[1] == "cluster":
            self.waiting[self.mask] = OF_CLUSTER if op[2] == "wait" else 0
            return
        self.op_bar(["bar", *(part for part in op[1:] if part != "cta")], args)

    def op_mbarrier(self, op, args):
        what, addresses = op[1], self.address(next(arg for arg in args if arg[0] == "["))
        if what == "try_wait":
            return self._try_wait(addresses, args)
        if what != "init" and (what != "arrive" or args[0] != "_"):
            raise NotImplementedError(".".join(op))
        last = 1 if args[-1][0] == "[" else self.get(args[-1], "u32")
        for thread in np.flatnonzero(self.mask):
            number = int(np.broadcast_to(last, self.n)[thread])
            address = int(addresses[thread])
            if what == "init":
                self.open_barrier(address, number, int(thread))
            elif "expect_tx" in op:
                self.arrive(address, 1, number)
            else:
                block, address = self.in_cluster(address)
                block.arrive(address, number)

    def open_barrier(self, address, count, thread):
        places = self.shared.places(np.array([address]), 8, "mbarrier.init", read=False)
        self.shared.demand_unused(places)
        places.set(self.shared.users, 1)
        self.barriers[address] = Barrier(count, thread, count)

    def barrier(self, address):
        if address not in self.barriers:
            raise AccessError(f"no mbarrier has been initialised at {address:#x}, byte {address - self.shared.at}")
        return self.barriers[address]

    def arrive(self, address, count, nbytes=0):
        """Arrivals, bytes that are to come, or, below zero, that have come."""
        it = self.barrier(address)
        it.pending, it.nbytes = it.pending - count, it.nbytes + nbytes
        if it.pending < 0:
            raise AccessError(f"more arrive at the mbarrier at {address:#x} than {it.count}")
        if it.pending == it.nbytes == 0:
            it.phase, it.pending = it.phase + 1, it.count
            self.waiting[self.waiting == address] = 0

    def _try_wait(self, addresses, args):
        """Threads are told once that it is not over yet; those that try again come back when the phase has changed."""
        parity, over = self.get(args[2], "u32"), np.zeros(self.n, bool)
        for address in np.unique(addresses[self.mask]).tolist():
            over |= (addresses == address) & (self.barrier(address).phase % 2 != parity)
        again = self.mask & ~over & (self.tried == self.pc)
        self.waiting[again], self.pcs[again] = addresses[again], self.pc
        self.only(self.mask & ~again)
        self.tried[self.mask] = np.where(over, -1, self.pc)[self.mask]
        if self.mask.any():
            self.put(args[0], over)

    def try_number(self):
        """Threads load a number once; those that try again come back when one has been posted."""
        again = self.mask & (self.tried == self.pc)
        self.waiting[again], self.pcs[again] = OF_POST, self.pc
        self.only(self.mask & ~again)
        self.tried[self.mask] = self.pc

    def have_posted(self):
        self.waiting[self.waiting == OF_POST] = 0
        self.tried[:] = -1

    def op_fence(self, op, args):
        if op[1:3] == ["proxy", "async"]:
            self.shared.fence(self.mask)
        elif op[1] == "mbarrier_init":
            for barrier in self.barriers.values():
                barrier.fenced |= bool(self.mask[barrier.thread])
        elif op[1] not in ("acq_rel", "sc"):
            raise NotImplementedError(".".join(op))

    def op_setmaxnreg(self, op, args):
        self._whole(WARPGROUP, "setmaxnreg")
        count = int(args[0])
        if count % 8 or not 24 <= count <= 256:
            raise RuntimeError(f"setmaxnreg: got {count}, allowed multiples of 8 from 24 to 256")

    # ----------------------------------------------------------------------------------------------- clusters
    def op_mapa(self, op, args):
        address, rank = self.get(args[1], "u32"), self.get(args[2], "u32")
        self.put(args[0], address + (rank + np.uint32(1)) * np.uint32(OF_BLOCK))

    def in_cluster(self, address):
        """The block of an address in the shared memory of the cluster, and the address there."""
        rank, address = divmod(int(address), OF_BLOCK)
        return self.cluster[rank - 1] if rank else self, address

    def store_in_peer(self, op, args):
        """st.async: it arrives when no thread can go on without it."""
        values, (places, barriers) = [self.get(x, "b32") for x in members(args[1])], map(self.address, args[::2])
        size = 4 * len(values)
        for thread in np.flatnonzero(self.mask).tolist():
            (block, at), (other, barrier) = self.in_cluster(places[thread]), self.in_cluster(barriers[thread])
            if block is self or other is not block:
                raise AccessError("st.async to no other block, or for a barrier elsewhere")
            there = block.shared.places(np.array([at]), size, ".".join(op), read=False)
            block.shared.demand_unused(there)
            there.set(block.shared.unfenced, PEER)
            there.set(block.shared.written, False)              # until it has arrived
            words = np.array([value[thread] for value in values], np.uint32)
            block.arriving.append((barrier, there, words.view(np.uint8).reshape(1, -1)))

    # ------------------------------------------------------------------------------------------------- boxes
    def bulk(self, op, args):
        """cp.async.bulk and cp.reduce.async.bulk"""
        for thread in np.flatnonzero(self.mask).tolist():
            group = self.stores.setdefault(thread, Group())
            if op[3] == "commit_group":
                group.commit()
            elif op[3] == "wait_group":
                group.wait(self.shared, int(args[0]))
            elif op[1] == "reduce" and op[-2:] == ["add", "f32"]:
                self._store_line(thread, group, True, *args)
            elif op[3] == "global":
                self._store_line(thread, group, False, *args)
            elif op[3].startswith("shared"):
                self._load_line(thread, *args)
            elif op[3] == "tensor" and op[5].startswith("shared"):
                self._load_box(thread, *args)
            elif op[3] == "tensor" and op[5] == "global":
                self._store_box(thread, group, *args)
            else:
                raise NotImplementedError(".".join(op))

    def _box(self, thread, token):
        """The tensor map, addresses of a box's elements, and which of them are inside."""
        name, start = re.fullmatch(r"\[(\S+),\s*(\{.*\})\]", token).groups()
        at = int(self.get(name, "u64")[thread])
        if at not in self.memory.maps:
            raise AccessError(f"no tensor map at {at:#x}")
        tensor_map, address = self.memory.maps[at]
        offsets, inside = tensor_map.elements([int(self.get(x, "s32")[thread]) for x in members(start)])
        return tensor_map, address + offsets, inside

    def _load_box(self, thread, target, source, barrier, policy=None):
        if policy is not None and int(self.get(policy, "u64")[thread]) not in CACHE_POLICIES:
            raise RuntimeError(f"{policy} is no cache policy")
        tensor_map, addresses, inside = self._box(thread, source)
        item = tensor_map.array.itemsize
        values = np.zeros((len(inside), item), np.uint8)  # beyond the array
        values[inside] = self.memory.places(addresses[inside], item, "a box", read=True).of(self.memory.bytes)
        target, barrier = int(self.address(target)[thread]), int(self.address(barrier)[thread])
        places = self.shared.places_of_units(tensor_map.chunks(target), "a box", read=False)
        self._send("a box", barrier, places, values.reshape(-1, CHUNK))

    def _load_line(self, thread, target, source, size, barrier):
        """Consecutive bytes of global memory."""
        target, source, barrier = (int(self.address(x)[thread]) for x in (target, source, barrier))
        chunks = self._chunks(thread, size)
        values = self.memory.places(source + chunks, CHUNK, "a line", read=True).of(self.memory.bytes)
        places = self.shared.places_of_units(target + chunks, "a line", read=False)
        self._send("a line", barrier, places, values)

    def _chunks(self, thread, size):
        """Where they lie in a line of so many bytes."""
        count = int(np.broadcast_to(self.get(size, "u32"), self.n)[thread]) // CHUNK
        return np.arange(count) * CHUNK

    def _send(self, what, barrier, places, values):
        """It is on its way to shared memory; the mbarrier counts its bytes when it arrives."""
        if not self.barrier(barrier).fenced:
            raise AccessError(f"{what} for the mbarrier at {barrier:#x} without a fence.mbarrier_init before")
        places.set(self.shared.written, False)  # until it has arrived
        self.arriving.append((barrier, places, values))

    def _store_line(self, thread, group, adds, target, source, size):
        """From shared to global memory, where float32 are added or stored."""
        target, source = (int(self.address(x)[thread]) for x in (target, source))
        chunks = self._chunks(thread, size)
        places = self.shared.places_of_units(source + chunks, "a line", read=True)
        group.read(self.shared, places)
        to, values = self.memory.places(target + chunks, CHUNK, "a line", read=adds), places.of(self.shared.bytes)
        if adds:
            values = (to.of(self.memory.bytes).view(np.float32) + values.view(np.float32)).view(np.uint8)
        self.memory.write(to, values, None)

    def receive(self):
        """All that is on its way to the barrier for which a copy was started last. Whether there was anything."""
        if not self.arriving:
            return False
        last = self.arriving[-1][0]
        for barrier, places, values in self.arriving:
            if barrier == last:
                places.set(self.shared.bytes, values)
                places.set(self.shared.written, True)
                self.arrive(barrier, 0, -values.size)
        self.arriving = [box for box in self.arriving if box[0] != last]
        return True

    def _store_box(self, thread, group, target, source):
        tensor_map, addresses, inside = self._box(thread, target)
        chunks, item = tensor_map.chunks(int(self.address(source)[thread])), tensor_map.array.itemsize
        places = self.shared.places_of_units(chunks, "a box", read=True)
        group.read(self.shared, places)
        to = self.memory.places(addresses[inside], item, "a box", read=False)
        self.memory.write(to, places.of(self.shared.bytes).reshape(-1, item)[inside], None)

    # ------------------------------------------------------------------------------------------------- products
    def op_wgmma(self, op, args):
        for number in self._whole(WARPGROUP, "wgmma").tolist():
            group, threads = self.products[number], slice(WARPGROUP * number, WARPGROUP * (number + 1))
            if op[1] == "fence":
                group.fenced = True
            elif op[1] == "mma_async":
                if not group.fenced:
                    raise AccessError("wgmma: the first product of a group without a wgmma.fence before")
                self._multiply(group, threads, op, args)
            elif op[1] == "commit_group":
                group.commit()
                group.fenced = False
            elif op[1] == "wait_group":
                group.wait(self.shared, int(args[0]))
                self.finished[threads] = group.finished
            else:
                raise NotImplementedError(".".join(op))
        if op[1] == "wait_group":
            for registers in (self.sums, self.lefts):
                for name in [name for name, numbers in registers.items() if (numbers <= self.finished).all()]:
                    del registers[name]

    def demand_finished(self, registers, name, what, bits):
        """None of these threads' register takes part in a product on its way."""
        if bits_of(registers[name] > self.finished) & bits:
            raise AccessError(f"{name} {what} while a product with it is on its way")

    def copy_of_sum(self, target, source, kind):
        """A copy of a sum on its way is on its way, too: ptxas makes one register of both."""
        numbers = self.sums.pop(source)
        self.put(target, self.get(source, kind))
        self.sums[source] = numbers
        self.sums[target] = np.where(self.mask, numbers, self.sums.get(target, 0))

    def _multiply(self, group, threads, op, args):
        d, a, b, accumulates, sign_a, sign_b, *turned = args
        cols, kind, names = int(re.fullmatch(r"m64n(\d+)k16", op[4])[1]), op[6], members(d)
        if op[5] != "f32" or kind not in HALVES or op[7] != kind or cols % 8 or not 8 <= cols <= 256:
            raise NotImplementedError(".".join(op))
        if len(names) != cols // 2:
            raise RuntimeError(f"wgmma: {len(names)} registers for {cols} columns")
        if a[0] == "{":
            left = self._left(group, threads, kind, members(a))
        else:
            left = self._tile(group, threads, kind, a, 64, turned[0] == "1")
        products = left @ self._tile(group, threads, kind, b, cols, turned[-1] == "1").T * (int(sign_a) * int(sign_b))
        found, here = registers_of_sums(products), WHOLE << threads.start
        if self._uniform(accumulates, "pred", threads):
            for name in names:
                if here & ~self.defined.get(name, 0):
                    raise AccessError(f"{name} is read before it is written")
            found += np.stack([self.values[name][threads] for name in names])
        for name, value in zip(names, truncated(found)):
            self.register(name)[threads] = value
            self.defined[name] |= here
            self.sums.setdefault(name, np.zeros(self.n, np.int64))[threads] = group.number

    def _left(self, group, threads, kind, names):
        """64 x 16 elements in registers, of each warp as mma.m16n8k16 has them."""
        values = np.stack([self.get(name, "b32")[threads] for name in names]).view(self.types[kind])
        for name in names:
            self.lefts.setdefault(name, np.zeros(self.n, np.int64))[threads] = group.number
        left = values.reshape(2, 2, 4, 8, 4, 2)  # upper half of k, lower rows; warp, row, column / 2, column % 2
        return left.transpose(2, 1, 3, 0, 4, 5).reshape(-1, DEPTH).astype(np.float64)

    def _tile(self, group, threads, kind, token, rows, turned):
        """rows x 16 elements in shared memory, k along the rows, from a descriptor of them."""
        descriptor = self._uniform(token, "u64", threads)
        start, lead, stride = ((descriptor >> bit & 0x3FFF) * CHUNK for bit in (0, 16, 32))
        if descriptor >> 62 != 1:
            raise NotImplementedError("a tile that is not swizzled by 128 bytes")
        if start % ATOM >= ROW:
            raise AccessError(f"wgmma: a tile at {start:#x}, not in the first row after a multiple of {ATOM}")
        if turned:  # along k one row after the other, in boxes of 64 elements of the other axis
            k, chunk = np.arange(DEPTH)[:, None], np.arange(-(-rows // 8))
            address = start + chunk // 8 * lead + chunk % 8 * CHUNK + k // 8 * stride + k % 8 * ROW
        else:
            row, chunk = np.arange(rows)[:, None], np.arange(DEPTH // 8)
            address = start + row // 8 * stride + row % 8 * ROW + chunk * CHUNK
        places = self.shared.places_of_units(swizzled(address).reshape(-1), "wgmma", read=True)
        group.read(self.shared, places)
        tile = places.of(self.shared.bytes).view(self.types[kind]).reshape(len(address), -1).astype(np.float64)
        return tile.T if turned else tile

    def _uniform(self, token, kind, threads):
        values = self.get(token, kind)[threads]
        if (values != values[0]).any():
            raise RuntimeError(f"wgmma: {token} differs within a warpgroup")
        return int(values[0])

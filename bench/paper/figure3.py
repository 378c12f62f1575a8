"""The paper's Figure 3 and Tables 8 to 21: time and memory of attention, and of approximations, by length.

    python bench/paper figure3 --json figure3.json
    python bench/paper figure3 --setting causal dropout+padding+causal --peers numbattn block-sparse flash --seqlen 4096

The paper's configuration: 8 heads of 64, float16, a batch of 16, dropout 0.1, random padding. From 16384 tokens on the
batch is smaller, so that it has no more than 131072 tokens; records say how large. Peers: numbattn, dense and with the
butterfly's blocks of 128; in CuPy the standard formula, Rabe and Staats' chunks, Linformer with 256 projections, and
linear attention; SDPA's kernels in torch, if it is installed. What runs out of memory, or takes more than a second, is
not tried at longer lengths.

Memory is what forward + backward take beyond their inputs. When --minutes are over, the rest is recorded as not run.
Without a GPU the arrays are NumPy's, float32, small, and memory is what tracemalloc sees. Needs tabulate and tqdm.
"""

import argparse
import math
import time
import tracemalloc
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np
import peers
from common import machine, sampled, save, show, show_machine
from peers import PACKAGES, TORCH, _torch, context_of, cupy, event_seconds, gpu, one_stream, release, tensor_of, torch
from timing import extra_bytes, one_pass, why
from tqdm import tqdm

import numbattn as na
from paper import baselines

BATCH, HEADS, HEAD_DIM, DROPOUT = 16, 8, 64, 0.1
TOKENS = 131072  # in a batch, at most
PROJECTIONS = 256  # Linformer's
BLOCK = 128, 128  # block-sparse attention's
PASSES = "forward", "backward", "both"
SETTINGS = [  # the paper's Figure 3 is the first
    "dropout+padding", "none", "causal", "dropout+padding+causal", "dropout", "padding", "dropout+causal",
    "padding+causal",
]  # fmt: skip
PEERS = ["numbattn", "block-sparse", "standard", "rabe-staats", "linformer", "linear", "math", "flash", "cudnn"]
SLOW = 0.3  # seconds; what takes longer is timed once
TOO_SLOW = 1  # seconds of both passes
SAMPLE_SECONDS = 0.01
OUT_OF_MEMORY, TOO_LONG, NO_TIME = "out of memory", "takes too long", "no time left"
SMALL = {"seqlen": [128, 256, 512], "batch": 1, "heads": 2, "setting": SETTINGS[:3]}
LARGE = {"seqlen": [2**n for n in range(7, 17)], "batch": BATCH, "heads": HEADS, "setting": SETTINGS[:3]}


class Case(NamedTuple):
    setting: str
    seqlen: int
    batch: int
    heads: int
    dtype: str
    head_dim: int = HEAD_DIM

    @property
    def shape(self):
        return self.batch, self.heads, self.seqlen, self.head_dim

    def has(self, word):
        return word in self.setting.split("+")


# --------------------------------------------------------------------------------------------------------------- peers
@lru_cache(maxsize=1)
def numbers(xp, count):
    return xp.asarray(np.random.default_rng(0).standard_normal((4, count), dtype=np.float32))


def inputs(xp, case):
    """q, k, v, do"""
    return list(numbers(xp, math.prod(case.shape)).reshape(4, *case.shape).astype(case.dtype))


def lengths_of(case):
    """Number of keys in each element of the batch, if there is padding: a random number of at least half of them."""
    if not case.has("padding"):
        return None
    return np.random.default_rng(0).integers(case.seqlen // 2, case.seqlen + 1, case.batch).astype(np.int32)


def make_forward(xp, name, case):
    """A peer's forward(), which returns o and backward(): see peers.py."""
    arrays, lengths = inputs(xp, case), lengths_of(case)
    dropout, causal = DROPOUT * case.has("dropout"), case.has("causal")
    if name in TORCH:
        return torch_forward(name, arrays, lengths, dropout, causal)
    if name in ("numbattn", "block-sparse"):
        return numbattn_forward(xp, name, case, arrays, lengths, dropout)
    extras = baselines.Extras(xp, (*case.shape[:3], case.seqlen), arrays[0].dtype, causal=causal, lengths=lengths,
                              dropout=dropout)
    more = ()
    if name == "linformer":
        shape = 2, min(PROJECTIONS, case.seqlen), case.seqlen
        drawn = np.random.default_rng(1).standard_normal(shape, np.float32) / math.sqrt(case.seqlen)
        more = (xp.asarray(drawn.astype(case.dtype)),)
    *leaves, do = arrays
    vjp = partial(getattr(baselines, name.replace("-", "_")), xp, *leaves, extras, *more)

    def forward():
        o, backprop = vjp()
        return o, partial(backprop, do)

    return forward


def numbattn_forward(xp, name, case, arrays, lengths, dropout):
    mask = None if lengths is None else na.Lengths(xp.asarray(lengths[:, None]))
    if name == "block-sparse":
        sparse = butterfly(xp, case.seqlen)
        mask = sparse if mask is None else sparse & mask
    return peers.make_forward("numbattn", arrays, causal=case.has("causal"), mask=mask, dropout=dropout)


def butterfly(xp, seqlen):
    """The mask, with its blocks on the device: from the host they would be copied in each call."""
    blocks = na.BlockSparse.butterfly((1, 1, seqlen, seqlen), BLOCK).blocks
    return na.BlockSparse(xp.asarray(blocks), BLOCK)


def torch_forward(name, arrays, lengths, dropout, causal):
    """SDPA, where padding is a boolean mask, which not all backends take and which then includes the causal mask."""
    *leaves, do = map(tensor_of, arrays)
    mask, seqlen = None, leaves[0].shape[-2]
    if lengths is not None:
        key = torch.arange(seqlen, device=do.device)
        mask = (key < torch.from_dlpack(lengths).to(do.device)[:, None])[:, None, None]
        if causal:
            mask = mask & (key <= key[:, None])
    options = {"is_causal": causal and mask is None, "attn_mask": mask, "dropout_p": dropout}
    return partial(_torch, *(x.requires_grad_() for x in leaves), do, **options)


def peers_here(on_gpu):
    have_torch = on_gpu and torch is not None and torch.cuda.is_available()
    return [name for name in PEERS if name not in TORCH or have_torch]


# ----------------------------------------------------------------------------------------------------------- measuring
class Clock:
    """Measures time and memory with NumPy's arrays; GpuClock does on a GPU."""

    xp = np

    def seconds(self, run, repetitions=1):
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        return (time.perf_counter() - start) / repetitions

    def extra_bytes(self, run):
        tracemalloc.start()
        try:
            run()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def release(self):
        """Nothing is cached."""


class GpuClock(Clock):
    xp = cupy
    extra_bytes = staticmethod(extra_bytes)
    release = staticmethod(release)
    seconds = staticmethod(event_seconds)


def measured(clock, name, case, rounds):
    """Medians of seconds by pass, and bytes of both."""
    with context_of(name):
        forward, seconds = make_forward(clock.xp, name, case), {}
        for of in PASSES:
            run = one_pass(forward, of)
            run()  # compiles
            first = clock.seconds(run)
            repetitions = max(1, math.ceil(SAMPLE_SECONDS / first))
            more = [] if first > SLOW else sampled({of: partial(clock.seconds, run, repetitions)}, rounds)[of]
            seconds[of] = float(np.median(more or [first]))
            del run
        clock.release()
        return {"seconds": seconds, "bytes": int(clock.extra_bytes(one_pass(forward, "both")))}


def is_out_of_memory(error):
    """Whether it is an error of NumPy's, CuPy's, torch's or cuBLAS's for lack of memory."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in (OUT_OF_MEMORY, "alloc_failed"))


def record_of(clock, name, case, rounds, deadline, ended):
    """A case's record. ended: why a peer is not tried again in a setting."""
    record = {"peer": name, **case._asdict(), "seconds": None, "bytes": None, "failed": None}
    if (name, case.setting) in ended:
        return record | {"failed": ended[name, case.setting]}
    if time.monotonic() > deadline:
        return record | {"failed": NO_TIME}
    try:
        record |= measured(clock, name, case, rounds)
        if record["seconds"]["both"] > TOO_SLOW:
            ended[name, case.setting] = TOO_LONG
    except Exception as error:  # not running is a result, too
        record["failed"] = OUT_OF_MEMORY if is_out_of_memory(error) else why(error)
        if record["failed"] == OUT_OF_MEMORY:
            ended[name, case.setting] = OUT_OF_MEMORY
    clock.release()
    return record


def records_of(clock, args):
    ended, deadline = {}, time.monotonic() + 60 * args.minutes
    cases = [Case(setting, n, max(1, min(args.batch, TOKENS // n)), args.heads, args.dtype)
             for setting, n in product(args.setting, args.seqlen)]
    return [record_of(clock, name, case, args.rounds, deadline, ended)
            for case, name in tqdm(list(product(cases, args.peers)), disable=None, leave=False)]


# -------------------------------------------------------------------------------------------------------- command line
def show_records(records):
    names = list(dict.fromkeys(x["peer"] for x in records))
    for setting, of in product(dict.fromkeys(x["setting"] for x in records), (*PASSES, "memory")):
        found = {}
        for x in records:
            if x["setting"] == setting:
                row = found.setdefault(x["seqlen"], {"seqlen": x["seqlen"], "batch": x["batch"]})
                row[x["peer"]] = value_of(x, of)
        show(f"{setting}, {of}, {'MB beyond the inputs' if of == 'memory' else 'ms'}", list(found.values()),
             ["", ""] + [".3f"] * len(names))
    reasons = dict.fromkeys((x["peer"], x["setting"], x["failed"]) for x in records if x["failed"])
    for name, setting, reason in reasons:
        print(f"{name}, {setting}: {reason}")


def value_of(record, of):
    if record["failed"]:
        return None
    return record["bytes"] / 1e6 if of == "memory" else 1e3 * record["seconds"][of]


def parse(arguments, on_gpu):
    defaults = LARGE if on_gpu else SMALL
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=defaults["setting"])
    parser.add_argument("--seqlen", nargs="+", type=int, metavar="N", default=defaults["seqlen"])
    parser.add_argument("--batch", type=int, default=defaults["batch"], metavar="N", help="at most")
    parser.add_argument("--heads", type=int, default=defaults["heads"], metavar="N")
    parser.add_argument("--dtype", default="float16" if on_gpu else "float32")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=peers_here(on_gpu))
    parser.add_argument("--rounds", type=int, default=3, help="medians are of so many samples (default: 3)")
    parser.add_argument("--minutes", type=float, default=8, help="after which no case is begun (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="write the records there, too")
    args = parser.parse_args(arguments)
    args.seqlen.sort()
    return args


def main(arguments=None):
    on_gpu = cupy is not None and cupy.is_available()
    args, described = parse(arguments, on_gpu), machine(*PACKAGES)
    with one_stream() if on_gpu else nullcontext():
        described |= {"gpu": gpu()} if on_gpu else {}
        show_machine(described)
        records = records_of(GpuClock() if on_gpu else Clock(), args)
    show_records(records)
    if args.json:
        save(args.json, {"machine": described, "arguments": vars(args), "records": records})

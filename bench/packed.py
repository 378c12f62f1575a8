"""Packed sequences on a GPU: numbattn's Segments against varlen kernels, padding, and a call for equal lengths.

    python bench/packed.py
    python bench/packed.py --head-dim 128 --causal --lengths uniform one_long --peers numbattn padded fa4

32768 tokens of 2048 features: TFLOP/s on what is visible. torch: torch.nn.attention.varlen; fa4: flash_attn.cute, if
installed; padded: numbattn with Lengths on sequences padded to the longest; dense: numbattn on sequences of equal
length, as a batch. Medians of interleaved rounds on one stream, by CUDA events, of everything that a call does.
Needs tabulate and tqdm.
"""

import argparse
import inspect
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cases import PASSES, WIDTH, show_notes
from common import machine, save, show, show_machine
from peers import (
    FA4,
    HALF,
    PACKAGES,
    available,
    cupy,
    gpu,
    inputs,
    make_forward,
    one_stream,
    release,
    require_gpu,
    tensor_of,
    torch,
)
from timing import difference, measure, medians, one_pass, progress

import numbattn as na

LENGTHS = json.loads(Path(__file__).with_name("packed_lengths.json").read_text())
NAMES = ["numbattn", "torch", FA4, "padded", "dense"]


class Case(NamedTuple):
    dtype: str
    head_dim: int
    causal: bool
    lengths: str

    @property
    def sizes(self):
        return LENGTHS[self.lengths]

    def tflop(self, of):
        """TFLOP of a pass, on what is visible: half for causal sequences, as the field counts."""
        scores = sum(n * n for n in self.sizes) / (2 if self.causal else 1)
        return 4e-12 * WIDTH * scores * PASSES[of]


def offsets_of(sizes):
    return np.cumsum([0, *sizes], dtype=np.int32)


def arrays_of(case):
    """q, k, v and do, (heads, tokens, head_dim)."""
    return [x[0] for x in inputs((1, WIDTH // case.head_dim, sum(case.sizes), case.head_dim), case.dtype)]


# --------------------------------------------------------------------------------------------------------------- peers
# forward() returns o and backward, a function without arguments that returns dq, dk, dv.
def make_numbattn(case, arrays):
    mask = na.Segments(cupy.asarray(offsets_of(case.sizes)), max_queries=max(case.sizes))
    return make_forward("numbattn", arrays, causal=case.causal, mask=mask)


def make_padded(case, arrays):
    """The sequences as a batch, padded to the longest."""
    sizes, longest = np.array(case.sizes, np.int32), max(case.sizes)
    padded = [cupy.zeros((len(sizes), x.shape[0], longest, x.shape[2]), x.dtype) for x in arrays]
    for whole, x in zip(padded, arrays):
        for number, part in enumerate(na.unpack(x, offsets_of(sizes))):
            whole[number, :, : part.shape[1]] = part
    lengths = cupy.asarray(sizes[:, None])
    return make_forward("numbattn", padded, causal=case.causal, mask=na.Lengths(lengths, lengths))


def make_dense(case, arrays):
    if len(set(case.sizes)) > 1:
        raise ValueError("the sequences differ in length")
    shape = arrays[0].shape[0], len(case.sizes), case.sizes[0], case.head_dim
    batches = [cupy.ascontiguousarray(x.reshape(shape).swapaxes(0, 1)) for x in arrays]
    return make_forward("numbattn", batches, causal=case.causal)


def make_torch(case, arrays):
    from torch.nn.attention.varlen import varlen_attn

    by_window = "window_size" in inspect.signature(varlen_attn).parameters  # newer versions have no is_causal
    options = ({"window_size": (-1, 0)} if by_window else {"is_causal": True}) if case.causal else {}
    offsets, longest = tensor_of(cupy.asarray(offsets_of(case.sizes))), max(case.sizes)
    return make_varlen(partial(varlen_attn, **options), arrays, offsets, offsets, longest, longest)


def make_fa4(case, arrays):
    from flash_attn.cute.interface import flash_attn_varlen_func

    offsets, longest = tensor_of(cupy.asarray(offsets_of(case.sizes))), max(case.sizes)
    about = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return make_varlen(partial(flash_attn_varlen_func, causal=case.causal, **about), arrays)


def make_varlen(attention, arrays, *others):
    """A function attention(q, k, v, *others) of torch's tensors (tokens, heads, head_dim)."""
    *leaves, do = (tensor_of(x).transpose(0, 1).contiguous() for x in arrays)
    leaves = [x.requires_grad_() for x in leaves]

    def forward():
        found = attention(*leaves, *others)
        o = found[0] if isinstance(found, tuple) else found

        def backward():
            grads = torch.autograd.grad(o, leaves, do, retain_graph=True)
            return tuple(x.transpose(0, 1) for x in grads)

        return o.transpose(0, 1), backward

    return forward


MAKERS = {"numbattn": make_numbattn, "torch": make_torch, FA4: make_fa4, "padded": make_padded, "dense": make_dense}
PACKED = "numbattn", "torch", FA4  # peers whose results have the same shape


# --------------------------------------------------------------------------------------------------------------- speed
def speed(cases, passes, names, rounds):
    """One record for each case and pass: medians and TFLOP/s by peer."""
    records = []
    for case, of in progress(product(cases, passes)):
        release()
        arrays = arrays_of(case)
        makers = {name: partial(prepare, name, of, case, arrays) for name in names}
        samples, _, failed = measure(makers, rounds, same=False)
        seconds = medians(samples)
        records.append({
            **case._asdict(), "pass": of, "seconds": seconds, "samples": samples, "failed": failed,
            "errors": errors_of({name: makers[name] for name in PACKED if name in samples}),
            "tflops": {name: case.tflop(of) / s for name, s in seconds.items()},
        })
    return records


def errors_of(makers):
    """The largest differences from the first peer's results, so that nothing wrong is timed."""
    results = {name: make()() for name, make in makers.items()}
    expected = next(iter(results.values()), None)
    return {name: float(np.max([*map(difference, result, expected)])) for name, result in results.items()}


def prepare(name, of, case, arrays):
    """One pass of a peer as a run."""
    return one_pass(MAKERS[name](case, arrays), of)


def show_speed(records, names):
    for of in dict.fromkeys(record["pass"] for record in records):
        chosen = [record for record in records if record["pass"] == of]
        rows = [{**{key: record[key] for key in ("head_dim", "causal", "lengths")},
                 **{name: record["tflops"].get(name) for name in names}} for record in chosen]
        show(f"{chosen[0]['dtype']}, {of}: TFLOP/s on what is visible", rows, [""] * 3 + [".1f"] * len(names))
    show_notes(records, "{pass}, head_dim {head_dim}, causal {causal}, {lengths}".format_map)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=HALF, default="bfloat16")
    parser.add_argument("--head-dim", nargs="+", type=int, metavar="N", default=[64, 128])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    causal = parser.add_mutually_exclusive_group()
    causal.add_argument("--causal", action="store_const", const=[True], default=[False, True], help="causal only")
    causal.add_argument("--full", action="store_const", dest="causal", const=[False], help="not causal only")
    parser.add_argument("--pass", nargs="+", choices=["forward", "backward"], default=["forward", "backward"],
                        dest="passes")
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="medians are of so many samples (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too, with all samples")
    return parser.parse_args()


def main():
    args = parse()
    require_gpu()
    described = machine(*PACKAGES) | {"gpu": gpu()}
    show_machine(described)
    installed = {"torch": "flash", FA4: FA4}  # the names by which peers.available knows them
    names = [name for name in args.peers if name not in installed or available(args.dtype, [installed[name]])]
    cases = [Case(args.dtype, *about) for about in product(args.head_dim, args.causal, args.lengths)]
    with one_stream():
        records = speed(cases, args.passes, names, args.rounds)
    show_speed(records, names)
    if args.json:
        save(args.json, {"machine": described, "arguments": vars(args), "speed": records})


if __name__ == "__main__":
    main()

"""What the functions of numbattn.interop take on top of numbattn's own, in microseconds of host time.

    python bench/interop.py
    python bench/interop.py --calls 20000 --json interop.json

The problem is so small that its computation hides nothing: batch 1, 2 heads of 16, seqlen 16. A call in which gradients
may be asked for is compared with attention_forward, forward + backward with attention_vjp and its backprop. What torch
itself takes for a function that computes nothing, recorded and differentiated, is "empty". Frameworks and devices that
are not there have no rows. On a GPU, calls return before it has computed; the host waits for it off the clock. Needs
tabulate and tqdm.
"""

import argparse
from importlib.util import find_spec
from time import perf_counter_ns

import numpy as np
from common import machine, save, show, show_machine
from tqdm import tqdm

import numbattn as na

SHAPE = 1, 2, 16, 16
BATCH = 20  # calls between two waits for the GPU, and of one sample
FRAMEWORKS = "torch", "jax"
PARTS = "framework's", "own", "empty"
PACKAGES = "numpy", "numba", "cupy-cuda13x", *FRAMEWORKS


# --------------------------------------------------------------------------------------------------------------- calls
# Of arrays q, k, v and do, NumPy's or CuPy's: {kind of call: (the framework's function, numbattn's own, an empty one)}
def of_torch(arrays):
    import torch

    from numbattn.interop import torch as interop
    from numbattn.interop.torch.arrays import tensor_of

    *qkv, do = map(tensor_of, arrays)
    leaves = [x.clone().requires_grad_() for x in qkv]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(q, k, v):
            return q.detach()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx, do):
            return tuple(ctx.saved_tensors[:3])

    def attend(*qkv):
        return interop.attention(*qkv, causal=True)

    def both(function):
        return torch.autograd.grad(function(*leaves), leaves, do)

    return {
        "no gradients": (lambda: attend(*qkv), own_forward(arrays), None),
        "forward": (lambda: attend(*leaves), own_forward(arrays), lambda: Empty.apply(*leaves)),
        "forward + backward": (lambda: both(attend), own_both(arrays), lambda: both(Empty.apply)),
    }


def of_jax(arrays):
    import jax

    from numbattn.interop.jax import attention

    def placed(x):
        return jax.device_put(x, jax.devices("cpu")[0]) if isinstance(x, np.ndarray) else jax.dlpack.from_dlpack(x)

    *qkv, do = map(placed, arrays)

    def attend(*qkv):
        return attention(*qkv, causal=True)

    def both(*operands):
        return jax.vjp(attend, *operands[:3])[1](operands[3])

    compiled, compiled_both = jax.jit(attend), jax.jit(both)
    return {
        "no gradients": (lambda: attend(*qkv), own_forward(arrays), None),
        "forward + backward": (lambda: both(*qkv, do), own_both(arrays), None),
        "no gradients, jit": (lambda: jax.block_until_ready(compiled(*qkv)), own_forward(arrays), None),
        "forward + backward, jit": (lambda: jax.block_until_ready(compiled_both(*qkv, do)), own_both(arrays), None),
    }


def own_forward(arrays):
    return lambda: na.attention_forward(*arrays[:3], causal=True)


def own_both(arrays):
    *qkv, do = arrays

    def run():
        o, backprop = na.attention_vjp(*qkv, causal=True)
        return backprop(do)

    return run


CALLS = {"torch": of_torch, "jax": of_jax}


def libraries():
    """NumPy, and CuPy where there is a GPU, each with a function that waits for it."""
    found = {"CPU": (np, lambda: None)}
    if find_spec("cupy"):
        import cupy

        if cupy.is_available():
            found[cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()] = cupy, cupy.cuda.runtime.deviceSynchronize
    return found


# -------------------------------------------------------------------------------------------------------------- timing
def overheads(calls):
    """A record for each framework, device and kind of call: microseconds of both, the medians of batches of calls."""
    cases = [(name, device, *found) for name in FRAMEWORKS if find_spec(name) for device, found in libraries().items()]
    records = []
    for name, device, xp, wait in tqdm(cases, disable=None, leave=False):
        arrays = xp.asarray(np.random.default_rng(0).standard_normal((4, *SHAPE), dtype=np.float32))
        for kind, functions in CALLS[name](list(arrays)).items():
            timed = [function for function in functions if function]
            samples = [[sample(function, wait) for function in timed] for _ in range(calls // BATCH + 2)]
            medians = np.median(samples[2:], axis=0).tolist()  # the first ones compile
            records.append({"framework": name, "device": device, "call": kind, **dict(zip(PARTS, medians))})
    return records


def sample(function, wait):
    """Microseconds of a call, the mean of a batch."""
    start = perf_counter_ns()
    for _ in range(BATCH):
        function()
    taken = 1e-3 * (perf_counter_ns() - start) / BATCH
    wait()
    return taken


def show_overheads(records):
    rows = [record | {"on top": record["framework's"] - record["own"]} for record in records]
    rows = [{key: row.get(key) for key in ("framework", "device", "call", *PARTS, "on top")} for row in rows]
    title = "Microseconds of a call, float32, batch {}, {} heads, seqlen {}, head_dim {}".format(*SHAPE)
    show(title, rows, ["", "", ""] + [".1f"] * 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10000, help="how many are timed of each kind (default: 10000)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    results = {"machine": machine(*PACKAGES), "arguments": vars(args)}
    show_machine(results["machine"])
    results["interop"] = overheads(args.calls)
    show_overheads(results["interop"])
    if args.json:
        save(args.json, results)


if __name__ == "__main__":
    main()

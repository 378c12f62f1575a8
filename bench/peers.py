"""What the GPU benchmarks run: numbattn, standard attention in CuPy and torch's kernels, all on one stream; and
FlashAttention-3 in JAX, on JAX's."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from common import standard_vjp

import numbattn as na
from numbattn.call.problem import DTYPES

try:
    import cupy
except ImportError:
    cupy = None
try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

DTYPE = {dtype.name: dtype for dtype in DTYPES}
HALF = ("float16", "bfloat16")
TORCH = {  # backends of scaled_dot_product_attention, and the dtypes they are run for
    "flash": ("FLASH_ATTENTION", HALF),
    "cudnn": ("CUDNN_ATTENTION", HALF),
    "efficient": ("EFFICIENT_ATTENTION", (*HALF, "float32")),
    "math": ("MATH", ("float64",)),
}
FA4 = "fa4"  # flash_attn.cute, if it is installed
FA3 = "fa3"  # flash_attn3_jax, likewise
FFPA = "ffpa"  # ffpa_attn, likewise, for head_dims beyond 256
PEERS = ["numbattn", *TORCH, FA4, FA3, FFPA, "cupy"]
PACKAGES = ["numbattn", "numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch", "flash-attn-4",
            "flash-attn3-jax", "ffpa-attn"]  # fmt: skip


def require_gpu():
    """Exit with one sentence if there is nothing to measure."""
    reason = "CuPy is not installed" if cupy is None else None
    if cupy is not None:
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            reason = str(error)
    if reason:
        sys.exit(f"This benchmark needs a CUDA device that CuPy can use: {reason}")


def available(dtype, peers=PEERS):
    """The peers that this machine has and that take the dtype."""
    have_torch = torch is not None and torch.cuda.is_available()
    takes = {name: have_torch and dtype in dtypes for name, (_, dtypes) in TORCH.items()}
    takes["cupy"] = dtype != "bfloat16"  # which a formula with Python's floats turns into float64
    takes[FA4] = have_torch and dtype in HALF and has_fa4()
    takes[FA3] = dtype in HALF and importlib.util.find_spec("flash_attn3_jax") is not None
    takes[FFPA] = have_torch and dtype in HALF and importlib.util.find_spec("ffpa_attn") is not None
    return [name for name in peers if takes.get(name, True)]


@lru_cache(maxsize=1)
def has_fa4():
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # not even flash_attn
        return False


def gpu():
    """The GPU and its software, for the JSON and for show_machine."""
    device, runtime = cupy.cuda.Device(), cupy.cuda.runtime
    about = runtime.getDeviceProperties(device.id)
    facts = {
        "name": about["name"].decode(),
        "compute capability": f"{about['major']}.{about['minor']}",
        "multiprocessors": about["multiProcessorCount"],
        "CUDA of the driver": runtime.driverGetVersion(),
        "CUDA of CuPy": runtime.runtimeGetVersion(),
        "cuDNN of torch": torch.backends.cudnn.version() if torch else None,
    }
    if shutil.which("nvidia-smi"):
        asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--id={device.pci_bus_id}", f"--query-gpu={asked}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        facts |= zip(asked.split(","), answer.split(", "))
    return facts


# -------------------------------------------------------------------------------------------------------------- arrays
def inputs(shape, dtype, heads_k=None):
    """q, k, v, do of one shape, or with fewer heads of k and v."""
    q, k, v, do = _normal(math.prod(shape)).reshape(4, *shape).astype(DTYPE[dtype])
    return [q, *(cupy.ascontiguousarray(x[:, : heads_k or shape[1]]) for x in (k, v)), do]


@lru_cache(maxsize=1)
def _normal(count):
    return cupy.asarray(np.random.default_rng(0).standard_normal((4, count), dtype=np.float32))


def tensor_of(x):
    """The torch tensor in the memory of a CuPy or NumPy array."""
    if x.dtype == DTYPE["bfloat16"]:
        return torch.from_dlpack(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


class OfJax(NamedTuple):
    """An array of JAX, (batch, seqlen, heads, head_dim)."""

    array: Any


def import_jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    return jax


def of_jax(x):
    """The array of JAX for a CuPy array (batch, heads, seqlen, head_dim), by way of the host: see `array_of`."""
    return import_jax().numpy.asarray(cupy.ascontiguousarray(x.swapaxes(1, 2)).get())


def array_of(x):
    """The CuPy or NumPy array in the memory of a torch tensor; other arrays as they are."""
    if isinstance(x, OfJax):  # JAX 0.11 crashes where CuPy's stream is to wait for an array
        return cupy.asarray(np.asarray(x.array)).swapaxes(1, 2)
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    xp = cupy if x.is_cuda else np
    if x.dtype == torch.bfloat16:
        return xp.from_dlpack(x.detach().view(torch.uint16)).view(DTYPE["bfloat16"])
    return xp.from_dlpack(x.detach())


def release():
    """Give cached memory back, so that one peer's does not get in another's way."""
    cupy.get_default_memory_pool().free_all_blocks()
    if available("float32", ["efficient"]):
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------------- peers
# forward() returns o and backward, a function without arguments that returns dq, dk, dv.
def make_forward(name, arrays, *, causal=False, window=None, mask=None, score=None, dropout=0.0, deterministic=False,
                 bias=None, bias_gradient=False):
    """A peer's forward on the arrays q, k, v, do. With a `window`, a query sees so many keys to the left, and its own.

    Masks, scores other than Softcap, and `deterministic` are for numbattn alone. A bias is (1, heads, seqlen, seqlen),
    the same for the whole batch; backward returns its gradient last, if that is wanted.
    """
    if window is not None and name not in ("numbattn", FA4, FA3, "flash"):
        raise ValueError(f"{name} has no windows")
    if name == "numbattn":
        if bias is not None:
            score = na.Bias(bias, bias_gradient)
        if window is not None:
            mask = na.Window(window, 0) & mask if mask else na.Window(window, 0)
        options = {"causal": causal, "mask": mask, "score": score, "dropout": dropout_of(dropout)}
        return partial(_numbattn, *arrays, deterministic, **options)
    if name == "cupy":
        if causal:
            bias = causal_bias(arrays[0].shape[-2], arrays[0].dtype)
        return partial(_cupy, *arrays, bias, bias_gradient, dropout)
    if name == FA4:
        if dropout or bias is not None:
            raise ValueError("FlashAttention-4 has no dropout and no bias")
        softcap = {} if score is None else {"softcap": score.cap}
        *leaves, do = (tensor_of(x).transpose(1, 2).contiguous() for x in arrays)  # its layout: sequence before heads
        options = {"causal": causal} if window is None else {"window_size": (window, 0)}
        return partial(_fa4, *(x.requires_grad_() for x in leaves), do, **options, **softcap)
    if name == FA3:
        if dropout or bias is not None or score is not None:
            raise ValueError("FlashAttention-3 has no dropout and no bias")
        return _fa3(*map(of_jax, arrays), causal=causal, window=(-1, -1) if window is None else (window, 0))
    if name == FFPA:
        if dropout or bias is not None or score is not None:
            raise ValueError("FFPA is timed without dropout, bias and softcap")
        *leaves, do = map(tensor_of, arrays)
        return partial(_ffpa, *(x.requires_grad_() for x in leaves), do, causal)
    if window is not None:
        *leaves, do = (tensor_of(x).transpose(1, 2) for x in arrays)
        return partial(_flash_in_window, *(x.detach().requires_grad_() for x in leaves), do, window, dropout)
    *leaves, do = map(tensor_of, arrays)
    grouped = leaves[0].shape[1] != leaves[1].shape[1]
    options = {"is_causal": causal, "dropout_p": dropout, "enable_gqa": grouped}
    if bias is not None:
        options["attn_mask"] = tensor_of(bias).requires_grad_(bias_gradient)
    return partial(_torch, *(x.requires_grad_() for x in leaves), do, **options)


def make_attention(name, arrays, causal=False):
    """A function that computes a peer's o on the arrays q, k, v and keeps nothing for gradients."""
    if name in (FA4, FA3, FFPA, "cupy"):
        raise ValueError(f"{name} is timed with its gradients, or not at all")
    option = "is_causal" if name in TORCH else "causal"
    return partial(attention_of(name), *native(name, arrays), **{option: causal})


def attention_of(name):
    return torch.nn.functional.scaled_dot_product_attention if name in TORCH else na.attention


def native(name, arrays):
    return tuple(map(tensor_of, arrays)) if name in TORCH else tuple(arrays)


def dropout_of(p):
    return na.Dropout(p, seed=0) if p else None


def context_of(name):
    """The context that a peer's forward runs in. It takes host time, and is entered off the clock."""
    return sdpa_kernel(getattr(SDPBackend, TORCH[name][0])) if name in TORCH else nullcontext()


def _numbattn(q, k, v, do, deterministic, **options):
    o, saved = na.attention_forward(q, k, v, **options)

    def backward():
        grads = na.attention_backward(do, saved, deterministic=deterministic)
        return *grads, *(x for x in grads.score if x is not None)

    return o, backward


def _cupy(q, k, v, do, bias, bias_gradient, dropout):
    Z = None
    if dropout:
        kept = cupy.random.random((*q.shape[:-1], k.shape[-2]), dtype=np.float32) >= dropout
        Z = kept.astype(q.dtype) / (1 - dropout)
    o, backprop = standard_vjp(q, k, v, bias=bias, Z=Z)

    def backward():
        *grads, dS = backprop(do, with_dS=True)
        return *grads, *([dS.sum(axis=0, keepdims=True)] if bias_gradient else [])

    return o, backward


def _torch(q, k, v, do, attn_mask=None, **options):
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **options)
    leaves = [x for x in (q, k, v, attn_mask) if x is not None and x.requires_grad]
    return o, partial(torch.autograd.grad, o, leaves, do, retain_graph=True)


def _flash_in_window(q, k, v, do, window, dropout):
    """FlashAttention-2 itself, since scaled_dot_product_attention has no windows: sequence before heads."""
    o, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout, True, False, window_size_left=window, window_size_right=0
    )

    def backward():
        return tuple(x.transpose(1, 2) for x in torch.autograd.grad(o, (q, k, v), do, retain_graph=True))

    return o.transpose(1, 2), backward


def _fa4(q, k, v, do, **options):
    from flash_attn.cute.interface import flash_attn_func

    found = flash_attn_func(q, k, v, **options)
    o = found[0] if isinstance(found, tuple) else found

    def backward():
        return tuple(x.transpose(1, 2) for x in torch.autograd.grad(o, (q, k, v), do, retain_graph=True))

    return o.transpose(1, 2), backward


def _ffpa(q, k, v, do, causal):
    from ffpa_attn import ffpa_attn_func

    o = ffpa_attn_func(q, k, v, is_causal=causal, backend="cutedsl")
    return o, partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True)


def _fa3(q, k, v, do, causal, window):
    jax = import_jax()
    from flash_attn3_jax.flash import _flash_mha_bwd, _flash_mha_fwd

    options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "window_size": window}
    forward, gradients = (jax.jit(partial(call, **options)) for call in (_flash_mha_fwd, _flash_mha_bwd))

    def run():
        o, lse = forward(q, k, v)
        return OfJax(o), lambda: tuple(map(OfJax, gradients(do, q, k, v, o, lse)))

    return run


@lru_cache(maxsize=1)
def causal_bias(seqlen, dtype):
    return cupy.where(cupy.tri(seqlen, dtype=bool), np.float32(0), np.float32(-np.inf)).astype(dtype)


# -------------------------------------------------------------------------------------------------------------- stream
@contextmanager
def one_stream():
    """A stream that is current in CuPy and in torch: their kernels queue up on it, and it can be captured."""
    with ExitStack() as stack:
        stream = stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        if available("float32", ["efficient"]):
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        yield stream


def event_seconds(run, repetitions=1):
    """Seconds of one run, by CUDA events around several; of JAX's, on a stream of its own, by the host's clock."""
    start, end, began = cupy.cuda.Event(), cupy.cuda.Event(), time.perf_counter()
    start.record()
    for _ in range(repetitions):
        result = run()
    if isinstance(result, tuple) and isinstance(result[0], OfJax):
        result[0].array.block_until_ready()
        return (time.perf_counter() - began) / repetitions
    end.record()
    end.synchronize()
    return 1e-3 * cupy.cuda.get_elapsed_time(start, end) / repetitions


class Replay:
    """A run as a CUDA graph: calling it replays the graph into the same result. Its memory comes from its own pool."""

    def __init__(self, run):
        stream, self.pool = cupy.cuda.get_current_stream(), cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(self.pool.malloc):
            run()  # compiles, and fills the pool
            stream.begin_capture()
            try:
                self.result = run()
            finally:
                self.graph = stream.end_capture()

    def __call__(self):
        self.graph.launch()
        return self.result

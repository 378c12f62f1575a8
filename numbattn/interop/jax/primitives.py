"""JAX's primitives: where and how a pass is computed, differentiated and mapped."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.jet import jet_rules
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Sharding

from ..streams import library, stream_of
from . import derivatives
from .operands import PRIMITIVES, How, Pass, Results, like
from .passes import backward, forward, hessian, laplacian, results_of, run, second_tangent, tangent
from .vmap import mapped

SMALL = 1 << 17  # bytes of results, below which the cost of a copy is that of the call


def eagerly(compute: Pass, *operands: Any, tree: Any, how: How) -> Results:
    """Compute a pass outside of jit."""
    device = operands[0].device if isinstance(operands[0], jax.Array) else None
    if device is None and how.options.on_gpu:
        device = jax.numpy.zeros(()).device
    if isinstance(device, Sharding):
        raise NotImplementedError(f"attention of arrays on {len(device.device_set)} devices outside of jit: inside of "
                                  "jax.shard_map each device computes its own")  # fmt: skip
    if device and device.platform != "cpu":
        return _on_gpu(compute, operands, tree, how, device)
    results = run(compute, tree.unflatten(map(np.asarray, operands)), how)
    with jax.default_device(device):
        return _copied(*results) if sum(x.nbytes for x in results) < SMALL else jax.device_put(list(results))


@jax.jit
def _copied(*arrays: Any) -> Any:
    """Copies of small arrays for JAX, made in the fastest way."""
    return jax.lax.optimization_barrier(arrays)


def _on_gpu(compute: Pass, operands: Results, tree: Any, how: How, device: Any) -> Results:
    """Run a pass on a GPU: CuPy arrays share memory with JAX's; constants, which are NumPy's, are copied, those in
    options by numbattn but for graphs'."""
    cupy = library()
    with cupy.cuda.Device(device.local_hardware_id):
        given = tree.unflatten([cupy.from_dlpack(x) if isinstance(x, jax.Array) else np.asarray(x) for x in operands])
        names = "seed", "offset", *(() if how.options.on_gpu else ("arrays",))
        on_host = {name: getattr(given, name) for name in names}
        x = jax.tree.map(cupy.asarray, given._replace(**dict.fromkeys(on_host)))._replace(**on_host)
        return [jax.dlpack.from_dlpack(y) for y in run(compute, x, how)]


def abstract(compute: Pass, *avals: Any, tree: Any, how: How) -> list[Any]:
    if any(map(is_symbolic_dim, (n for x in avals for n in x.shape))):
        raise NotImplementedError("attention of symbolic shapes, as jax.export has them: it is a callback, which JAX "
                                  "does not export anyway")  # fmt: skip
    return [like(avals[0], x) for x in results_of(compute, tree.unflatten(avals), how)]


def refused_by_jet(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("attention in jax.experimental.jet: of second derivatives there are jvp of grad, grad of "
                              "jvp, grad of grad and numbattn.interop.jax.attention_laplacian")  # fmt: skip


def lowered(compute: Pass, sharing: Any, context: Any, *operands: Any, tree: Any, how: How) -> Any:
    """Compute a pass inside of jit: a callback that reads and writes XLA's buffers in place."""
    if compute is second_tangent:
        compute(tree.unflatten(operands), how)

    def callback(execution: Any, results: Results, *buffers: Any) -> None:
        with sharing(execution, results[0]) as array_of:
            found = run(compute, tree.unflatten(map(array_of, buffers)), how)
            for place, result in zip(results, found):
                array_of(place)[...] = result

    likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in context.avals_out]
    return mlir.lower_fun(buffer_callback(callback, likes))(context, *operands)


def on_cpu(*_: Any) -> Any:
    """A context whose value turns buffers into NumPy arrays."""
    return nullcontext(np.asarray)


@contextmanager
def on_gpu(execution: Any, like: Any) -> Any:
    """A context whose value turns buffers into CuPy arrays; inside, CuPy has their device and XLA's stream, which
    nothing waits for."""
    cupy, (_, device) = library(), like.__dlpack_device__()
    with cupy.cuda.Device(device), stream_of(device, execution.stream):
        yield cupy.from_dlpack


def _primitive(compute: Pass, jvp: Any, transpose: Any = None) -> Primitive:
    primitive = Primitive(f"numbattn_{compute.__name__}")
    primitive.multiple_results = True
    primitive.def_impl(partial(eagerly, compute))
    primitive.def_abstract_eval(partial(abstract, compute))
    for platform, sharing in (("cpu", on_cpu), ("cuda", on_gpu)):
        mlir.register_lowering(primitive, partial(lowered, compute, sharing), platform)
    batching.primitive_batchers[primitive] = partial(mapped, compute)
    ad.primitive_jvps[primitive], jet_rules[primitive] = jvp, refused_by_jet
    if transpose:
        ad.primitive_transposes[primitive] = transpose
    return primitive


for _compute, *_rules in (
    (forward, derivatives.forward_jvp, derivatives.forward_transpose),
    (tangent, derivatives.tangent_jvp, derivatives.tangent_transpose),
    (backward, derivatives.backward_jvp, derivatives.backward_transpose),
    (hessian, derivatives.hessian_jvp, derivatives.hessian_transpose),
    (laplacian, derivatives.laplacian_jvp),
    (second_tangent, derivatives.second_tangent_jvp, derivatives.second_tangent_transpose),
):
    PRIMITIVES[_compute] = _primitive(_compute, *_rules)

"""Passes as torch functions: attention, its tangent, its gradients and theirs, each a derivative of another one.

With primals p, directions t and rows do, dlse they are

    Forward(p) = o, lse                         its tangent is Tangent, its gradient Backward
    Tangent(p; t) = to, tlse                    linear in t: its gradient by t is Backward, by p BackwardTangent
    Backward(p, do, dlse) = dp                  its tangent is BackwardTangent, its gradient this one and Tangent
    BackwardTangent(p, do, dlse; t, tdo, tdlse) has no derivatives
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.autograd import forward_ad

from ...base.forks import cached_property
from ...base.gradients import Gradients
from ...scores import ArrayPart, Part
from ...scores.element import FunctionPart
from ..options import Options
from .arrays import arrays_of, on_device, tensors_of

NOT_THERE = (
    "numbattn has second derivatives by reverse over reverse, forward over reverse and reverse over forward mode, but "
    "not by forward over forward mode, and no third ones"
)
TRACED = (
    "make_fx of torch.fx cannot trace functions, as in a Score or a Where, nor gradients of attention that it does not "
    "trace itself"
)
PROXY = torch._C._TorchDispatchModeKey.PROXY


@dataclass(frozen=True, eq=False)
class TorchCall:
    """The arguments of a call except its tensors."""

    options: Options
    arrays: tuple[Any, ...]  # NumPy and CuPy arrays in its mask and score; None in place of a tensor
    deterministic: bool
    needs: tuple[bool, ...] | None = None  # which primals need a gradient, if not all
    operator: Callable[..., Any] | None = None  # runs the passes, if they are traced

    @classmethod
    def of(cls, options: Options, arrays: Sequence[Any], deterministic: bool) -> tuple[TorchCall, list[Any]]:
        """A call, and the tensors in its mask and score: detached where no gradient is wanted."""
        call = cls(options, tuple([None if isinstance(x, torch.Tensor) else x for x in arrays]), deterministic)
        constant = [at for at, part in call.weights.items() if isinstance(part, ArrayPart) and not part.gradient]
        return call, [arrays[at].detach() if at in constant else arrays[at] for at in call.places]

    @cached_property
    def places(self) -> list[int]:
        """The numbers of the arrays that are tensors."""
        return [at for at, x in enumerate(self.arrays) if x is None]

    @cached_property
    def weights(self) -> dict[int, Part]:
        """The arrays with a place among the gradients, by number, each with its part of the score."""
        return dict(zip(self.options.weights, self.options.parts))

    @cached_property
    def axes(self) -> tuple[int | None, ...]:
        """How many of the last axes of each primal are not batch axes."""
        return 2, 2, 2, *[self.options.own_axes[at] for at in self.places]

    @property
    def counts_batches(self) -> bool:
        """Whether results of an element of the batch depend on its number, or an array has no batch axes."""
        has_functions = any(isinstance(part, FunctionPart) for part in self.options.score)
        return self.options.dropout is not None or has_functions or None in self.options.own_axes

    def wanting(self, needs: Sequence[bool]) -> TorchCall:
        """The call with gradients of only these primals, as far as others cost anything."""
        if not self.weights:
            return self
        wanted = dict(zip(self.options.weights, self.options.wanted))
        for at, need in zip(self.places, needs[3:]):
            if need and not wanted.get(at, True):
                part = type(self.weights[at]).__name__
                raise NotImplementedError(f"score: an array of a {part} requires a gradient: pass gradient=True")
        return replace(self, needs=tuple(needs))

    @property
    def has_gradients(self) -> list[bool]:
        """Whether there is a gradient of each primal."""
        wanted, needs = dict(zip(self.options.weights, self.options.wanted)), self.needs or (True,) * len(self.axes)
        return [True] * 3 + [wanted.get(at, False) and need for at, need in zip(self.places, needs[3:])]

    def given(self, primals: Sequence[Any]) -> dict[str, Any]:
        """The options of numbattn's functions, from primals that are arrays."""
        if not self.arrays:
            return self._given
        arrays = list(self.arrays)
        for at, x in zip(self.places, primals[3:]):
            arrays[at] = x
        options = self.options.given(arrays)
        if self.needs is not None:
            needed, weights = dict(zip(self.places, self.needs[3:])), iter(self.weights)
            for number, part in enumerate(options["score"]):
                own = [wanted and bool(needed.get(at)) for wanted, at in zip(part._wanted, weights)]
                if part._wants_gradient:
                    options["score"][number] = part._asking(own)
        return options

    def of_score(self, tangents: Sequence[Any]) -> list[Any]:
        """The tangents of arrays in the score, among those of primals."""
        found = dict(zip(self.places, tangents[3:]))
        return [found.get(at) for at in self.weights]

    def of_primals(self, grads: Gradients[Any]) -> list[Any]:
        """The gradient of each primal."""
        found = dict(zip(self.weights, grads.score))
        return [*grads, *[found.get(at) for at in self.places]]

    @cached_property
    def _given(self) -> dict[str, Any]:
        """The options of a call without arrays."""
        return self.options.given(())

    @property
    def is_deterministic(self) -> bool:
        return self.deterministic or torch.are_deterministic_algorithms_enabled()


class Positional(inspect.Signature):
    """The signature of a TorchPass: torch binds the arguments of each call to it, which takes 15 us unless there is
    nothing to do."""

    class Bound(NamedTuple):
        args: tuple[Any, ...]
        kwargs: dict[str, Any]

        def apply_defaults(self) -> None:
            """There are none."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return self.Bound(args, kwargs)


def opaque(name: str, forward: Callable[..., Any]) -> Any:
    """The function of the TorchPass of this name, made opaque to tracing: after a graph break torch.compile would take
    NumPy's functions for its own, and make_fx all that they return for constants."""
    outside = torch._disable_dynamo(forward)  # which imports the compiler

    def run(call: TorchCall, *operands: Any) -> Any:
        if call.operator is not None:
            return call.operator(name, call, *operands)
        if torch._C._get_dispatch_mode(PROXY) is not None:
            raise NotImplementedError(TRACED)
        return (outside if "torch._dynamo" in sys.modules else forward)(call, *operands)

    cast(Any, run).__signature__ = Positional()
    return staticmethod(run)


# ------------------------------------------------------------------------------------------------------------- passes
# Operands are the primals: q, k, v and the tensors of mask and score; then o and lse, which are functions of these:
# derivatives by primals are total, and those by o and lse None. A gradient or tangent that is None is zero.
class TorchPass(torch.autograd.Function):
    """A function of a call and its operands."""

    is_of_rows = True  # whether results are like o and lse, or else like the primals

    def __init_subclass__(cls) -> None:
        cls.forward = opaque(cls.__name__, cls.forward)

    @classmethod
    def run(cls, call: TorchCall, *operands: Any) -> Any:
        """What `apply` does, quicker where nothing is recorded or transformed."""
        recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
        if recorded or is_dual() or torch._C._are_functorch_transforms_active():
            return cls.apply(call, *operands)
        return cls.forward(call, *operands)

    @staticmethod
    def axes(call: TorchCall) -> tuple[int | None, ...]:
        """How many of its last axes are not batch axes, for each operand."""
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])
        if is_dual() or ctx.call.operator:  # torch.compile enters dual levels unseen
            ctx.save_for_forward(*inputs[1:])

    @classmethod
    def derive(cls, call: TorchCall, *operands: Any) -> Any:
        """`run`, also within the vmap of torch.autograd, as in `torch.autograd.grad(..., is_grads_batched=True)`, which
        does not know the one of a Function."""
        if not any(map(is_batched, operands)):
            return cls.run(call, *operands)
        levels = [level_of(x) if is_batched(x) else 0 for x in operands]
        level = max(levels)
        dims = [0 if own == level else None for own in levels]
        inner = [x if dim is None else torch._remove_batch_dim(x, level, 0, 0) for x, dim in zip(operands, dims)]
        info = SimpleNamespace(batch_size=next(x for x, dim in zip(inner, dims) if dim is not None).shape[0])
        results, _ = cls.vmap(info, (None, *dims), call, *inner)
        return tuple([x if x is None else torch._add_batch_dim(x, 0, level) for x in results])

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, call: TorchCall, *operands: Any) -> Any:
        dims = in_dims[1:]
        if call.counts_batches:
            each = [cls.apply(call, *[x if dim is None else element(x, dim, i) for x, dim in zip(operands, dims)])
                    for i in range(max(info.batch_size, 1))]  # fmt: skip
            results = [None if x[0] is None else torch.stack(x)[: info.batch_size] for x in zip(*each)]
        else:
            results = cls.batched(info.batch_size, dims, call, operands)
        return tuple(results), tuple([None if x is None else 0 for x in results])

    @classmethod
    def batched(cls, size: int, dims: Sequence[int | None], call: TorchCall, operands: Sequence[Any]) -> list[Any]:
        """Results where vmap's axis is one more batch axis, in front of all others."""
        mapped = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, dims)]
        shapes = [x if x is None else x.shape[dim is not None :] for x, dim in zip(mapped, dims)]
        counts = [size] * len(mapped)
        for number, at in enumerate(call.places, 3):
            if at not in call.weights and dims[number] is None:
                counts[number] = 1  # an array of a mask, which has no gradient for each
        batch_axes = max(map(len, shapes[:3])) - 2

        def whole(count: int, shape: Sequence[int], own: int | None) -> Sequence[int]:
            """The shape with that axis, and with all batch axes after it."""
            return count, *[1] * (max(batch_axes, 1) - len(shape) + cast(int, own)), *shape

        for number, (x, dim, count, own) in enumerate(zip(mapped, dims, counts, cls.axes(call))):
            if x is not None:
                x = x.expand(count, *x.shape) if dim is None else x
                mapped[number] = x.reshape(whole(count, shapes[number], own))
        arrays = [x if x is None else x.reshape(whole(1, x.shape, own))
                  for x, own in zip(call.arrays, call.options.own_axes)]  # fmt: skip
        results = cls.apply(replace(call, arrays=tuple(arrays)), *mapped)
        if cls.is_of_rows:
            return [x if batch_axes else x[:, 0] for x in results]
        return [x if x is None else x.reshape(size, *shape) for x, shape in zip(results, shapes)]


class Forward(TorchPass):
    """Primals -> o, lse."""

    @staticmethod
    def axes(call: TorchCall) -> tuple[int | None, ...]:
        return call.axes

    @staticmethod
    def forward(call: TorchCall, *primals: Any) -> Any:
        with on_device(primals[0]):
            arrays = arrays_of(primals)
            o, saved = call.options.functions.forward(*arrays[:3], **call.given(arrays))
            return tensors_of((o, saved.lse))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        TorchPass.setup_context(ctx, (*inputs, *output), output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        needs = ctx.needs_input_grad[1:]
        if do is None and dlse is None:
            return None, *[None] * len(needs)
        return None, *Backward.derive(ctx.call.wanting(needs), *ctx.saved_tensors, do, dlse)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return Tangent.derive(ctx.call, *ctx.saved_tensors, *tangents)


class Tangent(TorchPass):
    """Primals, o, lse and tangents of the primals -> to, tlse."""

    @staticmethod
    def axes(call: TorchCall) -> tuple[int | None, ...]:
        return *call.axes, 2, 1, *call.axes

    @staticmethod
    def forward(call: TorchCall, *operands: Any) -> Any:
        with on_device(operands[0]):
            primals, results, tangents = split(call, arrays_of(operands), 2)
            tangent = call.options.functions.tangent
            return tensors_of(tangent(*primals[:3], *results, *tangents[:3], tscore=call.of_score(tangents),
                                      **call.given(primals)))  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        TorchPass.setup_context(ctx, (*inputs, *output), output)

    @staticmethod
    def backward(ctx: Any, c: Any, e: Any) -> Any:
        """The gradients of <c, to> + <e, tlse>, which is linear in the tangents."""
        call, (primals, results, rest) = ctx.call, split(ctx.call, ctx.saved_tensors, 2)
        needs, _, tneeds = split(call, ctx.needs_input_grad[1:], 2)
        grads = tgrads = [None] * len(primals)
        if not (c is None and e is None):
            if any(needs):
                along = *rest, None, None
                grads = BackwardTangent.derive(call.wanting(needs), *primals, *results, c, e, *along)
            if any(tneeds):
                tgrads = Backward.derive(call.wanting(tneeds), *primals, *results, c, e)
        return None, *grads, None, None, *tgrads

    @staticmethod
    def jvp(ctx: Any, _: Any, *of_operands: Any) -> Any:
        call, (primals, results, _) = ctx.call, split(ctx.call, ctx.saved_tensors, 2)
        along, _, of_tangents = split(call, of_operands, 2)
        if not all(x is None for x in along):
            raise NotImplementedError(NOT_THERE)
        return Tangent.derive(call, *primals, *results, *of_tangents)


class Backward(TorchPass):
    """Primals, o, lse, do, dlse -> the gradients of the primals."""

    is_of_rows = False

    @staticmethod
    def axes(call: TorchCall) -> tuple[int | None, ...]:
        return *call.axes, 2, 1, 2, 1

    @staticmethod
    def forward(call: TorchCall, *operands: Any) -> Any:
        with on_device(operands[0]):
            primals, (o, lse), (do, dlse) = split(call, arrays_of(operands), 2)
            functions = call.options.functions
            saved = functions.saved(*primals[:3], o, lse, **call.given(primals))
            do = np.zeros_like(o) if do is None else do
            grads = functions.backward(do, saved, dlse=dlse, deterministic=call.is_deterministic)
            return tensors_of(call.of_primals(grads))

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        primals, results, rows = split(call, ctx.saved_tensors, 2)
        if all(x is None for x in directions):
            return None, *[None] * len(needs)
        along = Tangent.derive(call, *primals, *results, *directions)
        grads = [None] * len(primals)
        if any(needs[: len(primals)]):
            given = *primals, *results, *rows, *directions, *along, None, None
            grads = BackwardTangent.derive(call.wanting(needs), *given)
        return None, *grads, None, None, *[x if row is not None else None for x, row in zip(along, rows)]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        call, (primals, results, rows) = ctx.call, split(ctx.call, ctx.saved_tensors, 2)
        along, of_results, of_rows = split(call, tangents, 2)
        if all(x is None for x in along):
            return Backward.derive(call, *primals, *results, *of_rows)
        return BackwardTangent.derive(call, *primals, *results, *rows, *along, *of_results, *of_rows)


class BackwardTangent(TorchPass):
    """Primals, o, lse, do, dlse, and the tangents of all of these -> those of the gradients."""

    is_of_rows = False

    @staticmethod
    def axes(call: TorchCall) -> tuple[int | None, ...]:
        return *call.axes, 2, 1, 2, 1, *call.axes, 2, 1, 2, 1

    @staticmethod
    def forward(call: TorchCall, *operands: Any) -> Any:
        with on_device(operands[0]):
            primals, (o, lse), rest = split(call, arrays_of(operands), 2)
            (do, dlse), (tangents, (to, tlse), (tdo, tdlse)) = rest[:2], split(call, rest[2:], 2)
            functions = call.options.functions
            saved = functions.saved(*primals[:3], o, lse, **call.given(primals))
            do = np.zeros_like(o) if do is None else do
            dlse = np.zeros_like(lse) if dlse is None and tdlse is not None else dlse
            tsaved = functions.saved_tangents(saved, *tangents[:3], call.of_score(tangents), to, tlse)
            tgrads = functions.tangents_of_gradients(do, saved, tsaved, tdo, dlse, tdlse, call.is_deterministic)
            return tensors_of(call.of_primals(tgrads))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        raise NotImplementedError(NOT_THERE)

    jvp = backward


def is_dual() -> bool:
    """Whether tangents may be asked for."""
    return forward_ad._current_level >= 0


def element(x: Any, dim: int, number: int) -> Any:
    """An element of a batch; zeros of its shape in place of those that an empty one lacks."""
    return x.select(dim, number) if x.shape[dim] else x.new_zeros(x.movedim(dim, 0).shape[1:])


def is_batched(x: Any) -> bool:
    """Whether it is a batch to the vmap of torch.autograd, which is older than torch.func's."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def level_of(x: Any) -> int:
    """The level of the innermost vmap over x, counted from 1. Torch knows in which one a thread is, but on a
    GPU autograd works in threads of its own. Removing an axis that x does not have gives one of length 0."""
    return max((level for level in range(1, 64) if torch._remove_batch_dim(x, level, 0, 0).shape[0]), default=1)


def split(call: TorchCall, values: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Values of the primals, the next `count`, and the rest."""
    first = len(call.places) + 3
    return values[:first], values[first : first + count], values[first + count :]

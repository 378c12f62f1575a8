"""Passes as a torch operator, for tensors that have no elements yet: those of torch.compile, torch.export, make_fx and
FakeTensorMode, which know the shapes of the results and see nothing else.

The options of a call are words, numbers and tensors, such as "Window int int None" with 100 and 0: words alone decide
what is compiled, numbers and the elements of tensors may change from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.values import Taken, Value, kinds, remembered
from ...dropout import Dropout
from ...masks import Mask
from ...scores import Part
from ..options import taken_apart
from .passes import Backward, BackwardTangent, Forward, Tangent, TorchCall, TorchPass

CONSTANTS = {str(x): x for x in (None, True, False)}
CALLS: dict[str, list[str]] = {}  # the words of calls, one by one
PASSES: dict[str, type[TorchPass]] = {kind.__name__: kind for kind in (Forward, Tangent, Backward, BackwardTangent)}


class TakenApart(NamedTuple):
    """What words stand for, in their order."""

    integers: list[int]
    floats: list[float]
    arrays: list[torch.Tensor]
    rest: list[Any]  # what there are no words for: functions, and what does not fit


def words_of(x: Any, apart: TakenApart) -> str:
    """An option in words. torch.compile traces this."""
    if x is None or isinstance(x, bool):
        return str(x)
    if isinstance(x, int):
        if not -(2**63) <= x < 2**63:
            return f"int={x}"
        apart.integers.append(x)
        return "int"
    if isinstance(x, float):
        apart.floats.append(x)
        return "float"
    if isinstance(x, torch.Tensor | np.ndarray):
        apart.arrays.append(torch.as_tensor(x))
        return "array"
    if isinstance(x, list | tuple):
        return " ".join([str(len(x)), *[words_of(each, apart) for each in x]])
    if isinstance(x, Value | Dropout) and not isinstance(x, Taken):
        names: Any = type(x).__dataclass_fields__
        return " ".join([type(x).__name__, *[words_of(getattr(x, name), apart) for name in names]])
    apart.rest.append(x)
    return ""


def option_of(words: Iterator[str], integers: Iterator[int], floats: Iterator[float], arrays: Iterator[Any]) -> Any:
    """The option that the next words stand for."""
    word = next(words)
    if word in CONSTANTS:
        return CONSTANTS[word]
    if word in ("int", "float", "array"):
        return next({"int": integers, "float": floats, "array": arrays}[word])
    if word.startswith("int="):
        return int(word[4:])
    if word.isdigit():
        return tuple([option_of(words, integers, floats, arrays) for _ in range(int(word))])
    kind: Any = kind_of(word)
    own = kind.__dataclass_fields__
    values = {name: option_of(words, integers, floats, arrays) for name in own}
    found_out = {name: values.pop(name) for name in own if not own[name].init}
    made = kind(**values)
    vars(made).update(found_out)
    return made


@cache
def kind_of(word: str) -> type:
    return next(kind for kind in (*kinds(Mask), *kinds(Part), Dropout) if kind.__name__ == word)


def call_of(words: str, integers: Sequence[int], floats: Sequence[float], arrays: Sequence[Any]) -> Any:
    """A call, and the tensors in its mask and score."""
    each = remembered(CALLS, words, words.split)
    *options, deterministic = option_of(iter(each), iter(integers), iter(floats), iter(arrays))
    return TorchCall.of(*taken_apart(*options), deterministic)


def traced_call_of(words: str, arrays: Sequence[Any]) -> Any:
    """A call while it is traced, with other numbers: reading its own would make them constants."""
    each = remembered(CALLS, words, words.split)
    return call_of(words, [1] * each.count("int"), [0.5] * each.count("float"), arrays)


def run(
    words: str, integers: list[int], floats: list[float], arrays: list[torch.Tensor], q: Any, k: Any, v: Any
) -> tuple[Any, Any]:  # fmt: skip
    """o and lse. torch.compile has this function in its graph, and traces what it does only after all derivatives."""
    numbers = None
    if any(isinstance(x, torch.SymFloat) for x in floats):  # constants to torch.compile unless they are multiplied
        one = torch.ones((), dtype=torch.float64)
        floats, numbers = [], torch.stack([one * x for x in floats])
    o, lse = derived("Forward", None, words, integers, floats, numbers, arrays, [q, k, v])
    return o, lse


def put_run_in_graphs() -> None:
    """Called while torch.compile traces: to import it before takes seconds."""
    torch._dynamo.allow_in_graph(run)


put_run_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- the operator
LIBRARY = torch.library.Library("numbattn", "FRAGMENT")
LIBRARY.define(
    "run(str kind, bool[]? needs, str words, SymInt[] integers, float[] floats, Tensor? numbers, Tensor[] arrays, "
    "Tensor?[] operands) -> Tensor[]"  # numbers: floats, if they are symbolic; operands: without the arrays
)


def derived(kind: str, needs: Any, words: str, *rest: Any) -> list[Any]:
    """The results of a pass, whose derivatives are other passes by the operator."""
    *numbers, arrays, operands = rest
    call, tensors = traced_call_of(words, arrays)
    call = replace(call, needs=needs and tuple(needs), operator=partial(below_autograd, words, *numbers))
    results = PASSES[kind].run(call, *operands[:3], *tensors, *operands[3:])
    return [x for x in results if x is not None]


def below_autograd(
    words: str, integers: Any, floats: Any, numbers: Any, kind: str, call: TorchCall, *operands: Any
) -> Any:
    """A pass by the operator, without derivatives."""
    after, needs = 3 + len(call.places), call.needs and list(call.needs)
    given = operands[3:after], [*operands[:3], *operands[after:]]
    with torch._C._AutoDispatchBelowAutograd():
        results = iter(torch.ops.numbattn.run(kind, needs, words, integers, floats, numbers, *given))
    return tuple([next(results) if given else None for given in given_by(kind, call)])


def computed(
    kind: str, needs: Any, words: str, integers: Any, floats: Any, numbers: Any, arrays: Any, operands: Any
) -> list[Any]:  # fmt: skip
    call, tensors = call_of(words, integers, floats if numbers is None else numbers.tolist(), arrays)
    call = replace(call, needs=needs)
    results = PASSES[kind].forward(call, *operands[:3], *tensors, *operands[3:])
    return [x.contiguous() for x, given in zip(results, given_by(kind, call)) if given]


def shaped(kind: str, needs: Any, words: str, *given: Any) -> list[Any]:
    *_, arrays, (q, k, v, *rest) = given
    if kind == "Forward":
        rows = *batch_of(q, k, v), q.shape[-2]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return [q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=dtype)]
    call = replace(traced_call_of(words, arrays)[0], needs=needs)
    like = rest if PASSES[kind].is_of_rows else [q, k, v, *arrays]
    return [x.new_empty(x.shape) for x, given in zip(like, given_by(kind, call)) if given]


LIBRARY.impl("run", computed, "CompositeExplicitAutograd")
LIBRARY.impl("run", derived, "Autograd")
torch.library.register_fake("numbattn::run", shaped, lib=LIBRARY)


def given_by(kind: str, call: TorchCall) -> Sequence[bool]:
    """Which results of a pass are tensors."""
    return (True, True) if PASSES[kind].is_of_rows else call.has_gradients


def batch_of(*qkv: Any) -> tuple[Any, ...]:
    """The batch axes of o, the last one being the heads."""
    if all(x.ndim == 2 for x in qkv):
        return ()
    heads, heads_k, heads_v = (x.shape[-3] if x.ndim > 2 else 1 for x in qkv)
    heads_k = heads_v if heads_k == 1 else heads_k
    return *torch.broadcast_shapes(*[x.shape[:-3] for x in qkv]), heads_k if heads == 1 else heads

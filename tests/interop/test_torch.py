"""Attention of torch's tensors: all that a call can be asked for, and under all that torch does to functions."""

import math

import numpy as np
import pytest

import numbattn as na
from numbattn.masks import as_mask
from numbattn.scores import ArrayPart

from ..problems import LIMITS, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from numbattn.interop import torch as interop
from numbattn.interop.torch import attention

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by make_dual itself
FLOAT64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20220524)


def tensor_of(x):
    """A tensor of an array: torch has no negative strides."""
    if isinstance(x, np.ndarray) and min(x.strides, default=0) < 0:
        x = x.copy()
    return interop.tensor_of(x)


def randn(*shape, grad=False):
    return torch.randn(shape, **FLOAT64, requires_grad=grad)


def formula(q, k, v, *, causal=False, bias=None, visible=None, scale=None):
    """Plain attention, of k and v with fewer heads than q, too."""
    if q.ndim > 2:
        k, v = (x if x.ndim < 3 else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    S = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    S = S if bias is None else S + bias
    if causal:
        visible = torch.ones(S.shape[-2:], dtype=torch.bool).tril(S.shape[-1] - S.shape[-2])
    E = S.exp() if visible is None else S.exp() * visible
    return E / E.sum(-1, keepdim=True) @ v


def assert_close(got, expected):
    for x, y in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------------------------------------------- random problems
class Through(Problem):
    """A random problem, through torch: gradients by autograd, their tangents by dual tensors."""

    def __init__(self, *args):
        super().__init__(*args)
        if self.tangents:  # torch has none of arrays whose gradient is not wanted
            wanted = [part._wants_gradient for part in self.options["score"] for _ in part._weights]
            self.tangents |= {f"tscore {at}": None for at, yes in enumerate(wanted) if not yes}

    def called(self):
        with forward_ad.dual_level():
            duals = [forward_ad.unpack_dual(x) for x in self.through_torch()]
        results = [x.primal for x in duals]
        if self.tangents:
            results += [torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in duals]
        return [interop.array_of(x.detach()) for x in results]

    def through_torch(self):
        """o, lse and gradients."""
        def tensor(x, name, grad=True):
            tangent = (self.tangents or {}).get(name)
            x = tensor_of(x).requires_grad_(grad)
            return x if tangent is None else forward_ad.make_dual(x, tensor_of(tangent))

        def held(x):
            return weights[id(x)] if id(x) in weights else tensor_of(x)

        arrays = [*map(tensor, self.arrays, ("tq", "tk", "tv"))]
        of_score = [(part, x) for part in self.options["score"] for x in part._weights]
        weights = {id(x): tensor(x, f"tscore {at}", part._wants_gradient)
                   for at, (part, x) in enumerate(of_score) if isinstance(part, ArrayPart)}  # fmt: skip
        score = [part._mapped(held) for part in self.options["score"]]
        options = self.options | {"mask": as_mask(self.options["mask"])._mapped(tensor_of), "score": score}
        o, lse = attention(*arrays, **options, return_lse=True, deterministic=self.deterministic)
        leaves = [*arrays, *[weights[id(x)] for part, x in of_score if part._wants_gradient]]
        rows = [tensor(x, name, False) for x, name in ((self.do, "tdo"), (self.dlse, "tdlse")) if x is not None]
        return o, lse, *torch.autograd.grad((o, lse)[: len(rows)], leaves, rows)


@pytest.mark.parametrize("first", range(0, 16, 8))
def test_random_problems(first):
    for number in range(first, first + 8):
        problem = Through(11, number, LIMITS["cpu"])
        assert not list(problem.wrong(problem.run())), problem


# --------------------------------------------------------------------------------------------------------- derivatives
def leaves(*shapes):
    return [randn(*shape, grad=True) for shape in shapes]


QKV = (4, 3, 2), (2, 5, 2), (2, 5, 3)  # query heads 0 and 1 share a key head


def bias(q, k, v, pairs):
    return attention(q, k, v, score=na.Bias(pairs))


def squared(s, batch, head, i, j, table):
    return s + 0.125 * s * s * table[i]


CASES = {
    "nothing": ((), dict),
    "causal, lse": ((), lambda: {"causal": True, "return_lse": True}),
    "broadcast": ((), lambda: {"mask": torch.rand(4, 1, 5) > 0.3}),
    "lengths": ((), lambda: {"mask": na.Lengths(keys=torch.tensor([2, 5, 0, 1])), "scale": 0.5}),
    "segments": ((), lambda: {"mask": na.Segments([0, 1, 3], torch.tensor([0, 2, 5])), "causal": True}),
    "bias, cap": (((4, 3, 5),), lambda x: {"score": [na.Bias(x), na.Softcap(2.0)], "return_lse": True}),
    "slopes, sink": (((4,), ()), lambda x, y: {"score": [na.Alibi(x), na.Sink(y)], "return_lse": True}),
    "relative": (((4, 5),), lambda x: {"score": na.RelativeBias(x), "causal": True}),
    "function": ((), lambda: {"score": na.Score(squared, arrays=[torch.rand(3, dtype=torch.float64)])}),
    "dropout": (((3, 5),), lambda x: {"score": na.Bias(x), "dropout": na.Dropout(0.3, seed=1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives_are_finite_differences(case):
    shapes, options_of = CASES[case]
    fixed = options_of() if not shapes else None

    def function(*tensors):
        return attention(*tensors[:3], **(fixed or options_of(*tensors[3:])))

    inputs = leaves(*QKV, *shapes)
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


ALL = 0, 1, 2, 3


def test_functions_of_torch_func():
    """Each of them, of attention and of the formula, by all tensors."""
    tensors = [x.detach() for x in leaves((2, 3, 2), (2, 5, 2), (2, 5, 3), (3, 5))]
    tangents = [torch.randn_like(x) for x in tensors]

    def loss(attend):
        return lambda q, k, v, pairs: (attend(q, k, v, pairs) ** 2).sum()

    def of_formula(q, k, v, pairs):
        return formula(q, k, v, bias=pairs)

    for transform in (
        lambda f: func.grad(loss(f), ALL)(*tensors),
        lambda f: func.jvp(f, tuple(tensors), tuple(tangents)),
        lambda f: func.jacrev(f, ALL)(*tensors),
        lambda f: func.jacfwd(f, ALL)(*tensors),
        lambda f: func.hessian(loss(f), ALL)(*tensors),
        lambda f: func.jacrev(func.jacrev(loss(f), ALL), ALL)(*tensors),
        lambda f: func.jacrev(func.jacfwd(loss(f), ALL), ALL)(*tensors),
        lambda f: func.vjp(f, *tensors)[1](torch.ones(2, 3, 3, **FLOAT64)),
        lambda f: func.jvp(func.grad(loss(f), ALL), tuple(tensors), tuple(tangents)),
        lambda f: func.grad(lambda *x: func.jvp(f, x, tuple(tangents))[1].sum(), ALL)(*tensors),
        lambda f: func.jvp(lambda *t: func.grad(lambda *t: (func.jvp(f, tuple(tensors), t)[1] ** 2).sum(), ALL)(*t),
                           tuple(tangents), tuple(tangents)),
    ):  # fmt: skip
        assert_close(transform(bias), transform(of_formula))


def test_dual_tensors_and_gradients_of_gradients():
    inputs, others = leaves(*QKV), leaves(*QKV)

    def penalty(attend):
        """Of the gradient by k, and its gradient by all."""
        dk, = torch.autograd.grad((attend(*inputs) ** 3).sum(), inputs[1], create_graph=True)
        return torch.autograd.grad((dk**2).sum(), inputs)

    def dual(attend):
        with forward_ad.dual_level():
            out = attend(*map(forward_ad.make_dual, inputs, others))
            return forward_ad.unpack_dual(out).tangent

    def through_a_dual(attend):
        """The gradient of a tangent."""
        return torch.autograd.grad((dual(attend) ** 2).sum(), [*inputs, *others])

    for transform in (penalty, dual, through_a_dual):
        assert_close(transform(attention), transform(formula))


@pytest.mark.parametrize("transform", [
    lambda f: lambda *x: func.jacfwd(func.jacfwd(f, 0), 0)(*x),
    lambda f: lambda *x: func.hessian(lambda *x: func.grad(f)(*x).sum())(*x),
    lambda f: lambda *x: func.grad(lambda *x: func.jacrev(func.jacrev(f))(*x).sum(), 1)(*x),
])  # fmt: skip
def test_what_has_no_derivative_says_so(transform):
    tensors = [x.detach() for x in leaves(*QKV)]
    with pytest.raises(NotImplementedError, match="no third ones"):
        transform(lambda *x: attention(*x).sum())(*tensors)


def test_arrays_of_a_function_have_no_derivatives():
    q, k, v, table = leaves(*QKV, (3,))

    def attend(table, q=q):
        return attention(q, k, v, score=na.Score(squared, arrays=[table]))

    with pytest.raises(NotImplementedError, match="an array of a Score requires a gradient"):
        attend(table).sum().backward()
    with pytest.raises(NotImplementedError, match="Score"):
        func.jvp(attend, (table.detach(),), (table.detach(),))
    with pytest.raises(NotImplementedError, match="an array of a Score requires a gradient"):
        func.grad(lambda table: func.grad(lambda q: attend(table, q).sum())(q).sum())(table.detach())
    assert torch.autograd.grad(attend(table.detach()).sum(), q)[0].shape == q.shape


def test_an_array_whose_gradient_is_not_wanted_is_a_constant():
    q, k, v, pairs = leaves(*QKV, (3, 5))
    score = na.Bias(pairs, gradient=False)
    attention(q, k, v, score=score).sum().backward()
    assert pairs.grad is None
    assert q.grad is not None
    (dpairs,) = func.grad(lambda x: attention(q, k, v, score=na.Bias(x, gradient=False)).sum(), (0,))(pairs.detach())
    assert not dpairs.any()


def test_what_needs_no_gradient_is_not_computed(monkeypatch):
    q, k, v, pairs = leaves(*QKV, (3, 5))
    seen = []
    backward = interop.attention_backward

    def spy(*args, **options):
        grads = backward(*args, **options)
        seen.append(grads.score)
        return grads

    monkeypatch.setattr(interop, "attention_backward", spy)
    for x in (pairs, pairs.detach(), pairs.detach().numpy()):
        attention(q, k, v, score=[na.Softcap(2.0), na.Bias(x)]).sum().backward()
    assert [x is None for (x,) in seen] == [False, True, True]
    assert attention(q.detach(), k.detach(), v.detach()).grad_fn is None
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad


# ---------------------------------------------------------------------------------------------------------------- vmap
def per_sample(function, dims, tensors):
    each = [function(*[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]) for i in range(3)]
    return tuple(map(torch.stack, zip(*each)))


SAMPLES = [  # shapes of q, k, v and the bias, and the axes of the samples
    ([(3, 6, 4), (5, 4), (5, 2), (6, 5)], (0, None, None, None)),
    ([(4, 3, 6, 4), (2, 5, 4), (2, 5, 3, 2), (4, 6, 1)], (1, None, 2, None)),
    ([(3, 6, 4), (3, 3, 5, 4), (3, 3, 5, 2), (3, 3, 1, 5)], (None, 0, 0, 1)),
    ([(3, 3, 6, 4), (5, 4), (3, 5, 2), (3, 6, 5)], (0, None, 0, 0)),
    ([(3, 3, 4, 6, 4), (2, 5, 4), (3, 2, 5, 2), ()], (0, None, None, None)),
    ([(3, 6, 4), (5, 4), (5, 2), (6, 5, 3)], (None, None, None, 2)),
]


@pytest.mark.parametrize("dropout", [None, na.Dropout(0.3, seed=1)], ids=["all", "dropout"])
@pytest.mark.parametrize(("shapes", "dims"), SAMPLES)
def test_vmap_gives_the_bits_of_each_alone(shapes, dims, dropout):
    """Of the results, their derivatives in both modes and those of their sum."""
    tensors = [randn(*shape) for shape in shapes]

    def attend(q, k, v, pairs):
        return attention(q, k, v, score=na.Bias(pairs), causal=True, return_lse=True, dropout=dropout)

    def loss(*tensors):
        return sum((x**2).sum() for x in attend(*tensors))

    def tangent(*tensors):
        return func.jvp(attend, tensors, tensors)[1]

    for function in (attend, func.grad(loss, ALL), tangent):
        for x, y in zip(func.vmap(function, dims)(*tensors), per_sample(function, dims, tensors), strict=True):
            assert torch.equal(x, y)
    of_sum = func.grad(lambda *x: func.vmap(loss, dims)(*x).sum(), ALL)(*tensors)
    one_by_one = func.grad(lambda *x: per_sample(lambda *x: (loss(*x),), dims, x)[0].sum(), ALL)(*tensors)
    assert_close(of_sum, one_by_one)


def half_of(s, batch, head, i, j, table):
    return s * (0.5 + batch) + table[head]


@pytest.mark.parametrize("options_of", [
    lambda x: {"mask": na.Lengths(keys=x)}, lambda x: {"mask": na.Segments([0, 2, 6], x.new_tensor([0, 1, 5]) + 0 * x)},
    lambda x: {"mask": torch.arange(5) < x}, lambda x: {"mask": na.Causal(x) | na.First(1)},
    lambda x: {"score": na.Score(half_of, arrays=[x.to(torch.float64)[None]])},
], ids=["lengths", "segments", "booleans", "or", "function"])  # fmt: skip
def test_vmap_over_arrays_of_masks_and_functions(options_of):
    q, k, v, lengths = randn(3, 1, 6, 4), randn(5, 4), randn(5, 2), torch.tensor([2, 5, 1])

    def attend(q, k, v, length):
        return attention(q, k, v, **options_of(length), return_lse=True)

    for dims in ((0, None, None, 0), (None, None, None, 0)):
        tensors = [q if dims[0] == 0 else q[0], k, v, lengths]
        for x, y in zip(func.vmap(attend, dims)(*tensors), per_sample(attend, dims, tensors), strict=True):
            assert torch.equal(x, y)


def test_per_sample_gradients_of_a_module():
    layer = torch.nn.Linear(4, 12, **FLOAT64)
    x = randn(3, 6, 4)

    def loss(parameters, x):
        q, k, v = func.functional_call(layer, parameters, (x,)).chunk(3, -1)
        return attention(q, k, v, causal=True).sum()

    parameters = dict(layer.named_parameters())
    grads = func.vmap(func.grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        assert_close({name: dx[i] for name, dx in grads.items()}, func.grad(loss)(parameters, x[i]))

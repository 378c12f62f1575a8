"""Attention of torch's tensors: all that a call can be asked for, and under all that torch does to functions."""

import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import numbattn as na
from numbattn.masks import as_mask
from numbattn.scores import ArrayPart

from ..directions import Directions
from ..problems import LIMITS, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from numbattn.interop import options as apart
from numbattn.interop.torch import attention, passes
from numbattn.interop.torch.arrays import array_of, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # by make_dual itself
FLOAT64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20220524)


def placed(x):
    """A tensor of an array: torch has no negative strides."""
    negative = min(getattr(x, "strides", ()), default=0) < 0
    return tensor_of(x.copy() if negative else x)


def randn(*shape, grad=False):
    return torch.randn(shape, **FLOAT64, requires_grad=grad)


def formula(q, k, v, *, bias=None, return_lse=False):
    """Plain attention, of k and v with fewer heads than q, too."""
    if q.ndim > 2:
        k, v = (x if x.ndim < 3 else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    S = q @ k.mT / math.sqrt(q.shape[-1])
    E = (S if bias is None else S + bias).exp()
    o = E / E.sum(-1, keepdim=True) @ v
    return (o, E.sum(-1).log()) if return_lse else o


def assert_close(got, expected):
    for x, y in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------------------------------------------- random problems
class Through(Problem):
    """A random problem, through torch: gradients by autograd, their tangents by dual tensors."""

    def drawn_directions(self):
        """One; torch has no tangents of arrays whose gradient is not wanted."""
        directions = Directions(self, self.jets, self.along, ["jvp"], [None])
        wanted = [part._wants_gradient for part in self.options["score"] for _ in part._weights]
        directions.tangents |= {f"score {at}": None for at, yes in enumerate(wanted) if not yes}
        return directions

    def called(self):
        with forward_ad.dual_level():
            duals = [forward_ad.unpack_dual(x) for x in self.through_torch()]
        results = [x.primal for x in duals]
        if self.directions:
            results += [torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in duals]
        return [array_of(x.detach()) for x in results]

    def through_torch(self):
        """o, lse and gradients."""
        def tensor(x, name, grad=True):
            tangent = self.directions.tangents.get(name) if self.directions else None
            x = placed(x).requires_grad_(grad)
            return x if tangent is None else forward_ad.make_dual(x, placed(tangent))

        def held(x):
            return weights[id(x)] if id(x) in weights else placed(x)

        arrays = [*map(tensor, self.arrays, "qkv")]
        of_score = [(part, x) for part in self.options["score"] for x in part._weights]
        weights = {id(x): tensor(x, f"score {at}", part._wants_gradient)
                   for at, (part, x) in enumerate(of_score) if isinstance(part, ArrayPart)}  # fmt: skip
        score = [part._mapped(held) for part in self.options["score"]]
        options = self.options | {"mask": as_mask(self.options["mask"])._mapped(placed), "score": score}
        o, lse = attention(*arrays, **options, return_lse=True, deterministic=self.deterministic)
        leaves = [*arrays, *[weights[id(x)] for part, x in of_score if part._wants_gradient]]
        rows = [tensor(x, name, False) for x, name in ((self.do, "do"), (self.dlse, "lse")) if x is not None]
        return o, lse, *torch.autograd.grad((o, lse)[: len(rows)], leaves, rows)


@pytest.mark.parametrize("first", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_random_problems(first):
    for number in range(first, first + 8):
        problem = Through(11, number, LIMITS["cpu"])
        assert not list(problem.wrong(problem.run())), problem


# --------------------------------------------------------------------------------------------------------- derivatives
def leaves(*shapes):
    return [randn(*shape, grad=True) for shape in shapes]


QKV = (4, 3, 2), (2, 5, 2), (2, 5, 3)  # query heads 0 and 1 share a key head


def bias(q, k, v, pairs):
    o, lse = attention(q, k, v, score=na.Bias(pairs), return_lse=True)
    return o + lse[..., None]


def squared(s, batch, head, i, j, table):
    return s + 0.125 * s * s * table[i]


def by_batch(s, batch, head, i, j):
    return s * (0.5 + batch)


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
    batched = {"check_batched_grad": True, "fast_mode": True}
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_forward_grad=True, **batched)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, **batched)


ALL = 0, 1, 2, 3


def test_functions_of_torch_func():
    """Each of them, of attention and of the formula, by all tensors."""
    tensors = [x.detach() for x in leaves((2, 3, 2), (2, 5, 2), (2, 5, 3), (3, 5))]
    tangents = [torch.randn_like(x) for x in tensors]

    def loss(attend):
        return lambda q, k, v, pairs: (attend(q, k, v, pairs) ** 2).sum()

    def of_formula(q, k, v, pairs):
        o, lse = formula(q, k, v, bias=pairs, return_lse=True)
        return o + lse[..., None]

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


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_of_torch_autograd(strategy):
    """By its own vmap, which is another one, and without."""
    tensors = tuple(leaves((2, 3, 2), (2, 5, 2), (2, 5, 3), (3, 5)))
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    assert_close(jacobian(bias, tensors, vectorize=True, strategy=strategy), jacobian(bias, tensors))

    def loss(*tensors):
        return (bias(*tensors) ** 2).sum()

    found = hessian(loss, tensors, vectorize=True, outer_jacobian_strategy=strategy)
    assert_close(found, hessian(loss, tensors))


def test_batches_of_directions_in_a_thread_of_autograd(monkeypatch):
    """As on a GPU: the thread does not know of the vmap."""
    tensors, jacobian = tuple(leaves(*QKV)), torch.autograd.functional.jacobian
    expected, derive = jacobian(attention, tensors), passes.Backward.derive
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(passes.Backward, "derive", lambda *operands: pool.submit(derive, *operands).result())
        assert_close(jacobian(attention, tensors, vectorize=True), expected)


def test_dual_tensors_and_gradients_of_gradients():
    inputs, others = leaves(*QKV), leaves(*QKV)

    def penalty(attend):
        """Of the gradient by k, and its gradient by all."""
        dk, = torch.autograd.grad((attend(*inputs) ** 3).sum(), inputs[1], create_graph=True)
        return torch.autograd.grad((dk**2).sum(), inputs)

    def penalty_of_some(attend):
        """Where the queries need no gradient."""
        q, k, v = inputs[0].detach(), *inputs[1:]
        dk, = torch.autograd.grad((attend(q, k, v) ** 3).sum(), k, create_graph=True)
        return torch.autograd.grad((dk**2).sum(), (k, v))

    def dual(attend):
        with forward_ad.dual_level():
            out = attend(*map(forward_ad.make_dual, inputs, others))
            return forward_ad.unpack_dual(out).tangent

    def through_a_dual(attend):
        """The gradient of a tangent."""
        return torch.autograd.grad((dual(attend) ** 2).sum(), [*inputs, *others])

    for transform in (penalty, penalty_of_some, dual, through_a_dual):
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


def pulled_back(q):
    _, pull_back = func.vjp(attention, q, q, q)
    return make_fx(lambda do: pull_back(do))(q)


@pytest.mark.parametrize(("function", "match"), [
    (pulled_back, "nor gradients of attention that it does not trace"),
    (make_fx(lambda q: attention(q, q, q, score=na.Score(by_batch))), "cannot trace functions, as in a Score"),
    (lambda q: torch.jit.trace(lambda q: attention(q, q, q), q), "cannot be traced by torch.jit.trace"),
], ids=["backward", "function", "jit"])  # fmt: skip
def test_what_would_be_taken_for_constants_is_refused(function, match):
    with pytest.raises(NotImplementedError, match=match):
        function(randn(3, 2))


def test_arrays_of_a_function_have_no_derivatives():
    q, k, v, table = leaves(*QKV, (3,))

    def attend(table, q=q):
        return attention(q, k, v, score=na.Score(squared, arrays=[table]))

    with pytest.raises(NotImplementedError, match="an array of a Score requires a gradient: pass gradient=True"):
        attend(table).sum().backward()
    with pytest.raises(NotImplementedError, match="Score"):
        func.jvp(attend, (table.detach(),), (table.detach(),))
    with pytest.raises(NotImplementedError, match="an array of a Score requires a gradient"):
        func.grad(lambda table: func.grad(lambda q: attend(table, q).sum())(q).sum())(table.detach())
    assert torch.autograd.grad(attend(table.detach()).sum(), q)[0].shape == q.shape


def test_arrays_of_a_function_have_gradients_where_they_are_asked_for():
    q, k, v, table = leaves(*QKV, (3,))

    def attend(table, gradient=True):
        return attention(q, k, v, score=na.Score(squared, arrays=[table], gradient=gradient)).sum()

    attend(table).backward()
    step = 1e-6 * torch.eye(3, dtype=table.dtype)
    wanted = [(attend(table + h, False) - attend(table - h, False)).item() / 2e-6 for h in step]
    torch.testing.assert_close(table.grad, torch.tensor(wanted, dtype=table.dtype), rtol=1e-6, atol=1e-8)
    _, along = func.jvp(attend, (table.detach(),), (step[0],))
    torch.testing.assert_close(along, 1e-6 * table.grad[0], rtol=1e-9, atol=0)


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
    backward = apart.ATTENTION.backward

    def spy(*args, **options):
        grads = backward(*args, **options)
        seen.append(grads.score)
        return grads

    monkeypatch.setattr(apart, "ATTENTION", apart.ATTENTION._replace(backward=spy))
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


@pytest.mark.parametrize("options", [{}, {"dropout": na.Dropout(0.3, seed=1)}, {"score": na.Score(by_batch)}])
def test_vmap_over_nothing(options):
    """As with functions of torch: the results are empty."""
    q, k, v = torch.zeros(2, 0, 6, 4), torch.zeros(5, 4), torch.zeros(5, 3)

    def loss(*tensors):
        return attention(*tensors, **options).sum()

    found = func.vmap(func.grad_and_value(loss, (0, 1, 2)), (1, None, None))(q, k, v)
    assert [x.shape for x in (*found[0], found[1])] == [(0, 2, 6, 4), (0, 5, 4), (0, 5, 3), (0,)]


def half_of(s, batch, head, i, j, table):
    return s * (0.5 + batch) + table[head]


@pytest.mark.parametrize("options_of", [
    lambda x: {"mask": na.Lengths(keys=x)}, lambda x: {"mask": na.Segments([0, 2, 6], x.new_tensor([0, 1, 5]) + 0 * x)},
    lambda x: {"mask": torch.arange(5) < x}, lambda x: {"mask": na.Causal(x) | na.First(1)},
    lambda x: {"score": na.Score(half_of, arrays=[x.to(torch.float64)[None]])},
    lambda x: {"score": na.Score(by_batch), "mask": na.Lengths(keys=x)},
], ids=["lengths", "segments", "booleans", "or", "function", "function without arrays"])  # fmt: skip
def test_vmap_over_arrays_of_masks_and_functions(options_of):
    q, k, v, lengths = randn(3, 1, 6, 4), randn(5, 4), randn(5, 2), torch.tensor([2, 5, 1])

    def attend(q, k, v, length):
        return attention(q, k, v, **options_of(length), return_lse=True)

    for dims in ((0, None, None, 0), (None, None, None, 0)):
        tensors = [q if dims[0] == 0 else q[0], k, v, lengths]
        for x, y in zip(func.vmap(attend, dims)(*tensors), per_sample(attend, dims, tensors), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("as_array", [torch.as_tensor, np.asarray], ids=["tensors", "NumPy's"])
def test_vmap_with_arrays_of_masks_that_all_samples_share(as_array):
    """Which lack the samples' axis."""
    q, k, v = randn(3, 2, 6, 4), randn(2, 5, 4), randn(2, 5, 2)
    visible = torch.rand(6, 5) > 0.2
    mask = na.Lengths(keys=as_array([2, 5])) & na.Dense(as_array(visible)) & na.Causal(as_array([[3], [1]])[:, 0])

    def grads(q, k, v):
        return func.grad(lambda *x: (attention(*x, mask=mask, score=na.Alibi(as_array([0.5, 1.0]))) ** 2).sum(),
                         (0, 1, 2))(q, k, v)  # fmt: skip

    for x, y in zip(func.vmap(grads, (0, None, None))(q, k, v), per_sample(grads, (0, None, None), (q, k, v))):
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


# ------------------------------------------------------------------------------------------------ all else torch does
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_shared_in_every_dtype(dtype):
    """Of tensors with any strides, and of results."""
    x = torch.randn(2, 5, 3, 4).to(dtype).swapaxes(1, 2)
    array = array_of(x)
    assert array.ctypes.data == x.data_ptr()
    assert array.strides == tuple(x.element_size() * stride for stride in x.stride())
    copy = array.copy()
    assert tensor_of(copy).data_ptr() == copy.ctypes.data
    o, lse = attention(x, x, x, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    o, saved = na.attention_forward(array, array, array)
    np.testing.assert_array_equal(array_of(attention(x, x, x)), o)
    x.requires_grad_()
    attention(x, x, x).sum().backward()
    dq, dk, dv = na.attention_backward(np.ones_like(o), saved)
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, sum(map(tensor_of, (dq, dk, dv))), rtol=0.02, atol=0.02)


def test_storages_can_be_resized_afterwards():
    """As torch's FSDP frees parameters."""
    q, k, v, pairs = (x.detach() for x in leaves(*QKV, (3, 5)))
    slopes, visible = torch.ones(4, requires_grad=True), torch.rand(4, 3, 5) > 0.3
    attention(q, k, v, mask=visible, score=[na.Bias(pairs), na.Alibi(slopes)]).sum().backward()
    attention(q, k, v, mask=visible, score=na.Bias(pairs))
    for x in (q, k, v, pairs, slopes, visible):
        x.untyped_storage().resize_(0)


def test_elements_that_are_not_in_memory():
    """An imaginary part whose sign is to be changed, and zeros."""
    q, k, v = (torch.complex(x, y).conj().imag for x, y in zip(leaves(*QKV), leaves(*QKV)))
    zeros = torch._efficientzerotensor((4, 3, 3), **FLOAT64)
    for rows in (torch.complex(randn(4, 3, 3), randn(4, 3, 3)).conj().imag, zeros):
        assert rows.is_neg() or rows._is_zerotensor()
        found, expected = (torch.autograd.grad(attend(q, k, v), (q, k, v), rows) for attend in (attention, formula))
        assert_close(found, expected)
    assert_close(attention(q, k, v), formula(q, k, v))


@pytest.mark.parametrize(("m", "n", "d"), [(0, 5, 2), (3, 0, 2), (1, 1, 1), (3, 5, 0)])
def test_shapes_with_nothing_in_them(m, n, d):
    tensors = q, k, v = leaves((2, m, d), (2, n, d), (2, n, 3))
    o, lse = attention(q, k, v, return_lse=True)
    (o.sum() + lse[~lse.isinf()].sum()).backward()
    assert o.shape == (2, m, 3)
    assert all(x.grad.shape == x.shape for x in tensors)
    (dq,) = torch.autograd.grad(attention(*tensors).sum(), q, create_graph=True)
    torch.autograd.grad(dq.sum(), tensors)


def test_modification_in_place_is_torchs_own_error():
    q, k, v = (x * 1 for x in leaves(*QKV))
    for change in (lambda o: k.add_(1), lambda o: o.add_(1)):
        o = attention(q, k, v)
        change(o)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("call", [
    attention, lambda q, k, v: torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)[0],
    lambda q, k, v: attention(forward_ad.make_dual(q, q.detach()), k, v),
], ids=["forward", "backward", "dual"])  # fmt: skip
def test_nothing_is_kept_alive(call):
    """Not even until garbage is collected."""
    q, k, v = leaves(*QKV)
    with forward_ad.dual_level():
        o = call(q, k, v)
    o, node = weakref.ref(o), weakref.ref(o.grad_fn)
    assert o() is None
    assert node() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    q, k, v = leaves(*QKV)
    o = checkpoint(partial(attention, causal=True), q, k, v, use_reentrant=use_reentrant)
    expected = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    o.sum().backward()
    assert_close([q.grad, k.grad, v.grad], expected)


def test_autocast_casts_as_for_torchs_own():
    q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        o, theirs = attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert o.dtype == theirs.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(o, theirs, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(x.double() for x in (q, k, v))).dtype == torch.float64


@pytest.mark.parametrize("by_torch", [False, True])
def test_deterministic(monkeypatch, by_torch):
    seen, backward = [], apart.ATTENTION.backward

    def spy(*args, deterministic, **options):
        seen.append(deterministic)
        return backward(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(apart, "ATTENTION", apart.ATTENTION._replace(backward=spy))
    q, k, v = leaves(*QKV)
    o, other = attention(q, k, v, deterministic=not by_torch), attention(q, k, v)
    torch.use_deterministic_algorithms(by_torch)
    try:
        o.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    other.sum().backward()
    assert seen == [True, False]


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"q": np.zeros((3, 4))}, TypeError, "q: got numpy.ndarray of float64, expected a torch.Tensor"),
    ({"k": na.KVCache.zeros(1, 1, 5, 4, like=np.zeros(1)), "v": None}, TypeError, "k: got a KVCache"),
    ({"q": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "q: got int64, allowed float16, bfloat16"),
    ({"k": torch.zeros(5, 4)}, TypeError, "k: got float32, expected float64"),
    ({"k": torch.zeros(5, 3)}, (TypeError, ValueError), "k: got"),
    ({"mask": na.Lengths(keys=torch.tensor([2, 3]))}, ValueError, "Lengths"),
    ({"return_lse": 1}, TypeError, "return_lse: got 1, expected True or False"),
    ({"deterministic": None}, TypeError, "deterministic: got None"),
    ({"causal": 1}, TypeError, "causal: got 1"),
    ({"scale": torch.ones(())}, TypeError, "scale"),
    ({"scale": -1.0}, ValueError, "scale: got -1.0"),
    ({"dropout": 0.1}, TypeError, "dropout: got 0.1, expected a numbattn.Dropout"),
    ({"dropout": [0.1]}, TypeError, "dropout: got"),
    ({"causal": [True]}, TypeError, "causal: got"),
    ({"q": torch.zeros(3, 4, device="meta")}, TypeError, "q: got a tensor on the device meta"),
    ({"k": torch.zeros(5, 4).to_sparse()}, TypeError, "k: got a tensor of the layout torch.sparse_coo, .* k.to_dense"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, error, match):
    given = {"q": randn(3, 4), "k": randn(5, 4), "v": randn(5, 2), **change}
    with pytest.raises(error, match=match):
        attention(**given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    q = torch.nested.nested_tensor([torch.zeros(3, 4)], layout=layout)
    with pytest.raises(TypeError, match=r"q: got a nested tensor, expected a dense one: pass q.values\(\)"):
        attention(q, torch.zeros(5, 4), torch.zeros(5, 2))


# ----------------------------------------------------------------------------------------------------------------- GPU
@pytest.mark.gpu
def test_random_problems_on_a_gpu():
    import cupy

    for number in range(6):
        problem = Through(11, number, LIMITS["gpu"]._replace(tangents=0.4), cupy)
        assert not list(problem.wrong(problem.run())), problem


def on_gpu(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_as_torchs_own(dtype):
    tensors = on_gpu(*[(2, 4, 300, 64)] * 3, dtype=dtype)
    o = attention(*tensors, causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    do = torch.randn_like(o)
    pairs = zip((o, *torch.autograd.grad(o, tensors, do)), (theirs, *torch.autograd.grad(theirs, tensors, do)))
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.gpu
def test_batches_of_directions_on_a_gpu():
    tensors, jacobian = tuple(on_gpu(*QKV, dtype=torch.float64)), torch.autograd.functional.jacobian
    assert_close(jacobian(attention, tensors, vectorize=True), jacobian(attention, tensors))


@pytest.mark.gpu
def test_work_is_on_torchs_current_stream_and_memory_its_own():
    """Behind a stream that waits: nothing is computed before what it waits for."""
    q, k, v = on_gpu(*[(2, 4, 300, 64)] * 3)
    expected = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            late = [torch.full_like(x, torch.nan) for x in (q, k, v)]
            torch.cuda._sleep(200_000_000)
            for x, y in zip(late, (q, k, v)):
                x.copy_(y.detach())
            late = [x.requires_grad_() for x in late]
            before = torch.cuda.memory_allocated()
            o = attention(*late)
            assert torch.cuda.memory_allocated() >= before + o.nbytes
            grads = torch.autograd.grad(o.sum(), late)
            del o
            assert not stream.query()
            stream.synchronize()
        for x, y in zip(grads, expected):
            torch.testing.assert_close(x, y)


@pytest.mark.gpu
def test_in_a_graph_of_torch():
    q, k, v = (x.detach() for x in on_gpu(*[(2, 4, 300, 64)] * 3, dtype=torch.float16))
    expected, graph = attention(q, k, v), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v)
    o.zero_()
    graph.replay()
    torch.testing.assert_close(o, expected)


@pytest.mark.gpu
def test_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    q, k, v = on_gpu(*[(2, 4, 300, 64)] * 3)
    far = [x.detach().to("cuda:1").requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attention(*far).sum(), far)
    assert torch.cuda.current_device() == 0
    for x, y in zip(grads, torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))):
        torch.testing.assert_close(x.cpu(), y.cpu())


FAULTS = {
    "interop/torch/passes.py": {
        "test_derivatives_are_finite_differences": {
            "*[x if row is not None else None for x, row in zip(along, rows)]": "None, None",
            "*rows, *along, *of_results, *of_rows)": "*rows, *along, *of_results, None, None)",
        },
        "test_functions_of_torch_func": {
            "tgrads = Backward.derive(call.wanting(tneeds), *primals, *results, c, e)": "pass",
            "*primals, *results, c, e, *along)": "*primals, *results, c, None, *along)",
            "return Backward.derive(call, *primals, *results, *of_rows)": "return [None] * len(primals)",
        },
        "test_what_has_no_derivative_says_so": {"if not all(x is None for x in along):\n": "if None:\n"},
        "test_dual_tensors_and_gradients_of_gradients": {"if any(needs[: len(primals)]):": "if needs[0]:"},
        "test_jacobians_of_torch_autograd": {"if not any(map(is_batched, operands)):": "if True:"},
        "test_batches_of_directions_in_a_thread_of_autograd": {
            "        level = max(levels)\n": "        level = torch._C._vmapmode_increment_nesting() - 1\n",
        },
        "test_an_array_whose_gradient_is_not_wanted_is_a_constant": {
            "arrays[at].detach() if at in constant else arrays[at]": "arrays[at]",
        },
        "test_what_needs_no_gradient_is_not_computed": {"if part._wants_gradient:": "if None:"},
        "test_arrays_of_a_function_have_no_derivatives": {"if need and not wanted": "if None and not wanted"},
        "test_vmap_gives_the_bits_of_each_alone": {
            "element(x, dim, i)": "element(x, dim, 0)",
            "return self.options.dropout is not None or has_functions": "return has_functions",
            "max(batch_axes, 1) - len(shape)": "batch_axes - len(shape)",
        },
        "test_vmap_over_nothing": {"range(max(info.batch_size, 1))": "range(info.batch_size)"},
        "test_vmap_over_arrays_of_masks_and_functions": {"is not None or has_functions or": "is not None or"},
        "test_vmap_with_arrays_of_masks_that_all_samples_share": {"replace(call, arrays=tuple(arrays))": "call"},
        "test_deterministic": {"self.deterministic or torch": "False or torch"},
        "test_what_would_be_taken_for_constants_is_refused": {"_get_dispatch_mode(PROXY) is not None": "is_dual()"},
        "interop/test_torch_operators.py::test_a_backward_pass_within_what_is_compiled": {
            '"torch._dynamo" in sys.modules': "False",
        },
        "interop/test_torch_operators.py::test_transforms_within_what_is_compiled": {" or ctx.call.operator:": ":"},
    },
    "interop/torch/arrays.py": {
        "test_what_does_not_fit_is_refused": {"if x.layout is not torch.strided:": "if None:"},
        "test_nested_tensors_are_refused": {"if x.is_nested:": "if None:"},
        "test_elements_that_are_not_in_memory": {"x.is_neg() or": "", "or x._is_zerotensor()": ""},
        "test_storages_can_be_resized_afterwards": {"return np.from_dlpack(Lent(x))": "return x.detach().numpy()"},
    },
    "interop/torch/__init__.py": {
        "test_what_would_be_taken_for_constants_is_refused": {"if torch._C._is_tracing():": "if None:"},
        "test_autocast_casts_as_for_torchs_own": {"and x.dtype != torch.float64": "and True"},
        "test_what_does_not_fit_is_refused": {'flag("deterministic", deterministic)': "pass"},
        "test_what_needs_no_gradient_is_not_computed": {"for x in (q, k, v, *held)": "for x in held"},
    },
}

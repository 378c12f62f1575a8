"""Attention in what torch.compile, make_fx, torch.export and FakeTensorMode make of it, against the same without."""

import numpy as np
import pytest

import numbattn as na
from numbattn.base.values import Taken, kinds
from numbattn.masks import Mask
from numbattn.scores import Part

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from numbattn.interop.torch import attention
from numbattn.interop.torch import operators as ops

pytestmark = [  # of torch, about itself
    pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def anew():
    torch.manual_seed(20220524)
    torch._dynamo.reset()


def graphs(function, fullgraph=True):
    """The function compiled, and a list that has something in it for each graph."""
    from torch._dynamo.backends.debugging import aot_eager  # takes seconds

    made = []

    def backend(graph, inputs):
        made.append(graph)
        return aot_eager(graph, inputs)

    return torch.compile(function, backend=backend, fullgraph=fullgraph), made


def assert_same(compiled, function, *tensors):
    """Results, and gradients of those that require one."""
    for x, y in zip(*([o, *torch.autograd.grad(o.sum(), [x for x in tensors if x.requires_grad])]
                      for o in (compiled(*tensors), function(*tensors)))):  # fmt: skip
        assert torch.equal(x, y)


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


QKV = (4, 3, 2), (2, 5, 2), (2, 5, 3)
outer, parts = na.Window(1, 1) | na.First(2), [na.Softcap(2.0), na.Alibi(np.ones(4))]

ONE_GRAPH = {  # what the docstring of numbattn.interop.torch says
    "nothing": lambda q, k, v, x: attention(q, k, v),
    "causal": lambda q, k, v, x: attention(q, k, v, causal=True, scale=0.3, deterministic=True),
    "lse": lambda q, k, v, x: attention(q, k, v, return_lse=True)[1],
    "both": lambda q, k, v, x: sum(x.sum() for x in attention(q, k, v, return_lse=True)),
    "mask made outside": lambda q, k, v, x: attention(q, k, v, mask=outer, causal=True),
    "mask made inside": lambda q, k, v, x: attention(q, k, v, mask=na.Window(1, 1) & na.First(2) & na.Causal()),
    "booleans": lambda q, k, v, x: attention(q, k, v, mask=k[0, :, 0] > q[:, :, :1]),
    "booleans, causal": lambda q, k, v, x: attention(q, k, v, mask=na.Dense(x > 0) & na.Causal(2)),
    "lengths": lambda q, k, v, x: attention(q, k, v, mask=na.Lengths(keys=(x > 0).sum((1, 2)).clamp(max=5))),
    "dropout": lambda q, k, v, x: attention(q, k, v, dropout=na.Dropout(0.3, seed=2**64 - 1)),
    "softcap": lambda q, k, v, x: attention(q, k, v, score=na.Softcap(2.0)),
    "bias": lambda q, k, v, x: attention(q, k, v, score=na.Bias(x)),
    "sink": lambda q, k, v, x: attention(q, k, v, score=na.Sink(x[:, 0, 0])),
    "alibi": lambda q, k, v, x: attention(q, k, v, score=na.Alibi(x[:, 0, 0])),
    "relative": lambda q, k, v, x: attention(q, k, v, score=na.RelativeBias(x[:, 0])),
    "list made outside": lambda q, k, v, x: attention(q, k, v, score=parts),
    "list made inside": lambda q, k, v, x: attention(q, k, v, score=[na.Bias(x), na.Softcap(2.0), na.Sink(x[0, 0, 0])]),
    "constant": lambda q, k, v, x: attention(q, k, v, score=na.Bias(x, gradient=False)),
}  # fmt: skip


OTHERS_SHOW = "causal", "lse", "mask made outside", "booleans", "sink", "alibi", "relative", "constant"


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS_SHOW)) for name in ONE_GRAPH
])  # fmt: skip
def test_one_graph(name):
    tensors = leaves(*QKV, (4, 3, 5), dtype=torch.bfloat16 if name == "softcap" else torch.float64)
    compiled, made = graphs(lambda *tensors: ONE_GRAPH[name](*tensors) + 0 * tensors[3].sum())
    for _ in range(2):
        assert_same(compiled, lambda *tensors: ONE_GRAPH[name](*tensors) + 0 * tensors[3].sum(), *tensors)
    assert len(made) == 1


def twice(s, batch, head, i, j):
    return 2 * s


def test_a_function_breaks_the_graph_and_is_right():
    """Its gradients, too."""
    score = na.Score(twice)

    def function(q, k, v):
        return attention(2 * q, k, v, score=score)

    compiled, _ = graphs(function, fullgraph=False)
    tensors = leaves(*QKV)
    for _ in range(2):
        assert_same(compiled, function, *tensors)
    whole, _ = graphs(function)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(*tensors)


@pytest.mark.parametrize("function", [
    lambda q, i: attention(q, q, q, mask=na.Window(1 + i, i) & na.Causal(i) & na.Lengths(keys=i)),
    lambda q, i: attention(q, q, q, scale=0.1 + 0.05 * i, score=na.Softcap(1.0 + i)),
    lambda q, i: attention(q, q, q, dropout=na.Dropout(0.1 + i / 20, 3, offset=i)),
], ids=["mask", "scale, cap", "dropout"])  # fmt: skip
def test_numbers_that_change_compile_once_more_and_leave_nothing(function):
    """As any other number of torch.compile's."""
    compiled, made = graphs(function)
    (q,) = leaves((2, 9, 4))
    for i in range(2, 7):
        assert_same(lambda q, i=i: compiled(q, i), lambda q, i=i: function(q, i), q)
        known = len(ops.CALLS)
    assert len(made) == 2
    compiled(q, 8)
    assert len(ops.CALLS) == known


@pytest.mark.slow
def test_other_options_compile_anew():
    now = {}

    def function(q, k, v):
        return attention(q, k, v, **now)

    compiled, made = graphs(function)
    tensors = leaves(*QKV)
    for change in ({}, {"causal": True}, {"mask": na.Window(1, 0)}, {"score": na.Softcap(1.0)}):
        now |= change
        assert_same(compiled, function, *tensors)
    assert len(made) == 4


def test_a_mask_is_an_input_of_the_graph_and_so_are_sizes():
    compiled, made = graphs(lambda q, mask: attention(q, q, q, mask=mask))
    for size in (5, 5, 6, 7, 8):
        (q,), mask = leaves((2, size, 4)), torch.rand(2, size, size) > 0.3
        assert_same(compiled, lambda q, mask: attention(q, q, q, mask=mask), q, mask)
    assert len(made) == 2


def cube(q, k, v, x):
    return attention(q, k, v, score=[na.Bias(x), na.Softcap(3.0)], causal=True).pow(3).sum()


TRANSFORMS = {
    "grad": lambda *tensors: func.grad(cube, (0, 1, 2, 3))(*tensors),
    "vjp": lambda *tensors: func.vjp(cube, *tensors)[1](tensors[0].new_ones(())),
    "jacrev": lambda q, k, v, x: func.jacrev(lambda q: attention(q, k, v, score=na.Bias(x)))(q),
    "jvp": lambda *tensors: func.jvp(cube, tensors, tensors)[1],
    "vmap of grad": lambda q, k, v, x: func.vmap(func.grad(cube, 3), (0, None, None, 0))(q, k[0], v[0], x),
    "grad of grad": lambda q, *rest: func.grad(lambda q: func.grad(cube)(q, *rest).pow(2).sum())(q),
    "hessian": lambda q, *rest: func.hessian(cube)(q, *rest),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_within_what_is_compiled(name):
    tensors = [x.detach() for x in leaves(*QKV, (4, 3, 5), dtype=torch.float64)]
    compiled, made = graphs(TRANSFORMS[name])
    torch.testing.assert_close(compiled(*tensors), TRANSFORMS[name](*tensors), rtol=0, atol=0)
    assert len(made) == 1


def test_second_derivatives_of_what_is_compiled():
    """Where a backend leaves graphs to torch.autograd: aot_autograd has none, and says so."""
    tensors = leaves(*QKV, (4, 3, 5), dtype=torch.float64)

    def penalty(function):
        grads = torch.autograd.grad(function(*tensors), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.pow(2).sum() for x in grads), tensors)

    found = penalty(torch.compile(cube, backend="eager", fullgraph=True))
    torch.testing.assert_close(found, penalty(cube), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="double backward"):
        penalty(graphs(cube)[0])


def test_tangents_given_from_outside():
    """To the graph; newer versions of torch.compile refuse them."""
    q, t = (x.detach() for x in leaves((3, 4), (3, 4)))
    traced = make_fx(lambda q, k, v: attention(q, k, v))(q, q, q)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(q, t)
        tangents = [forward_ad.unpack_dual(f(q, q, q)).tangent for f in (attention, traced)]
    assert torch.equal(*tangents)


def step(q, k, v):
    """The gradient of q, by attention with dropout."""
    q = q.detach().requires_grad_()
    attention(q, k, v, dropout=na.Dropout(0.3, seed=1)).sum().backward()
    return q.grad


@pytest.mark.slow
def test_a_backward_pass_within_what_is_compiled():
    tensors = [x.detach() for x in leaves(*QKV)]
    compiled, _ = graphs(step, fullgraph=False)
    assert torch.equal(compiled(*tensors), step(*tensors))


def test_autocast():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v)

    compiled, _ = graphs(function)
    tensors = leaves(*QKV)
    assert compiled(*tensors).dtype == torch.bfloat16
    assert_same(compiled, function, *tensors)


def masked(q, k, v, x):
    return attention(q, k, v, mask=x > 0, score=[na.Bias(x), na.Softcap(3.0)])


def test_make_fx():
    """Of attention, and of its gradients and tangents."""
    tensors, others = ([x.detach() for x in leaves(*QKV, (4, 3, 5))] for _ in range(2))
    for function in (
        masked, lambda *x: func.grad(lambda *x: masked(*x).sum(), (0, 3))(*x), lambda *x: func.jvp(masked, x, x)[1],
    ):  # fmt: skip
        traced = make_fx(function)(*tensors)
        torch.testing.assert_close(traced(*others), function(*others), rtol=0, atol=0)
    _, along = func.linearize(masked, *tensors)
    torch.testing.assert_close(along(*others), func.jvp(masked, tuple(tensors), tuple(others))[1], rtol=0, atol=0)


class Attention(torch.nn.Module):
    def forward(self, *tensors):
        return masked(*tensors)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, tmp_path):
    """Also through a file, and for other lengths."""
    tensors, others = ([x.detach() for x in leaves((4, m, 2), (4, 5, 2), (4, 5, 3), (4, m, 5))] for m in (3, 7))
    m = torch.export.Dim("m", min=2, max=64)
    shapes = {"tensors": ({1: m}, None, None, {1: m})}
    program = torch.export.export(Attention(), tuple(tensors), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "attention.pt2")
    read = torch.export.load(tmp_path / "attention.pt2").module()
    for x in (tensors, others):
        assert_same(read, masked, *[y.requires_grad_() for y in x])


def test_fake_tensors():
    with FakeTensorMode() as mode:
        q, k, v, x = map(mode.from_tensor, leaves(*QKV, (4, 3, 5), dtype=torch.float16))
        o, lse = attention(q, k, v, score=na.Bias(x), return_lse=True)
        grads = torch.autograd.grad(o.sum() + lse.sum(), (q, x))
    found = [(tuple(x.shape), x.dtype) for x in (o, lse, *grads)]
    assert found == [((4, 3, 3), torch.float16), ((4, 3), torch.float32), ((4, 3, 2), torch.float16),
                     ((4, 3, 5), torch.float16)]  # fmt: skip


@pytest.mark.parametrize("shapes", [
    QKV, ((3, 2), (5, 2), (5, 3)), ((3, 2), (2, 5, 2), (5, 3)), ((7, 1, 4, 3, 2), (6, 1, 5, 2), (5, 3)),
    ((1, 3, 2), (4, 5, 2), (1, 5, 3)), ((4, 3, 2), (1, 5, 2), (2, 5, 3)),
])  # fmt: skip
def test_shapes_that_torch_is_told_are_right(shapes):
    """In all layouts, of every pass."""
    q, k, v = (x.detach().movedim(-2, 0).contiguous().movedim(0, -2) for x in leaves(*shapes))
    pairs = torch.randn(5, 3).mT
    apart = ops.TakenApart([], [], [], [])
    words = ops.words_of((False, None, None, None, na.Bias(pairs), False), apart)
    o, lse = attention(q, k, v, score=na.Bias(pairs), return_lse=True)
    primals = q, k, v, pairs
    for kind, needs, rest in (
        ("Forward", None, ()), ("Tangent", None, (o, lse, *primals)),
        ("Backward", [True] * 4, (o, lse, o, None)), ("Backward", [True] * 3 + [False], (o, lse, None, lse)),
        ("BackwardTangent", [True] * 4, (o, lse, o, None, *primals, o, lse, None, None)),
    ):  # fmt: skip
        given = kind, needs, words, apart.integers, apart.floats, None, apart.arrays, [q, k, v, *rest]
        torch.library.opcheck(torch.ops.numbattn.run.default, given, test_utils=["test_schema", "test_faketensor"])


def every_option():
    yield "tree", na.Tail(na.Bits.tree([-1, 0, 0]))
    for kind in kinds(Mask):
        for name, sample in getattr(kind, "_examples", ()):
            yield name, sample(16, 16)
    for kind in kinds(Part):
        for name, sample in getattr(kind, "_examples", ()):
            yield name, sample((2, 16, 16), np.float32, True)


@pytest.mark.parametrize(("name", "value"), [*every_option()])
def test_words_stand_for_every_option(name, value):
    """Also with other numbers in place of its own, by which it is traced."""
    apart = ops.TakenApart([], [], [], [])
    words = ops.words_of(value, apart)
    if any(isinstance(leaf, Taken) for leaf in getattr(value, "_leaves", (value,))):
        assert apart.rest
        return
    each = words.split()
    made = ops.option_of(iter(each), *map(iter, apart[:2]), iter(value._all_arrays))
    assert repr(made) == repr(value)
    assert getattr(made, "_branches", None) == getattr(value, "_branches", None)
    ops.option_of(iter(each), iter([1] * len(apart.integers)), iter([0.5] * len(apart.floats)), iter(apart.arrays))


FAULTS = {
    "interop/torch/operators.py": {
        "test_one_graph": {"if not -(2**63) <= x < 2**63:": "if None:"},
        "test_numbers_that_change_compile_once_more_and_leave_nothing": {
            "[1] * each.count": "[2] * each.count", "isinstance(x, torch.SymFloat)": "False",
        },
        "test_a_function_breaks_the_graph_and_is_right": {"and not isinstance(x, Taken)": "and True"},
        "test_tangents_given_from_outside": {'LIBRARY.impl("run", derived, "Autograd")': "pass"},
        "test_shapes_that_torch_is_told_are_right": {
            "heads_k if heads == 1 else heads": "heads", "needs=needs)\n    like": "needs=None)\n    like",
        },
    },
}

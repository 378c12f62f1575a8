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
    return torch.randn(*shape, **FLOAT64, requires_grad=grad)


def formula(q, k, v, *, causal=False, bias=None, visible=None, scale=None):
    """Plain attention, of k and v with fewer heads than q, too."""
    if q.ndim > 2:
        k, v = (x if x.ndim < 3 else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    S = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    S = S if bias is None else S + bias
    if causal:
        visible = torch.ones(S.shape[-2:], dtype=torch.bool).tril(S.shape[-1] - S.shape[-2])
    return torch.softmax(S if visible is None else S.masked_fill(~visible, -math.inf), -1) @ v


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


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_problems(first):
    for number in range(first, first + 8):
        problem = Through(11, number, LIMITS["cpu"])
        assert not list(problem.wrong(problem.run())), problem

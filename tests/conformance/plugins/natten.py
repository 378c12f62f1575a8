"""A plugin of pytest for the test_fna.py of NATTEN, with numbattn.Grid in the place of its kernels.

What its tests compare with is dense attention of torch, with the mask that NATTEN gives to FlexAttention: its own
reference is compiled for GPUs. On a CPU problems of more tokens than one wants to wait for are passed over.

Left out are tests that gradients differ from run to run.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import numbattn as na
import tests
from numbattn.interop.torch import attention

from .one_gpu import HAS_GPU

ROOT = Path(os.environ["NUMBATTN_CHECKOUTS"], "NATTEN")
MOST_TOKENS = 8192 if HAS_GPU else 640
SWEEP = 8  # random problems of each number of axes
os.environ["NATTEN_RAND_SWEEP_TESTS"] = str(SWEEP)
sys.path.insert(0, str(ROOT / "src"))
tests.__path__.append(str(ROOT / "tests"))  # whose package has the same name

import natten.backends.flex  # noqa: E402
import natten.backends.reference  # noqa: E402
import natten.functional  # noqa: E402
import natten.utils.testing  # noqa: E402
from natten.backends.configs import cutlass  # noqa: E402
from natten.utils.checks import check_all_args  # noqa: E402


def heads_first(*tensors):
    """(batch, *grid, heads, features) -> (batch, heads, tokens, features)."""
    return [x.flatten(1, -3).transpose(1, 2) for x in tensors]


def as_given(o, q):
    return o.transpose(1, 2).reshape(*q.shape[:-1], o.shape[-1])


def on_grid(q, k, v, kernel_size, stride, dilation, is_causal, **_):
    mask = na.Grid(tuple(q.shape[1:-2])).window(kernel_size, dilation=dilation, stride=stride, causal=is_causal)
    return as_given(attention(*heads_first(q, k, v), mask=mask), q)


def expected(q, k, v, kernel_size, stride, dilation, is_causal, **_):
    shape = tuple(q.shape[1:-2])
    options = check_all_args(len(shape), kernel_size, stride, dilation, is_causal)
    shown = natten.backends.flex.get_na_flex_mask("cpu", len(shape), shape, *options)
    at = torch.arange(math.prod(shape), device=q.device)
    visible = torch.broadcast_to(shown(at[:1], at[:1], at[:, None], at[None, :]), (len(at), len(at)))
    q_, k_, v_ = heads_first(q, k, v)
    return as_given(scaled_dot_product_attention(q_, k_, v_, attn_mask=visible, enable_gqa=True), q)


def only_small(test):
    """The comparison of one problem, if it is not too large."""

    def compare(self, *, input_shape, **problem):
        if math.prod(input_shape) <= MOST_TOKENS:
            test(self, input_shape=input_shape, **problem)

    return compare


natten.utils.testing.HAS_LIBNATTEN = natten.utils.testing._IS_CUDA_AVAILABLE = True
natten.backends.flex.create_block_mask = lambda mask_mod, *_, **__: mask_mod
natten.backends.reference.reference_fna_generic = expected
natten.functional.neighborhood_attention_generic = on_grid
cutlass.get_all_forward_configs = cutlass.get_all_backward_configs = lambda _: [(None, None)]


def pytest_itemcollected(item):
    name = "_test_all_dtypes_against_reference"
    test = getattr(item.cls, name)
    if test.__name__ == name:
        setattr(item.cls, name, only_small(test))


def pytest_collection_modifyitems(config, items):
    left_out = [x for x in items if x.name.endswith("determinism_xfail")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in left_out]

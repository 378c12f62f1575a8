"""torch's own samples of scaled_dot_product_attention (its OpInfo), first and second derivatives, by interop.torch."""

import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import numbattn as na

from .suites import Counts

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # which torch's samples import


@pytest.fixture(scope="module")
def samples():
    """The samples in a dtype, as torch's own tests draw them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    [op] = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]

    def drawn(device, dtype, **options):
        for sample in op.sample_inputs(device, dtype, **options):
            yield sample.input, *sample.args, sample.kwargs

    return drawn


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def ours(q, k, v, attn_mask=None, *, is_causal=False, dropout_p=0.0, enable_gqa=False, dropped=False):
    """torch's function, without its random numbers: dropout has a seed, and is left out unless asked for."""
    from numbattn.interop.torch import attention

    mask = na.Causal(0) if is_causal else None
    score = None if attn_mask is None else na.Bias(attn_mask)
    dropout = na.Dropout(dropout_p, seed=5) if dropped and dropout_p else None
    return attention(q, k, v, mask=mask, score=score, dropout=dropout)


@pytest.fixture
def check(count, device):
    """Counts the samples that pass and fail a test; none may fail."""

    def check(test, samples):
        said = [complaint(test, *sample) for sample in samples]
        wrong = list(filter(None, said))
        found = Counts(len(said) - len(wrong), len(wrong))
        count("PyTorch", f"torch {torch.__version__}", found, "CPU" if device == "cpu" else "GPU")
        assert not wrong, f"{len(wrong)} of {len(said)}: {wrong}"
        assert len(said) >= 25

    return check


def complaint(test, *sample):
    try:
        test(*sample)
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_results(samples, device, dtype, check):
    """Against torch's function in float64, to its tolerances of the dtype; but in float32, whose scores, of 200 here,
    are rounded to 1e-5, and on tensor cores, which take P rounded to the dtype."""
    dtype = getattr(torch, dtype)
    tolerances = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}

    def test(q, k, v, options):
        given = {name: x.double() if name == "attn_mask" else x for name, x in options.items()} | {"dropout_p": 0.0}
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **given)
        if device == "cuda" and dtype.itemsize == 2:
            eps = torch.finfo(dtype).eps
            tolerances.update(rtol=eps, atol=eps / 2 * v.abs().max().item())
        torch.testing.assert_close(ours(q, k, v, **options), expected.to(dtype), **tolerances)

    check(test, samples(device, dtype))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own dual tensors
def test_gradients(samples, device, check):
    """In reverse and in forward mode, also of batches of directions, and second ones."""
    if device == "cuda":
        compile_ahead(samples)
    check(differentiate, samples(device, torch.float64, requires_grad=True))


def differentiate(q, k, v, options):
    bias = [options.pop("attn_mask")] if "attn_mask" in options else []

    def function(*arrays):
        return ours(*arrays, **options, dropped=True)

    checked = {"fast_mode": True, "nondet_tol": 1e-12, "check_batched_grad": True}
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, (q, k, v, *bias), **checked, **forward)
    assert torch.autograd.gradgradcheck(function, (q, k, v, *bias), **checked, check_fwd_over_rev=True)


def compile_ahead(samples):
    """Compile the derivatives' kernels, more than a hundred, in several processes: one would take minutes. A dry run on
    the CPU says which they are; its results are all 0, which is what gradcheck finds for their derivatives, too."""
    from numbattn.cuda.build import build
    from numbattn.cuda.launch import current_gpu

    from ..tools.device import planned

    with planned(current_gpu().device) as keys:
        for sample in samples("cpu", torch.float64, requires_grad=True):
            differentiate(*sample)
    with ProcessPoolExecutor(min(os.cpu_count(), len(keys)), get_context("spawn")) as workers:
        for _ in workers.map(build, keys):
            pass

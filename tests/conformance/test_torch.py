"""torch's own samples of scaled_dot_product_attention (its OpInfo), first and second derivatives, by interop.torch."""

import warnings

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
def passed(count, device):
    """To be called with how many samples there were, all of which have passed."""
    return lambda n: count("PyTorch", f"torch {torch.__version__}", Counts(n, 0), "CPU" if device == "cpu" else "GPU")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_results(samples, device, dtype, passed):
    """Against torch's function in float64, to its tolerances of the dtype; but in float32, whose scores, of 200 here,
    are rounded to 1e-5, and on tensor cores, which take P rounded to the dtype."""
    count, tolerances = 0, {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {}
    for *arrays, options in samples(device, getattr(torch, dtype)):
        exact = [x.double() for x in arrays]
        given = {name: x.double() if name == "attn_mask" else x for name, x in options.items()}
        expected = torch.nn.functional.scaled_dot_product_attention(*exact, **given | {"dropout_p": 0.0})
        if device == "cuda" and dtype in ("bfloat16", "float16"):
            eps = torch.finfo(arrays[2].dtype).eps
            tolerances = {"rtol": eps, "atol": eps / 2 * arrays[2].abs().max().item()}
        torch.testing.assert_close(ours(*arrays, **options), expected.to(getattr(torch, dtype)), **tolerances)
        count += 1
    assert count >= 25
    passed(count)


def test_gradients(samples, device, passed):
    drawn = list(samples(device, torch.float64, requires_grad=True))
    for *arrays, options in drawn:
        bias = [options.pop("attn_mask")] if "attn_mask" in options else []

        def function(*arrays, options=options):
            return ours(*arrays, **options, dropped=True)

        assert torch.autograd.gradcheck(function, (*arrays, *bias))
        assert torch.autograd.gradgradcheck(function, (*arrays, *bias), fast_mode=True, nondet_tol=1e-12)
    passed(len(drawn))

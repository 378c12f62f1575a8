"""The transformer that bench/paper trains: its gradients, a comparison with the standard formula, and the script."""

import ctypes
import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from paper import figure3, model, tasks, training
from paper.figure3 import OUT_OF_MEMORY, Clock
from paper.model import Size, Transformer

import numbattn as na

TINY = Size(2, 2, 8)
ATTENTIONS = {"numbattn": na.attention_vjp, "standard": model.standard_attention}


def make_model(name, *, axes=1, pooled=False, side=6, size=TINY):
    """A model with random weights, the head's included, in float64."""
    coordinates = np.indices((side,) * axes).reshape(axes, -1)
    rotation = model.rotations(np, coordinates, size.head_dim, np.complex128)
    weights = model.init_weights(np, size, 11, 5, np.float64)
    weights["head"][:] = np.random.default_rng(1).standard_normal(weights["head"].shape)
    return Transformer(partial(ATTENTIONS[name], causal=not pooled), size.heads, rotation, pooled, np.float64), weights


def batch_of(seqlen, pooled):
    rng = np.random.default_rng(2)
    return rng.integers(11, size=(3, seqlen)), rng.integers(5, size=3 if pooled else 3 * seqlen)


def loss_and_gradients(gpt, weights, tokens, targets):
    logits, backprop = gpt(tokens, weights)
    loss, loss_back = model.cross_entropy(logits, targets)
    return loss, backprop(loss_back())


# ---------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize(("axes", "pooled"), [(1, False), (2, True)], ids=["text", "image"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients_are_finite_differences(name, axes, pooled):
    gpt, weights = make_model(name, axes=axes, pooled=pooled)
    tokens, targets = batch_of(6**axes, pooled)
    _, grads = loss_and_gradients(gpt, weights, tokens, targets)
    rng, h = np.random.default_rng(3), 1e-5
    for weight_name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        ahead, behind = (loss_and_gradients(gpt, weights | {weight_name: weight + step * direction}, tokens, targets)[0]
                         for step in (h, -h))  # fmt: skip
        along = (grads[weight_name] * direction).sum()
        assert along == pytest.approx((ahead - behind) / (2 * h), rel=1e-6, abs=1e-9), weight_name


@pytest.mark.parametrize("causal", [False, True])
def test_the_standard_formula_is_attention(causal):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 3, 20, 8))
    (o, backprop), (want, want_back) = (f(q, k, v, causal=causal) for f in ATTENTIONS.values())
    for got, expected in zip((o, *backprop(do)), (want, *want_back(do))):
        np.testing.assert_allclose(got, expected, atol=1e-13)


def test_positions_are_relative():
    """A pooled image's logits do not change if all of its coordinates are shifted."""
    gpt, weights = make_model("numbattn", axes=2, pooled=True)
    moved = np.indices((6, 6)).reshape(2, -1) + np.array([[3], [-2]])
    again = gpt._replace(rotation=model.rotations(np, moved, TINY.head_dim, np.complex128))
    tokens, _ = batch_of(36, pooled=True)
    np.testing.assert_allclose(again(tokens, weights)[0], gpt(tokens, weights)[0], atol=1e-12)


def test_half_precision_and_the_loss_scale():
    """Products in float16 give the gradients of float32, which would be too small for it without the scale."""
    rotation = model.rotations(np, np.arange(32)[None], 8)
    weights = model.init_weights(np, TINY, 11, 5)
    weights["head"] = np.random.default_rng(1).standard_normal(weights["head"].shape, np.float32)
    tokens, targets = batch_of(32, pooled=False)
    found = {}
    for dtype in ("float32", "float16"):
        gpt = Transformer(partial(model.standard_attention, causal=True), TINY.heads, rotation, dtype=np.dtype(dtype))
        logits, backprop = gpt(tokens, weights)
        _, loss_back = model.cross_entropy(logits, targets, model.LOSS_SCALE)
        found[dtype] = backprop(loss_back())
    for name, want in found["float32"].items():
        got = found["float16"][name]
        assert got.dtype == np.float32
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want), name


def test_adam_is_the_textbooks():
    weights, rng = {"w": np.ones((3, 2))}, np.random.default_rng(0)
    adam, mean, square, w = model.Adam(weights, 0.01), 0.0, 0.0, np.ones((3, 2))
    for step in range(1, 4):
        grad = rng.standard_normal((3, 2))
        adam.step({"w": grad})
        mean, square = 0.9 * mean + 0.1 * grad, 0.98 * square + 0.02 * grad**2
        lr = 0.01 * step / model.WARM_UP
        w -= lr * (0.1 * w + mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.98**step)) + 1e-8))
    np.testing.assert_allclose(weights["w"], w, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------------- script
def records_of(*options):
    options = ["--contexts", "16", "32", "--tokens", "64", "--validated", "64", *options]
    return training.records_of(Clock(), training.parse(options, on_gpu=False))


def test_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure3, "cupy", None)
    path = tmp_path / "training.json"
    options = ["--contexts", "16", "32", "--tokens", "64", "--validated", "64", "--steps", "5", "--minutes", "9"]
    training.main([*options, "--json", str(path)])
    assert "held out" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert {"machine", "arguments", "records"} <= results.keys()
    found = {(record["context"], record["attention"]): record for record in results["records"]}
    assert list(found) == [(n, name) for n in (16, 32) for name in ATTENTIONS]
    for n in (16, 32):
        ours, standard = (found[n, name] for name in ATTENTIONS)
        assert ours["batch"] == 64 // n
        np.testing.assert_allclose(ours["losses"], standard["losses"], atol=1e-4)
        assert ours["validation"] == pytest.approx(standard["validation"], abs=1e-4)
        assert len(ours["losses"]) == 5
        assert ours["losses"][0] == pytest.approx(8)  # bits: all bytes are equally likely
        assert ours["losses"][-1] < 7.99
        assert min(ours["seconds"], ours["bytes"]) > 0


def test_who_has_no_time_left_makes_a_step():
    assert [len(record["losses"]) for record in records_of("--minutes", "0")] == [1] * 4


def test_the_minutes_are_shared():
    records = training.in_turn(Clock(), [{"n": i} for i in range(3)], 1, lambda _, seconds: {"seconds": seconds})
    assert [record.pop("seconds") for record in records] == pytest.approx([20, 30, 60], abs=1)
    assert records == [{"n": i, "failed": None} for i in range(3)]


def test_who_has_no_memory_left_is_told(monkeypatch):
    def full(q, k, v, causal):
        raise MemoryError

    monkeypatch.setitem(training.ATTENTIONS, "standard", full)
    records = records_of("--minutes", "0")
    assert [record["failed"] for record in records] == [None, OUT_OF_MEMORY] * 2
    assert training.row_of(records[1])["failed"] == OUT_OF_MEMORY


def test_other_errors_are_raised(monkeypatch):
    monkeypatch.setitem(training.ATTENTIONS, "standard", None)
    with pytest.raises(TypeError):
        records_of("--minutes", "0", "--attentions", "standard")


def test_the_held_out_loss_is_the_mean_over_all_windows():
    rotation = model.rotations(np, np.arange(8)[None], TINY.head_dim, np.complex128)
    weights = model.init_weights(np, TINY, 256, 256, np.float64)
    gpt = Transformer(partial(model.standard_attention, causal=True), TINY.heads, rotation, dtype=np.float64)
    text = np.random.default_rng(0).integers(256, size=41)
    assert training.held_out_loss(np, gpt, weights, text, 8, 2) == pytest.approx(8)
    weights["head"][:] = np.random.default_rng(1).standard_normal(weights["head"].shape)
    logits, _ = gpt(text[:40].reshape(5, 8), weights)
    whole, _ = model.cross_entropy(logits, text[1:])
    assert training.held_out_loss(np, gpt, weights, text, 8, 2) == pytest.approx(float(whole) / np.log(2))


def test_the_text_is_the_standard_librarys():
    assert list(tasks.library()) == sorted(tasks.library(), key=lambda path: path.split("/"))
    assert b"".join(tasks.library().values()).count(b"import ") > 1000
    assert "argparse.py" in tasks.library()
    assert not any(path.startswith(("test/", "site-packages/")) for path in tasks.library())
    assert [part.tobytes() for part in tasks.split([b"1", b"2", b"3", b"4", b"5"])] == [b"1235", b"4"]


# ----------------------------------------------------------------------------------------------------------- products
class OnGpu:
    """What product() uses of a CuPy array, in host memory."""

    def __init__(self, x):
        self.x, self.data = x, SimpleNamespace(ptr=x.ctypes.data)
        self.dtype, self.shape, self.size, self.flags = x.dtype, x.shape, x.size, x.flags

    @property
    def mT(self):
        return OnGpu(self.x.mT)


def gemm(handle, op_a, op_b, m, n, k, alpha, a, dtype_a, lda, stride_a, b, dtype_b, ldb, stride_b, beta, c, dtype_c,
         ldc, stride_c, count, compute, algorithm):  # fmt: skip
    """cublasGemmStridedBatchedEx for float16, by its documentation: matrices are stored column by column."""
    assert (dtype_a, dtype_b, dtype_c, compute) == ("half", "half", "half", "float32")
    assert [ctypes.c_float.from_address(x).value for x in (alpha, beta)] == [1, 0]

    def matrix(pointer, rows, columns, ld):
        stored = (ctypes.c_uint16 * (columns * ld)).from_address(pointer)
        return np.frombuffer(stored, np.float16).reshape(columns, ld)[:, :rows].T

    for i in range(count):
        x = matrix(a + 2 * i * stride_a, *((k, m) if op_a else (m, k)), lda)
        y = matrix(b + 2 * i * stride_b, *((n, k) if op_b else (k, n)), ldb)
        product = (x.T if op_a else x).astype(np.float32) @ (y.T if op_b else y)
        matrix(c + 2 * i * stride_c, m, n, ldc)[:] = product


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_stacks_of_half_precision_are_cublas_products(transposed, monkeypatch):
    cublas = SimpleNamespace(gemmStridedBatchedEx=gemm, CUBLAS_COMPUTE_32F="float32", CUBLAS_GEMM_DEFAULT=-1)
    cuda = SimpleNamespace(cublas=cublas, runtime=SimpleNamespace(CUDA_R_16F="half"),
                           device=SimpleNamespace(get_cublas_handle=lambda: 0))  # fmt: skip
    fake = SimpleNamespace(cuda=cuda, empty=lambda *x: OnGpu(np.empty(*x)),
                           ascontiguousarray=lambda x: OnGpu(np.ascontiguousarray(x.x)))  # fmt: skip
    monkeypatch.setattr(model, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 5, 7)), rng.standard_normal((2, 3, 7, 4))
    a, b = (x.astype(np.float16) for x in (a, b))
    a, b = (np.ascontiguousarray(x.mT).mT if name in transposed else x for name, x in (("a", a), ("b", b)))
    got = model.product(OnGpu(a), OnGpu(b)).x
    np.testing.assert_allclose(got, a.astype(np.float32) @ b, atol=1e-2)
    views = np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, 2)), 2, 1)  # neither contiguous nor its transpose is
    np.testing.assert_array_equal(model.product(OnGpu(views), OnGpu(b)).x, got)

"""The examples, run as a user runs them, and the gradient of the transformer."""

import contextlib
import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

import numbattn as na
from numbattn import distributed as nad

from .distributed.test_mpi import MPIEXEC, with_mpi

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function of an example and its arguments that runs it and returns what it prints; in this process: to import
    what they import would take longer than most of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    with pyplot.rc_context():
        yield run
    pyplot.close("all")


def run_alone(cwd, name, *args, **environment):
    """What an example prints in a process of its own."""
    command, environment = [sys.executable, EXAMPLES / name, *args], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(package):
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def example():
    """02_transformer as a module."""
    return loaded("02_transformer")


def test_first_call(tmp_path):
    out = run_alone(tmp_path, "01_first_call.py")
    assert re.findall(r"^(\w+) +\(2, 8, 500, 64\) float32", out, re.M) == ["o", "dq", "dk", "dv"]
    assert all(float(error) < 1e-4 for error in re.findall(r"float64: (\S+)", out))


@pytest.mark.parametrize("attention", [
    ("--dropout", "0.1", "--dtype", "bfloat16"),
    *(pytest.param(given, marks=pytest.mark.slow) for given in (("--packed",), ("--attention", "standard"))),
], ids="=".join)
def test_transformer_learns(tmp_path, attention):
    tiny = "--steps 60 --batch 4 --seqlen 64 --width 32 --layers 2 --heads 2 --lr 1e-2"
    out = run_alone(tmp_path, "02_transformer.py", *tiny.split(), *attention, "--plot", "loss.png")
    bits = float(re.search(r"validation: (\S+) bits per byte", out)[1])
    assert bits < 5  # 8 before the first step
    assert float(re.search(r"training: (\S+) tokens/s", out)[1].replace(",", "")) > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("dropout", "mask"), [(0, None), (0.2, None), (0, na.Segments([0, 3, 20]))])
def test_transformer_gradient(example, rng, dropout, mask):
    layers, heads = 2, 2
    weights = example.init_weights(rng, width=16, layers=layers, dtype=np.float64)
    weights["head"] += rng.standard_normal(weights["head"].shape)  # with 0 all other gradients are 0
    tokens, targets = rng.integers(256, size=(3, 20)), rng.integers(256, size=60)
    dropouts = [na.Dropout(dropout, seed=1, offset=layer) for layer in range(layers)]

    def forward(weights):
        logits, logits_back = example.transformer(tokens, weights, heads, mask, dropouts)
        loss, loss_back = example.cross_entropy(logits, targets)
        return loss, lambda: logits_back(loss_back())

    _, backprop = forward(weights)
    for name, grad in backprop().items():
        direction = rng.standard_normal(grad.shape)
        above, below = (forward(weights | {name: weights[name] + h * direction})[0] for h in (1e-5, -1e-5))
        np.testing.assert_allclose((grad * direction).sum(), (above - below) / 2e-5, rtol=1e-5, err_msg=name)


def test_packed_documents_of_the_transformer(example, rng):
    """The logits of packed documents are those of each alone."""
    documents = [rng.integers(256, size=size) for size in (2, 9, 30)]
    inputs, targets, mask = example.packed(documents, 70, rng)
    bounds = mask.queries.tolist()
    assert inputs.shape == (1, 70)
    assert (bounds[0], bounds[-1]) == (0, 70)
    weights = example.init_weights(rng, width=16, layers=2, dtype=np.float64)
    weights["head"] += rng.standard_normal(weights["head"].shape)
    logits, _ = example.transformer(inputs, weights, 2, mask)
    for first, end in itertools.pairwise(bounds):
        whole = [*inputs[0, first:end], targets[end - 1]]
        assert any(whole == list(document[: len(whole)]) for document in documents)
        np.testing.assert_array_equal(targets[first:end], whole[1:])
        alone, _ = example.transformer(inputs[:, first:end], weights, 2)
        np.testing.assert_allclose(logits[first:end], alone, rtol=1e-8, atol=1e-10)


def test_standard_attention_of_the_transformer(example, rng):
    q, k, v, do = rng.standard_normal((4, 2, 3, 20, 8))
    o, backprop = example.standard_vjp(q, k, v)
    expected, expected_backprop = na.attention_vjp(q, k, v, causal=True)
    for got, want in zip((o, *backprop(do)), (expected, *expected_backprop(do))):
        np.testing.assert_allclose(got, want, atol=1e-13)


@needs("numba_cuda")
def test_own_attention_simulated(tmp_path):
    out = run_alone(tmp_path, "03_own_attention.py", CUDA_VISIBLE_DEVICES="")
    assert "simulated" in out
    assert float(re.search(r"float64: (\S+)", out)[1]) < 1e-5


@pytest.mark.slow  # tests/interop/test_torch.py
@needs("torch")
def test_gradients_in_torch(tmp_path):
    errors = re.findall(r"^(\w+) .*largest difference .*: (\S+)$", run_alone(tmp_path, "07_torch.py"), re.M)
    assert [gradient for gradient, _ in errors] == ["dq", "dk", "dv", "dbias"]
    assert all(float(error) < 1e-4 for _, error in errors)


@needs("transformers")
def test_under_a_model_of_hugging_face(tmp_path):
    """Its loss and gradients are those with torch's own attention."""
    out = run_alone(tmp_path, "16_hugging_face.py")
    loss, expected, error = re.search(r"loss (\S+), .* attention (\S+); .* gradients: (\S+)", out).groups()
    assert abs(float(loss) - float(expected)) < 1e-4
    assert float(error) < 1e-4
    assert re.search(r"generated: \d+ \d+", out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what it imports
@needs("gpytorch")
def test_a_kernel_of_gpytorch(capsys):
    """Products and gradients are those of its own kernel, of a batch; and a process is fitted."""
    import torch
    from gpytorch.kernels import MaternKernel

    example, (x, b) = loaded("24_gpytorch"), torch.rand(2, 2, 30, 3, dtype=torch.float64)
    found = []
    for kind in (example.Matern, MaternKernel):
        kernel, points = kind(ard_num_dims=3, batch_shape=torch.Size([2])).double(), x.clone().requires_grad_()
        kernel.lengthscale = torch.tensor([[[0.5, 0.8, 1.2]], [[0.3, 0.9, 0.7]]])
        matrix = kernel(points)
        s = matrix @ b
        s.square().sum().backward()
        found.append((s, matrix.diagonal(dim1=-1, dim2=-2), points.grad, kernel.raw_lengthscale.grad))
    for got, expected in zip(*found):
        torch.testing.assert_close(got, expected)
    lengths, error = example.main(count=500, steps=15)
    assert lengths[0] < lengths[1]
    assert error < 0.1
    assert "noise" in capsys.readouterr().out


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # tests/interop/in_jax.py
@needs("jax")
def test_jax_learns_a_bias(tmp_path):
    out = run_alone(tmp_path, "04_jax.py")
    assert float(re.search(r"largest difference from the formula (\S+)", out)[1]) < 1e-4
    first, *_, last = map(float, re.findall(r"squared error (\S+)", out))
    assert last < 0.01 * first


@needs("autograd")
def test_autograd_learns_a_metric(run):
    out = run("05_autograd.py")
    assert float(re.search(r"gradient of the formula: (\S+)", out)[1]) < 1e-12
    at_first, after = re.search(r"error: (\S+) at first, (\S+) after", out).groups()
    assert float(after) < 0.02 < float(at_first)  # of which the noise is 0.01
    weights = [float(w) for w in re.search(r"features: \[(.*)\]", out)[1].split()]
    assert min(weights[:2]) > 4 * max(weights[2:])


@needs("thinc")
def test_thinc_finds_the_largest(run):
    right = re.findall(r"(\d+)% right", run("06_thinc.py"))
    assert int(right[0]) < 40
    assert int(right[-1]) > 90


@pytest.mark.slow  # it trains 02_transformer.py, as does test_generate
def test_attention_maps(tmp_path, run):
    out = run("08_attention_maps.py", "--steps", "40", "--plot", "drawn.png")
    assert float(re.search(r"validation: (\S+) bits per byte", out)[1]) < 5
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_pair_bias(tmp_path, run):
    out = run("10_pair_bias.py", "--steps", "300", "--plot", "drawn.png")
    assert float(re.search(r"differs from the hidden one by (\S+) of", out)[1]) < 0.05
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_molecule(run):
    """The gradient of a bias that all sets share leads to it, and the solvent's order does not matter."""
    out = run("13_molecule.py")
    assert float(re.search(r"squared error (\S+),", out)[1]) > 0.02  # of which the noise is 0.01
    assert float(re.findall(r"squared error (\S+),", out)[-1]) < 0.013
    assert float(re.search(r"learned to (\S+) kT", out)[1]) < 0.15
    assert float(re.search(r"changes by (\S+) at most", out)[1]) < 1e-4


def test_wave_function(tmp_path, run):
    """The energy falls below what can be reached without attention, so its Laplacian is right."""
    out = run("14_wave_function.py", "--steps", "80", "--plot", "drawn.png")
    first, after, exact, gaussian = map(float, re.findall(r"\d\.\d{3,4}", out)[:4])
    assert exact - 0.01 < after < exact + 0.3 * (gaussian - exact) < first
    assert float(re.search(r"spread over (\S+)", out)[1]) < 0.2
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_gradient_of_the_wave_function(rng):
    example = loaded("14_wave_function")
    weights, x = example.init_weights(rng), rng.standard_normal((5, example.SIZE, 1))
    factor = rng.standard_normal(5)
    _, backprop = example.log_psi(x, weights)
    for name, grad in backprop(factor).items():
        direction = rng.standard_normal(grad.shape)
        along = ({name: weights[name] + h * direction} for h in (1e-5, -1e-5))
        above, below = (factor @ example.log_psi(x, weights | there)[0] for there in along)
        np.testing.assert_allclose((grad * direction).sum(), (above - below) / 2e-5, rtol=1e-6, err_msg=name)


def test_curvature(tmp_path, run):
    out = run("15_curvature.py", "--steps", "40", "--products", "20", "--plot", "drawn.png")
    largest = [float(number) for number in re.findall(r"to (\S+); u H v", out)]
    assert largest[1] > 2 * largest[0] > 0
    assert all(float(number) < 1e-12 for number in re.findall(r"differ by (\S+)$", out, re.M))
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_curvature_is_that_of_the_loss(rng, monkeypatch):
    """The gradient and the Hessian, against differences of the loss and of the gradient."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("15_curvature")
    weights = example.init_weights(rng)
    batch = rng.integers(256, size=(example.BATCH, example.SEQLEN)), rng.integers(256, size=512)
    times, size = example.hessian(weights, batch)
    v, h = rng.standard_normal(size), 1e-4

    def along(s):
        parts = np.split(v, np.cumsum([w.size for w in weights.values()])[:-1])
        there = {name: w + s * part.reshape(w.shape) for (name, w), part in zip(weights.items(), parts)}
        loss, grads = example.gradients({name: example.Dual(w, np.zeros_like(w)) for name, w in there.items()}, *batch)
        return loss, np.concatenate([grad.x.ravel() for grad in grads.values()])

    (above, grad_above), (below, grad_below), (_, grad) = along(h), along(-h), along(0)
    np.testing.assert_allclose(grad @ v, (above - below) / (2 * h), rtol=1e-5)
    np.testing.assert_allclose(times(v), (grad_above - grad_below) / (2 * h), atol=1e-6)


@pytest.mark.slow  # pictures of what other tests compute
@needs("autograd")
def test_gallery(tmp_path, run):
    """The pictures that no example draws by itself, and one that an example does."""
    names = "bias", "energy", "spectrum", "metric", "tree", "masks"
    run("gallery.py", *names, "--small", "--folder", "drawn")
    for name in names:
        assert (tmp_path / f"drawn/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_gaussian_process(tmp_path, run):
    out = run("17_gaussian_process.py", "--points", "4000", "--fitted", "500", "--plot", "terrain.png")
    assert 0.25 < float(re.search(r"noise (\S+)$", out, re.M)[1]) < 0.35
    assert float(re.search(r"a map with an error of (\S+)", out)[1]) < 0.2  # of the measurements 0.3
    assert int(re.search(r"after (\d+) iterations", out)[1]) < 20
    assert (tmp_path / "terrain.png").read_bytes().startswith(b"\x89PNG")


def test_optimal_transport(tmp_path, run):
    out = run("18_optimal_transport.py", "--points", "500", "--plot", "transport.png")
    assert float(re.search(r"(\S+) away", out)[1]) < 0.03  # of words that are about 1 high
    assert (tmp_path / "transport.png").read_bytes().startswith(b"\x89PNG")


def test_sparse_layers(tmp_path, run):
    out = run("19_sparse_layers.py", "--fields", "1000", "--steps", "40", "--plot", "chaos.png")
    (few, sparse), (all_weights, dense) = re.findall(r"^(\S+) \w+ weights: .* square error of (\S+);", out, re.M)
    assert (few, all_weights) == ("196,608", "1,048,576")
    assert float(sparse) < 0.85 * float(dense)
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_lattice(tmp_path, run):
    out = run("21_lattice.py", "--size", "24", "--steps", "40", "--plot", "lattice.png")
    measured, blurred, _ = (float(error) for error in re.findall(r"squared error (\S+),", out))
    assert blurred < 0.4 * measured
    assert (tmp_path / "lattice.png").read_bytes().startswith(b"\x89PNG")


def test_force_field(tmp_path, run):
    out = run("22_force_field.py", "--steps", "60", "--moves", "100", "--plot", "metal.png")
    assert float(re.search(r"up to (\S+) %", out)[1]) < 50
    varies, drift = map(float, re.search(r"varies by (\S+), all of it by (\S+) at", out).groups())
    assert drift < 0.02 * varies
    assert (tmp_path / "metal.png").read_bytes().startswith(b"\x89PNG")


def test_gradients_of_the_force_field(rng):
    """By finite differences of forces."""
    example = loaded("22_force_field")
    example.xp, box = np, np.full(3, 4.48)
    model, x, along = example.Model(rng), example.lattice(rng), rng.standard_normal((64, 3))
    for name, gradient in model.gradients(x, box, None, along).items():
        parameter, step = model.parameters[name], 1e-5 * rng.standard_normal(gradient.shape)
        found = []
        for sign in (1, -1):
            model.parameters[name] = parameter + sign * step
            found.append((model.forces(x, box)[1] * along).sum())
        model.parameters[name] = parameter
        np.testing.assert_allclose((found[0] - found[1]) / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-12)


@pytest.mark.slow
@needs("torch")
def test_dpa2(run):
    """Energy, forces and the gradient of a loss on forces are those of padded lists, by torch's own derivatives."""
    out = run("23_dpa2.py", "--atoms", "27", "--rounds", "1")
    assert float(re.search(r"differ by (\S+)", out)[1]) < 1e-11


@needs("torch")
def test_forces_of_dpa2(rng):
    """By finite differences of energies."""
    import torch

    example = loaded("23_dpa2")
    weights, (x, types, graph, images) = example.init_weights(), example.atoms_in_box(27)
    along, way = torch.as_tensor(rng.standard_normal(x.shape)), example.Lists(graph)
    _, forces, _ = example.step(weights, x, types, images, way, torch.zeros_like(x))
    ahead, behind = (example.energy(weights, x + h * along, types, images, way).item() for h in (1e-5, -1e-5))
    np.testing.assert_allclose(-(forces * along).sum(), (ahead - behind) / 2e-5, rtol=1e-6)


def test_readme_names_every_example_and_picture():
    text = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^\| \[(\w+\.py)\]\(\1\) ", text, re.M)) == {x.name for x in EXAMPLES.glob("[0-9]*.py")}
    pictures = sorted((EXAMPLES / "pictures").glob("*.png"))
    assert sorted(re.findall(r"\]\(pictures/(.*?)\)", text)) == [picture.name for picture in pictures]
    assert all(picture.stat().st_size < 60_000 for picture in pictures)


WAYS = r"^(\w+) +([\d,]+) tokens/s +(\S+) tokens per call"


def test_generate(run):
    """That the texts are equal it asserts itself."""
    out = run("11_generate.py", "--steps", "40", "--count", "60", "--nodes", "8")
    assert [way for way, _, _ in re.findall(WAYS, out, re.M)] == ["recomputed", "cached", "speculative"]
    per_call = [float(number) for _, _, number in re.findall(WAYS, out, re.M)]
    assert per_call[0] == per_call[1] == 1 < per_call[2]


def test_generate_verifies_a_tree(rng, monkeypatch):
    """The model chooses at each node what it chooses after the node's path alone; a path that is kept is as if it
    had been read alone, positions included."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("11_generate")
    weights = example.model.init_weights(rng, example.WIDTH, example.LAYERS, np.float64)
    weights["head"] += rng.standard_normal(weights["head"].shape)

    def choice(*text):
        logits, _ = example.model.transformer(np.array([text]), weights, example.HEADS)
        return logits[-1].argmax()

    prompt, tokens, parents = [3, 1, 4, 1, 5], [9, 2, 6, 5], [-1, 0, 0, 2]
    reader = example.Reader(weights, 20)
    reader.read(prompt, range(5), na.Causal())
    tree = na.Tail(na.Bits.tree(parents))
    choices = reader.read(tokens, 5 + tree.positions, tree)
    assert choices == [choice(*prompt, *path) for path in ([9], [9, 2], [9, 6], [9, 6, 5])]
    assert example.longest_path(tokens, parents, [6, 0, 5, 0]) == [0, 2, 3]
    alone = example.Reader(weights, 20)
    alone.read([*prompt, 9, 6, 5], range(8), na.Causal())
    for cache, expected in zip(reader.caches, alone.caches):
        cache.keep([[0, 2, 3]], 4)
        np.testing.assert_allclose(cache.k[:, :, :8], expected.k[:, :, :8], atol=1e-12)
        np.testing.assert_allclose(cache.v[:, :, :8], expected.v[:, :, :8], atol=1e-12)
    assert reader.read([8], [8], na.Causal()) == [choice(*prompt, 9, 6, 5, 8)]


SHORT = "--seqlen", "200", "--steps", "3"


def test_long_context(run):
    """That the loss is one device's it asserts itself."""
    out = run("12_long_context.py", *SHORT, "--ranks", "3")
    assert "3 ranks, here 72 and 64 and 64 of 200 tokens" in out
    assert "the loss and its gradients are those of one device" in out


@with_mpi
@pytest.mark.slow  # tests/distributed/test_mpi
def test_long_context_in_processes(tmp_path):
    program = EXAMPLES / "12_long_context.py"
    command = [MPIEXEC, "-n", "2", sys.executable, program, "--mpi", *SHORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("are those of one device") == 1
    assert "2 ranks, here 72 of 200 tokens" in done.stdout


def test_long_context_is_example_02(rng, monkeypatch):
    """In float64, with weights of the head that are not 0, as they are before the first step."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("12_long_context")
    weights = example.model.init_weights(rng, example.WIDTH, example.LAYERS, np.float64)
    weights["head"] += rng.standard_normal(weights["head"].shape)
    inputs, targets = rng.integers(256, size=(2, 100))
    ranks = example.Ranks(nad.Simulated(3), [contextlib.nullcontext()] * 3)
    loss, grads = example.split_step(ranks, weights, inputs, targets)
    expected, expected_grads = example.whole_step(weights, inputs, targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-9, atol=1e-12, err_msg=name)
    example.assert_as_on_one_device(weights, inputs, targets, loss, grads)
    for wrong in ((1.001 * loss, grads), (loss, grads | {"up": 1.001 * grads["up"]})):
        with pytest.raises(AssertionError):
            example.assert_as_on_one_device(weights, inputs, targets, *wrong)


@needs("numba_cuda")
def test_top_blocks(run):
    out = run("20_top_blocks.py", "--seqlen", "1024", "--heads", "1", "--keep", "0.3")
    errors = [float(x) for x in re.findall(r"(0\.\d+)$", out, re.M)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.3
    assert errors[2] < 0.15


def test_gradients_of_top_blocks(rng):
    """Along a line, as by finite differences; the blocks stay those of its middle."""
    example = loaded("20_top_blocks")
    example.xp = np
    qkv, line, do = (rng.standard_normal((3, 1, 192, 8)) for _ in range(3))
    blocks = example.promising(*qkv[:2], 2)
    example.promising = lambda *_: blocks
    _, backprop = example.coarse_to_fine(*qkv, 2)
    ahead, behind = (example.coarse_to_fine(*(qkv + step * line), 2)[0] for step in (1e-3, -1e-3))
    np.testing.assert_allclose((backprop(do[0]) * line).sum(), ((ahead - behind) * do[0]).sum() / 2e-3, rtol=1e-3)


@pytest.mark.slow  # tests/cuda/test_kernel.py
def test_matrix_product_simulated(tmp_path):
    out = run_alone(tmp_path, "09_matrix_product.py", CUDA_VISIBLE_DEVICES="")
    assert "simulated" in out
    assert float(re.search(r"float32: (\S+)", out)[1]) < 1e-3


@pytest.mark.gpu
def test_matrix_product_on_a_gpu(tmp_path):
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("is for Hopper")
    out = run_alone(tmp_path, "09_matrix_product.py")
    assert "on the GPU" in out
    assert float(re.search(r"float32: (\S+)", out)[1]) < 1e-3


@pytest.mark.gpu
def test_own_attention_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "03_own_attention.py")
    assert "on the GPU" in out
    assert float(re.search(r"float64: (\S+)", out)[1]) < 1e-4


@pytest.mark.gpu
def test_transformer_on_a_gpu(tmp_path):
    tiny = "--steps 60 --batch 4 --seqlen 64 --width 32 --layers 2 --heads 2 --lr 1e-2 --dropout 0.1 --xp cupy"
    out = run_alone(tmp_path, "02_transformer.py", *tiny.split(), "--plot", "loss.png")
    assert float(re.search(r"validation: (\S+) bits per byte", out)[1]) < 5


@pytest.mark.gpu
def test_molecule_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "13_molecule.py", "--xp", "cupy")
    assert float(re.search(r"learned to (\S+) kT", out)[1]) < 0.15


@pytest.mark.gpu
def test_dpa2_on_a_gpu(tmp_path):
    for replay in [], ["--replay"]:
        out = run_alone(tmp_path, "23_dpa2.py", "--device", "cuda", "--atoms", "27", "--rounds", "1", *replay)
        assert float(re.search(r"differ by (\S+)", out)[1]) < 1e-11


@pytest.mark.gpu
def test_points_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "17_gaussian_process.py", "--xp", "cupy")
    assert float(re.search(r"a map with an error of (\S+)", out)[1]) < 0.05
    out = run_alone(tmp_path, "18_optimal_transport.py", "--xp", "cupy")
    assert float(re.search(r"(\S+) away", out)[1]) < 0.02


@pytest.mark.gpu
def test_top_blocks_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "20_top_blocks.py", "--seqlen", "8192", "--xp", "cupy")
    assert float(re.search(r"the means of others (\S+)", out)[1]) < 0.1


@pytest.mark.gpu
def test_sparse_layers_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "19_sparse_layers.py", "--xp", "cupy")
    sparse, dense = (float(error) for error in re.findall(r"square error of (\S+);", out))
    assert sparse < dense / 4


@pytest.mark.gpu
def test_generate_on_a_gpu(tmp_path):
    out = run_alone(tmp_path, "11_generate.py", "--steps", "40", "--count", "60", "--xp", "cupy")
    assert len(re.findall(WAYS, out, re.M)) == 3


@pytest.mark.gpu
def test_long_context_on_gpus(tmp_path):
    """On one, where there are no more: a ring of one rank."""
    import cupy

    count = min(2, cupy.cuda.runtime.getDeviceCount())
    out = run_alone(tmp_path, "12_long_context.py", "--devices", str(count), "--seqlen", "1000", "--steps", "10")
    assert f"{count} ranks" in out
    assert "the loss and its gradients are those of one device" in out

import json
from types import SimpleNamespace

import numpy as np
import pytest
from common import standard_vjp
from paper import io_model
from paper.io_model import Shape

from numbattn.cuda.kernels.hopper.forward_tiles import Warpgroups


class Counted(np.ndarray):
    """An array that counts the bytes of matrices that operations read and write."""

    read = written = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        plain = [x.view(np.ndarray) if isinstance(x, np.ndarray) else x for x in inputs]
        result = getattr(ufunc, method)(*plain, **options).view(Counted)
        Counted.read += sum(map(size, plain))
        Counted.written += size(result)
        return result


def size(x):
    """A matrix's bytes; row statistics, scalars and the like are not counted."""
    return x.nbytes if isinstance(x, np.ndarray) and x.ndim and x.shape[-1] > 1 else 0


def test_the_standard_formula_moves_what_is_counted(monkeypatch):
    shape = Shape(2, 3, 40, 8)
    q, k, v, do = np.random.default_rng(0).standard_normal((4, *shape[:4])).astype(np.float16).view(Counted)
    monkeypatch.setattr(Counted, "read", 0)
    monkeypatch.setattr(Counted, "written", 0)
    _, backprop = standard_vjp(q, k, v)
    assert [Counted.read, Counted.written] == io_model.standard_bytes(shape, "forward")
    backprop(do)
    assert [Counted.read, Counted.written] == io_model.standard_bytes(shape, "both")


def test_kernels_by_hand():
    """4 queries and keys of 2 numbers with 2 bytes; tiles of 2 queries and of 1 key."""
    tiles, shape = SimpleNamespace(tile_m=2, tile_n=1), Shape(1, 1, 4, 2)
    matrix, statistic, sums = 16, 16, 32
    by_hand = {  # read, written
        "forward": (matrix + 2 * (2 * matrix), matrix + statistic),
        "delta": (2 * matrix + statistic, 2 * statistic),
        "backward_kv": (2 * matrix + 4 * (2 * matrix + 2 * statistic), 2 * matrix + 4 * sums),
        "backward_q": (2 * matrix + 2 * statistic + 2 * (2 * matrix), matrix),
        "round_dq": (sums, matrix),
    }
    assert {name: io_model.kernel_bytes(shape, name, tiles, 1, adds_dq=True)[1:3] for name in by_hand} == by_hand
    half = io_model.kernel_bytes(shape, "forward", tiles, 0.5)
    assert half == ("forward", matrix + 2 * matrix, matrix + statistic, 4 * matrix + statistic)


@pytest.mark.parametrize(("cc", "kernels"), [
    ((9, 0), ["hopper_forward", "delta", "hopper_backward_kv", "round_dq"]),
    ((8, 0), ["mma_forward", "delta", "mma_backward", "round_dq"]),
])  # fmt: skip
def test_kernels_are_those_of_the_plan(cc, kernels):
    assert [x.kernel for x in io_model.flash_bytes(Shape(2, 4, 1024, 64), "both", cc)] == kernels


def test_larger_tiles_read_less_from_l2_and_the_same_from_dram():
    shape = Shape(2, 4, 4096, 64)
    ((_, read, _, dram),) = io_model.flash_bytes(shape, "forward", row=Warpgroups(64, 1, 2, 1))
    ((_, fewer, _, same),) = io_model.flash_bytes(shape, "forward", row=Warpgroups(64, 4, 2, 4))
    assert dram == same
    assert read / fewer == pytest.approx(4, rel=0.05)


def test_twice_the_memory_halves_what_grows_with_the_square():
    shape = Shape(1, 1, 1 << 20, 64)
    assert io_model.theorem_bytes(shape, 1 << 17) == pytest.approx(2 * io_model.theorem_bytes(shape, 1 << 18), rel=1e-2)
    assert io_model.theorem_bytes(shape, 1 << 17, share=0) == shape.nd


def test_flops():
    shape = Shape(1, 1, 8, 2)
    product = 2 * 8 * 8 * 2
    assert io_model.flops(shape, "both") == 6 * product
    assert io_model.flops(shape, "both", recomputes=True, share=0.5) == 3.5 * product


def test_script(tmp_path, capsys):
    path = tmp_path / "io.json"
    io_model.main(["--batch", "1", "--seqlen", "512", "--json", str(path)])
    assert "Predicted: batch 1" in capsys.readouterr().out
    records = json.loads(path.read_text())["records"]
    assert [(x["peer"], x["pass"]) for x in records][-2:] == [("standard", "both"), ("flash", "both")]
    standard, flash = records[-2:]
    assert standard["dram"] > flash["dram"]

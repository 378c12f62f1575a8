"""What is compiled is kept on disk, whatever happens to the disk."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from numba.core.registry import cpu_target

import numbattn as na
from numbattn.cpu import compile
from numbattn.cpu.backward import backward_kernel, score_kernel
from numbattn.cpu.forward import forward_kernel

CALL = """
import warnings
from numbattn.cpu.compile import kernel

warnings.simplefilter("always")

@kernel
def doubled(x):
    return 2 * x

assert doubled(3) == 6
print(sum(doubled.stats.cache_hits.values()), sum(doubled.stats.cache_misses.values()))
"""


def call(place):
    """Hits and misses of a process, and what it says."""
    environment = {**os.environ, "NUMBATTN_CACHE_DIR": str(place)}
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that one process has filled."""
    place = tmp_path_factory.mktemp("cache")
    assert call(place) == ("0 1", "")
    return place


def test_the_second_process_compiles_nothing(filled):
    assert call(filled) == ("1 0", "")


def test_what_compiles_says_so_and_what_is_read_does_not(tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "compiling", lambda kind, what: said.append((kind, what)) or nullcontext())
    assert [compile.kernel(lambda x: x.size)(np.zeros(2, np.float32)) for _ in range(2)] == [2, 2]
    assert said == [("cpu", "<lambda> of float32 for the CPU")]


@pytest.mark.parametrize("setting", compile.SETTINGS)
def test_code_of_other_settings_has_another_name(setting, monkeypatch):
    codegen = cpu_target.target_context.codegen()
    before = compile.file_of("kernel", (), codegen)
    monkeypatch.setattr(compile.numba.config, setting, "another")
    assert compile.file_of("kernel", (), codegen) != before


def test_a_file_that_cannot_be_written_is_read(filled):
    (file,) = (filled / "cpu").iterdir()
    before = file.stat().st_mode
    file.chmod(0o444)
    (filled / "cpu").chmod(0o555)
    try:
        assert call(filled) == ("1 0", "")
    finally:
        (filled / "cpu").chmod(0o755)
        file.chmod(before)


@pytest.mark.parametrize("damage", [
    lambda data: data[: len(data) // 2],
    lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
], ids=["half", "bit"])  # fmt: skip
def test_a_damaged_file_is_compiled_again(filled, damage):
    (file,) = (filled / "cpu").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert call(filled) == ("0 1", "")
    assert call(filled) == ("1 0", "")


def test_where_nothing_can_be_written_a_warning_says_so_once(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    counts, said = call(place)
    assert counts == "0 1"
    assert said.count("RuntimeWarning: compiled code is not kept") == 1
    assert str(place) in said
    assert "NUMBATTN_CACHE_DIR" in said


def test_no_two_functions_of_a_kernel_share_a_symbol():
    """But for Numba's count of functions: a process that compiled in another order counts otherwise, and code that it
    kept on disk is linked by symbol with what this process has."""
    q, k, v, do = np.zeros((4, 5, 8), np.float32)
    o, saved = na.attention_forward(q, k, v, dropout=na.Dropout(0.1, 1), score=na.Alibi(1.0))
    na.attention_backward(do, saved)
    for kernel in forward_kernel, backward_kernel, score_kernel:
        for compiled in kernel.overloads.values():
            functions = compiled.library._get_module_for_linking().functions
            symbols = [re.sub(r"B\d+v\d+", "", f.name) for f in functions if not f.is_declaration]
            assert any("cpu7product" in symbol for symbol in symbols)
            assert len(symbols) == len(set(symbols))

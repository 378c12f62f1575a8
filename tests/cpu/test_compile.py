"""What is compiled is kept on disk, whatever happens to the disk."""

import ctypes
import json
import os
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numba.core.registry import cpu_target

import numbattn as na
from numbattn.base import cache
from numbattn.cpu import compile
from numbattn.cpu.launch import launch
from numbattn.cpu.record import Later, Record
from tests.tools.process import printed

ROOT = Path(__file__).parents[2]
CALLED = "from tests.cpu.test_compile import call; print(*call())\n"


def double(first, end, stop, scratch, x, pair):
    x[0] = 2 * x[0] + pair[1]


def call(place=None):
    """How often a new Kernel compiles, and what is said about it."""
    kernel, x = compile.Kernel(double), np.array([3.0])
    variables = {} if place is None else {"NUMBATTN_CACHE_DIR": str(place)}
    with (
        patch.dict(os.environ, variables), patch.object(compile, "CFunc", wraps=compile.CFunc) as compiler,
        warnings.catch_warnings(record=True) as said,
    ):  # fmt: skip
        warnings.simplefilter("always")
        launch(kernel.given(Record((), x, (0, 1.0))), 1, 0, 0)
    assert x[0] == 7
    return compiler.call_count, "\n".join(str(warning.message) for warning in said)


def run(code, place, **options):
    """What another process prints."""
    lines = printed(code, **options, NUMBATTN_CACHE_DIR=str(place), PYTHONPATH=str(ROOT))
    return [line.strip() for line in lines]


def files(place):
    return [*(place / "numbattn" / "cpu").iterdir()]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that this process has filled."""
    place = tmp_path_factory.mktemp("cache")
    assert call(place) == (1, "")
    return place


def test_another_process_compiles_nothing(filled):
    assert run(CALLED, filled) == ["0"]


def test_what_compiles_says_so_and_what_is_read_does_not(tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "compiling", lambda kind, what: said.append((kind, what)) or nullcontext())
    for _ in range(2):
        compile.Kernel(lambda first, end, stop, scratch, x: None).given(Record((), np.zeros(2, np.float32)))
    assert said == [("cpu", "<lambda> of float32 for the CPU")]


@pytest.mark.parametrize("setting", compile.SETTINGS)
def test_code_of_other_settings_has_another_name(setting, monkeypatch):
    codegen = cpu_target.target_context.codegen()
    before = compile.file_of("kernel", (), codegen), compile.file_ahead_of("kernel", ())
    monkeypatch.setattr(compile.config, setting, "another")
    assert not {compile.file_of("kernel", (), codegen), compile.file_ahead_of("kernel", ())}.intersection(before)


def test_code_that_was_compiled_ahead_is_not_compiled(filled, tmp_path, monkeypatch):
    """It is found by the name in the header of what was kept where it was compiled."""
    (file,) = files(filled)
    _, header, code = file.read_bytes().split(b"\n", 2)
    name = (header := json.loads(header))["ahead"]
    (tmp_path / name).write_bytes(cache.packed(name, cache.Entry(header, code)))
    monkeypatch.setattr(cache, "installed", lambda: tmp_path)
    assert call(tmp_path / "empty") == (0, "")
    assert not (tmp_path / "empty").exists()


def test_pythons_share_code_whatever_is_before_an_address_in_an_object(filled, monkeypatch):
    """More without the GIL."""
    x, others = np.array([3.0]), np.array([5.0])
    objects = (ctypes.c_int64 * 10)(*[others.ctypes.data] * 9, x.ctypes.data)
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(filled))
    monkeypatch.setattr(compile, "HEAD", 72)
    monkeypatch.setattr("numbattn.cpu.launch.id", lambda _: ctypes.addressof(objects), raising=False)
    call = compile.Kernel(double).given(Record(()), Record(Later((1,), float), (0, 1.0)))
    launch(call, 1, 0, 0, (x,))
    assert (x[0], others[0]) == (7, 5)


def test_a_file_that_cannot_be_written_is_read(filled):
    (file,) = files(filled)
    before = file.stat().st_mode
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        assert call(filled) == (0, "")
    finally:
        file.parent.chmod(0o755)
        file.chmod(before)


@pytest.mark.parametrize("damage", [
    lambda data: data[: len(data) // 2],
    lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
], ids=["half", "bit"])  # fmt: skip
def test_a_damaged_file_is_compiled_again(filled, damage):
    (file,) = files(filled)
    file.write_bytes(damage(file.read_bytes()))
    assert call(filled) == (1, "")
    assert call(filled) == (0, "")


def test_where_nothing_can_be_written_a_warning_says_so_once(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    count, said = call(place)
    assert count == 1
    assert said.count("compiled code is not kept") == 1
    assert str(place) in said
    assert "NUMBATTN_CACHE_DIR" in said


def test_nothing_is_unpickled(filled):
    """What is kept is object code and a header."""
    (file,) = files(filled)
    digest, header, code = file.read_bytes().split(b"\n", 2)
    assert json.loads(header).keys() == {"function", "ahead"}
    assert code.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86"))
    with patch.multiple(pickle, loads=None, load=None, Unpickler=None):
        assert call(filled) == (0, "")


def test_processes_at_once_on_an_empty_cache(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(run, [CALLED] * 2, [tmp_path] * 2))
    assert len(files(tmp_path)) == 1
    assert call(tmp_path) == (0, "")


def test_what_needs_this_process_is_not_kept(tmp_path, monkeypatch):
    """Its addresses are no others'."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    address = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(lambda x: 2 * x)

    @compile.Kernel
    def call_back(first, end, stop, scratch, x):
        x[0] = address(x[0])

    x = np.array([3.0])
    launch(call_back.given(Record((), x)), 1, 0, 0)
    assert x[0] == 6
    assert not (tmp_path / "numbattn").exists()


UPGRADED = """
import numbattn, pathlib
file = pathlib.Path(numbattn.__file__).with_name("dropout.py")
file.write_text(file.read_text() + "# newer")
"""


def test_code_of_other_sources_is_neither_kept_nor_read(tmp_path):
    """They change while a process lives."""
    package = Path(na.__file__).parent
    shutil.copytree(package, tmp_path / "numbattn", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "place"
    first, count, *_ = run(CALLED + UPGRADED + CALLED, place, cwd=tmp_path)
    assert first == "1"
    assert count.startswith("1 compiled code is not kept: the files in")
    assert len(files(place)) == 1
    assert run(CALLED * 2, place, cwd=tmp_path) == ["1", "0"]
    assert len(files(place)) == 2


FORK = """
import os, signal, threading, time
from ctypes import c_int64
from numbattn.cpu.compile import c_function

compiling = threading.Event()

def make():
    compiling.set()
    time.sleep(0.3)
    return lambda x: None

thread = threading.Thread(target=c_function, args=("the parent's", [c_int64], make))
thread.start()
compiling.wait()
child = os.fork()
if not child:
    signal.alarm(30)
    c_function("the child's", [c_int64], lambda: lambda x: None)
    thread = threading.Thread(target=c_function, args=("its thread's", [c_int64], lambda: lambda x: None))
    thread.start()
    thread.join()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child waits for a lock"
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork")
def test_a_child_that_is_forked_while_a_thread_compiles(tmp_path):
    """It compiles, too."""
    run(FORK, tmp_path)


FAULTS = {
    "test_pythons_share_code_whatever_is_before_an_address_in_an_object": {
        "word_at(x + words[INTO])": "word_at(x + HEAD)",
    },
    ("test_code_of_other_settings_has_another_name", "test_what_compiles_says_so_and_what_is_read_does_not"): {
        "repr((*parts, settings, ": "repr((*parts, ",
        "isinstance(x.dtype, types.Float)}": "not isinstance(x.dtype, types.Float)}",
    },
    (
        "test_what_needs_this_process_is_not_kept",
        "cpu/test_function.py::test_a_function_that_calls_others",
        "test_nothing_is_unpickled",
    ): {
        "has_addresses or any(": "any(",
        "x.name.startswith(RuntimeLinker.PREFIX)": "False",
    },
    "cpu/test_record.py::test_a_kernel_is_compiled_apart_for_none": {
        "if group and kind != types.none:": "if group:",
    },
}

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda")

import numba

from numbattn.cuda import build as building
from numbattn.cuda.build import Key, Report, TensorMapArgument, arch, assemble, build, compile_ptx
from numbattn.cuda.compiler import types

from . import factories

pytestmark = pytest.mark.usefixtures("cache_dir")
CCS = ((7, 5), (8, 0), (9, 0, "a"), (10, 0), (12, 0))
ROOT = Path(__file__).parents[2]
IN_A_PROCESS = """
import sys
from numbattn.cuda.build import Key, build
binary = build(Key("tests.cuda.factories:scale", (8, 0), (("times", 3),)))
print(len(binary.cubin), "numba.cuda" in sys.modules)
"""


def key(cc=(8, 0), factory="scale", **parameters):
    return Key.of(getattr(factories, factory), cc, **parameters)


def process(code):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def no_compiler(monkeypatch):
    """Call it, and nothing can be compiled any more."""

    def forbid():
        def fail(*args):
            raise AssertionError("compiles")

        monkeypatch.setattr(building, "compile_ptx", fail)

    return forbid


@pytest.fixture
def forget():
    """What a process knows of its compilers is asked for again."""
    known = building._ptxas, building._packages, building._versions
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


# ------------------------------------------------------------------------------------------------------------ compile
@pytest.mark.parametrize("cc", CCS, ids=arch)
def test_builds_for_any_gpu(cc):
    binary = build(key(cc))
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.name.encode() in binary.cubin
    assert binary.arguments == (("array", 1, 4), ("array", 1, 4), ("float32",))
    assert (binary.threads, binary.shared, binary.overlaps) == (64, 0, False)
    assert 0 < binary.report.registers < 64
    assert (binary.report.spills, binary.report.stack, binary.report.messages) == (0, 0, ())


@pytest.mark.parametrize("cc", CCS, ids=arch)
def test_ptx(cc):
    ptx = compile_ptx(factories.scale(), cc, "scale")
    assert f".target {arch(cc)}\n" in ptx
    assert ".visible .entry scale(" in ptx
    assert ".maxntid 64" in ptx
    assert ".minnctapersm 1" in ptx


@pytest.mark.parametrize("cc", CCS[2:], ids=arch)
def test_tensor_map_by_value(cc):
    ptx = compile_ptx(factories.box(8, 32), cc, "box")
    assert ptx.count(".param .align 64 .b8 box_param_9[128]") == 1  # after a matrix, which is nine parameters
    assert "cvta.param.u64" in ptx
    assert "[box_param_9]" not in ptx
    assemble(ptx, cc)


def test_arguments_of_tensor_maps_have_a_box_and_a_swizzle():
    found = build(key((9, 0, "a"), "box", rows=8, columns=32)).arguments
    assert found == (("array", 2, 4), ("tensor_map", (8, 32), 0, 256), ("int32",), ("int32",))
    assert TensorMapArgument(2, (8, 32)).swizzle == 128


def test_tensor_map_that_is_read_otherwise():
    with pytest.raises(RuntimeError, match="box_param_0"):
        building._by_value(".param .u64 box_param_0, ld.param.v2.u64 {%rd1, %rd2}, [box_param_0];", "box", [0])


def test_local_memory_and_shared_memory_are_reported():
    assert build(key(factory="pick", size=100)).report.stack >= 400
    assert build(key((9, 0, "a"), "box", rows=8, columns=32)).report.shared >= 1024


def test_report_of_what_ptxas_says():
    report = Report.parse("""\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7519) Potential Performance Loss: warpgroup.arrive is injected
ptxas info    : 16 bytes gmem
ptxas info    : Function properties for f
    400 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas warning : Local memory used
ptxas info    : Used 168 registers, used 1 barriers, 400 bytes cumulative stack size, 49152 bytes smem
""")
    assert replace(report, messages=()) == Report(168, 400, 12, 16, 49152)
    assert (report.spills, len(report.messages), len(report.losses)) == (28, 3, 1)


def test_ptxas_says_when_it_ignores_setmaxnreg():
    ptx = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel()%s { setmaxnreg.inc.sync.aligned.u32 240; ret; }
"""
    assert "C7508" in assemble(ptx % "", (9, 0, "a"))[1].losses[0]
    assert not assemble(ptx % ".maxntid 128 .minnctapersm 1", (9, 0, "a"))[1].losses


def test_older_ptxas():
    ptx = compile_ptx(factories.scale(), (8, 0), "scale")
    version = ptx[ptx.index(".version ") :].split()[1]
    cubin, _ = assemble(ptx.replace(version, "99.0"), (8, 0))
    assert cubin.startswith(b"\x7fELF")


def test_errors_of_ptxas():
    with pytest.raises(RuntimeError, match=r"for sm_80:\n.*move"):
        assemble(compile_ptx(factories.scale(), (8, 0)).replace("mov.", "move."), (8, 0))


def test_arguments_that_cannot_be_passed():
    source = replace(factories.scale(), function=lambda x: None, signature=types.void(types.float16))
    with pytest.raises(TypeError, match="got float16 as argument 0"):
        compile_ptx(source, (8, 0))
    with pytest.raises(TypeError, match="uint64 for a tensor map"):
        compile_ptx(replace(factories.scale(), tensor_maps=(TensorMapArgument(2, (8,)),)), (8, 0))


@pytest.mark.parametrize("value", [[1], {}, object(), (1, [2]), factories.scale])
def test_parameters_are_plain(value):
    with pytest.raises(TypeError, match="head_dim: got"):
        key(head_dim=value)


def test_keys_are_values():
    assert key(a=1, b=(2, "x")) == key(b=(2, "x"), a=1)
    assert hash(key(a=1, b=(2, "x"))) == hash(key(b=(2, "x"), a=1))


# -------------------------------------------------------------------------------------------------------------- cache
def test_hit(no_compiler, cache_dir):
    first = build(key(times=3))
    no_compiler()
    assert build(key(times=3)) == first
    assert len(list(cache_dir.iterdir())) == 1


@pytest.mark.parametrize(("factory", "parameters"), [("box", {"rows": 8, "columns": 32}), ("shift", {})])
def test_hit_on_hopper(factory, parameters, no_compiler):
    """Tuples of tuples and what a launch needs to know come back from the disk as they were."""
    first = build(key((9, 0, "a"), factory, **parameters))
    no_compiler()
    assert build(key((9, 0, "a"), factory, **parameters)) == first
    assert first.overlaps == (factory == "shift")


def test_kernels_overlap_from_hopper_on():
    assert not build(key((8, 6), "shift")).overlaps


def test_hit_in_a_new_process_does_not_import_numba_cuda():
    size = len(build(key(times=3)).cubin)
    out, error = process(IN_A_PROCESS).communicate()
    assert out == f"{size} False\n", error


def test_two_processes_at_once(no_compiler, cache_dir):
    both = [process(IN_A_PROCESS) for _ in range(2)]
    for each in both:
        out, error = each.communicate()
        assert out.endswith(" True\n"), error
    assert len(list(cache_dir.iterdir())) == 1
    no_compiler()
    build(key(times=3))


@pytest.mark.parametrize("other", [key(times=4), key((8, 6), times=3), key((9, 0, "a"), times=3)])
def test_another_key(other):
    assert building.digest_of(other) != building.digest_of(key(times=3))


@pytest.mark.parametrize("what", ["_versions", "_package_sources"])
def test_another_version(what, monkeypatch):
    before = building.digest_of(key())
    monkeypatch.setattr(building, what, lambda: "another")
    assert building.digest_of(key()) != before


def test_another_state_of_a_factory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "factory_to_edit.py"
    file.write_text("times = 1")
    before = building.digest_of(Key("factory_to_edit:f", (8, 0)))
    file.write_text("times = 2")
    assert building.digest_of(Key("factory_to_edit:f", (8, 0))) != before


@pytest.mark.parametrize("damage", [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[: len(data) // 2],
    lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    lambda data: b"not a cubin",
], ids=["empty", "short", "half", "bit", "other"])
def test_damaged_entries_are_built_again(damage, cache_dir, no_compiler):
    build(key())
    (path,) = cache_dir.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = build(key())
    no_compiler()
    assert build(key()) == again


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_unwritable_place_means_no_cache(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path / place))
    with pytest.warns(RuntimeWarning, match="compiled code is not kept"):
        assert build(key()).cubin.startswith(b"\x7fELF")


# ------------------------------------------------------------------------------------------------------ what is missing
@pytest.mark.usefixtures("forget")
def test_missing_ptxas(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ptxas not found.*numbattn\[cu13\].*numbattn\[cu12\]"):
        build(key())


def test_ptx_needs_no_ptxas(monkeypatch):
    monkeypatch.setattr(building, "_ptxas", lambda: pytest.fail("looks for ptxas"))
    compile_ptx(factories.scale(), (8, 0))


@pytest.mark.usefixtures("forget")
def test_missing_numba_cuda(monkeypatch):
    def version(name):
        raise building.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(building.metadata, "version", version)
    with pytest.raises(RuntimeError, match=r"numba not found.*numbattn\[cu13\]"):
        build(key())


def test_numba_told_to_simulate_is_named(monkeypatch):
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 1)
    with pytest.raises(ImportError, match="NUMBA_ENABLE_CUDASIM is set"):
        build(key())

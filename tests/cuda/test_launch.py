import gc
import threading
import time
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.core")

import cupy

from numbattn.cuda import launch as launching
from numbattn.cuda.build import Key
from numbattn.cuda.launch import TensorMaps, View, current_device, get_kernel, tensor_map, view_of


def key_of(factory, **parameters):
    cc = current_device().cc
    return Key.of(f"tests.cuda.factories:{factory}", (9, 0, "a") if cc == (9, 0) else cc, **parameters)


def kernel_of(factory, **parameters):
    return get_kernel(key_of(factory, **parameters))


def scale(x, stream=None, a=3.0):
    """What kernel and NumPy make of x; the kernel on a stream."""
    y = cupy.full_like(x, cupy.nan)
    blocks = -(-x.size // 64)
    with stream or cupy.cuda.get_current_stream():
        kernel_of("scale").launch(blocks, view_of(x), view_of(y), a)
    return y, 2 * np.float32(a) * x


# ------------------------------------------------------------------------------------------------------- without a GPU
def test_arrays_are_what_numba_makes_of_them():
    found = launching._array_parameters("kernel", 0, View(4096, 4, (3, 5), (20, 4)), 2, 4)
    assert found == (0, 0, 15, 4, None, 3, 5, 20, 4)  # the address is filled in with each launch


@pytest.mark.parametrize("view", [View(0, 4, (3,), (4,)), View(0, 2, (3, 5), (10, 2))])
def test_arrays_of_another_kind(view):
    with pytest.raises(TypeError, match="as argument 1, expected 2 axes of 4 bytes"):
        launching._array_parameters("kernel", 1, view, 2, 4)


def test_each_launch_has_its_own_addresses_and_numbers(monkeypatch):
    found = []
    monkeypatch.setattr(launching.cuda.core, "launch", lambda *given: found.append(given[3:]))
    monkeypatch.setattr(launching, "_stream", lambda pointer: None)
    monkeypatch.setattr(launching._thread, "ready", True, raising=False)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0))
    kernel = object.__new__(launching.Kernel)
    arguments = ("int32",), ("array", 1, 4), ("float32",)
    kernel.binary = SimpleNamespace(name="kernel", arguments=arguments, threads=64, shared=0, overlaps=False)
    kernel._kernel = None
    launch = kernel.prepare(2, [View(16, 4, (3,), (4,))])
    calls = [(1000, (7, 0.5)), (2000, (7, 0.5)), (2000, (8, 0.1)), (1000, (7, 0.5))]
    for address, numbers in calls:
        launch([address], numbers)
    assert found == [(i, 0, 0, 3, 4, 16 + address, 3, 4, np.float32(x)) for address, (i, x) in calls]
    assert {(type(first), type(last)) for first, *_, last in found} == {(np.int32, np.float32)}
    with pytest.raises(OverflowError):
        launch([1000], (2**31, 0.5))
    with pytest.raises(ValueError, match="zip"):
        launch([1000], (7,))


# ---------------------------------------------------------------------------------------------------------- with a GPU
@pytest.mark.gpu
def test_launch():
    y, expected = scale(cupy.arange(1000, dtype="f"))
    cupy.testing.assert_array_equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_numbers_that_do_not_fit(number):
    out, matrix = cupy.zeros(8), cupy.zeros((3, 2), "f")
    with pytest.raises(OverflowError):
        kernel_of("numbers").launch(1, view_of(out), 0, view_of(matrix), number, 0, 0, 0, 0.0, 0.0)


@pytest.mark.gpu
def test_kernels_are_loaded_once():
    assert kernel_of("scale") is kernel_of("scale")
    assert kernel_of("scale") is not kernel_of("scale", times=2)


@pytest.mark.gpu
def test_every_kind_of_argument():
    out = cupy.full(10, cupy.nan)
    matrix = cupy.arange(24, dtype="f").reshape(4, 6)[::-1, 1:5]
    values = -(2**31), 2**32 - 1, -(2**62), 2**63, 1 / 3, 1 / 3
    kernel_of("numbers").launch(1, view_of(out), 2, view_of(matrix), *values)
    expected = [*values[:4], np.float32(1 / 3), 1 / 3, *matrix[2].get()]
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.gpu
def test_wrong_calls():
    kernel, x = kernel_of("scale"), view_of(cupy.zeros(3, "f"))
    with pytest.raises(TypeError, match="scale: got 2 arguments, expected 3"):
        kernel.launch(1, x, x)
    with pytest.raises(ValueError, match="scale: got -1 blocks"):
        kernel.launch(-1, x, x, 1.0)


@pytest.mark.gpu
def test_no_blocks_are_no_launch():
    x = view_of(cupy.zeros(0, "f"))
    kernel_of("scale").launch(0, x, x, 1.0)


@pytest.mark.gpu
def test_many_blocks_along_x():
    y, expected = scale(cupy.ones(64 * 70_000, "f"))
    assert (y == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [12 * 1024, 16 * 1024, None], ids=["48 KB", "64 KB", "all there is"])
def test_shared_memory(size):
    size = size or current_device().shared // 4
    if 4 * size > current_device().shared:
        pytest.skip(f"this GPU gives a block {current_device().shared} bytes")
    x, y = cupy.arange(size, dtype="f"), cupy.full(size, cupy.nan, "f")
    kernel_of("reverse", size=size).launch(1, view_of(x), view_of(y))
    cupy.testing.assert_array_equal(y, x[::-1])


@pytest.mark.gpu
def test_too_much_shared_memory():
    shared = current_device().shared
    with pytest.raises(RuntimeError, match=f"reverse: {shared + 4} bytes of shared memory"):
        kernel_of("reverse", size=shared // 4 + 1)


@pytest.mark.gpu
def test_work_is_ordered_on_the_current_stream():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(1 << 24, "f")
        for _ in range(100):  # keeps the stream busy: a launch elsewhere would come too early
            x += 1
        y, _ = scale(x, stream)
        z = y + 1
    stream.synchronize()
    assert (z == 601).all()


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [cupy.cuda.Stream.null, cupy.cuda.Stream.ptds], ids=["legacy", "per thread"])
def test_default_streams(stream):
    y, expected = scale(cupy.arange(1000, dtype="f"), stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(y, expected)


@pytest.mark.gpu
def test_new_thread():
    x, y = cupy.ones(64, "f"), cupy.zeros(64, "f")
    kernel, views = kernel_of("scale"), (view_of(x), view_of(y))
    cupy.cuda.Device().synchronize()
    errors = []

    def run():
        try:
            kernel.launch(1, *views, 2.0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert (y == 4).all()


@pytest.mark.gpu
def test_graph_capture():
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.arange(1000, dtype="f"), cupy.full(1000, cupy.nan, "f")
    kernel = kernel_of("scale", times=5)  # one that has never run
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        kernel.launch(16, view_of(x), view_of(y), 3.0)
        graph = stream.end_capture()
    assert cupy.isnan(y).all()
    for _ in range(2):
        x += 1
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        cupy.testing.assert_array_equal(y, 30 * x)


def needs_hopper():
    if current_device().cc < (9, 0):
        pytest.skip("tensor maps and overlapping kernels need compute capability 9.0")


def boxes():
    needs_hopper()
    return kernel_of("box", rows=8, columns=32)


@pytest.mark.gpu
def test_tensor_map():
    matrix, y = cupy.arange(40 * 100, dtype="f").reshape(40, 100), cupy.full((8, 32), cupy.nan, "f")
    kernel = boxes()
    kernel.launch(1, view_of(y), view_of(matrix), 8, 64)
    cupy.testing.assert_array_equal(y, matrix[8:16, 64:96])
    kernel.launch(1, view_of(y), view_of(matrix), 36, 96)  # what lies outside is zero
    expected = np.zeros((8, 32), "f")
    expected[:4, :4] = matrix[36:, 96:].get()
    np.testing.assert_array_equal(y.get(), expected)


@pytest.mark.gpu
def test_one_launch_for_matrices_at_many_addresses():
    matrices, y, launch = many_matrices()
    for matrix in (*matrices, *matrices[::-1]):
        launch([y.data.ptr, matrix.data.ptr], [8, 64])
        cupy.testing.assert_array_equal(y, matrix[8:16, 64:96])


def many_matrices():
    """More than tensor maps are kept, the result, and a launch that copies a box of any of them there."""
    count = TensorMaps.KEPT + 3
    matrices = cupy.arange(count * 40 * 100, dtype="f").reshape(count, 40, 100)
    y = cupy.full((8, 32), cupy.nan, "f")
    return matrices, y, boxes().prepare(1, [view_of(x)._replace(pointer=0) for x in (y, matrices[0])])


@pytest.mark.gpu
def test_kernels_that_overlap_see_what_those_before_have_written():
    needs_hopper()
    blocks, rounds = 1000, 50
    x, y, kernel = cupy.arange(32 * blocks, dtype="i4"), cupy.full(32 * blocks, -1, "i4"), kernel_of("shift")
    for _ in range(rounds):
        kernel.launch(blocks, view_of(x), view_of(y))
        kernel.launch(blocks, view_of(y), view_of(x))
    np.testing.assert_array_equal(x.get(), np.roll(np.arange(32 * blocks), -2 * rounds) + 2 * rounds)


@pytest.mark.gpu
def test_a_graph_has_its_own_tensor_maps():
    stream = cupy.cuda.Stream(non_blocking=True)
    matrices, y, launch = many_matrices()
    with stream:
        stream.begin_capture()
        launch([y.data.ptr, matrices[0].data.ptr], [8, 64])
        graph = stream.end_capture()
        for matrix in matrices[1:]:  # give the tensor map another address
            launch([y.data.ptr, matrix.data.ptr], [8, 64])
    graph.launch(stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(y, matrices[0, 8:16, 64:96])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tensor_maps_are_kept_and_keep_no_memory(dtype):
    needs_hopper()
    pool = cupy.get_default_memory_pool()
    matrix = cupy.zeros((64, 1 << 16), dtype)
    used, start = pool.used_bytes(), matrix.data.ptr
    maps = TensorMaps(view_of(matrix)._replace(pointer=0), (8, 16), 128)
    first = maps.at(start)
    assert maps.at(start) is first
    others = [maps.at(start + 16 * i) for i in range(1, TensorMaps.KEPT)]
    assert maps.at(start) is first
    assert maps.at(start + 16 * TensorMaps.KEPT) is others[0], "the one that is unused for longest is to be used anew"
    del matrix
    gc.collect()
    assert pool.used_bytes() < used


@pytest.mark.gpu
def test_host_time(capsys):
    """A launch is to take some 10 microseconds; the bound leaves room for a busy machine."""
    x, y = cupy.ones(64, "f"), cupy.ones(64, "f")
    kernel = kernel_of("scale")
    key = key_of("scale")
    stream = cupy.cuda.Stream(non_blocking=True)

    def microseconds(step, rounds=20, calls=100):
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                step()
            times.append((time.perf_counter() - start) / calls * 1e6)
            stream.synchronize()
        return sorted(times)[rounds // 2]

    views = view_of(x), view_of(y)
    with stream:
        found = {
            "get_kernel": microseconds(lambda: get_kernel(key)),
            "view_of": microseconds(lambda: view_of(x)),
            "launch": microseconds(lambda: kernel.launch(1, *views, 1.0)),
        }
        if current_device().cc >= (9, 0):
            matrix = view_of(cupy.zeros((64, 64), "f"))
            found["tensor_map"] = microseconds(lambda: tensor_map(matrix, (8, 16)))
            maps, addresses = TensorMaps(matrix._replace(pointer=0), (8, 16), 128), cycle(range(0, 1 << 12, 16))
            found["tensor_map, known"] = microseconds(lambda: maps.at(matrix.pointer))
            found["tensor_map, another address"] = microseconds(lambda: maps.at(matrix.pointer + next(addresses)))
    with capsys.disabled():
        print("\nmicroseconds:", ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    assert found["launch"] < 30

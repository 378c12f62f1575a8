import ctypes
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

from numbattn.cuda import launch as launching
from numbattn.cuda.build import Key
from numbattn.cuda.launch import EncodedTensorMap, current_gpu, get_kernel
from numbattn.cuda.views import View
from numbattn.cuda.words.numbers import NUMBERS
from numbattn.cuda.words.steps import At, Plan, Step

from ..tools.graphs import capture, own_stream
from . import factories


def view_of(x):
    return View(0, x.itemsize, x.shape, x.strides)


def key_of(factory, **parameters):
    cc = current_gpu().device.cc
    return Key.of(getattr(factories, factory), (9, 0, "a") if cc == (9, 0) else cc, **parameters)


class Launch:
    """A kernel of the factories as a plan of one step: launch(*arrays) has them in the order of the arguments."""

    def __init__(self, factory, blocks, *arguments, **parameters):
        names = [str(i) for i, x in enumerate(arguments) if isinstance(x, View)]
        given = tuple(At(str(i), x) if isinstance(x, View) else x for i, x in enumerate(arguments))
        plan = Plan((), (), (Step(key_of(factory, **parameters), None, blocks, given),), False, False)
        self.program = current_gpu().load(plan, names, np.float32)

    def __call__(self, *arrays):
        gpu = current_gpu()
        addresses, _ = gpu.addresses({str(i): x for i, x in enumerate(arrays)})
        self.program.launch([*addresses, gpu.scrap], [0] * len(NUMBERS), gpu.stream().ptr)


def launch(factory, blocks, *arguments, **parameters):
    """Once, on CuPy arrays and numbers."""
    views = (view_of(x) if isinstance(x, cupy.ndarray) else x for x in arguments)
    Launch(factory, blocks, *views, **parameters)(*(x for x in arguments if isinstance(x, cupy.ndarray)))


def scale(x, stream=None, a=3.0):
    """What kernel and NumPy make of x; the kernel on a stream."""
    y = cupy.full_like(x, cupy.nan)
    with stream or cupy.cuda.get_current_stream():
        launch("scale", -(-x.size // 64), x, y, a)
    return y, 2 * np.float32(a) * x


# ------------------------------------------------------------------------------------------------------- without a GPU
class Driver:
    """Reads, instead of launching, what parameters point at."""

    def __init__(self, *kinds):
        self.kinds, self.found = kinds, []

    def cuLaunchKernelEx(self, config, kernel, parameters, extra):
        values = [kind.from_address(at).value for kind, at in zip(self.kinds, parameters, strict=True)]
        self.found.append((config._obj.stream, kernel, *values))
        return 0


I32, I64, F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_float
ARRAY = [I64] * 7


def launches(monkeypatch, arguments, kinds, driver_kinds):
    """Those of one step with these arguments, and a Driver."""
    driver = Driver(*driver_kinds)
    monkeypatch.setattr(launching, "driver", lambda: driver)
    binary = SimpleNamespace(name="kernel", arguments=kinds, threads=64, shared=0, overlaps=False)
    plan = Plan((), (), (Step(None, None, 2, arguments),), False, False)
    monkeypatch.setattr(launching, "get_kernel", lambda key, device: SimpleNamespace(binary=binary, handle="handle"))
    return launching.Launches(0, plan, plan.names(["x", "y"]), np.float32), driver


def numbers(**given):
    return [given.get(name, 0) for name in NUMBERS]


def test_each_launch_has_its_own_addresses_numbers_and_stream(monkeypatch):
    y = View(16, 4, (3,), (4,))
    arguments = At("y", y), At("y", y._replace(pointer=0)), "keys", "scale", 5
    kinds = ("array", 1, 4), ("array", 1, 4), ("int32",), ("float32",), ("int32",)
    run, driver = launches(monkeypatch, arguments, kinds, [*ARRAY, *ARRAY, I32, F32, I32])
    calls = [(1000, 7, 0.5, 1), (2000, 7, 0.5, 2), (2000, -8, 0.25, 2), (1000, 7, 0.5, None)]
    for address, keys, scale, stream in calls:
        run.launch([99, address, 0], numbers(keys=keys, scale=scale, lo=1, hi=1, scale_log2=9), stream)
    assert driver.found == [
        (stream, "handle", 0, 0, 3, 4, 16 + address, 3, 4, 0, 0, 3, 4, address, 3, 4, keys, scale, 5)
        for address, keys, scale, stream in calls
    ]
    with pytest.raises(launching.struct.error):
        run.launch([99, 1000, 0], numbers(keys=2**31), None)


def test_every_number_arrives(monkeypatch):
    kinds = ["float32" if kind is float else kind.__name__ for kind in NUMBERS.values()]
    types = {"int32": I32, "uint32": ctypes.c_uint32, "uint64": ctypes.c_uint64, "float32": F32}
    run, driver = launches(monkeypatch, NUMBERS, [(kind,) for kind in kinds], [types[kind] for kind in kinds])
    integers = -1, -(2**31), 2**31 - 1, 4, 5, 6, 7, 8, 2**32 - 1, 10, 2**64 - 1, 12, 13, -14, 15, 16, -17
    given = [*integers, *0.5 ** np.arange(len(kinds) - len(integers))]
    run.launch([0, 0, 0], given, None)
    assert driver.found == [(None, "handle", *given)]


def test_an_interrupted_launch_leaves_the_next_one_right(monkeypatch):
    """KeyboardInterrupt may come between any two steps of a call."""
    run, driver = launches(monkeypatch, (At("x", View(0, 4, (3,), (4,))),) * 2, [("array", 1, 4)] * 2, [*ARRAY, *ARRAY])
    run.launch([16, 0, 0], numbers(), 1)

    class Interrupted:
        @property
        def stream(self):
            return None

        @stream.setter
        def stream(self, value):
            raise KeyboardInterrupt

    configs = run.configs
    run.configs = [*configs, Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        run.launch([16, 0, 0], numbers(), 2)
    run.configs = configs
    run.launch([16, 0, 0], numbers(), 1)
    assert [stream for stream, *_ in driver.found] == [1, 1]


def test_numbers_are_written_again_after_an_interrupt(monkeypatch):
    run, driver = launches(monkeypatch, ("keys",), [("int32",)], [I32])
    few, many, write = numbers(keys=1), numbers(keys=2), run.write_numbers

    def interrupted(*given):
        write(*given)
        raise KeyboardInterrupt

    run.launch([0, 0, 0], few, None)
    run.write_numbers = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.launch([0, 0, 0], many, None)
    run.write_numbers = write
    run.launch([0, 0, 0], few, None)
    assert driver.found == [(None, "handle", 1)] * 2


def test_each_thread_has_its_own_memory(monkeypatch):
    devices, others = [], []
    monkeypatch.setattr(launching, "driver", Driver)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", devices.append)
    program = launching.Program(3, Plan((), (), (), False, False), ["x"], np.float32)
    thread = threading.Thread(target=lambda: others.append(program.launch.__self__))
    thread.start()
    thread.join()
    assert others[0].memory is not program.launch.__self__.memory
    assert devices == [3, 3]


def test_tensor_maps_are_made_again_after_an_interrupt(monkeypatch):
    made = []
    monkeypatch.setattr(EncodedTensorMap, "encode", lambda self, address: made.append(address))
    monkeypatch.setattr(launching, "driver", lambda: SimpleNamespace(cuTensorMapReplaceAddress=interrupt))
    tensor_map = EncodedTensorMap(View(0, 2, (64, 64), (128, 2)), (64, 64))
    tensor_map.move(16)
    with pytest.raises(KeyboardInterrupt):
        tensor_map.move(32)
    tensor_map.move(16)
    assert made == [16, 16]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("view", [View(0, 4, (3,), (4,)), View(0, 2, (3, 5), (10, 2))])
def test_arrays_of_another_kind(monkeypatch, view):
    with pytest.raises(TypeError, match=r"kernel, argument 0: .* expected 2 axes of 4 bytes"):
        launches(monkeypatch, (At("x", view),), [("array", 2, 4)], [])


def test_numbers_of_another_kind(monkeypatch):
    with pytest.raises(TypeError, match="argument 0: scale is float32, the signature says float64"):
        launches(monkeypatch, ("scale",), [("float64",)], [])


@pytest.mark.parametrize("blocks", [0, 2**31])
def test_number_of_blocks(blocks):
    with pytest.raises(ValueError, match=f"kernel: got {blocks} blocks, allowed 1 to 2147483647"):
        launching.Config.of(blocks, SimpleNamespace(name="kernel"))


# ---------------------------------------------------------------------------------------------------------- with a GPU
@pytest.mark.gpu
def test_launch():
    y, expected = scale(cupy.arange(1000, dtype="f"))
    cupy.testing.assert_array_equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_numbers_that_do_not_fit(number):
    out, matrix = cupy.zeros(8), cupy.zeros((3, 2), "f")
    with pytest.raises(launching.struct.error):
        launch("numbers", 1, out, 0, matrix, number, 0, 0, 0, 0.0, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5), (2, 0)])
def test_a_pair_shares_memory(shape):
    x, y = current_gpu().pair(shape, np.dtype("f"))
    assert x.data.mem is y.data.mem
    assert y.data.ptr % 16 == 0
    x[...], y[...] = 1, 2
    assert (x == 1).all()
    assert (y == 2).all()


@pytest.mark.gpu
def test_kernels_are_loaded_once():
    device = current_gpu().index
    assert get_kernel(key_of("scale"), device) is get_kernel(key_of("scale"), device)
    assert get_kernel(key_of("scale"), device) is not get_kernel(key_of("scale", times=2), device)


@pytest.mark.gpu
def test_every_kind_of_argument():
    out = cupy.full(10, cupy.nan)
    matrix = cupy.arange(24, dtype="f").reshape(4, 6)[::-1, 1:5]
    values = -(2**31), 2**32 - 1, -(2**62), 2**63, 1 / 3, 1 / 3
    launch("numbers", 1, out, 2, matrix, *values)
    expected = [*values[:4], np.float32(1 / 3), 1 / 3, *matrix[2].get()]
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.gpu
def test_many_blocks_along_x():
    y, expected = scale(cupy.ones(64 * 70_000, "f"))
    assert (y == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [12 * 1024, 16 * 1024, None], ids=["48 KB", "64 KB", "all there is"])
def test_shared_memory(size):
    size = size or current_gpu().device.shared // 4
    if 4 * size > current_gpu().device.shared:
        pytest.skip(f"this GPU gives a block {current_gpu().device.shared} bytes")
    x, y = cupy.arange(size, dtype="f"), cupy.full(size, cupy.nan, "f")
    launch("reverse", 1, x, y, size=size)
    cupy.testing.assert_array_equal(y, x[::-1])


@pytest.mark.gpu
def test_too_much_shared_memory():
    shared = current_gpu().device.shared
    with pytest.raises(RuntimeError, match=f"reverse: {shared + 4} bytes of shared memory"):
        get_kernel(key_of("reverse", size=shared // 4 + 1), current_gpu().index)


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
    run_scale = Launch("scale", 1, view_of(x), view_of(y), 2.0)
    cupy.cuda.Device().synchronize()
    errors = []

    def run():
        try:
            run_scale(x, y)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert (y == 4).all()


@pytest.mark.gpu
def test_graph_capture():
    x, y = cupy.arange(1000, dtype="f"), cupy.full(1000, cupy.nan, "f")
    with own_stream() as stream:
        _, graph = capture(lambda: launch("scale", 16, x, y, 3.0, times=5))
    assert cupy.isnan(y).all()
    for _ in range(2):
        x += 1
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        cupy.testing.assert_array_equal(y, 30 * x)


def needs_hopper():
    if current_gpu().device.cc < (9, 0):
        pytest.skip("tensor maps and overlapping kernels need compute capability 9.0")


@pytest.mark.gpu
def test_tensor_map():
    matrix, y = cupy.arange(40 * 100, dtype="f").reshape(40, 100), cupy.full((8, 32), cupy.nan, "f")
    needs_hopper()
    launch("box", 1, y, matrix, 8, 64, rows=8, columns=32)
    cupy.testing.assert_array_equal(y, matrix[8:16, 64:96])
    launch("box", 1, y, matrix, 36, 96, rows=8, columns=32)  # what lies outside is zero
    expected = np.zeros((8, 32), "f")
    expected[:4, :4] = matrix[36:, 96:].get()
    np.testing.assert_array_equal(y.get(), expected)


@pytest.mark.gpu
def test_one_launch_for_matrices_at_many_addresses():
    matrices, y, copy_box = many_matrices()
    for matrix in (*matrices, *matrices[::-1]):
        copy_box(y, matrix)
        cupy.testing.assert_array_equal(y, matrix[8:16, 64:96])


def many_matrices():
    """Matrices, a result, and a launch that copies a box of any of them there."""
    needs_hopper()
    matrices = cupy.arange(5 * 40 * 100, dtype="f").reshape(5, 40, 100)
    y = cupy.full((8, 32), cupy.nan, "f")
    return matrices, y, Launch("box", 1, view_of(y), view_of(matrices[0]), 8, 64, rows=8, columns=32)


@pytest.mark.gpu
def test_kernels_that_overlap_see_what_those_before_have_written():
    needs_hopper()
    blocks, rounds = 1000, 50
    x, y = cupy.arange(32 * blocks, dtype="i4"), cupy.full(32 * blocks, -1, "i4")
    run_shift = Launch("shift", blocks, view_of(x), view_of(y))
    for _ in range(rounds):
        run_shift(x, y)
        run_shift(y, x)
    np.testing.assert_array_equal(x.get(), np.roll(np.arange(32 * blocks), -2 * rounds) + 2 * rounds)


@pytest.mark.gpu
def test_a_graph_has_its_own_tensor_maps():
    matrices, y, copy_box = many_matrices()
    with own_stream() as stream:
        _, graph = capture(lambda: copy_box(y, matrices[0]))
        for matrix in matrices[1:]:  # give the tensor map another address
            copy_box(y, matrix)
    graph.launch(stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(y, matrices[0, 8:16, 64:96])


@pytest.mark.gpu
def test_a_program_keeps_no_memory():
    matrices, y, copy_box = many_matrices()
    copy_box(y, matrices[0])
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes()
    del matrices
    gc.collect()
    assert pool.used_bytes() < used


@pytest.mark.gpu
def test_threads_have_launches_of_their_own():
    """Of one program: each with a stream, at the same time, first calls among them."""
    failed = []
    views = [view_of(cupy.zeros(64 * 100, "f"))] * 2
    run_scale = Launch("scale", 100, *views, 1.0)
    cupy.cuda.Device().synchronize()

    def run(number):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for i in range(200):
                x, y = cupy.full(6400, number + i, "f"), cupy.zeros(6400, "f")
                run_scale(x, y)
                if not bool((y == 2 * (number + i)).all()):
                    failed.append((number, i))
            stream.synchronize()

    threads = [threading.Thread(target=run, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


FAULTS = {
    "addresses[i] + pointer for i, pointer": "addresses[i] for i, pointer",
    "config.stream = stream": "pass",
    "if numbers is not self.numbers:": "if self.numbers is None:",
    "self.numbers = None  #": "pass  #",
    "class Program(threading.local)": "class Program",
    "offset += -offset % size": "pass",
    "if kind != expected": "if False",
    "(0, 0, math.prod(view.shape), itemsize)": "(0, 0, itemsize, math.prod(view.shape))",
    "if not 0 < grid[0] <= LARGEST_GRID or": "if grid[0] > LARGEST_GRID or",
}

"""Tiles of kernels over pairs of points, and for which sizes these are compiled."""

import pytest

from numbattn.cuda.kernels.points import gradient, sums
from numbattn.cuda.kernels.points.arguments import X_NORMS, Y_NORMS, sizes_of
from numbattn.cuda.plan.planner import DEVICES
from numbattn.points.kinds import DIFFERENCES, GAUSSIAN
from tests.cuda.works import work
from tests.tools.launch import simulated_only

pytestmark = simulated_only  # nothing runs


def of_points(dtype, d, e, device):
    found = work(dtype, d, e, device=device)
    norms = dict.fromkeys([X_NORMS, Y_NORMS], found.problem.sum_dtype) if d > DIFFERENCES else {}
    return found._replace(kind=GAUSSIAN, dtypes=found.dtypes | norms)


@pytest.mark.parametrize("cc", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kernel", [sums, gradient])
def test_each_gpu_has_room_for_some(cc, dtype, kernel):
    for d, e in ((1, 1), (8, 4), (8, 256), (256, 4), (256, 256)):
        assert kernel.SPEC.fitting(of_points(dtype, d, e, DEVICES[cc])) is not None


@pytest.mark.parametrize(("sizes", "compiled"), [
    ((3, 1), (3, 1)), ((8, 4), (8, 4)), ((9, 5), (16, 16)), ((17, 100), (32, 128)),
])  # fmt: skip
def test_sizes(sizes, compiled):
    """Few are compiled as they are."""
    assert sizes_of(of_points("float32", *sizes, DEVICES[9, 0]).problem) == compiled


def test_rows_are_for_sizes_up_to_theirs():
    found = [sums.SPEC.fitting(of_points("float32", d, 1, DEVICES[9, 0])) for d in (33, 64, 65)]
    rows = sums.TILES[False, True, 4]
    assert found == [rows[64], rows[64], rows[128]]


def test_few_of_both_are_for_cuda_cores():
    first = sums.SPEC.fitting(of_points("float32", 8, 4, DEVICES[9, 0]))
    assert (first.unit, sums.SPEC.fitting(of_points("float32", 9, 4, DEVICES[9, 0])).unit) == ("fma", "mma")
    assert sums.SPEC.fitting(of_points("float32", 9, 4, DEVICES[7, 5])).unit == "fma"


FAULTS = {
    '    PointTiles("fma", 4, 8, 32, lanes=8, stages=1),\n': "",
    "if size <= most else SMALLEST": "if size < most else SMALLEST",
    "has_tensor_cores(work.device) and not all(few)": "not all(few)",
    "if size <= largest": "if size < largest",
}

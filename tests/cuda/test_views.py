import numpy as np
import pytest

from numbattn.cuda.tile.alignment import ArrayLayout, layout_of
from numbattn.cuda.views import View, broadcast, contiguous, fits_tensor_map, for_tensor_map, pieces
from tests.tools.device import Memory


def view(x):
    return View(x.ctypes.data, x.itemsize, x.shape, x.strides)


def array(view, dtype=np.float64):
    return np.asarray(Memory(view, np.dtype(dtype)))


@pytest.mark.parametrize("shape", [(5, 3), (4, 5, 3), (1, 4, 5, 3), (2, 1, 5, 3), (1, 1, 1, 5, 3)])
def test_broadcast_is_numpys(rng, shape):
    x = rng.standard_normal(shape)
    batch = (2, 4) if len(shape) < 5 else (7, 2, 4)
    np.testing.assert_array_equal(array(broadcast(view(x), batch)), np.broadcast_to(x, (*batch, 5, 3)))


def test_lines_are_broadcast_before_their_last_axis(rng):
    x = rng.standard_normal((2, 1, 5))
    np.testing.assert_array_equal(array(broadcast(view(x), (2, 4), own=1)), np.broadcast_to(x, (2, 4, 5)))


def test_numbers_are_broadcast_as_arrays_without_axes_of_their_own(rng):
    x = rng.standard_normal((2, 1))
    np.testing.assert_array_equal(array(broadcast(view(x), (2, 4), own=0)), np.broadcast_to(x, (2, 4)))


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 5), (2, 0, 5)])
def test_new_arrays_are_contiguous(shape):
    x = np.zeros(shape, np.float32)
    assert contiguous(shape, x.dtype) == ArrayLayout(x.shape, x.strides, x.dtype) or not x.size


@pytest.mark.parametrize(("lead", "others", "count"), [
    ((6,), [(1,)], 1),
    ((2, 3), [(1, 1)], 1),                      # broadcast alike over both axes: still one
    ((2, 3), [(1, 3)], 2),
    ((2, 3), [(2, 1)], 2),
    ((2, 3, 4), [(2, 3, 1)], 6),
    ((2, 3, 4), [(1, 3, 4), (1, 1, 4)], 6),
    ((2, 3, 4), [(2, 1, 1)], 2),
    ((2, 1, 4), [(2, 1, 4)], 1),
    ((0, 4), [(1, 4)], 0),
])  # fmt: skip
def test_pieces_together_are_the_whole(rng, lead, others, count):
    arrays = [rng.standard_normal((*shape, 2, 5, 3)) for shape in (lead, *others)]
    views = [broadcast(view(x), (*lead, 2)) for x in arrays]
    found = pieces(lead, [*views, "as it is"])
    assert len(found) == count
    assert all(piece.views[-1] == "as it is" for piece in found)
    for i, x in enumerate(arrays):
        whole = np.broadcast_to(x, (*lead, 2, 5, 3)).reshape(-1, 2, 5, 3)
        for piece in found:
            np.testing.assert_array_equal(array(piece.views[i]), whole[piece.first : piece.first + piece.batch])
    assert sum(piece.batch for piece in found) == np.prod(lead)


@pytest.mark.parametrize(("make", "fits"), [
    (lambda x: x, True),
    (lambda x: x.swapaxes(0, 1), True),
    (lambda x: x[:, :, ::2], True),
    (lambda x: x[..., 8:], True),
    (lambda x: x[..., 4:], False),                          # rows start at 8 bytes
    (lambda x: x[..., :20], False),                         # and end there
    (lambda x: x[::-1], False),
    (lambda x: x[:, :1][::-1, ::-1][:1], True),             # axes of one element, backwards
    (lambda x: x[..., ::2], False),
])  # fmt: skip
def test_what_fits_a_tensor_map(make, fits):
    x = make(np.zeros((2, 3, 6, 64), np.float16))
    assert fits_tensor_map(layout_of(x, x.ctypes.data)) == fits


def test_axes_of_one_get_strides_that_a_tensor_map_takes():
    x = np.zeros((2, 8, 68), np.float16)[:, :1, :64]
    assert for_tensor_map(view(x)).strides == (1088, 128, 2)
    assert (array(for_tensor_map(view(x)), np.float16) == x).all()


FAULTS = {
    "0 if n == 1 else stride": "stride",
    "stride < 0 for stride, n": "False for stride, n",
    "zip(layout.strides, layout.shape) if n > 1": "zip(layout.strides, layout.shape)",
    "number * batch, batch, piece": "number, batch, piece",
}

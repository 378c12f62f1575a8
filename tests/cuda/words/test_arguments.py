"""What kernels are given of arrays: as far as these count, with the strides of what is made for a call."""

import numpy as np
import pytest

import numbattn as na
from numbattn.call.passes import BEFORE, FORWARD
from numbattn.call.problem import describe
from numbattn.cuda.kernels import ROUTES
from numbattn.cuda.passes import plans
from numbattn.cuda.plan.planner import DEVICES, plan
from numbattn.cuda.views import contiguous
from numbattn.cuda.words.steps import SCRAP, At, LoweredCall, LoweredMask
from tests.cuda.works import HOPPER, array

AMPERE, Q = DEVICES[8, 0], array(2, 8, 1000, 64)
MASK = LoweredMask(None, 1000, 1000)
KEYS = array(2, 8, 300, 64)


def views(step, name):
    return [x.view for x in step.arguments if isinstance(x, At) and x.array == name]


def rows(planned, name):
    """Of how many rows each kernel is given the array."""
    return {step.key.name: {view.shape[2] for view in found} for step in planned.steps if (found := views(step, name))}


@pytest.mark.parametrize(("mask", "queries", "keys"), [
    (na.Lengths(300), 1000, 300), (na.Lengths(0), 1000, 1), (na.Lengths(700, queries=20), 20, 700),
    (na.Causal(), 1000, 1000),
], ids=str)  # fmt: skip
def test_tensor_maps_end_where_nothing_is_seen(mask, queries, keys):
    """Since there may be NaN; an empty one there cannot be. Results have all rows, and so has what no kernel moves by
    TMA."""
    forward, backward = plans(HOPPER, Q, Q, Q, mask=mask)
    assert rows(forward, "q")["hopper_forward"] == {queries}
    assert rows(forward, "k")["hopper_forward"] == rows(forward, "v")["hopper_forward"] == {keys}
    assert rows(forward, "o")["hopper_forward"] == rows(forward, "lse")["hopper_forward"] == {1000}
    assert rows(backward, "do") == {"delta": {1000}, "hopper_backward_kv": {queries}}
    assert rows(backward, "dk") == rows(backward, "dv") == {"hopper_backward_kv": {1000}}
    older, _ = plans(AMPERE, Q, Q, Q, mask=mask)
    assert {*map(str, rows(older, "k").values())} == {"{1000}"}


def test_statistics_are_padded_for_kernels_that_copy_their_tiles():
    _, backward = plans(HOPPER, Q, KEYS, KEYS)
    assert rows(backward, "lse") == {"delta": {1000}}
    assert rows(backward, "lse_log2") == rows(backward, "delta") == {"delta": {1024}, "hopper_backward_kv": {1024}}
    (step, *_) = backward.steps
    assert views(step, "delta")[0].strides == (8 * 1024 * 4, 1024 * 4, 4)
    _, backward = plans(AMPERE, Q, KEYS, KEYS, score=na.Bias(array(8, 1000, 300)))
    assert rows(backward, "delta")["bias_gradient"] == {1000}  # which loads what counts


def test_what_is_stored_where_a_segment_ends_in_a_tile():
    """By other means than TMA: the same array once more, where arrays are packed."""
    for mask, times in ((None, 1), (na.Segments(np.array([0, 300, 1000])), 2)):
        forward, _ = plans(HOPPER, Q, Q, Q, mask=mask)
        assert len(views(forward.steps[0], "o")) == times


@pytest.mark.parametrize(("head_dim", "features"), [(8, 64), (64, 64), (65, 128), (128, 128)])
def test_sums_of_a_matrix_have_whole_tiles(head_dim, features):
    q = array(2, 8, 1000, head_dim)
    _, backward = plans(AMPERE, q, q, q)
    (sums,) = (x for x in backward.temporaries if x.name == "sums of dq")
    assert (sums.shape, sums.dtype, sums.is_zero) == ((2, 8, 1024 * features), np.float32, True)


@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=str)
def test_what_a_call_goes_on_from_is_taken_where_there_is_some(device):
    problem, _ = describe(Q, Q, Q)
    layouts = dict.fromkeys("qkvo", contiguous(Q.shape, Q.dtype)) | {"lse": contiguous((2, 8, 1000), np.dtype("f4"))}
    before = {BEFORE: contiguous(Q.shape, np.dtype(np.float32))}
    for others, found in (({}, 0), (before, 1)):
        planned = plan(FORWARD, ROUTES["forward"], problem, device, LoweredCall(layouts | others, MASK))
        assert len(views(planned.steps[0], BEFORE)) == found


@pytest.mark.parametrize(("seqlen", "is_scrapped"), [(1000, True), (1 << 18, True), ((1 << 18) + 1, False)])
def test_lse_that_nobody_wants_goes_to_scrap_memory_if_it_fits(seqlen, is_scrapped):
    """One row for all heads."""
    q = array(2, 8, seqlen, 64)
    problem, _ = describe(q, q, q)
    layouts = dict.fromkeys("qkvo", contiguous(q.shape, q.dtype))
    found = plan(FORWARD, ROUTES["forward"], problem, AMPERE, LoweredCall(layouts, LoweredMask(None, seqlen, seqlen)))
    assert [x.name for x in found.temporaries] == ([] if is_scrapped else ["lse"])
    (step,) = found.steps
    assert [view.strides[:2] for view in views(step, SCRAP)] == [(0, 0)] * is_scrapped


FAULTS = {
    "<= SCRAP_BYTES": ">= SCRAP_BYTES",
    "self.name in inputs else None": "else None",
    "return None if last is None else max(last, 1)": "return last",
    "rows=None if self.padded else work.problem.seqlen_q": "rows=None",
    "shape = *shape[:-1], halves * work.padded_length": "pass",
    "max(64, -(-work.problem.head_dim // 64) * 64)": "work.problem.head_dim",
    "contiguous(shape[-1:], dtype)": "contiguous(shape, dtype)",
    "        if BEFORE in planner.layouts:\n            yield": "        if False:\n            yield",
    "        if work.segments:\n            yield": "        if False:\n            yield",
    "cuda/plan/test_planner.py::test_what_is_not_aligned_is_copied_for_cp_async": {
        '16 bytes."""\n\n    aligned = True\n': '16 bytes."""\n\n    aligned = False\n',
    },
}

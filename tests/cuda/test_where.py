"""States of the blocks of a mask function, by the kernel."""

import numpy as np
import pytest

import numbattn as na
from numbattn import reference
from numbattn.base.origin import Origin
from numbattn.cpu.where import _states
from numbattn.cuda import passes, where
from tests.accuracy import random
from tests.tools.device import AMPERE, GPU, HOPPER, execute, on
from tests.tools.launch import mostly_simulated, world_of

from ..masks.test_where import DOCUMENTS, REACH, same_document, striped, within

MASKS = {
    "striped": na.Where(striped)._fit((2, 3, 70, 150)),
    "documents": na.Where(same_document, [DOCUMENTS[::-1][::-1]])._fit((70, 150)),
    "by head": na.Where(within, [REACH])._fit((2, 3, 40, 70)),
    "floats": na.Where(lambda batch, head, i, j: i / 3 < j / 7 + 0.1)._fit((1, 1, 50, 50)),
    "halves": na.Where(lambda batch, head, i, j: j < 40)._fit((1, 1, 50, 100)),
    "no elements": na.Where(striped)._fit((2, 3, 0, 150)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[mostly_simulated] * (name not in ("by head", "floats"))) for name in MASKS
])  # fmt: skip
@pytest.mark.parametrize("size", [16, 50])
def test_states(world, name, size):
    mask = MASKS[name]
    got = where.states(GPU(AMPERE), mask, size)
    np.testing.assert_array_equal(got, _states(mask, size))


def test_parts_count_from_their_first_element(world):
    mask, gpu = na.Where(within, [REACH]), GPU(AMPERE)
    whole = mask.dense(9, 99, heads=3)
    part = mask._with(_at=mask._at._replace(query=2, key=90, head=1))._fit((1, 2, 5, 9))
    np.testing.assert_array_equal(where.shown_by_function(gpu, part), whole[:, 1:, 2:7, 90:])


@pytest.mark.parametrize(("device", "world"), [
    pytest.param(AMPERE, "compiled", id="ampere", marks=pytest.mark.slow),
    pytest.param(HOPPER, "simulated", id="hopper"),
])  # fmt: skip
def test_states_are_kept_for_a_device(rng, device, world, monkeypatch):
    """And what calls compute with them is right."""
    found, states = [], where.states
    monkeypatch.setattr(passes, "states", lambda gpu, mask: found.append(gpu) or states(gpu, mask))
    q, k, v = (random(rng, (1, 2, n, 16), np.float16) for n in (40, 70, 70))
    mask = na.Where(within, [REACH], block_size=24)._with(_at=Origin(query=4, key=90, head=1))
    with world_of(world), on(device):
        o, saved = na.attention_forward(q, k, v, mask=mask)
        grads = na.attention_backward(q, saved)
        assert len(found) == 1
    want, saved = na.attention_forward(q, k, v, mask=mask)
    for x, y in zip((o, *grads), (want, *na.attention_backward(q, saved))):
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=1e-2, atol=5e-3)


@pytest.mark.slow
def test_a_single_thread_finds_the_tiles_of_queries(rng):
    """The producer of Hopper's backward pass, interpreted; each consumer looks up the states of its own keys."""

    def run(key, *launched):
        with world_of("compiled" if key.name.startswith("hopper") else "simulated"):
            execute(key, *launched)

    (q, do), (k, v) = (random(rng, (2, 1, 1, n, 8), np.float16) for n in (128, 128))
    mask = na.Where(lambda batch, head, i, j: j < 64 or (i + j) % 3 == 0)
    o, lse = reference.attention_forward(q, k, v, mask=mask)
    with on(HOPPER, run):
        found = na.attention_backward(do, na.Saved.of(q, k, v, o.astype(q.dtype), lse.astype("f4"), mask=mask))
    for got, want in zip(found, reference.attention_backward(do, q, k, v, mask=mask)):
        np.testing.assert_allclose(got, want, atol=4e-3 * abs(want).max())


FAULTS = {
    "test_a_single_thread_finds_the_tiles_of_queries": {
        "cuda/kernels/shared/query_tiles.py": {"warpgroup_index if by_consumer": "warpgroup_index if False"},
    },
    "cuda/kernels/any/function_states.py": {
        "test_states[simulated-50-striped]": {
            "shown, hidden = ballot(some), ballot(not every)": "shown, hidden = ballot(some), ballot(not some)",
        },
        "test_states[simulated-50-halves]": {
            "if ballot(some) == 0 or ballot(not every) == 0": "if ballot(some) == 0",
            "for n in range(n0, n_end, WARP)": "for n in range(n0, n_end, 2 * WARP)",
        },
    },
    "cuda/kernels/shared/visibility/function.py": {
        "test_parts_count_from_their_first_element": {
            "counting(at.head + head)": "counting(head)",
        },
        "test_states_are_kept_for_a_device[ampere]": {
            "return at.query, at.key, at.query + function": "return at.key, at.query, at.query + function",
            "def of_rows(i, j, batch": "def of_rows(j, i, batch",
        },
    },
}

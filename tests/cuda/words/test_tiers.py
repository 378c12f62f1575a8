"""Kernels of an older tier, where they are asked for."""

import numpy as np
import pytest

import numbattn as na
from numbattn.cuda.passes import plans
from numbattn.cuda.plan import tier
from numbattn.cuda.plan.planner import DEVICES
from tests.cuda.works import array, kernels
from tests.tools.device import AMPERE, HOPPER, on

Q = array(2, 8, 1000, 64)
BIAS = {"score": na.Bias(np.zeros((1000, 1000), np.float16))}
OLDER = ["delta", "mma_backward", "round_dq"]


def names(device, **options):
    return [kernels(planned) for planned in plans(device, Q, Q, Q, **options)]


def test_hopper_by_mma():
    with tier("mma"):
        assert names(HOPPER) == names(AMPERE) == [["mma_forward"], OLDER]
        assert names(HOPPER, **BIAS) == [["mma_forward"], [*OLDER, "bias_gradient", "sum_parts"]]
    assert names(HOPPER) == [["hopper_forward"], ["delta", "hopper_backward_kv", "round_dq"]]
    assert names(HOPPER, **BIAS)[1][-2:] == ["hopper_bias_gradient", "sum_parts"]


@pytest.mark.parametrize("device", [x for x in DEVICES.values() if x != HOPPER], ids=str)
def test_where_there_is_no_later_one_nothing_changes(device):
    usual = names(device)
    for name in "mma", "wgmma":
        with tier(name):
            assert names(device) == usual


def test_each_tier_has_plans_of_its_own():
    """A call looks up its plan by what it depends on."""
    launched, q = [], np.zeros((1, 1, 64, 64), np.float16)
    with on(HOPPER, lambda key, *rest: launched.append(key.name)):
        na.attention(q, q, q)
        with tier("mma"):
            na.attention(q, q, q)
        na.attention(q, q, q)
    assert launched == ["hopper_forward", "mma_forward", "hopper_forward"]


def test_it_ends_where_an_error_does():
    with pytest.raises(KeyError), tier("mma"):
        raise KeyError
    assert names(HOPPER)[0] == ["hopper_forward"]


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="tier: got 'tcgen05', expected one of mma, wgmma"), tier("tcgen05"):
        pass


FAULTS = {
    "latest.reset(token)": "pass",
    "TIERS.index(name) <=": "TIERS.index(name) >=",
    "not name or": "name and",
    "if name not in TIERS": "if False",
}

"""Kernels that are found on the disk by what made them."""

import numpy as np
import pytest

from numbattn.cuda import build
from numbattn.cuda.kernel import kernel_factory, plan_of
from numbattn.cuda.tile import block_index
from tests.cuda.works import HOPPER


@kernel_factory
def adding(dtype, many):
    ONE = np.dtype(dtype).type(many[0])

    def kernel(x):
        x[block_index()] += ONE

    return kernel


def key_of(dtype, *many, x=None):
    (step,) = plan_of(HOPPER, adding(np.dtype(dtype), many), (1, 1, 1), 32, 0, (np.zeros(3, x or dtype),)).steps
    return step.key


def test_a_kernel_is_made_once():
    assert adding(np.dtype(np.float32), (1,)) is adding(np.dtype(np.float32), (1,))


def test_one_that_is_on_the_disk_is_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    first = build.build(key_of(np.float32, 1, 2))
    monkeypatch.setattr(build, "compile_ptx", lambda *_: pytest.fail("compiled again"))
    assert build.build(key_of(np.float32, 1, 2)) == first


def test_others_are_others():
    keys = [key_of(np.float32, 1), key_of(np.float32, 2), key_of(np.float64, 1), key_of(np.float32, 1, x=np.int32)]
    assert len(set(map(build.digest_of, keys))) == len(keys)


def test_what_differs_between_processes_is_refused():
    with pytest.raises(TypeError, match=r"kernel_factory: got .*, allowed None"):
        adding(np.dtype(np.float32), (1, object()))


FAULTS = {
    "cuda/kernel.py": {
        "    @cache\n    @wraps(make)": "    @wraps(make)",
        "plain(arguments)\n": "()\n",
        "return x.name if": "return 'x' if",
        'check_plain("kernel_factory", kernel.made_by)': "pass",
    },
    "cuda/build.py": {
        "and not key.made_by:": "",
        "self.made_by, str(made.signature)": "self.made_by, ''",
    },
}

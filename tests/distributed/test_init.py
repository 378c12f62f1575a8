import inspect
import re

import pytest

import numbattn as na
from numbattn import distributed as nad


def test_public_names():
    assert sorted(nad.__all__) == [
        "Deadlock", "Devices", "Interrupted", "Mpi", "Nccl", "Ring", "Saved", "Simulated", "attention",
        "attention_backward", "attention_forward", "attention_over_keys", "attention_vjp",
    ]  # fmt: skip
    assert all(hasattr(nad, name) for name in nad.__all__)


@pytest.mark.parametrize("name", [name for name in nad.__all__ if name.startswith("attention")])
def test_docstrings_are_whole(name):
    function = getattr(nad, name)
    assert not re.search(r"\w -----", function.__doc__), "a heading and its line are one line"
    sections = re.findall(r"^ *(\w+)\n *-+$", function.__doc__, re.M)
    assert [section for section in sections if section != "Notes"] == ["Parameters", "Returns", "Raises", "Examples"]
    described = re.search(r"Parameters\n *-+\n(.*?)\n *Returns", function.__doc__, re.S)[1]
    assert set(inspect.signature(function).parameters) <= set(re.findall(r"\w+", described))


def test_second_derivatives_are_not_there_yet():
    for name in set(na.__all__) - set(nad.__all__):
        if name.startswith("attention") and name.endswith(("jvp", "backward_vjp", "laplacian")):
            with pytest.raises(AttributeError, match=f"no {name} yet: .* numbattn.{name} takes whole arrays"):
                getattr(nad, name)
    with pytest.raises(AttributeError, match=r"module 'numbattn.distributed' has no attribute 'attend'"):
        nad.attend  # noqa: B018

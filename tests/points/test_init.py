"""What the package shows."""

import inspect
import re
from operator import attrgetter

import pytest

from numbattn import points

FUNCTIONS = (
    "cross_entropy", "cross_entropy_vjp", "kmeans_step", "log_determinant", "log_determinant_vjp", "logsumexp",
    "logsumexp_jvp", "logsumexp_vjp", "nearest", "operator", "product", "product_jvp", "product_vjp", "sinkhorn",
    "sinkhorn_vjp", "solve", "solve_vjp",
)  # fmt: skip


def test_public_names():
    assert points.__all__ == [
        "KL", "TV", "Cauchy", "Cosine", "Cost", "Gaussian", "KMeansStep", "Kernel", "Laplacian", "Linear",
        "LogDeterminantGradients", "LogsumexpBackprop", "LogsumexpGradients", "Matern", "PairCost", "Periodic",
        "Polynomial", "ProductBackprop", "ProductGradients", "Radial", "RationalQuadratic", "SinkhornBackprop",
        "SinkhornGradients", "Solution", "SolveGradients", "Transport", *FUNCTIONS,
    ]  # fmt: skip
    for name in points.__all__:
        assert hasattr(points, name)


@pytest.mark.parametrize("name", [*FUNCTIONS, "LogsumexpBackprop.hvp", "ProductBackprop.hvp", "SinkhornBackprop.hvp"])
def test_docstrings_are_whole(name):
    function = attrgetter(name)(points)
    assert not re.search(r"\w -----", function.__doc__), "a heading and its line are one line"
    sections = re.findall(r"^ *(\w+)\n *-+$", function.__doc__, re.M)
    wanted = ["Parameters", "Returns", "Raises", "Examples"]
    assert [section for section in sections if section not in ("Notes", "Warns")] == wanted
    described = re.search(r"Parameters\n *-+\n(.*?)\n *Returns", function.__doc__, re.S)[1]
    names = re.findall(r"^ *(\w+(?:, \w+)*)(?: : .*)?$", described, re.M)
    assert {*inspect.signature(function).parameters} - {"self"} <= set(re.findall(r"\w+", " ".join(names)))


@pytest.mark.parametrize("name", ["Gaussian", "Matern", "Polynomial", "Cost", "Radial", "KL", "TV"])
def test_kernels_show_nothing_internal(name):
    public = {attribute for attribute in dir(getattr(points, name)) if not attribute.startswith("_")}
    assert public <= {"length", "nu", "degree", "offset", "power", "epsilon", "function", "rho", "on", "period"}

"""GeomLoss' own tests of transport: between points, and by matrices of costs, which are functions of pairs here."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from .suites import check, checkout, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("geomloss") and find_spec("pytest_check")), reason="geomloss is not installed"),
]
FILES = {"test_ot_solve_sample": 1, "test_ot_solve_matrix": 7}  # and how many tests are in each


@pytest.mark.parametrize("name", FILES)
def test_transport(name, count):
    tests = checkout("jeanfeydy/geomloss", f"tests/{name}.py")
    found = run("geomloss", tests, "--import-mode=importlib")
    check(count, "GeomLoss", f"geomloss {version('geomloss')}", found, at_least=FILES[name])

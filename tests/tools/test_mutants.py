import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..conftest import deselected
from .mutants import MUTANTS, ROOT, Mutant, mirrored, mutants_of


def test_files_that_are_mirrored():
    assert mirrored(Path("tests/masks/test_tail.py")) == Path("numbattn/masks/tail.py")
    assert mirrored(Path("tests/cuda/tile/test_init.py")) == Path("numbattn/cuda/tile/__init__.py")
    assert mirrored(Path("tests/test_main.py")) == Path("numbattn/__main__.py")


def test_what_keys_of_faults_say():
    faults = {
        "x.py": "y.py",
        "test_own[.py]": {"a": "b"},
        ("test_own", "cuda/test_passes.py::test_masks"): {"c": "d"},
        "masks/tail.py": {"e": "f", "masks/test_calls.py": {"g": "h"}},
    }
    own = "tests/masks/test_bands.py"
    assert [*mutants_of(faults, Path("numbattn/masks/bands.py"), (own,), own)] == [
        Mutant("numbattn/masks/bands.py", "x.py", "y.py", (own,)),
        Mutant("numbattn/masks/bands.py", "a", "b", (f"{own}::test_own[.py]",)),
        Mutant("numbattn/masks/bands.py", "c", "d", (f"{own}::test_own", "tests/cuda/test_passes.py::test_masks")),
        Mutant("numbattn/masks/tail.py", "e", "f", (own,)),
        Mutant("numbattn/masks/tail.py", "g", "h", ("tests/masks/test_calls.py",)),
    ]


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_faults_can_be_planted(file):
    """Faults follow the code."""
    text = (ROOT / file).read_text()
    for mutant in MUTANTS:
        assert mutant.file != file or text.count(mutant.original) == 1, mutant


def can_be_collected(test):
    """Those of a framework that is not installed cannot."""
    framework = re.match(r"tests/interop/(?:test|in)_(jax|torch|autograd|thinc|transformers)", test)
    return not framework or find_spec(framework[1])


def test_the_tests_that_are_named_exist(request):
    named = {test for mutant in MUTANTS for test in mutant.tests if can_be_collected(test)}
    for item in [*request.session.items, *deselected]:  # those of other files are looked for
        file, _, test = item.nodeid.partition("::")
        named -= {file, f"{file}::{test.partition('[')[0]}", item.nodeid}
    pytest_ = sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "-p", "no:cacheprovider"
    done = subprocess.run([*pytest_, __file__, *sorted(named)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]

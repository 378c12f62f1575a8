import subprocess
import sys

import pytest

from .mutants import MUTANTS, ROOT


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_faults_can_be_planted(file):
    """The table follows the code."""
    text = (ROOT / file).read_text()
    for mutant in MUTANTS:
        assert mutant.file != file or text.count(mutant.original) == 1, mutant


def test_the_tests_that_are_named_exist():
    named = sorted({test for mutant in MUTANTS for test in mutant.tests})
    pytest_ = sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "-p", "no:cacheprovider"
    done = subprocess.run([*pytest_, *named], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]

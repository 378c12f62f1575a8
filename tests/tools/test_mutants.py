import pytest

from .mutants import MUTANTS, ROOT


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_faults_can_be_planted(file):
    """The table follows the code."""
    text = (ROOT / file).read_text()
    for mutant in MUTANTS:
        assert mutant.file != file or text.count(mutant.original) == 1, mutant

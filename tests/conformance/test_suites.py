import pytest

from .suites import run


def test_what_pytest_does_not_finish_does_not_pass(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text("import pytest\ndef test_one(): pass\ndef test_two(): pytest.exit('', 3)\n")
    with pytest.raises(AssertionError, match="Exit"):
        run("__init__", tests)

import pytest


@pytest.fixture
def count(record_property):
    """Keeps how many tests of a suite passed, failed and were skipped, for bench/conformance.py."""

    def count(suite, package, counts, device="CPU"):
        record_property("conformance", {"suite": suite, "package": package, "device": device, **counts._asdict()})

    return count

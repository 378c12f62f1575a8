"""Tests of other projects that numbattn passes: how many of each, on which device.

    python bench/conformance.py --json bench/results/conformance.json
    python bench/conformance.py onnx torch          # these files of tests/conformance alone

Needs the extras test and conformance. NUMBATTN_CHECKOUTS names a folder with checkouts of the repositories whose tests
are in no package (tests/conformance says which), NUMBATTN_SAMPLE how many tests of the largest suites run.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import common
import pytest

COUNTED = "passed", "failed", "skipped"


class Found:
    """A plugin of pytest that keeps what the tests have counted."""

    def __init__(self):
        self.counts, self.broken, self.ends = [], [], ""

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            found = [value for name, value in report.user_properties if name == "conformance"]
            self.counts += found
            self.broken += [report.nodeid] if report.failed and not found else []

    def pytest_terminal_summary(self, terminalreporter):
        parts, _ = terminalreporter.build_summary_stats_line()
        self.ends = ", ".join(text for text, _ in parts)


def rows(counts):
    """One for each suite and device: the sums of what its tests have counted."""
    together = defaultdict(list)
    for one in counts:
        together[one["suite"], one["device"]].append(one)
    return [
        {**{name: ones[0][name] for name in ("suite", "package", "device")},
         **{name: sum(one[name] for one in ones) for name in COUNTED},
         "ends": "; ".join(one["ends"] for one in ones if one["ends"])}
        for ones in together.values()
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="names of files, without test_ (default: all)")
    parser.add_argument("-n", type=int, default=0, help="how many files to run at a time, by pytest-xdist")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    options = parser.parse_args()
    folder, found = common.ROOT / "tests/conformance", Found()
    files = [str(folder / f"test_{name}.py") for name in options.suites] or [str(folder)]
    pytest.main([*files, "-n", str(options.n), "-q", "-rs", "-p", "no:cacheprovider", f"--rootdir={common.ROOT}"], plugins=[found])
    if found.broken:
        sys.exit(f"failed without a count: {', '.join(found.broken)}")
    results = rows(found.counts)
    common.show("Tests of other projects", [{k: v for k, v in row.items() if k != "ends"} for row in results], "g")
    if options.json:
        machine = common.machine("numpy", "numba", "cupy-cuda13x", "torch")
        if any(row["device"] == "GPU" for row in results):
            from peers import gpu  # loads torch

            machine |= {"gpu": gpu()}
        common.save(options.json, {"machine": machine, "ends": found.ends, "suites": results})


if __name__ == "__main__":
    main()

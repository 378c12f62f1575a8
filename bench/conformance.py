"""Tests of other projects that numbattn passes: how many of each, on which device.

    python bench/conformance.py --json bench/results/conformance.json
    python bench/conformance.py onnx torch          # these files of tests/conformance alone

Results of suites that did not run this time stay in the file. Needs the extras test and conformance. NUMBATTN_CHECKOUTS
names a folder with checkouts of the repositories whose tests are in no package (tests/conformance says which),
NUMBATTN_SAMPLE how many tests of the largest suites run.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import common
from tabulate import tabulate

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


def rows(counts, ends, commit):
    """One for each suite and device: the sums of what its tests have counted, and the last line of its pytest."""
    together = defaultdict(list)
    for one in counts:
        together[one["suite"], one["device"]].append(one)
    return [
        {**{name: ones[0][name] for name in ("suite", "package", "device")},
         **{name: sum(one[name] for one in ones) for name in COUNTED},
         "ends": "; ".join(one["ends"] for one in ones if one["ends"]) or ends, "commit": commit}
        for ones in together.values()
    ]  # fmt: skip


def others(path, results):
    """What is in a file of other suites and devices than these."""
    known = {(row["suite"], row["device"]) for row in results}
    before = json.loads(path.read_text())["suites"] if path.exists() else []
    return [row for row in before if (row["suite"], row["device"]) not in known]


def section(results):
    """What the page says."""
    columns = {"suite": "suite", "package": "package", "device": "device", "ends": "last line of pytest",
               "commit": "commit"} | {name: name for name in COUNTED}  # fmt: skip
    shown = [{said: row[name] for name, said in columns.items()} for row in results["suites"]]
    return (
        "The cases are those of the packages, as they are there. What each adapter in `tests/conformance` had to bend, "
        "and what it leaves out, stands at its head. Of FlashAttention and cuDNN's frontend a random sample is run.\n\n"
        f"{tabulate(shown, headers='keys', tablefmt='github')}"
    )


def sentence(results):
    """What the README says."""
    on = defaultdict(list)
    for row in results["suites"]:
        on[row["device"]].append(said(row))
    told = [f"on {'a CPU' if device == 'CPU' else f'an {device}'} {', '.join(ran)}" for device, ran in on.items()]
    return f"Tests of other projects that pass ([more](bench/README.md#tests-of-other-projects)): {'; '.join(told)}."


def said(row):
    whole = row["passed"] + row["failed"]
    return f"{row['suite']} {row['passed']}{f' of {whole}' if row['failed'] else ''}"


def main():
    import pytest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="names of files, without test_ (default: all)")
    parser.add_argument("-n", type=int, default=0, help="how many files to run at a time, by pytest-xdist")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    options = parser.parse_args()
    folder, found = common.ROOT / "tests/conformance", Found()
    files = [str(folder / f"test_{name}.py") for name in options.suites] or [str(folder)]
    arguments = ["-n", str(options.n), "-q", "-s", "-rs", "-p", "no:cacheprovider", f"--rootdir={common.ROOT}"]
    ended = pytest.main([*files, *arguments], plugins=[found])
    if ended not in (0, 1):
        sys.exit(f"pytest ended with {ended!r}")
    if found.broken:
        sys.exit(f"failed without a count: {', '.join(found.broken)}")
    machine = common.machine("numpy", "numba", "cupy-cuda13x", "torch")
    if any(one["device"] == "GPU" for one in found.counts):
        from peers import gpu  # loads torch

        machine |= {"gpu": gpu()}
        for one in found.counts:
            one["device"] = {"GPU": machine["gpu"]["name"]}.get(one["device"], one["device"])
    results = rows(found.counts, found.ends, common.commit())
    common.show("Tests of other projects", [{k: v for k, v in row.items() if k != "ends"} for row in results], "g")
    if options.json:
        results = others(options.json, results) + results
        common.save(options.json, {"machine": machine, "suites": results})


if __name__ == "__main__":
    main()

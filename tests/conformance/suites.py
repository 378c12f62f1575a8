"""Tests of other projects, run as they are: by pytest in a process of its own, with one of these plugins, which puts
numbattn in the place of the function that they test."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUTS = "NUMBATTN_CHECKOUTS"  # a folder of checkouts of repositories whose tests are in no package
SAMPLE = "NUMBATTN_SAMPLE"  # how many tests of suites with more of them than one wants to wait for


class Counts(NamedTuple):
    passed: int
    failed: int
    skipped: int = 0
    ends: str = ""  # the last line of pytest


def checkout(repository, file):
    """A file of a GitHub repository, in its checkout; skips the test where there is none."""
    path = Path(os.environ.get(CHECKOUTS, ""), repository.partition("/")[2], file)
    if CHECKOUTS not in os.environ or not path.exists():
        pytest.skip(f"no {path.name}: {CHECKOUTS} is to name a folder with a checkout of github.com/{repository}")
    return path


def version(repository):
    """The commit of a checkout, if it has one of its own."""
    folder = Path(os.environ[CHECKOUTS], repository.partition("/")[2])
    command = ["git", "--git-dir", folder / ".git", "log", "-1", "--format=%h"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    return f"{repository} {done.stdout.strip()}".strip()


def check(count, suite, package, found, device="CPU", at_least=1):
    """All have passed that ran, and so many did."""
    count(suite, package, found, device)
    assert not found.failed
    assert found.passed >= at_least


def check_sample(count, suite, plugin, repository, file):
    """The same of some tests of a suite that wants a GPU, run by as many processes as there are tens of them."""
    torch = pytest.importorskip("torch")
    sample = int(os.environ.get(SAMPLE, 20))
    processes = max(1, min(sample // 10, os.cpu_count() or 1, 8))
    options = "-p", "tests.conformance.plugins.one_gpu", "--sample", sample, "-n", processes
    found = run(plugin, checkout(repository, file), *options)
    check(count, suite, version(repository), found, "GPU" if torch.cuda.is_available() else "CPU")


def run(plugin, *arguments, **environment):
    """Counts of a run of pytest with a plugin, without anything that this project sets."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable, "-m", "pytest", "-p", f"tests.conformance.plugins.{plugin}", *map(str, arguments), "-q",
            "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "no:warnings", f"--junitxml={report}",
        ]  # fmt: skip
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | environment | {"PYTHONPATH": path}
        options = {"cwd": folder, "env": environment, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
        said = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                said.append(line)
        assert process.returncode in (0, 1), said[-20:]  # else pytest itself has failed, or was ended
        found = ElementTree.parse(report).getroot()[0].attrib
    total, *others = (int(found[name]) for name in ("tests", "failures", "errors", "skipped"))
    *failed, skipped = others
    return Counts(total - sum(others), sum(failed), skipped, said[-1].strip("= \n"))

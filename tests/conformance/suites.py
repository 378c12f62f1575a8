"""Tests of other projects, run as they are: by pytest in a process of its own, with a plugin of this folder, which puts
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


class Counts(NamedTuple):
    passed: int
    failed: int
    skipped: int
    ends: str = ""  # the last line of pytest


def checkout(repository, file):
    """A file of a GitHub repository, in its checkout; skips the test where there is none."""
    path = Path(os.environ.get(CHECKOUTS, ""), repository.partition("/")[2], file)
    if CHECKOUTS not in os.environ or not path.exists():
        pytest.skip(f"no {path.name}: {CHECKOUTS} is to name a folder with a checkout of github.com/{repository}")
    return path


def run(plugin, *arguments, **environment):
    """Counts of a run of pytest with a plugin of this folder, without anything that this project sets."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", f"tests.conformance.{plugin}", "-c", os.devnull, "--noconftest",
                   "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *map(str, arguments)]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | environment
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")
        print(done.stdout, done.stderr)  # which pytest shows if the test fails
        assert report.exists(), done.stderr
        found = ElementTree.parse(report).getroot()[0].attrib
    total, *others = (int(found[name]) for name in ("tests", "failures", "errors", "skipped"))
    *failed, skipped = others
    return Counts(total - sum(others), sum(failed), skipped, done.stdout.strip().rpartition("\n")[2].strip("= "))

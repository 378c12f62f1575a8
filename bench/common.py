"""What the benchmarks share: fair timing, the machine they ran on, tables and JSON."""

import datetime
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path

import llvmlite.binding
import numpy as np
from tabulate import tabulate

PAUSE = 0.05  # seconds; the last peer's threads spin for a while before they sleep


def interleaved(peers, rounds):
    """The median of each peer over the rounds; peers[name]() returns seconds, one number or several.

    Every round runs every peer once, so that a slow moment of the machine hits them all. Warm the peers up before.
    """
    seconds = {name: [] for name in peers}
    for _ in range(rounds):
        for name, run in peers.items():
            time.sleep(PAUSE)
            seconds[name].append(run())
    return {name: np.median(times, axis=0) for name, times in seconds.items()}


def machine(*packages):
    """Where and when: the CPU, the date, the versions of Python and of the packages (None: not installed)."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{_cpu_model()} ({llvmlite.binding.get_host_cpu_name()})",
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def show(title, rows, floatfmt):
    """Print dicts as a table; floatfmt has one format for each column."""
    print(f"\n{title}\n\n{tabulate(rows, headers='keys', floatfmt=floatfmt, missingval='-')}\n")


def show_machine(described):
    versions = ", ".join(f"{name} {version or '-'}" for name, version in described["versions"].items())
    print("{cpu}, {cores} cores, {date}".format(**described), versions, sep="\n")


def save(path, results):
    Path(path).write_text(json.dumps(results, indent=2) + "\n")


def _cpu_model():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

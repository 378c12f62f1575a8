"""What the benchmarks share: the formula to beat, fair timing, the machine they ran on, tables and JSON.

A JSON file says which command made it and on which commit: git's, with a + if the code has been edited since; where
there is no repository, the environment variable NUMBATTN_COMMIT says it.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import llvmlite.binding
import numpy as np
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
CODE = "numbattn", "bench/*.py"  # the code that results depend on, as git's pathspecs
PAUSE = 0.05  # seconds; the last peer's threads spin for a while before they sleep


def standard_vjp(q, k, v, *, bias=None, Z=None):
    """Standard attention, the paper's Algorithms 0 and 3, as one writes it in NumPy or CuPy: o, and a function from do
    to dq, dk, dv, which uses forward's P. `bias` is added to S, the dropout mask Z multiplies P."""
    scale = 1 / math.sqrt(q.shape[-1])
    S = scale * q @ k.mT
    if bias is not None:
        S = S + bias
    P = np.exp(S - S.max(axis=-1, keepdims=True))  # for CuPy arrays it is cupy.exp
    P = P / P.sum(axis=-1, keepdims=True)
    P_dropped = P if Z is None else P * Z

    def backprop(do, with_dS=False):
        dP = do @ v.mT
        if Z is not None:
            dP = dP * Z
        dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
        grads = scale * dS @ k, scale * dS.mT @ q, P_dropped.mT @ do
        return (*grads, dS) if with_dS else grads

    return P_dropped @ v, backprop


_orders = random.Random(0)


def sampled(peers, rounds, pause=0):
    """All samples of each peer, where peers[name]() returns seconds, one number or several.

    Every round runs every peer once, so that a slow moment of the machine hits them all, and in a new order, so that
    no peer always follows the same other one, on a machine that is hot or cool. Warm the peers up before.
    """
    seconds = {name: [] for name in peers}
    for _ in range(rounds):
        order = list(peers)
        _orders.shuffle(order)
        for name in order:
            time.sleep(pause)
            seconds[name].append(peers[name]())
    return seconds


def interleaved(peers, rounds):
    """The median of each peer over the rounds of `sampled`."""
    return {name: np.median(times, axis=0) for name, times in sampled(peers, rounds, PAUSE).items()}


def machine(*packages):
    """Where and when a benchmark runs: CPU, date, versions of Python and of the packages (None: not installed)."""
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
    if "gpu" in described:
        print(", ".join(f"{name} {value or '-'}" for name, value in described["gpu"].items()).removeprefix("name "))


def save(path, results):
    """Write the results and the command that made them, without where they are kept. A record is a line."""
    results = {"command": command(sys.argv), "commit": commit(), **results}
    for options in results.keys() & {"arguments", "options"}:
        results[options] = {name: value for name, value in results[options].items() if name != "json"}
    text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in results.items())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".new")
    written.write_text(f"{{\n{text}\n}}\n")
    written.replace(path)  # at once: who is stopped leaves the last results whole


def _lines(value):
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"


def command(argv):
    """What one types in the repository's root to run this again; --json FILE changes no result."""
    script, *options = argv
    if "--json" in options:
        at = options.index("--json")
        del options[at : at + 2]
    return shlex.join(["python", f"bench/{Path(script).name}", *options])


def commit():
    """The commit that results were measured on; None if unknown."""
    if told := os.environ.get("NUMBATTN_COMMIT"):
        return told
    try:
        found = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    except OSError:  # no git
        return None
    return found + "+" * bool(_git("diff", "--name-only", "HEAD", "--", *CODE).stdout) if found else None


def _git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)


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

"""Mutation testing: plants small faults in a copy of the package, one at a time; the tests named with them must fail.

    python -m tests.tools.mutants -n 2                  # all faults, two at a time
    python -m tests.tools.mutants -k visibility band    # those with all of these words in their file or text
    python -m tests.tools.mutants --list

Faults stand at the foot of the tests that mirror a file, tests/masks/test_bands.py for numbattn/masks/bands.py:

    FAULTS = {
        "(i + lo <= j)": "(i + lo < j)",  # the original, which occurs once in the file, and the fault
        "test_offsets": {...},  # faults that this test of the file notices alone; a tuple: one of these does
        "masks/test_calls.py::test_masks": {...},  # or tests elsewhere in tests/
        "masks/tail.py": {...},  # faults in another file of numbattn/, one without tests of its name
    }

A fault that goes unnoticed shows a property that is not tested: test the property, not the fault. A fault that changes
no result is none.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds: a fault may make a loop endless
NAMES = {"init": "__init__", "main": "__main__"}  # of files whose tests cannot be named like them


class Mutant(NamedTuple):
    file: str
    original: str
    faulty: str
    tests: tuple

    def __str__(self):
        return f"{self.file}: {' '.join(self.original.split())} -> {' '.join(self.faulty.split())}"


def mirrored(file):
    """The file of the package that a file of tests is named after."""
    name = file.stem.removeprefix("test_")
    return Path("numbattn", *file.parts[1:-1], f"{NAMES.get(name, name)}.py")


def mutants_of(faults, file, tests, own):
    """Mutants of a dict of faults in this file, or what its keys say instead, which these tests notice."""
    for key, value in faults.items():
        if isinstance(value, str):
            yield Mutant(str(file), key, value, tests)
        elif isinstance(key, str) and key.endswith(".py") and not Path(key).name.startswith("test_"):
            yield from mutants_of(value, Path("numbattn", key), tests, own)
        else:
            yield from mutants_of(value, file, tuple(named(key, own)), own)


def named(tests, own):
    """Tests as pytest takes them."""
    for test in (tests,) if isinstance(tests, str) else tests:
        yield f"tests/{test}" if ".py" in test.partition("[")[0] else f"{own}::{test}"


def collected():
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        faults, file = path.read_text().partition("\nFAULTS = ")[2], path.relative_to(ROOT)
        yield from mutants_of(ast.literal_eval(faults or "{}"), mirrored(file), (str(file),), file)


MUTANTS = [*collected()]


# ----------------------------------------------------------------------------------------------------------- running
@contextmanager
def checkout():
    """A copy of the working tree, without what git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, text=True)
    with TemporaryDirectory() as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


def run(copy, *command, timeout=None):
    """Run Python in the copy, with a cache of compiled code of its own."""
    own = {"PYTHONPATH": str(copy), "NUMBATTN_CACHE_DIR": str(copy / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    own["CI"] = "1"  # Hypothesis tries the same examples in every run
    environment, command = os.environ | own, [sys.executable, *command]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout)


def failure(copy, *arguments, timeout=None):
    """What pytest reports first: a failed test, a signal or a timeout; None if all tests pass."""
    try:
        pytest = "-m", "pytest", "-m", "", "-q", "-n0", "-p", "no:cacheprovider"
        done = run(copy, *pytest, *arguments, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.M)
    if done.returncode not in (1, 2) or not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1]


@contextmanager
def planted(copy, mutant):
    file = copy / mutant.file
    text = file.read_text()
    if text.count(mutant.original) != 1:
        raise RuntimeError(f"{mutant.original!r} occurs {text.count(mutant.original)} times in {mutant.file}")
    file.write_text(text.replace(mutant.original, mutant.faulty))
    try:
        yield
    finally:
        file.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", nargs="+", default=[], metavar="WORD", help="only faults with all of these words")
    parser.add_argument("-n", type=int, default=1, help="how many at a time, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--skip-clean", action="store_true", help="do not first run the tests without a fault")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if all(word in str(mutant) for word in arguments.k)]
    if arguments.list:
        print(*mutants, sep="\n")
        return
    with ExitStack() as stack:
        copies = Queue()
        for _ in range(arguments.n):
            copies.put(copy := stack.enter_context(checkout()))
        assert str(copy) in run(copy, "-c", "import numbattn; print(numbattn.__file__)").stdout
        tests = {test for mutant in mutants for test in mutant.tests}
        if tests and not arguments.skip_clean and (failed := failure(copy, *sorted(tests))):
            raise SystemExit(f"without any fault: {failed}")

        def found_by(mutant):
            copy, start = copies.get(), time.perf_counter()
            try:
                with planted(copy, mutant):
                    found = failure(copy, "-x", *mutant.tests, timeout=TIMEOUT)
            finally:
                copies.put(copy)
            tqdm.write(f"{time.perf_counter() - start:5.1f} s  {mutant}\n         {found or 'NOT NOTICED'}")
            return found

        with ThreadPool(arguments.n) as pool:
            found = list(tqdm(pool.imap(found_by, mutants), total=len(mutants)))
    missed = [mutant for mutant, by in zip(mutants, found) if not by]
    print(f"{len(missed)} of {len(mutants)} faults not noticed", *missed, sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

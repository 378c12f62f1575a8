"""The floors of CONTRIBUTING.md: who is on one imports from there and from below, and nobody in a circle."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).with_suffix("").parts: path for path in ROOT.glob("numbattn/**/*.py")}
FOLDERS = sorted({"/".join(parts[:-1]) for parts in FILES})


def floors():
    """Of each folder: names of files and folders in it, of each the number of its floor."""
    found = {}
    for lines in re.search(r"```floors\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[1].split("\n\n"):
        folder, *rows = lines.splitlines()
        found[folder.strip("/")] = {name: floor for floor, row in enumerate(rows) for name in row.split()}
    return found


def imported(file, path):
    """(module, what is taken of it) for each import, absolute, as parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = file[: len(file) - node.level] if node.level else ()
            module = (*start, *filter(None, (node.module or "").split(".")))
            yield from ((module, (*module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (((), tuple(alias.name.split("."))) for alias in node.names)


def imports(file, path):
    """The files that one imports from, as parts of their paths: of a folder its face, __init__."""
    for module, name in imported(file, path):
        of_name = (name, (*name, "__init__"), module, (*module, "__init__"))
        yield from [parts for parts in of_name if parts in FILES][:1]


@cache
def arrows():
    """Of each folder: of what lies in it, what else in it that imports from."""
    found = defaultdict(lambda: defaultdict(set))
    for file, path in FILES.items():
        for other in imports(file, path):
            shared = tuple(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(file, other)))
            if file != other:
                found["/".join(shared)][file[len(shared)]].add(other[len(shared)])
    return found


FLOORS = floors()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_imports_itself_by_way_of_others(folder):
    TopologicalSorter(arrows()[folder]).prepare()


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_lead_down(folder):
    top = len(FLOORS[folder])
    floor = {"__init__": top, "__main__": top} | FLOORS[folder]
    assert [f"{a} imports {b}" for a, below in arrows()[folder].items() for b in below if floor[a] < floor[b]] == []


@pytest.mark.parametrize("folder", FLOORS)
def test_everyone_has_a_floor(folder):
    parts = tuple(folder.split("/"))
    inside = {file[len(parts)] for file in FILES if file[: len(parts)] == parts}
    assert inside - {"__init__", "__main__"} == set(FLOORS[folder]) - {"__init__"}


def test_one_file_knows_the_compiler_for_gpus():
    """Elsewhere in cuda/ nothing is taken of Numba or llvmlite, and nothing of numba.cuda anywhere."""

    def takes(file, name):
        return name[:2] == ("numba", "cuda") or ("cuda" in file and name[0] in ("numba", "numba_cuda", "llvmlite"))

    taking = {file for file, path in FILES.items() for _, name in imported(file, path) if takes(file, name)}
    assert taking == {("numbattn", "cuda", "compiler")}


def test_cached_properties_have_no_locks():
    """As those of functools have: see forks.py."""
    names = {name: file for file, path in FILES.items() for _, name in imported(file, path)}
    assert ("functools", "cached_property") not in names

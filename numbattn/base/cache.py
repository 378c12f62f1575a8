"""Compiled code kept on disk between processes: files by kind and name, each complete or absent.

A file holds a digest of everything else in it, a header in JSON, and machine code. Nothing is unpickled, but the code
is run: so files are read only if they, and their folders, belong to the user or to root and nobody else can write to
them.

Processes may share the folder, and start together on an empty one. A damaged file is built again; a folder that is full
or read-only is used as it is; if nothing can be kept, one warning says why.
"""

import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import platformdirs

from . import sources

VARIABLE = "NUMBATTN_CACHE_DIR"
AHEAD = "numbattn_ahead"  # the package of kernels for CPUs that are compiled ahead, by .ci/release
KINDS = "cpu", "cuda"
NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32})?")  # names of our files; the longer ones are drafts
MOST_BYTES = 256 << 20  # for each kind; the files unused for longest are removed first
SHARES = 16  # of the room left, one of which this process takes: others may be writing, too
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
REMEDY = f"Every process compiles again, unless that changes or {VARIABLE} names another folder"
# do not follow links, wait for FIFOs or translate line ends
FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))

_room: dict[Path, int] = {}  # bytes that this process may write to a folder before it checks all its files again
_warned: set[str] = set()  # values of the variable that have been warned of


class Entry(NamedTuple):
    """The header and the code kept under a name."""

    header: dict[str, Any]
    code: bytes


def cache_dir(kind: str = "") -> Path:
    """The folder for one kind of compiled code: in $NUMBATTN_CACHE_DIR, or in the user's cache folder.

    Everything in it is ours. Raises OSError if the user has no home.
    """
    try:
        return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_dir("numbattn"), "numbattn", kind)
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def read(kind: str, name: str) -> Entry | None:
    """The entry that was written; None unless there is a complete one that can be trusted."""
    if not sources.unchanged():
        return None
    try:
        path = cache_dir(kind) / name
        with open(_open(path, os.O_RDONLY), "rb") as file:
            entry = unpacked(name, file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn(f"{error}. {REMEDY}")
        return None
    if entry is not None:
        with suppress(OSError):
            os.utime(path)  # marks it as used just now
    return entry


def read_installed(name: str) -> Entry | None:
    """The entry for CPUs in the package of code compiled ahead, if it is installed and has it."""
    folder = installed()
    if folder is None or not sources.unchanged():
        return None
    try:
        return unpacked(name, (folder / name).read_bytes())
    except OSError:
        return None


@cache
def installed() -> Path | None:
    """The folder of that package."""
    found = find_spec(AHEAD)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def write(kind: str, name: str, header: Mapping[str, Any], code: bytes) -> None:
    """Keep code with a header for JSON. If that is not possible, one warning says so."""
    if not sources.unchanged():
        _warn(f"the files in {sources.PACKAGE} are no longer those that were imported. A new process keeps it")
        return
    content = packed(name, Entry(dict(header), code))
    try:
        folder = cache_dir(kind)
        for each in (*reversed(folder.parents[:2]), folder):
            each.mkdir(0o755, parents=True, exist_ok=True)
        draft = folder / f"{name}.{uuid4().hex}"  # renamed in the end: readers find all of it or nothing
        try:
            with open(_open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content)
            draft.replace(folder / name)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        if read(kind, name) is None:  # else another process has written it: Windows replaces no file that is being read
            _warn(f"{error}. {REMEDY}")
    else:
        _room[folder] = _room.get(folder, 0) - len(content)
        if _room[folder] < 0:
            _room[folder] = _prune(folder) // SHARES


def clear() -> None:
    """Remove everything that was kept, even where other versions kept it, and folders that are empty then."""
    with suppress(OSError):
        ours = cache_dir()
        for folder in [ours / kind for kind in KINDS] + [ours.parent / kind for kind in KINDS]:
            kept = _kept(folder)
            for *_, path in kept:
                with suppress(OSError):
                    path.unlink()
            if kept:
                with suppress(OSError):
                    folder.rmdir()
        ours.rmdir()


def sizes() -> dict[str, list[int]]:
    """{kind: bytes of each file}"""
    with suppress(OSError):
        return {kind: [size for _, size, _ in _kept(cache_dir(kind))] for kind in KINDS}
    return {kind: [] for kind in KINDS}


def _open(path: Path, flags: int) -> int:
    """A descriptor of a regular file that nobody but the user and root may have written."""
    for folder in path.parents[:3]:  # the kind's folder, ours, and the one that the variable names
        _check(folder, folder.stat())
    file = os.open(path, flags | FLAGS, 0o644)
    try:
        state = os.fstat(file)
        _check(path, state)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{path} is not a regular file")
    except BaseException:
        os.close(file)
        raise
    return file


def _check(path: Path, state: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):  # Windows: the user's folders are the user's alone
        return
    if state.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {state.st_uid}, whose code is not run")
    if state.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{path} can be written by others, whose code is not run (chmod go-w)")


def packed(name: str, entry: Entry) -> bytes:
    """What a file of this name holds."""
    content = json.dumps(entry.header).encode() + b"\n" + entry.code
    return _digest(name, content) + b"\n" + content


def unpacked(name: str, data: bytes) -> Entry | None:
    """The entry in a file of this name; None if it is not complete."""
    digest, _, content = data.partition(b"\n")
    if _digest(name, content) != digest:
        return None
    header, code = content.split(b"\n", 1)
    return Entry(json.loads(header), code)


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + content).hexdigest().encode()


def _warn(why: str) -> None:
    place = os.environ.get(VARIABLE, "")
    if place not in _warned:
        _warned.add(place)
        warnings.warn(f"compiled code is not kept: {why}", RuntimeWarning, stacklevel=3)


def _kept(folder: Path) -> list[tuple[int, int, Path]]:
    """(time of last use, bytes, path) of each of our files."""
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):  # another process may be removing it
                state = path.lstat()
                if NAME.fullmatch(path.name) and stat.S_ISREG(state.st_mode):
                    found.append((state.st_mtime_ns, state.st_size, path))
    return sorted(found)


def _prune(folder: Path) -> int:
    """Remove files until the folder is small enough. Returns how many bytes more there may be."""
    kept = _kept(folder)
    size = sum(size for _, size, _ in kept)
    for _, each, path in kept:
        if size <= MOST_BYTES:
            break
        with suppress(OSError):
            path.unlink(missing_ok=True)
        size -= each
    return MOST_BYTES - size

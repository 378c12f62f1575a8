"""What was compiled, kept on disk between processes: files by kind and name, whole or not there.

Processes may share the folder, and start on an empty one together. A damaged file is built again; a folder that is full
or read-only is used as it is; where nothing can be written, a warning says so once.
"""

import hashlib
import os
import shutil
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import platformdirs

VARIABLE = "NUMBATTN_CACHE_DIR"
KINDS = "cpu", "cuda"
MOST_BYTES = 256 << 20  # of each kind; the files unused for longest go first


def cache_dir(kind: str = "") -> Path:
    """The folder for one kind of compiled code: in $NUMBATTN_CACHE_DIR, or in the user's cache folder."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_dir("numbattn"), kind)


def read(kind: str, name: str) -> bytes | None:
    """What was written; None where there is nothing, or nothing whole."""
    path = cache_dir(kind) / name
    try:
        checksum, content = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    if _checksum(content) != checksum:
        return None
    with suppress(OSError):
        os.utime(path)  # used just now
    return content


def write(kind: str, name: str, content: bytes) -> None:
    """Keep these bytes. Where that is not possible a warning says so, once."""
    folder = cache_dir(kind)
    draft = folder / f"{name}.{uuid4().hex}"  # in the end renamed: who reads finds all of it or nothing
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(_checksum(content) + b"\n" + content)
        draft.replace(folder / name)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        _warn(folder, str(error))
    else:
        _prune(folder)


def clear() -> None:
    """Remove all that was kept."""
    for kind in KINDS:
        shutil.rmtree(cache_dir(kind), ignore_errors=True)


def sizes() -> dict[str, list[int]]:
    """{kind: bytes of each file}"""
    return {kind: [path.stat().st_size for path in cache_dir(kind).rglob("*") if path.is_file()] for kind in KINDS}


def sources_digest(*patterns: str) -> str:
    """A digest of the files of this package that code is compiled from: other sources, other code."""
    package = Path(__file__).parent
    paths = sorted(path for pattern in patterns for path in package.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@cache
def _warn(folder: Path, reason: str) -> None:
    message = (f"compiled code is not kept: {reason}. Every process compiles again, unless {folder} can be written or "
               f"the environment variable {VARIABLE} names another folder")  # fmt: skip
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _prune(folder: Path) -> None:
    with suppress(OSError):  # another process may be at it
        files = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.iterdir())
        size = sum(size for _, size, _ in files)
        for _, each, path in files:
            if size <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            size -= each

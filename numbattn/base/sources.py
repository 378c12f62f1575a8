"""The files of this package, as they were when it was imported.

Compiled code comes from the imported sources, and is kept under their digest. Files may change while a process runs, by
an upgrade or a checkout: from then on it is unknown which code the process has, since it may import newer modules.
"""

import hashlib
from functools import cache
from pathlib import Path
from uuid import uuid4

PACKAGE = Path(__file__).parents[1]
APART = {"cpu", "cuda", "interop"}  # folders whose code belongs to one backend only


def unchanged() -> bool:
    """Whether the files are those that were imported; False if none are found."""
    try:
        return bool(_IMPORTED) and _states() == _IMPORTED
    except OSError:  # one went while they were listed
        return False


@cache
def digest(backend: str) -> str:
    """The digest of the files that a backend's code comes from, as they were imported, as long as `unchanged`."""
    try:
        return hashlib.sha256(b"".join(path.read_bytes() for path in _files() if _belongs(path, backend))).hexdigest()
    except OSError:
        return uuid4().hex  # equal to no other


def _belongs(path: Path, backend: str) -> bool:
    return not any(PACKAGE / other in path.parents for other in APART - {backend})


def _files() -> list[Path]:
    """The files with code: sources, or without these their bytecode, or the archive that they are in."""
    sources = [*PACKAGE.rglob("*.py")] or [*PACKAGE.rglob("*.pyc")]
    return sorted(sources) or [path for path in PACKAGE.parents if path.is_file()]


def _states() -> dict[Path, tuple[int, int, int]]:
    """What changes with the files."""
    states = {path: path.stat() for path in _files()}
    return {path: (state.st_mtime_ns, state.st_size, state.st_ino) for path, state in states.items()}


_IMPORTED = _states()

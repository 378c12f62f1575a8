"""The files of this package, as they were when it was imported.

What is compiled comes from what was imported, and is kept under a digest of it. Files may change while a process lives,
by an upgrade or a checkout: from then on nobody can tell what code this process has, since modules that it imports late
are new ones.
"""

import hashlib
from functools import cache
from pathlib import Path
from uuid import uuid4

PACKAGE = Path(__file__).parent
APART = {"cpu", "cuda", "interop"}  # folders of which a backend has code of its own alone


def unchanged() -> bool:
    """Whether the files are those that were imported; False if there are none to be found."""
    try:
        return bool(_IMPORTED) and _states() == _IMPORTED
    except OSError:  # one went while they were listed
        return False


@cache
def digest(backend: str) -> str:
    """The digest of the files from which a backend's code comes: of what was imported as long as `unchanged`."""
    try:
        return hashlib.sha256(b"".join(path.read_bytes() for path in _files() if _belongs(path, backend))).hexdigest()
    except OSError:
        return uuid4().hex  # of nothing else


def _belongs(path: Path, backend: str) -> bool:
    return not any(PACKAGE / other in path.parents for other in APART - {backend})


def _files() -> list[Path]:
    """All that may hold code: sources; where there are none, what Python made of them; or the archive they are in."""
    sources = [*PACKAGE.rglob("*.py")] or [*PACKAGE.rglob("*.pyc")]
    return sorted(sources) or [path for path in PACKAGE.parents if path.is_file()]


def _states() -> dict[Path, tuple[int, int, int]]:
    """What changes when a file does."""
    states = {path: path.stat() for path in _files()}
    return {path: (state.st_mtime_ns, state.st_size, state.st_ino) for path, state in states.items()}


_IMPORTED = _states()

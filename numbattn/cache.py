"""Where compiled code is kept between processes, and for which sources it holds."""

import hashlib
import os
from pathlib import Path

import platformdirs


def cache_dir(kind):
    """The folder for one kind of compiled code: in $NUMBATTN_CACHE_DIR, or in the user's cache folder."""
    return Path(os.environ.get("NUMBATTN_CACHE_DIR") or platformdirs.user_cache_dir("numbattn"), kind)


def sources_digest(*patterns):
    """A digest of the files of this package that code is compiled from: other sources, other code."""
    package = Path(__file__).parent
    paths = sorted(path for pattern in patterns for path in package.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()

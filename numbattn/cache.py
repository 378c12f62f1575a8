"""Where compiled code is kept between processes."""

import os
from pathlib import Path

import platformdirs


def cache_dir(kind):
    """The folder for one kind of compiled code: in $NUMBATTN_CACHE_DIR, or in the user's cache folder."""
    return Path(os.environ.get("NUMBATTN_CACHE_DIR") or platformdirs.user_cache_dir("numbattn"), kind)

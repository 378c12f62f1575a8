"""Code in a process of its own."""

import os
import subprocess
import sys
import textwrap


def printed(code, *arguments, options=("-W", "ignore::DeprecationWarning"), cwd=None, says="", **variables):
    """The lines that it prints. It ends well, and writes nothing to stderr but what has `says` in it. variables: of the
    environment."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert says in done.stderr if says else not done.stderr, done.stderr
    return done.stdout.splitlines()

"""The scripts in bench/ import each other by their file names."""

import sys
from importlib.util import find_spec
from pathlib import Path

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.append(str(BENCH))
collect_ignore_glob = [] if find_spec("tabulate") and find_spec("matplotlib") else ["test_*.py"]

"""What `python -m numbattn` prints about this machine."""

import platform
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..base import cache
from ..cuda.missing import EXTRAS

NEEDED = {"cupy": "CuPy", "numba_cuda": "numba-cuda"}  # modules that a GPU needs: their packages


def say(text: str) -> None:
    """Print text in lines of 80 columns."""
    print(textwrap.fill(text, 80, subsequent_indent="    "))


def cpu() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def why_no_gpu() -> str | None:
    """Why this machine cannot compute with CuPy arrays; None if it can."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; {EXTRAS}"
    cuda = import_module("cupy").cuda.runtime
    try:
        count = cuda.getDeviceCount()
    except cuda.CUDARuntimeError as error:  # no driver, too old a driver, or no device
        return str(error)
    return None if count else "CuPy finds no device"


def gpus() -> Iterator[str]:
    """A line about each GPU."""
    cuda = import_module("cupy").cuda.runtime
    for i in range(cuda.getDeviceCount()):
        about = cuda.getDeviceProperties(i)
        yield (f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}, "
               f"{about['totalGlobalMem'] / 2**30:.0f} GiB, "
               f"{about['sharedMemPerBlockOptin'] >> 10} KB of shared memory for a block")


def kept() -> str:
    """Where compiled code is kept, and how much."""
    kept = (f"{len(sizes)} for the {kind}, {sum(sizes) / 1e6:.1f} MB"
            for kind, sizes in zip(("CPU", "GPU"), cache.sizes().values()))  # fmt: skip
    ahead = f"; others are in {folder}" if (folder := cache.installed()) else ""
    try:
        return f"{cache.cache_dir()}, kernels: {'; '.join(kept)}{ahead}"
    except OSError as error:
        return f"none, {error}"


def progress(items: Iterable[Any], **options: Any) -> Iterable[Any]:
    """The items with a progress bar, if tqdm is installed and there is a terminal."""
    return import_module("tqdm").tqdm(items, disable=None, leave=False, **options) if find_spec("tqdm") else items


def table(rows: list[dict[str, Any]]) -> str:
    """Dictionaries as the text of a table, by tabulate if it is installed."""
    if find_spec("tabulate"):
        return import_module("tabulate").tabulate(rows, headers="keys", tablefmt="plain", disable_numparse=True)
    return "\n".join("\t".join(map(str, line)) for line in (rows[0], *(row.values() for row in rows)))

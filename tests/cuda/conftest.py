from functools import cache
from pathlib import Path

import pytest

from tests.tools.launch import WORLDS, world_of

collect_ignore = ["factories.py"]  # no tests in it, and it needs numba-cuda
HERE = Path(__file__).parent
PLACES = "world", "device", "unit", "tier"  # parameters that choose the code that runs


@pytest.fixture(params=WORLDS)
def world(request):
    """Where `launch` and `device.on` run kernels: simulated in plain Python, or compiled, their PTX interpreted."""
    with world_of(request.param) as name:
        yield name


def pytest_collection_modifyitems(items):
    """Tests marked for one world are not collected for the other, those that need a GPU for one only. Of a kernel's
    test each world runs the first case of each device, and all others where `slow` is asked for."""
    items[:] = [item for item in items if suits(item)]
    run = set()
    for item in items:
        if item.get_closest_marker("mostly_simulated") and world_of_item(item) == "compiled":
            item.add_marker("slow")
        elif takes_long(item.path) and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            if (case := case_of(item)) in run:
                item.add_marker("slow")
            run.add(case)


@cache
def takes_long(file):
    """Whether it has tests whose cases each compile or simulate kernels of their own."""
    return HERE / "kernels" in file.parents or file in (HERE / "test_passes.py", HERE / "test_points.py")


def case_of(item):
    """What cases have in common of which one is enough: the function, the world, and what it runs on."""
    parameters = getattr(item, "callspec", None)
    on = {name: str(value) for name, value in parameters.params.items() if name in PLACES} if parameters else {}
    return item.path, item.originalname, *sorted(on.items())


def world_of_item(item):
    parameters = getattr(item, "callspec", None)
    return parameters and parameters.params.get("world")


def suits(item):
    marker, world = item.get_closest_marker("world"), world_of_item(item)
    worlds = marker.args if marker else WORLDS[:1] if item.get_closest_marker("gpu") else WORLDS
    return world is None or world in worlds


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty place for cubins."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "numbattn" / "cuda"

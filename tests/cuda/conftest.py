import pytest

from tests.tools.launch import WORLDS, world_of

collect_ignore = ["factories.py"]  # no tests in it, and it needs numba-cuda


@pytest.fixture(params=WORLDS)
def world(request):
    """Where `launch` and `device.on` run kernels: simulated in plain Python, or compiled, their PTX interpreted."""
    with world_of(request.param) as name:
        yield name


def pytest_collection_modifyitems(items):
    """Tests marked for one world are not collected for the other, those that need a GPU for one only."""
    items[:] = [item for item in items if suits(item)]
    for item in items:
        if item.get_closest_marker("mostly_simulated") and world_of_item(item) == "compiled":
            item.add_marker("slow")


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

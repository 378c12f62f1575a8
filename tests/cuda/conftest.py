import pytest

from tests.tools.launch import WORLDS, world_of

collect_ignore = ["factories.py"]  # no tests in it, and it needs numba-cuda


@pytest.fixture(params=WORLDS)
def world(request):
    """Where `launch` and `device.on` run kernels: simulated in plain Python, or compiled, their PTX interpreted."""
    with world_of(request.param) as name:
        yield name


def pytest_collection_modifyitems(items):
    """Tests marked for one world are not collected for the other."""
    items[:] = [item for item in items if suits(item)]


def suits(item):
    marker, parameters = item.get_closest_marker("world"), getattr(item, "callspec", None)
    world = parameters and parameters.params.get("world")
    return marker is None or world is None or world in marker.args


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty place for cubins."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"

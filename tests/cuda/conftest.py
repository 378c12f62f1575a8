import pytest

collect_ignore = ["factories.py"]  # no tests in it, and it needs numba-cuda


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty place for cubins."""
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"

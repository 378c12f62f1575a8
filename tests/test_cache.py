import os
import warnings

import pytest

from numbattn import cache


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_place(monkeypatch, place):
    assert cache.cache_dir("cuda") == place / "cuda"
    monkeypatch.delenv("NUMBATTN_CACHE_DIR")
    assert cache.cache_dir("cuda").parts[-2:] == ("numbattn", "cuda")


@pytest.mark.parametrize("content", [b"", b"content", b"\n\n", bytes(range(256)) * 100])
def test_what_is_written_is_read(place, content):
    assert cache.read("cpu", "name") is None
    cache.write("cpu", "name", content)
    assert cache.read("cpu", "name") == content
    assert cache.read("cuda", "name") is None
    assert [path.name for path in (place / "cpu").iterdir()] == ["name"]


def test_others_may_read_it(place):
    """As any file of the user's: for a cache that several users share."""
    cache.write("cpu", "name", b"content")
    (place / "file").touch()
    assert (place / "cpu" / "name").stat().st_mode == (place / "file").stat().st_mode


@pytest.mark.parametrize("damage", [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[1:],
    lambda data: data[:70] + b"x" + data[71:],
    lambda data: b"garbage",
    lambda data: b"gar\nbage",
], ids=["empty", "end", "start", "byte", "other", "lines"])  # fmt: skip
def test_what_is_damaged_is_not_there(place, damage):
    cache.write("cpu", "name", b"content" * 10)
    file = place / "cpu" / "name"
    file.write_bytes(damage(file.read_bytes()))
    assert cache.read("cpu", "name") is None


def test_what_was_unused_for_longest_goes_first(place, monkeypatch):
    cache.write("cpu", "first", b"x" * 1000)
    size = (place / "cpu" / "first").stat().st_size
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * size)
    for age, name in enumerate("abc"):  # four files, one too many
        cache.write("cpu", name, b"x" * 1000)
        os.utime(place / "cpu" / name, (age, age))
        cache.read("cpu", "first")  # used again and again
    cache.write("cpu", "d", b"x" * 1000)
    assert {path.name for path in (place / "cpu").iterdir()} == {"first", "c", "d"}


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"compiled code is not kept: .*file.*NUMBATTN_CACHE_DIR"):
        cache.write("cpu", "name", b"content")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("cpu", "other", b"content")
    assert cache.read("cpu", "name") is None


def full(self, data):
    self.touch()
    raise OSError(28, "No space left on device")


def test_a_full_disk_keeps_nothing(place, monkeypatch):
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.write("cpu", "name", b"content")
    assert not list((place / "cpu").iterdir())


def test_clear(place):
    for kind in cache.KINDS:
        cache.write(kind, "name", b"content")
    (place / "mine").touch()
    assert all(len(sizes) == 1 for sizes in cache.sizes().values())
    cache.clear()
    assert cache.sizes() == {kind: [] for kind in cache.KINDS}
    assert [path.name for path in place.iterdir()] == ["mine"]  # what else is there stays
    cache.clear()

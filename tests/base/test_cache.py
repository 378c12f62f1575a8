import io
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from numbattn.base import cache, sources
from numbattn.base.cache import Entry

NAME, OTHER = "0" * 64, "f" * 64
HEADER = {"function": "f", "shape": [1, 2]}
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner in numbers")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files away")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "numbattn"


def keep(kind="cpu", name=NAME, code=b"code"):
    cache.write(kind, name, HEADER, code)
    return cache.cache_dir(kind) / name


def test_place(monkeypatch, place):
    assert cache.cache_dir("cuda") == place / "cuda"
    monkeypatch.delenv("NUMBATTN_CACHE_DIR")
    assert cache.cache_dir("cuda").parts[-2:] == ("numbattn", "cuda")


@pytest.mark.parametrize("code", [b"", b"code", b"\n\n", bytes(range(256)) * 100])
def test_what_is_written_is_read(place, code):
    assert cache.read("cpu", NAME) is None
    keep(code=code)
    assert cache.read("cpu", NAME) == Entry(HEADER, code)
    assert cache.read("cuda", NAME) is None
    assert [path.name for path in (place / "cpu").iterdir()] == [NAME]


DAMAGE = pytest.mark.parametrize("damage", [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[1:],
    lambda data: data[:70] + b"x" + data[71:],
    lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda data: b"garbage",
    lambda data: b"gar\nbage",
], ids=["empty", "end", "start", "header", "bit", "other", "lines"])  # fmt: skip


@DAMAGE
def test_what_is_damaged_is_not_there(place, damage):
    file = keep()
    file.write_bytes(damage(file.read_bytes()))
    assert cache.read("cpu", NAME) is None


@DAMAGE
def test_code_of_an_installed_package_is_read_unless_it_is_damaged(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(cache, "installed", lambda: tmp_path)
    assert cache.read_installed(NAME) is None
    entry = Entry(HEADER, b"code")
    (tmp_path / NAME).write_bytes(cache.packed(NAME, entry))
    assert cache.read_installed(NAME) == entry
    (tmp_path / NAME).write_bytes(damage(cache.packed(NAME, entry)))
    assert cache.read_installed(NAME) is None


def test_where_the_package_is(tmp_path, monkeypatch):
    assert cache.installed.__wrapped__() is None
    (tmp_path / cache.AHEAD).mkdir()
    (tmp_path / cache.AHEAD / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert cache.installed.__wrapped__() == tmp_path / cache.AHEAD


def test_a_file_is_no_other(place):
    """What was kept under one name is not run for another."""
    keep().rename(place / "cpu" / OTHER)
    assert cache.read("cpu", OTHER) is None


def test_threads_that_write_the_same(place):
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(lambda number: keep(code=b"code" * 100_000), range(32))]
    assert cache.read("cpu", NAME).code == b"code" * 100_000
    assert [path.name for path in (place / "cpu").iterdir()] == [NAME]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_read_cannot_be_replaced_on_windows(place, monkeypatch, is_there):
    """It is there, so nothing is said."""
    file = keep()
    if not is_there:
        file.unlink()

    def in_use(*paths):
        raise PermissionError("another process uses the file")

    monkeypatch.setattr(cache.Path, "replace", in_use)
    with nullcontext() if is_there else pytest.warns(RuntimeWarning, match="another process uses"):
        keep()
    assert [path.name for path in (place / "cpu").iterdir()] == [NAME] * is_there


# ------------------------------------------------------------------------------------------------------------ trust
@needs_owners
def test_nobody_else_may_write_it(place):
    """Whatever the umask; it says who may read, for a cache that root fills in the image of a container."""
    before = os.umask(0)
    try:
        file = keep()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (place, place / "cpu", file)]
    assert modes == [0o755, 0o755, 0o644]


@needs_owners
def test_the_folder_that_is_named_is_made_so_too(place, monkeypatch):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(place / "new"))
    before = os.umask(0)
    try:
        keep()
    finally:
        os.umask(before)
    assert (place / "new").stat().st_mode & 0o777 == 0o755


def refused(place, match):
    """Nothing is read; one warning says why."""
    with pytest.warns(RuntimeWarning, match=f"compiled code is not kept: {match}") as warned:
        assert cache.read("cpu", NAME) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read("cpu", NAME) is None
    return len(warned) == 1


@needs_owners
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", ["named", "numbattn", "cpu"])
def test_a_folder_that_others_can_write_is_refused(place, which, mode):
    keep()
    folder = {"named": place.parent, "numbattn": place, "cpu": place / "cpu"}[which]
    folder.chmod(mode)
    assert refused(place, f"{re.escape(str(folder))} can be written by others.*chmod go-w.*NUMBATTN_CACHE_DIR")
    before = (place / "cpu" / NAME).read_bytes()
    keep(code=b"other")
    assert (place / "cpu" / NAME).read_bytes() == before
    folder.chmod(0o755)
    assert cache.read("cpu", NAME) == Entry(HEADER, b"code")


@needs_owners
def test_a_file_that_others_can_write_is_refused_and_replaced(place):
    keep().chmod(0o664)
    assert refused(place, f".*{NAME} can be written by others")
    keep()
    assert cache.read("cpu", NAME) == Entry(HEADER, b"code")


@needs_root
@pytest.mark.parametrize("which", ["named", "numbattn", "cpu", "file"])
def test_what_belongs_to_another_user_is_refused(place, which):
    path = {"named": place.parent, "numbattn": place, "cpu": place / "cpu", "file": keep()}[which]
    os.chown(path, 12345, -1)
    assert refused(place, f"{re.escape(str(path))} belongs to user 12345")


@needs_root
def test_what_belongs_to_root_is_read(place, monkeypatch):
    """By anybody: an image that root has filled."""
    keep()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.read("cpu", NAME) == Entry(HEADER, b"code")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("make", [
    lambda path: os.mkfifo(path),
    lambda path: path.symlink_to(path.with_name(OTHER)),
    lambda path: path.mkdir(),
], ids=["FIFO", "link", "folder"])  # fmt: skip
def test_what_is_no_file_is_not_read(place, make):
    """Nor waited for."""
    keep(name=OTHER)
    make(place / "cpu" / NAME)
    assert refused(place, f".*{NAME}")


# -------------------------------------------------------------------------------------------------- what is not ours
def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_was_unused_for_longest_goes_first(place, monkeypatch):
    first = keep(code=b"x" * 1000)
    size = first.stat().st_size
    os.utime(first, (0, 0))
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * size)
    monkeypatch.setattr(cache, "_room", {})
    draft = place / "cpu" / f"{OTHER}.{'1' * 32}"  # of a process that was killed
    draft.write_bytes(b"x" * size)
    os.utime(draft, (0, 0))
    for age, digit in enumerate("abc"):  # one too many
        cache.read("cpu", NAME)  # used again and again
        os.utime(keep(name=digit * 64, code=b"x" * 1000), (1 + age, 1 + age))
    keep(name="d" * 64, code=b"x" * 1000)
    assert names(place / "cpu") == {NAME, "c" * 64, "d" * 64}


def test_files_are_looked_through_now_and_then(place, monkeypatch):
    """As often as their sizes demand it: there may be thousands."""
    looks, look = [], cache._kept
    monkeypatch.setattr(cache, "MOST_BYTES", 100_000)
    monkeypatch.setattr(cache, "_kept", lambda folder: looks.append(folder) or look(folder))
    for i in range(64):
        keep(name=f"{i:064}", code=b"x" * 2000)
    assert len(looks) < 55
    assert sum(cache.sizes()["cpu"]) <= 100_000


def test_only_what_is_ours_is_removed(place, monkeypatch):
    """By whatever name others have files and folders beside them; folders go once they are empty."""
    for kind in cache.KINDS:
        keep(kind)
    old = [place.parent / kind / NAME for kind in cache.KINDS]  # as earlier versions kept them
    for file in [*old, old[0].with_name(f"{NAME}.{'a' * 32}")]:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    others = ["mine", "cpu/results.npy", "cpu/" + "A" * 64, "cpu/" + "0" * 63, f"cpu/{NAME}.o", f"numbattn/cpu/{NAME}0",
              f"numbattn/cpu/{OTHER}/{NAME}", "numbattn/cpu/mine", f"numbattn/cpu/{NAME}.{'a' * 32}0"]  # fmt: skip
    for name in others:
        (place.parent / name).parent.mkdir(exist_ok=True)
        (place.parent / name).write_bytes(bytes(1000))
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    monkeypatch.setattr(cache, "_room", {})
    keep()  # prunes
    assert all((place.parent / name).exists() for name in others)
    assert cache.sizes()["cpu"] == []
    cache.clear()
    folders = {"cpu", "numbattn", "numbattn/cpu", f"numbattn/cpu/{OTHER}"}
    assert names(place.parent) == {*others, *folders}
    cache.clear()


def test_an_empty_folder_of_others_stays(place):
    (place.parent / "cuda").mkdir()
    keep()
    cache.clear()
    assert names(place.parent) == {"cuda"}


# ------------------------------------------------------------------------------------------- where nothing can be kept
def not_kept(match):
    """One warning says so."""
    with pytest.warns(RuntimeWarning, match=f"compiled code is not kept: {match}"):
        cache.write("cpu", NAME, HEADER, b"code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("cpu", NAME, HEADER, b"code")
    assert cache.read("cpu", NAME) is None


def test_a_folder_that_cannot_be_made(place, monkeypatch):
    place.parent.joinpath("file").write_text("")
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(place.parent / "file"))
    not_kept(".*file.*NUMBATTN_CACHE_DIR")


def test_a_full_disk(place, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    def opened(file, mode):
        os.close(file)
        return Full()

    monkeypatch.setattr(cache, "open", opened, raising=False)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        keep()
    assert not [*(place / "cpu").iterdir()]


@pytest.mark.skipif(sys.platform == "win32", reason="a user of Windows has a home")
def test_a_user_without_a_home(place, monkeypatch):
    monkeypatch.chdir(place.parent)
    for name in ("NUMBATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    not_kept(".*home directory.*NUMBATTN_CACHE_DIR")
    assert cache.sizes() == {"cpu": [], "cuda": []}
    cache.clear()
    assert not [*place.parent.iterdir()]


def test_sources_that_change(place, monkeypatch):
    keep()
    monkeypatch.setattr(sources, "unchanged", lambda: False)
    not_kept(".*no longer those that were imported")
    monkeypatch.undo()
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(place.parent))
    assert cache.read("cpu", NAME) == Entry(HEADER, b"code")


FAULTS = {
    "if read(kind, name) is None:": "if True:",
    "stat.S_IWGRP | stat.S_IWOTH": "stat.S_IWOTH",
    '"O_NOFOLLOW", ': "",
    "state.st_uid not in (0, os.geteuid())": "state.st_uid == 0 != os.geteuid()",
    "path.parents[:3]": "path.parents[:2]",
    "state = os.fstat(file)\n        _check(path, state)": "state = os.fstat(file)",
    "not stat.S_ISREG(state.st_mode)": "False",
    "_digest(name, content) != digest": "False",
    'name.encode() + b"\\n" + content': "content",
    "0o644": "0o666",
    "each.mkdir(0o755": "each.mkdir(0o777",
    "            draft.unlink(missing_ok=True)": "            pass",
    "NAME.fullmatch(path.name) and ": "",
    "NAME.fullmatch": "NAME.match",
    " + [ours.parent / kind for kind in KINDS]": "",
    "            if kept:\n": "            if True:\n",
    "os.utime(path)": "pass",
    "size <= MOST_BYTES": "not size",
    "if _room[folder] < 0:": "if True:",
    "return MOST_BYTES - size": "return MOST_BYTES",
    "_warned.add(place)": "pass",
    "base/sources.py": {
        "cpu/test_compile.py::test_code_of_other_sources_is_neither_kept_nor_read": {
            "bool(_IMPORTED) and _states() == _IMPORTED": "True",
            "not any(PACKAGE / other": "any(PACKAGE / other",
        },
    },
}

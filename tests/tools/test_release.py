"""The README as a package index shows it, whose links have to be absolute."""

import platform
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release():
    return runpy.run_path(str(ROOT / ".ci" / "release"))


def test_links_lead_to_the_repository(release):
    text = release["absolute"]((ROOT / "README.md").read_text(), "https://example.org/numbattn")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert all(re.match("https?://|#", target) for target in targets)
    assert "(https://example.org/numbattn/raw/main/bench/plots/figure3.png)](https://example.org/numbattn/blob/" in text
    assert "[CuPy](https://cupy.dev)" in text
    for target in targets:
        if match := re.match("https://example.org/numbattn/(?:raw|blob)/main/([^#]+)", target):
            assert (ROOT / match[1]).exists()


def test_addresses_of_the_package(release, tmp_path):
    for name in ("setup.cfg", "README.md"):
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(re.sub("(?m)^address =$", "address = https://example.org/numbattn/", text))
    release["publish"](tmp_path)
    setup = (tmp_path / "setup.cfg").read_text()
    assert setup.startswith("[metadata]\nurl = https://example.org/numbattn\nproject_urls =\n    Changelog = https://e")
    assert "](bench/README.md" not in (tmp_path / "README.md").read_text()


def test_what_was_not_tried_is_said(release):
    tried, missing = release["summary"]({"3.11": "3.11.7", "3.14t": "3.14.2t"})
    assert tried.endswith(": Python 3.11.7, 3.14.2t")
    assert missing.startswith("not tried: Python 3.10, 3.12, 3.13, 3.14, 3.15, 3.15t; ")
    assert "Windows ARM64" in missing
    assert not re.search(rf"{platform.system()} {platform.machine()}\b", missing)


def test_lower_bounds(release):
    assert "numpy==2.1.2" in release["lower_bounds"]()

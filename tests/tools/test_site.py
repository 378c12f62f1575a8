"""The site: a page for every public name, and links that lead somewhere."""

import ast
import inspect
import re
import runpy
from pathlib import Path

import pytest

import numbattn as na
from numbattn.api import Backprop

ROOT = Path(__file__).parents[2]
SITE = ROOT / "examples" / "site"


@pytest.fixture(scope="module")
def site():
    return runpy.run_path(str(SITE / "conf.py"))


def test_public_names_have_pages():
    generated = runpy.run_path(str(SITE / "reference.py"))["text"]()
    assert (SITE / "api.md").read_text() == generated, "python examples/site/reference.py"


def test_links_lead_somewhere(site):
    """In the repository and on the site, those to sections included."""
    pages = [ROOT / page for page in site["PAGES"]] + [*SITE.glob("*.md")]
    for page in pages:
        def there(path, picture, page=page):
            assert (ROOT / path).exists(), (page, path)
            if found := None if picture else site["place"](path, picture):
                assert (SITE / found.partition("#")[0]).exists(), (page, found)
            return path

        text = site["led"](page.read_text(), page.relative_to(ROOT).as_posix(), there)
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
            assert anchor in anchors(ROOT / path if path else page), (page, path, anchor)
    for module, anchor in site["MODULES"].items():
        assert (ROOT / module).is_dir()
        assert anchor in anchors(SITE / "api.md")


def anchors(page):
    """Those of a page's titles, as GitHub makes them."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"(?m)^#+ (.+)$", page.read_text())}  # fmt: skip


def test_pages_of_the_repository(site):
    """Their links lead to pages of the site."""
    source = ["before\n{{ page }}"]
    site["read"](None, "index", source)
    assert source[0].startswith("before\n# numbattn\n")
    for link in ("../../bench/plots/figure3.png)](measurements.md", "measurements.md#many-small-attentions",
                 "api.md#points", "which.md", "house.md"):  # fmt: skip
        assert f"]({link})" in source[0]
    source = [(SITE / "which.md").read_text()]
    site["read"](None, "which", source)
    for link in "index.md#masks", "house.md", "programs.md#03_own_attentionpy":
        assert f"]({link})" in source[0]


def test_programs_are_shown(site):
    """Each example, at the title to which the links to it lead."""
    source = ["{{ programs }}"]
    site["read"](None, "programs", source)
    for file in (ROOT / "examples").glob("[0-9]*.py"):
        _, _, anchor = site["place"](f"examples/{file.name}", False).partition("#")
        title = re.search(rf"## (.+)\n\n```{{literalinclude}} ../{file.name}\n", source[0])[1]
        assert re.sub(r"[^\w -]", "", title.lower()) == anchor


TABLES = "README.md", "examples/README.md", "examples/site/which.md", "examples/site/coming.md"


@pytest.mark.parametrize("page", TABLES)
def test_rows_of_tables_are_whole(page):
    """A `|` within a cell ends it, in code too, unless it is escaped."""
    for table in re.findall(r"(?m)(?:^\|.*\n)+", (ROOT / page).read_text()):
        first, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert set(rows) == {first}, table


@pytest.mark.parametrize("page", TABLES)
def test_calls_in_tables_fit_the_functions(page):
    """Their names, and the arguments that these take."""
    names = {"na": na, "points": na.points, "backprop": Backprop(None)}
    for code in re.findall(r"(?m)`([^`\n]+)`(?=.*\|$)", (ROOT / page).read_text()):
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or ast.unparse(call.func).partition(".")[0] not in names:
                continue
            function = eval(ast.unparse(call.func), names)
            given = [argument for argument in call.args if getattr(argument, "value", None) is not ...]
            signature = inspect.signature(function)
            bind = signature.bind if given == call.args else signature.bind_partial
            bind(*given, **{keyword.arg: keyword.value for keyword in call.keywords})

"""The site: docstrings, examples, measurements.

    pip install '.[docs]'
    python -m sphinx -W --keep-going examples/site build/site
"""

import re
from configparser import ConfigParser
from pathlib import Path

import numbattn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
settings = ConfigParser()
settings.read(ROOT / "setup.cfg")
ADDRESS = settings["release"]["address"].rstrip("/")

project = "numbattn"
author = settings["metadata"]["author"]
version = release = numbattn.__version__
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = f"numbattn {version}"
html_copy_source = False
html_static_path = []
templates_path = ["templates"]
exclude_patterns = ["templates"]
nitpicky = False

myst_heading_anchors = 4
autosummary_generate = True
autodoc_typehints = "none"  # docstrings say the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
default_role = "py:obj"

PAGES = {"README.md": "index", "examples/README.md": "examples", "bench/README.md": "measurements",
         "CONTRIBUTING.md": "house", "CHANGELOG.md": "changelog"}  # what of the repository is a page here
PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)]+\))")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def read(app, docname, source):
    """A page of the repository, with its pictures, and links to pages here, to the repository, or, without an address,
    to nothing."""
    for page, name in PAGES.items():
        if name == docname:
            text = PICTURE.sub(rf"\1../../{Path(page).parent.as_posix()}/\2", (ROOT / page).read_text())
            text = text.replace("```floors", "```text")  # which no highlighter knows
            source[0] = source[0].replace("{{ page }}", LINK.sub(leading_from(ROOT / page), text))


def leading_from(page):
    def replaced(match):
        words, target, anchor = match.groups(default="")
        path = (page.parent / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"[{words}]({PAGES[path]}.md{anchor})"
        return f"[{words}]({ADDRESS}/blob/main/{path}{anchor})" if ADDRESS else words

    return replaced


def setup(app):
    app.connect("source-read", read)

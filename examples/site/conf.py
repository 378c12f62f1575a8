"""The site: docstrings, examples, measurements.

    pip install '.[docs]'
    python -m sphinx -W --keep-going examples/site build/site
"""

import sys
from configparser import ConfigParser
from pathlib import Path

import numbattn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from links import led  # noqa: E402

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
html_show_copyright = False  # LICENSE says whose it is
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
MODULES = {"numbattn/points": "points", "numbattn/sparse": "block-sparse-matrices", "numbattn/cuda": "gpus",
           "numbattn/distributed": "several-devices", "numbattn/interop": "frameworks"}  # sections of api.md
PROGRAMS = sorted((ROOT / "examples").glob("[0-9]*.py"))


def read(app, docname, source):
    """A page of the repository, the programs, or one of the site, whose links lead elsewhere in the repository."""
    source[0] = led(source[0], f"{HERE.relative_to(ROOT).as_posix()}/{docname}.md", place)
    for page, name in PAGES.items():
        if name == docname:
            text = led((ROOT / page).read_text(), page, place)
            text = text.replace("```floors", "```text")  # which no highlighter knows
            text = text.replace("\n\n```\n", "\n```\n")  # doctest ends what is expected at an empty line
            source[0] = source[0].replace("{{ page }}", text)
    source[0] = source[0].replace("{{ programs }}", "\n".join(
        f"## {file.name}\n\n```{{literalinclude}} ../{file.name}\n```\n" for file in PROGRAMS))


def place(path, picture):
    """Where a link leads: to a page here, to the repository or, without an address, nowhere."""
    if picture:
        return f"../../{path}"
    if path in PAGES:
        return f"{PAGES[path]}.md"
    if (module := path.removesuffix("/__init__.py")) in MODULES:
        return f"api.md#{MODULES[module]}"
    if (ROOT / path).parent == HERE:
        return Path(path).name
    if ROOT / path in PROGRAMS:
        return f"programs.md#{Path(path).name.replace('.', '')}"
    return f"{ADDRESS}/blob/main/{path}" if ADDRESS else None


def setup(app):
    app.connect("source-read", read)

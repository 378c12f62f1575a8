"""api.md, the site's list of all public names: each module's own docstring, and a page for each name of its `__all__`.

    python examples/site/reference.py
"""

import re
from importlib import import_module
from pathlib import Path

TITLES = {
    "numbattn": "numbattn", "numbattn.points": "Points", "numbattn.sparse": "Block-sparse matrices",
    "numbattn.graphs": "Graphs",
    "numbattn.distributed": "Several devices", "numbattn.reference": "The algorithms, to read",
}  # fmt: skip
MODULE = """## {title}

```{{eval-rst}}
.. automodule:: {name}
   :no-members:

.. currentmodule:: {name}

.. autosummary::
   :toctree: api

{names}
```
"""
REST = """## GPUs

```{eval-rst}
.. automodule:: numbattn.cuda
   :no-members:
```

### Kernels of your own

Run by `launch`, of `numbattn.cuda.kernel`:

```{literalinclude} ../../numbattn/cuda/kernel.py
:pyobject: launch
:end-before: grid = padded
```

The words of `numbattn.cuda.tile`, each with an example in its docstring:

```{literalinclude} ../../numbattn/cuda/tile/__init__.py
:language: text
:lines: 2-
:end-before: In the words' examples
```

## Frameworks

```{eval-rst}
.. automodule:: numbattn.interop
   :no-members:
```
"""


def names_of(module):
    """The public names, those of the docstring's table first, in its order."""
    told = re.findall(r"\w+", module.__doc__)
    places = {name: place for place, name in reversed([*enumerate(told)])}
    return sorted({*module.__all__} - {"__version__"}, key=lambda name: (places.get(name, len(told)), name))


def text():
    parts = ["# Reference\n\nAll of `import numbattn as na`; then the modules, each imported by its name.\n"]
    for name, title in TITLES.items():
        names = "\n".join(f"   {public}" for public in names_of(import_module(name)))
        parts.append(MODULE.format(title=title, name=name, names=names))
    return "\n".join([*parts, REST])


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(text())

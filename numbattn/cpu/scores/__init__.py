"""The steps of each kind of part of a score, in files that are found here."""

from importlib import import_module
from pkgutil import iter_modules

from .kind import CPUScoreKind, Row, matrix_of

_MODULES = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
KINDS = tuple([x for module in _MODULES for x in vars(module).values() if isinstance(x, CPUScoreKind)])

__all__ = ["KINDS", "CPUScoreKind", "Row", "matrix_of"]

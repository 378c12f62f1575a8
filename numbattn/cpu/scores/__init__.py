"""The steps of each kind of part of a score: a file for each kind, whose KIND is found here."""

from importlib import import_module
from pkgutil import iter_modules

from .kind import CPUScoreKind, Row, matrix_of

_MODULES = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
KINDS: tuple[CPUScoreKind, ...] = tuple([module.KIND for module in _MODULES if hasattr(module, "KIND")])

__all__ = ["KINDS", "CPUScoreKind", "Row", "matrix_of"]

"""The version, for `numbattn.__version__`, setup.cfg and whoever reports a fault."""

__version__ = "0.1.0"

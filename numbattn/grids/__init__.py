"""Tokens on a grid, and their neighbourhoods: images, volumes, simulations."""

from .grid import Grid

__all__ = ["Grid"]

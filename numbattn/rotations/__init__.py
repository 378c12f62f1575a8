"""Rotary position embeddings: queries and keys turned by angles in proportion to their positions."""

from .calls import rotary, rotary_jvp, rotary_vjp
from .value import Rotary

__all__ = ["Rotary", "rotary", "rotary_jvp", "rotary_vjp"]

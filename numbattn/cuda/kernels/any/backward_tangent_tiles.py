"""Tiles of the kernels of the backward pass's tangent for any GPU: tables, each row as measured. See `kernels.tables`."""

from ..tables import Streamed

TILES_KV = {}
TILES_Q = {}

"""Exact FlashAttention and its gradients for NumPy and CuPy arrays."""

from .api import attention, attention_backward, attention_forward, attention_vjp
from .dropout import Dropout, dropout_mask
from .masks import Bits, BlockSparse, Causal, Dense, Lengths, Window

__version__ = "0.1.0"

__all__ = [
    "Bits",
    "BlockSparse",
    "Causal",
    "Dense",
    "Dropout",
    "Lengths",
    "Window",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_vjp",
    "dropout_mask",
]

"""Attention of sequences that are split over devices: the functions of `numbattn`, with a ring of ranks before q."""

from .api import attention, attention_backward, attention_forward, attention_vjp
from .devices import Devices
from .driver import Ring
from .mpi import Mpi
from .nccl import Nccl
from .ring import Saved
from .simulated import Deadlock, Simulated

__all__ = [
    "Deadlock",
    "Devices",
    "Mpi",
    "Nccl",
    "Ring",
    "Saved",
    "Simulated",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_vjp",
]

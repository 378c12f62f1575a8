"""From a Problem, a device and the layouts of arrays to a Plan, a value: which kernels are launched, and with what."""

from ..words.tiers import tier

__all__ = ["tier"]

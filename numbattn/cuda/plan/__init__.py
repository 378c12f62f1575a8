"""From a Problem, a device and the layouts of arrays to a Plan, a value: which kernels are launched, and with what."""

from .tiers import tier

__all__ = ["tier"]

"""Tiers of kernels, by the instructions that multiply: tests and benchmarks may ask for an older one."""

from contextlib import contextmanager
from contextvars import ContextVar

MMA, WGMMA = "mma", "wgmma"  # mma.sync, from 8.0 on; wgmma, 9.0 alone
TIERS = MMA, WGMMA
latest = ContextVar("latest", default=WGMMA)


@contextmanager
def tier(name):
    """Inside, no kernels of a later tier than this are planned: "mma" for those of Ampere on Hopper.

    It changes nothing where the device has no later one.

    >>> from numbattn.cuda.plan import tier
    >>> with tier("mma"):
    ...     pass  # numbattn.attention(q, k, v), on Hopper by mma.sync
    """
    if name not in TIERS:
        raise ValueError(f"tier: got {name!r}, expected one of {', '.join(TIERS)}")
    token = latest.set(name)
    try:
        yield
    finally:
        latest.reset(token)


def is_allowed(name, last):
    """Whether kernels of tier `name`, or of none, are no later than tier `last`."""
    return not name or TIERS.index(name) <= TIERS.index(last)

"""Tiers of kernels, by their multiply instructions: tests and benchmarks may ask for an older one."""

from contextlib import contextmanager
from contextvars import ContextVar

MMA, WGMMA = "mma", "wgmma"  # mma.sync, from 8.0 on; wgmma, 9.0 alone
TIERS = MMA, WGMMA
latest = ContextVar("latest", default=WGMMA)


@contextmanager
def tier(name):
    """Inside, only kernels up to this tier are planned: with "mma", Hopper runs the kernels for Ampere.

    Nothing changes on devices without a later tier.

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
    """Whether kernels of tier `name`, or of none, may be used up to tier `last`."""
    return not name or TIERS.index(name) <= TIERS.index(last)

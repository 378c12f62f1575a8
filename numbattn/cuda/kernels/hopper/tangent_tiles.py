"""Which tiles the tangent of the forward pass on Hopper takes."""

from .forward_tiles import Warpgroups, head_dims, is_for_hopper

# O and its tangent take half of a consumer's registers at head_dim 128
USUAL = {  # of the largest head_dim
    64: Warpgroups(96, 2, 2, 3),
    128: Warpgroups(64, 2, 2, 3),
}


def rows(work):
    return (USUAL[max(head_dims(work.problem))],)


def takes(work):
    """Whether TMA and wgmma compute it: where Q K^T has a tangent and O is rounded to q's dtype."""
    problem, dtypes = work.problem, work.dtypes
    return (
        is_for_hopper(work)
        and max(head_dims(problem)) <= max(USUAL)
        and dtypes["o"] == dtypes["to"] == problem.dtype
        and ("tq" in dtypes or "tk" in dtypes)
    )

"""The tiles of the tangent of the forward pass on Hopper: tables, as in `forward_tiles`."""

from ..scores import READS, looks_up
from .choice import Case, first_of, words_of
from .forward_tiles import Warpgroups, head_dims, is_for_hopper

# TFLOP/s of the six products on an H100: seqlen 1024, 4096, 16384. O, S and their tangents fill the registers of two
# consumers, whose products and exponentials overlap anyway: to keep (P tS) V of a tile in flight with the next S is up
# to 9 % slower, as are 48 keys at head_dim 128. Rows without numbers: the most keys that fit in registers
USUAL = {  # by the larger head_dim
    64: Warpgroups(96, 2, 2, 4),                                    # 614, 660, 616; 112 keys 553, 672, 643
    128: Warpgroups(64, 2, 2, 3),                                   # 681, 726, 675; `hopper_forward` 585, 705, 695
    192: Warpgroups(48, 2, 2, 2),                                   # for head_dim_v of at most 128
}
LARGEST_V = 128
SCORED = USUAL | {128: Warpgroups(48, 2, 2, 3)}  # S and tS are both there before the softmax
LOOKED_UP = {  # and so is what a score's arrays add to them
    64: Warpgroups(64, 2, 3, 4),
    128: Warpgroups(32, 2, 3, 3),
    192: Warpgroups(32, 2, 2, 2),
}

CHOICES = Case("looked-up", LOOKED_UP), Case("scored", SCORED), Case("", USUAL)


def rows(work):
    found = {"looked-up": looks_up(work.score), "scored": any(part.has_step for part in work.score)}
    return (first_of(CHOICES, words_of(found))[max(head_dims(work.problem))],)


def takes(work):
    """Whether TMA and wgmma compute it: Q K^T has a tangent, the arrays that functions read have none, and O is rounded
    to q's dtype."""
    problem, dtypes = work.problem, work.dtypes
    head_dim, head_dim_v = head_dims(problem)
    return (
        is_for_hopper(work)
        and head_dim <= max(USUAL)
        and head_dim_v <= LARGEST_V
        and dtypes["o"] == dtypes["to"] == problem.dtype
        and ("tq" in dtypes or "tk" in dtypes)
        and not any(tangent and tangent.gradient == READS for tangent in work.tscore)     # they would spill
    )

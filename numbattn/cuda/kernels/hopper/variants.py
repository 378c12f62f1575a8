"""Which kernels compute gradients on Hopper, and how: tables of rows in the words of `traits`. Measured on an H200."""

from ..any.intervals import has_offsets
from ..scores import is_nonlinear, looks_up
from ..scores.function import ShiftKind
from ..shared.visibility import BY_INTERVALS, PACKED, is_function, is_looked_up
from .backward_steps import dtype_of_bias, size_of
from .choice import Case, first_of, words_of
from .distance_sums import distance_reads_of
from .forward_tiles import has_small_blocks, head_dims

SUMS, BOTH, WIDE, GENERAL = "sums", "both", "wide", "general"
DP_DS_DV, DP_DV_DS, DV_DP_DS = "dP, dS, dV", "dP, dV, dS", "dV, dP, dS"
NOW, LATE, EARLY = "now", "late", "early"


KERNELS = (  # backward_kv and round_dq; backward_kv and backward_q; backward_wide and backward_q; mma_backward
    Case("dropout decreasing", GENERAL),         # the sign of P F says what is dropped, unless F may be negative
    Case("192", WIDE),                           # no registers for both accumulators, dK and dV
    Case("256", WIDE),
    Case("offsets", WIDE),                       # nor with an offset for each query,
    Case("64 intervals", WIDE),                  # the intervals of a mask,
    Case("nonlinear looked-up", WIDE),           # the derivative of a score and what is looked up for each element,
    Case("128 nonlinear dropout", WIDE),         # or dropout
    Case("deterministic", BOTH),                 # dQ is added up in no fixed order
    Case("small-blocks", BOTH),                  # one consumer a block, and dQ has no room in shared memory
    Case("narrow", BOTH),                        # the sums would take 8 times the memory of dQ, to save 10 % of time
    Case("uneven", BOTH),
    Case("64 nonlinear sloped", BOTH),           # spills registers
    Case("reads", BOTH),                         # the kernel for dQ adds up gradients of a function's arrays
    Case("", SUMS),
)
ORDERS = (  # dP overlaps with the exponentials where a consumer has registers for it from the first
    Case("128 function", DP_DV_DS),              # with the next row a causal one is 14 % faster (H100, seqlen 8192)
    Case("loaded", DV_DP_DS),
    Case("64 shift", DV_DP_DS),                  # 38 % faster with slopes: with dP before dV it spills registers
    Case("128 dropout", DV_DP_DS),
    Case("dropout scored", DV_DP_DS),
    Case("128 nonlinear few unordered even", DP_DV_DS),
    Case("nonlinear", DV_DP_DS),
    Case("64", DP_DS_DV),                        # 8 % faster than with dV before dS
    Case("", DP_DV_DS),                          # 6 % faster than with dV after dS: it overlaps with dS
)
DQ = (  # when a part of dQ leaves shared memory
    Case("64", NOW),                             # shared memory has no second place for it
    Case("tma-bias", NOW),
    Case("", LATE),  # at 128 6 to 8 % faster with slopes, 10 with dropout, 13 to 16 with a softcap (H100, seqlen 4096)
)
STATISTICS = (  # when lse and delta are read: a step early where there are registers for them
    Case("128 even plain unordered", EARLY),     # 6 % faster
    Case("128 even function unordered", EARLY),
    Case("", NOW),
)
PRODUCT_1 = (  # when the next tile's S is started: beside dQ, where a consumer has registers for both
    Case("by-distance", LATE),                   # it has fewer: at 128 ptxas would serialise all products
    Case("128 shift", LATE),                     # 5 % faster with a table, 2 with slopes (H100, seqlen 2048)
    Case("", EARLY),
)


def traits(work):
    """The traits of some work that the tables ask for."""
    head_dim, _ = head_dims(work.problem)
    looked_up, by_distance = is_looked_up(work.mask) or looks_up(work.score), distance_reads_of(work)
    found = {
        str(size_of(work)): True,                               # the larger head_dim, rounded up
        "deterministic": work.deterministic,
        "unordered": not work.deterministic,
        "dropout": work.problem.dropout,
        "offsets": has_offsets(work),                           # each query has its own
        "intervals": BY_INTERVALS in work.mask,
        "looked-up": looked_up,                                 # something is, for each element
        "loaded": looked_up and (is_looked_up(work.mask) or not dtype_of_bias(work)),   # and not by TMA
        "function": work.mask and all(map(is_function, work.mask)) and not (work.score or work.problem.dropout),
        "tma-bias": dtype_of_bias(work),                        # a bias that TMA loads
        "small-blocks": has_small_blocks(work),
        "scored": work.score,
        "plain": set(work.mask) <= {"lo", "hi", PACKED} and not (work.score or work.problem.dropout),
        "few": all(part.takes_few_registers for part in work.score),
        "nonlinear": is_nonlinear(work.score),
        "decreasing": any(part.may_decrease for part in work.score),
        "shift": any(isinstance(part, ShiftKind) for part in work.score),     # a function that only adds
        "sloped": any(part.is_sloped for part in work.score),
        "narrow": work.problem.head_dim <= 32,
        "reads": work.reads and not by_distance,                # gradients of a function's arrays
        "by-distance": by_distance,                             # the same of what it reads by distance
        "even": head_dim == size_of(work),
        "uneven": head_dim != size_of(work),
    }
    return words_of(found)


def variant_of(rows, work):
    """The variant of the first row that fits."""
    return first_of(rows, traits(work))

"""Which kernels compute gradients on Hopper, and how. Measured on an H200."""

from typing import NamedTuple

from ...words.numbers import SIDES
from ..any.intervals import has_offsets
from ..scores import READS, is_nonlinear, looks_up
from ..scores.function import ShiftKind
from ..shared.visibility import BY_INTERVALS, PACKED, is_function, is_looked_up
from ..tables import longest_sequence
from .backward_steps import dtype_of_bias, size_of
from .choice import Case, words_of
from .distance_sums import distance_reads_of
from .forward_tiles import has_small_blocks, head_dims

# The kernels: backward_kv and round_dq, which add up dQ in no order, or in turn; backward_kv and backward_q;
# backward_wide and backward_q; mma_backward, with the dQ of Hopper; those for Ampere
SUMS, TURNS, BOTH, WIDE, GENERAL, AMPERE = "sums", "turns", "both", "wide", "general", "ampere"
SHORT = 1024  # tokens of a sequence
DP_DS_DV, DP_DV_DS, DV_DP_DS = "dP, dS, dV", "dP, dV, dS", "dV, dP, dS"


class Variant(NamedTuple):
    """What is fastest, unless a row of EXCEPTIONS says otherwise: which kernels, and how `hopper_backward_kv` works.

    order: of products 2 and 3, and dS. dq_late: whether dQ leaves shared memory another step later, in two places: then
    dS and dQ share one fence and one barrier, and nothing waits for a store after the products. statistics_early:
    whether lse and delta of a tile are read a step ahead, which takes registers. s_early: whether the next tile's S is
    in flight beside dQ.
    """

    kernels: str = SUMS
    order: str = DP_DV_DS  # 6 % faster than with dV after dS: it overlaps with dS, and dP with the exponentials
    dq_late: bool = True  # at 128 6 to 8 % faster with slopes, 10 with dropout, 13 to 16 with a softcap (H100, 4096)
    statistics_early: bool = False
    s_early: bool = True


EXCEPTIONS = (  # by traits: of each field, the first row that fits counts
    Case("dropout decreasing", {"kernels": GENERAL}),   # the sign of P F says what is dropped, unless F may be negative
    Case("192", {"kernels": WIDE}),                     # no registers for both accumulators, dK and dV
    Case("256", {"kernels": WIDE}),
    Case("offsets", {"kernels": WIDE}),                 # nor with an offset for each query,
    Case("64 intervals", {"kernels": WIDE}),            # the intervals of a mask,
    Case("nonlinear looked-up", {"kernels": WIDE}),     # a score's derivative and what is looked up for each element,
    Case("128 nonlinear dropout", {"kernels": WIDE}),   # or dropout
    Case("deterministic", {"kernels": BOTH}),           # dQ is added up in no fixed order, and not in turn either
    Case("small-blocks", {"kernels": BOTH}),            # one consumer a block, and dQ has no room in shared memory
    Case("narrow short plain any-order", {"kernels": AMPERE}),          # 26 % faster at 256, 11 at 1024; fewer zeros
    Case("narrow", {"kernels": BOTH}),                  # sums would take 8 times the memory of dQ, to save 10 % of time
    Case("uneven", {"kernels": BOTH}),
    Case("64 nonlinear sloped", {"kernels": BOTH}),     # spills registers
    Case("reads", {"kernels": BOTH}),                   # the kernel for dQ adds up gradients of a function's arrays
    Case("in-turn", {"kernels": TURNS}),
    Case("128 function", {"order": DP_DV_DS}),          # a causal one is 14 % faster than "loaded" (H100, seqlen 8192)
    Case("loaded", {"order": DV_DP_DS}),                # no registers for dP from the first, here and below
    Case("64 shift", {"order": DV_DP_DS}),              # 38 % faster with slopes: with dP before dV it spills registers
    Case("dropout", {"order": DV_DP_DS}),
    Case("128 nonlinear few unordered even", {"order": DP_DV_DS}),
    Case("nonlinear", {"order": DV_DP_DS}),
    Case("64", {"order": DP_DS_DV, "dq_late": False}),  # 8 % faster; shared memory has no second place for dQ
    Case("tma-bias", {"dq_late": False}),               # nor here
    Case("128 even plain unordered", {"statistics_early": True}),       # 6 % faster
    Case("128 even function unordered", {"statistics_early": True}),
    Case("by-distance", {"s_early": False}),            # fewer registers: at 128 ptxas would serialise all products
    Case("128 shift", {"s_early": False}),              # 5 % faster with a table, 2 with slopes (H100, seqlen 2048)
)


def traits(work):
    """The traits of some work that EXCEPTIONS ask for."""
    head_dim, _ = head_dims(work.problem)
    in_turn = work.deterministic and adds_in_turn(work)
    looked_up, by_distance = is_looked_up(work.mask) or looks_up(work.score), distance_reads_of(work)
    found = {
        str(size_of(work)): True,                               # the larger head_dim, rounded up
        "deterministic": work.deterministic and not in_turn,
        "any-order": not work.deterministic,
        "unordered": in_turn or not work.deterministic,
        "in-turn": in_turn,
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
        "decreasing": any(part.is_nonlinear and part.gradient == READS for part in work.score),
        "shift": any(isinstance(part, ShiftKind) for part in work.score),     # a function that only adds
        "sloped": any(part.is_sloped for part in work.score),
        "narrow": work.problem.head_dim <= 32,
        "short": longest_sequence(work) <= SHORT,
        "reads": work.reads and not by_distance,                # gradients of a function's arrays
        "by-distance": by_distance,                             # the same of what it reads by distance
        "even": head_dim == size_of(work),
        "uneven": head_dim != size_of(work),
    }
    return words_of(found)


def adds_in_turn(work):
    """Whether tiles of keys can take turns at adding to dQ: a band says which do, and there is room for a second dQ."""
    return set(work.mask) <= {*SIDES, PACKED} and not dtype_of_bias(work)


def variant_of(work):
    """The Variant for some work."""
    words = traits(work)
    fitting = [row.variant for row in EXCEPTIONS if words.issuperset(row.traits.split())]
    return Variant(**{field: value for row in reversed(fitting) for field, value in row.items()})

"""The generators of a rank: it computes and yields messages to send and to receive. Drivers run them.

Once all ranks agree, a plan computes: `ring` or `heads`.
"""

from __future__ import annotations

from typing import Any

from ..base.checks import flag, words_for
from ..call.problem import checked_gradients
from . import heads, ring
from .costs import plan_of
from .facts import ALIKE, Facts, agreed
from .pieces import RankPlace
from .ring import Messages, Saved
from .share import HEADS, RingOptions, share_of


def forward(place: RankPlace, q: Any, k: Any, v: Any, call: RingOptions) -> Messages:
    """o and what is saved."""
    share = yield from share_of(place, q, k, v, call)
    with ALIKE:
        plan = heads if plan_of(share, call.plan) == HEADS else ring
    return (yield from plan.forward(share))


def backward(place: RankPlace, do: Any, dlse: Any, saved: Saved, deterministic: bool) -> Messages:
    """dq, dk, dv and the gradients of the score."""
    own: Facts | Exception
    try:
        if not isinstance(saved, Saved):
            raise TypeError(f"saved: got {words_for(saved)}, expected what distributed.attention_forward returned")
        _check_place(saved, place)
        do, dlse = checked_gradients(saved._as_of_a_call, do, dlse)
        deterministic = flag("deterministic", deterministic)
        first, *_ = saved.share.facts  # all ranks know the first one's, and so whether they saved the same call
        own = {"call": "backward", "deterministic": deterministic, "dlse": "None" if dlse is None else "an array",
               **{f"saved: {name}": fact for name, fact in first.items()}}  # fmt: skip
    except Exception as error:
        own = error
    yield from agreed(place, own)
    plan = ring if saved.of_heads is None else heads
    return (yield from plan.backward(saved, do, dlse, deterministic))


def _check_place(saved: Saved, place: RankPlace) -> None:
    """Refuse what another rank has saved, or one of another kind of ring."""
    of = saved.share.place
    if of != place:
        raise ValueError(f"saved: got that of {of}, expected that of {place}")

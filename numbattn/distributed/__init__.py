"""Attention of sequences that are split over ranks: the functions of `numbattn`, with a ring as first argument.

>>> import numbattn as na, numpy as np
>>> from numbattn import distributed as nad
>>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 500, 64))
>>> ring = nad.Simulated(4)             # ranks that take turns; GPUs of one process: nad.Devices([0, 1, 2, 3]);
>>> parts = [ring.split(x) for x in (q, k, v)]      # a process each: nad.Mpi(communicator), nad.Nccl(communicator)
>>> o, backprop = nad.attention_vjp(ring, *parts, causal=True, dropout=na.Dropout(0.1, seed=7))
>>> dq, dk, dv = backprop(ring.split(do))
>>> ring.join(dq).shape
(8, 500, 64)

In one process there are lists of parts, one for each rank; if ranks are processes each has its own part. A sequence is
split in zigzag unless the ring is told otherwise: of 2n pieces the first rank has the first and the last, the next one
the second and the last but one, so that a causal mask gives all ranks equal work. Any length will do; pieces begin at
multiples of 32 tokens. Options and results are those of one device, with one exception: `Alibi` and `RelativeBias`
without an offset are refused with `Segments` whose queries and keys differ.

All ranks call the same functions with the same options. If they do not, all of them raise an error that shows the
difference. If a call is interrupted on some rank, as by a time-out or Ctrl-C, the ring refuses all others, on all
ranks, until each has called ``ring.reset()``. With ``plan="ring"`` keys and values travel, and their gradients, in
float32 or float64; what the queries of a rank do not see, as far as all ranks know the mask, is not sent to it. With
``plan="heads"`` each rank gets whole sequences for its share of the heads, in the dtype of the inputs. By default the
plan is chosen by the costs that ``python -m numbattn plan --devices 8`` shows.

For decoding, `attention_over_keys` leaves keys where they are: each rank has all queries and a part of the cache.
"""

from typing import Any

from .api import attention, attention_backward, attention_forward, attention_over_keys, attention_vjp
from .devices import Devices
from .driver import Interrupted, Ring
from .mpi import Mpi
from .nccl import Nccl
from .ring import Saved
from .simulated import Deadlock, Simulated

__all__ = [
    "Deadlock",
    "Devices",
    "Interrupted",
    "Mpi",
    "Nccl",
    "Ring",
    "Saved",
    "Simulated",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_over_keys",
    "attention_vjp",
]

_SECOND_DERIVATIVES = (
    "attention_backward_jvp",
    "attention_backward_vjp",
    "attention_forward_jvp",
    "attention_jvp",
    "attention_laplacian",
)


def __getattr__(name: str) -> Any:
    """Say so for functions of numbattn that are not here yet."""
    if name in _SECOND_DERIVATIVES:
        raise AttributeError(f"numbattn.distributed has no {name} yet: sequences that are split have first derivatives "
                             f"alone, numbattn.{name} takes whole arrays")  # fmt: skip
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

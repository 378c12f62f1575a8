"""The place of a call in a larger attention, as kernels take it: see numbattn.base.origin."""

from ....base.origin import Origin
from ...compiler import types
from ...tile import INDEX
from ...words.numbers import ORIGIN

PLACE = "first", *ORIGIN  # the first element of the batch of a launch, and the call's origin
PLACE_TYPES = INDEX, types.NamedTuple([INDEX] * len(ORIGIN), Origin)

"""What a mask or a part of a score lowers to is kept with it, where its arrays are on a GPU: nobody reads those."""

from ...checks import overlap
from ...values import Memo

KEPT = Memo("lowered")


def known(value, key, lower, own):
    """What lower(value, *key) returns, something and arrays by name; and where these lie, (name, shape, strides) each.

    own: (value) -> its arrays, or None if one is on the host. What lower returns is kept if all arrays in it are these.
    """
    found = KEPT.get(value, key)
    if found is None:
        lowered, arrays = lower(value, *key)
        found = lowered, arrays, tuple([(name, x.shape, x.strides) for name, x in arrays.items()])
        held = own(value)
        if held is not None and all(any(x is y or overlap(x, y) for y in held) for x in arrays.values()):
            KEPT.keep(value, key, found)
    return found

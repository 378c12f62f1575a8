"""What a mask or a part of a score lowers to is kept with it, where its arrays are on a GPU: nobody reads those."""

from ...checks import overlap
from ...values import Memo

KNOWN = Memo("lowered")  # by what it depends on


def lower_and_keep(value, key, lower, own):
    """What lower(value, *key) returns, something and arrays by name; and where these lie, (name, shape, strides) each.

    own: (value) -> its arrays, or None if one is on the host. It is known from now on if all arrays in it are these, or
    copies of what nobody else has.
    """
    lowered, arrays = lower(value, *key)
    found = lowered, arrays, tuple([(name, x.shape, x.strides) for name, x in arrays.items()])
    held = own(value)
    is_own = held is not None and all(any(x is y or overlap(x, y) for y in held) for x in arrays.values())
    if is_own or value._is_private:
        KNOWN.keep(value, key, found)
    return found

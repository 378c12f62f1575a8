"""A lowered mask or part of a score is kept with it, if its arrays are on a GPU, where the host does not read them."""

from ...base.checks import overlap
from ...base.values import Memo

KNOWN = Memo("lowered")  # by what lowering depends on


def lower_and_keep(value, key, lower, own):
    """The two results of lower(value, *key), anything and arrays by name; and the (name, shape, strides) of each array.

    own: (value) -> its arrays, or None if one is on the host. The result is kept if all its arrays are among these, or
    are copies that nobody else has.
    """
    lowered, arrays = lower(value, *key)
    found = lowered, arrays, tuple([(name, x.shape, x.strides) for name, x in arrays.items()])
    held = own(value)
    is_own = held is not None and all(any(x is y or overlap(x, y) for y in held) for x in arrays.values())
    if is_own or value._is_private:
        KNOWN.keep(value, key, found)
    return found

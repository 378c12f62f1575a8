"""Masks and scores fitted to the arrays of a call: checked, broadcast, and in the library of q.

The shape of a call is that of its S: batch axes, heads included, seqlen_q and seqlen_k.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .backends import backend
from .checks import check_values, library, refuse_foreign, warn
from .masks import AnyOf, Lengths, Mask, drawn
from .scores import Part
from .values import Memo, shown

Shape = tuple[int, ...]
FITTED = Memo("fitted")  # masks as kernels take them, by shape and place; () for the mask itself
CHECKED = Memo("checked")  # parts of scores that fit, by shape


def fitted_mask(mask: Mask, q: Any, shape: Shape, xp: str) -> Mask:
    """A mask with arrays."""
    if xp == "numpy" or not mask._lasts:
        return _fitted_anew(mask, q, shape, xp)
    place = backend(xp).place() if mask._has_functions else ()
    if place is None:
        return _fitted_anew(mask, q, shape, xp)
    known = FITTED.get(mask, (shape, place))
    if known is None:
        fitted = _fitted_anew(mask, q, shape, xp)
        known = () if fitted is mask else (fitted,)     # no cycle, which only the garbage collector would free
        FITTED.keep(mask, (shape, place), known)
    return known[0] if known else mask


def _fitted_anew(mask: Mask, q: Any, shape: Shape, xp: str) -> Mask:
    refuse_foreign("mask", mask._leaves)
    fitted = mask._fit(shape)
    check_mask(fitted, shape, xp)
    near = mask._like(q)  # arrays are copied to the device before they are broadcast
    fitted = fitted if near is mask else near._fit(shape)
    final = drawn(fitted, shape[-2], shape[-1], q)
    return fitted if final is fitted else final._fit(shape)


def fitted_score(parts: tuple[Part, ...], q: Any, shape: Shape, xp: str, frame: Mask | None) -> tuple[Part, ...]:
    """The parts of a score, in a call whose mask has this frame."""
    return tuple([_fitted_part(part, q, shape, xp)._within(frame) for part in parts])


def _fitted_part(part: Part, q: Any, shape: Shape, xp: str) -> Part:
    if xp == "numpy" or part._is_on_host:
        check_part(part, shape, xp)
        return part if xp == "numpy" else part._like(q)
    if not CHECKED.get(part, shape):
        check_part(part, shape, xp)
        CHECKED.keep(part, shape, True)
    return part


def check_part(part: Part, shape: Shape, xp: str) -> None:
    refuse_foreign("score", (part,))
    for name, array in part._arrays().items():
        if library(array) not in ("numpy", xp):
            raise TypeError(f"score: {type(part).__name__} {name}: got a {library(array)}.ndarray with inputs of "
                            f"{xp}")
    part._fit(shape[:-2], *shape[-2:])
    _check_held("score", part, shape, xp)


def check_mask(mask: Mask, shape: Shape, xp: str) -> None:
    for part in mask._leaves:
        _check_held("mask", part, shape, xp)
    if mask._segments is not None:
        _warn_of_packed_keys(mask)


check_numbers = lru_cache(maxsize=1024)(check_mask)  # of masks without arrays, which do not change


def _check_held(of: str, part: Mask | Part, shape: Shape, xp: str) -> None:
    """Refuse arrays over the batch axes that do not fit, of a part of a mask or of a score."""
    batch = shape[:-2]
    for name, array, own, largest, rising in part._held(*shape[-2:]):
        name = f"{of}: {type(part).__name__} {name}"
        if isinstance(array, int):
            if largest is not None and not 0 <= array <= largest:
                raise ValueError(f"{name}: got {array}, allowed 0 to {largest}")
            continue
        if library(array) not in ("numpy", xp):
            raise TypeError(f"{name}: got a {library(array)}.ndarray with inputs of {xp}")
        lead = array.shape[: array.ndim - len(own)]
        fits = len(lead) == len(batch) and all(a in (1, b) for a, b in zip(lead, batch))
        if not fits or array.shape[len(lead) :] != own:
            axes = [f"{b} or 1" if b != 1 else "1" for b in batch] + [str(n) for n in own]
            raise ValueError(f"{name}: got the shape {array.shape}, expected ({', '.join(axes)}): "
                             "all batch axes, heads included, each of full size or 1"
                             + _shape_to_pass(name.split()[-1], array.shape, batch, own))
        if largest is not None and library(array) == "numpy":
            check_values(name, array, largest, rising)
            if rising:
                _warn_of_lengths(name, array, largest)


def _shape_to_pass(name: str, given: Shape, batch: Shape, own: Shape) -> str:
    """How to give an array the batch axes that it lacks, for an error; "" if it does not fit anywhere."""
    lead = given[: len(given) - len(own)]
    ways: list[str] = []
    for before in range(len(batch) - len(lead), -1, -1):
        if given[len(lead):] == own and all(a in (1, b) for a, b in zip(lead, batch[before:])):
            index = ["None"] * before + [":"] * len(lead) + ["None"] * (len(batch) - len(lead) - before)
            shape = *(1,) * before, *lead, *(1,) * (len(batch) - len(lead) - before), *own
            ways.insert(0, f"{name}[{', '.join(index)}], of the shape {shape}")
    return f"; pass {' or '.join(dict.fromkeys(ways))}" if ways else ""


def _warn_of_packed_keys(mask: Mask) -> None:
    """Warn of Lengths in an `|` with Segments."""
    leaves = (leaf for part in mask._parts if isinstance(part, AnyOf) for leaf in part._leaves)
    for leaf in leaves:
        if isinstance(leaf, Lengths) and leaf.keys is not None:
            warn(f"mask: got {leaf} in an | with Segments, where it counts the keys of the packed array: the first "
                 f"keys of each segment are First({shown(leaf.keys)})")


def _warn_of_lengths(name: str, offsets: Any, length: int) -> None:
    first, last = offsets[..., :1], offsets[..., -1:]
    if offsets.size and first.all() and (last != length).all() and (offsets.sum(-1) <= length).all():
        warn(f"{name}: got offsets from {first.min()} to {last.max()} for {length} tokens: "
             "lengths were given, most likely; offsets are np.cumsum([0, *lengths])")

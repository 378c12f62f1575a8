"""Masks and scores fitted to the arrays of a call: checked, broadcast, and in the library of q.

The shape of a call is that of its S: batch axes, heads included, seqlen_q and seqlen_k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from ..base.backends import backend
from ..base.checks import check_values, dtype_of_sums, library, refuse_foreign, warn
from ..base.values import Memo, Value, shown
from ..masks import AnyOf, Lengths, Mask, materialised
from ..scores import Part
from ..scores.placed import placed

V = TypeVar("V", bound=Value)
Shape = tuple[int, ...]
FITTED = Memo("fitted")  # masks and parts of scores as kernels take them; () for the value itself
MOST_COMPARED = 1 << 16  # bytes of arrays on the host: more take longer to compare than to copy


def fitted_mask(mask: Mask, q: Any, shape: Shape, xp: str) -> Mask:
    """A mask with arrays."""
    if xp == "numpy" or mask._is_materialised:
        return _fitted_mask(mask, q, shape, xp)
    return _kept(mask, mask._has_functions, shape, xp, lambda: _fitted_mask(mask, q, shape, xp))


def _kept(value: V, has_place: bool, shape: Shape, xp: str, fit: Callable[[], V]) -> V:
    """fit(), which is kept for later calls on a GPU: by what arrays on the host hold, which may change in between.

    has_place: whether it is computed on a device, in the order of a stream, as copies are.
    """
    held = value._on_host
    if sum([x.nbytes for x in held]) > MOST_COMPARED:
        return fit()
    place = backend(xp).place() if has_place or held else ()
    if place is None:  # in a capture, in which nothing is copied to the GPU: what a call before it has
        is_known = value._is_private and not held
        before = FITTED.get(value, (shape, backend(xp).place_before())) if is_known else None
        return before[0] if before else fit()
    key = shape, place, *[x.tobytes() for x in held]
    known = FITTED.get(value, key)
    if known is None:
        fitted = fit()
        fitted._set(_is_private=len(held) == len(value._all_arrays))
        known = () if fitted is value else (fitted,)    # no cycle, which only the garbage collector would free
        FITTED.keep(value, key, known)
    return known[0] if known else value


def _fitted_mask(mask: Mask, q: Any, shape: Shape, xp: str) -> Mask:
    refuse_foreign("mask", mask._leaves)
    fitted = mask._fit(shape)
    check_mask(fitted, shape, xp)
    near = mask._like(q)  # arrays are copied to the device before they are broadcast
    fitted = fitted if near is mask else near._fit(shape)
    final = materialised(fitted, shape[-2], shape[-1], q)
    return fitted if final is fitted else final._fit(shape)


def fitted_score(parts: tuple[Part, ...], q: Any, shape: Shape, xp: str, frame: Mask | None) -> tuple[Part, ...]:
    """The parts of a score, in a call whose mask has this frame."""
    fitted = [_fitted_part(part, q, shape, xp) for part in parts]
    if frame is not None and frame._places_keys:
        about = shape, dtype_of_sums(q.dtype), () if xp == "numpy" else backend(xp).place()
        return tuple([placed(part, frame, *about) for part in fitted])
    return tuple([part._within(frame) for part in fitted])


def _fitted_part(part: Part, q: Any, shape: Shape, xp: str) -> Part:
    def fit() -> Part:
        check_part(part, shape, xp)
        return part._like(q)

    return fit() if xp == "numpy" else _kept(part, False, shape, xp, fit)


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

"""Facts that all ranks must agree on before they compute, or they would wait for each other for ever."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import fields
from typing import Any
from zlib import crc32

import numpy as np

from ..base.values import Taken, shown
from ..masks import Mask
from ..scores import Part
from .messages import Gather
from .pieces import RankPlace

Facts = dict[str, Any]  # by the argument's name, which an error names
LENGTHS, ROWS = "lengths", "rows"  # in which ranks may differ


class Agreed(Exception):
    """An error that all ranks raise, at the same place: they can go on together."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Alike:
    """A context for what all ranks compute from the same facts: an error on one is an error on all."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TypeError | ValueError):
            raise Agreed(error) from None


ALIKE = Alike()


class Failure(str):
    """A rank's error as it tells others. In its own process it also has the error itself."""

    is_of_argument: bool  # rather than, say, a signal handler's
    error: Exception | None

    def __new__(cls, text: str, is_of_argument: bool, error: Exception | None = None) -> Failure:
        self = super().__new__(cls, text)
        self.is_of_argument, self.error = is_of_argument, error
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (str(self), self.is_of_argument)


def failure(error: Exception) -> Failure:
    is_of_argument = isinstance(error, TypeError | ValueError)
    return Failure(str(error) if is_of_argument and str(error) else repr(error), is_of_argument, error)


def failed_on(rank: int, found: Failure) -> Exception:
    """The error to raise here for another rank's."""
    if found.is_of_argument:
        return ValueError(f"rank {rank}: {found}")
    return found.error or RuntimeError(f"rank {rank}: {found}")


def options(mask: Mask, scale: Any, dropout: Any, score: tuple[Part, ...]) -> Facts:
    """Facts about the options of a call."""
    parts = {f"score: part {number}": value(part) for number, part in enumerate(score)}
    return {"mask": value(mask), "scale": scale, "dropout": repr(dropout), **parts}


def value(x: Any) -> str:
    """The facts of a mask or a part of a score: its numbers, and its arrays except for their rows. Offsets and lengths
    on the host decide what travels, so they have a checksum."""
    if isinstance(x, tuple):
        return ", ".join(map(value, x))
    if isinstance(x, Taken):
        taken: Any = x
        name = f"{taken.function.__qualname__} of digest {taken._identity.digest}"
        return f"{type(x).__name__}({name}, {value(taken.arrays)}, {getattr(x, 'gradient', ())})"
    if not isinstance(x, Mask | Part):
        return shown(x)
    axis, found = x._axis_of_queries, []
    for field in fields(x):  # type: ignore[arg-type]
        held = getattr(x, field.name)
        if not hasattr(held, "shape"):
            found.append(value(held))
        elif axis is not None:
            shape = ["rows" if number == held.ndim + axis else str(n) for number, n in enumerate(held.shape)]
            found.append(f"{held.dtype} array ({', '.join(shape)})")
        else:
            is_known = isinstance(x, Mask) and isinstance(held, np.ndarray)
            found.append(shown(held) + (f" of checksum {crc32(held.tobytes()):x}" if is_known else ""))
    return f"{type(x).__name__}({', '.join(found)})"


def agreed(place: RankPlace, own: Facts | Exception) -> Generator[Any, Any, list[Facts]]:
    """The Facts of all ranks. An error on one rank is raised on all, as is any difference."""
    gathered = yield Gather(failure(own) if isinstance(own, Exception) else {"order": place.order, **own})
    if isinstance(own, Exception):
        raise Agreed(own)
    with ALIKE:
        for other, found in enumerate(gathered):
            if isinstance(found, Failure):
                raise Agreed(failed_on(other, found))
        check_same(gathered)
    return list(gathered)


def check_same(gathered: list[Facts]) -> None:
    """Refuse what differs between ranks."""
    if gathered.count(gathered[0]) == len(gathered):
        return
    names = dict.fromkeys(name for found in gathered for name in found if name not in (LENGTHS, ROWS))
    for name in names:
        values = [found.get(name) for found in gathered]
        if values.count(values[0]) < len(values):
            ranks = {x: [rank for rank, other in enumerate(values) if other == x] for x in values}
            got = ", ".join(f"{x} on {_ranks(numbers)}" for x, numbers in ranks.items())
            raise ValueError(f"{name}: got {got}, expected the same on all ranks")


def agreed_fit(place: RankPlace, facts: list[Facts], check: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """The result of check(), if it raises an error on no rank. facts: of all ranks, which have agreed."""
    found: Any = None
    own: Facts | Exception = {"fits": True, **facts[place.rank]}
    try:
        found = check()
    except Exception as error:
        own = error
    yield from agreed(place, own)
    return found


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

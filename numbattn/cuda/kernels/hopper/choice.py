"""Tables from which variants are chosen: read from top to bottom, the first row that fits is taken."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    traits: str  # words, all of which the work must have
    variant: Any


def words_of(traits):
    """The words that hold, of {word: whether it holds}."""
    return {word for word, holds in traits.items() if holds}


def first_of(rows, words):
    """The variant of the first row that fits."""
    return next(row.variant for row in rows if words.issuperset(row.traits.split()))

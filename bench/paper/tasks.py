"""What long_range.py and training.py train on, made here: nothing is downloaded.

The tasks of the Long Range Arena (Tay et al. 2021) that generators can make, ListOps and Pathfinder, and labels of long
documents. The text is the Python standard library's own sources, sorted by path.
"""

import sysconfig
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

compiled = njit(cache=True, nogil=True)


class Task(NamedTuple):
    symbols: int             # tokens are below this
    classes: int             # labels are below this
    coordinates: np.ndarray  # (axes, seqlen), the tokens'
    sample: Callable         # (rng, count, held_out=False) -> tokens (count, seqlen), labels (count,)

    @property
    def seqlen(self):
        return self.coordinates.shape[1]


def text_coordinates(seqlen):
    return np.arange(seqlen)[None]


# ------------------------------------------------------------------------------------------------------------ ListOps
# Tokens: the digits, MIN, MAX, MED, SM (the sum modulo 10), each of which opens a bracket, and CLOSE.
MIN, MAX, MED, SM, CLOSE = range(10, 15)


def listops(seqlen):
    """The value of an expression of exactly so many tokens, such as [MAX 4 [SM 2 9 ] 0 ]."""
    return Task(15, 10, text_coordinates(seqlen), partial(_listops, seqlen))


def _listops(seqlen, rng, count, held_out=False):
    tokens = np.empty((count, seqlen), np.uint8)
    for expression in tokens:
        write_expression(rng, expression)
    return tokens, np.array([value_of(expression) for expression in tokens])


@compiled
def write_expression(rng, tokens):
    """Write a random expression: an operator has 2 to 5 arguments, which share its tokens."""
    lengths, at = [len(tokens)], 0  # of the expressions still to be written, the last one first; 0: close
    while lengths:
        length = lengths.pop()
        if length == 0:
            tokens[at] = CLOSE
        elif length == 1:
            tokens[at] = rng.integers(0, 10)
        else:
            tokens[at] = rng.integers(MIN, SM + 1)
            lengths.append(0)
            left = length - 2
            for others in range(rng.integers(1, 5), -1, -1):
                share = min(left, rng.integers(1, 2 * left // (others + 1) + 2)) if others else left
                share -= share == 2  # the shortest are a digit and [MAX 7 ]
                if share:
                    lengths.append(share)
                left -= share
            if left:
                lengths.append(1)
        at += 1


@compiled
def value_of(tokens):
    stack = np.empty(len(tokens), np.int64)
    top = 0
    for token in tokens:
        if token != CLOSE:
            stack[top] = token
            top += 1
            continue
        start = top
        while stack[start - 1] < MIN:
            start -= 1
        operator, values = stack[start - 1], np.sort(stack[start:top])
        top = start
        middle = len(values) // 2
        if operator == MIN:
            stack[top - 1] = values[0]
        elif operator == MAX:
            stack[top - 1] = values[-1]
        elif operator == MED:
            stack[top - 1] = (values[middle] + values[-middle - 1]) // 2
        else:
            stack[top - 1] = values.sum() % 10
    return stack[0]


# --------------------------------------------------------------------------------------------------------- Pathfinder
# Pixels: 0, 1 of a path, 2 a dot.
DISTRACTORS = 3
DASH = 4  # steps of a path from one dash to the next, of which the last is not drawn
REACH = 2  # pixels of one path are at most so far apart, those of two are farther


def pathfinder(side):
    """Whether two dots are the ends of one dashed path, or of two, of the longest in the image."""
    coordinates = np.indices((side, side)).reshape(2, -1)
    return Task(3, 2, coordinates, partial(_pathfinder, side))


def _pathfinder(side, rng, count, held_out=False):
    images, labels = np.zeros((count, side, side), np.uint8), rng.integers(0, 2, count)
    for image, label in zip(images, labels):
        draw(rng, image, label)
    return images.reshape(count, -1), labels


@compiled
def draw(rng, image, label):
    """Draw an image in which ends of two paths are as far apart as those of one, which tells nothing of the label."""
    owner = np.zeros(image.shape, np.uint8)  # the number of a pixel's path, from 1
    while True:
        first, second = lay_out(rng, owner)
        dots, error = as_far_apart(first, second)
        if error <= len(image) / 32:
            break
    image[:] = owner > 0
    for y, x in first if label else dots:
        image[y, x] = 2


@compiled
def lay_out(rng, owner):
    """Mark each path's pixels. Returns the ends of the two long ones."""
    side = len(owner)
    path, ends = np.empty((side, 2), np.int64), np.empty((2, 2, 2), np.int64)
    number = tries = 0
    owner[:] = 0
    while number < 2 + DISTRACTORS:
        length = 3 * side // (4 if number < 2 else 8) // DASH * DASH - 1  # so that both ends are drawn
        if grow(rng, owner, path[:length]):
            if number < 2:
                ends[number, 0], ends[number, 1] = path[0], path[length - 1]
            number += 1
            for i in range(length):
                if i % DASH != DASH - 1:
                    owner[path[i, 0], path[i, 1]] = number
        tries += 1
        if tries % 1000 == 0:  # not all paths find room: start again
            owner[:] = number = 0
    return ends


@compiled
def as_far_apart(first, second):
    """An end of each path, at a distance most like that of the first path's ends, and the difference."""
    dots, best, wanted = np.empty_like(first), np.inf, distance(first[0], first[1])
    for one in first:
        for other in second:
            error = abs(distance(one, other) - wanted)
            if error < best:
                best, dots[0], dots[1] = error, one, other
    return dots, best


@compiled
def distance(a, b):
    return np.hypot(a[0] - b[0], a[1] - b[1])


@compiled
def grow(rng, owner, path):
    """Walk from a random place, turning slowly; returns whether all of it is in the image and far from others."""
    side = len(owner)
    y, x, heading = side * rng.random(), side * rng.random(), 2 * np.pi * rng.random()
    for i in range(len(path)):
        row, column = int(y), int(x)
        if not (0 <= y < side and 0 <= x < side):
            return False
        near = owner[max(0, row - REACH) : row + REACH + 1, max(0, column - REACH) : column + REACH + 1]
        if near.any():
            return False
        path[i] = row, column
        heading += 0.25 * rng.standard_normal()
        y, x = y + np.sin(heading), x + np.cos(heading)
    return True


# ------------------------------------------------------------------------------------------------------------- texts
PART = 4  # every fourth file is held out
ENOUGH = 2**15  # at least so many bytes of a package are held out


@lru_cache(maxsize=1)
def library():
    """The sources of the standard library without its tests, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return {path.as_posix(): (root / path).read_bytes() for path in paths
            if path.parts[0] not in ("test", "site-packages", "dist-packages")}  # fmt: skip


def split(sources):
    """What to train on, and what is held out, as arrays of bytes."""
    held_out = sources[PART - 1 :: PART]
    trained_on = [source for i, source in enumerate(sources) if i % PART != PART - 1]
    return [np.frombuffer(b"".join(some), np.uint8) for some in (trained_on, held_out)]


@lru_cache(maxsize=1)
def packages():
    """Both parts of the packages that are large enough, by name."""
    sources = {}
    for path, source in library().items():
        package, slash, _ = path.partition("/")
        if slash:
            sources.setdefault(package, []).append(source)
    parts = {package: split(some) for package, some in sources.items()}
    return {package: some for package, some in parts.items() if len(some[1]) >= ENOUGH}


def documents(seqlen):
    """Which package of the standard library a text is from."""
    return Task(256, len(packages()), text_coordinates(seqlen), partial(_documents, seqlen))


def _documents(seqlen, rng, count, held_out=False):
    texts = [parts[held_out] for parts in packages().values()]
    labels = rng.integers(0, len(texts), count)
    starts = [rng.integers(0, len(texts[label]) - seqlen + 1) for label in labels]
    return np.stack([texts[label][start : start + seqlen] for label, start in zip(labels, starts)]), labels

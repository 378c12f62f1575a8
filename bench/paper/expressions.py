"""Expressions such as [MAX 4 [SM 2 9 ] 0 ] and their values: ListOps of the Long Range Arena (Tay et al. 2021), sampled
as the Arena does."""

import numpy as np
from numba import njit

MIN, MAX, MED, SM, CLOSE = range(10, 15)  # tokens; those below are digits, SM is the sum modulo 10
SYMBOLS, VALUES = 15, 10
DEPTH, ARGUMENTS, NESTED = 10, 10, 0.25   # at most; the share of arguments that are expressions

compiled = njit(cache=True, nogil=True)


def sample(rng, count, shortest, longest):
    """A batch of expressions whose lengths are between the two: so many tokens, offsets and values. Expression i is
    tokens[offsets[i] : offsets[i + 1]]; what follows the last is padding."""
    tokens = np.zeros(count, np.uint8)
    return tokens, *_fill(rng, tokens[:-1], shortest, longest)


@compiled
def _fill(rng, tokens, shortest, longest):
    """Write expressions until one does not fit. Returns offsets and values."""
    offsets, values, start = [0], [], 0
    while True:
        length = _write(rng, tokens[start:], longest)
        if length > shortest:
            values.append(_value(tokens[start : start + length]))
            start += length
            offsets.append(start)
        elif length < 0 and len(tokens) - start < longest:
            tokens[start:] = 0
            return np.array(offsets, np.int32), np.array(values)


@compiled
def _write(rng, tokens, longest):
    """Write a random expression. Returns its length, -1 if that reaches the longest or it does not fit."""
    missing, depth, at = np.zeros(DEPTH + 1, np.int64), 0, 0  # arguments of the open expressions, by depth
    while at < min(len(tokens), longest - 1):
        if depth and missing[depth] == 0:
            depth -= 1
            tokens[at] = CLOSE
        else:
            missing[depth] -= 1
            if depth < DEPTH - 1 and rng.random() < NESTED:
                depth += 1
                tokens[at] = rng.integers(MIN, CLOSE)
                missing[depth] = rng.integers(2, ARGUMENTS + 1)
            else:
                tokens[at] = rng.integers(0, VALUES)
        at += 1
        if depth == 0:
            return at
    return -1


@compiled
def _value(tokens):
    stack, top = np.empty(len(tokens), np.int64), 0
    for token in tokens:
        if token != CLOSE:
            stack[top] = token
            top += 1
            continue
        start = top
        while stack[start - 1] < MIN:
            start -= 1
        operator, arguments, top = stack[start - 1], stack[start:top], start
        if operator == MIN:
            stack[top - 1] = arguments.min()
        elif operator == MAX:
            stack[top - 1] = arguments.max()
        elif operator == MED:
            stack[top - 1] = int(np.median(arguments))
        else:
            stack[top - 1] = arguments.sum() % 10
    return stack[0]

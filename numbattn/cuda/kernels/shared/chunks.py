"""Chunks of keys, at the same places in every sequence: short ones first, longer ones from where there are many.

A chunk's partial result is written and read again, which long chunks make rare; short ones give few keys to many warps.
"""

from ...tile import device

SHORT, LONG = 1024, 2048  # keys; 64 sequences of 4096 in chunks of 512 take 3 % longer, of 256 20 %
MANY = 32768  # keys in short chunks
SHORTS = MANY // SHORT


def count_of_chunks(keys):
    """Of a sequence."""
    return -(-keys // SHORT) if keys <= MANY else SHORTS - (MANY - keys) // LONG


@device
def first_key(chunk):
    return chunk * SHORT if chunk < SHORTS else (chunk - SHORTS) * LONG + MANY


@device
def chunks_between(first, end):
    """The chunks that the keys [first, end) lie in, a range."""
    return (chunk_of(first), chunk_of(end - 1) + 1) if first < end else (0, 0)


@device
def chunk_of(key):
    return key // SHORT if key < MANY else SHORTS + (key - MANY) // LONG

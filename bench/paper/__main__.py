"""The experiments of the FlashAttention paper, by name.

    python bench/paper figure2 --json figure2.json
    python bench/paper training --help

figure2      bytes, block sizes and sparsity
figure3      time and memory by sequence length, compared with approximations
training     GPT-2 small, by context
long_range   tasks of the Long Range Arena, long documents, and steps at the lengths of Path-X
io_model     the bytes that the plan, the standard formula and the theorems predict
"""

import sys
from importlib import import_module
from pathlib import Path

EXPERIMENTS = "figure2", "figure3", "training", "long_range", "io_model"


def main():
    name, *options = sys.argv[1:] or [None]
    if name not in EXPERIMENTS:
        sys.exit(__doc__)
    return import_module(f"paper.{name}").main(options)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # bench/, whose modules they share
    sys.exit(main())

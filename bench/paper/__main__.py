"""The experiments of the FlashAttention paper, by name.

    python bench/paper figure2 --json figure2.json
    python bench/paper figure2 --help

figure2      bytes, block sizes and sparsity
figure3      time and memory by sequence length, compared with approximations
io_model     the bytes that the plan, the standard formula and the theorems predict
listops      ListOps of the Long Range Arena, learnt with numbattn and with the standard formula
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

EXPERIMENTS = "figure2", "figure3", "io_model", "listops"


def main():
    parser = argparse.ArgumentParser(prog="python bench/paper", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="those of the experiment: NAME --help")
    args = parser.parse_args()
    return import_module(f"paper.{args.name}").main(args.options)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # bench/, whose modules they share
    sys.exit(main())

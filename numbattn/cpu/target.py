"""The CPU that Numba compiles for, which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may change."""

import sys

from numba.core.registry import cpu_target

from ..base.compiling import check_setting

check_setting("DISABLE_JIT")
TRIPLE, CPU, TARGET = cpu_target.target_context.codegen().magic_tuple()
FEATURES = {feature[1:] for feature in TARGET.split(",") if feature.startswith("+")}
VECTOR_BYTES = 64 if "avx512f" in FEATURES else 32 if "avx" in FEATURES else 16

# what kernels of each architecture are compiled ahead for: names and features of LLVM, the most capable first
V3 = "avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf"
V4 = "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"
LEVELS = {"x86_64": {"x86-64-v4": (*V3, *V4), "x86-64-v3": V3}, "aarch64": {"generic": ("neon",)}}


def levels():
    """The levels that this CPU has, the most capable first."""
    known = LEVELS.get(TRIPLE.split("-")[0].replace("arm64", "aarch64"), {})
    return {name: features for name, features in known.items() if FEATURES.issuperset(features)}


def platform_of_level():
    """What code compiled ahead has to fit, to be run here; None if there is none. Kernels for fewer features lay out
    their memory for shorter vectors."""
    found = next(iter(levels().items()), None)
    has_longer = found and "avx512f" in FEATURES and "avx512f" not in found[1]
    return (found[0], TRIPLE.split("-")[0], sys.platform) if found and not has_longer else None


PLATFORM = platform_of_level()

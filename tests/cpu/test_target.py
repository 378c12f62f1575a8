import sys

import pytest

from numbattn.cpu import target


@pytest.mark.parametrize(("triple", "features", "level"), [
    ("x86_64-unknown-linux-gnu", (*target.V3, *target.V4, "amx-bf16"), "x86-64-v4"),
    ("x86_64-unknown-linux-gnu", target.V3, "x86-64-v3"),
    ("x86_64-unknown-linux-gnu", (*target.V3, "avx512f"), None),  # whose vectors are longer than those of v3's kernels
    ("x86_64-unknown-linux-gnu", ("sse2",), None),
    ("aarch64-unknown-linux-gnu", ("neon", "fp-armv8"), "generic"),
    ("arm64-apple-darwin23", ("neon",), "generic"),
    ("ppc64le-unknown-linux-gnu", ("vsx",), None),
])  # fmt: skip
def test_what_kernels_compiled_ahead_have_to_fit(triple, features, level, monkeypatch):
    monkeypatch.setattr(target, "TRIPLE", triple)
    monkeypatch.setattr(target, "FEATURES", {*features})
    assert target.platform_of_level() == (level and (level, triple.split("-")[0], sys.platform))


FAULTS = {
    'has_longer = found and "avx512f" in FEATURES and "avx512f" not in found[1]': "has_longer = False",
    '.replace("arm64", "aarch64")': "",
    "cpu/test_tile.py::test_float16_where_numba_compiles_for_another_cpu": {
        'if feature.startswith("+")}': 'if feature} | {"f16c"}',
    },
}

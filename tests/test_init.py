import subprocess
import sys

import numbattn as na


def test_public_names():
    assert sorted(na.__all__) == [
        "Bits", "BlockSparse", "Causal", "Dense", "Dropout", "Lengths", "Mask", "Saved", "Window", "__version__",
        "attention", "attention_backward", "attention_forward", "attention_vjp", "attention_weights", "dropout_mask",
    ]  # fmt: skip
    for name in na.__all__:
        assert hasattr(na, name)


def test_import_is_light():
    """Compilers and GPU libraries come in with the first call that needs them."""
    heavy = "{'numba', 'cupy', 'llvmlite'}"
    code = f"import sys, numbattn; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"

"""What the package shows."""

import subprocess
import sys

from numbattn import sparse


def test_public_names():
    assert sparse.__all__ == ["Pattern", "product", "product_vjp"]
    assert {name for name in dir(sparse.Pattern) if not name.startswith("_")} == {
        "by_column", "by_row", "count", "dense", "groups", "kept", "places", "shape", "values",
    }  # fmt: skip


def test_it_is_imported_without_numba():
    code = "import sys, numbattn.sparse; assert not {'numba', 'cupy', 'numbattn.cpu'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

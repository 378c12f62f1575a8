"""What the package shows."""

import subprocess
import sys

from numbattn import sparse


def test_public_names():
    assert sparse.__all__ == ["Pattern", "product", "product_vjp"]
    public = {name for name in dir(sparse.Pattern) if not name.startswith("_")}
    assert public == {"count", "dense", "places", "shape", "values"}


def test_it_is_imported_without_numba():
    code = "import sys, numbattn.sparse; assert not {'numba', 'cupy', 'numbattn.cpu'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""What the package shows."""

from numbattn import sparse


def test_public_names():
    assert sparse.__all__ == ["Pattern", "product", "product_vjp"]
    public = {name for name in dir(sparse.Pattern) if not name.startswith("_")}
    assert public == {"count", "dense", "places", "shape", "values"}

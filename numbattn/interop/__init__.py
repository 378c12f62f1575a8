"""Attention as a function of other libraries' arrays, with every option and with first and second derivatives.

`numbattn.interop.jax`, `.torch`, `.autograd` and `.thinc` are imported only when they are asked for, and with each its
framework. After that, masks and scores take arrays of the framework, too. Each also has `graph_attention`, over the
edges of a graph, and those of torch and JAX have `points`, whose functions `product`, `logsumexp` and `sinkhorn` are
those of `numbattn.points`. `numbattn.interop.transformers` registers attention of torch's tensors with the models of
Hugging Face's transformers.
"""

from typing import TYPE_CHECKING

from ..base.checks import needed

MODULES = "autograd", "jax", "thinc", "torch", "transformers"

if not TYPE_CHECKING:  # else any name would do

    def __getattr__(name):
        """As numbattn's own."""
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return needed(f"{__name__}.{name}", f"{__name__}.{name}", f"'numbattn[{name}]'")

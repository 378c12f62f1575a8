"""The kernels of caches: those that write tokens into one, and those that copy one into plain arrays."""

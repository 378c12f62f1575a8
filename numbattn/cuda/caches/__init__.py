"""The kernels of caches: what writes tokens into one, and what makes plain arrays of one."""

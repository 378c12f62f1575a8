"""Key-value caches: where their tokens lie, in pages or not, in 8 bits or not, and calls that take them."""

"""Products with block-sparse matrices, see `numbattn.sparse`: kernels in the tile language, launched by
`kernel.launch` like a user's own."""

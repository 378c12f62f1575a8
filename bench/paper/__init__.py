"""The experiments of the FlashAttention paper (Dao et al. 2022), repeated, and what came of each of its claims."""

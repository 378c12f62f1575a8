"""Figures 2 and 3 of the FlashAttention paper (Dao et al. 2022), measured again."""

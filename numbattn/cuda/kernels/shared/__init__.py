"""The steps that kernels share: device functions and their factories, and the tables of tiles."""

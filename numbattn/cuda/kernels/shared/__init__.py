"""The steps that kernels share: device functions, their factories, and layouts of tiles."""

"""Sums over all pairs of points."""

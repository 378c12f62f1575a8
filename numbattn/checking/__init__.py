"""Tests of functions of a user's own, of masks and of scores."""

"""Sums over pairs of points, see `numbattn.points`: kappa(|x_i - y_j|^2), or kappa(x_i . y_j), is never stored."""

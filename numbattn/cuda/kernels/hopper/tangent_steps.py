"""Dropout in the tangent of the forward pass on Hopper."""

from ...tile import device, maximum, operand, positive_operand
from ..shared.dropout import dropout_steps


def drop_steps(layout, dropout, SHARED_V):
    """Device functions: `mark` P as `dropout_steps` does, and of what that returns: Z P as the left operand of products
    with V; P and Z P, what tS is multiplied by. Z is 0 or 1 here."""
    mark, _ = dropout_steps(layout, dropout)

    @device
    def left(P):
        return operand(P, SHARED_V)

    @device
    def factors(P):
        return P, P

    @device
    def left_of_marked(P):
        return positive_operand(P, SHARED_V)

    @device
    def factors_of_marked(P):
        return abs(P), maximum(P, 0)

    return (mark, left_of_marked, factors_of_marked) if dropout else (mark, left, factors)

"""Softcap: S -> cap tanh(S / cap)."""

from ....scores.softcap import Softcap
from ...tile import device, exp2, reciprocal
from ...words.numbers import LOG2_E
from .kind import Kind, ValueAndSlope, nothing_ahead


class SoftcapKind(Kind):
    name, of = "softcap", Softcap
    is_bounded, takes_few_registers, differs_by_head = True, True, False

    def types(self, number):
        return number, number  # the cap, and 1 / cap

    def steps(self, at, unit, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        (_, natural), TWO_LOG2E = unit, ACC(2 * LOG2_E)

        @device
        def step(S, F, found, scores, batch, head, m0, n0):
            """tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1), and its derivative 4 r (1 - r): off by 1e-7, absolute."""
            cap, inverse = scores.parts[at]
            r = reciprocal(exp2(S * natural(inverse * TWO_LOG2E, scores)) + 1)
            return ValueAndSlope(cap - 2 * cap * r, F * (4 * r * (1 - r)))

        return nothing_ahead, step

    @classmethod
    def lowered(cls, part, number, problem):
        return cls.name, (part.cap, 1 / part.cap), {}

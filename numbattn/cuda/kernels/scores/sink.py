"""Sink: one more logit of each row, with S."""

from dataclasses import dataclass

from ....scores.sink import Sink
from ...tile import device, exp2, maximum, reciprocal, where
from ...words.numbers import LOG2_E
from .kind import WITH_DELTA, ScoreKind


@dataclass(frozen=True)
class SinkKind(ScoreKind):
    of, takes_few_registers, gradient = Sink, True, WITH_DELTA


def sink_steps(score, ACC):
    """Device functions for the end of a row: (m, total, scores, batch, head) -> m and total with the sink's logit, and
    alpha, which rescales O; (total, alpha) -> the factor of O. m is in natural units here; total stays 0 where nothing
    is seen."""
    LOG2E = ACC(LOG2_E)

    @device
    def without(m, total, scores, batch, head):
        return m, total, total

    @device
    def inverse(total, alpha):
        return reciprocal(total)

    @device
    def with_sink(m, total, scores, batch, head):
        logit, seen = scores.logits[0][batch, head], total > 0
        largest = maximum(m, logit)
        alpha = where(seen, exp2((m - largest) * LOG2E), 0)
        return largest, total * alpha + where(seen, exp2((logit - largest) * LOG2E), 0), alpha

    @device
    def rescaled_inverse(total, alpha):
        return alpha * reciprocal(total)

    return (with_sink, rescaled_inverse) if SinkKind() in score else (without, inverse)


def sink_tangent_step(tscore, ACC):
    """The device function for the end of a row, (tlse, m, total, scores, tscores, batch, head) -> tlse plus P of the
    sink times the tangent of its logit. m, total: with the sink; tscore, tscores: see `tangent`."""
    LOG2E = ACC(LOG2_E)

    @device
    def without(tlse, m, total, scores, tscores, batch, head):
        return tlse

    @device
    def with_tangent(tlse, m, total, scores, tscores, batch, head):
        logit, tangent = scores.logits[0][batch, head], tscores.logits[0][batch, head]
        return tlse + where(total > 0, exp2((logit - m) * LOG2E) * reciprocal(total) * tangent, 0)

    return with_tangent if SinkKind() in tscore else without

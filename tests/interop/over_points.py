"""Calls over pairs of points for any framework: functions of arrays, and these."""

from numbattn import points

COST = points.Cost(2, 0.5)


def calls(module, rng):
    """By name; with a length and factors that are arrays, a batch, and arrays of another shape."""
    x, y, b, w, length, v = (rng.standard_normal(shape) for shape in ((2, 5, 3), (6, 3), (6, 2), (6,), (3,), (2, 5)))

    def product(x, y, b, length):
        seasons = points.Gaussian(abs(length[:2]) + 0.5).on([2, 0]) * points.Periodic(1.5, 2.0).on(slice(1, 3))
        smooth = length[:2] * points.Matern(2.5, abs(length) + 0.5)
        return module.product(x, y, b, smooth + 2 * points.Gaussian(0.8) + seasons)

    def logsumexp(x, y, w, length):
        return module.logsumexp(x, y, w, points.Gaussian(abs(length) + 0.5))

    def scores(x, y, w, length):
        return module.logsumexp(x, y, w, points.Cosine(3.0)) * length.sum()

    def weights(v):
        v = v - v.mean(-1)[..., None]
        return (1 + v * v) / (1 + v * v).sum(-1)[..., None]

    def sinkhorn(x, y, v, w):
        return module.sinkhorn(x, y, weights(v), weights(w), COST, tol=1e-13)

    def divergence(x, y, v, w):
        return module.sinkhorn(x, y, weights(v), weights(w), COST, tol=1e-13, debias=True)

    def unbalanced(x, y, v, w):
        marginals = points.KL(0.5), points.KL(0.8)
        return module.sinkhorn(x, y, 1 + v * v, 1 + w * w, COST, marginals=marginals, tol=1e-13)

    return {"product": (product, (x, y, b, length)), "logsumexp": (logsumexp, (x, y, w, length)),
            "scores": (scores, (x, y, w, length)), "sinkhorn": (sinkhorn, (x, y, v, w)),
            "divergence": (divergence, (x, y, v, w)), "unbalanced": (unbalanced, (x, y, v, w))}  # fmt: skip


class Plain:
    """numbattn's own."""

    product, logsumexp = staticmethod(points.product), staticmethod(points.logsumexp)

    @staticmethod
    def sinkhorn(*given, **options):
        return points.sinkhorn(*given, **options).cost

"""Directions of random problems: tangents of what a problem is given, and what is computed along them."""

import math

import numpy as np

import numbattn as na
from numbattn import reference
from numbattn.base.values import shown
from numbattn.scores import ArrayPart

from .accuracy import present, to_numpy
from .rounding import finite, rounding_of_laplacian, rounding_of_tangents

WAYS = "jvp", "jvp", "vjp", "laplacian"  # all tangents; those of a gradient of gradients
COUNTS = None, None, 1, 3, 3, 6  # of tangents at once; None: without an axis of them
GIVEN = "q", "k", "v", "do", "lse"  # before the arrays of a score


class Directions:
    """Tangents of the arrays of a problem, by name, some of them None: as large as these, and NaN where they are. What
    is compiled in comes from `kind`, all else from `rng`."""

    def __init__(self, problem, kind, rng, ways=WAYS, counts=COUNTS):
        self.problem, self.rng, self.way = problem, rng, str(kind.choice(ways))
        arrays = [*problem.arrays, problem.do, problem.dlse, *self.arrays_of_score()]
        given = [x is not None and some < 0.75 for x, some in zip(arrays, kind.random(len(arrays)))]
        if self.way != "jvp":
            given[3:5] = False, False
        if self.way == "laplacian" and not any(given):
            given[0] = True
        several = any(given[:3] + given[5:])    # an axis of the tangents of do and dlse alone is none
        counts = [x for x in counts if x is not None or self.way != "laplacian"]
        self.count = counts[rng.integers(len(counts))] if several else None
        lead = () if self.count is None else (self.count,)
        names = *GIVEN, *(f"score {at}" for at in range(len(arrays) - len(GIVEN)))
        self.tangents = {name: self.like(x, lead) if there else None for name, x, there in zip(names, arrays, given)}
        self.laplacians = [self.like(x) if some < 0.5 else None for x, some in zip(problem.arrays, kind.random(3))]
        self.particle = self.of_few_particles() if self.way == "laplacian" else None
        if self.particle is not None:
            self.tangents |= dict.fromkeys(list(self.tangents)[len(GIVEN) :])

    def arrays_of_score(self):
        """One for each place of `grads.score`, None where there is no tangent."""
        for part in self.problem.options["score"]:
            for x, wanted in zip(part._weights, part._wanted):
                is_array = isinstance(part, ArrayPart)
                yield x if {"jvp": wanted or is_array, "laplacian": is_array}.get(self.way, wanted) else None

    def like(self, x, lead=()):
        values = to_numpy(x).astype(np.float64)
        tangent = np.asarray(self.rng.standard_normal((*lead, *x.shape)) * (abs(finite(values)).max(initial=0) / 3))
        tangent[..., ~np.isfinite(values) & ~np.isneginf(values)] = np.nan
        return self.problem.given(tangent.astype(x.dtype))

    def of_few_particles(self):
        """Whose queries and keys are, mostly in order, where a call takes that; else None."""
        score, dropout = self.problem.options["score"], self.problem.options["dropout"]
        given = any(x is not None for x in [*self.tangents.values()][:3])
        if not given or dropout or any(part._is_nonlinear for part in score) or self.rng.random() < 0.25:
            return None
        found = [self.rng.integers(-1, self.rng.integers(1, 5), size) for size in (self.problem.m, self.problem.n)]
        return tuple(np.sort(x) if some < 0.75 else x for x, some in zip(found, self.rng.random(2)))

    @property
    def counts(self):
        """How many tangents there are of each result, and of how many particles; () for one without an axis."""
        particles = () if self.particle is None else (1 + max(x.max(initial=-1) for x in self.particle),)
        return () if self.count is None else (self.count, *particles)

    def __repr__(self):
        found = {name: shown(x) for name, x in self.tangents.items() if x is not None}
        second = f", {[*map(shown, self.laplacians)]}, of the particles {self.particle}"
        return f"{self.way} of {found}" + second * (self.way == "laplacian")

    # -------------------------------------------------------------------------------------------------------- measure
    def about_results(self, about):
        """Name, dtype and shape of each result; about: those of what they are tangents of."""
        lead = () if self.count is None else (math.prod(self.counts),)
        found = [(f"tangent of {name}", dtype, (*lead, *shape)) for name, dtype, shape in about]
        if self.way != "laplacian":
            return found
        _, dtype, shape = about[0]
        return [found[0], ("Laplacian of o", dtype, shape)]

    def called(self):
        problem, (tq, tk, tv, tdo, tdlse, *tscore) = self.problem, self.tangents.values()
        given, more = (*problem.arrays, tq, tk, tv), {"dlse": problem.dlse, "deterministic": problem.deterministic}
        if self.way == "laplacian":
            own = {"jscore": tscore, "particle": self.particle}
            return na.attention_laplacian(*given, *self.laplacians, **own, **problem.options)[1:]
        if self.way == "vjp":
            _, saved = na.attention_forward(*problem.arrays, **problem.options)
            _, backprop2 = na.attention_backward_vjp(problem.do, saved, **more)
            found = backprop2(tq, tk, tv, ddscore=tscore)
            return found.gdo, found.dlse, *found[:3], *present(found.score)
        _, to, saved, tsaved = na.attention_forward_jvp(*given, tscore=tscore, **problem.options)
        _, tgrads = na.attention_backward_jvp(problem.do, saved, tsaved, tdo=tdo, tdlse=tdlse, **more)
        return to, tsaved.tlse, *tgrads, *present(tgrads.score)

    def expected(self, do, q, k, v, dlse, options, on_host):
        """What the results are, and their largest errors, of these arrays."""
        tangents, laplacians = ([x if x is None or not on_host else to_numpy(x) for x in some]
                                for some in (self.tangents.values(), self.laplacians))  # fmt: skip
        if self.particle is not None:
            tangents[:3] = reference.of_particles(*tangents[:3], self.particle)
        given, each = (q, k, v), [self.at(t, tangents) for t in range(math.prod(self.counts))]
        if self.way == "laplacian":
            of_score = {"jscore": tangents[5:]}
            exact = reference.attention_laplacian(*given, *tangents[:3], *laplacians, **of_score, **options)[1:]
            first = [rounding_of_tangents(do, *given, *own[:3], tscore=own[5:], **options)[0] for own in each]
            directions = [(*own[:3], own[5:]) for own in each]
            of_laplacian = rounding_of_laplacian(*given, directions, laplacians, options)
            return exact, (np.stack(first) if first else exact[0], of_laplacian)
        tq, tk, tv, tdo, tdlse, *tscore = tangents
        of_dlse, given = {"dlse": dlse}, (*given, tq, tk, tv)
        grads = reference.attention_backward_jvp(do, *given, tdo=tdo, tdlse=tdlse, **of_dlse, tscore=tscore, **options)
        exact = *reference.attention_jvp(*given, tscore=tscore, **options), *grads, *present(grads.score)
        errors = [rounding_of_tangents(do, q, k, v, *own[:4], tdlse=own[4], **of_dlse, tscore=own[5:], **options)
                  for own in each]  # fmt: skip
        return exact, errors[0] if self.count is None else [*map(np.stack, zip(*errors))]

    def at(self, number, tangents):
        return tangents if self.count is None else [x if x is None else x[number, ...] for x in tangents]

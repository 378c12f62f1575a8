"""Random problems, of sequences that are split over ranks."""

from numbattn import distributed as nad
from tests.accuracy import present
from tests.problems import LIMITS, Problem

UNEQUAL = "without an offset within Segments of unequal queries and keys"  # what is refused


class SplitProblem(Problem):
    """A problem of tests.problems, on 1 to 8 ranks."""

    def __init__(self, seed, number):
        super().__init__(seed, number, LIMITS["cpu"]._replace(tangents=0.0))
        self.ring = nad.Simulated(int(self.rng.integers(1, 9)), self.one_of("zigzag", "contiguous"))
        self.plan = self.one_of("ring", None)

    def called(self):
        split, join = self.ring.split, self.ring.join
        o, saved = nad.attention_forward(self.ring, *map(split, self.arrays), plan=self.plan, **self.options)
        dlse = None if self.dlse is None else split(self.dlse, axis=-1)
        grads = nad.attention_backward(self.ring, split(self.do), saved, dlse=dlse, deterministic=self.deterministic)
        lse = join([x.lse for x in saved], axis=-1)
        return join(o), lse, *map(join, grads), *present(grads.score)

    def __repr__(self):
        return f"{self.ring.ranks} ranks, {self.ring.order}, plan {self.plan}, {super().__repr__()}"


def found_wrong(seed, number):
    """A line for each result that is wrong."""
    problem = SplitProblem(seed, number)
    try:
        return [f"{problem}: {line}" for line in problem.wrong(problem.run())]
    except ValueError as error:
        return [] if UNEQUAL in str(error) else [f"{problem}: {error}"]

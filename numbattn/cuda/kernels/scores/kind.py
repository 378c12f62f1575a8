"""What kernels and plans need to know of a kind of part of a score: a class for each kind, in a file of its own.

An object of it, a frozen dataclass, is compiled in of each part. Its fields are all else that code depends on.
"""

from functools import cache
from typing import Any, NamedTuple

from ...tile import device
from ...words.steps import array_of_part

ELEMENTS, ENTRIES, WITH_DELTA, READS = "elements", "entries", "with delta", "reads"  # what gradients come from
CLASSES = {}  # of kinds, by their class in numbattn.scores


class ValueAndSlope(NamedTuple):
    """A tile of S after a part, and F, its derivative."""

    value: Any
    slope: Any


class ScoreKind:
    of = None  # the class in numbattn.scores
    is_scaled = True  # whether it takes S scaled, as an exponent of e: scale Q K^T; else Q K^T
    is_bounded = False  # whether S after it is of moderate size, whatever it was before
    may_be_far = False  # whether it may add float32's finfo.min, a mask of some libraries
    takes_few_registers = False  # besides the sums of a backward kernel
    looks_up = False  # whether it looks up a number for each element, or row
    is_tma_loaded = False  # whether TMA loads the tiles that it looks up, on Hopper
    differs_by_head = True  # whether it may differ between heads
    is_packed = True  # whether it can be computed in tiles that end with their segment
    offset = None  # if it depends on distances, how the own key of query 0 is given
    gradient = ELEMENTS
    is_zero = False  # whether it is a tangent of zero, which only tangents of gradients need
    boxes = ()  # sizes of boxes, if what is read of an array follows from the offset of a box's tokens
    is_sloped = False  # whether it adds a slope times the distance of keys from the queries' own

    def __init_subclass__(cls):
        if "of" in vars(cls):
            CLASSES[cls.of] = cls

    @property
    def own_axes(self):
        """How many axes its array has after those of the batch; None without an array."""
        return self.of._own_axes

    @property
    def has_step(self):
        """Whether it is a function of S."""
        return self.of._has_step

    @property
    def is_nonlinear(self):
        """Whether it has a derivative that is not 1."""
        return self.of._is_nonlinear

    # ------------------------------------------------------------------------------------------------- in a kernel
    def types(self, number):
        """The types of its arguments; number: of a number in the dtype of sums."""
        raise NotImplementedError(type(self).__name__)

    def steps(self, at, scaling, layout, ACC, transposed=False, by_tma=False, has_derivative=True):
        """Two device functions: what is looked up ahead (scores, tile, batch, head, m0, n0), and the step itself, (S,
        F, found, scores, batch, head, m0, n0) -> the ValueAndSlope after the part.

        at: the place of its arguments in Scores.parts; scaling: see `score.scaling_steps`; by_tma: whether TMA has
        loaded `tile`.
        """
        raise NotImplementedError(type(self).__name__)

    def derivatives(self, at, scaling, layout, ACC, transposed=False, order=2):
        """For a part that is not linear, the device function (S, scores, batch, head, m0, n0) -> tiles of S after the
        part, its derivative, and, unless the order is 1, its second derivative."""
        raise NotImplementedError(type(self).__name__)

    def constant_on_tile(self, at, scaling, layout, ACC):
        """If the part adds one number, a level, to all elements of some tiles, the device function (S, scores, batch,
        head, m0, n0) -> S, the level and the factor of S, as in `score.softmax_score_steps`; else None."""

    def weighted_sum(self, at, layout, ACC):
        """If it has one number a matrix, whose gradient is a weighted sum of dS, the device function (total, dS,
        scores, batch, head, m0, n0) that adds a weighted tile."""

    def is_by_distance(self, wanted, ACC):
        """Whether each element of S reads one element of its arrays, and which one, and the derivative by it, follow
        from i - j, or, if it has `boxes`, from the offset in these. wanted: of which arrays, if it has several."""
        return False

    def steps_by_distance(self, at, wanted, ACC):
        """If so, device functions: (scores, batch, head) -> what the elements of a matrix share; (i - j, this) -> the
        number of the element that is read, among those of the matrix, and the derivative."""
        raise NotImplementedError(type(self).__name__)

    # --------------------------------------------------------------------------------------------------- in a plan
    @classmethod
    def lowered(cls, part, number, problem):
        """A part of numbattn.scores as kernels take it: its kind, its numbers, its arrays by name."""
        return cls(), (), {array_of_part(number): part._array.astype(problem.sum_dtype, copy=False)}

    def of_layout(self, layout):
        """The kind with what is compiled in of the layout of its array."""
        return self

    def aligned_by(self, which):
        """The kind in a kernel where BY_SEGMENT or BY_QUERY is what has offsets, if it is ALIGNED."""
        return self

    def flat(self, planner, work, number):
        """The arguments of part number `number`, without its numbers: see words.arguments."""
        if self.own_axes is not None:
            yield planner.at(array_of_part(number), own=self.own_axes)

    @classmethod
    def finish(cls, part, grad, sums, problem):
        """Write the gradient from the sums of kernels, if there are any."""
        if sums is not None:
            grad[...] = sums.sum(axis=(-2, -1))


@cache
def class_of(part):
    """The class of ScoreKinds for a class of parts in numbattn.scores."""
    return next(CLASSES[each] for each in part.__mro__ if each in CLASSES)


@device
def nothing_ahead(scores, tile, batch, head, m0, n0):
    return ()

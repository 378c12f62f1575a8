"""Kernels, values that give a pair of points its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np

from ..base.checks import Floats, dtype_of_sums, integer, library, number, words_for
from ..base.values import Taken, identity, moved, shown, sum_broadcast
from ..functions.frozen import Frozen, frozen
from ..functions.given import python_function
from . import kinds
from .composition import Kernel, Sum, parameter

LARGEST_LOG = math.log(np.finfo(float).max) - 1  # of a length


class WithLength(Kernel):
    """A kernel of points that are divided by a length."""

    length: Floats

    def __post_init__(self) -> None:
        self._set(length=_length(f"{type(self).__name__} length", self.length))

    def _check(self, features: int) -> None:
        for name in ("length", "period"):
            shape = tuple(np.shape(getattr(self, name, 0)))
            if shape and shape[-1] not in (1, features):
                raise ValueError(f"kernel: {type(self).__name__} {name}: got the shape {shape}, expected a number or "
                                 f"the shape (..., {features}) or (..., 1)")

    @property
    def _one_length(self) -> float | None:
        return self.length if isinstance(self.length, float) else None

    def _unit(self, x: Any) -> Any:
        return x / _like(x, self.length)

    def _of_points(self, x: Any, gradient: Any) -> Any:
        return gradient / _like(gradient, self.length)

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        """t is a function of x / length and y / length."""
        products = [_products(*given, self.length) for given in zip(units, gradients)]
        return _of_length(self.length, sum(products), gradients[0])


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(WithLength):
    """exp(-r**2 / (2 length**2)), r the Euclidean distance: RBF, the squared exponential.

    Parameters
    ----------
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.

    Examples
    --------
    >>> from numbattn import points
    >>> 0.5 * points.Gaussian(0.2) + points.Gaussian([1.0, 2.0])
    0.5 * Gaussian(length=0.2) + 1 * Gaussian(length=<float64 array (2,)>)
    """

    length: Floats = 1.0

    _kind = kinds.GAUSSIAN


@dataclass(frozen=True, eq=False, repr=False)
class Periodic(WithLength):
    """exp(-2 sum_f sin(pi (x_f - y_f) / period)**2 / length**2), over features f.

    It is the Gaussian of points on circles of radius 1 / length, whose coordinates are rounded.

    Parameters
    ----------
    period : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. Neither it nor the length is an
        array of torch or JAX.
    length : float or array, likewise
        > 0, in units of the period's sine. CuPy arrays are not checked.
    """

    period: Floats
    length: Floats = 1.0

    _kind = kinds.GAUSSIAN
    _is_centred, _is_linear = False, False  # as they are, points have an exact remainder
    _one_length = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(period=_length("Periodic period", self.period))
        if self._foreign:
            got = words_for(getattr(self, self._foreign))
            raise TypeError(f"Periodic {self._foreign}: got {got}, expected a number or an array of NumPy or CuPy")

    def _count(self, features: int) -> int:
        return 2 * features

    def _angle(self, x: Any) -> tuple[Any, Any, Any]:
        """Its cosine and sine, and its derivative by x, all divided by the length."""
        period, length = _like(x, self.period), _like(x, self.length)
        angle = np.fmod(x, period) * (2 * math.pi / period)
        return np.cos(angle) / length, np.sin(angle) / length, 2 * math.pi / period

    def _unit(self, x: Any) -> Any:
        return np.concatenate(self._angle(x)[:2], axis=-1)

    def _of_points(self, x: Any, gradient: Any) -> Any:
        (cos, sin, rate), (of_cos, of_sin) = self._angle(_with(gradient, x)), np.split(gradient, 2, axis=-1)
        return (cos * of_sin - sin * of_cos) * rate

    def _along(self, x: Any, tx: Any) -> Any:
        cos, sin, rate = self._angle(x)
        return np.concatenate([-sin * (rate * tx), cos * (rate * tx)], axis=-1)

    def _of_moved_points(self, x: Any, tx: Any, gradient: Any) -> Any:
        x, tx = _with(gradient, x), _with(gradient, tx)
        (cos, sin, rate), (of_cos, of_sin) = self._angle(x), np.split(gradient, 2, axis=-1)
        return -(cos * of_cos + sin * of_sin) * (rate * rate * tx)

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        """Of the period and of the length. Angles are multiples of x / period."""
        period, of_length, of_period = _like(gradients[0], self.period), 0, 0
        for x, unit, gradient in zip(points, units, gradients):
            (cos, sin), (of_cos, of_sin) = (np.split(z, 2, axis=-1) for z in (_with(gradient, unit), gradient))
            of_length = of_length + _products(cos, of_cos, self.length) + _products(sin, of_sin, self.length)
            of_period = of_period + _products(x, (cos * of_sin - sin * of_cos) * (2 * math.pi / period), self.period)
        return (_of_length(self.period, of_period, gradients[0]), _of_length(self.length, of_length, gradients[0]))


@dataclass(frozen=True, eq=False, repr=False)
class Laplacian(WithLength):
    """exp(-r / length), r the Euclidean distance: the same as ``Matern(0.5)``.

    Parameters
    ----------
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.
    """

    length: Floats = 1.0

    _kind = kinds.EXPONENTIAL


@dataclass(frozen=True, eq=False, repr=False)
class Matern(WithLength):
    """Matern's kernel for nu = 1/2, 3/2 and 5/2: exp(-s), (1 + s) exp(-s) and (1 + s + s**2 / 3) exp(-s).

    s = sqrt(2 nu) r / length, r the Euclidean distance.

    Parameters
    ----------
    nu : float
        0.5, 1.5 or 2.5.
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.
    """

    nu: float
    length: Floats = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(nu=number("Matern nu", self.nu))
        if self.nu not in MATERN:
            raise ValueError(f"Matern nu: got {self.nu}, allowed {', '.join(map(str, MATERN))}")

    @property
    def _kind(self) -> kinds.Kind:
        return MATERN[self.nu]


@dataclass(frozen=True, eq=False, repr=False)
class Cauchy(WithLength):
    """1 / (1 + (r / length)**2), r the Euclidean distance.

    Parameters
    ----------
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.
    """

    length: Floats = 1.0

    _kind = kinds.CAUCHY


@dataclass(frozen=True, eq=False, repr=False)
class RationalQuadratic(WithLength):
    """(1 + r**2 / (2 alpha length**2))**-alpha, r the Euclidean distance.

    Parameters
    ----------
    alpha : float
        > 0.
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.
    """

    alpha: float
    length: Floats = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(alpha=positive("RationalQuadratic alpha", self.alpha))

    @property
    def _kind(self) -> kinds.Kind:
        return kinds.RationalQuadratic(self.alpha)


@dataclass(frozen=True, eq=False, repr=False)
class Radial(Taken, WithLength):
    """function((r / length)**2), r the Euclidean distance: a function of your own.

    Its derivative follows by dual numbers, as for the functions of a `numbattn.Score`.

    Parameters
    ----------
    function : callable
        ``function(t)`` of a number t, the squared distance: an ordinary Python function, compiled by Numba. It is taken
        when the kernel is made, with all that it reads. Floats in it have the precision of sums, on a GPU only if it
        neither branches nor rounds. Its derivative at t = 0 is taken to be 0 if it is not finite.
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.

    Raises
    ------
    TypeError
        If it is not a function of one number, raises or asserts, or reads what could change unseen.

    Examples
    --------
    >>> from numbattn import points
    >>> import numpy as np
    >>> x, b = np.zeros((1, 2)), np.ones((1, 1))
    >>> points.product(x, x + 3, b, points.Radial(lambda t: 1 / (1 + t / 9)))
    array([[0.33333333]])
    """

    function: Callable[[Any], Any]
    length: Floats = 1.0
    _frozen: Frozen = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        function = python_function("Radial function", self.function)
        try:
            signature(function).bind(0.0)
        except TypeError as error:
            raise TypeError(f"Radial function: {function.__qualname__}{signature(function)} cannot be called as (t): "
                            f"{error}") from None
        self._set(function=function, _frozen=frozen(function, "Radial function"))

    @property
    def _kind(self) -> kinds.Kind:
        return kinds.Radial(self._frozen)

    def _mapped(self, function: Callable[[Any], Any]) -> Radial:
        made = object.__new__(Radial)
        made._set(**self.__getstate__() | {name: function(x) for name, x in self._arrays().items()})
        return made

    def _key(self) -> tuple[Any, ...]:
        return type(self), self._frozen, identity(self.length)

    def __reduce__(self) -> Any:
        return Radial, (self.function, self.length)

    def __repr__(self) -> str:
        return f"Radial({self.function.__qualname__}, length={shown(self.length)})"


@dataclass(frozen=True, eq=False, repr=False)
class Polynomial(WithLength):
    """(<x, y> / length**2 + offset)**degree.

    Parameters
    ----------
    degree : int
        1 or more.
    offset : float
    length : float or array, (..., features) or (..., 1)
        > 0: one for all features, or one for each, with batch axes as those of points. CuPy arrays are not checked.
    """

    degree: int
    offset: float = 1.0
    length: Floats = 1.0

    _is_centred = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(degree=integer("Polynomial degree", self.degree, low=1),
                  offset=number("Polynomial offset", self.offset))
        if not math.isfinite(self.offset):
            raise ValueError(f"Polynomial offset: got {self.offset}, allowed finite")

    @property
    def _kind(self) -> kinds.Kind:
        return kinds.Polynomial(self.degree, self.offset)


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Kernel):
    """``scale <x, y>``, a multiple of the product of two points. Without a mask no pairs are visited: x (y^T b).

    In `logsumexp` and `cross_entropy` it is a score, of which the exponential is taken: exp(scale <x, y>).

    Parameters
    ----------
    scale : float
        > 0.
    """

    scale: float = 1.0

    _is_centred = False
    _kind = kinds.LINEAR
    _exponential = kinds.EXPONENTIAL_OF_PRODUCT

    def __post_init__(self) -> None:
        self._set(scale=positive(f"{type(self).__name__} scale", self.scale))

    def _unit(self, x: Any) -> Any:
        return self._scaled(x)

    def _of_points(self, x: Any, gradient: Any) -> Any:
        return self._scaled(gradient)

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        return (sum(map(_products, units, gradients)).sum() / (2 * self.scale)).astype(gradients[0].dtype)[...]

    def _scaled(self, x: Any) -> Any:
        """Points times the root of the scale."""
        return x if self.scale == 1 else x * math.sqrt(self.scale)

    def _factored(self, x: Any) -> tuple[Any, Any]:
        """Points of any dtype, and what products of two such points are multiplied by besides `scale`: None, or the
        factor (...) of each."""
        return x, None

    def _of_factored(self, x: Any, gradient: Any) -> Any:
        """The gradient of points from that of those that `_factored` returns."""
        return gradient


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Linear):
    """``scale <x, y> / (|x| |y|)``, of the cosine of the angle between two points; 0 where one of them is 0. A score in
    `logsumexp` and `cross_entropy`, as `Linear` is.

    Parameters
    ----------
    scale : float
        > 0; of similarities the inverse temperature.
    """

    _is_linear = False

    def _unit(self, x: Any) -> Any:
        return self._scaled(x / _norms(x))

    def _of_points(self, x: Any, gradient: Any) -> Any:
        return self._scaled(_across(_with(gradient, x), gradient))

    def _of_moved_points(self, x: Any, tx: Any, gradient: Any) -> Any:
        x, tx = _with(gradient, x), _with(gradient, tx)
        unit, tunit = x / _norms(x), _across(x, tx)
        turned = tunit * dots(unit, gradient) + unit * dots(tunit, gradient)
        return -self._scaled(turned + _across(x, gradient) * dots(unit, tx)) / _norms(x)

    def _factored(self, x: Any) -> tuple[Any, Any]:
        """Divided by a power of two near the norm, which keeps all digits."""
        norms = _norms(x.astype(dtype_of_sums(x.dtype)))
        exponents = np.frexp(np.where(np.isinf(norms), 1, norms))[1]
        return np.ldexp(x.astype(norms.dtype), -exponents).astype(x.dtype), (1 / np.ldexp(norms, -exponents))[..., 0]

    def _of_factored(self, x: Any, gradient: Any) -> Any:
        _, factors = self._factored(x)
        gradient = gradient / np.where(factors == 0, 1, factors)[..., None]
        return _across(x.astype(gradient.dtype), gradient)


@dataclass(frozen=True, eq=False, repr=False)
class Cost(Kernel):
    """exp(-r**power / (power epsilon)), r the Euclidean distance: for `logsumexp` and `sinkhorn`.

    Parameters
    ----------
    power : float
        > 0.
    epsilon : float
        > 0. Points are divided by the length epsilon**(1 / power), which is to be finite and > 0, too, in the dtype
        of sums.
    """

    power: float
    epsilon: float

    def __post_init__(self) -> None:
        self._set(power=positive("Cost power", self.power), epsilon=positive("Cost epsilon", self.epsilon))
        length = math.log(self.epsilon) / self.power
        if abs(length) > LARGEST_LOG:
            raise ValueError(f"Cost epsilon: got {self.epsilon:g} with the power {self.power:g}, expected "
                             "epsilon**(1 / power) to be a float")

    @property
    def _kind(self) -> kinds.Kind:
        return COSTS.get(self.power) or kinds.Power(self.power)

    @property
    def _one_length(self) -> float:
        return self.epsilon ** (1 / self.power)

    def _unit(self, x: Any) -> Any:
        return x / self._one_length

    def _of_points(self, x: Any, gradient: Any) -> Any:
        return gradient / self._one_length

    def _of_parameter(self, units: Any, gradients: Any, points: Any) -> Any:
        found = sum(map(_products, units, gradients)).sum()
        return (-found / (self.power * self.epsilon)).astype(gradients[0].dtype)[...]


@dataclass(frozen=True, eq=False, repr=False)
class PairCost(Kernel):
    """A cost of your own for `sinkhorn`: a function of pairs of points, computed for a block of all pairs at a time.

    Parameters
    ----------
    function : callable
        ``function(x, y)`` of points x (..., rows, d) and y (..., columns, d), in the dtype of sums and not to be
        written to: their costs, (..., rows, columns), of that dtype. With `debias` it is symmetric.
    epsilon : float
        > 0, the weight of the entropy.
    vjp : callable, optional
        ``vjp(x, y, dcosts)``: the gradients of x and of y in ``(dcosts * function(x, y)).sum()``. Without it
        ``backprop`` returns None for dx and dy. There are no Hessian-vector products.

    Notes
    -----
    A block has up to 2**22 pairs of NumPy arrays and nine times as many of CuPy arrays. All of them are computed anew
    in each pass, two for an iteration, by the function and by array operations: on CPUs that takes several times
    as long as a `Cost`.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.spatial.distance import cdist
    >>> from numbattn import points
    >>> x, y, a = *np.random.default_rng(0).random((2, 100, 2)), np.full(100, 0.01)
    >>> cost = points.PairCost(lambda x, y: cdist(x, y, "cityblock"), epsilon=0.05)
    >>> r = points.sinkhorn(x, y, a, a, cost, tol=1e-3)
    >>> r.converged
    True
    """

    function: Callable[[Any, Any], Any]
    epsilon: float
    vjp: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None

    _is_centred = False

    def __post_init__(self) -> None:
        self._set(epsilon=positive("PairCost epsilon", self.epsilon))
        for name, function in (("function", self.function), ("vjp", self.vjp)):
            if not (callable(function) or (name == "vjp" and function is None)):
                raise TypeError(f"PairCost {name}: got {words_for(function)}, expected a function")

    @property
    def _kind(self) -> kinds.Kind:
        return kinds.OfPairs(self._costs, self._gradients)

    def _check(self, features: int) -> None:
        raise TypeError(f"kernel: got {self}, which sinkhorn alone takes")

    def _costs(self, x: Any, y: Any) -> Any:
        """Of a block, in epsilons."""
        found, shape = self.function(x, y), (*x.shape[:-1], y.shape[-2])
        if library(found) != library(x) or (found.shape, found.dtype) != (shape, x.dtype):
            got = f"the shape {found.shape}, of {found.dtype}" if library(found) else words_for(found)
            raise ValueError(f"PairCost function: got {got}, expected {shape}, of {x.dtype}, for x {x.shape} and y "
                             f"{y.shape}")
        return found / self.epsilon

    def _gradients(self, x: Any, y: Any, dcosts: Any) -> Any:
        found: Any = self.vjp(x, y, dcosts)  # type: ignore[misc]
        shapes = [getattr(gradient, "shape", None) for gradient in found] if isinstance(found, tuple | list) else None
        if shapes != [x.shape, y.shape]:
            got = f"arrays of the shapes {shapes}" if shapes else words_for(found)
            raise ValueError(f"PairCost vjp: got {got}, expected two, {x.shape} and {y.shape}, the gradients of x and "
                             "of y")
        return [gradient / self.epsilon for gradient in found]

    def __repr__(self) -> str:
        return f"PairCost({getattr(self.function, '__qualname__', self.function)}, epsilon={self.epsilon})"


MATERN: dict[float, kinds.Kind] = {0.5: kinds.EXPONENTIAL, 1.5: kinds.MATERN32, 2.5: kinds.MATERN52}
COSTS: dict[float, kinds.Kind] = {1.0: kinds.EXPONENTIAL, 2.0: kinds.GAUSSIAN}


def as_kernel(kernel: Any, features: int) -> Kernel:
    """The kernel, checked, for points of this number of features."""
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel: got {words_for(kernel)}, expected one of numbattn.points, as points.Gaussian(0.5)")
    kernel._check(features)
    return kernel


def as_exponential(kernel: Any, features: int) -> Kernel:
    """The kernel, checked, of which the logarithm is taken."""
    kernel = as_kernel(kernel, features)
    if isinstance(kernel, Sum) or kernel._exponential is None:
        raise TypeError(f"kernel: got {kernel}, expected Cost, Gaussian, Periodic, Laplacian, Matern(0.5) or a "
                        "product of Gaussian and Periodic, an exponential, or Linear or Cosine, whose exponential is "
                        "taken")
    return kernel


def _length(name: str, value: Any) -> Any:
    found = parameter(name, value)
    if isinstance(found, float):
        return positive(name, value)
    if isinstance(found, np.ndarray) and not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(f"{name}: got values from {found.min()} to {found.max()}, allowed finite and > 0")
    return found


def positive(name: str, value: Any) -> float:
    found = number(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name}: got {value!r}, allowed finite and > 0")
    return found


def _like(x: Any, length: Any) -> Any:
    """A length in the dtype and library of x, to divide points by."""
    if isinstance(length, float):
        return length
    length = moved(length, x).astype(x.dtype, copy=False)
    return length[..., None, :] if length.ndim > 1 else length


def _of_length(length: Any, products: Any, gradient: Any) -> Any:
    """The gradient of a length, from the sums of points in lengths times their gradients."""
    found = sum_broadcast((-products / _like(gradient, length))[..., 0, :], np.shape(length))
    return found.astype(getattr(length, "dtype", gradient.dtype), copy=False)


def _products(x: Any, gradient: Any, length: Any = 1.0) -> Any:
    """The sum over points of x * gradient, (..., 1, features) with the batch axes of a length, in float64; x may be NaN
    where there is no gradient."""
    products = np.where(gradient == 0, 0, x * gradient).sum(axis=-2, keepdims=True, dtype=np.float64)
    return sum_broadcast(products, (*np.shape(length)[:-1], *products.shape[-2:]))


def _with(gradient: Any, x: Any) -> Any:
    """Points that have a gradient; 0 for others, which may be NaN where they are not seen."""
    return np.where((gradient == 0).all(axis=-1, keepdims=True), 0, x)


def _across(x: Any, gradient: Any) -> Any:
    """The gradient of points from that of the same points divided by their norms."""
    unit = x / _norms(x)
    return (gradient - unit * dots(unit, gradient)) / _norms(x)


def dots(x: Any, y: Any) -> Any:
    """Products of points, (..., 1)."""
    return (x * y).sum(axis=-1, keepdims=True)


def _norms(x: Any) -> Any:
    """Euclidean norms (..., 1); inf for 0, by which it may be divided."""
    if not x.shape[-1]:
        return np.full_like(x, math.inf, shape=(*x.shape[:-1], 1))
    largest = np.abs(x).max(axis=-1, keepdims=True)
    parts = x / np.where(largest == 0, 1, largest)  # whose squares neither overflow nor vanish
    return np.where(largest == 0, math.inf, largest * np.sqrt(dots(parts, parts)))

"""KeOps' LazyTensor on numbattn.points, as far as its tests of kernel products need it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numbattn import points


@dataclass(frozen=True)
class LazyTensor:
    """Points of one side, given with an axis of 1 for the other one."""

    x: Any

    def __sub__(self, other: LazyTensor) -> Difference:
        return Difference(self.x, other.x)

    def sqdist(self, other: LazyTensor) -> Kernel:
        return ((self - other) ** 2).sum(-1)

    @staticmethod
    def __matmul__(kernel: Kernel, b: Any, **_: Any) -> Any:
        """Called as a function of a class that all expressions have in common there."""
        return kernel @ b


@dataclass(frozen=True)
class Difference:
    x: Any
    y: Any

    def __pow__(self, power: int) -> Squares:
        assert power == 2
        return Squares(self.x, self.y)

    def square(self) -> Squares:
        return self**2


@dataclass(frozen=True)
class Squares:
    x: Any
    y: Any

    def sum(self, dim: int) -> Kernel:
        assert dim in (-1, self.x.ndim - 1)
        return Kernel(self.x.squeeze(-2), self.y.squeeze(-3))


@dataclass(frozen=True)
class Kernel:
    """exp(factor |x - y|^2); without exp until that is called."""

    x: Any
    y: Any
    factor: float = 1.0
    kernel: points.Kernel | None = None

    def __neg__(self) -> Kernel:
        return replace(self, factor=-self.factor)

    def exp(self) -> Kernel:
        return replace(self, kernel=points.Gaussian(math.sqrt(-0.5 / self.factor)) if self.factor < 0 else GROWING)

    def t(self) -> Kernel:
        return replace(self, x=self.y, y=self.x)

    def __matmul__(self, b: Any, out: Any = None, **_: Any) -> Any:
        if isinstance(b, np.ndarray):
            return points.product(self.x, self.y, b, self.kernel)
        found = product(self.x, self.y, b, self.kernel)
        return found if out is None else out.copy_(found)


GROWING = points.Radial(lambda square: math.exp(square))


def product(x: Any, y: Any, b: Any, kernel: Any) -> Any:
    """Of tensors, with the gradient of b, which is a product, too."""
    import torch

    from numbattn.interop.torch.arrays import array_of, tensor_of

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, b: Any) -> Any:
            context.shape = b.shape
            return tensor_of(points.product(*map(array_of, (x, y, b)), kernel))

        @staticmethod
        def backward(context: Any, do: Any) -> Any:
            return product(y, x, do, kernel).sum_to_size(context.shape)

    return Product.apply(b)

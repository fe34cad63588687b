"""Compute xIELU, an activation whose curvature is learned: a number for each side of zero."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Xielu"]


@frozen(kw_only=True)
class Xielu:
    """Computes xIELU (Huang and Schlag, 2024, arXiv 2411.13010), element by element: ``beta * x + positive * x^2`` of
    x > 0, and of others ``beta * x + negative * (e^min(x, eps) - 1 - x)``.
    """

    positive: float
    negative: float
    beta: float
    eps: float

    @classmethod
    def of_learned(cls, *, alpha_p: float, alpha_n: float, beta: float = 0.5, eps: float = -1e-6) -> Xielu:
        """Return the activation of the numbers that a checkpoint holds: softplus makes factors above 0 of those that
        are learned.
        """
        alphas = torch.tensor([alpha_p, alpha_n], dtype=torch.float64)
        positive, negative = torch.nn.functional.softplus(alphas).tolist()
        return cls(positive=positive, negative=beta + negative, beta=beta, eps=eps)

    @property
    def numbers(self) -> Tensor:
        """Return the numbers as the native kernels take them, float32 ``[4]``."""
        return torch.tensor([self.positive, self.negative, self.beta, self.eps], dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of a tensor; in half precision, only the result is rounded."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        below = (torch.expm1(wide.clamp(max=self.eps)) - wide) * self.negative
        curve = torch.where(wide > 0, wide.square() * self.positive, below)
        return curve.add_(wide, alpha=self.beta).to(x.dtype)

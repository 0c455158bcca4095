"""The paper's theory: when does a step on one task help the other? (section 4 and appendix A3)

`TwoLayerLinear` is the toy problem: two regressions that share a matrix A. With the learning rate η*, one step on the
self-supervised loss brings the main loss to zero (`best_rate`); any rate between 0 and a positive η* helps (Lemma 1),
and η* has the sign of the inner product of the two gradients (Lemma 2).

Theorem 1 generalises this to any two losses with gradients bounded by G, the main one convex and β-smooth: if the inner
product exceeds ε, the rate ε/(βG²) lowers the main loss (`theorem_rate`). `Logistic` is such a loss, to check the
theorem on.

Everything is float64; the tests check each claim on random instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class TwoLayerLinear:
    """Two linear regressions on shared features Ax: main prediction v·Ax, self-supervised prediction w·Ax.

    Attributes:
        shared: A, `(h, d)`, the only trained part.
        main: v, `(h,)`.
        task: w, `(h,)`.
    """

    shared: Tensor
    main: Tensor
    task: Tensor

    def __post_init__(self) -> None:
        if self.shared.dim() != 2:
            raise ValueError(f"`shared` must be a matrix, got shape {tuple(self.shared.shape)}.")
        for name in ("main", "task"):
            if getattr(self, name).shape != self.shared.shape[:1]:
                raise ValueError(
                    f"`{name}` must have shape ({len(self.shared)},), got {tuple(getattr(self, name).shape)}."
                )

    def main_residual(self, x: Tensor, y: float) -> float:
        """y₁ - v·Ax, the residual of the main prediction for x, `(d,)`."""
        return y - float(self.main @ self.shared @ x)

    def task_residual(self, x: Tensor, y: float) -> float:
        """y₂ - w·Ax, the residual of the self-supervised prediction."""
        return y - float(self.task @ self.shared @ x)

    def main_loss(self, x: Tensor, y: float) -> float:
        """l_m = (y₁ - v·Ax)² / 2."""
        return self.main_residual(x, y) ** 2 / 2

    def task_loss(self, x: Tensor, y: float) -> float:
        """l_s = (y₂ - w·Ax)² / 2."""
        return self.task_residual(x, y) ** 2 / 2

    def main_gradient(self, x: Tensor, y: float) -> Tensor:
        """∇l_m with respect to A, `(h, d)`."""
        return -self.main_residual(x, y) * torch.outer(self.main, x)

    def task_gradient(self, x: Tensor, y: float) -> Tensor:
        """∇l_s with respect to A, `(h, d)`."""
        return -self.task_residual(x, y) * torch.outer(self.task, x)

    def inner_product(self, x: Tensor, main_label: float, task_label: float) -> float:
        """⟨∇l_m, ∇l_s⟩, the Frobenius inner product of the two gradients."""
        return float((self.main_gradient(x, main_label) * self.task_gradient(x, task_label)).sum())

    def best_rate(self, x: Tensor, main_label: float, task_label: float) -> float:
        """η*: the learning rate with which one step on l_s brings l_m to zero.

        Raises:
            ValueError: It does not exist, since the step does not change the main prediction.
        """
        motion = self.task_residual(x, task_label) * float(self.main @ self.task) * float(x @ x)
        if motion == 0:
            raise ValueError("There is no best rate: a step on the task's loss does not change the main prediction.")
        return self.main_residual(x, main_label) / motion

    def adapt(self, x: Tensor, task_label: float, lr: float) -> TwoLayerLinear:
        """Test-Time Training: the model after one step of gradient descent on l_s."""
        return replace(self, shared=self.shared - lr * self.task_gradient(x, task_label))


@dataclass(frozen=True)
class Logistic:
    """Logistic regression on one instance, log(1 + exp(-y θ·x)): convex and smooth in θ, with a bounded gradient.

    Attributes:
        inputs: x, `(d,)`.
        label: y, 1 or -1.
    """

    inputs: Tensor
    label: int

    def __post_init__(self) -> None:
        if self.label not in (-1, 1):
            raise ValueError(f"`label` must be 1 or -1, got {self.label}.")

    def loss(self, theta: Tensor) -> float:
        """The loss at parameters `(d,)`."""
        return float(F.softplus(-self.label * (theta @ self.inputs), threshold=math.inf))

    def gradient(self, theta: Tensor) -> Tensor:
        """The gradient at parameters `(d,)`."""
        return -self.label * torch.sigmoid(-self.label * (theta @ self.inputs)) * self.inputs

    @property
    def smoothness(self) -> float:
        """β, the Lipschitz constant of the gradient: ‖x‖²/4."""
        return float(self.inputs @ self.inputs) / 4

    @property
    def bound(self) -> float:
        """G, the bound on the norm of the gradient: ‖x‖."""
        return float(self.inputs.norm())


def theorem_rate(epsilon: float, smoothness: float, bound: float) -> float:
    """Return Theorem 1's learning rate ε/(βG²).

    Args:
        epsilon: ε, a lower bound on the inner product of the gradients.
        smoothness: β of the main loss.
        bound: G, an upper bound on the norms of both gradients.

    Raises:
        ValueError: An argument is not positive.
    """
    for name, value in (("epsilon", epsilon), ("smoothness", smoothness), ("bound", bound)):
        if not value > 0:
            raise ValueError(f"`{name}` must be positive, got {value}.")
    return epsilon / (smoothness * bound**2)


def guaranteed_gain(epsilon: float, smoothness: float, bound: float) -> float:
    """Return the guaranteed decrease of the main loss with `theorem_rate`, ε²/(2βG²).

    By smoothness, a step of rate η lowers l_m by at least η⟨∇l_m, ∇l_s⟩ - η²β‖∇l_s‖²/2. With an inner product above ε,
    ‖∇l_s‖ ≤ G and η = ε/(βG²) that exceeds ε²/(2βG²).
    """
    return theorem_rate(epsilon, smoothness, bound) * epsilon / 2

"""Adam for replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Adam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) with a step count for each row of a parameter, i.e. for each replica.

    `torch.optim.Adam` has one count per parameter, so that rows cannot be reset or updated independently; otherwise the
    updates are the same.

    Args:
        params: Parameters `(S, ...)`.
        lr: Learning rate.
        betas: Decay rates of the moving averages of the gradient and its square.
        eps: Added to the denominator.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the gradients; `closure` computes them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, **{key: group[key] for key in ("lr", "betas", "eps")})
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float], eps: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        step = state["step"].add_(1).view(-1, *[1] * (parameter.dim() - 1))
        mean = state["exp_avg"].lerp_(gradient, 1 - betas[0])
        square = state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        deviation = (square / (1 - betas[1] ** step)).sqrt_().add_(eps)
        parameter.sub_(lr * mean / (1 - betas[0] ** step) / deviation)

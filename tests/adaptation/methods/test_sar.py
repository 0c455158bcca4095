"""SAR: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import network
from loops import LR, MOMENTUM, SHARP, entropy, list_norms, make_batches, plain_network, sharpen, use_batch_statistics
from testtime import Online, YNet, resnet26
from testtime.adaptation.selection import select_parameters

SETTINGS: dict[str, Any] = {"lr": LR, "optimizer": MOMENTUM}
MARGIN = 0.4 * math.log(10)


def sar(net: YNet, batches: list[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Niu et al. 2023: the gradient at the worst point nearby; back to the source after a collapse."""
    average: float | None = None
    model = None
    for batch in batches:
        if model is None:
            model, average = use_batch_statistics(net), None
            moving = list_norms(model)[:2]  # of two layers, the last is left alone
            optimizer = MOMENTUM(moving, lr=LR)
        losses = entropy(model(batch))
        reliable = losses < MARGIN
        if reliable.any():
            gradients = torch.autograd.grad(losses[reliable].mean(), moving)
            length = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
            before = [parameter.detach().clone() for parameter in moving]
            with torch.no_grad():
                for parameter, gradient in zip(moving, gradients, strict=True):
                    parameter += 0.05 * gradient / length
            losses = entropy(model(batch))
            reliable = reliable & (losses < MARGIN)
            if reliable.any():
                loss = losses[reliable].mean()
                optimizer.zero_grad()
                loss.backward()
            with torch.no_grad():
                for parameter, old in zip(moving, before, strict=True):
                    parameter.copy_(old)
            if reliable.any():
                optimizer.step()
                now = float(loss.detach())
                average = now if average is None else 0.9 * average + 0.1 * now
        collapsed = average is not None and average < 0.2
        yield model(batch).detach(), collapsed
        if collapsed:
            model = None


@pytest.mark.parametrize("factor", [12.0, 40.0])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_sar(norm: str, factor: float) -> None:
    net, batches = sharpen(network(norm), factor), make_batches(5, 12)
    adapter, resets = Online(net, method="sar", **SETTINGS), 0
    for batch, (expected, collapsed) in zip(batches, sar(net, batches), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **SHARP)
        resets += collapsed
    assert (resets > 0) == (factor == 40.0)  # a network that is certain of everything has collapsed


@pytest.mark.filterwarnings("ignore:The method 'sar' needs several images")
def test_a_step_computed_by_hand() -> None:
    """Logits (1.3, -1.3) have an entropy of 0.2513, below 0.4 ln 2 = 0.2773; its gradients are ∓0.1673.

    Those of the scale, times the normalised ±1, are both -0.1673. A step of length 0.05 along all four, 0.025 each,
    leads to the logits (1.25, -1.25), with an entropy of 0.2685 and gradients ∓0.1753.
    """
    net = plain_network()
    with torch.no_grad():
        net.encoder[0].weight.mul_(1.3)  # type: ignore[index]
    adapter = Online(net, method="sar", lr=0.1, optimizer=torch.optim.SGD, update="norm")
    adapter.predict(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, torch.tensor([0.01753, -0.01753]), rtol=0, atol=1e-4)
    torch.testing.assert_close(learned.weight, torch.tensor([1.31753, 1.31753]), rtol=0, atol=1e-4)
    assert adapter.state_dict()["learner/objective/average"].item() == pytest.approx(0.2685, abs=1e-3)


def test_the_last_stage_does_not_learn() -> None:
    names = select_parameters(resnet26(), "norm-early")
    assert {".".join(name.split(".")[:2]) for name in names} == {"encoder.1", "encoder.2"}
    assert len(names) == 2 * 2 * 8

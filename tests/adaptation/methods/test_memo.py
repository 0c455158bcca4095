"""MEMO: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, network, pictures
from loops import CLOSE, LR
from testtime import Card, CropFlip, Episodic, Online, Streams, YNet
from testtime.augment import AugMix
from testtime.randomness import Draws

COPIES = 4


def memo(model: YNet, image: Tensor, number: int, lr: float = LR) -> Tensor:
    """Zhang et al. 2022: a step on the entropy of the mean answer to views of one image."""
    keys = Draws.of(0, torch.tensor([number])).fold(0).copies(COPIES)
    cropped = CropFlip(2)(image, keys)[0]
    views = torch.stack([AugMix(1.0)(cropped[k : k + 1], Draws(keys.keys[:, k : k + 1]))[0, 0] for k in range(COPIES)])
    mean = model(views).softmax(1).mean(0)
    model.zero_grad()
    (-(mean * mean.log()).sum()).backward()
    with torch.no_grad():
        for parameter in (*model.encoder.parameters(), *model.classifier.parameters()):
            parameter -= lr * (0 if parameter.grad is None else parameter.grad)
    return model(image).detach()


@pytest.mark.parametrize("norm", ["batch", "group", "resnet"])
def test_memo(norm: str) -> None:
    net, images = network(norm), pictures(5)
    crop = {"augment": CropFlip(2), "copies": COPIES, "lr": LR}
    adapters = [Episodic(net, method="memo", parallel=parallel, **crop) for parallel in (1, 3)]
    expected = torch.cat([memo(copy.deepcopy(net), image, number) for number, image in enumerate(images.split(1))])
    for adapter in adapters:
        torch.testing.assert_close(adapter(images), expected, **CLOSE)
    assert (expected - net(images)).abs().max() > 1e-3


def test_memo_along_streams() -> None:
    net, calls = network(), [pictures(seed=seed) for seed in range(3)]
    streams = Streams(net, COUNT, method="memo", copies=COPIES, lr=LR)
    online = [Online(net, method="memo", copies=COPIES, lr=LR) for _ in range(COUNT)]
    alone = [copy.deepcopy(net) for _ in range(COUNT)]
    for number, call in enumerate(calls):
        expected = torch.cat([memo(alone[row], call[row : row + 1], number) for row in range(COUNT)])
        torch.testing.assert_close(streams(call), expected, **CLOSE)
        torch.testing.assert_close(
            torch.cat([online[row](call[row : row + 1]) for row in range(COUNT)]), expected, **CLOSE
        )


def test_the_papers_settings() -> None:
    adapter = Episodic(network(), method="memo")
    settings = adapter.settings
    assert (settings.steps, settings.copies, settings.lr, settings.update) == (1, 32, 0.005, "all")
    assert settings.optimizer is torch.optim.SGD


def test_a_step_computed_by_hand() -> None:
    """Logits are a bias of ln 3 and 0, whatever the view: p = 3/4 and 1/4, and the gradient is -p (ln p + H)."""
    bias = nn.Linear(1, 2)
    with torch.no_grad():
        bias.weight.zero_()
        bias.bias.copy_(torch.tensor([1.0986123, 0.0]))
    card = Card(size=4, mean=(0.0,), std=(1.0,))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), bias)
    net = YNet(nn.Sequential(nn.Conv2d(1, 1, 1)), pool, None, card).eval()
    adapter = Online(net, method="memo", lr=1.0)
    adapter.predict(torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)))
    # H = 0.5623351; -0.75 (ln 0.75 + H) = -0.2059898; -0.25 (ln 0.25 + H) = 0.2059898
    learned = adapter.network().classifier[2].bias  # type: ignore[index]
    torch.testing.assert_close(learned, torch.tensor([1.0986123 + 0.2059898, -0.2059898]), **CLOSE)

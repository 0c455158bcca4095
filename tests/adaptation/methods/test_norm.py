"""Norm and DUA: against loops as plain as the papers', and by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, network, pictures
from loops import CLOSE, make_batches, use_batch_statistics
from testtime import Card, Episodic, Online, Streams, YNet
from testtime import augment as augmentations
from testtime.randomness import Draws


@pytest.mark.parametrize("kind", [Online, Episodic])
def test_norm(kind: Any) -> None:
    net = network("batch")
    model, adapter = use_batch_statistics(net), kind(net, method="norm")
    for batch in make_batches():
        torch.testing.assert_close(adapter.predict(batch).logits, model(batch).detach(), **CLOSE)


@pytest.mark.filterwarnings("ignore:The method 'norm' needs several images")
def test_a_stream_is_not_normalised_by_another() -> None:
    net, images = network("batch"), pictures()
    model = use_batch_statistics(net)
    expected = torch.cat([model(images[row : row + 1]) for row in range(COUNT)]).detach()
    torch.testing.assert_close(Streams(net, COUNT, method="norm").predict(images).logits, expected, **CLOSE)


def test_normalisation_by_hand() -> None:
    """Pixels 0.2 and 0.6 have mean 0.4 and deviation 0.2: they become -1 and 1."""
    net = YNet(nn.Sequential(nn.BatchNorm2d(1)), nn.Flatten(), None, Card(size=1), channels=1).eval()
    found = Online(net, method="norm").predict(torch.tensor([0.2, 0.6]).view(2, 1, 1, 1)).logits
    torch.testing.assert_close(found.flatten(), torch.tensor([-1.0, 1.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", ["norm", "dua"])
def test_without_batch_norm_there_is_a_warning(method: str) -> None:
    with pytest.warns(UserWarning, match="no Batch Normalization"):
        adapter = Online(network("group"), method=method, copies=2)
    found = adapter.predict(pictures())
    torch.testing.assert_close(found.logits, network("group")(pictures()).detach(), **CLOSE)


def dua(net: YNet, images: Tensor, copies: int, first: int = 0) -> Iterator[Tensor]:
    """Mirza et al. 2022: the running statistics move towards those of augmented copies, by less and less."""
    model, momentum = copy.deepcopy(net), 0.1
    augment = augmentations.make(net.card.augment)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for number, image in enumerate(images):
        momentum *= 0.94
        for norm in norms:
            norm.momentum = momentum + 0.005
            norm.train()
        keys = Draws.of(0, torch.tensor([first + number])).fold(0)
        with torch.no_grad():
            model(augment(image[None], keys.copies(copies))[0])
            for norm in norms:
                norm.eval()
            yield model(image[None])


def test_dua() -> None:
    net, images = network("batch"), pictures(5)
    adapter = Online(net, method="dua", copies=8)
    expected = list(dua(net, images, 8))
    found = [adapter.predict(images[:3]), adapter.predict(images[3:])]
    torch.testing.assert_close(torch.cat([one.logits for one in found]), torch.cat(expected), **CLOSE)
    before, after = net.state_dict(), adapter.network().state_dict()
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"running_mean", "running_var", "num_batches_tracked"}


def test_dua_in_streams() -> None:
    net, calls = network("batch"), [pictures(seed=seed) for seed in range(3)]
    streams = Streams(net, COUNT, method="dua", copies=8)
    alone = [dua(net, torch.stack([call[row] for call in calls]), 8) for row in range(COUNT)]
    for call in calls:
        torch.testing.assert_close(streams.predict(call).logits, torch.cat([next(one) for one in alone]), **CLOSE)


def test_a_step_of_dua_by_hand() -> None:
    """Copies of one pixel of 0.5 have mean 0.5 and variance 0; the running ones, 0 and 1, move by 0.094 + 0.005."""
    norm = nn.BatchNorm2d(1)
    card = Card(size=2, augment={"name": "crop-flip", "padding": 0})
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = YNet(nn.Sequential(norm), head, None, card, channels=1).eval()
    adapter = Online(net, method="dua", copies=4)
    adapter.predict(torch.full((1, 1, 2, 2), 0.5))
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.running_mean, torch.tensor([0.099 * 0.5]))
    torch.testing.assert_close(learned.running_var, torch.tensor([1 - 0.099]))

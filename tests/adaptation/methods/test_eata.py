"""ETA, EATA and RDumb: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters import COUNT, network, pictures
from loops import LR, MOMENTUM, SHARP, entropy, list_norms, make_batches, plain_network, sharpen, use_batch_statistics
from testtime import Online, Streams, YNet, collect

SETTINGS: dict[str, Any] = {"lr": LR, "optimizer": MOMENTUM}


def eta(net: YNet, batches: list[Tensor], anchored: bool = False, resets: int = 10**9) -> Iterator[tuple[Tensor, int]]:
    """Niu et al. 2022: a step on reliable images that differ from the mean prediction; with their number."""
    statistics = net.statistics
    mean: Tensor | None = None
    for number, batch in enumerate(batches):
        if number % resets == 0:
            model, mean = use_batch_statistics(net), None
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            optimizer = MOMENTUM(list_norms(model), lr=LR)
        losses, seen = [], []
        for logits in model(batch):
            uncertainty, answer = entropy(logits[None])[0], logits.softmax(0).detach()
            if uncertainty >= 0.4 * math.log(10):
                continue
            if mean is not None and F.cosine_similarity(answer, mean, dim=0).abs() >= 0.4:
                continue
            losses.append(uncertainty * math.exp(0.4 * math.log(10) - float(uncertainty.detach())))
            seen.append(answer)
        if losses:
            loss = sum(losses) / len(losses)
            new = torch.stack(seen).mean(0)
            mean = new if mean is None else 0.9 * mean + 0.1 * new
            if anchored:
                assert statistics is not None
                for parameter in list_norms(model):
                    name = names[id(parameter)]
                    loss = loss + (statistics.fisher[name] * (parameter - start[name]) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield model(batch).detach(), len(losses)


def sharp_network(norm: str) -> YNet:
    return collect(sharpen(network(norm)), pictures(20, seed=9))


@pytest.mark.parametrize("method", ["eta", "eata"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_eta_and_eata(method: str, norm: str) -> None:
    net, batches = sharp_network(norm), make_batches(5, 12)
    adapter, used = Online(net, method=method, **SETTINGS), []
    for batch, (expected, count) in zip(batches, eta(net, batches, method == "eata"), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **SHARP)
        used.append(count)
    assert 0 < sum(used[1:]) < 4 * 12  # some images were left out, and not all


def test_the_penalty_makes_a_difference() -> None:
    net, batches = sharp_network("group"), make_batches(3, 12)
    for tensor in net.statistics.fisher.values():  # type: ignore[union-attr]
        tensor.mul_(100)
    free, held = (Online(net, method=method, **SETTINGS) for method in ("eta", "eata"))
    for batch in batches:
        one, other = free.predict(batch).logits, held.predict(batch).logits
    assert not torch.allclose(one, other, atol=1e-3)


def test_rdumb_starts_again() -> None:
    net, batches = sharp_network("group"), make_batches(5, 12)
    adapter = Online(net, method="rdumb", **SETTINGS, resets=2)
    for batch, (expected, _) in zip(batches, eta(net, batches, resets=2), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **SHARP)
    assert Online(net, method="rdumb").settings.resets == 1000


@pytest.mark.filterwarnings("ignore:The method 'eta' needs several images")
def test_streams_leave_out_images_of_their_own() -> None:
    net = sharp_network("group")
    calls = [pictures(seed=seed) for seed in range(4)]
    calls[1][1] = 0.5  # certain of nothing, in one stream only
    streams = Streams(net, COUNT, method="eta", **SETTINGS)
    alone = [eta(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    counts = []
    for call in calls:
        found = [next(one) for one in alone]
        torch.testing.assert_close(streams.predict(call).logits, torch.cat([logits for logits, _ in found]), **SHARP)
        counts.append([count for _, count in found])
    assert any(0 < sum(count) < COUNT for count in counts)


def test_without_a_reliable_image_nothing_changes() -> None:
    net = network()  # untrained: certain of nothing
    adapter = Online(net, method="eta", **SETTINGS)
    found = adapter.predict(pictures(6))
    assert found.loss_before.min() > 0.4 * math.log(10)
    assert torch.equal(found.logits, found.logits_before)
    assert all(torch.equal(a, b) for a, b in zip(adapter.network().parameters(), net.parameters(), strict=True))


def test_a_network_without_statistics_is_told_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"'eata' needs statistics .* tt\.collect\(net, images\)"):
        Online(network(), method="eata")


def test_a_state_belongs_to_its_statistics() -> None:
    one, other = (Online(collect(network(), pictures(8, seed=seed)), method="eata") for seed in (1, 2))
    one.predict(pictures())
    with pytest.raises(ValueError, match="another settings"):
        other.load_state_dict(one.state_dict())


@pytest.mark.filterwarnings("ignore:The method 'eta' needs several images")
def test_a_step_computed_by_hand() -> None:
    """Logits (1, -1) have an entropy of 0.3653, above 0.4 ln 2 = 0.2773; (1, -1) scaled to (2, -2) one of 0.0901.

    Its gradient is ∓0.0706, and it is weighted by exp(0.2773 - 0.0901) = 1.2059.
    """
    net = plain_network()
    image = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    adapter = Online(net, method="eta", lr=0.1, optimizer=torch.optim.SGD)
    adapter.predict(image)
    assert torch.equal(adapter.network().encoder[0].bias, torch.zeros(2))  # type: ignore[index]
    with torch.no_grad():
        net.encoder[0].weight.mul_(2)  # type: ignore[index]
    adapter = Online(net, method="eta", lr=0.1, optimizer=torch.optim.SGD)
    adapter.predict(image)
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, torch.tensor([0.00852, -0.00852]), rtol=0, atol=1e-4)
    torch.testing.assert_close(learned.weight, torch.tensor([2.00852, 2.00852]), rtol=0, atol=1e-4)
    second = adapter.predict(image)  # the same answer again is redundant
    assert torch.equal(second.logits, second.logits_before)

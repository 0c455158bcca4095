"""ROID: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters import COUNT, NAN, network, pictures
from loops import CLOSE, LR, entropy, list_norms, make_batches, plain_network, sharpen, use_batch_statistics
from testtime import CropFlip, Online, Streams, YNet
from testtime.randomness import Draws

SGD = {"lr": LR, "optimizer": torch.optim.SGD}


def between(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min()) if values.max() > values.min() else values * 0


def ratio(logits: Tensor) -> Tensor:
    p = logits.softmax(1).clamp(max=0.99)
    return -(p * torch.log(p / (1 - p) + 1e-5)).sum(1)


def correct(logits: Tensor) -> Tensor:
    """Probabilities times how frequent the classes seem to be, with additive smoothing."""
    prior = logits.softmax(1).mean(0)
    smooth = max(1 / logits.shape[0], 1 / logits.shape[1]) / prior.max()
    answer = logits.softmax(1) * (prior + smooth) / (1 + smooth * logits.shape[1])
    return answer / answer.sum(1, keepdim=True)


def roid(net: YNet, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Marsden et al. 2024: the probabilities after each step, and which images had a weight."""
    model, source = use_batch_statistics(net), [p.detach().clone() for p in list_norms(net)]
    optimizer = torch.optim.SGD(list_norms(model), lr=LR)
    mean, start = torch.full((10,), 0.1), 0
    for batch in batches:
        logits = model(batch)
        answers = logits.softmax(1).detach()
        diversity = between(1 - F.cosine_similarity(mean[None], answers, dim=1))
        weights = torch.exp(diversity * between(-entropy(logits.detach())) * 3)
        used = diversity >= diversity.mean()
        mean = 0.9 * mean + 0.1 * answers.mean(0)
        keys = Draws.of(0, torch.arange(start, start + len(batch))).fold(0).copies(1)
        start += len(batch)
        other = model(CropFlip(2)(batch, keys)[:, 0])
        agreement = -0.5 * (logits.softmax(1) * other.log_softmax(1)).sum(1)
        agreement = agreement - 0.5 * (other.softmax(1) * logits.log_softmax(1)).sum(1)
        loss = ((ratio(logits) + agreement) * weights)[used].sum() / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, old in zip(list_norms(model), source, strict=True):
                parameter.copy_(0.99 * parameter + 0.01 * old)
        yield correct(model(batch)).detach(), used


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_roid(norm: str) -> None:
    net, batches = sharpen(network(norm), 4), make_batches()
    adapter = Online(net, method="roid", **SGD)
    for batch, (expected, used) in zip(batches, roid(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits.exp(), expected, **CLOSE)
        assert 0 < used.sum() < len(batch)
        assert found.adapted.all()


@pytest.mark.filterwarnings("ignore:The method 'roid' needs several images")
def test_roid_in_streams_of_single_images() -> None:
    net, calls = network(), [pictures(seed=seed) for seed in range(3)]
    streams = Streams(net, COUNT, method="roid", **SGD)
    alone = [roid(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    for call in calls:
        expected = torch.cat([next(one)[0] for one in alone])
        torch.testing.assert_close(streams.predict(call).logits.exp(), expected, **CLOSE)


def test_a_bad_image_does_not_count_in_the_answers_of_the_others() -> None:
    net, images, good = sharpen(network(), 4), make_batches(1)[0], [0, 2, 3, 4, 5]
    images[1] = NAN
    found = Online(net, method="roid", **SGD).predict(images)
    assert found.rolled_back.all()
    torch.testing.assert_close(found.logits[good].exp(), correct(net(images[good])), **CLOSE)


def test_images_above_the_threshold_are_not_learned_from() -> None:
    net, images = sharpen(network(), 4), make_batches(1, 8)[0]
    confidence = Online(net, method="roid", steps=0).predict(images).confidence
    threshold = float(confidence.sort().values[4:6].mean())
    wanted = confidence < threshold
    gated, alone = Online(net, method="roid", threshold=threshold, **SGD), Online(net, method="roid", **SGD)
    assert torch.equal(gated.predict(images).adapted, wanted)
    alone.predict(images[wanted], torch.arange(8)[wanted])
    torch.testing.assert_close(gated.network().state_dict(), alone.network().state_dict(), **CLOSE)
    means = [one.state_dict()["learner/objective/mean"] for one in (gated, alone)]
    torch.testing.assert_close(*means, **CLOSE)


def test_its_moving_mean_is_saved_and_reset() -> None:
    net, batches = sharpen(network(), 4), make_batches(2)
    adapter, other = (Online(net, method="roid", **SGD) for _ in range(2))
    adapter.predict(batches[0])
    state = copy.deepcopy(adapter.state_dict())
    assert not torch.equal(state["learner/objective/mean"], torch.full((1, 10), 0.1))
    other.load_state_dict(state)
    assert torch.equal(adapter(batches[1]), other(batches[1]))
    adapter.reset()
    assert torch.equal(adapter(batches[0]), Online(net, method="roid", **SGD)(batches[0]))


@pytest.mark.filterwarnings("ignore:The method 'roid' needs several images")
def test_a_step_computed_by_hand() -> None:
    """Logits 1 and -1 with difference z = 2, p = 0.8807971 and q = 0.1192029; the only view is the image itself.

    The ratio is -(p - q) z with slope -(p - q) - 2 p q z = -1.1815685; the agreement is the entropy with slope
    -p q z = -0.2099872. The step of 0.1 along 1.3915557 is then mixed with the source, 0.
    """
    same = {"augment": lambda images, draws: images.unsqueeze(1)}
    adapter = Online(plain_network(), method="roid", lr=0.1, optimizer=torch.optim.SGD, **same)
    found = adapter.predict(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    learned = adapter.network().encoder[0].bias.detach()  # type: ignore[index]
    torch.testing.assert_close(learned, torch.tensor([0.1377640, -0.1377640]), rtol=0, atol=1e-5)
    # Of one image the smoothed frequencies are (p + 1 / p) / (1 + 2 / p) and (q + 1 / p) / (1 + 2 / p).
    p, q = 0.8807971, 0.1192029
    odds = p / q * (p + 1 / p) / (q + 1 / p)
    assert float(found.logits_before[0].exp()[0]) == pytest.approx(odds / (1 + odds), abs=1e-5)

"""Methods of the field, each against a loop written as plainly as its paper's algorithm."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import COUNT, network, pictures
from testtime import Card, Episodic, Online, Streams, YNet
from testtime.adaptation.corrections import Lame
from testtime.adaptation.methods import METHODS
from testtime.randomness import Draws

LR = 0.05
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


def use_batch_statistics(net: YNet) -> YNet:
    """A copy that normalises with the statistics of the batch, and tracks none."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return net


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def tent(net: YNet, batches: list[Tensor]) -> Iterator[Tensor]:
    """Wang et al. 2021: one step on the mean entropy of each batch, by scale and shift of the norms."""
    model = use_batch_statistics(net)
    norms = [m for part in (model.encoder, model.classifier) for m in part.modules()]
    parameters = [p for m in norms if isinstance(m, nn.BatchNorm2d | nn.GroupNorm) for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for batch in batches:
        optimizer.zero_grad()
        entropy(model(batch)).mean().backward()
        optimizer.step()
        yield model(batch).detach()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_tent(norm: str) -> None:
    net, batches = network(norm), [pictures(6, seed=seed) for seed in range(3)]
    adapter = Online(net, method="tent", lr=LR)
    for batch, expected in zip(batches, tent(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, expected, **CLOSE)
        torch.testing.assert_close(found.loss_after, entropy(expected), **CLOSE)
        assert found.loss_after.mean() < found.loss_before.mean()
        once = Episodic(net, method="tent", lr=LR).predict(batch)  # a call is an episode
        torch.testing.assert_close(once.logits, next(tent(net, [batch])), **CLOSE)


def test_tent_in_streams_of_single_images() -> None:
    net, calls = network(), [pictures(seed=seed) for seed in range(3)]
    streams = Streams(net, COUNT, method="tent", lr=LR)
    alone = [tent(net, [call[row : row + 1] for call in calls]) for row in range(COUNT)]
    for call in calls:
        torch.testing.assert_close(streams.predict(call).logits, torch.cat([next(one) for one in alone]), **CLOSE)


def test_a_step_of_tent_computed_by_hand() -> None:
    """A network of one norm and equal features: the entropy's gradient is -p (log p + H) for each logit."""
    norm = nn.GroupNorm(1, 2)
    card = Card(size=1, mean=(0.0, 0.0), std=(1.0, 1.0))
    net = YNet(nn.Sequential(norm), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Flatten(), card)
    image = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    adapter = Online(net, method="tent", lr=LR)
    adapter.predict(image)
    logits = torch.tensor([1.0, -1.0])  # normalised: mean 0.5, deviation 0.5
    p = logits.softmax(0)
    gradient = -p * (p.log() + entropy(logits[None]))
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, -LR * gradient, **CLOSE)
    torch.testing.assert_close(learned.weight, 1 - LR * gradient * logits, **CLOSE)


def cotta(net: YNet, batches: list[Tensor], copies: int) -> Iterator[Tensor]:
    """Wang et al. 2022: a step towards a slow teacher, whose own step follows; some weights go back to the source."""
    student, teacher, source = (use_batch_statistics(net) for _ in range(3))
    moving = [*student.encoder.parameters(), *student.classifier.parameters()]
    optimizer = torch.optim.SGD(moving, lr=LR)
    names = [name for name, _ in student.named_parameters() if not name.startswith("ssl")]
    start = 0
    for batch in batches:
        keys = Draws.of(0, torch.arange(start, start + len(batch))).fold(0)
        start += len(batch)
        with torch.no_grad():
            target = teacher(batch).softmax(1)
            if source(batch).softmax(1).amax(1).mean() < 0.92:
                views = augment(net)(batch, keys.copies(copies))  # (B, copies, C, H, W)
                target = teacher(views.flatten(0, 1)).softmax(1).unflatten(0, (len(batch), copies)).mean(1)
        optimizer.zero_grad()
        F.cross_entropy(student(batch), target).backward()
        optimizer.step()
        with torch.no_grad():
            chosen = unpack_restored(net, keys)
            for name in names:
                own, slow = student.get_parameter(name), teacher.get_parameter(name)
                slow.mul_(0.999).add_(own, alpha=0.001)
                own.copy_(torch.where(chosen[name], source.get_parameter(name), own))
            yield teacher(batch)


def augment(net: YNet) -> Any:
    from testtime import augment as augmentations

    return augmentations.make(net.card.augment)


def unpack_restored(net: YNet, keys: Draws) -> dict[str, Tensor]:
    """Which weights go back, by name: the one draw that the learner makes for all its numbers."""
    from testtime.networks.replicas import Replicas

    replicas = Replicas(net, 1, ("encoder", "classifier"))
    draws = Draws(keys.keys[:1]).purpose("restore").uniform(replicas.packed.numbers.shape[1])
    return {name: tensor[0] for name, tensor in replicas.packed.unpack(draws < 0.01).items()}


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_cotta(norm: str) -> None:
    net, batches = network(norm), [pictures(6, seed=seed) for seed in range(3)]
    adapter = Online(net, method="cotta", lr=LR, copies=4)
    for batch, expected in zip(batches, cotta(net, batches, 4), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **CLOSE)


def test_cottas_teacher_is_saved_reset_and_put_back() -> None:
    net, given = network(), {"method": "cotta", "lr": LR, "copies": 4}
    adapter = Online(net, **given)
    adapter.predict(pictures(seed=0))
    state = adapter.state_dict()
    assert any("teacher" in name for name in state)
    expected = adapter.predict(pictures(seed=1))
    resumed = Online(net, **given)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.predict(pictures(seed=1)).logits, expected.logits)
    bad = pictures()
    bad[:] = float("nan")
    before = adapter.state_dict()
    assert adapter.predict(bad).rolled_back.all()
    after = adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "teacher" in name)
    adapter.reset()
    first = Online(net, **given).predict(pictures(seed=0))
    assert torch.equal(adapter.predict(pictures(seed=0)).logits, first.logits)


def lame(probabilities: Tensor, features: Tensor, neighbours: int) -> Tensor:
    """Boudiaf et al. 2022: every image takes part of its neighbours' answers, until nothing changes."""
    count = len(features)
    answers = probabilities.clone()
    near: list[list[int]] = []
    for i in range(count):
        similarity = [float(F.cosine_similarity(features[i], features[j], dim=0)) for j in range(count)]
        near.append(sorted((j for j in range(count) if j != i), key=lambda j: -similarity[j])[:neighbours])
    for _ in range(200):
        pulled = torch.stack([sum((answers[j] for j in near[i]), torch.zeros(answers.shape[1])) for i in range(count)])
        answers = (probabilities.log() + pulled).softmax(1)
    return answers


@pytest.mark.parametrize("kind", [Online, Episodic])
def test_lame(kind: Any) -> None:
    net, batch = network(), pictures(12)
    found = kind(net, method="lame").predict(batch)
    with torch.no_grad():
        features = net.encoder(net.normalise(batch))
        pooled = net.classifier[:-1](features)  # type: ignore[index]
        probabilities = net(batch).softmax(1)
    torch.testing.assert_close(found.logits.softmax(1), lame(probabilities, pooled, 5), **CLOSE)
    torch.testing.assert_close(found.logits_before, probabilities.log() + net(batch).logsumexp(1, True), **CLOSE)
    assert not found.adapted.any()


def test_lame_on_two_images_and_one() -> None:
    """Of two images each is the other's only neighbour; one has none and stays as it is."""
    logits, features = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.1]])
    found = Lame(iterations=1)(logits, features).softmax(1)
    known = logits.log_softmax(1)
    torch.testing.assert_close(found, (known + known.exp().flip(0)).softmax(1))
    torch.testing.assert_close(Lame()(logits[:1], features[:1]), known[:1])
    assert Lame()(logits[:0], features[:0]).shape == (0, 2)


def test_every_method_says_what_it_is() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.paper
        assert set(method.needs) <= {"branch", "batch"}

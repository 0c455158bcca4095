"""CoTTA: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters import network, pictures
from loops import CLOSE, LR, sharpen, use_batch_statistics
from testtime import Online, YNet
from testtime import augment as augmentations
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws

SGD: dict[str, Any] = {"method": "cotta", "lr": LR, "optimizer": torch.optim.SGD, "copies": 4}


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
                views = augmentations.make(net.card.augment)(batch, keys.copies(copies))  # (B, copies, C, H, W)
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


def unpack_restored(net: YNet, keys: Draws) -> dict[str, Tensor]:
    """Which weights go back, by name: the one draw that the learner makes for all its numbers."""
    replicas = Replicas(net, 1, ("encoder", "classifier"))
    draws = Draws(keys.keys[:1]).purpose("restore").uniform(replicas.packed.numbers.shape[1])
    return {name: tensor[0] for name, tensor in replicas.packed.unpack(draws < 0.01).items()}


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_cotta(norm: str) -> None:
    net, batches = network(norm), [pictures(6, seed=seed) for seed in range(3)]
    adapter = Online(net, **SGD)
    for batch, expected in zip(batches, cotta(net, batches, 4), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **CLOSE)


def test_images_above_the_threshold_do_not_make_a_batch_sure() -> None:
    net, images = sharpen(network("group"), 4), pictures(8)
    confidence = Online(net, steps=0, **SGD).predict(images).confidence
    images, confidence = images[confidence.argsort()], confidence.sort().values
    given = SGD | {"constants": {"sure": float(confidence[:4].mean() + confidence.mean()) / 2}}
    gated, alone = Online(net, threshold=float(confidence[3:5].mean()), **given), Online(net, **given)
    assert gated.predict(images).adapted.tolist() == 4 * [True] + 4 * [False]
    alone.predict(images[:4])
    for name, weight in alone.network().state_dict().items():
        torch.testing.assert_close(gated.network().state_dict()[name], weight, **CLOSE)


def test_cottas_teacher_is_saved_reset_and_put_back() -> None:
    net, given = network(), SGD
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

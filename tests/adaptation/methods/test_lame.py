"""LAME: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters import COUNT, network, pictures
from loops import CLOSE
from testtime import Episodic, Online, Streams
from testtime.adaptation.corrections import Lame


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


@pytest.mark.filterwarnings("ignore:The method 'lame' needs several images")
def test_a_stream_is_not_corrected_by_another() -> None:
    net, images = network(), pictures()
    found = Streams(net, COUNT, method="lame").predict(images)
    torch.testing.assert_close(found.logits.softmax(1), net(images).softmax(1).detach(), **CLOSE)

"""SHOT-IM: against a loop as plain as the paper's, and by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from adapters import network
from loops import CLOSE, LR, MOMENTUM, entropy, make_batches, plain_network, use_batch_statistics
from testtime import Online, YNet


def shot(net: YNet, batches: list[Tensor]) -> Iterator[Tensor]:
    """Liang et al. 2020, without pseudo-labels: certain predictions, a diverse mean; the classifier stays."""
    model = use_batch_statistics(net)
    optimizer = MOMENTUM(model.encoder.parameters(), lr=LR)
    for batch in batches:
        logits = model(batch)
        mean = logits.softmax(1).mean(0)
        loss = entropy(logits).mean() + (mean * (mean + 1e-5).log()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield model(batch).detach()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_shot(norm: str) -> None:
    net, batches = network(norm), make_batches()
    adapter = Online(net, method="shot", lr=LR)
    for batch, expected in zip(batches, shot(net, batches), strict=True):
        torch.testing.assert_close(adapter.predict(batch).logits, expected, **CLOSE)


def test_a_step_computed_by_hand() -> None:
    """Pixels (1, 0) and (0, 1) become logits (1, -1) and (-1, 1): the mean prediction is (0.5, 0.5).

    There its entropy has no slope, so that only the entropies count: -0.2100 and 0.2100 for the logits of the first,
    the reverse for the second. Half of each image: the shift's gradients cancel, the scale's are -0.2100.
    """
    adapter = Online(plain_network(), method="shot", lr=0.1, optimizer=torch.optim.SGD)
    adapter.predict(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(2, 2, 1, 1))
    learned = adapter.network().encoder[0]  # type: ignore[index]
    torch.testing.assert_close(learned.bias, torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(learned.weight, torch.tensor([1.0210, 1.0210]), rtol=0, atol=1e-4)

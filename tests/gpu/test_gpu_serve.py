"""The service on a GPU: steps are launched ahead, and the answers are those of `Streams`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
from testtime import Method, Streams
from testtime.adaptation.inputs import send
from testtime.serve.service import Service
from testtime.serve.settings import ServeSettings
from testtime.serve.waiting import Job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
METHOD = Method("ttt", "", "", settings={"copies": 2, "lr": 0.01}, needs=("branch",))


@pytest.mark.parametrize("given", [{"checkpoint_every": 0}, {"checkpoint_every": 1000}, {"shadow": True}])
def test_answers_are_those_of_streams(tmp_path: Path, given: dict[str, Any]) -> None:
    net = adapters.network("group").to("cuda")
    settings = ServeSettings(tmp_path, slots=4, group=4, **given)
    service = Service(net, METHOD, settings, "small")
    images = {name: adapters.pictures(7, seed=number) for number, name in enumerate("abcdef")}
    waiting: dict[str, list[Any]] = {name: [] for name in images}
    try:
        for first, last in ((0, 1), (1, 4), (4, 5), (5, 7)):
            for name, own in images.items():
                job = Job(name, list(own[first:last].unbind()), create=True)
                waiting[name].append(service.batcher.submit(job))
        answers = {
            name: [one for part in parts for one in part.result(60)["answers"]] for name, parts in waiting.items()
        }
    finally:
        assert service.stop()
    for name, own in images.items():
        alone = Streams(net, 4, together=4, padded=True, method=METHOD)
        made = [alone.predict(image[None], streams=torch.tensor([1])) for image in own]
        losses = torch.tensor([one["loss_after"] for one in answers[name]])
        assert torch.allclose(losses, torch.cat([one.loss_after for one in made]).cpu(), atol=1e-3)
        if not settings.shadow:
            found = torch.tensor([one["probabilities"] for one in answers[name]])
            assert torch.allclose(found, torch.cat([one.logits for one in made]).softmax(-1).cpu(), atol=1e-3)


def test_what_is_sent_may_be_changed_at_once() -> None:
    """Also while the device is busy, from pinned memory and from any other."""
    busy = torch.randn(4096, 4096, device="cuda")
    for pinned in (False, True):
        tensor = torch.arange(1000).pin_memory() if pinned else torch.arange(1000)
        for _ in range(20):
            busy = busy @ busy / 4096
        sent = send(tensor, torch.device("cuda"))
        tensor.zero_()
        assert torch.equal(sent.cpu(), torch.arange(1000))

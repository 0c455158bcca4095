"""benchmarks/poison.py: hostile images are what they are called, streams differ only by them, and the file says all."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import testtime as tt
from scripts import load_script


@pytest.fixture
def poison() -> ModuleType:
    return load_script("benchmarks/poison.py")


def measure_classes(net: tt.YNet, image: Tensor, images: Tensor, labels: Tensor) -> float:
    """The classes' loss of images after a small step on the task's loss of another one, minus that before."""
    views, targets = tt.Rotation().probe(image)
    moving = list(net.encoder.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(net.self_supervise(views), targets), moving)
    with torch.no_grad():
        before = F.cross_entropy(net(images), labels)
        for parameter, gradient in zip(moving, gradients, strict=True):
            parameter -= 1e-4 * gradient
        after = F.cross_entropy(net(images), labels)
        for parameter, gradient in zip(moving, gradients, strict=True):
            parameter += 1e-4 * gradient
    return float(after - before)


def test_hostile_images(poison: ModuleType) -> None:
    net = tt.load("digits-resnet8-gn-joint")
    images, labels = poison.open_stream("digits-c/gaussian_noise/5", 40, "cpu")
    made = {kind: poison.make_hostile(kind, 6, net, "ttt", images, labels) for kind in poison.KINDS}
    assert all(some.shape == (6, 1, 16, 16) and some.min() >= 0 and some.max() <= 1 for some in made.values())
    assert (made["constant"] == 0.5).all()
    assert 0 < (made["duplicate"] - images[:1]).abs().max() < 3 / 255
    plain = images[torch.arange(6) * 7 % 40]
    for kind in ("task", "classes"):
        assert 0 < (made[kind] - plain).abs().max() <= 8 / 255 + 1e-6
    with torch.no_grad():
        assert (poison.make_losses(net, "ttt")(made["task"]) > poison.make_losses(net, "ttt")(plain)).all()
    changes = [
        sum(measure_classes(net, image[None], images, labels) for image in some) for some in (plain, made["classes"])
    ]
    assert changes[1] > max(changes[0], 0)


def test_they_come_in_the_middle_third(poison: ModuleType) -> None:
    order = poison.place_hostile(12, 3)
    assert [place for place in order if place >= 0] == list(range(12))
    assert sorted(place for place in order if place < 0) == [-3, -2, -1]
    assert order[:4] == [0, 1, 2, 3]
    assert order[-4:] == [8, 9, 10, 11]
    assert poison.place_hostile(4, 0) == [0, 1, 2, 3]


def test_recovery(poison: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.zeros(30, dtype=torch.bool)
    wrong = usual.clone()
    assert poison.measure_recovery(wrong, usual) == 0
    wrong[20:23] = True
    assert poison.measure_recovery(wrong, usual) == 3  # the first window of five without an error
    wrong[:] = True
    assert poison.measure_recovery(wrong, usual) is None


@pytest.mark.parametrize("method", ["ttt", "tent"])
@pytest.mark.filterwarnings("ignore:The method .* needs several images")
def test_a_stream_without_hostile_images_is_a_plain_one(poison: ModuleType, method: str) -> None:
    net = tt.load("digits-resnet8-gn-joint")
    images, labels = poison.open_stream("digits", 9, "cpu")
    noise = poison.make_hostile("random", 2, net, method, images, labels)
    found = poison.run_streams(net, method, 3.0, images, [images[:0], noise], 3, {"copies": 2})
    adapter = tt.Online(net, method=method, copies=2)
    expected = torch.cat([adapter.predict(part).classes for part in images.split(1 if method == "ttt" else 3)])
    assert torch.equal(found[0][0], expected)
    assert (found[1][0] >= 0).all()


def test_the_table_and_the_file(
    poison: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(poison, "KINDS", ("random", "constant"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "poison.json"
    poison.main(["--quick", "--methods", "tent", "--images", "18", "--out", str(out)])
    document = json.loads(out.read_text())
    rows = document["results"]["digits-c/gaussian_noise/5"]
    assert [(row["guard"], row["kind"]) for row in rows] == [
        (guard, kind) for guard in ("rise", "guard") for kind in ("none", "random", "constant")
    ]
    assert document["guard"] == tt.Guard().describe()
    assert len(capsys.readouterr().out.splitlines()) == 6

"""RoTTA: against a loop as plain as the paper's, its memory against lists, and by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, network, pictures
from loops import CLOSE, LR, entropy, list_norms, make_batches, plain_network, sharpen
from testtime import CropFlip, Online, Streams, YNet, resnet26
from testtime.adaptation.methods import METHODS
from testtime.adaptation.objectives import RobustTeacher
from testtime.adaptation.objectives.memory import Memory
from testtime.randomness import Draws

SGD: dict[str, Any] = {"lr": LR, "optimizer": torch.optim.SGD}


class Small(RobustTeacher):
    """With numbers that show in few steps."""

    capacity, momentum, rate = 12, 0.9, 0.2


SMALL = replace(METHODS["rotta"], objective=Small)


@dataclass(eq=False)
class Item:
    image: Tensor
    entropy: float
    age: int = 0


@dataclass
class Lists:
    """The memory as a list of items for each class."""

    capacity: int
    classes: int = 10
    items: dict[int, list[Item]] = field(default_factory=dict)

    def score(self, item: Item) -> float:
        return 1 / (1 + math.exp(-item.age / self.capacity)) + item.entropy / math.log(self.classes)

    def add(self, new: Item, label: int) -> None:
        own = self.items.setdefault(label, [])
        if len(own) < self.capacity / self.classes:
            if sum(map(len, self.items.values())) < self.capacity or self.remove(self.largest(), new):
                own.append(new)
        elif self.remove([label], new):
            own.append(new)
        for item in self.all():
            item.age += 1

    def largest(self) -> list[int]:
        most = max(map(len, self.items.values()))
        return [label for label, items in self.items.items() if len(items) == most]

    def remove(self, labels: list[int], new: Item) -> bool:
        worst, label = max(
            ((item, label) for label in labels for item in self.items[label]), key=lambda p: self.score(p[0])
        )
        if self.score(worst) <= self.score(new):
            return False
        self.items[label].remove(worst)
        return True

    def all(self) -> list[Item]:
        return [item for items in self.items.values() for item in items]


@pytest.mark.parametrize(("capacity", "classes"), [(7, 3), (4, 10), (12, 2)])
def test_the_memory_is_that_of_lists(capacity: int, classes: int) -> None:
    """Two replicas with classes of unequal frequency, in calls of several images."""
    generator = torch.Generator().manual_seed(0)
    memory = Memory.make_empty(2, capacity, torch.zeros(1, 1, 1, 1))
    lists = [Lists(capacity, classes) for _ in range(2)]
    for _ in range(12):
        images, values = torch.rand(2, 5, 1, 1, 1, generator=generator), torch.rand(2, 5, generator=generator)
        labels = (torch.rand(2, 5, generator=generator) ** 2 * classes).long()
        wanted = torch.rand(2, 5, generator=generator) < 0.9
        memory = memory.add(images, labels, values, wanted, classes)
        for row in range(2):
            for place in range(5):
                if wanted[row, place]:
                    lists[row].add(Item(images[row, place], float(values[row, place])), int(labels[row, place]))
            filled = memory.labels[row] >= 0
            found = sorted(zip(*(t[row][filled].flatten().tolist() for t in memory), strict=True))
            expected = sorted(
                (float(item.image), label, pytest.approx(item.entropy), item.age)
                for label, items in lists[row].items.items()
                for item in items
            )
            assert found == expected


class RobustNorm(nn.Module):
    """Normalises with statistics that first move towards those of the batch, if it learns."""

    def __init__(self, norm: nn.BatchNorm2d, rate: float) -> None:
        super().__init__()
        self.norm, self.rate, self.learns = norm, rate, False
        self.mean, self.variance = norm.running_mean, norm.running_var

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.learns:
            mean = (1 - self.rate) * mean + self.rate * x.mean((0, 2, 3))
            variance = (1 - self.rate) * variance + self.rate * x.var((0, 2, 3), correction=0)
            self.mean, self.variance = mean.detach(), variance.detach()
        y = (x - mean[:, None, None]) / (variance[:, None, None] + self.norm.eps).sqrt()
        return y * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]


def make_robust(module: nn.Module, rate: float) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, RobustNorm(child, rate))
        else:
            make_robust(child, rate)


def learn(model: nn.Module, learns: bool) -> None:
    for layer in model.modules():
        if isinstance(layer, RobustNorm):
            layer.learns = learns


def rotta(net: YNet, batches: list[Tensor], kind: type[RobustTeacher] = Small) -> Iterator[tuple[Tensor, bool]]:
    """Yuan et al. 2023: the teacher's answers after each batch, and whether there was a step."""
    student, teacher = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
    moving = list_norms(student)
    for model in (student, teacher):
        make_robust(model, kind.rate)
    optimizer = torch.optim.SGD(moving, lr=LR)
    memory, waiting = Lists(kind.capacity), 0
    for batch in batches:
        logits = teacher(batch).detach()
        for image, answer in zip(batch, logits, strict=True):
            memory.add(Item(image, float(entropy(answer[None]))), int(answer.argmax()))
        waiting += len(batch)
        step = waiting >= kind.capacity
        if step:
            waiting = 0
            images = torch.stack([item.image for item in memory.all()])
            ages = torch.tensor([item.age / kind.capacity for item in memory.all()])
            learn(teacher, True)
            target = teacher(images).softmax(1).detach()
            learn(teacher, False)
            learn(student, True)
            losses = -(target * student(images.flip(-1)).log_softmax(1)).sum(1)
            learn(student, False)
            optimizer.zero_grad()
            (losses * torch.exp(-ages) / (1 + torch.exp(-ages))).mean().backward()
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.data = kind.momentum * slow.data + (1 - kind.momentum) * fast.data
        yield teacher(batch).detach(), step


def mirror(images: Tensor, draws: Draws) -> Tensor:
    """Nothing random, since the order of the images in the memory, and so their draws, are up to its code."""
    return images.flip(-1)[:, None].expand(-1, draws.keys.shape[1], -1, -1, -1)


def make_network(norm: str) -> YNet:
    net = resnet26(depth=8, size=16, seed=1, norm="batch").eval() if norm == "resnet" else network(norm)
    return sharpen(net, 4)


@pytest.mark.parametrize("size", [5, 12, 20])
@pytest.mark.parametrize("norm", ["batch", "group", "resnet", "no branch"])
def test_rotta(norm: str, size: int) -> None:
    net, batches = make_network(norm), make_batches(5, size)
    adapter, stepped = Online(net, method=SMALL, augment=mirror, **SGD), []
    for batch, (expected, step) in zip(batches, rotta(net, batches), strict=True):
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, expected, **CLOSE)
        assert step or torch.equal(found.logits_before, found.logits)
        stepped.append(step)
    assert stepped == ([False, False, True, False, False] if size == 5 else [True] * 5)
    assert (expected - net(batches[-1])).abs().max() > 1e-3


def test_the_papers_numbers() -> None:
    net, batches = make_network("batch"), make_batches(2, 64)
    adapter = Online(net, method="rotta", augment=mirror, **SGD)
    for batch, (expected, step) in zip(batches, rotta(net, batches, RobustTeacher), strict=True):
        torch.testing.assert_close(adapter(batch), expected, **CLOSE)
        assert step
    assert (RobustTeacher.capacity, RobustTeacher.momentum, RobustTeacher.rate) == (64, 0.999, 0.05)


@pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_rotta_in_streams(norm: str) -> None:
    """Streams that have seen different numbers of images take their steps at different times."""
    net, calls = make_network(norm), [pictures(seed=seed) for seed in range(28)]
    streams = Streams(net, COUNT, method=SMALL, augment=mirror, **SGD)
    alone = [Online(net, method=SMALL, augment=mirror, **SGD) for _ in range(COUNT)]
    for number, call in enumerate(calls):
        rows = [row for row in range(COUNT) if (number + row) % 3 or row == 0]
        found = streams.predict(call[rows], streams=torch.tensor(rows)).logits
        expected = torch.cat([alone[row](call[row : row + 1]) for row in rows])
        torch.testing.assert_close(found, expected, **CLOSE)
    assert (streams(calls[0]) - net(calls[0])).abs().max() > 1e-4


def test_views_are_augmented_by_the_image_of_the_call() -> None:
    net, batch = make_network("group"), make_batches(1, 12)[0]
    given: dict[str, Any] = {"method": SMALL, **SGD}
    first = Online(net, augment=CropFlip(2), **given)(batch)
    assert torch.equal(Online(net, augment=CropFlip(2), **given)(batch), first)
    assert not torch.equal(Online(net, augment=CropFlip(2), seed=1, **given)(batch), first)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_memory_and_teacher_are_saved_reset_and_put_back(norm: str) -> None:
    net, batches = make_network(norm), make_batches(4, 8)
    adapter, other = (Online(net, method=SMALL, **SGD) for _ in range(2))
    first = adapter(batches[0])
    for batch in batches[1:3]:
        adapter(batch)
    other.load_state_dict(adapter.state_dict())
    assert torch.equal(adapter(batches[3]), other(batches[3]))
    before = adapter.state_dict()
    assert adapter.predict(torch.full_like(batches[0], float("nan"))).rolled_back.all()
    after = adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("learner"))
    adapter.reset()
    assert torch.equal(adapter(batches[0]), first)


def test_a_step_computed_by_hand() -> None:
    """A memory of one image whose age is 1; teacher (1, -1), and after the first step a student of (1.5, -1.5)."""

    class One(RobustTeacher):
        capacity = 1

    adapter = Online(plain_network(), method=replace(METHODS["rotta"], objective=One), augment=mirror, **SGD)
    image = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    adapter.predict(image)
    state = adapter.state_dict()
    assert state["learner/objective/memory/labels"].tolist() == [[0]]
    assert state["learner/objective/memory/age"].tolist() == [[1]]
    state["learner/encoder.0.bias"] = torch.tensor([[0.5, -0.5]])
    adapter.load_state_dict(state)
    adapter.predict(image)
    # Student (1.5, -1.5): 0.9525741; teacher (1, -1): 0.8807971; weight 1 / (1 + e) = 0.2689414.
    learned = adapter.network().encoder[0].bias.detach()  # type: ignore[index]
    move = LR * 0.2689414 * (0.9525741 - 0.8807971)
    torch.testing.assert_close(learned, torch.tensor([0.5 - move, -0.5 + move]), **CLOSE)

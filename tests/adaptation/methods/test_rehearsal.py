"""Rehearsal: against a plain loop, its memory against lists, its gate by numbers, and a step by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adapters import COUNT, NAN, network, pictures, same
from loops import CLOSE, entropy, make_batches, plain_network, sharpen
from testtime import METHODS, CropFlip, Online, Rotation, Streams, YNet, collect
from testtime.adaptation.objectives.rehearsal import add_images, measure_diversity
from testtime.networks.task_loss import read_task_loss
from testtime.randomness import Draws

LR = 0.01
GIVEN: dict[str, Any] = {"method": "rehearsal", "lr": LR, "copies": 4}


def look(model: YNet, image: Tensor) -> tuple[Tensor, float]:
    """Class logits of an image, averaged with those of its mirror image, and the task's loss."""
    with torch.no_grad():
        views, targets = Rotation().probe(image[None])
        loss = F.cross_entropy(model.self_supervise(views), targets)
        return (model(image[None]) + model(image[None].flip(-1))) / 2, float(loss)


def rehearse(
    net: YNet,
    images: Tensor,
    memory: int = 5,
    weight: float = 0.7,
    limit: float = 0.0,
    momentum: float = 0.99,
    sharpness: float = 40.0,
) -> Iterator[tuple[Tensor, bool]]:
    """The answer to each image of a stream, and whether there was a step."""
    model, held, average = copy.deepcopy(net).eval(), {}, limit
    losses, classes = [0.0, 0.0], torch.zeros(10)  # of the original network and the adapted one; of the latter
    assert model.ssl is not None
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=LR)
    for number, image in enumerate(images):
        held[number % memory if memory else 0] = (image * 255).round() / 255
        draws = Draws.of(0, torch.tensor([number])).fold(0)
        keys = draws.copies(4)
        views, targets = Rotation().views(CropFlip(2)(image[None], keys).flatten(0, 1), keys.flatten())
        loss = task = F.cross_entropy(model.self_supervise(views), targets)
        if memory:
            crops = []
            for key in draws.purpose("memory").copies(4).keys[0]:
                slot = int(Draws(key).purpose("slot").integers(len(held)))
                crops.append(CropFlip(2)(held[slot][None], Draws(key.view(1, 1)))[0, 0])
            logits = model(torch.stack(crops))
            mean = logits.softmax(1).mean(0)
            inform = entropy(logits).mean() + (mean * (mean + 1e-5).log()).sum()
            shares = classes / classes.sum() if classes.sum() else classes
            share = float(torch.special.entr(shares).sum()) / math.log(10)
            diversity = min(max((share - 0.6) / 0.3, 0.0), 1.0) if sharpness else 1.0
            loss = task + weight * len(held) / memory * diversity * inform
        average = momentum * average + (1 - momentum) * float(task.detach())
        learns = limit == 0 or average > limit
        (theirs, first), (before, second) = look(net, image), look(model, image)
        if learns:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ours, _ = look(model, image)
        if sharpness:
            losses = [0.9 * old + 0.1 * new for old, new in zip(losses, (first, second), strict=True)]
            classes = classes + (before[0].softmax(0) - classes) / max(memory, 1)
            ratio = math.exp(0.2) * (losses[0] + 0.05) / (losses[1] + 0.05)
            ours = theirs + (ours - theirs) / (1 + ratio**-sharpness)
        yield ours, learns


def make_images(count: int = 12) -> Tensor:
    return torch.cat(make_batches(count // 6))


@pytest.mark.parametrize("memory", [0, 1, 5, 64])
@pytest.mark.parametrize("norm", ["group", "resnet"])
def test_rehearsal(norm: str, memory: int) -> None:
    net, images = network(norm) if norm == "resnet" else sharpen(network(norm), 4), make_images()
    adapter = Online(net, constants={"memory": memory, "weight": 0.7, "drift": 0}, **GIVEN)
    for image, (expected, _) in zip(images, rehearse(net, images, memory), strict=True):
        # The weight of the two networks magnifies how losses are rounded.
        torch.testing.assert_close(adapter(image[None]), expected, rtol=1e-3, atol=1e-3)
    assert (expected - net(images[-1:])).abs().max() > 1e-2
    assert adapter.holds_images == (memory > 0)
    assert ("learner/objective/images" in adapter.state_dict()) == (memory > 0)


def test_unhedged_the_adapted_network_answers() -> None:
    net, images = sharpen(network("group"), 4), make_images()
    adapter = Online(net, constants={"memory": 5, "weight": 0.7, "drift": 0, "sharpness": 0}, **GIVEN)
    for image, (expected, _) in zip(images, rehearse(net, images, sharpness=0), strict=True):
        torch.testing.assert_close(adapter(image[None]), expected, **CLOSE)
    assert "learner/objective/recent" not in adapter.state_dict()


def test_nothing_is_learned_while_the_task_is_easy() -> None:
    """The first images have a loss below the limit, the next above, and so on; the weights move only above."""
    net, images = collect(sharpen(network("group"), 4), make_images(6)), make_images(24)
    known = read_task_loss(net, "copies")
    assert known is not None
    given = {"memory": 5, "weight": 0.7, "drift": 1.02, "momentum": 0.5}
    adapter, steps = Online(net, constants=given, **GIVEN), []
    expected = rehearse(net, images, limit=1.02 * known.loss, momentum=0.5)
    before = adapter.network().state_dict()
    for image, (logits, learns) in zip(images, expected, strict=True):
        torch.testing.assert_close(adapter(image[None]), logits, **CLOSE)
        after = adapter.network().state_dict()
        assert learns != all(torch.equal(before[name], after[name]) for name in before)
        before = after
        steps.append(learns)
    assert 3 < sum(steps) < 21
    assert "collected" in adapter.describe()


def test_the_memory_counts_if_classes_are_diverse() -> None:
    frequencies = torch.zeros(4, 16)
    frequencies[0, 3] = 5.0  # one class
    frequencies[1, :4] = 1.0  # four of sixteen: half of the entropy
    frequencies[2, :8] = 0.1  # eight: three quarters
    frequencies[3] = 0.01
    torch.testing.assert_close(measure_diversity(frequencies), torch.tensor([0.0, 0.0, 0.5, 1.0]), rtol=0, atol=1e-5)
    assert measure_diversity(torch.zeros(1, 10)).tolist() == [0.0]


@pytest.mark.parametrize(("losses", "weight"), [([0.1, 9.0], 0.0), ([9.0, 0.1], 1.0)])
def test_the_network_that_solves_the_task_answers(losses: list[float], weight: float) -> None:
    net, images = sharpen(network("group"), 4), pictures(5)
    adapter = Online(net, **GIVEN)
    adapter.predict(images[:4])
    state = adapter.state_dict()
    for name in ("recent", "lasting"):
        state[f"learner/objective/{name}"] = torch.tensor([losses if name == "recent" else [1.0, 1.0]])
    adapter.load_state_dict(state)
    found = adapter(images[4:])
    theirs, ours = (look(one, images[4])[0] for one in (net, adapter.network()))
    assert (theirs - ours).abs().max() > 1e-3
    torch.testing.assert_close(found, theirs + weight * (ours - theirs), **CLOSE)


def test_answers_do_not_depend_on_whether_another_stream_learns() -> None:
    streams, mixed = Streams(sharpen(network("group"), 4), 2, threshold=0.35, **GIVEN), 0
    for pair in pictures(16).unflatten(0, (8, 2)):
        state, alone = streams.state_dict(), []
        for number in (0, 1):
            alone.append(streams.predict(pair[number, None], streams=torch.tensor([number])))
            streams.load_state_dict(state)
        found = streams.predict(pair)
        mixed += int(found.adapted.sum()) == 1
        torch.testing.assert_close(found.logits, torch.cat([one.logits for one in alone]), **CLOSE)
    assert mixed


def test_a_stream_that_learns_the_task_away_starts_again() -> None:
    net, images = network("group"), pictures(4)
    adapter = Online(net, **GIVEN)
    adapter.predict(images[:3])
    state = adapter.state_dict()
    assert state["learner/objective/seen"].tolist() == [3]
    state["learner/objective/lasting"] = torch.tensor([[1.0, 1.1]])
    adapter.load_state_dict(state)
    adapter.predict(images[3:])
    assert adapter.state_dict()["learner/objective/seen"].tolist() == [4]  # not yet
    state["learner/objective/lasting"] = torch.tensor([[1.0, 1.5]])
    adapter.load_state_dict(state)
    prediction = adapter.predict(images[3:])
    assert prediction.adapted.all()
    assert adapter.state_dict()["learner/objective/seen"].tolist() == [0]
    assert all(torch.equal(one, net.state_dict()[name]) for name, one in adapter.network().state_dict().items())


def test_statistics_and_the_card_say_how_hard_the_task_was() -> None:
    net, images = network("group"), pictures(40)
    assert read_task_loss(net) is None
    net.describe(record={"epochs": [{"task": 0.7}, {"task": 0.25}]})
    assert read_task_loss(net, "copies") == read_task_loss(net, "plain")
    found = read_task_loss(net)
    assert found is not None
    assert found.loss == 0.25
    collect(net, images)
    views, targets = Rotation().probe(images)
    plain = read_task_loss(net)
    copies = read_task_loss(net, "copies")
    assert plain is not None
    assert copies is not None
    assert plain.loss == pytest.approx(F.cross_entropy(net.self_supervise(views), targets).item(), rel=1e-5)
    keys = Draws.of(0, torch.arange(40)).copies(1)
    views, targets = Rotation().views(CropFlip(2)(images, keys).flatten(0, 1), keys.flatten())
    assert copies.loss == pytest.approx(F.cross_entropy(net.self_supervise(views), targets).item(), rel=1e-5)
    assert "task" not in collect(network("no branch"), images).statistics.about  # type: ignore[union-attr]


@pytest.mark.parametrize(("capacity", "size"), [(4, 3), (5, 1), (3, 8)])
def test_the_memory_is_that_of_lists(capacity: int, size: int) -> None:
    held, seen = torch.zeros(2, capacity, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    lists: list[list[int]] = [[], []]
    for call in range(6):
        images = (torch.arange(2 * size) + 1 + 20 * call).byte().view(2, size, 1, 1, 1)
        wanted = Draws.of(call, torch.arange(2)).uniform(size) < 0.7
        held, seen = add_images(held, seen, images, wanted)
        for row in range(2):
            lists[row] += images[row, wanted[row]].flatten().tolist()
            last = {place % capacity: value for place, value in enumerate(lists[row])}
            assert held[row].flatten().tolist() == [last.get(slot, 0) for slot in range(capacity)]
            assert int(seen[row]) == len(lists[row])


def test_several_steps_store_an_image_once() -> None:
    adapter = Online(network("group"), steps=3, constants={"memory": 4}, **GIVEN)
    images = pictures(6)
    adapter.predict(images)
    state = adapter.state_dict()
    assert state["learner/objective/seen"].tolist() == [6]
    expected = (images[[4, 5, 2, 3]] * 255).round().byte()
    assert torch.equal(state["learner/objective/images"][0], expected)


def test_memory_and_average_are_saved_reset_and_put_back_and_belong_to_a_stream(tmp_path: Path) -> None:
    net = collect(network("group"), pictures(20))
    given = {**GIVEN, "constants": {"memory": 3, "drift": 1.0}}
    streams, other = (Streams(net, COUNT, together=2, **given) for _ in range(2))
    alone = [Online(net, **given) for _ in range(COUNT)]
    for call in range(5):
        images = pictures(seed=call)
        found = streams.predict(images).logits
        torch.testing.assert_close(
            found, torch.cat([one(images[row : row + 1]) for row, one in enumerate(alone)]), **CLOSE
        )
    streams.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert same(streams.predict(images), other.predict(images))
    before = streams.state_dict()
    assert streams.predict(torch.full_like(images, NAN)).rolled_back.all()
    after = streams.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("learner/"))
    streams.reset(torch.tensor([1]))
    assert streams.state_dict()["learner/objective/seen"].tolist() == [6, 0, 6]


def test_a_step_computed_by_hand() -> None:
    """Pixels become logits: (1, 0, 0, 0) becomes √3 and three times -1/√3. A memory of two, of which both are drawn."""

    def stay(images: Tensor, draws: Draws) -> Tensor:
        return images[:, None].expand(-1, draws.keys.shape[1], -1, -1, -1)

    net = plain_network(4)
    first, second = (torch.eye(4)[n].view(1, 4, 1, 1) for n in (0, 1))
    settings: dict[str, Any] = {"method": "rehearsal", "augment": stay, "task": Rotation("all"), "copies": 2}
    for seed in range(20):  # the second image must draw each of the two once
        keys = Draws.of(seed, torch.tensor([1])).fold(0).purpose("memory").copies(2)
        if sorted(keys.purpose("slot").integers(2)[0].tolist()) == [0, 1]:
            break
    adapter = Online(net, seed=seed, lr=0.1, constants={"memory": 2, "weight": 0.5, "sharpness": 0}, **settings)
    adapter.predict(first)
    state = adapter.state_dict()
    state["learner/encoder.0.bias"].zero_()
    state["learner/encoder.0.weight"].fill_(1)
    adapter.load_state_dict(state)
    adapter.predict(second)
    high, low = math.exp(math.sqrt(3)), math.exp(-math.sqrt(1 / 3))
    p, q = high / (high + 3 * low), low / (high + 3 * low)
    middle, rest = (p + q) / 2, q  # the mean prediction: of the two pixels that are set, and of the others
    own = -(p * math.log(p) + 3 * q * math.log(q))
    gradient = [q - 0.25, p - 0.25, q - 0.25, q - 0.25]  # of the task: each rotation once
    slopes = [math.log(middle)] * 2 + [math.log(rest)] * 2
    for one in ([p, q, q, q], [q, p, q, q]):
        mean = sum(a * b for a, b in zip(one, slopes, strict=True))
        for place in range(4):
            certain = -one[place] * (math.log(one[place]) + own)
            diverse = one[place] * (slopes[place] - mean)
            gradient[place] += 0.5 * (certain + diverse) / 2
    learned = adapter.network().encoder[0].bias.detach()  # type: ignore[index]
    torch.testing.assert_close(learned, -0.1 * torch.tensor(gradient), rtol=0, atol=1e-4)


def test_constants_are_those_of_the_objective() -> None:
    net = network("group")
    assert METHODS["rehearsal"].holds_images
    assert METHODS["best"].holds_images
    assert METHODS["rotta"].holds_images
    assert not Online(net).holds_images
    assert Online(net, constants={"memory": 3}, **GIVEN).describe()["constants"] == {"memory": 3}
    assert "constants" not in Online(net, **GIVEN).describe()
    for bad, message in (({"memories": 3}, "has no 'memories'"), ({"memory": "3"}, "numbers by name")):
        with pytest.raises(ValueError, match=message):
            Online(net, constants=bad, **GIVEN)

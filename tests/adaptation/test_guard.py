"""The guard of streams: against averages and lengths computed by hand from what an unguarded stream does."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import COUNT, NAN, network, pictures, same
from loops import CLOSE, entropy, make_batches, sharpen
from testtime import Draws, Fixed, Guard, Method, Online, Prediction, Streams, YNet
from testtime.adaptation.objectives import Entropy
from testtime.evaluation.method_specs import MethodSpec

pytestmark = pytest.mark.filterwarnings("ignore:The method .* needs several images")
OFF: dict[str, Any] = {"rise": math.inf, "collapse": 0, "burst": 0, "distance": 0}
TENT: dict[str, Any] = {"method": "tent", "lr": 0.3}  # collapses within a few batches
FALLBACKS = ("undo", "shadow", "source", "freeze")


@functools.cache
def make_stream() -> tuple[YNet, list[Tensor]]:
    return network("group"), make_batches(8)


def spread(net: YNet, answers: list[Tensor], momentum: float) -> list[float]:
    """By how much answers `(N, K)` are less diverse than the network's own, after each batch, image by image."""
    means = [torch.full((10,), 0.1) for _ in range(2)]
    ratios = []
    for batch, logits in zip(make_stream()[1], answers, strict=False):
        for which, given in enumerate((logits, net(batch).detach())):
            for _ in range(len(batch)):
                means[which] = momentum * means[which] + (1 - momentum) * given.softmax(1).mean(0)
        one, other = (float(entropy(mean.log()[None])) for mean in means)
        ratios.append(math.exp(one - other))
    return ratios


@functools.cache
def run_unguarded() -> tuple[list[Prediction], list[YNet]]:
    net, batches = make_stream()
    adapter = Online(net, guard=math.inf, **TENT)
    found, networks = [], []
    for batch in batches:
        found.append(adapter.predict(batch))
        networks.append(adapter.network())
    return found, networks


def find_alarm() -> tuple[float, int]:
    """A fraction that the diversity of the unguarded stream falls below, and the batch with which it does."""
    ratios = spread(make_stream()[0], [one.logits for one in run_unguarded()[0]], 0.9)
    fraction = (ratios[0] + min(ratios)) / 2
    alarm = next(number for number, ratio in enumerate(ratios) if ratio < fraction)
    assert 1 < alarm < len(ratios) - 2
    return fraction, alarm


def make_collapsing(fallback: Any, **more: Any) -> tuple[Online, int]:
    fraction, alarm = find_alarm()
    guard = Guard(**OFF | {"collapse": fraction}, fallback=fallback, momentum=0.9, **more)
    return Online(make_stream()[0], guard=guard, **TENT), alarm


def get_weights(net: YNet) -> Tensor:
    return torch.cat([p.detach().flatten() for p in (*net.encoder.parameters(), *net.classifier.parameters())])


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_a_collapse_is_noticed_and_answered_from_before_the_update(fallback: str) -> None:
    (_, batches), (plain, _) = make_stream(), run_unguarded()
    adapter, alarm = make_collapsing(fallback)
    for number in range(alarm):
        assert same(adapter.predict(batches[number]), plain[number])
    found = adapter.predict(batches[alarm])
    assert found.rolled_back.all()
    assert found.alarmed.all()
    assert torch.equal(found.logits, plain[alarm].logits_before)
    assert adapter.rolled_back == len(batches[alarm])


def test_fall_back_to_what_was_before_the_update() -> None:
    adapter, alarm = make_collapsing("undo")
    for batch in make_stream()[1][: alarm + 1]:
        adapter.predict(batch)
    assert torch.equal(get_weights(adapter.network()), get_weights(run_unguarded()[1][alarm - 1]))


def test_fall_back_to_the_source() -> None:
    batches = make_stream()[1]
    adapter, alarm = make_collapsing("source")
    fresh, _ = make_collapsing("source")
    for batch in batches[: alarm + 1]:
        adapter.predict(batch)
    for batch in batches[:3]:  # as if nothing had been, its averages included
        assert same(adapter.predict(batch), fresh.predict(batch))


def test_fall_back_to_the_shadow() -> None:
    (net, batches), (_, networks) = make_stream(), run_unguarded()
    adapter, alarm = make_collapsing("shadow", shadow=0.8)
    for batch in batches[: alarm + 1]:
        adapter.predict(batch)
    shadow = get_weights(net)
    for one in networks[:alarm]:
        shadow = 0.8 * shadow + 0.2 * get_weights(one)
    torch.testing.assert_close(get_weights(adapter.network()), shadow, **CLOSE)
    assert (shadow - get_weights(net)).abs().max() > 1e-3
    # The optimizer starts again: the next step is the first one from there.
    other = Online(adapter.network(), guard=math.inf, **TENT)
    torch.testing.assert_close(adapter.predict(batches[0]).logits, other.predict(batches[0]).logits, **CLOSE)


def test_a_frozen_stream_is_the_source_until_it_is_reset() -> None:
    (net, batches), (plain, _) = make_stream(), run_unguarded()
    adapter, alarm = make_collapsing("freeze")
    for batch in batches[: alarm + 1]:
        adapter.predict(batch)
    for batch in batches:
        found = adapter.predict(batch)
        torch.testing.assert_close(found.logits, Fixed(net).predict(batch).logits, **CLOSE)
        assert not (found.adapted | found.rolled_back).any()
    adapter.reset()
    assert same(adapter.predict(batches[0]), plain[0])


def test_a_stream_of_one_class_is_no_collapse() -> None:
    """The original network answers the same there."""
    net, image = sharpen(network("group")), make_stream()[1][0][:1]
    adapter = Online(net, guard=Guard(**OFF | {"collapse": 0.9}, momentum=0.5), **TENT | {"lr": 1e-4})
    for _ in range(20):
        assert adapter.predict(image).adapted.all()
    classes = adapter.state_dict()["learner/guard/classes"]
    assert float(torch.special.entr(classes).sum()) < 0.5 * math.log(10)


def test_weights_that_go_too_far() -> None:
    (net, batches), (_, networks) = make_stream(), run_unguarded()
    norms = Online(net, **TENT)
    norms.predict(batches[0])
    names = [name for name in norms.state_dict() if name.startswith(("learner/encoder", "learner/classifier"))]
    names = [name.removeprefix("learner/") for name in names]

    def get_norms(one: YNet) -> Tensor:
        return torch.cat([one.get_parameter(name).detach().flatten() for name in names])

    source = get_norms(net)
    distances = [float((get_norms(one) - source).norm() / source.norm()) for one in networks]
    limit = (distances[3] + distances[4]) / 2
    first = next(number for number, distance in enumerate(distances) if distance > limit)
    adapter = Online(net, guard=Guard(**OFF | {"distance": limit}), **TENT)
    found = [adapter.predict(batch).rolled_back.any() for batch in batches[: first + 1]]
    assert found == [False] * first + [True]
    torch.testing.assert_close(adapter(batches[0]), run_unguarded()[0][0].logits, **CLOSE)  # from the source again


def test_a_long_update_is_undone_and_lengths_follow_a_lasting_change() -> None:
    class Bright(Entropy):
        def loss(self, images: Tensor, draws: Draws) -> Tensor:
            return super().loss(images, draws) * torch.where(images.mean((2, 3, 4)) > 0.7, 20.0, 1.0)

    net, images = network("group"), pictures(60)
    given: dict[str, Any] = {"method": Method("bright", "", "", Bright), "lr": 0.001, "update": "encoder"}
    adapter = Online(net, guard=Guard(**OFF | {"burst": 2.0}, momentum=0.9), **given)
    number, mean, variance, undone = 0, 0.0, 0.0, []
    for sample in range(60):
        image, numbers = images[sample][None], torch.tensor([sample])
        if sample >= 40:
            image = 0.5 + image / 2
        twin = Online(adapter.network(), guard=math.inf, **given)
        before = get_weights(twin.network())
        twin.predict(image, numbers)
        length = math.log(float((get_weights(twin.network()) - before).norm()))
        most = mean + 2 * max(0.25, math.sqrt(variance)) if number >= 32 else math.inf
        found = adapter.predict(image, numbers)
        assert bool(found.rolled_back) == (length > most), sample
        assert not found.alarmed
        undone.append(length > most)
        difference, rate = min(length, most) - mean, max(1 / (number + 1), 0.1)
        number, mean = number + 1, mean + rate * difference
        variance = (1 - rate) * (variance + rate * difference**2)
        state = adapter.state_dict()["learner/guard/lengths"][0]
        torch.testing.assert_close(state, torch.tensor([number, mean, variance]), rtol=1e-3, atol=1e-3)
    assert not any(undone[:32])
    assert any(undone[40:])
    assert not undone[-1]


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_saved_restored_and_in_streams(fallback: Any, tmp_path: Path) -> None:
    net = network("group")
    guard = Guard(collapse=0.97, burst=1.5, distance=0.07, fallback=fallback, momentum=0.8, shadow=0.7)
    given: dict[str, Any] = {"method": "tent", "lr": 0.02, "guard": guard, "share": "image"}
    streams, other = (Streams(net, COUNT, together=2, **given) for _ in range(2))
    alone = [Online(net, **given) for _ in range(COUNT)]
    undone = torch.zeros((), dtype=torch.int64)
    for call in range(12):
        images = 0.7 * pictures(seed=call) + 0.3 * (torch.arange(COUNT) % 2).view(-1, 1, 1, 1)
        found = streams.predict(images)
        expected = Prediction.join([one.predict(images[row : row + 1]) for row, one in enumerate(alone)])
        torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
        assert torch.equal(found.rolled_back, expected.rolled_back)
        undone += found.rolled_back.sum()
        if call == 5:
            streams.save(tmp_path / "state")
            other.load(tmp_path / "state")
            twin = copy.deepcopy(streams)
        if call > 5:
            assert same(other.predict(images), found)
            assert same(twin.predict(images), found)
    assert 0 < int(undone) < 36
    before = streams.state_dict()
    assert streams.predict(torch.full_like(images, NAN)).adapted.sum() == 0
    after = streams.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("learner/"))
    streams.reset()
    streams.predict(pictures())
    assert torch.equal(streams.state_dict()["numbers"], torch.ones(COUNT, dtype=torch.int64))


def test_a_number_is_a_guard_of_single_updates() -> None:
    net, images = network("group"), pictures()
    number, record = Online(net, guard=2.5), Online(net, guard=Guard.of(2.5))
    assert same(number.predict(images), record.predict(images))
    assert number.describe()["guard"] == 2.5
    assert not [name for name in number.state_dict() if "guard" in name]
    assert Online(net).settings.guard == 3.0
    assert Online(net, guard=Guard()).describe()["guard"] == Guard().describe()


def test_a_guard_in_a_study() -> None:
    spec = MethodSpec("x", "online", settings={"guard": {"collapse": 0.4, "fallback": "freeze"}})
    assert spec.make(network("group"), 0).settings.guard == Guard(collapse=0.4, fallback="freeze")
    for bad in ({"collapse": "much"}, {"collapse": 2.0}, {"unknown": 1.0}, "high"):
        with pytest.raises(ValueError, match="x: "):
            MethodSpec("x", "online", settings={"guard": bad})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rise": 0.0}, "`rise` must be positive"),
        ({"collapse": 1.0}, r"`collapse` must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, "`momentum` must be in"),
        ({"shadow": NAN}, "`shadow` must be in"),
        ({"burst": -1.0}, "`burst` must be at least 0"),
        ({"distance": math.inf}, "`distance` must be at least 0"),
        ({"fallback": "hope"}, "`fallback` must be one of undo, shadow, source, freeze, got 'hope'"),
    ],
)
def test_values_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Guard(**given)

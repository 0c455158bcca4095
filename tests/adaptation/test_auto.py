"""Auto: against the three modes by hand, its decisions by numbers, and its contract."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import NAN, close, network, pictures, same
from testtime import Auto, Calibration, Episodic, Fixed, Online, Prediction, YNet, collect
from testtime.data import TensorSet

GIVEN: dict[str, Any] = {"lr": 0.01, "copies": 4, "seed": 3}


def make_network() -> YNet:
    return collect(network("group"), pictures(30))


@pytest.mark.parametrize("batch", [1, 4, 12])
def test_every_image_is_predicted_in_its_mode(batch: int) -> None:
    net, images = make_network(), pictures(12, seed=5)
    reference = net.statistics.about["task"]["plain"] / 10  # type: ignore[union-attr]
    drifts = (Fixed(net).predict(images).loss_before / reference).tolist()
    limits = 8.0, sum(drifts[:6]) / 6
    average, modes = 1.0, []
    for drift in drifts:
        average = 0.7 * average + 0.3 * drift
        modes.append("online" if average >= limits[0] else "episodic" if drift >= limits[1] else "fixed")
    calibration = Calibration(*limits, momentum=0.7)
    assert set(modes) == {"fixed", "episodic", "online"}
    by_hand = {"fixed": Fixed(net), "episodic": Episodic(net, **GIVEN), "online": Online(net, **GIVEN)}
    numbers = torch.arange(12)
    expected = [by_hand[mode].predict(images[n : n + 1], numbers[n : n + 1]) for n, mode in enumerate(modes)]
    adapter = Auto(net, calibration=calibration, reference=reference, **GIVEN)
    found = Prediction.join([adapter.predict(part) for part in images.split(batch)])
    assert close(found, Prediction.join(expected))
    assert adapter.drift == pytest.approx(average)
    assert found.adapted.tolist() == [mode != "fixed" for mode in modes]


@pytest.mark.parametrize("method", ["mirrored", "best"])
def test_other_methods(method: str) -> None:
    net, images, given = make_network(), pictures(6), GIVEN | {"method": method}
    never = Auto(net, calibration=Calibration(None, None), **given)
    assert close(never.predict(images), Fixed(net, mirrored=True).predict(images))
    always = Auto(net, calibration=Calibration(online=0.0), **given)
    assert close(always.predict(images), Online(net, **given).predict(images))
    episodes = Auto(net, calibration=Calibration(None, 0.0), **given)
    assert close(episodes.predict(images), Episodic(net, **given).predict(images))


def test_never_and_always() -> None:
    net, images = make_network(), pictures(6)
    assert close(Auto(net, calibration=Calibration(None, None)).predict(images), Fixed(net).predict(images))
    always = Auto(net, calibration=Calibration(online=0.0), **GIVEN)
    assert close(always.predict(images), Online(net, **GIVEN).predict(images))
    episodes = Auto(net, calibration=Calibration(None, 0.0), **GIVEN)
    assert close(episodes.predict(images), Episodic(net, **GIVEN).predict(images))


def test_saved_reset_and_put_back(tmp_path: Path) -> None:
    net = make_network()
    calibration = Calibration(online=1.0, episodic=1.0, momentum=0.8)
    adapter, other = (Auto(net, calibration=calibration, **GIVEN) for _ in range(2))
    first = adapter.predict(pictures(8))
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    twin = copy.deepcopy(adapter)
    images = pictures(8, seed=1)
    before = adapter.state_dict()
    assert not adapter.predict(torch.full_like(images, NAN), torch.arange(8)).adapted.any()
    after = adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "counts")
    expected = adapter.predict(images, torch.arange(8))
    assert same(other.predict(images, torch.arange(8)), expected)
    assert same(twin.predict(images, torch.arange(8)), expected)
    assert other.estimate_accuracy() == adapter.estimate_accuracy()
    adapter.reset()
    assert adapter.estimate_accuracy() is None
    assert same(adapter.predict(pictures(8)), first)
    state = adapter.state_dict()
    for bad in (state["score"].float(), state["score"][:2], -state["score"]):
        with pytest.raises(ValueError, match="'score' are not"):
            other.load_state_dict(state | {"score": bad})
    with pytest.raises(ValueError, match="another settings"):
        Auto(net, **GIVEN).load_state_dict(state)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_estimate_is_a_line_with_an_interval(labelled: bool) -> None:
    net, images, others = make_network(), pictures(50), (pictures(40, seed=1) * 255).byte()
    if labelled:
        labels = net(others).argmax(1) * (torch.arange(40) < 30)
        collect(net, images, unseen=TensorSet("others", others, labels))
    adapter = Auto(net, calibration=Calibration(None, None, slope=0.5, spread=0.1))
    probability = adapter.predict(images).logits.softmax(1).amax(1)
    found = adapter.estimate_accuracy()
    assert found is not None
    if labelled:
        known = net.statistics.about["unseen"]  # type: ignore[union-attr]
        usual = known["accuracy"]
        assert 0.75 <= usual < 1
        sure = (probability > known["confidence"]).double().mean()
        assert 0 < sure < 1
    else:
        usual, sure = 1.0, probability.mean()
    value = usual + 0.5 * (float(sure) - usual)
    half = 2 * math.sqrt(0.01 + value * (1 - value) / 50)
    assert found == pytest.approx((value, max(0, value - half), min(1, value + half)), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "tent"}, "must need a self-supervised branch"),
        ({"share": "batch"}, "no batch to `share`"),
        ({"measure_loss": False}, "`measure_loss` must be true"),
        ({"reference": 0.0}, "got 0.0: pass `reference`"),
    ],
)
def test_what_cannot_be_followed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(make_network(), **given)
    with pytest.raises(ValueError, match=r"tt\.collect"):
        Auto(network("group"))
    for bad in ({"momentum": 1.0}, {"spread": -1.0}, {"online": "high"}, {"slope": None}):
        with pytest.raises(ValueError, match="must"):
            Calibration(**bad)  # type: ignore[arg-type]


def test_the_calibration_travels_in_the_card() -> None:
    net = make_network()
    assert Auto(net).calibration == Calibration()
    net.describe(settings={"auto": {"online": 1.5, "momentum": 0.5}})
    assert Auto(net).calibration == Calibration(online=1.5, momentum=0.5)
    assert Auto(net, calibration=Calibration()).calibration == Calibration()
    net.describe(settings={"auto": {"offline": 1.5}})
    with pytest.raises(ValueError, match=r"card has a calibration that is not valid: .*offline"):
        Auto(net)

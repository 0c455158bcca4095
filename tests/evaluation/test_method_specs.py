"""Methods as configured in a run: their cost in forward passes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

import testtime as tt
from testtime.evaluation.method_specs import MethodSpec, find_spec
from testtime.networks.card import Card

ALL = {"name": "rotation", "each": "all"}


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("fixed", {}, 4),  # a view of each rotation
        ("online", {}, 2 * 4 + 3 * 32),  # before and after; 32 copies, three passes each
        ("online", {"task": ALL}, 2 * 4 + 3 * 32 * 4),
        ("online", {"steps": 2, "copies": 5}, 2 * 4 + 3 * 2 * 5),
        ("online", {"threshold": "50%"}, 2 * 4 + 3 * 16),
        ("episodic", {}, 2 * 4 + 3 * 10 * 32),
    ],
)
def test_cost_counts_forward_passes(mode: Any, settings: dict[str, Any], expected: int) -> None:
    assert MethodSpec("one", mode, settings=settings).cost == expected


@pytest.mark.parametrize(
    ("method", "mode", "expected"),
    [
        ("tent", "online", 2 + 3),  # the image itself
        ("norm", "online", 2),
        ("memo", "episodic", 2 + 3 * 32),
        ("best", "online", 2 * 4 + 3 * 2 * 32),  # as many from its memory
    ],
)
def test_cost_depends_on_what_a_method_learns_from(method: str, mode: Any, expected: int) -> None:
    assert MethodSpec("one", mode, method=method).cost == expected


def test_cost_without_a_task_is_that_of_the_default_of_a_card() -> None:
    given = MethodSpec("one", "online", settings={"task": Card().task})
    assert MethodSpec("one", "online").cost == given.cost


def test_a_calibration_makes_an_online_method_decide() -> None:
    net = tt.collect(tt.load("digits-resnet8-gn-joint"), tt.data.open("digits", split="train").images(range(50)))
    auto = find_spec("auto")
    assert auto is not None
    assert auto.make(net, 0).describe()["calibration"] == asdict(tt.Calibration())
    settings = {"calibration": {"online": 1.5, "episodic": "never"}, "lr": 0.01}
    adapter = MethodSpec("own", "online", settings=settings).make(net, 0)
    assert isinstance(adapter, tt.Auto)
    assert adapter.calibration == tt.Calibration(online=1.5, episodic=None)
    assert adapter.settings.lr == 0.01


def test_a_method_that_decides_can_observe_only() -> None:
    net, images = tt.load("digits-resnet8-gn-joint"), tt.data.open("digits").images(range(4))
    spec = MethodSpec("own", "online", settings={"calibration": {"online": 1.5}, "threshold": "20%"})
    found = spec.observe_only(net).predict(images)
    assert found.confidence.equal(tt.Fixed(net).predict(images).confidence)
    assert not found.adapted.any()


@pytest.mark.parametrize(
    ("mode", "calibration", "message"),
    [
        ("episodic", {}, "`calibration` is for online methods"),
        ("online", {"offline": 1.0}, "offline"),
        ("online", {"online": "always"}, "online"),
        ("online", {"momentum": 2.0}, "momentum"),
        ("online", {"momentum": "never"}, "momentum"),
    ],
)
def test_calibrations_are_checked(mode: Any, calibration: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"own: .*{message}"):
        MethodSpec("own", mode, settings={"calibration": calibration})

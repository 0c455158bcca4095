"""Settings and methods by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from adapters import COUNT, NAN, network, pictures, same
from testtime import (
    Episodic,
    Online,
    Rotation,
    Settings,
)
from testtime.adaptation.methods import METHODS
from testtime.adaptation.streams import Streams


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": -1}, "`steps` must be at least 0, got -1"),
        ({"copies": 0}, "`copies` must be at least 1, got 0"),
        ({"lr": 0.0}, "`lr` must be positive, got 0.0"),
        ({"lr": NAN}, "`lr` must be positive, got nan"),
        ({"threshold": 1.5}, r"`threshold` must be in \[0, 1\], got 1.5"),
        ({"threshold": 0.5, "measure_loss": False}, "`threshold` must be 1 if `measure_loss` is false, got 0.5"),
        ({"guard": 0.0}, "`guard` must be positive"),
        ({"guard": "source"}, "`guard` must be positive.*, or a Guard, got 'source'"),
        ({"task": "rotation"}, r"`task` must be a Task such as tt.Rotation\(\), got 'rotation'"),
        ({"task": Rotation}, "`task` must be a Task .*, got <class"),
        ({"optimizer": "sgd"}, "`optimizer` must be a torch.optim class .*, got 'sgd'"),
        ({"augment": "crop-flip"}, r"`augment` must be .*tt.CropFlip\(\), got 'crop-flip'"),
        ({"update": "head"}, "`update` must be one of .*, got 'head'"),
        ({"share": "world"}, "`share` must be one of image, batch, got 'world'"),
        ({"precision": "fp8"}, "`precision` must be one of fp32, tf32, bf16, got 'fp8'"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    for kind in (Episodic, Online):
        with pytest.raises(ValueError, match=said):
            kind(network(), **wrong)


def test_help_lists_every_setting_with_its_default() -> None:
    for kind, steps in ((Online, 1), (Streams, 1), (Episodic, 10)):
        parameters = inspect.signature(kind).parameters
        assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for field in fields(Settings):
            default = {"steps": steps, "constants": {}}.get(field.name, field.default)
            assert parameters[field.name].default == default
            assert f"\n    {field.name}: " in (kind.__doc__ or "")
    assert (Episodic(network()).settings.steps, Online(network()).settings.steps) == (10, 1)


def test_wrong_networks_and_counts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`net` must be a YNet, got Linear; testtime.split"):
        Online(nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`parallel` must be .*at least 1, got 0"):
        Episodic(network(), parallel=0)
    with pytest.raises(ValueError, match="`count` must be at least 1, got 0"):
        Streams(network(), 0)


# What the paper's online version does, and its authors' program where the paper does not say.
PAPER: dict[str, Any] = {"steps": 1, "lr": 0.001, "copies": 32, "threshold": 1.0, "update": "encoder+ssl"}
PAPER |= {"optimizer": torch.optim.SGD, "share": "image", "mirrored": False}


@pytest.mark.parametrize("method", ["ttt", "mirrored"])
@pytest.mark.parametrize("kind", [Online, functools.partial(Streams, count=COUNT)])
def test_a_method_is_its_settings_bit_for_bit(kind: Callable[..., Any], method: str) -> None:
    net = network()
    given = PAPER | dict(METHODS[method].settings)
    named, written = kind(net, method=method), kind(net, **given)
    for seed in (0, 1):
        assert same(named.predict(pictures(seed=seed)), written.predict(pictures(seed=seed)))
    resumed = kind(net, method=method)
    resumed.load_state_dict(written.state_dict())
    assert same(named.predict(pictures(seed=2)), resumed.predict(pictures(seed=2)))


def test_the_papers_method_is_the_default() -> None:
    net = network()
    paper, best, usual = Online(net, method="ttt"), Online(net, method="best"), Online(net)
    assert usual.settings == paper.settings != best.settings
    with pytest.raises(ValueError, match="another settings"):
        paper.load_state_dict(best.state_dict())


@pytest.mark.parametrize("kind", [Online, Episodic, functools.partial(Streams, count=COUNT)])
def test_best_and_rehearsal_are_one_method(kind: Callable[..., Any]) -> None:
    net = network()
    best, named = (kind(net, method=name, copies=2) for name in ("best", "rehearsal"))
    assert replace(best.method, name="rehearsal") == named.method == METHODS["rehearsal"]
    assert best.describe() == named.describe() == {"method": "rehearsal"} | best.settings.describe()
    assert same(best.predict(pictures()), named.predict(pictures()))
    resumed = [kind(net, method=name, copies=2) for name in ("rehearsal", "best")]
    for one, other in zip((best, named), resumed, strict=True):
        other.load_state_dict(one.state_dict())
    expected = best.predict(pictures(seed=1))
    assert all(same(one.predict(pictures(seed=1)), expected) for one in (named, *resumed))
    without = kind(net, method="best", constants={"memory": 0})
    assert [one.holds_images for one in (best, named, without)] == [True, True, False]


@pytest.mark.parametrize("kind", [Online, Episodic, functools.partial(Streams, count=COUNT)])
def test_a_state_of_best_of_version_0_1_is_that_of_mirrored(kind: Callable[..., Any]) -> None:
    """There `best` had the settings of `mirrored`, and its states no name."""
    net = network()
    old = kind(net, mirrored=True, copies=2)
    assert "method" not in old.describe()
    old.predict(pictures())
    state = old.state_dict()
    mirrored, best = (kind(net, method=name, copies=2) for name in ("mirrored", "best"))
    alike = kind(net, method="best", copies=2, update="encoder+ssl", lr=0.001)  # all settings, but not the method
    for one in (best, alike):
        with pytest.raises(ValueError, match="another settings"):
            one.load_state_dict(state)
        assert one.seen == 0
    with pytest.raises(ValueError, match="another settings"):
        mirrored.load_state_dict(best.state_dict())
    mirrored.load_state_dict(state)
    assert same(mirrored.predict(pictures(seed=1)), old.predict(pictures(seed=1)))


@pytest.mark.parametrize("kind", [Online, Episodic, functools.partial(Streams, count=COUNT)])
def test_settings_override_the_methods(kind: Callable[..., Any]) -> None:
    changed, net = PAPER | {"steps": 3, "copies": 64}, network()
    assert kind(net, method="best", **changed).settings == kind(net, **changed).settings
    best = kind(net, method="best").settings
    assert kind(net, method="best", steps=3).settings == replace(best, steps=3) != best


@pytest.mark.parametrize("wrong", ["fastest", None, ["best"]])
@pytest.mark.parametrize("kind", [Online, Episodic, functools.partial(Streams, count=COUNT)])
def test_an_unknown_method_is_refused(kind: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"`method` must be one of .*{re.escape(repr(wrong))}"):
        kind(network(), method=wrong)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("stepps", "did you mean `steps`"), ("presett", "did you mean `method`"), ("qqq", "the settings are steps, lr,")],
)
@pytest.mark.parametrize("kind", [Online, Episodic])
def test_a_misspelt_setting_is_named_with_the_closest(kind: Any, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is not a setting.*{hint}"):
        kind(network(), **{name: 1})

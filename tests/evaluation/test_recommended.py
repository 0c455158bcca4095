"""The settings that a card recommends are used by commands, and only where nothing else was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import testtime as tt
from testtime.evaluation import make_plan
from testtime.evaluation.recommended import find_recommended, format_settings, make_recommended

SETTINGS: dict[str, dict[str, Any]] = {"ttt": {"lr": 0.1, "copies": 2}, "online": {"lr": 0.2}, "tent": {"steps": 3}}


def test_a_mode_overrides_its_method() -> None:
    assert find_recommended(SETTINGS, "ttt", "online") == {"lr": 0.2, "copies": 2}
    assert find_recommended(SETTINGS, "ttt", "episodic") == {"lr": 0.1, "copies": 2}
    assert find_recommended(SETTINGS, "tent", "online") == {"steps": 3}
    assert find_recommended(SETTINGS, "cotta", "online") == {}
    assert find_recommended(SETTINGS, "ttt", "fixed") == {}


def test_best_has_those_of_its_method() -> None:
    card = {"best": {"lr": 0.1, "copies": 2}, "rehearsal": {"lr": 0.2}, "mirrored": {"lr": 0.3}}
    for name in ("best", "rehearsal"):
        assert find_recommended(card, name, "online") == {"lr": 0.2, "copies": 2}
        settings = make_recommended(tt.METHODS[name], card).make_settings("online", {})
        assert (settings.lr, settings.copies) == (0.2, 2)
    assert find_recommended(card, "mirrored", "online") == {"lr": 0.3}


def test_a_method_has_those_of_each_mode() -> None:
    card = SETTINGS | {"online": {"lr": 0.2, "task": {"name": "rotation", "each": "all"}}}
    ttt = make_recommended(tt.METHODS["ttt"], card)
    online, alone = ttt.make_settings("online", {}), ttt.make_settings("episodic", {})
    assert (online.lr, online.copies, online.steps) == (0.2, 2, 1)
    assert online.task is not None
    assert (alone.lr, alone.copies, alone.steps, alone.task) == (0.1, 2, 10, None)
    assert make_recommended(tt.METHODS["tent"], card).make_settings("online", {}).steps == 3
    assert make_recommended(tt.METHODS["cotta"], card) == tt.METHODS["cotta"]
    with pytest.raises(ValueError, match="speed"):
        make_recommended(tt.METHODS["ttt"], {"online": {"speed": 1}})


@pytest.fixture
def file(tmp_path: Path) -> str:
    net = tt.resnet26(depth=8, channels=1, size=16)
    net.describe(settings=SETTINGS)
    net.save(tmp_path / "net.safetensors")
    return str(tmp_path / "net.safetensors")


def settings_of(plan: Any) -> dict[str, dict[str, Any]]:
    return {method.name: dict(method.settings) for method in plan.methods}


def test_a_plan_takes_them_if_asked_and_options_override_them(file: str) -> None:
    given: dict[str, Any] = {"checkpoint": file, "data": ["digits"], "methods": "fixed,episodic,online,tent"}
    assert not any(settings_of(make_plan(**given)).values())
    found = settings_of(make_plan(**given, recommended=True, lr=["online=0.5"], copies=["4"]))
    assert found == {
        "fixed": {},
        "episodic": {"lr": 0.1, "copies": 4},
        "online": {"lr": 0.5, "copies": 4},
        "tent": {"steps": 3, "copies": 4},
    }


def test_a_study_says_itself_what_it_runs(file: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('data = "digits"\n[methods.online]\nmode = "online"\n')
    assert settings_of(make_plan(tmp_path / "study.toml", checkpoint=file, recommended=True)) == {"online": {}}


def test_settings_that_do_not_exist_are_faults_of_the_file(file: str) -> None:
    net = tt.load(file)
    net.describe(settings={"online": {"speed": 1}})
    net.save(file)
    with pytest.raises(tt.CheckpointError, match="speed"):
        make_plan(checkpoint=file, data=["digits"], recommended=True)


def test_settings_are_printed_as_words() -> None:
    settings = {"lr": 0.02, "task": {"name": "rotation", "each": "all"}, "augment": {"name": "crop-flip"}}
    assert format_settings(settings) == "lr 0.02, task rotation (each all), augment crop-flip"


def test_the_bundled_digits_network_recommends_the_settings_of_the_demo() -> None:
    from testtime.demo import METHODS

    recommended = tt.load("digits-resnet8-gn-joint").card.settings
    assert recommended == {method.name: dict(method.settings) for method in METHODS if method.settings}


def test_an_adapter_can_use_what_the_card_recommends() -> None:
    net = tt.load("digits-resnet8-gn-joint")
    adapter = tt.Online(net, **tt.recommend(net))
    assert (adapter.settings.steps, adapter.settings.lr, adapter.settings.copies) == (2, 0.02, 1)
    assert adapter.settings.task == tt.Rotation("all")
    assert adapter.settings.augment == tt.CropFlip(padding=0, flip=False)
    assert tt.recommend(net, "episodic")["lr"] == 0.01
    assert tt.recommend(net, method="tent") == {}
    with pytest.raises(ValueError, match="`mode` must be one of"):
        tt.recommend(net, "always")  # type: ignore[arg-type]

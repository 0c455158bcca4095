"""Choosing settings: only on held-out images that the network was not trained on, by the rule that is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testtime import resnet26
from testtime.corruptions import CORRUPTIONS, EXTRA
from testtime.data.held_out import find_source
from testtime.evaluation import MethodSpec, Plan, SetSpec, make_plan, open_run, run_plan, studies
from testtime.evaluation.tune import choose, format_choice, make_grid, make_tuning_plan, write_choice
from testtime.evaluation.units import Run, Unit
from testtime.networks.card import CheckpointError

HELD_OUT = ["digits-held-out", *(f"digits-held-out-c/{name}/5" for name in EXTRA)]


def save_network(file: Path, data: dict[str, Any] | None, seed: int = 0) -> str:
    """Save a small untrained network whose record names its training data."""
    net = resnet26(depth=8, channels=1, size=8, seed=seed)
    net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
    net.describe(record={} if data is None else {"configuration": {"data": data}})
    net.save(file)
    return str(file)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("network") / "net.safetensors"
    return save_network(file, {"name": "digits[:-300]", "held_out": 300})


def names(plan: Plan) -> list[str]:
    return [one.name for one in plan.sets]


# ---------------------------------------------------------------------------------------------------------------------
# Sets
# ---------------------------------------------------------------------------------------------------------------------


def test_held_out_sets_come_with_their_original() -> None:
    assert names(make_plan(checkpoint="x", data=["digits-held-out-c"], levels="5")) == HELD_OUT
    one = make_plan(checkpoint="x", data=["digits-held-out-c"], levels="1,5", corruptions="spatter", original=False)
    assert names(one) == ["digits-held-out-c/spatter/1", "digits-held-out-c/spatter/5"]


def test_extra_corruptions_can_be_named_and_all_are_the_fifteen() -> None:
    plan = make_plan(checkpoint="x", data=["cifar10-c"], levels="3", corruptions="spatter,fog")
    assert names(plan) == ["cifar10", "cifar10-c/fog/3", "cifar10-c/spatter/3"]
    for corruptions in ("all", None):
        plan = make_plan(checkpoint="x", data=["cifar10-c"], levels="5", corruptions=corruptions)
        assert names(plan) == ["cifar10", *(f"cifar10-c/{name}/5" for name in CORRUPTIONS)]


def test_a_test_corruption_of_held_out_images_is_not_left_out_but_refused(network: str, tmp_path: Path) -> None:
    plan = make_plan(checkpoint=network, data=["digits-held-out-c"], levels="5", corruptions="fog", methods="fixed")
    with pytest.raises(ValueError, match="got 'fog'"):
        run_plan(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", ["digits", "digits-c/fog/5", "digits-c/spatter/5", "cifar10.1", "cifar10-gradual"])
def test_selection_refuses_test_sets(data: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('selection = true\ndata = ["digits-held-out"]\n[methods.a]\nmode = "fixed"\n')
    for study in ("selection", "digits-selection", tmp_path / "mine.toml"):
        assert {find_source(name) for name in names(make_plan(study, checkpoint="x"))} <= {"digits", "cifar10"}
        with pytest.raises(ValueError, match=f"{data}.* is not held out"):
            make_plan(study, checkpoint="x", data=["cifar10-held-out", data])
    with pytest.raises(ValueError, match="is not held out"):
        make_tuning_plan("x", make_grid("ttt", None, {"lr": "1"}), data=[data])


def test_selection_refuses_folders(tmp_path: Path) -> None:
    (tmp_path / "digits-held-out").mkdir()
    with pytest.raises(ValueError, match="is not held out"):
        make_plan("selection", checkpoint="x", data=[str(tmp_path / "digits-held-out")])
    with pytest.raises(ValueError, match="is not held out"):
        Plan({"joint": "x"}, (SetSpec("digits-held-out", "x"),), (MethodSpec("a", "fixed"),), selection=True)


def test_the_selection_studies() -> None:
    assert {"selection", "digits-selection"} <= set(studies())
    for study, source in (("selection", "cifar10"), ("digits-selection", "digits")):
        plan = make_plan(study, checkpoint="x")
        assert plan.selection
        assert names(plan) == [name.replace("digits", source, 1) for name in HELD_OUT]
        assert Plan.from_json(plan.to_json()) == plan


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [{"name": "digits"}, {"name": "digits[:-299]", "held_out": 299}])
def test_a_network_that_saw_the_images_is_refused(data: dict[str, Any], network: str, tmp_path: Path) -> None:
    seen = save_network(tmp_path / "seen.safetensors", data)
    for sets in (["digits-held-out"], ["digits", "digits-held-out-c/spatter/5"]):
        plan = make_plan(checkpoint=network, networks={"other": seen}, data=sets, methods="fixed,other")
        with pytest.raises(CheckpointError, match=r"seen\.safetensors: was trained on.*--hold-out 300"):
            run_plan(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    plan = make_plan(checkpoint=seen, data=["digits"], methods="fixed", limit=2)
    assert len(run_plan(plan, tmp_path / "run").units) == 1


def test_each_sets_own_network_is_checked(tmp_path: Path) -> None:
    save_network(tmp_path / "0.safetensors", {"name": "digits"})
    save_network(tmp_path / "5.safetensors", {"name": "digits"})
    pattern = str(tmp_path / "{level}.safetensors")
    plan = make_plan(networks={"own": pattern}, data=["digits", "digits-held-out-c/spatter/5"])
    with pytest.raises(CheckpointError, match=r"5\.safetensors: was trained on"):
        run_plan(plan, tmp_path / "run")


@pytest.mark.parametrize("name", ["cifar10-resnet26-gn-joint", "digits-resnet8-gn-joint"])
def test_bundled_networks_saw_everything(name: str, tmp_path: Path) -> None:
    plan = make_plan(checkpoint=name, data=[f"{name.split('-')[0]}-held-out"], methods="fixed")
    with pytest.raises(CheckpointError, match="was trained on"):
        run_plan(plan, tmp_path / "run")


@pytest.mark.parametrize("data", [None, {"name": "folder/scans"}, {"count": 9}])
def test_without_a_record_of_these_images_nothing_is_claimed(data: dict[str, Any] | None, tmp_path: Path) -> None:
    file = save_network(tmp_path / "net.safetensors", data)
    plan = make_plan(checkpoint=file, data=["digits-held-out"], methods="fixed", limit=3)
    assert [unit.set_name for unit in run_plan(plan, tmp_path / "run").units] == ["digits-held-out"]


# ---------------------------------------------------------------------------------------------------------------------
# Tuning
# ---------------------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_order() -> None:
    grid = make_grid("ttt", None, {"lr": "0.001, 1e-2", "steps": None, "copies": "2,4", "update": "norm"})
    assert [(spec.name, dict(spec.settings)) for spec in grid] == [
        (f"lr={lr} copies={copies} update=norm", {"lr": lr, "copies": copies, "update": "norm"})
        for lr in (0.001, 0.01)
        for copies in (2, 4)
    ]
    assert {(spec.method, spec.mode) for spec in grid} == {("ttt", "online")}
    (third, fourth) = make_grid("rehearsal", None, {"weight": "0.5,1", "memory": "0"})
    assert (third.name, fourth.name) == ("weight=0.5 memory=0", "weight=1 memory=0")
    assert third.settings == {"constants": {"weight": 0.5, "memory": 0}}
    (other,) = make_grid("tent", "episodic", {"steps": "3"}, precision="bf16")
    assert (other.name, other.method, other.mode) == ("steps=3", "tent", "episodic")
    assert other.settings == {"steps": 3, "precision": "bf16"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ttt", None, {}), "got 0"),
        (("ttt", None, {"lr": None}), "got 0"),
        (("ttt", None, {"lr": ""}), "got 0"),
        (("ttt", None, {"lr": ",".join(map(str, range(1, 40))), "steps": ",".join(map(str, range(40)))}), "got 1,560"),
        (("ttt", None, {"lr": "x"}), "--lr must be a number"),
        (("ttt", None, {"lr": "nan"}), "--lr must be a number"),
        (("ttt", None, {"lr": "-1"}), "`lr` must be positive"),
        (("ttt", None, {"steps": "1.5"}), "--steps must be a number"),
        (("ttt", None, {"update": "head"}), "`update` must be one of"),
        (("ttt", "fixed", {"lr": "1"}), "none of the methods learns"),
        (("magic", None, {"lr": "1"}), "`method` must be one of"),
    ],
)
def test_bad_grids_are_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_grid(*arguments)


def test_equal_settings_are_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"lr=0\.001 twice"):
        make_tuning_plan(network, make_grid("ttt", None, {"lr": "0.001,1e-3"}))


def test_batches_are_as_large_as_asked_for(network: str, tmp_path: Path) -> None:
    def learn(batch: int | None) -> Run:
        grid = make_grid("tent", None, {"lr": "0.1"}, statistics="source")
        plan = make_tuning_plan(network, grid, data=["digits-held-out"], limit=6, batch=batch)
        run = run_plan(plan, tmp_path / f"run-{batch}")
        assert choose(plan, run)["batch"] == batch
        return run

    losses = [learn(batch).units[-1].columns()["loss_after"].tolist() for batch in (None, 6, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_the_sets_are_those_of_the_networks_training_data(network: str, tmp_path: Path) -> None:
    plan = make_tuning_plan(network, make_grid("ttt", None, {"lr": "1"}), seeds=[2], limit=9)
    assert names(plan) == HELD_OUT
    assert (plan.seeds, plan.limit, plan.shuffle, plan.selection) == ((2,), 9, True, True)
    assert [method.name for method in plan.methods] == ["fixed", "lr=1.0"]
    for data in (None, {"name": "imagenet"}):
        other = save_network(tmp_path / "other.safetensors", data)
        with pytest.raises(ValueError, match="pass --data"):
            make_tuning_plan(other, make_grid("ttt", None, {"lr": "1"}))


def made_run(plan: Plan, right: dict[str, tuple[int, int]]) -> Run:
    """A run with these numbers of right answers out of ten, on the original set and on every corrupted one."""
    units = [
        Unit(
            *(unit.method, unit.set_name, unit.corruption, unit.level, unit.seed),
            about={"counts": {"images": 10, "labelled": 10, "is_right": right[unit.method][unit.level is not None]}},
        )
        for unit in plan.units()
    ]
    return Run(Path("run"), {}, {}, units, [])


def test_the_choice_is_the_lowest_mean_error_and_the_first_of_equal_ones(network: str) -> None:
    plan = make_tuning_plan(network, make_grid("ttt", None, {"lr": "1,2,3,4"}), seeds=[0, 1])
    run = made_run(plan, {"fixed": (9, 9), "lr=1.0": (9, 2), "lr=2.0": (2, 7), "lr=3.0": (6, 6), "lr=4.0": (2, 7)})
    choice = choose(plan, run)
    assert [row["name"] for row in choice["table"]] == ["fixed", "lr=2.0", "lr=3.0", "lr=4.0", "lr=1.0"]
    by_name = {row["name"]: row for row in choice["table"]}
    assert by_name["lr=2.0"]["error"] == pytest.approx((0.8 + 4 * 0.3) / 5)
    assert (by_name["lr=2.0"]["original"], by_name["lr=2.0"]["corrupted"]) == pytest.approx((0.8, 0.3))
    assert choice["chosen"] == {"name": "lr=2.0", "settings": {"lr": 2.0}}
    assert (choice["sets"], choice["seeds"]) == (dict.fromkeys(HELD_OUT, 10), [0, 1])
    assert "unadapted" in format_choice(choice)[-1]


def test_sets_without_an_original_have_no_error_on_it(network: str) -> None:
    plan = make_tuning_plan(network, make_grid("ttt", None, {"lr": "1"}), data=["digits-held-out-c/spatter/5"])
    choice = choose(plan, made_run(plan, {"fixed": (0, 4), "lr=1.0": (0, 5)}))
    assert [(row["error"], row["corrupted"], row["original"]) for row in choice["table"]] == [
        (0.5, 0.5, None),
        (0.6, 0.6, None),
    ]
    lines = format_choice(choice)
    assert lines[1].split() == ["lr=1.0", "50.00%", "50.00%", "-"]
    assert lines[-1] == "chosen: lr=1.0"


def test_a_tuning_run_is_a_run_that_is_resumed(network: str, tmp_path: Path) -> None:
    grid = make_grid("ttt", None, {"lr": "0.01,0.1", "copies": "1"})
    plan = make_tuning_plan(network, grid, data=["digits-held-out", "digits-held-out-c/spatter/5"], limit=4)
    stopped = tmp_path / "stopped"

    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("3/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, stopped, progress=stop)
    assert 0 < len(open_run(stopped).units) < 6
    choices = [choose(plan, run_plan(plan, folder)) for folder in (stopped, tmp_path / "whole")]
    assert choices[0] == choices[1]
    path = write_choice(stopped, choices[0])
    assert json.loads(path.read_text()) == choices[0]
    assert choose(plan, run_plan(plan, stopped)) == choices[0]  # beside the file, which is not a part of the run
    errors = {row["name"]: row["error"] for row in choices[0]["table"]}
    for spec in plan.methods:
        columns = [unit.columns() for unit in open_run(stopped).units if unit.method == spec.name]
        wrong = [(one["prediction"] != one["label"]).mean() for one in columns]
        assert errors[spec.name] == pytest.approx(sum(wrong) / 2)

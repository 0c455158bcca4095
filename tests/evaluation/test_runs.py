"""Evaluation runs: records against plain evaluation, folders that are taken up again, plans, studies, the command."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from testtime import cli, collect, data, resnet26
from testtime.adaptation.adapters import Fixed, Online
from testtime.adaptation.guard import Guard, gate
from testtime.corruptions import CORRUPTIONS
from testtime.data import DataError
from testtime.evaluation import (
    MethodSpec,
    Plan,
    RunError,
    SetSpec,
    Unit,
    format_run,
    make_plan,
    open_run,
    read_study,
    run_plan,
    studies,
)
from testtime.evaluation import study as studies_of
from testtime.evaluation.columns import join_columns, make_columns
from testtime.evaluation.inputs import Facts
from testtime.evaluation.plan import fill
from testtime.evaluation.protocols import Protocol
from testtime.evaluation.ray import cut, start_ray
from testtime.evaluation.records import PROBABILITIES, Record, evaluate, stream_order
from testtime.evaluation.schedule import make_groups
from testtime.evaluation.units import COLUMNS, read_unit, write_unit
from testtime.evaluation.worker import Worker, choose_batch, find_threshold
from testtime.networks import load
from testtime.networks.card import CheckpointError
from testtime.progress import read_ahead
from testtime.storage import FolderError, hold_folder

SMALL = {"copies": ["2"], "lr": ["0.05"], "steps": ["1"]}
SETS = ["digits", "digits-c/contrast/5", "digits-gradual/shot_noise"]


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two small untrained networks for the digits, as `make_plan` takes them."""
    folder = tmp_path_factory.mktemp("networks")
    files = {}
    for seed, name in enumerate(("checkpoint", "baseline")):
        net = resnet26(depth=8, channels=1, size=8, seed=seed)
        net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
        net.save(folder / f"{name}.safetensors")
        files[name] = str(folder / f"{name}.safetensors")
    return files


@pytest.fixture(scope="module")
def plan(networks: dict[str, str]) -> Plan:
    return make_plan(**networks, data=SETS, limit=34, seeds=[3], shuffle=True, **SMALL)


@pytest.fixture(scope="module")
def finished(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run_plan(plan, out, command="testtime eval …")
    return out


def copy_of(folder: Path, target: Path) -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / file.relative_to(folder)).write_bytes(file.read_bytes())
    return target


def all_columns(folder: Path) -> dict[str, dict[str, list[Any]]]:
    return {
        unit.title: {name: column.tolist() for name, column in unit.columns().items()}
        for unit in open_run(folder).units
    }


def assert_same_records(
    here: Path, there: Path, methods: Sequence[str] = ("plain", "fixed", "episodic", "online")
) -> None:
    """The units of two runs are the same: online ones but for rounding, which depends on how many advance together."""
    own, other = (
        {unit.title: unit for unit in open_run(folder).units if unit.method in methods} for folder in (here, there)
    )
    assert own.keys() == other.keys()
    for title, unit in own.items():
        assert_same_columns(unit.columns(), other[title].columns(), 1e-4 if unit.method == "online" else 0)


def assert_same_columns(here: Any, there: Any, atol: float) -> None:
    for name, kind in COLUMNS.items():
        if kind == "float32":
            np.testing.assert_allclose(here[name], there[name], atol=atol, rtol=0)
        else:
            np.testing.assert_array_equal(here[name], there[name])


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "fixed", "episodic", "online"])
def test_a_unit_holds_the_records_of_evaluate(finished: Path, networks: dict[str, str], name: str, plan: Plan) -> None:
    net = load(networks["baseline" if name == "plain" else "checkpoint"])
    parallel = 8 if name == "episodic" else "auto"
    units = [unit for unit in open_run(finished).units if unit.method == name]
    assert [unit.set_name for unit in units] == SETS
    for unit in units:
        test_set = data.open(unit.set_name, size=8)
        adapter = plan.method(name).make(net, 3, parallel)
        ordered = unit.set_name.startswith("digits-gradual")
        records = list(evaluate(adapter, test_set, batch=32, shuffle=not ordered, seed=3, limit=34))
        assert_same_columns(unit.columns(), make_columns(records), 1e-4 if name == "online" else 0)
        assert unit.columns()["sample"].tolist() == (list(range(34)) if ordered else stream_order(500, 3)[:34].tolist())
        # Nothing would be compared if nothing had been learned.
        changed = unit.columns()["loss_before"] != unit.columns()["loss_after"]
        assert changed.all() if name in ("episodic", "online") else not changed.any()


def test_streams_side_by_side_are_streams_one_by_one(finished: Path, plan: Plan, tmp_path: Path) -> None:
    online = Plan(**vars(plan) | {"methods": (plan.method("online"),)})
    sizes = {unit.about["together"] for unit in open_run(finished).units if unit.method == "online"}
    assert sizes == {3}  # all that share a network, without being asked
    for together, jobs in ((1, 1), (2, 1), (None, 3)):
        folder = tmp_path / f"{together} {jobs}"
        run = run_plan(online, folder, together=together, jobs=jobs)
        assert [unit.about["together"] for unit in run.units] == ([2, 2, 1] if together == 2 else [1, 1, 1])
        assert_same_records(folder, finished, ["online"])


def test_jobs_side_by_side_are_units_one_by_one(finished: Path, plan: Plan, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    run = run_plan(plan, tmp_path / "run", jobs=3, progress=lambda *said: told.append(said))
    assert_same_records(tmp_path / "run", finished)
    assert told[-1][0] == told[-1][1]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert run.configuration == open_run(finished).configuration
    with pytest.raises(ValueError, match="`jobs` must be at least 1, got 0"):
        run_plan(plan, tmp_path / "other", jobs=0)
    with pytest.raises(ValueError, match="`sets` and `jobs` are not supported"):
        run_plan(plan, tmp_path / "other", jobs=2, ray="local")


def test_jobs_that_are_stopped_keep_what_is_finished(finished: Path, plan: Plan, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if text.startswith(tuple(f"{place}/12 " for place in range(5, 13))):  # two may end at once
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path / "run", jobs=2, progress=stop)
    assert 4 <= len(open_run(tmp_path / "run").units) < 12
    run_plan(plan, tmp_path / "run", jobs=2)
    assert_same_records(tmp_path / "run", finished)


def test_sets_of_ones_own_need_no_name_to_be_opened_by(networks: dict[str, str], tmp_path: Path) -> None:
    images = data.open("digits", size=8)
    mine = data.TensorSet("mine", images.images(slice(9)), images.labels[:9], images.classes)
    plan = Plan(
        {"joint": networks["checkpoint"]}, (SetSpec("digits"), SetSpec("my/own")), (MethodSpec("fixed", "fixed"),)
    )
    run = run_plan(plan, tmp_path / "run", sets={"my/own": mine})
    assert [(unit.set_name, unit.about["counts"]["images"]) for unit in run.units] == [("digits", 500), ("my/own", 9)]
    assert run.configuration["sets"]["my/own"] == mine.fingerprint()
    first, own = (unit.columns()["prediction"][:9].tolist() for unit in run.units)
    assert first == own


def test_more_streams_than_fit_go_in_turns(plan: Plan) -> None:
    facts = {name: Facts(name, 34, (1, 8, 8)) for name in SETS} | {"odd": Facts("odd", 9, (1, 8, 8))}
    bigger = Plan(**vars(plan) | {"sets": (*plan.sets, SetSpec("odd")), "seeds": (0, 1)})
    device = torch.device("cpu")
    groups = make_groups(bigger, bigger.units(), facts, device, together=2)
    assert sorted(unit.title for group in groups for unit in group) == sorted(u.title for u in bigger.units())
    for group in groups:
        assert len({(unit.method, unit.seed, facts[unit.set_name].count) for unit in group}) == 1
        assert len(group) == 1 or (group[0].method == "online" and len(group) == 2)
    assert max(map(len, groups)) == 2


def test_methods_that_need_a_batch_are_not_grouped_as_streams_of_single_images(plan: Plan) -> None:
    facts = {name: Facts(name, 34, (1, 8, 8)) for name in SETS}
    batched = ("tent", {}), ("lame", {}), ("ttt", {"share": "batch"})
    for method, settings in (*batched, ("ttt", {})):
        spec = MethodSpec("one", "online", settings=settings, method=method)
        one = Plan(**vars(plan) | {"methods": (spec,)})
        sizes = [len(group) for group in make_groups(one, one.units(), facts, torch.device("cpu"), together=9)]
        assert sizes == ([1, 1, 1] if (method, settings) in batched else [3]), (method, settings)
        single = Plan(**vars(one) | {"protocol": Protocol("reset", batch=1)})
        sizes = [len(group) for group in make_groups(single, one.units(), facts, torch.device("cpu"), together=9)]
        assert sizes == ([1, 1, 1] if (method, settings) in batched[1:] else [3]), (method, settings)


def test_on_a_cpu_streams_share_memory_and_jobs() -> None:
    names = [f"s{number}" for number in range(75)]

    def sizes(side: int, jobs: int = 1, turns: str = "random") -> list[int]:
        method = MethodSpec("online", "online", settings={"copies": 32, "task": {"name": "rotation", "each": turns}})
        views = Plan({"joint": "x"}, tuple(map(SetSpec, names)), (method,))
        facts = {name: Facts(name, 9, (3, side, side)) for name in names}
        groups = make_groups(views, views.units(), facts, torch.device("cpu"), jobs=jobs)
        assert [unit.set_name for group in groups for unit in group] == names
        # What learning keeps of the views of all streams at work, with room to spare, stays within four gigabytes.
        kept = jobs * max(map(len, groups)) * (4 if turns == "all" else 1) * 32 * 3 * side**2 * 4 * 240
        assert kept <= 4 * 2**30 or max(map(len, groups)) == 1
        return [len(group) for group in groups]

    assert sizes(8) == [75]
    assert sizes(8, jobs=2) == [38, 37]
    assert sizes(8, jobs=4) == [19, 19, 19, 18]
    assert sizes(32) == [38, 37]
    assert sizes(32, turns="all") == [10] * 7 + [5]
    assert sizes(224) == [1] * 75


def test_on_cuda_as_many_streams_as_fit_advance_together(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {name: Facts(name, 34, (1, 8, 8)) for name in SETS}
    sizes = []
    for free in (80 * 2**30, 2 * 2 * 2 * 4 * 64 * 400, 0):  # room for many; for two streams in one half; for none
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        groups = make_groups(plan, plan.units(), facts, torch.device("cuda"))
        sizes.append([len(group) for group in groups if group[0].method == "online"])
        assert all(len(group) == 1 for group in groups if group[0].method != "online")
    assert sizes == [[3], [2, 1], [1, 1, 1]]


def test_seeds_are_units_of_their_own(networks: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(
        **networks, data=["digits"], methods="online", limit=6, seeds=[0, 1], shuffle=True, copies=["2"], lr=["0.05"]
    )
    run = run_plan(plan, tmp_path / "run")
    assert [unit.seed for unit in run.units] == [0, 1]
    first, second = (unit.columns() for unit in run.units)
    assert first["sample"].tolist() == stream_order(500, 0)[:6].tolist()
    assert second["sample"].tolist() == stream_order(500, 1)[:6].tolist()


@pytest.fixture(scope="module")
def own_networks(networks: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """For each of the sets a network of its own, as a file's pattern."""
    folder = tmp_path_factory.mktemp("own")
    for seed, set_name in enumerate(SETS):
        net = resnet26(depth=8, channels=1, size=8, seed=10 + seed)
        net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
        net.save(folder / f"{set_name}.safetensors")
    return str(folder / "{set}.safetensors")


STUDY = (
    'data = ["digits", "digits-c/contrast/5", "digits-gradual/shot_noise"]\nlimit = 20\n'
    '[methods.uda]\nmode = "fixed"\nnetwork = "uda"\n'
    '[methods.both]\nmode = "online"\nnetwork = "uda"\ncopies = 2\nlr = 0.05\n'
    '[methods.each]\nmode = "episodic"\nnetwork = "uda"\ncopies = 2\nlr = 0.05\nsteps = 1\n'
)


@pytest.fixture(scope="module")
def own_plan(own_networks: str, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    study = tmp_path_factory.mktemp("study") / "own.toml"
    study.write_text(STUDY)
    return make_plan(study, networks={"uda": own_networks})


def test_every_set_can_have_a_network_of_its_own(own_plan: Plan, own_networks: str, tmp_path: Path) -> None:
    run = run_plan(own_plan, tmp_path / "run", together=3)
    assert len(run.units) == 9
    for unit in run.units:
        net, test_set = load(fill(own_networks, unit.set_name)), data.open(unit.set_name, size=8)
        adapter = own_plan.method(unit.method).make(net, 0, 8)
        expected = make_columns(evaluate(adapter, test_set, limit=20))
        assert {n: c.tolist() for n, c in unit.columns().items()} == {n: c.tolist() for n, c in expected.items()}
        assert unit.about["together"] == 1  # streams of different networks do not go side by side
    marks = run.configuration["networks"]["uda"]["fingerprint"]
    assert marks == {name: load(fill(own_networks, name)).fingerprint() for name in SETS}
    assert len(set(marks.values())) == 3


def test_of_the_sets_networks_one_is_open_at_a_time(own_plan: Plan) -> None:
    shop = Worker(own_plan)
    nets = [shop.net("uda", name) for name in SETS]
    assert len({id(net) for net in nets}) == 3
    assert [net for _, net in shop._held.values()] == nets[-1:]
    assert len(shop.fingerprints) == 3


def test_a_missing_network_is_said_before_anything_runs(
    own_plan: Plan, own_networks: str, networks: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    copy_of(Path(own_networks).parent, folder)
    pattern = str(folder / "{set}.safetensors")
    lost = folder / "digits-c/contrast/5.safetensors"
    whole = lost.read_bytes()
    plan = Plan(**vars(own_plan) | {"networks": {"uda": pattern}})
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"contrast/5\.safetensors: .*network uda"):
        run_plan(plan, tmp_path / "run")
    other = resnet26(depth=8, channels=1, size=16)
    other.save(lost)
    with pytest.raises(CheckpointError, match=r"5\.safetensors: another kind of network than .*digits\.safetensors"):
        run_plan(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    lost.write_bytes(whole)
    shop = Worker(plan)
    shop.net("uda", SETS[1])
    shop.net("uda", SETS[0])
    lost.write_bytes(Path(networks["checkpoint"]).read_bytes())
    with pytest.raises(CheckpointError, match=r"contrast/5\.safetensors: .*replaced"):
        shop.net("uda", SETS[1])


def test_adapters_serve_all_sets_of_a_method_and_seed(
    plan: Plan, own_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    real = MethodSpec.make

    def make(method: MethodSpec, net: Any, seed: int, parallel: Any) -> Any:
        made.append((method.name, seed))
        return real(method, net, seed, parallel)

    two = Plan(**vars(plan) | {"seeds": (0, 1), "limit": 3})
    monkeypatch.setattr(MethodSpec, "describe", lambda method, net: {})
    monkeypatch.setattr(MethodSpec, "make", make)
    run_plan(two, tmp_path / "run", together=1)
    assert made == [(name, seed) for seed in (0, 1) for name in ("plain", "fixed", "episodic", "online")]
    made.clear()
    run_plan(Plan(**vars(own_plan) | {"limit": 3}), tmp_path / "own")
    assert made == [(name, 0) for name in ("uda", "both", "each") for _ in SETS]


def test_a_share_of_the_images_is_the_least_sure_ones(networks: dict[str, str], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {**networks, "data": SETS[:2], "methods": "fixed,episodic", "limit": 40, **SMALL}
    plan = make_plan(**arguments, seeds=[2], shuffle=True, threshold=["15%"])
    assert plan.method("episodic").fraction == 0.15
    run = run_plan(plan, tmp_path / "run")
    assert run.configuration["methods"]["episodic"]["settings"]["threshold"] == "15%"
    units = {(unit.method, unit.set_name): unit for unit in run.units}
    found = set()
    for set_name in SETS[:2]:
        fixed, learned = (units[method, set_name].columns() for method in ("fixed", "episodic"))
        least = np.argsort(fixed["confidence"], kind="stable")[:6]  # 15% of 40
        assert learned["adapted"].sum() == 6
        assert set(np.flatnonzero(learned["adapted"])) == set(least)
        threshold = units["episodic", set_name].about["threshold"]
        assert threshold == np.sort(fixed["confidence"])[6]
        assert "threshold" not in units["fixed", set_name].about
        found.add(threshold)
        # The records are those of a method with that number.
        adapter = plan.method("episodic").resolve(threshold).make(load(networks["checkpoint"]), 2, 8)
        records = evaluate(adapter, data.open(set_name, size=8), batch=32, shuffle=True, seed=2, limit=40)
        assert {n: c.tolist() for n, c in make_columns(records).items()} == {n: c.tolist() for n, c in learned.items()}
    assert len(found) == 2
    with pytest.raises(ValueError, match="must first be resolved on a test set"):
        plan.method("episodic").make(resnet26(depth=8), 0)
    # Streams with their own thresholds do not run in parallel.
    online = make_plan(**arguments | {"methods": "online"}, threshold=["50%"])
    facts = {name: Facts(name, 34, (1, 8, 8)) for name in SETS}
    assert [len(group) for group in make_groups(online, online.units(), facts, torch.device("cpu"), 9)] == [1, 1]


@given(st.lists(st.floats(0, 1, width=32), max_size=30), st.floats(0.01, 1))
def test_a_threshold_lets_no_more_than_the_share_pass(confidences: list[float], share: float) -> None:
    threshold = find_threshold(confidences, share)
    passing = int(gate(torch.tensor(confidences, dtype=torch.float32), threshold).sum())
    wanted = round(share * len(confidences))
    assert passing <= wanted
    # Fewer only where confidences are equal, or too close to 1 for a threshold to lie between.
    beyond = sorted(confidences)[wanted : wanted + 1] or [1.0]
    assert passing == wanted or sorted(confidences)[passing] >= min(beyond[0], 1 - 2**-24)


def test_a_folder_of_pictures_has_the_networks_classes(networks: dict[str, str], tmp_path: Path) -> None:
    net = resnet26(classes=3, depth=8, channels=3, size=8)
    net.describe(classes=("ant", "bee", "cat"))
    net.save(tmp_path / "net.safetensors")
    for label in ("cat", "bee"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (12, 12), (number * 90, 40, 200)).save(tmp_path / "photos" / label / f"{number}.png")
    arguments: dict[str, Any] = {"checkpoint": tmp_path / "net.safetensors", "methods": "fixed"}
    run = run_plan(make_plan(**arguments, data=[str(tmp_path / "photos")]), tmp_path / "run")
    (unit,) = run.units
    assert (unit.set_name, unit.columns()["label"].tolist()) == ("folder/photos", [1, 1, 2, 2])
    assert run.about["files"]["folders"] == {"folder/photos": str(tmp_path / "photos")}
    # Pictures without classes have no labels and no verdicts.
    told: list[str] = []
    bees = make_plan(**arguments, data=[str(tmp_path / "photos" / "bee")])
    plain = run_plan(bees, tmp_path / "unlabelled", progress=lambda done, total, text: told.append(text))
    assert "folder/bee" in told[0]
    assert "2/2 images" in told[-1]
    assert "error" not in told[-1]
    columns = plain.units[0].columns()
    assert columns["label"].tolist() == [-1, -1]
    assert columns["is_right"].tolist() == columns["was_right"].tolist() == [0, 0]
    assert "no labels" in format_run(plain)
    with pytest.raises(ValueError, match="digits has 10 classes, the network has 3"):
        run_plan(make_plan(**arguments, data=["digits"]), tmp_path / "other")


def test_reading_ahead_changes_nothing_and_passes_errors_on() -> None:
    assert list(read_ahead(iter(range(5)))) == list(range(5))
    assert list(read_ahead(iter([]))) == []

    def broken() -> Iterable[int]:
        yield 1
        raise DataError("a.png", "damaged")

    reader = read_ahead(iter(broken()))
    assert next(reader) == 1
    with pytest.raises(DataError, match=r"a\.png: damaged"):
        next(reader)


# ---------------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------------


def test_the_run_says_what_it_is(finished: Path, networks: dict[str, str]) -> None:
    run = open_run(finished)
    assert list(run.configuration["methods"]) == ["plain", "fixed", "episodic", "online"]
    assert run.configuration["methods"]["online"]["settings"]["lr"] == 0.05
    assert run.configuration["methods"]["online"]["settings"]["threshold"] == 1.0  # defaults are written out
    assert run.configuration["networks"]["joint"]["fingerprint"] == load(networks["checkpoint"]).fingerprint()
    assert run.about["command"] == "testtime eval …"
    assert run.about["seeds"] == [3]
    assert run.about["versions"]["torch"] == importlib.metadata.version("torch")
    assert run.about["hardware"]["device"] == "cpu"
    assert not run.damaged
    for unit in run.units:
        assert unit.seconds > 0
        assert unit.about["counts"]["images"] == 34
        assert unit.about["counts"]["is_right"] == unit.columns()["is_right"].sum()
    assert [(u.corruption, u.level) for u in run.units[::4]] == [(None, None), ("contrast", 5), ("shot_noise", None)]


def test_running_again_does_only_what_is_missing(finished: Path, plan: Plan, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    before = files_of(folder)
    lost = "units/online/digits-c/contrast/5/seed-3.safetensors"
    (folder / lost).unlink()
    told: list[tuple[int, int, str]] = []
    run_plan(plan, folder, progress=lambda *said: told.append(said))
    after = files_of(folder)
    assert {name for name in after if after[name] != before[name]} <= {lost}
    assert_same_records(folder, finished)
    assert all("online digits-c/contrast/5" in text for _, _, text in told[1:])
    assert 0 < told[0][0] < told[-1][0] == told[-1][1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: held[: len(held) // 2],
        lambda held: b"",
        lambda held: held[:-1] + bytes([held[-1] ^ 1]),
        lambda held: held.replace(b'\\"seed\\": 3', b'\\"seed\\": 4'),
        lambda held: held.replace(b'\\"format\\": 1', b'\\"format\\": 9'),
    ],
    ids=["half", "empty", "a bit", "its description", "its format"],
)
def test_a_damaged_unit_is_said_and_done_again(
    finished: Path, plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    file = folder / "units/fixed/digits/seed-3.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    with caplog.at_level(logging.WARNING):
        run = open_run(folder)
    assert len(run.units) == len(open_run(finished).units) - 1
    assert len(run.damaged) == 1
    assert str(file) in run.damaged[0]
    assert str(file) in caplog.text
    assert "counts as missing" in caplog.text
    run_plan(plan, folder)
    assert all_columns(folder) == all_columns(finished)


def first_images(columns: Any, count: int) -> dict[str, np.ndarray]:
    return {name: column[:count].copy() for name, column in columns.items()}


@pytest.mark.parametrize("count", [33, 10, 0])
def test_a_unit_of_too_few_images_is_done_again(
    finished: Path, plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    for unit in open_run(folder).units:  # of one set all, of the other one
        if unit.set_name == "digits" or unit.title == "online digits-c/contrast/5 seed 3":
            write_unit(folder, unit, first_images(unit.columns(), count), 1.0)
    (lost,) = open_run(folder).damaged  # only the other units of its set tell how many images there are
    assert "units/online/digits-c/contrast/5/seed-3.safetensors" in lost
    caplog.clear()
    run = run_plan(plan, folder)
    assert not run.damaged
    assert len({message for message in caplog.messages if "seed-3.safetensors" in message}) == 5
    assert_same_records(folder, finished)


def test_a_unit_of_more_images_than_the_limit_is_damaged(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    held = json.loads((folder / "run.json").read_text())
    held["configuration"]["limit"] = 33
    (folder / "run.json").write_text(json.dumps(held))
    run = open_run(folder)
    assert not run.units
    assert len(run.damaged) == 12


def test_what_a_kill_left_before_there_was_a_run_is_cleared(plan: Plan, tmp_path: Path) -> None:
    few = Plan(**vars(plan) | {"sets": plan.sets[:1], "methods": plan.methods[:1], "limit": 2})
    (tmp_path / ".run.json.abcdefgh.part").write_text("{")
    assert len(run_plan(few, tmp_path).units) == 1
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_of_other_things_stays_as_it_is(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / ".mine.part").write_text("years of work")
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError):
        run_plan(plan, tmp_path)
    assert len(files_of(tmp_path)) == 2


def test_a_unit_in_anothers_place_counts_as_missing(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    wrong = folder / "units/fixed/digits-c/contrast/5/seed-3.safetensors"
    wrong.write_bytes((folder / "units/fixed/digits/seed-3.safetensors").read_bytes())
    run = open_run(folder)
    assert "belongs elsewhere" in run.damaged[0]
    assert "fixed digits-c/contrast/5 seed 3" not in [unit.title for unit in run.units]


def test_another_configuration_is_refused_with_the_difference(
    finished: Path, plan: Plan, networks: dict[str, str], tmp_path: Path
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    before = files_of(folder)
    other = make_plan(**networks, data=SETS, limit=33, seeds=[3], shuffle=True, **SMALL | {"lr": ["0.06"]})
    with pytest.raises(ValueError, match=r"limit: 34 there, 33 now; .*online\.settings\.lr: 0\.05 there, 0\.06 now"):
        run_plan(other, folder)
    swapped = {"checkpoint": networks["baseline"], "baseline": networks["checkpoint"]}
    with pytest.raises(ValueError, match=r"networks\.baseline\.fingerprint"):
        run_plan(make_plan(**swapped, data=SETS, limit=34, seeds=[3], shuffle=True, **SMALL), folder)
    many = Plan(**vars(plan) | {"sets": tuple(map(SetSpec, data.expand("digits-c/*/1")))})
    with pytest.raises(ValueError, match=r"and \d+ more\)"):
        run_plan(many, folder)
    assert files_of(folder) == before


def test_a_folder_of_other_things_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="contains other files and no run"):
        run_plan(plan, tmp_path)
    assert files_of(tmp_path) == {"thesis.txt": b"years of work"}


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="contains no run"):
        open_run(tmp_path)
    for version in ("7", '"1"', "true", "1.0"):
        (tmp_path / "run.json").write_text(f'{{"format": {version}, "configuration": {{}}}}')
        with pytest.raises(RunError, match=re.escape(f"has format {json.loads(version)!r}")):
            open_run(tmp_path)


def test_stopping_keeps_what_is_finished(finished: Path, plan: Plan, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("5/12 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path / "run", progress=stop)
    assert len(open_run(tmp_path / "run").units) == 4
    run_plan(plan, tmp_path / "run")
    assert all_columns(tmp_path / "run") == all_columns(finished)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders there")
def test_two_processes_do_not_run_in_one_folder(finished: Path, plan: Plan, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with hold_folder(folder), pytest.raises(FolderError, match="another process is at work"):
        run_plan(plan, folder)
    assert len(run_plan(plan, folder).units) == 12
    assert len(open_run(folder).units) == 12


RECORDS = st.builds(
    Record,
    sample=st.integers(0, 2**31 - 1),
    label=st.none() | st.integers(0, 999),
    prediction=st.integers(0, 999),
    prediction_before=st.integers(0, 999),
    is_right=st.none() | st.booleans(),
    was_right=st.none() | st.booleans(),
    loss_before=st.floats(width=32),
    loss_after=st.floats(width=32),
    confidence=st.floats(0, 1, width=32),
    adapted=st.booleans(),
    rolled_back=st.booleans(),
    probability=st.floats(0, 1, width=32),
    probability_before=st.none() | st.floats(0, 1, width=32),
)


@given(records=st.lists(RECORDS, max_size=5), cut_at=st.integers(0, 5))
def test_columns_are_records_and_join(records: list[Record], cut_at: int) -> None:
    columns = make_columns(records)
    has_all = records and all(record.probability_before is not None for record in records)
    kinds = {**COLUMNS, **(PROBABILITIES if has_all else {})}
    assert {name: str(column.dtype) for name, column in columns.items()} == kinds
    for place, record in enumerate(records):
        row = {name: column[place] for name, column in columns.items()}
        assert row["sample"] == record.sample
        assert row["label"] == (-1 if record.label is None else record.label)
        assert row["is_right"] == bool(record.is_right)
        assert np.array_equal(row["loss_after"], np.float32(record.loss_after), equal_nan=True)
    joined = join_columns([make_columns(records[:cut_at]), make_columns(records[cut_at:])])
    for name in COLUMNS:
        np.testing.assert_array_equal(joined[name], columns[name])


@pytest.mark.parametrize("set_name", ["digits", "cifar10-c/fog/5", "folder/my photos", "folder/5% off", "folder/Käse"])
def test_a_unit_written_is_the_unit_read(tmp_path: Path, set_name: str) -> None:
    unit = Unit.of("online", set_name, 12)
    columns = make_columns([Record(4, None, 1, 2, None, None, 0.5, float("nan"), 0.25, True, False)])
    written = write_unit(tmp_path, unit, columns, 0.5, device="cpu")
    assert written.path is not None
    assert written.path.is_relative_to(tmp_path / "units" / "online")
    found, read = read_unit(written.path)
    assert (found, found.seconds, found.about["images_per_second"]) == (unit, 0.5, 2.0)
    for name in COLUMNS:
        np.testing.assert_array_equal(read[name], columns[name])


@pytest.mark.parametrize(("method", "set_name"), [("..", "x"), ("a/b", "x"), ("online", "folder/.."), ("", "x")])
def test_units_stay_in_their_folder(method: str, set_name: str) -> None:
    with pytest.raises(ValueError, match="usable as a file name"):
        Unit.of(method, set_name, 0)


def test_a_unit_that_is_not_finished_has_no_columns() -> None:
    with pytest.raises(RunError, match="online digits seed 0 is not finished"):
        Unit.of("online", "digits", 0).columns()


# ---------------------------------------------------------------------------------------------------------------------
# Plans and studies
# ---------------------------------------------------------------------------------------------------------------------


def names(plan: Plan) -> list[str]:
    return [source.name for source in plan.sets]


def test_a_corrupted_set_comes_with_the_original() -> None:
    plan = make_plan(checkpoint="x", data=["cifar10-c"], levels="1,3-4", corruptions="fog,frost")
    assert names(plan) == ["cifar10", *(f"cifar10-c/{c}/{n}" for c in ("frost", "fog") for n in (1, 3, 4))]
    assert "cifar10" not in names(make_plan(checkpoint="x", data=["cifar10-c"], original=False))
    assert names(make_plan(checkpoint="x", data=["cifar10-c/fog/*"], levels="5")) == ["cifar10-c/fog/5"]
    assert len(names(make_plan(checkpoint="x", data=["digits-c"], corruptions="all"))) == 1 + 75
    assert names(make_plan(checkpoint="x", data=["cifar10.1", "vid-robust"]))[-1] == "vid-robust"


def test_a_pattern_without_any_of_the_levels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"No set of 'cifar10-c/\*/1' has these levels and corruptions"):
        make_plan("best", checkpoint="x", data=["cifar10", "cifar10-c/*/1"])  # the study has level 5


def test_two_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "test").mkdir(parents=True)
    with pytest.raises(ValueError, match="Two folders are called 'test'"):
        make_plan(checkpoint="x", data=[str(tmp_path / parent / "test") for parent in ("a", "b")])


def test_the_methods_follow_the_networks() -> None:
    alone = make_plan(checkpoint="x", data=["digits"])
    assert [method.name for method in alone.methods] == ["fixed", "episodic", "online"]
    both = make_plan(checkpoint="x", baseline="y", data=["digits"])
    assert [(method.name, method.network) for method in both.methods][:2] == [("plain", "baseline"), ("fixed", "joint")]
    only = make_plan(checkpoint="x", baseline="y", data=["digits"], methods="online")
    assert only.networks == {"joint": "x"}
    others = make_plan(baseline="y", networks={"alp": "a", "uda": "{set}"}, data=["digits"])
    assert [(m.name, m.mode, m.network) for m in others.methods] == [
        ("plain", "fixed", "baseline"),
        ("alp", "fixed", "alp"),
        ("uda", "fixed", "uda"),
    ]
    assert others.networks == {"baseline": "y", "alp": "a", "uda": "{set}"}


def test_a_networks_file_may_depend_on_the_set() -> None:
    assert fill("net.safetensors", "digits-c/fog/5") == "net.safetensors"
    assert fill("uda/{set}.safetensors", "digits-c/fog/5") == "uda/digits-c/fog/5.safetensors"
    assert fill("{corruption}-{level}", "digits-c/fog/5") == "fog-5"
    assert fill("{corruption}-{level}", "digits") == "original-0"
    assert fill("{corruption}-{level}", "digits-gradual/shot_noise") == "shot_noise-0"


def test_overrides_are_for_all_that_learn_or_for_one() -> None:
    plan = make_plan(
        checkpoint="x", data=["digits"], lr=["online=0.2", "0.1"], steps=["episodic=3"], threshold=["0.5"], copies=["4"]
    )
    assert plan.method("fixed").settings == {}
    assert plan.method("episodic").settings == {"lr": 0.1, "steps": 3, "threshold": 0.5, "copies": 4}
    assert plan.method("online").settings == {"lr": 0.2, "threshold": 0.5, "copies": 4}


def test_the_precision_is_the_methods_unless_another_is_asked_for(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text('[methods.a]\nmode = "online"\nprecision = "bf16"\n[methods.b]\nmode = "episodic"\n')
    said = [
        [method.describe(resnet26(depth=8))["settings"]["precision"] for method in made.methods]
        for made in (
            make_plan(study, checkpoint="x", data=["digits"], precision=words)
            for words in (None, ["tf32"], ["a=fp32", "tf32"])
        )
    ]
    assert said == [["bf16", "fp32"], ["tf32", "tf32"], ["fp32", "tf32"]]


def test_a_method_that_learns_nothing_has_a_precision_and_may_answer_mirrored(tmp_path: Path) -> None:
    study = tmp_path / "s.toml"
    study.write_text('[methods.a]\nmode = "fixed"\nmirrored = true\n[methods.b]\nmode = "online"\n')
    plan = make_plan(study, checkpoint="x", data=["digits"], precision=["tf32", "a=bf16"])
    net = resnet26(depth=8)
    first, second = (method.make(net, 0) for method in plan.methods)
    assert isinstance(first, Fixed)
    assert (first.settings.precision, first.settings.mirrored) == ("bf16", True)
    assert (second.settings.precision, second.settings.mirrored) == ("tf32", False)
    assert plan.methods[0].describe(net)["settings"] == {"precision": "bf16", "mirrored": True}
    alone = make_plan(checkpoint="x", data=["digits"], methods="fixed", precision=["tf32"])  # no other can be meant
    assert alone.methods[0].describe(net)["settings"]["precision"] == "tf32"


def test_best_is_a_usual_method_that_is_run_where_it_is_asked_for(tmp_path: Path) -> None:
    study = tmp_path / "s.toml"
    study.write_text('[methods.wide]\nmode = "online"\nmethod = "best"\ncopies = 64\n')
    net = resnet26(depth=8)
    assert "best" not in [method.name for method in make_plan(checkpoint="x", data=["digits"]).methods]
    plan = make_plan(checkpoint="x", data=["digits"], methods="fixed,online,best", lr=["best=0.002"])
    best = plan.method("best").make(net, 3)
    assert isinstance(best, Online)
    assert best.settings == Online(net, method="best", lr=0.002, seed=3).settings
    assert plan.method("best").make_streams(net, 3, 2).settings == best.settings
    wide = make_plan(study, checkpoint="x", data=["digits"]).method("wide")
    described = Online(net, method="best", copies=64).settings.describe() | {"method": "rehearsal"}
    del described["seed"]
    assert wide.describe(net) == {"mode": "online", "network": "joint", "settings": described}
    assert MethodSpec("wide", "online", settings={"copies": 64}, method="rehearsal").describe(net) == wide.describe(net)
    assert wide.make_settings().copies == 64
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": None}, "No test sets"),
        ({"data": ["nonsense"]}, "matches no data set"),
        ({"data": ["folder"]}, "Pass the image folder"),
        ({"methods": "fixed,magic"}, "No method is called 'magic'; available: plain, fixed, episodic, online, auto"),
        ({"methods": "plain"}, "pass --baseline"),
        ({"checkpoint": None}, "pass --checkpoint"),
        ({"levels": "0-3"}, "`levels` must be 1 to 5"),
        ({"levels": "many"}, "`levels` must be a range like 1-5"),
        ({"levels": "5-1"}, "`levels` must be 1 to 5"),
        ({"corruptions": "fog,rain"}, "No corruption is called 'rain'"),
        ({"data": ["digits-c/fog/3"], "levels": "5"}, "No set of .* has these levels"),
        ({"limit": 0}, "`limit` must be .*, got 0"),
        ({"seeds": [1, 1]}, "got 1 twice"),
        ({"steps": ["fixed=3"]}, "no applicable method is called 'fixed'"),
        ({"steps": ["two"]}, "--steps must be a number or METHOD=NUMBER, got 'two'"),
        ({"steps": ["0.5"]}, "--steps must be a number"),
        ({"lr": ["-1"]}, "episodic: `lr` must be positive"),
        ({"lr": ["nan"]}, "--lr must be a number"),
        ({"threshold": ["online=2"]}, "online: `threshold`"),
        ({"threshold": ["0%"]}, "or a percentage of the images, e.g. \"20%\", got '0%'"),
        ({"threshold": ["online=many%"]}, "`threshold` must be in"),
        ({"threshold": ["101%"]}, "got '101%'"),
        ({"lr": ["0.1"], "methods": "fixed"}, r"--lr: none of the methods learns \(fixed\)"),
        ({"precision": ["fp64"]}, "--precision must be one of fp32, tf32, bf16, got 'fp64'"),
        ({"networks": {"joint": "y"}}, "The network 'joint' was given twice: x and y"),
        ({"networks": {"online": "y"}}, "cannot be called 'online'"),
        ({"networks": {"best": "y"}}, "cannot be called 'best'"),
        ({"networks": {"uda": ""}}, "--network uda: the file is missing"),
        ({"networks": {"uda": "y"}, "study": "digits"}, "No method uses the network 'uda'"),
        ({"study": "nonsense"}, "nonsense: no such file"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(**{"checkpoint": "x", "data": ["digits-c"]} | arguments)


BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "../../evil",
    "n" * 300,
    "名" * 90,
    "a\nb",
    "\x1b[31m",
    "a\0",
    "\ud800",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_file_can_have_are_refused_in_the_plan(name: str) -> None:
    fixed, one = MethodSpec("fixed", "fixed"), SetSpec("digits")
    calls: list[Callable[[], object]] = [
        lambda: MethodSpec(name, "fixed"),
        lambda: MethodSpec("fixed", "fixed", name),
        lambda: Plan({"joint": "x", name: "y"}, (one,), (fixed,)),
        lambda: make_plan(checkpoint="x", networks={name: "y"}, data=["digits"]),
    ]
    if "/" not in name:
        calls += [lambda: Plan({"joint": "x"}, (SetSpec(f"folder/{name}"),), (fixed,))]
    for call in calls:
        with pytest.raises(ValueError, match="must") as caught:
            call()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": (-1,)},
        {"seeds": (True,)},
        {"seeds": (2**64,)},
        {"seeds": ("0",)},
        {"seeds": (0.0,)},
        {"limit": True},
        {"limit": 1.5},
        {"limit": "3"},
        {"limit": 2**64},
        {"shuffle": 1},
        {"selection": 1},
        {"sets": (SetSpec("a"), SetSpec("A"))},
        {"sets": (SetSpec("K\u00e4se"), SetSpec("Ka\u0308se"))},
        {"methods": (MethodSpec("a", "fixed"), MethodSpec("A", "fixed"))},
    ],
)
def test_plans_of_other_types_are_refused(change: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"sets": (SetSpec("digits"),), "methods": (MethodSpec("fixed", "fixed"),)}
    with pytest.raises(ValueError, match=f"`{next(iter(change))}` must"):
        Plan({"joint": "x"}, **usual | change)


def test_a_folder_whose_name_no_unit_can_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\nerror: b").mkdir()
    code, _, err = run(capsys, "-c", "x", "--data", tmp_path / "a\nerror: b", "--out", tmp_path / "run")
    assert (code, len(err.splitlines())) == (2, 1)
    assert not (tmp_path / "run").exists()


def test_a_plan_survives_being_sent(networks: dict[str, str]) -> None:
    for plan in (
        make_plan(**networks, data=SETS, seeds=[1, 2], shuffle=True, limit=5, **SMALL),
        make_plan("digits", checkpoint="x", data_root="/data"),
    ):
        assert Plan.from_json(plan.to_json()) == plan


def plan_of(study: str) -> Plan:
    """A study with all networks that it asks for."""
    names = {method.get("network") for method in read_study(study)["methods"].values()}
    others = {name: name for name in sorted(names - {None, "joint", "baseline"})}
    return make_plan(study, checkpoint="x", baseline="y", networks=others)


@pytest.mark.parametrize("name", studies())
def test_every_study_is_a_plan_and_says_what_it_is(name: str) -> None:
    plan = plan_of(name)
    assert plan.title
    net = collect(resnet26(depth=8), torch.zeros(2, 3, 32, 32))
    for method in plan.methods:
        assert method.describe(net)["mode"] == method.mode
    assert set(read_study(name)) <= set(studies_of._STUDY)


def test_the_studies_are_the_papers() -> None:
    made = {name: plan_of(name) for name in studies()}
    ours = "baselines best bn cifar10-1 cifar10-c digits digits-selection fast gradual guards imagenet-c mild"
    ours += " selection steps threshold tuning vid-cifar7 vid-robust"
    assert studies() == tuple(ours.split())
    assert names(made["cifar10-c"]) == ["cifar10", *(f"cifar10-c/{c}/{n}" for c in CORRUPTIONS for n in range(1, 6))]
    assert names(made["imagenet-c"]) == ["imagenet", *(f"imagenet-c/{c}/5" for c in CORRUPTIONS)]
    assert made["bn"].method("episodic").settings["threshold"] == 0.9
    assert [method.name for method in made["bn"].methods] == ["plain", "fixed", "episodic"]
    assert made["fast"].method("fast").settings == {"steps": 1, "lr": 0.01}
    assert {m.name: m.settings.get("threshold") for m in made["threshold"].methods} == {
        "fixed": None,
        "episodic": None,
        "below-20%": "20%",
        "below-0.9": 0.9,
    }
    assert [(method.name, method.network) for method in made["baselines"].methods] == [("uda", "uda"), ("alp", "alp")]
    assert names(made["baselines"]) == ["cifar10", *(f"cifar10-c/{c}/5" for c in CORRUPTIONS)]
    assert len(names(made["gradual"])) == 3
    assert all(method.make_settings().guard == Guard() for method in made["guards"].methods)
    assert names(made["best"]) == ["cifar10", *(f"cifar10-c/{c}/5" for c in CORRUPTIONS)]
    assert made["best"].shuffle
    control = MethodSpec("fixed-mirrored", "fixed", settings={"mirrored": True})
    best, mirrored = make_plan(checkpoint="x", data=["digits"], methods="best,mirrored").methods
    parts = {"original": {"sharpness": 0}, "memory": {"memory": 0}, "both": {"memory": 0, "sharpness": 0}}
    without = [
        MethodSpec(f"without-{part}", "online", settings={"constants": constants}, method="best")
        for part, constants in parts.items()
    ]
    margins = [
        MethodSpec(f"margin-{margin}", "online", settings={"constants": {"margin": margin}}, method="best")
        for margin in (0.35, 0.5)
    ]
    assert made["best"].methods == (best, *without, mirrored, *margins, control)
    net = resnet26(depth=8)
    holding = [one.name for one in made["best"].methods if one.make(net, 0).holds_images]
    assert holding == ["best", "without-original", "margin-0.35", "margin-0.5"]
    some = make_plan("best", checkpoint="x", levels="1,5")
    assert names(some) == ["cifar10", *(f"cifar10-c/{c}/{level}" for c in CORRUPTIONS for level in (1, 5))]
    assert some.methods == made["best"].methods
    assert names(made["tuning"]) == [f"cifar10-c/{c}/3" for c in CORRUPTIONS]
    assert names(made["mild"]) == ["cifar10", *(f"cifar10-c/{c}/1" for c in ("fog", "brightness", "contrast"))]
    assert made["mild"].seeds == (0, 1, 2, 3)
    grid = {(m.settings.get("steps", 0), m.settings.get("copies", 0)) for m in made["steps"].methods}
    assert grid == {(0, 0)} | {(steps, copies) for steps in (1, 3, 10, 30) for copies in (8, 32, 128)}
    for name in ("cifar10-c", "gradual", "cifar10-1", "vid-cifar7"):
        assert [method.name for method in made[name].methods] == ["plain", "fixed", "episodic", "online"]


def test_arguments_go_before_the_study() -> None:
    plan = make_plan("digits", checkpoint="x", seeds=[4], limit=3, shuffle=False, corruptions="fog", methods="online")
    assert (plan.seeds, plan.limit, plan.shuffle, names(plan)) == ((4,), 3, False, ["digits", "digits-c/fog/5"])
    assert [method.name for method in plan.methods] == ["online"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data = [", "not a TOML file"),
        ("nonsense = 1", "no entry 'nonsense'"),
        ("shuffle = 3", "`shuffle` must be true or false, got 3"),
        ('seeds = ["a"]', "`seeds` must be integers"),
        ("seeds = [true]", "`seeds` must be integers"),
        ("data = [1]", "`data` must be names"),
        ("corruptions = [5]", "`corruptions` must be names"),
        ("[methods]\nonline = 3", "must be a table with a `mode`"),
        ('[methods.a]\nmode = "magic"', "a: `mode` must be one of fixed, episodic, online"),
        ('[methods.a]\nmode = "online"\nnetwork = "z"', "a needs the z network: pass --network z=FILE"),
        ('[methods.a]\nmode = "online"\nnetwork = 3', "a: `network` must be .* got 3"),
        ('[methods.a]\nmode = "online"\nspeed = 3', "a: unknown setting 'speed'"),
        ('[methods.a]\nmode = "fixed"\nlr = 1.0', "a: a fixed method has no setting"),
        ('[methods.a]\nmode = "online"\ncopies = "x"', "a: `copies` must be an integer, got 'x'"),
        ('[methods.a]\nmode = "online"\nsteps = 1.5', "a: `steps` must be an integer, got 1.5"),
        ('[methods.a]\nmode = "online"\nlr = true', "a: `lr` must be a number, got True"),
        ('[methods.a]\nmode = "online"\nupdate = "head"', "a: `update` must be one of"),
        ('[methods.a]\nmode = "online"\nmethod = "fast"', "a: `method` must be one of"),
        (
            '[methods.a]\nmode = "online"\ntask = { name = "rotation", each = "some" }',
            'a: `each` must be "random" or "all"',
        ),
    ],
)
def test_studies_that_are_not_well_formed_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        make_plan(tmp_path / "study.toml", checkpoint="x", data=["digits"])


# ---------------------------------------------------------------------------------------------------------------------
# Jobs for a cluster
# ---------------------------------------------------------------------------------------------------------------------


@given(count=st.integers(0, 3000), kind=st.sampled_from(["cpu", "cuda"]))
def test_jobs_cover_every_sample_once_and_cut_no_batch(count: int, kind: str) -> None:
    plan = Plan(
        {"joint": "x"},
        (SetSpec("a"),),
        (MethodSpec("e", "episodic"), MethodSpec("f", "fixed"), MethodSpec("o", "online")),
    )
    covered: dict[tuple[str, str, int], list[int]] = {}
    for job in cut(plan, plan.units(), {"a": Facts("a", count, (1, 8, 8))}, torch.device(kind), 1):
        assert job.start % choose_batch((1, 8, 8), torch.device(kind)) == 0
        for key in job.units:
            assert key[0] != "o" or (job.start, job.stop) == (0, count)
            covered.setdefault(key, []).extend(range(job.start, job.stop))
    assert covered == {(unit.method, unit.set_name, unit.seed): list(range(count)) for unit in plan.units()}


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'testtime\[ray\]'"):
        start_ray("local")


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.run(["eval", *map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_runs_resumes_and_refuses(
    capsys: pytest.CaptureFixture[str], networks: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["-c", networks["checkpoint"], "--data", "digits-c", "--levels", "5", "--corruptions", "fog"]
    arguments += ["--limit", "5", "--copies", "2", "--steps", "episodic=1", "--shuffle", "--out", str(tmp_path / "run")]
    code, out, err = run(capsys, *arguments)
    assert (code, out.splitlines()[-1]) == (
        0,
        f"{tmp_path / 'run'}: written; for tables and a page: testtime report {tmp_path / 'run'}",
    )
    assert "fog/5" in out
    assert "the original" in out
    assert "online on 2 sets: 10/10 images" in err
    before = files_of(tmp_path / "run")
    assert json.loads(before["run.json"])["command"].startswith("testtime ")
    assert run(capsys, *arguments)[:2] == (0, out)
    assert files_of(tmp_path / "run") == before
    code, out, err = run(capsys, *arguments, "--lr", "0.5")
    assert (code, out) == (1, "")
    assert "settings.lr: 0.001 there, 0.5 now" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], None),
        (["--ray"], "local"),
        (["--ray", "--limit", "3"], "local"),
        (["--ray", "local", "--limit", "3"], "local"),
        (["--ray=local"], "local"),
        (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
    ],
)
def test_ray_stands_with_an_address_or_without(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    address: str | None,
) -> None:
    asked: list[tuple[str | None, int | None]] = []

    def note(plan: Plan, out: Path, *, ray: str | None, **options: Any) -> Any:
        asked.append((ray, plan.limit))
        raise ValueError("that is enough")

    monkeypatch.setattr("testtime.evaluation.run_plan", note)
    code = cli.run(["eval", "-c", "x", "--data", "digits", "--device", "cpu", "--out", str(tmp_path / "run"), *words])
    assert (code, asked) == (1, [(address, 3 if "3" in words else None)])
    assert capsys.readouterr().err == "error: that is enough\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--data", "digits"], 2, "--checkpoint"),
        (["-c", "none.safetensors", "--data", "digits"], 1, "none.safetensors"),
        (["-c", "none.safetensors", "--data", "nonsense"], 2, "matches no data set"),
        (["-c", "none.safetensors", "--matrix", "nonsense"], 2, "nonsense: no such file"),
        (["-c", "none.safetensors", "--data", "digits", "--limit", "0"], 2, "--limit"),
        (["--network", "uda", "--data", "digits"], 2, "--network must be NAME=FILE, got 'uda'"),
        (["--network", "a=x", "--network", "a=y", "--data", "digits"], 2, "--network names 'a' twice"),
        (["--network", "uda={set}.safetensors", "--data", "digits"], 1, "digits.safetensors: no such file"),
        (["-c", "none.safetensors", "--data", "digits", "--precision", "half"], 2, "--precision must be one of"),
    ],
)
def test_bad_arguments_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    found, out, err = run(capsys, *arguments, "--out", tmp_path / "run")
    assert (found, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_missing_data_is_not_a_bad_argument(
    capsys: pytest.CaptureFixture[str], networks: dict[str, str], tmp_path: Path
) -> None:
    code, _, err = run(
        capsys, "-c", networks["checkpoint"], "--data", "cifar10", "--data-root", tmp_path, "--out", tmp_path / "run"
    )
    assert code == 1
    assert "holds no CIFAR-10" in err


def test_the_command_runs_a_study_from_a_file(
    capsys: pytest.CaptureFixture[str], networks: dict[str, str], tmp_path: Path
) -> None:
    study = tmp_path / "mine.toml"
    study.write_text(
        'title = "Mine"\ndata = "digits-gradual/shot_noise"\nlimit = 4\nshuffle = true\n'
        '[methods.fast]\nmode = "episodic"\nsteps = 1\nlr = 0.01\ncopies = 2\n'
    )
    code, out, _ = run(capsys, "-c", networks["checkpoint"], "--matrix", study, "--out", tmp_path / "run")
    assert code == 0
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'run'}: written")
    made = open_run(tmp_path / "run")
    assert made.about["title"] == "Mine"
    assert made.units[0].title == "fast digits-gradual/shot_noise seed 0"
    assert made.units[0].columns()["sample"].tolist() == [0, 1, 2, 3]  # its order is the test


def test_a_run_is_read_without_its_networks_or_data(finished: Path) -> None:
    code = (
        "import sys; from testtime.evaluation import open_run; run = open_run(sys.argv[1]);"
        "print(len(run.units), int(run.units[0].columns()['is_right'].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(finished)], capture_output=True, text=True, check=False)
    first = open_run(finished).units[0]
    assert done.stdout == f"12 {first.columns()['is_right'].sum()}\n", done.stderr

"""Protocols: streams against naive loops, calls of a given size, streams that do not wait, resuming, refusals."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testtime import cli, resnet26
from testtime.adaptation.adapters import Adapter
from testtime.adaptation.auto import Auto, Calibration
from testtime.corruptions import corrupt
from testtime.data import Corrupted, TensorSet, TestSet
from testtime.evaluation import MethodSpec, Plan, RunError, SetSpec, Unit, make_plan, open_run, read_study, run_plan
from testtime.evaluation import run as running
from testtime.evaluation import worker as working
from testtime.evaluation.protocols import Layout, Protocol, make_walk, read_layout, read_protocol
from testtime.evaluation.ray import cut
from testtime.evaluation.stream_sets import StreamSet, correlate, share_bases
from testtime.evaluation.timing import find_every, predict_only, read_speeds
from testtime.evaluation.worker import Worker
from testtime.networks import load
from testtime.randomness import Draws
from testtime.storage import FileError

CLASSES = tuple("0123456789")
SMALL = {"copies": 2, "lr": 0.05, "steps": 1}
METHODS = (
    MethodSpec("fixed", "fixed"),
    MethodSpec("online", "online", settings=SMALL),
    MethodSpec("tent", "online", method="tent", settings={"lr": 0.05}),
)
FOG, FROST = ([f"mini-c/{name}/{level}" for level in range(1, 6)] for name in ("fog", "frost"))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    net = resnet26(depth=8, channels=1, size=8, norm="batch")
    net.describe(classes=CLASSES, augment={"name": "crop-flip", "padding": 1, "flip": False}, record={"branch": {}})
    file = tmp_path_factory.mktemp("network") / "net.safetensors"
    net.save(file)
    return str(file)


def make_set(name: str, count: int = 12, labels: bool = True) -> TensorSet:
    """Random images, others for every name."""
    draws = Draws.of(0, torch.arange(count)).purpose(name)
    images = draws.integers(256, 1, 8, 8).to(torch.uint8)
    return TensorSet(name, images, draws.integers(10) if labels else None, CLASSES)


def make_worker(network: str, protocol: Protocol, names: Sequence[str], **options: Any) -> Worker:
    sets = {name: make_set(name, 9 + number) for number, name in enumerate(names)}
    plan = Plan({"joint": network}, tuple(map(SetSpec, names)), METHODS, protocol=protocol, **options)
    return Worker(plan, sets=sets)


def list_pairs(worker: Worker, seed: int = 0) -> list[tuple[str, int]]:
    """The sets and images of the only stream, in order; an image of a later visit has the right visit number."""
    (name,) = worker.plan.streams
    stream = worker.open(name)
    assert isinstance(stream, StreamSet)
    samples = worker.order(stream, seed)
    assert len(set(samples.tolist())) == len(samples) == worker.facts(stream.name).count
    source, image, visit = stream.layout().locate(samples.numpy())
    names = list(stream.layout().sets)
    pairs = [(names[one], number) for one, number in zip(source.tolist(), image.tolist(), strict=True)]
    seen: Counter[tuple[str, int]] = Counter()
    for pair, earlier in zip(pairs, visit.tolist(), strict=True):
        assert seen[pair] == earlier
        seen[pair] += 1
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------------------------------------------------


def test_continual_visits_the_sets_in_order(network: str) -> None:
    names = ["mini", FOG[4], FROST[4]]
    worker = make_worker(network, Protocol("continual"), names)
    assert worker.plan.streams == ("continual/mini",)
    assert list_pairs(worker) == [(name, k) for count, name in enumerate(names, 9) for k in range(count)]
    assert worker.facts("continual/mini").layout == Layout(
        {"mini": 9, FOG[4]: 10, FROST[4]: 11}, (("mini", 9), (FOG[4], 10), (FROST[4], 11))
    )


def test_an_order_is_a_permutation_of_the_sets_whatever_the_seed(network: str) -> None:
    found = set()
    for order in range(6):
        worker = make_worker(network, Protocol("continual", order=order), FOG, limit=2)
        streams = [tuple(dict.fromkeys(name for name, _ in list_pairs(worker, seed))) for seed in (0, 5)]
        assert streams[0] == streams[1]
        assert sorted(streams[0]) == FOG
        found.add(streams[0])
        assert worker.plan.streams == (f"continual/mini/order-{order}" if order else "continual/mini",)
    assert len(found) > 3


def test_images_within_a_set_are_shuffled_and_limited_as_without_a_protocol(network: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "limit": 5}
    worker = make_worker(network, Protocol("continual"), FOG, **options)
    alone = make_worker(network, Protocol(), FOG, **options)
    for seed in (0, 1):
        expected = [(name, k) for name in FOG for k in alone.order(alone.open(name), seed).tolist()]
        assert list_pairs(worker, seed) == expected


def test_gradual_goes_up_and_down(network: str) -> None:
    worker = make_worker(network, Protocol("gradual"), [*FOG, FROST[4], FROST[0]], limit=2)
    ramp = [*FOG, *FOG[3::-1], FROST[0], FROST[4], FROST[0]]
    assert list_pairs(worker) == [(name, k) for name in ramp for k in (0, 1)]


def test_recurring_repeats_the_round(network: str) -> None:
    names = ["mini", FOG[4], FROST[4]]
    once = list_pairs(make_worker(network, Protocol("continual", order=2), names))
    worker = make_worker(network, Protocol("recurring", order=2, rounds=3), names)
    assert list_pairs(worker) == once * 3
    assert Protocol("recurring").rounds == 10


def test_clean_images_are_divided_among_the_gaps(network: str) -> None:
    worker = make_worker(network, Protocol("clean"), [FOG[4], "mini", FROST[4]])
    pairs = list_pairs(worker)
    groups = [(name, len(list(group))) for name, group in itertools.groupby(name for name, _ in pairs)]
    assert [name for name, _ in groups] == ["mini", FOG[4], "mini", FROST[4], "mini"]
    assert [size for name, size in groups if name == "mini"] in ([3, 4, 3], [3, 3, 4], [4, 3, 3])
    assert [k for name, k in pairs if name == "mini"] == list(range(10))


def test_mixed_contains_every_image_once_in_an_order_of_the_seed(network: str) -> None:
    worker = make_worker(network, Protocol("mixed"), FOG, limit=8)
    first, again, other = (list_pairs(worker, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == sorted(other) == [(name, k) for name in FOG for k in range(8)]
    changes = sum(one != next_one for (one, _), (next_one, _) in itertools.pairwise(first))
    assert changes > 20  # of 39; at random 32
    assert worker.facts("mixed/mini").layout is not None
    assert worker.open("mixed/mini").ordered


def test_a_stream_has_the_images_and_labels_of_its_sets(network: str) -> None:
    worker = make_worker(network, Protocol("recurring", rounds=2), ["mini", FOG[4]], shuffle=True)
    stream = worker.open("recurring/mini")
    samples = worker.order(stream, 3)
    for position, (name, image) in enumerate(list_pairs(worker, 3)):
        source = worker._sets[name]
        assert torch.equal(stream.images(samples[position : position + 1])[0], source.images([image])[0])
        assert stream.labels is not None
        assert source.labels is not None
        assert stream.labels[samples[position]] == source.labels[image]
    whole = stream.images(samples)
    assert torch.equal(whole, torch.cat([stream.images(samples[k : k + 1]) for k in range(len(samples))]))


def test_sets_generated_from_the_same_images_share_them() -> None:
    first, second, other = make_set("mini"), make_set("mini"), make_set("others")
    sets = [Corrupted(base, "contrast", 5) for base in (first, second, other)]
    assert share_bases(sets) == sets
    assert [one.base for one in sets] == [first, first, other]


def test_a_walk_changes_one_level_at_a_time() -> None:
    states = make_walk(Protocol("walk"), ["fog", "snow", "frost"])
    assert [tuple(state.get(name, 0) for name in ("fog", "snow", "frost")) for state in states] == [
        (5, 0, 0), (5, 1, 0), (5, 2, 0), (5, 3, 0), (5, 4, 0), (5, 5, 0), (4, 5, 0), (3, 5, 0), (2, 5, 0), (1, 5, 0),
        (0, 5, 0), (0, 5, 1), (0, 5, 2), (0, 5, 3), (0, 5, 4), (0, 5, 5), (0, 4, 5), (0, 3, 5), (0, 2, 5), (0, 1, 5),
        (0, 0, 5),
    ]  # fmt: skip
    other = make_walk(Protocol("walk", order=4), ["fog", "snow", "frost"])
    assert len(other) == len(states)
    assert other != states


def test_a_walk_corrupts_the_images_in_turn(network: str) -> None:
    names = ["mini-c/contrast/5", "mini-c/gaussian_noise/5"]
    plan = Plan({"joint": network}, tuple(map(SetSpec, names)), METHODS, protocol=Protocol("walk", pace=3))
    base = make_set("mini", 7)
    worker = Worker(plan, sets={"mini": base})
    stream = worker.open("walk/mini")
    samples = worker.order(stream, 0)
    assert len(samples) == 11 * 3
    read = stream.images(samples)
    levels = [(5, 0), (5, 1), (5, 2), (5, 3), (5, 4), (5, 5), (4, 5), (3, 5), (2, 5), (1, 5), (0, 5)]
    position = 0
    for first, second in levels:
        for _ in range(3):
            number = torch.tensor([position % 7])
            image = base.images(number)
            for name, level in (("contrast", first), ("gaussian_noise", second)):
                image = corrupt(image, name, level, samples=number) if level else image
            assert torch.equal(read[position], image[0])
            position += 1


# ---------------------------------------------------------------------------------------------------------------------
# Correlated labels
# ---------------------------------------------------------------------------------------------------------------------


def count_runs(test_set: TestSet, order: torch.Tensor) -> int:
    assert test_set.labels is not None
    return len(list(itertools.groupby(test_set.labels[order].tolist())))


def test_correlated_keeps_the_images_and_sorts_them_the_more_the_smaller_the_concentration() -> None:
    test_set = make_set("mini", 2000)
    order = torch.arange(2000)
    runs = []
    for concentration in (1e-9, 0.1, 1.0, 1e9):
        found = correlate(test_set, order, concentration, 0)
        assert sorted(found.tolist()) == order.tolist()
        assert torch.equal(found, correlate(test_set, order, concentration, 0))
        assert not torch.equal(found, correlate(test_set, order, concentration, 1))
        runs.append(count_runs(test_set, found))
    assert runs == sorted(runs)
    assert runs[0] == 10  # each class in one piece
    assert 85 < runs[3] <= 100  # each class in all ten slots


def test_the_shares_of_the_slots_are_those_of_a_dirichlet_distribution() -> None:
    """Of n images in K slots, the expected square of a share is (α + 1) / (K (Kα + 1)), plus 1/n of the rest."""
    shares, count, slots, alpha = [], 100, 10, 0.3
    test_set = TensorSet("one", torch.zeros(count, 1, 8, 8, dtype=torch.uint8), torch.zeros(count).long(), CLASSES)
    for seed in range(200):
        found = correlate(test_set, torch.arange(count), alpha, seed)
        # Within a slot the images of a class stay in order, so a descent is a new slot.
        lengths, last = [1], int(found[0])
        for number in found[1:].tolist():
            lengths = [*lengths, 1] if number < last else [*lengths[:-1], lengths[-1] + 1]
            last = number
        shares.append(sum((length / count) ** 2 for length in lengths))
    square = (alpha + 1) / (slots * alpha + 1)  # of all slots together
    expected = square + (1 - square) / count
    assert abs(np.mean(shares) - expected) < 0.03


def test_correlated_needs_labels_and_a_free_order(network: str) -> None:
    worker = make_worker(network, Protocol("correlated"), ["mini"])
    worker._sets["mini"] = make_set("mini", labels=False)
    with pytest.raises(ValueError, match="mini has no labels"):
        worker.facts("mini")
    worker._sets["mini"] = make_set("mini")
    worker._sets["mini"].ordered = True
    with pytest.raises(ValueError, match="fixed order"):
        worker.facts("mini")


def test_a_continual_stream_may_be_correlated(network: str) -> None:
    worker = make_worker(network, Protocol("continual", concentration=0.1), FOG)
    alone = make_worker(network, Protocol("correlated"), FOG)
    expected = [(name, k) for name in FOG for k in alone.order(alone.open(name), 0).tolist()]
    assert list_pairs(worker) == expected
    assert expected != sorted(expected)


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


def all_columns(folder: Path) -> dict[str, Any]:
    run = open_run(folder)
    assert not run.damaged
    return {unit.title: {name: c.tolist() for name, c in unit.columns().items()} for unit in run.units}


def mini_plan(network: str, protocol: Protocol, names: Sequence[str] = ("mini", FOG[4]), **options: Any) -> Any:
    plan = Plan({"joint": network}, tuple(map(SetSpec, names)), METHODS, protocol=protocol, **options)
    return plan, {name: make_set(name) for name in names}


def test_every_method_sees_the_same_stream_and_nothing_is_reset(network: str, tmp_path: Path) -> None:
    plan, sets = mini_plan(network, Protocol("continual", batch=5), limit=10, shuffle=True, seeds=(0, 4))
    run_plan(plan, tmp_path, sets=sets)
    run = open_run(tmp_path)  # without the numbers of images, which the limit of a set must not confuse
    assert len(run.units) == 6
    worker = Worker(plan, sets=sets)
    for unit in run.units:
        stream = worker.open(unit.set_name)
        samples = worker.order(stream, unit.seed)
        columns = unit.columns()
        assert columns["sample"].tolist() == samples.tolist()
        adapter = plan.method(unit.method).make(load(network), unit.seed)
        logits = torch.cat([adapter.predict(stream.images(part), samples=part).logits for part in samples.split(5)])
        assert columns["prediction"].tolist() == logits.argmax(1).tolist()
    sizes = {unit.method: unit.about["state_bytes"] for unit in run.units if unit.method != "fixed"}
    affine = sum(4 * tensor.numel() for name, tensor in load(network).named_parameters() if "norm" in name)
    assert affine <= sizes["tent"] < sizes["online"]
    assert all("state_bytes" not in unit.about for unit in run.units if unit.method == "fixed")
    held = json.loads((tmp_path / "run.json").read_text())["configuration"]
    assert held["protocol"] == {"name": "continual", "order": 0, "batch": 5, "hash": plan.protocol.hash()}
    assert read_layout(held, "continual/mini") == worker.facts("continual/mini").layout
    assert read_layout(held, "other") is None


def test_reset_is_recorded_as_before(network: str, tmp_path: Path) -> None:
    for name, protocol in (("usual", None), ("named", Protocol("reset"))):
        plan = Plan({"joint": network}, (SetSpec("mini"),), METHODS)
        plan = plan if protocol is None else replace(plan, protocol=protocol)
        run_plan(plan, tmp_path / name, sets={"mini": make_set("mini")})
    usual, named = ((tmp_path / name / "run.json").read_bytes() for name in ("usual", "named"))
    assert usual == named
    assert list(json.loads(usual)["configuration"]) == ["networks", "methods", "sets", "seeds", "shuffle", "limit"]
    assert all_columns(tmp_path / "usual") == all_columns(tmp_path / "named")


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        (METHODS[2], [7, 7, 7, 3]),
        (MethodSpec("one", "episodic", method="tent"), [7, 7, 7, 3]),
        (MethodSpec("one", "episodic", settings={**SMALL, "share": "batch"}), [7, 7, 7, 3]),
        (MethodSpec("one", "episodic", settings=SMALL), [24]),  # answers independent of the batch
        (METHODS[0], [24]),
    ],
)
def test_calls_have_exactly_the_images_asked_for(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: MethodSpec, sizes: list[int]
) -> None:
    calls: list[int] = []
    real = Adapter.predict

    def predict(adapter: Adapter, images: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(len(images))
        return real(adapter, images, *arguments, **named)

    monkeypatch.setattr(Adapter, "predict", predict)
    plan, sets = mini_plan(network, Protocol("continual", batch=7))
    run_plan(replace(plan, methods=(method,)), tmp_path, sets=sets)
    assert calls == sizes


@pytest.mark.filterwarnings("ignore:The method 'tent' needs several images")
def test_batches_of_one_run_in_parallel_as_they_would_one_after_another(network: str, tmp_path: Path) -> None:
    plan, sets = mini_plan(network, Protocol("reset", batch=1), names=("mini", FOG[4], FROST[4]))
    plan = replace(plan, methods=METHODS[2:])
    for name, together in (("parallel", None), ("alone", 1)):
        run_plan(plan, tmp_path / name, sets=sets, together=together)
    parallel, alone = (open_run(tmp_path / name).units for name in ("parallel", "alone"))
    assert parallel[0].about["together"] == 3
    for one, other in zip(parallel, alone, strict=True):
        assert one.columns()["prediction"].tolist() == other.columns()["prediction"].tolist()


def test_shards_are_multiples_of_the_batch(network: str) -> None:
    plan, sets = mini_plan(network, Protocol("mixed", batch=7))
    worker = Worker(plan, sets=sets)
    facts = {"mixed/mini": replace(worker.facts("mixed/mini"), count=1500)}
    paced = replace(plan, protocol=replace(plan.protocol, rate=5.0))
    for one, shards in ((plan, [(0, 512), (512, 1024), (1024, 1500)]), (paced, [(0, 511), (511, 1022), (1022, 1500)])):
        jobs = cut(one, [Unit.of("fixed", "mixed/mini", 0)], facts, torch.device("cpu"), 2)
        assert [(job.start, job.stop) for job in jobs] == shards
    whole = worker.run_unit(Unit.of("fixed", "mixed/mini", 0))
    parts = [worker.run_unit(Unit.of("fixed", "mixed/mini", 0), slice(a, b)) for a, b in ((0, 14), (14, 24))]
    assert whole["sample"].tolist() == [number for part in parts for number in part["sample"].tolist()]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("method", ["online", "tent"])
def test_a_stopped_stream_resumes(network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(working, "CHECKPOINT_SECONDS", 0.0)
    plan, sets = mini_plan(network, Protocol("recurring", rounds=2, batch=5))
    plan = replace(plan, methods=tuple(one for one in METHODS if one.name == method))
    run_plan(plan, tmp_path / "whole", sets=sets)

    def stop(done: int, total: int, text: str) -> None:
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path / "parts", sets=sets, progress=stop)
    seen: list[int] = []
    real = Adapter.predict

    def predict(adapter: Adapter, images: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(len(images))
        return real(adapter, images, *arguments, **named)

    monkeypatch.setattr(Adapter, "predict", predict)
    run_plan(plan, tmp_path / "parts", sets=sets)
    assert 0 < sum(seen) < 48
    assert all_columns(tmp_path / "parts") == all_columns(tmp_path / "whole")
    assert not (tmp_path / "parts" / "underway").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Streams that do not wait
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["online", "tent", "episodic"])
def test_a_slow_method_learns_from_every_third_call(network: str, tmp_path: Path, name: str) -> None:
    known = {one.name: one for one in (*METHODS, MethodSpec("episodic", "episodic", settings=SMALL))}
    plan, sets = mini_plan(network, Protocol("continual", batch=4, rate=10.0))
    plan = replace(plan, methods=(known[name],), every={name: 3})
    (unit,) = run_plan(plan, tmp_path, sets=sets).units
    assert unit.about["every"] == 3
    assert not (tmp_path / "speeds.json").exists()
    columns = unit.columns()
    worker = Worker(plan, sets=sets)
    stream, adapter = worker.open("continual/mini"), known[name].make(load(network), 0)
    logits, adapted = [], []
    for call, samples in enumerate(worker.order(stream, 0).split(4)):
        images = stream.images(samples)
        if call % 3 == 0:
            found = adapter.predict(images, samples=samples)
            logits.append(found.logits)
            adapted += found.adapted.tolist()
        else:
            size = 4 if name == "tent" else 1
            for some, numbers in zip(images.split(size), samples.split(size), strict=True):
                logits.append(copy.deepcopy(adapter).predict(some, samples=numbers).logits_before)
            adapted += [False] * len(samples)
    assert columns["prediction"].tolist() == torch.cat(logits).argmax(1).tolist()
    assert columns["adapted"].tolist() == adapted
    assert 0 < sum(adapted) < len(adapted)


def test_speeds_are_measured_once_and_stored(network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, sets = mini_plan(network, Protocol("reset", batch=4, rate=10.0))
    monkeypatch.setattr(running, "measure", lambda adapter, batches: 0.7)
    run = run_plan(plan, tmp_path, sets=sets)
    assert read_speeds(tmp_path) == {"online": 0.7, "tent": 0.7}
    assert {unit.method: unit.about["every"] for unit in run.units} == {"fixed": 1, "online": 2, "tent": 2}
    whole = all_columns(tmp_path)
    monkeypatch.setattr(running, "measure", lambda adapter, batches: 100.0)
    run.units[-1].path.unlink()  # pyright: ignore[reportOptionalMemberAccess]
    run_plan(plan, tmp_path, sets=sets)
    assert all_columns(tmp_path) == whole
    (tmp_path / "speeds.json").write_text('{"tent": -1}')
    with pytest.raises(RunError, match=r"speeds\.json"):
        run_plan(plan, tmp_path, sets=sets)


def test_speeds_of_another_configuration_are_not_used(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_run_here", stop)
    plan, sets = mini_plan(network, Protocol("reset", batch=4, rate=10.0))
    for limit, measured, expected in ((8, 100.0, 100.0), (8, 50.0, 100.0), (12, 0.7, 0.7)):
        monkeypatch.setattr(running, "measure", lambda adapter, batches, seconds=measured: seconds)
        with pytest.raises(KeyboardInterrupt):
            run_plan(replace(plan, limit=limit), tmp_path, sets=sets)
        assert read_speeds(tmp_path) == {"online": expected, "tent": expected}


def test_predicting_without_learning_leaves_an_adapter_as_it_was(network: str) -> None:
    auto = Auto(load(network), reference=1.0, calibration=Calibration(online=0.0), **SMALL)
    images = make_set("mini").images(slice(8))
    auto.predict(images[:4])
    assert auto.adapted == 4
    before = auto.state_dict()
    predict_only(auto, images[4:], torch.arange(4, 8))
    after = auto.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_method_is_timed_on_its_calls(network: str, tmp_path: Path) -> None:
    plan, sets = mini_plan(network, Protocol("mixed", batch=4, rate=1e-6))
    run = run_plan(plan, tmp_path, sets=sets)
    assert all(seconds > 0 for seconds in read_speeds(tmp_path).values())
    assert {unit.about["every"] for unit in run.units} == {1}


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 1), (0.5, 1), (1.0, 1), (1.01, 2), (2.5, 3)])
def test_how_often_a_method_learns(seconds: float, every: int) -> None:
    assert find_every(seconds, batch=20, rate=20.0) == every


# ---------------------------------------------------------------------------------------------------------------------
# Plans, studies and the command
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("nonsense", "reset, continual, gradual, mixed, correlated, recurring, clean, walk"),
        ({"name": 3}, "`protocol`"),
        ({"name": "reset", "speed": 3}, "speed"),
        ({"name": "reset", "order": 3}, "`order`"),
        ({"name": "mixed", "rounds": 3}, "`rounds`"),
        ({"name": "continual", "order": -1}, "`order`"),
        ({"name": "continual", "order": True}, "`order`"),
        ({"name": "correlated", "concentration": 0}, "`concentration`"),
        ({"name": "correlated", "concentration": float("nan")}, "`concentration`"),
        ({"name": "recurring", "rounds": 0}, "`rounds`"),
        ({"name": "walk", "pace": 1.5}, "`pace`"),
        ({"batch": 0}, "`batch`"),
        ({"batch": "many"}, "`batch`"),
        ({"rate": -1.0}, "`rate`"),
        ([], "`protocol`"),
        (["continual"], "`protocol`"),
    ],
)
def test_a_bad_protocol_is_refused(table: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_protocol(table)


def test_arguments_override_the_study() -> None:
    study = {"name": "continual", "order": 3, "batch": 64}
    assert read_protocol(None, study) == Protocol("continual", order=3, batch=64)
    assert read_protocol({"order": 1}, study) == Protocol("continual", order=1, batch=64)
    assert read_protocol("continual", study) == Protocol("continual", order=3, batch=64)
    assert read_protocol("mixed", study) == Protocol("mixed")
    assert read_protocol({"batch": 1}) == Protocol("reset", batch=1)


def test_a_hash_stands_for_all_arguments() -> None:
    protocols = [
        Protocol(), Protocol(batch=1), Protocol(rate=1.0), Protocol("continual"), Protocol("continual", order=1),
        Protocol("correlated"), Protocol("correlated", concentration=1.0), Protocol("walk"), Protocol("walk", pace=1),
    ]  # fmt: skip
    assert len({protocol.hash() for protocol in protocols}) == len(protocols)
    assert Protocol("recurring").hash() == Protocol("recurring", rounds=10, order=0).hash()


@pytest.mark.parametrize(
    ("protocol", "names", "said"),
    [
        ("gradual", ["mini", FOG[4]], "levels"),
        ("clean", FOG, "without corruption"),
        ("clean", ["mini"], "with"),
        ("walk", ["mini"], "two corruptions: mini has 0"),
        ("walk", FOG, "mini has 1"),
    ],
)
def test_sets_that_do_not_suit_are_refused(network: str, protocol: Any, names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_worker(network, Protocol(protocol), names)


def test_sets_that_cannot_be_joined_are_refused(network: str) -> None:
    worker = make_worker(network, Protocol("continual"), ["mini", FOG[4]])
    worker._sets[FOG[4]] = make_set(FOG[4], labels=False)
    with pytest.raises(ValueError, match="presence of labels"):
        worker.open("continual/mini")
    worker = make_worker(network, Protocol("mixed"), ["mini", FOG[4]])
    worker._sets["mini"].ordered = True
    with pytest.raises(ValueError, match="mini has a fixed order"):
        worker.open("mixed/mini")


def test_a_network_for_each_set_has_no_place_in_a_stream() -> None:
    sets = (SetSpec("digits"),)
    Plan({"joint": "{set}.safetensors"}, sets, METHODS[:1])
    with pytest.raises(ValueError, match="placeholders"):
        Plan({"joint": "{set}.safetensors"}, sets, METHODS[:1], protocol=Protocol("mixed"))


def test_a_selection_accepts_held_out_sets_only() -> None:
    with pytest.raises(ValueError, match="not held out"):
        Plan({"joint": "x"}, (SetSpec("digits"),), METHODS[:1], selection=True, protocol=Protocol("mixed"))
    names = [f"digits-held-out-c/{name}/5" for name in ("spatter", "saturate")]
    plan = Plan({"joint": "x"}, tuple(map(SetSpec, names)), METHODS, selection=True, protocol=Protocol("walk"))
    assert plan.streams == ("walk/digits-held-out",)


def test_the_uncorrupted_set_is_included_where_it_has_a_use() -> None:
    found = {}
    for name in ("reset", "continual", "clean", "correlated", "mixed"):
        plan = make_plan(checkpoint="x", data=["digits-c"], levels="5", corruptions="fog", protocol=name)
        found[name] = plan.sets[0].name == "digits"
    assert found == {"reset": True, "continual": False, "clean": True, "correlated": True, "mixed": False}
    plan = make_plan(checkpoint="x", data=["digits-c"], levels="5", original=True, protocol="continual")
    assert plan.sets[0].name == "digits"


def test_a_study_has_a_protocol(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('data = "digits-c"\nlevels = "5"\nprotocol = {name = "continual", order = 3}\n')
    assert read_study(file)["protocol"] == {"name": "continual", "order": 3}
    plan = make_plan(file, checkpoint="x", protocol={"batch": 64})
    assert plan.protocol == Protocol("continual", order=3, batch=64)
    file.write_text('protocol = "gradually"\n')
    with pytest.raises(FileError, match="gradually"):
        read_study(file)


@pytest.mark.parametrize(
    "streams",
    [
        {"s": 3},
        {"s": {"sets": {"a": 1}}},
        {"s": {"sets": {"a": -1}, "segments": []}},
        {"s": {"sets": {"a": 1}, "segments": [["b", 1]]}},
        {"s": {"sets": {"a": 1}, "segments": [[["a"], 1]]}},
        {"s": {"sets": [], "segments": [["b", 1]]}},
    ],
)
def test_a_malformed_layout_is_refused(streams: Any) -> None:
    with pytest.raises(ValueError, match="`s"):
        read_layout({"streams": streams}, "s")


def test_the_command(network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "-c", network, "--data", "digits-c", "--levels", "5", "--corruptions", "fog,contrast"]
    words += ["--methods", "fixed,tent", "--limit", "10", "--device", "cpu", "--out", str(tmp_path / "run")]
    options = ["--protocol", "continual", "--order", "3", "--batch", "4"]
    assert cli.run([*words, *options]) == 0
    assert capsys.readouterr().out.count("continual/digits/order-3") == 2
    held = open_run(tmp_path / "run").configuration["protocol"]
    assert {name: held[name] for name in ("name", "order", "batch")} == {"name": "continual", "order": 3, "batch": 4}
    for more, said in (
        (["--protocol", "nonsense"], "continual"),
        (["--batch", "0"], "--batch"),
        (["--batch", "x"], "--batch"),
        (["--rounds", "3"], "rounds"),
        (["--rate", "nan"], "rate"),
    ):
        assert cli.run([*words, *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    assert cli.run([*words, "--protocol", "mixed"]) == 1  # the folder has another protocol
    assert "protocol" in capsys.readouterr().err

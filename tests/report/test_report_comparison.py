"""Methods × protocols: every number against a plain loop over made-up streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_runs import COUNT, SETS, SHARES, Records, configure, draw_records, make_continual, make_reset

from report_runs import make_columns, make_run
from testtime.evaluation import open_run, open_runs, write_summary
from testtime.report.comparison import Comparison, compare_runs
from testtime.report.comparison_tables import make_sheets
from testtime.report.statistics import bootstrap_means, interval_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("runs")
    make_reset(path / "reset")
    make_continual(path / "first", 0, (0, 1))
    make_continual(path / "other", 3)
    return [path / name for name in ("reset", "first", "other")]


@pytest.fixture(scope="module")
def comparison(folders: list[Path]) -> Comparison:
    return compare_runs([open_run(folder) for folder in folders])


def units_of(folders: Sequence[Path], method: str) -> list[Records]:
    return [unit.columns() for folder in folders for unit in open_run(folder).units if unit.method == method]


def test_errors_forgetting_and_flips_are_those_of_a_loop(folders: list[Path], comparison: Comparison) -> None:
    assert [one.title for one in comparison.protocols] == ["reset", "continual, batch 64"]
    score = comparison.protocols[1].scores["tent"]
    wrong = seen = clean_wrong = clean_seen = gained = lost = 0
    for own, base in zip(units_of(folders[1:], "tent"), units_of(folders[1:], "fixed"), strict=True):
        verdicts = zip(own["sample"], own["is_right"], base["is_right"], strict=True)
        for place, (sample, right, was) in enumerate(verdicts):
            if sample < COUNT:
                assert place >= COUNT  # every clean image comes after the first corrupted set
                clean_wrong, clean_seen = clean_wrong + 1 - int(right), clean_seen + 1
                continue
            wrong, seen = wrong + 1 - int(right), seen + 1
            gained, lost = gained + (right > was), lost + (right < was)
    assert score.error == pytest.approx(100 * wrong / seen)
    assert score.clean == pytest.approx(100 * clean_wrong / clean_seen)
    assert (score.answers, score.clean_answers, len(score.errors)) == (2 * COUNT, 60, 3)
    assert (score.to_right, score.to_wrong) == pytest.approx((100 * gained / seen, 100 * lost / seen))
    assert comparison.protocols[1].scores["fixed"].to_right is None


def test_clean_images_before_the_first_corrupted_ones_are_not_forgetting(tmp_path: Path) -> None:
    name = "continual/digits"
    segments = [[SETS[0], 20], [SETS[1], COUNT], [SETS[0], 10]]
    layout = {"sets": dict.fromkeys(SETS[:2], COUNT), "segments": segments}
    samples = np.concatenate([np.arange(20), np.arange(COUNT, 2 * COUNT), np.arange(20, 30)])
    right = np.concatenate([np.zeros(20, bool), np.ones(COUNT, bool), np.arange(10) < 7])
    columns = make_columns(right) | {"sample": samples.astype(np.int32)}
    plan = configure({"name": "continual", "order": 0}, streams=[]) | {"streams": {name: layout}}
    (one,) = compare_runs([make_run(tmp_path / "run", {("fixed", name, 0): columns}, plan)]).protocols
    assert (one.scores["fixed"].error, one.scores["fixed"].clean) == (0, pytest.approx(30))


def test_a_set_on_its_own_has_the_error_of_all_its_images(tmp_path: Path) -> None:
    right = np.arange(20) < 12
    plan = configure({"name": "correlated", "concentration": 0.1})
    (one,) = compare_runs([make_run(tmp_path / "run", {("fixed", "digits", 0): make_columns(right)}, plan)]).protocols
    assert (one.scores["fixed"].error, one.scores["fixed"].clean) == (pytest.approx(40), None)


def test_mixed_sets_have_no_segments_and_clean_images_all_the_same(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).permutation(3 * COUNT)
    columns = draw_records(samples, 0.6, 5)
    layout = {"sets": dict.fromkeys(SETS, COUNT), "segments": []}
    plan = configure({"name": "mixed"}) | {"streams": {"mixed/digits": layout}}
    (one,) = compare_runs([make_run(tmp_path / "run", {("fixed", "mixed/digits", 0): columns}, plan)]).protocols
    clean = columns["sample"] < COUNT
    assert one.scores["fixed"].clean == pytest.approx(100 * (1 - columns["is_right"][clean].mean()))
    assert one.scores["fixed"].error == pytest.approx(100 * (1 - columns["is_right"][~clean].mean()))
    assert one.curves[0].segments == ()


def test_an_image_under_two_corruptions_is_one_observation(tmp_path: Path) -> None:
    right = np.arange(40) % 3 > 0
    units = {("fixed", f"digits-c/{name}/5", seed): make_columns(right) for name in ("fog", "snow") for seed in (0, 1)}
    plan = configure({"name": "reset", "batch": 8})
    (one,) = compare_runs([make_run(tmp_path / "run", units, plan)], seed=3).protocols
    expected = interval_of(bootstrap_means(100 * (1 - right[:, None].astype(float)), seed=3)[:, 0])
    assert one.scores["fixed"].interval == pytest.approx(expected)


def calibrate_by_hand(units: Sequence[Records], probability: str, verdict: str) -> float:
    values = [float(value) for unit in units for value in unit[probability]]
    rights = [int(value) for unit in units for value in unit[verdict]]
    total = 0.0
    for number in range(15):
        inside = [k for k, value in enumerate(values) if min(int(value * 15), 14) == number]
        if inside:
            confidence = sum(values[k] for k in inside) / len(inside)
            accuracy = sum(rights[k] for k in inside) / len(inside)
            total += len(inside) / len(values) * abs(confidence - accuracy)
    return 100 * total


def test_calibration_is_that_of_a_loop(folders: list[Path], comparison: Comparison) -> None:
    reset, continual = comparison.protocols
    own = units_of(folders[:1], "eata")  # one repetition: all sets together
    assert reset.scores["eata"].ece_after == pytest.approx(calibrate_by_hand(own, "probability", "is_right"), abs=1e-3)
    runs = units_of(folders[1:], "eata")  # three repetitions
    expected = [calibrate_by_hand([one], "probability_before", "was_right") for one in runs]
    assert continual.scores["eata"].ece_before == pytest.approx(np.mean(expected), abs=1e-3)


def test_units_of_earlier_versions_have_no_calibration_and_all_else(tmp_path: Path) -> None:
    columns = draw_records(np.arange(COUNT), 0.5, 1)
    older = {name: column for name, column in columns.items() if not name.startswith("probability")}
    plan = configure({"name": "reset", "batch": 8})
    units = {("fixed", SETS[1], 0): columns, ("fixed", SETS[2], 0): older}
    run = make_run(tmp_path / "run", units, plan)
    (one,) = compare_runs([run]).protocols
    assert one.scores["fixed"].ece_after is None
    assert 0 < one.scores["fixed"].error < 100
    assert "ECE after" not in make_sheets(compare_runs([run]))[0].columns


def test_ranks_and_changes_of_order_by_hand(tmp_path: Path) -> None:
    wrong = {"fixed": (10, 10, 10), "tent": (5, 12, 5), "eata": (5, 6, 8)}
    units = {
        (method, SETS[1], seed): make_columns(np.arange(20) >= count)
        for method, counts in wrong.items()
        for seed, count in enumerate(counts)
    }
    run = make_run(tmp_path / "run", units, configure({"name": "reset", "batch": 8}))
    (one,) = compare_runs([run]).protocols
    # Seeds 0, 1, 2: tent and eata share ranks 1 and 2; eata, fixed, tent; tent, eata, fixed.
    assert {method: score.rank for method, score in one.scores.items()} == pytest.approx(
        {"fixed": 8 / 3, "tent": (1.5 + 3 + 1) / 3, "eata": (1.5 + 1 + 2) / 3}
    )
    assert one.swaps("fixed", "tent") == one.swaps("tent", "fixed") == (1, 3)
    assert one.swaps("tent", "eata") == (1, 3)
    assert one.swaps("fixed", "eata") == (0, 3)
    assert one.scores["tent"].spread == pytest.approx(np.std([25, 60, 25], ddof=1))


def test_collapses_are_counted_in_streams_that_are_long_enough(tmp_path: Path) -> None:
    labels = np.arange(600) % 10
    columns = make_columns(np.ones(600, bool), labels=labels)
    collapsed = columns | {"prediction": np.where(np.arange(600) < 250, 4, labels).astype(np.int32)}
    short = make_columns(np.ones(20, bool)) | {"prediction": np.zeros(20, np.int32)}
    plan = configure({"name": "reset", "batch": 8})
    units = {("fixed", SETS[1], 0): columns, ("tent", SETS[1], 0): collapsed}
    (one,) = compare_runs([make_run(tmp_path / "long", units, plan)]).protocols
    found = {method: (score.collapses, score.collapsed, score.streams) for method, score in one.scores.items()}
    assert found == {"fixed": (0, 0, 1), "tent": (1, 1, 1)}
    (few,) = compare_runs([make_run(tmp_path / "short", {("tent", SETS[1], 0): short}, plan)]).protocols
    assert few.scores["tent"].collapses is None


def test_the_curve_along_a_stream_is_the_error_of_its_blocks(folders: list[Path], comparison: Comparison) -> None:
    first, other = comparison.protocols[1].curves
    assert (first.name, other.name) == ("continual/digits", "continual/digits/order-3")
    assert first.segments == (("digits-c/fog/5", 30), ("digits", 10), ("digits-c/snow/5", 30), ("digits", 10))
    (records,) = units_of(folders[2:], "tent")
    size = other.seen[0]
    assert other.seen.tolist() == list(range(size, 81, size))
    for k, end in enumerate(other.seen):
        block = records["is_right"][end - size : end]
        assert other.percent["tent"][k] == pytest.approx(100 * (1 - block.mean()))


def test_costs_are_read_if_they_were_recorded(tmp_path: Path) -> None:
    from testtime.evaluation import Unit
    from testtime.evaluation.units import prepare_folder, write_unit

    prepare_folder(tmp_path / "run", configure({"name": "reset", "batch": 8}), {})
    for seed, (seconds, peak) in enumerate(((2.0, 3 << 30), (4.0, 1 << 30))):
        unit, about = Unit.of("tent", SETS[1], seed), {"device": "cuda <x>", "peak_bytes": peak, "state_bytes": 5 << 20}
        write_unit(tmp_path / "run", unit, make_columns([True] * 10), seconds, together=2, **about)
    comparison = compare_runs([open_run(tmp_path / "run")])
    score = comparison.protocols[0].scores["tent"]
    assert (score.milliseconds, score.together, score.peak_bytes) == (pytest.approx(300), 2, 3 << 30)
    (_, entries), *_ = make_sheets(comparison)[0].rows
    assert [entry.text for entry in entries[-3:]] == ["300", "3 GiB", "5 MiB"]


def test_a_summary_gives_the_same_comparison(folders: list[Path], comparison: Comparison, tmp_path: Path) -> None:
    for folder in folders:
        write_summary(tmp_path / f"{folder.name}.json", [open_run(folder)])
    again = compare_runs([run for folder in folders for run in open_runs(tmp_path / f"{folder.name}.json")])
    for ours, theirs in zip(comparison.protocols, again.protocols, strict=True):
        assert ours.scores == theirs.scores
        for one, two in zip(ours.curves, theirs.curves, strict=True):
            assert all(np.array_equal(one.percent[method], two.percent[method]) for method in SHARES)
    assert make_sheets(again) == make_sheets(comparison)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("calibration", {"before": {}, "after": {}}),
        ("calibration", {"after": 1}),
        ("blocks", {"size": 0, "right": []}),
        ("blocks", {"size": 1, "right": [1]}),
        ("blocks", {"size": 4, "right": [9] * 20}),
        ("collapses", [1, 2]),
        ("collapses", "many"),
        ("segments", [1e9]),
        ("segments", [1000]),
    ],
)
def test_damaged_details_are_refused_with_the_file(folders: list[Path], tmp_path: Path, entry: str, value: Any) -> None:
    write_summary(tmp_path / "bad.json", [open_run(folders[2])])
    held = json.loads((tmp_path / "bad.json").read_text())
    held["runs"][0]["units"][0]["details"][entry] = value
    (tmp_path / "bad.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"bad\.json: a damaged summary"):
        open_runs(tmp_path / "bad.json")


def test_summaries_of_earlier_versions_have_all_but_the_details(folders: list[Path], tmp_path: Path) -> None:
    write_summary(tmp_path / "old.json", [open_run(folders[2])])
    held = json.loads((tmp_path / "old.json").read_text())
    for unit in held["runs"][0]["units"]:
        del unit["details"]
    (tmp_path / "old.json").write_text(json.dumps(held))
    (one,) = compare_runs(open_runs(tmp_path / "old.json")).protocols
    score = one.scores["tent"]
    assert (score.ece_after, score.collapses, score.clean, one.curves) == (None, None, None, ())
    assert score.error == compare_runs([open_run(folders[2])]).protocols[0].scores["tent"].error

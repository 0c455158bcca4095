"""The makers of the documents' tables: made-up numbers in, the right cells out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate import build, comparison, drift, errors, imagenet, methods, poison, service, speed, streams, variants
from generate.result_files import by_level, compare, read_past, time_methods

from report_runs import make_columns, make_run
from testtime.evaluation import Run, make_plan, run_plan, write_summary
from testtime.report.results import Results, collect
from testtime.report.sources import ResultsError

COUNT = 50  # images of each set: one wrong answer is two percent
SHIFTS = ("gaussian_noise", "fog", "brightness")
LEVEL_5 = ("cifar10", *(f"cifar10-c/{name}/5" for name in SHIFTS))
EVERY = ("cifar10", *(f"cifar10-c/{name}/{level}" for level in range(1, 6) for name in SHIFTS))


def make(
    path: Path,
    wrong: dict[str, list[int]],
    sets: tuple[str, ...] = LEVEL_5,
    seconds: float = 2.0,
    seeds: tuple[int, ...] = (0,),
    **settings: Any,
) -> Run:
    """A run in which each method gets the first so many images of each set wrong."""
    methods = {
        name: {"mode": "fixed" if name == "fixed" else "online", "network": "joint", "settings": settings}
        for name in wrong
    }
    units = {}
    for method, counts in wrong.items():
        for name, count in zip(sets, counts, strict=True):
            for seed in seeds:
                units[method, name, seed] = make_columns(np.arange(COUNT) >= count + seed)
                units[method, name, seed]["adapted"][:] = method != "fixed"
    configuration = {"methods": methods, "networks": {"joint": {"norm": "group"}}, "shuffle": True}
    return make_run(path, units, configuration, seconds)


def row(text: str, title: str) -> list[str]:
    lines = [[cell.strip(" *\\") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(cells[1:] for cells in lines if cells[0] == title)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    fixed, online = [4] + [20, 10, 5] * 5, [4] + [10, 12, 4] + [10, 5, 4] * 4
    main = make(tmp_path / "main", {"fixed": fixed, "online": online}, EVERY)
    return collect([main, make(tmp_path / "standard", {"episodic": [4, 18, 8, 5]})])


def test_means_and_differences(results: Results, tmp_path: Path) -> None:
    means = errors.format_means(results)
    assert row(means, "fixed (JT)") == ["8.0"] + ["23.3"] * 5
    assert row(means, "episodic (TTT)") == ["8.0", *[""] * 4, "20.7"]
    # The paper has 8.1 on the original images, and 49.4, 27.5 and 12.6 at level 5.
    far = collect([make(tmp_path / "far", {"fixed": [4] + [20, 10, 25] * 5}, EVERY)])
    differences = row(errors.format_differences(far), "JT")
    assert differences[0] == "−0.1"
    assert differences[5:] == ["+6.9", "1 of 4", "brightness +37.4", "gaussian noise −9.4"]


def test_expected_errors(results: Results) -> None:
    shown = errors.format_expected({"`net`": results.tables[0]}, ("fixed", "best")).splitlines()
    assert shown[2:] == ["| `net` | original images | 8.0 |  |", "|  | mean of 15 corruptions, level 5 | 23.3 |  |"]


PAST = {
    "best": [2, *[9, 5, 4], *[3, 3, 2]],
    "fixed-mirrored": [3, *[20, 15, 9], *[5, 4, 4]],
}
"""Wrong answers on the original images, at level 5 and at level 1."""
PARTS = {
    "without-original": [3, *[10, 6, 5], *[4, 3, 3]],
    "without-both": [3, *[12, 7, 5], *[4, 4, 4]],
    "mirrored": [3, *[11, 6, 5], *[4, 4, 3]],
    "fixed-mirrored": [3, *[20, 15, 9], *[5, 4, 4]],
}


def test_the_parts_of_best_on_the_test_sets(tmp_path: Path) -> None:
    sets = ("cifar10", *(f"cifar10-c/{name}/{level}" for level in (5, 1) for name in SHIFTS))
    write_summary(tmp_path / "past-joint.json", [make(tmp_path / "run", PAST, sets)])
    write_summary(tmp_path / "past-joint-parts.json", [make(tmp_path / "parts", PARTS, sets)])
    main = collect([make(tmp_path / "main", {"fixed": [4, 25, 16, 9]}, LEVEL_5)])
    shown = methods.format_ablation({"net": (read_past(tmp_path)["joint"][0], main)})
    assert shown.splitlines()[0] == "| error in % | net, level 5 | net, level 1 | net, original |"
    assert row(shown, "`fixed`") == ["33.33", "", "8.00"]
    assert row(shown, "`online`") == ["", "", ""]
    assert row(shown, "`without-original`") == ["14.00", "6.67", "6.00"]
    assert row(shown, "`without-both`") == ["16.00", "8.00", "6.00"]
    assert row(shown, "`best`") == ["12.00", "5.33", "4.00"]
    assert row(shown, "`best` minus `fixed-mirrored`") == ["−17.33", "−3.33", "−2.00"]
    # One of 50 images differs on the original set: none to three of them in 95% of the samples.
    assert row(shown, "95%, paired")[2] == "−6.00 to 0.00"
    parts = build.make_rehearsal(tmp_path)
    assert row(parts["test sets"], "`best`") == ["12.00", "5.33", "4.00"]
    levels = read_past(tmp_path)["joint"][1]
    assert row(parts["test sets"], "`online`")[1] == f"{levels.tables[-1].rows['online']['mean'].error:.2f}"
    assert "past-joint.json" in parts["sources of the test sets"]
    assert "past-joint-parts.json" in parts["sources of the test sets"]
    assert "levels.json" in parts["sources of the test sets"]


@pytest.mark.parametrize(("name", "line"), [("robust", -3), ("robust, width 2", -1)])
def test_the_readme_has_both_files_of_a_robust_network(name: str, line: int) -> None:
    own, main = (by_level(one)[5].rows for one in read_past()[name])
    shown = build.make_readme()["expected"].splitlines()[line].split("|")[3:-1]
    rows = main["fixed"], None, main["online"], own["mirrored"], own["best"]
    assert [cell.strip() for cell in shown] == ["" if one is None else f"{one['mean'].error:.1f}" for one in rows]


def test_a_method_that_was_called_best_is_named_so(tmp_path: Path) -> None:
    old, new = (
        [make(tmp_path / f"{one}", {"fixed": [0], "best": [0]}, LEVEL_5[:1], **{one: 1})] for one in ("lr", "method")
    )
    assert row(variants.format_costs(old), "`best` of 0.1")[0] == "50"
    assert row(variants.format_costs(new), "`best`")[0] == "50"


def test_where_online_is_above_fixed(results: Results) -> None:
    shown = streams.format_harm(results)
    assert row(shown, "fog 1")[:3] == ["20.00", "24.00", "+4.00"]
    assert row(shown, "fog 1")[-1] == "+0.1"
    assert row(shown, "mean of these")[2] == "+4.00"
    assert len(shown.splitlines()) == 4


def test_orders(tmp_path: Path) -> None:
    sets = ("cifar10", "cifar10-c/fog/1", "cifar10-c/snow/1")
    one = make(tmp_path / "one", {"fixed": [4, 10, 10], "online": [5, 12, 13]}, sets, seeds=(0, 1))
    shown = streams.format_orders(collect([one]).tables[0], {"ours": one})
    assert row(shown, "ours") == ["+2.00", "+6.00", "+4.00", "+4.00", "+4.00", "+4.00"]
    assert row(shown, "the paper's, one order")[0] == "+0.10"


def test_cheaper_methods(results: Results, tmp_path: Path) -> None:
    fast = make(tmp_path / "fast", {"fast": [4, 19, 9, 5]})
    timed = [
        make(tmp_path / f"timed-{name}", {name: [0]}, LEVEL_5[1:2], seconds)
        for name, seconds in (("fixed", 1.0), ("episodic", 10.0), ("fast", 2.5))
    ]
    shown = variants.format_cheaper(collect([*results.runs, fast]), timed, ["fast"])
    # fixed has 35 wrong answers of 150, episodic 31, fast 33.
    cells = row(shown, "`fast`")
    assert cells[:3] == ["8.0", "22.00", "+1.33"]
    assert cells[4:] == ["50", "100", "50.0", "0.250"]
    assert row(variants.format_costs(timed), "`fast`") == ["50", "100", "50.0", "2.5"]
    other = make(tmp_path / "other", {"fast": [4, 19, 9, 5]}, lr=0.1)
    with pytest.raises(ResultsError, match="fast"):
        time_methods(timed, [other])


def test_grid(tmp_path: Path) -> None:
    wrong = {"fixed": [20, 10, 5], "steps-1-copies-8": [19, 10, 5], "steps-10-copies-32": [10, 6, 4]}
    run = make(tmp_path / "run", wrong, LEVEL_5[1:])
    shown = variants.format_grid(collect([run]), [run])
    assert shown.splitlines()[0] == "| mean error in %: steps | 8 copies | 32 copies |"
    assert row(shown, "0 (`fixed`)") == ["23.33", "23.33"]
    assert row(shown, "10") == ["", "13.33"]


def test_paired_differences_by_hand(results: Results) -> None:
    gap, ends = compare(results, "episodic", "fixed", LEVEL_5[1:])
    assert gap == pytest.approx(-100 * 4 / 150)
    assert ends.low < gap < ends.high <= 0
    same, nothing = compare(results, "fixed", "fixed", LEVEL_5)
    assert (same, *nothing) == (0, 0, 0)


def measured(name: str, rate: float, peak: float | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "network": "resnet18", "images_per_s": rate, "peak_mib": peak, **more}


TRAINING = {
    "rows": [
        measured("training, fed from the cache", 9999.0, size=128),
        measured("decode JPEGs into the packed cache", 2000.0),
        measured("training, fed from the cache", 3600.0),
        measured("look at images that the threshold passes over", 5000.0),
    ]
}
ENGINE = {
    "rows": [
        measured("one online stream, bf16", 20.0, 700.0),
        measured("4 streams, bf16", 50.0, 2048.0),
        measured("16 streams, bf16", 80.0, 2048.0 + 12 * 512),
        measured("64 streams, bf16", 400.0, 2048.0 + 60 * 512),
        measured("4 episodes of 10 steps, bf16", 5.0),
        measured("16 episodes of 10 steps, bf16", 8.0),
    ]
}


def test_the_costs_of_imagenet_are_the_divisions_shown() -> None:
    training, evaluation = imagenet.format_training(TRAINING), imagenet.format_evaluation(ENGINE, TRAINING)
    assert row(training, "decode, once")[:2] == ["1,281,167 / 2,000.0", "11 min"]  # 640.6 s
    assert row(training, "an epoch") == ["1,281,167 / 3,600.0", "6 min", "an eighth", "44 s"]  # 355.9 s, 44.5 s
    assert row(evaluation, "standard, bf16") == ["800,000 / 8.0", "27.8 h", "100,000 / 8.0", "3.5 h"]
    # 16 sets are 16 streams; on eight GPUs two sets each, one after the other.
    assert row(evaluation, "online, bf16") == ["800,000 / 80.0", "2.8 h", "100,000 / 20.0", "83 min"]
    gated = ["800,000 / 5,000.0 + 0.2 × 800,000 / 8.0", "5.6 h", "100,000 / 5,000.0 + 0.2 × 100,000 / 8.0", "42 min"]
    assert row(evaluation, "standard, bf16, threshold") == gated  # 160 s + 20,000 s; 20 s + 2,500 s
    assert row(imagenet.format_memory(ENGINE), "bf16")[1] == "0.50 GiB"
    assert row(imagenet.format_disk(), "training set")[1] == "251.9 GB"


def test_of_many_at_once_64_the_most_and_the_fastest_are_shown() -> None:
    rates = {4: 1500.0, 16: 2000.0, 64: 1000.0, 256: 1000.0}
    rows = [
        measured(f"{count} streams", 12.0, 321.0, steps_per_s=rate, times_naive=40.0) for count, rate in rates.items()
    ]
    shown = speed.format_engine({"rows": rows}, "resnet18")
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == [
        "| 16 streams",
        "| 64 streams",
        "| 256 streams",
    ]
    assert row(shown, "16 streams") == ["2,000.0", "12.0", "40.00", "321"]


def test_joint_training() -> None:
    rows = [
        {"name": "ordinary loop, 8 workers, bf16", "precision": "bf16", "images_per_s": 10.0, "times_ordinary": 1.0},
        {"name": "t", "precision": "bf16", "images_per_s": 100.0, "times_ordinary": 10.0, "seeds": 1},
        {"name": "t", "precision": "tf32", "images_per_s": 150.0, "times_ordinary": 15.0, "seeds": 3},
    ]
    shown = speed.format_joint_training({"rows": rows})
    assert row(shown, "bf16") == ["10", "100 (10.0 times)", ""]
    assert row(shown, "tf32") == ["", "", "150 (15.0 times)"]


def test_familiar_images_are_counted_by_class_and_the_unknown_ones_together() -> None:
    rows = [
        {"set": "horn", "known": False, "images": 40, "marked": 10, "unmarked_above_90_percent": 20},
        {"set": "golf", "known": False, "images": 60, "marked": 40, "unmarked_above_90_percent": 5},
        {"set": "dog", "known": True, "images": 8, "marked": 1, "unmarked_above_90_percent": 7},
    ]
    lines = errors.format_familiar({"rows": rows}).splitlines()
    assert lines[2] == "| dog | yes | 8 | 12.5% | 87.5% |"
    assert lines[3] == "| horn | no | 40 | 25.0% | 50.0% |"
    assert lines[-1].endswith("| no | 100 | 50.0% | 25.0% |")


def test_the_service_is_compared_with_the_bare_step() -> None:
    row = {"streams": 16, "images": 1, "requests_per_s": 1234.56, "images_per_s": 1234.56, "p50_ms": 12.34}
    row |= {"p95_ms": 20.0, "p99_ms": 30.06, "share_of_bare": 0.804}
    hardware = {"device": "cpu", "processor": "a processor", "threads": 2}
    held = {
        "rows": [row],
        "memory": {"resident_bytes": 2048, "stored_bytes": 5120.0},
        "machine": {"hardware": hardware},
    }
    held |= {"evictions": {"evict_ms": 0.5, "load_ms": 2.0, "write_ms": 3.04}, "command": "python x", "cores": 2}
    held |= {"network": "digits", "method": "ttt"}
    text = service.format_measured(held, Path("results/serve-cpu.json"))
    assert "| 16 | 1 | 1,234.6 | 1,234.6 | 12.3 | 20.0 | 30.1 | 80% |" in text
    assert "| 2 KiB | 5 KiB | 0.5 ms | 2.0 ms | 3.0 ms |" in text
    assert "a processor, 2 threads" in text
    assert all(line.startswith("|") for line in text.splitlines() if line)
    assert service.format_service(Path("results/missing.json")) == ""


def test_gaps_along_streams_are_of_corrupted_and_of_original_images(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": ["digits-c"], "levels": "5", "corruptions": "contrast,fog", "limit": 20}
    plan = make_plan(checkpoint="digits-resnet8-gn-joint", methods="fixed,tent", protocol="clean", **given)
    run = run_plan(plan, tmp_path / "run")
    lines = streams.format_gaps({"back": run}, "tent", "fixed").splitlines()[2:]
    shifted, original = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert shifted[:3] == ["back", "corrupted", "40"]
    assert original[:3] == ["back", "original", "20"]
    wrong = {unit.method: 60 - unit.about["counts"]["is_right"] for unit in run.units}
    for place, method in ((3, "tent"), (4, "fixed")):
        assert float(shifted[place]) * 0.4 + float(original[place]) * 0.2 == pytest.approx(wrong[method], abs=0.02)
    answers = streams.format_answers({"back": run}, {"tent": "TENT", "fixed": "`fixed`"}).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in answers] == [shifted[:5], original[:5]]
    difference = float(shifted[5].replace("−", "-"))
    assert difference == pytest.approx(float(shifted[3]) - float(shifted[4]), abs=0.011)


def test_the_comparison_joins_files_of_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(method: str, error: float, collapsed: int = 0, clean: float | None = None) -> dict[str, Any]:
        flips = {"to_right": 3.0, "to_wrong": 1.0} if method != "fixed" else {"to_right": None, "to_wrong": None}
        shown = {"interval": [error - 1, error + 2], "clean": clean, "collapsed": collapsed, "ece_after": 5.0}
        return {"method": method, "error": error, "state_bytes": 2048, **shown, **flips}

    held = {
        "gn-reset.json": [score("fixed", 30.0, 1, 7.0), score("tent", 20.0, 2, 8.0)],
        "gn-reset-single.json": [score("online", 10.0)],
        "gn-reset-guarded.json": [score("tent-guarded", 18.0, 2)],
        "gn-batch-1.json": [score("tent", 80.0)],
    }
    for name, rows in held.items():
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(comparison, "ROOT", tmp_path)
    monkeypatch.setattr(comparison, "FOLDER", Path())
    monkeypatch.setattr(comparison, "read_file", lambda file: json.loads((tmp_path / file).read_text()))
    assert list(comparison.find_files()) == ["gn"]
    shown = comparison.format_errors("gn", comparison.TITLES)
    assert shown.splitlines()[0].split("|")[2:-1] == [" reset ", " batch 1 "]
    assert row(comparison.format_errors("gn", comparison.STREAMS), "`tent`") == ["80.0 ± 1.5"]
    assert row(shown, "`tent`") == ["20.0 ± 1.5 / 8.0 ‡", "80.0 ± 1.5"]
    assert row(shown, "`online`") == ["10.0 ± 1.5", ""]
    assert row(comparison.format_guards(), "`tent`") == ["20.0 ± 1.5 / 8.0 ‡", "18.0 ± 1.5 ‡"]
    costs = comparison.format_costs({"rows": [{"method": "ttt", "ms_per_image": 2.0}]})
    assert row(costs, "`online`") == ["2.00", "2", "5.0", "3.0 / 1.0"]
    assert row(costs, "`fixed`") == ["", "2", "5.0", ""]


def test_drift_and_gain_by_level() -> None:
    found = [("digits", 1.0, -0.3), ("digits-c/fog/1", 1.2, 1.0)]
    found += [(f"digits-c/{name}/{level}", 2.0 * level, 2.0) for name in ("fog", "snow") for level in (2, 3, 4, 5)]
    rows = [{"set": name, "drift": value, "gain": gain} for name, value, gain in found]
    drifts, gains = (line.split("|")[3:-1] for line in drift.format_levels({"net": {"rows": rows}}).splitlines()[2:])
    assert [cell.strip() for cell in drifts] == ["1.00", "1.20", "4.00", "6.00", "8.00", "10.00"]
    assert [cell.strip() for cell in gains[:3]] == ["−0.30", "+1.00", "+2.00"]


def test_what_hostile_images_cost() -> None:
    def line(guard: str, kind: str, fraction: float, thirds: list[float], after: int | None) -> dict[str, Any]:
        about = {"method": "rehearsal", "guard": guard, "kind": kind, "fraction": fraction, "recovered_after": after}
        return {**about, "error": sum(thirds) / 3, "thirds": thirds}

    rows = [
        line("rise", "none", 0.0, [0.3, 0.2, 0.1], 0),
        line("rise", "random", 0.1, [0.3, 0.5, 0.1], 7),
        line("rise", "constant", 0.1, [0.3, 0.5, 0.4], None),
        line("guard", "none", 0.0, [0.3, 0.2, 0.13], 0),
        line("guard", "random", 0.1, [0.3, 0.23, 0.13], 3),
        line("guard", "constant", 0.1, [0.3, 0.2, 0.13], 0),
    ]
    held = {"results": {"cifar10": rows}}
    shown = poison.format_kinds(held, 0.1)
    assert shown.splitlines()[0] == "| error in %, 10% hostile | none | random | constant |"
    assert row(shown, "`best`") == ["20.0", "+10.00", "+20.00"]
    assert row(shown, "`best`, guarded") == ["21.0", "+1.00", "0.00"]
    shown = poison.format_shares(held)
    assert row(shown, "`best`") == ["+15.00", "never"]
    assert row(shown, "`best`, guarded") == ["+0.50", "3"]

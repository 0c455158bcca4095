"""Times in the document of results: those of runs made for them, beside errors of other runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from report_files import LEVEL_5, SHIFTS, describe, make_costs, make_file, make_main, read, rows_of, said
from testtime.report.committed import ROWS
from testtime.report.finding_choices import _tell_lower, tell_best
from testtime.report.finding_variants import tell_costs, tell_short
from testtime.report.further import FILES, find_costs
from testtime.report.sources import ResultsError
from testtime.runs import open_run
from testtime.runs.summary import write_summary


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_main(tmp_path)
    return tmp_path


def test_what_an_image_costs(root: Path) -> None:
    few = describe("few", steps=1, precision="fp32")
    make_file(root, FILES["fast"][0], {"fast": [4, 19, 9, 5]})
    make_file(root, FILES["costs"][0], {"fixed": [4, 20]}, LEVEL_5[:2], seconds=0.5)
    make_file(root, Path("results/few.json"), {"few": [18]}, LEVEL_5[1:2], {"few": few}, images=8, seconds=2.0)
    runs = [open_run(root / "folders" / name) for name in (FILES["costs"][0].with_suffix(""), "results/few")]
    write_summary(root / FILES["costs"][0], runs)
    found = read(root)
    told = tell_costs(found)
    # A second for 100 images, two for 8.
    assert rows_of(told)[2:] == [["`fixed`", "100", "0", "10.0", "1.0"], ["`few`", "8", "100", "250.0", "25.0"]]
    assert "Some CPU <fast>, 1 thread, fp32, nothing else running; the first images of `cifar10` and" in said(told)
    assert "The runs of [`fast.json`](../results/cifar10/fast.json) shared their GPU with others" in said(told)
    assert told.count("testtime eval") == 2
    assert find_costs(found.parts, found.results, ["fixed"]) == {"fixed": 0.01}
    assert find_costs(found.parts, found.results, ["fixed", "online"]) is None


def test_the_same_settings_measured_again_tell_how_sure_times_are(root: Path) -> None:
    methods = {"one": describe("one", lr=0.002), "two": describe("two", lr=0.002), "other": describe("other", lr=0.01)}
    make_costs(root, {"fixed": 1.0, "one": 2.0, "other": 9.0}, methods)
    assert "measured again" not in tell_costs(read(root))
    make_costs(root, {"fixed": 1.0, "one": 2.0, "other": 9.0, "two": 2.5}, methods)
    twice = "The same settings, measured again or under two names (`one` and `two`), differ by up to"
    assert f"{twice} 25%: less than that says little." in said(tell_costs(read(root)))
    make_file(root, Path("results/again.json"), {"other": [0]}, LEVEL_5[1:2], methods, seconds=12.0)
    folders = [root / "folders" / name for name in (FILES["costs"][0].with_suffix(""), "results/again")]
    write_summary(root / FILES["costs"][0], [open_run(folder) for folder in folders])
    told = tell_costs(read(root))
    assert f"{twice} 33%" in said(told)
    assert rows_of(told)[-1] == ["`other`", "100", "100", "210.0", "10.5"]


def test_times_of_another_method_of_the_same_name_are_not_taken(root: Path) -> None:
    make_file(root, FILES["fast"][0], {"fast": [4, 19, 9, 5]}, methods={"fast": describe("fast", steps=1)})
    timed = {"fixed": 1.0, "episodic": 10.0, "fast": 2.0}
    make_costs(root, timed, {"fast": describe("fast", steps=1, precision="fp32")})
    assert "× episodic" in tell_short(read(root))
    make_costs(root, timed, {"fast": describe("fast", steps=2)})
    with pytest.raises(ResultsError, match=r"costs\.json: its fast has other settings than that of the results"):
        tell_short(read(root))


def test_times_need_those_of_fixed(root: Path) -> None:
    make_costs(root, {"online": 1.0}, {})
    with pytest.raises(ResultsError, match=r"costs\.json: fixed was not timed"):
        read(root)


@pytest.mark.parametrize(("wrong", "gap"), [((9, 5, 4), "0.67"), ((10, 5, 4), None)])
def test_the_lowest_candidate_is_told_beside_the_one_that_was_taken(
    root: Path, wrong: tuple[int, ...], gap: str | None
) -> None:
    settings = describe("best", copies=32, mirrored=True) | {"mode": "online"}
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods={"best": settings})
    larger = describe("larger", copies=64, mirrored=True) | {"mode": "online"}
    level_3 = [f"cifar10-c/{name}/3" for name in SHIFTS]
    methods = {"usual": settings, "larger": larger}
    make_file(root, FILES["tuning"][0], {"usual": (10, 5, 4), "larger": wrong}, level_3, methods)
    if gap is None:
        assert "Taken: `usual`, the lowest of all. [`tuning.json`]" in said(tell_best(read(root)))
        return
    lower = f"Taken: `usual`. The lowest, `larger`, is {gap} points lower, with `copies` 64 instead of 32"
    assert f"{lower}. [`tuning.json`]" in said(tell_best(read(root)))
    make_costs(root, {"fixed": 1.0, "usual": 2.0, "larger": 3.0}, methods)
    assert f"{lower}, at 1.50 times the time. Times: " in said(tell_best(read(root)))


def test_the_rule_is_told_where_the_lowest_is_hardly_lower() -> None:
    settings = {"usual": {"settings": {"copies": 32}}, "larger": {"settings": {"copies": 64}}}
    hardly = _tell_lower("larger", "usual", {"larger": 13.70, "usual": 13.73}, settings, None)
    assert hardly == (
        ". The lowest, `larger`, is 0.03 points lower, with `copies` 64 instead of 32. A costlier candidate had to be "
        "better by 0.1 points."
    )
    assert "costlier" not in _tell_lower("larger", "usual", {"larger": 13.5, "usual": 13.73}, settings, None)

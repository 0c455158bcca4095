"""From runs to tables: which numbers stand where, what they are, and what cannot be reported."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
from protocol_runs import make_continual

from report_runs import METHODS, make_benchmark, make_columns, make_run
from testtime.corruptions import CORRUPTIONS
from testtime.evaluation import open_run
from testtime.evaluation.units import RunError
from testtime.report.results import MEAN, Cell, Table, collect
from testtime.report.run_tables import as_csv, difference, explain, latex, markdown, terminal
from testtime.report.sources import ResultsError, compare_methods
from testtime.report.statistics import Interval, sign_test

RIGHT, WRONG = True, False


def test_errors_flips_and_p_values_by_hand(tmp_path: Path) -> None:
    fixed = [RIGHT] * 4 + [WRONG] * 6
    online = [WRONG] + [RIGHT] * 9
    order = np.array([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    run = make_run(
        tmp_path / "run",
        {("fixed", "digits", 0): make_columns(fixed), ("online", "digits", 0): make_columns(online, order=order)},
    )
    (table,) = collect([run]).tables
    assert table.title == "Test sets"
    assert table.columns == ("digits",)
    base, cell = table.rows["fixed"]["digits"], table.rows["online"]["digits"]
    assert (base.error, cell.error) == pytest.approx((60, 10))
    assert base.p_value is None
    assert (cell.to_right, cell.to_wrong) == (6, 1)
    assert cell.p_value == pytest.approx(sign_test(6, 1)) == pytest.approx(2 * 8 / 128)
    assert (cell.images, cell.repetitions, cell.spread) == (10, 1, None)
    assert cell.significance == ""
    # Wilson's interval of 1 in 10, where both ends have a score of 1.96 under their own fraction.
    for end in cell.interval:
        assert abs(0.1 - end / 100) == pytest.approx(1.959964 * (end / 100 * (1 - end / 100) / 10) ** 0.5, rel=1e-6)
    assert cell.value("accuracy") == pytest.approx(90)
    assert cell.ends("accuracy") == pytest.approx((100 - cell.interval.high, 100 - cell.interval.low))


def test_marks_say_better_worse_or_nothing() -> None:
    cell = Cell(10, Interval(9, 11), None, 100, 1, 0.01, 20, 5)
    assert cell.significance == "*"
    assert Cell(10, Interval(9, 11), None, 100, 1, 0.01, 5, 20).significance == "†"
    assert Cell(10, Interval(9, 11), None, 100, 1, 0.06, 20, 5).significance == ""
    assert Cell(10, Interval(9, 11), None, 100, 1).significance == ""


def test_tables_are_laid_out_as_the_paper_prints_them(tmp_path: Path) -> None:
    run = make_benchmark(tmp_path / "run", count=40, family="cifar10", levels=(3, 5))
    results = collect([run])
    assert [table.title for table in results.tables] == [
        "cifar10-c, level 5",
        "cifar10-c, level 3",
        "cifar10-gradual, noise growing from level 1 to 5",
    ]
    top = results.tables[0]
    assert top.columns == ("original", *CORRUPTIONS, MEAN)
    assert tuple(top.rows) == ("plain", "fixed", "episodic", "online")
    assert results.tables[2].columns == ("gaussian_noise", "shot_noise", "impulse_noise", MEAN)
    for row in top.rows.values():
        assert row[MEAN].error == pytest.approx(np.mean([row[name].error for name in CORRUPTIONS]))
        assert row[MEAN].images == 15 * 40
    assert top.paper_value("online", MEAN, "error") == pytest.approx(20.4)
    assert results.tables[1].paper_value("alp", "fog", "error") == 30.1
    assert results.seconds["online"] == pytest.approx(2.0 / 40)


def test_the_interval_of_the_mean_keeps_images_together(tmp_path: Path) -> None:
    right = np.arange(60) % 3 > 0
    same = {("fixed", f"digits-c/{name}/1", 0): make_columns(right) for name in ("fog", "snow")}
    table = collect([make_run(tmp_path / "run", same)]).tables[0]
    row = table.rows["fixed"]
    # The two sets agree on every image, so their mean is as uncertain as one of them.
    assert row[MEAN].interval == pytest.approx(row["fog"].interval)


def test_one_image_under_many_corruptions_is_one_observation(tmp_path: Path) -> None:
    fixed, online = np.zeros(8, bool), np.arange(8) < 4
    units = {}
    for name in ("fog", "frost", "snow"):
        units["fixed", f"digits-c/{name}/2", 0] = make_columns(fixed)
        units["online", f"digits-c/{name}/2", 0] = make_columns(online)
    cell = collect([make_run(tmp_path / "run", units)]).tables[0].rows["online"][MEAN]
    assert (cell.to_right, cell.to_wrong) == (4, 0)
    assert cell.p_value == pytest.approx(4 * 2 / 16)  # four tests in the table, Holm


def test_seeds_and_runs_are_repetitions(tmp_path: Path) -> None:
    half, most = np.arange(20) % 2 == 0, np.arange(20) % 4 > 0
    one = make_run(
        tmp_path / "one", {("fixed", "digits", seed): make_columns(half if seed else most) for seed in (0, 1)}
    )
    two = make_run(tmp_path / "two", {("fixed", "digits", 0): make_columns(np.ones(20, bool))})
    cell = collect([one, two]).tables[0].rows["fixed"]["digits"]
    assert cell.repetitions == 3
    assert cell.error == pytest.approx((50 + 25 + 0) / 3)
    assert cell.spread == pytest.approx(25)


def test_a_mean_stands_only_where_every_set_is_there(tmp_path: Path) -> None:
    units = {("fixed", f"digits-c/{name}/2", 0): make_columns([True, False]) for name in ("fog", "snow")}
    units["online", "digits-c/fog/2", 0] = make_columns([True, True])
    table = collect([make_run(tmp_path / "run", units)]).tables[0]
    assert MEAN in table.rows["fixed"]
    assert set(table.rows["online"]) == {"fog"}
    assert "| online (TTT-Online) |  | **0.0** |  |" in markdown(collect([open_run(tmp_path / "run")]))


def test_shifts_of_ones_own_stand_in_one_table(tmp_path: Path) -> None:
    names = ("digits", "digits-odd/red paper", "digits-odd/blue ink", "folder/a", "folder/b", "other/alone")
    units = {("fixed", name, 0): make_columns(np.arange(8) >= place) for place, name in enumerate(names)}
    plan = {"methods": METHODS, "sets": dict.fromkeys(names, "mark")}
    own, rest = collect([make_run(tmp_path / "run", units, plan)]).tables
    assert (own.title, own.columns) == ("digits-odd", ("original", "red paper", "blue ink", MEAN))
    assert [own.set_name(column) for column in own.columns[:3]] == list(names[:3])
    assert own.rows["fixed"][MEAN].error == pytest.approx(100 * 1.5 / 8)
    assert rest.columns == names[3:]


def test_the_seven_classes_have_a_table_of_their_own(tmp_path: Path) -> None:
    labels = np.array([0, 0, 3, 3, 3, 3])  # two airplanes, four dogs
    right = [True, False, True, True, True, False]
    run = make_run(tmp_path / "run", {("fixed", "vid-cifar7", 0): make_columns(right, labels=labels)})
    whole, classes = collect([run]).tables
    assert whole.rows["fixed"]["vid-cifar7"].error == pytest.approx(100 / 3)
    assert whole.paper_value("fixed", "vid-cifar7", "accuracy") == 42.4
    assert classes.columns == ("airplane", "dog", "average")
    assert [classes.rows["fixed"][name].error for name in classes.columns] == pytest.approx([50, 25, 100 / 3])
    assert classes.paper_value("fixed", "dog", "accuracy") == 15.5


def test_the_mean_of_few_errors_has_the_interval_of_wilson(tmp_path: Path) -> None:
    units = {("fixed", f"digits-c/{name}/5", 0): make_columns(20 * [True]) for name in ("fog", "snow")}
    cells = collect([make_run(tmp_path / "run", units)]).tables[0].rows["fixed"]
    assert cells[MEAN].interval == cells["fog"].interval
    assert cells[MEAN].interval.high > 10


def test_columns_that_no_method_of_the_table_has_are_left_out(tmp_path: Path) -> None:
    """`plain` was run on another level only, and alone on the original set."""
    names = ("fog", "snow")
    one = make_run(tmp_path / "one", {("fixed", f"digits-c/{name}/5", 0): make_columns([True]) for name in names})
    other = {("plain", name, 0): make_columns([True]) for name in ("digits", "digits-c/fog/3", "digits-c/snow/3")}
    tables = collect([one, make_run(tmp_path / "other", other)]).tables
    assert [table.columns for table in tables] == [("snow", "fog", MEAN), ("original", "snow", "fog", MEAN)]


def test_batch_normalization_is_compared_with_its_own_table(tmp_path: Path) -> None:
    plan = {"methods": METHODS, "networks": {"joint": {"architecture": {"norm": "batch"}}}}
    units = {("fixed", f"cifar10-c/{name}/5", 0): make_columns([True, False]) for name in ("fog", "snow")}
    table = collect([make_run(tmp_path / "run", units, plan)]).tables[0]
    assert table.paper_value("fixed", "fog", "error") == 42.5
    assert table.paper_value("fixed", MEAN, "error") == pytest.approx((42.5 + 30.3) / 2)
    other = make_run(tmp_path / "other", {("fixed", "cifar10.1", 0): make_columns([True, False])}, plan)
    assert collect([other]).tables[0].paper_value("fixed", "cifar10.1", "error") is None


def test_what_cannot_be_reported_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="contains no run"):
        open_run(tmp_path)
    with pytest.raises(ValueError, match="`runs` must not be empty"):
        collect([])
    with pytest.raises(ResultsError, match="contains no finished unit yet"):
        collect([make_run(tmp_path / "empty", {})])
    one = make_run(tmp_path / "one", {("fixed", "digits", 0): make_columns([True] * 4)})
    few = make_run(tmp_path / "few", {("online", "digits", 0): make_columns([True] * 3)})
    with pytest.raises(ResultsError, match=r"few: .* 3 and 4 images .*online.*one \(fixed\)"):
        collect([one, few])
    ones = make_columns([True] * 4, labels=np.ones(4, int))
    other = make_run(tmp_path / "other", {("fixed", "digits", 0): ones}, seconds=3.0)
    with pytest.raises(ResultsError, match="different labels"):
        collect([one, other])
    with pytest.raises(ResultsError, match="given twice"):
        collect([one, open_run(tmp_path / "one")])
    batch = {"methods": METHODS, "network": {"norm": "batch"}}
    with pytest.raises(ResultsError, match="report them separately"):
        collect([one, make_run(tmp_path / "batch", {("fixed", "digits", 0): make_columns([True] * 4)}, batch)])
    sets = [{"methods": METHODS, "sets": {"digits": mark}, "norm": "group"} for mark in "ab"]
    marked = [
        make_run(tmp_path / f"marked{place}", {("fixed", "digits", 0): make_columns([True] * 4)}, plan)
        for place, plan in enumerate(sets)
    ]
    with pytest.raises(ResultsError, match=r"marked1: .*digits is not the same as in .*marked0"):
        collect(marked)
    fast = {"methods": {"fixed": {"steps": 1, "lr": 0.1}}, "network": {"norm": "group"}}
    with pytest.raises(ResultsError, match=r"fast: .*another fixed than .*one \(fixed.lr: 0.001"):
        collect([one, make_run(tmp_path / "fast", {("fixed", "digits", 0): make_columns([True] * 4)}, fast)])


def test_a_run_with_a_protocol_is_refused_with_the_commands_that_help(tmp_path: Path) -> None:
    run = make_continual(tmp_path / "run")
    with pytest.raises(ResultsError, match=r"continual.*testtime eval.* without --protocol.*testtime report"):
        collect([run])


def test_sets_without_labels_are_left_out_with_a_word(tmp_path: Path) -> None:
    nothing = make_columns([False] * 3, labels=np.full(3, -1))
    run = make_run(tmp_path / "run", {("fixed", "folder", 0): nothing})
    with pytest.raises(ResultsError, match="no labelled set"):
        collect([run])
    both = make_run(
        tmp_path / "both", {("fixed", "folder", 0): nothing, ("fixed", "digits", 0): make_columns([True] * 3)}
    )
    results = collect([both])
    assert ["folder" in note for note in results.notes] == [True]
    assert "folder has no labels" in markdown(results)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    units = {}
    for name, count in (("cifar10", 1), ("cifar10-c/fog/5", 8), ("cifar10-c/snow/5", 6)):
        units["fixed", name, 0] = make_columns(np.arange(20) >= count)
        units["online", name, 0] = make_columns(np.arange(20) >= count // 8)
    make_run(tmp_path / "run", units)
    return tmp_path / "run"


def test_markdown_as_it_should_look(small: Path) -> None:
    results = collect([open_run(small)])
    halves = [
        " | ".join(f"{row[name].half_width:.1f}" for name in results.tables[0].columns)
        for row in results.tables[0].rows.values()
    ]
    expected = f"""### cifar10-c, level 5

| error in % | orig | snow | fog | mean |
|---|---:|---:|---:|---:|
| fixed (JT) | 5.0 | 30.0 | 40.0 | 35.0 |
| ± 95% | {halves[0]} |
| paper | 8.1 | 25.0 | 27.5 | 26.2 |
| difference | −3.1 | +5.0 | +12.5 | +8.8 |
| online (TTT-Online) | **0.0** | **0.0** | **5.0\\*** | **2.5\\*** |
| ± 95% | {halves[1]} |
| paper | 8.2 | 20.0 | 16.9 | 18.4 |
| difference | −8.2 | −20.0 | −11.9 | −15.9 |
"""
    text = markdown(results, paper=True)
    assert text.startswith(expected)
    assert "exact sign test" in text
    assert "| fixed (JT) | 95.0 | 70.0 | 60.0 | 65.0 |" in markdown(results, "accuracy")


def test_latex_as_it_should_look(small: Path) -> None:
    text = latex(collect([open_run(small)]))
    assert r"\begin{tabular}{lrrr|r}" in text
    assert " & orig & snow & fog & mean \\\\\n\\midrule\nfixed (JT) & 5.0 & 30.0 & 40.0 & 35.0 \\\\\n" in text
    assert r"online (TTT-Online) & \textbf{0.0} & \textbf{0.0} & \textbf{5.0$^{*}$} & \textbf{2.5$^{*}$} \\" in text
    assert text.count(r"\begin{") == text.count(r"\end{")
    assert not re.search(r"(?<!\\)%(?! needs|\n)", text)


def test_names_cannot_break_a_table(tmp_path: Path) -> None:
    name = "my_set & 50% <b>|x"
    results = collect([make_run(tmp_path / "run", {("a_b*c", name, 0): make_columns([True, False])})])
    assert r"my\_set &amp; 50% &lt;b&gt;\|x" in markdown(results)
    assert r"a\_b\*c" in markdown(results)
    assert r"my\_set \& 50\% $<$b$>$$|$x" in latex(results)


def test_csv_has_everything_about_every_number(small: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(collect([open_run(small)])))))
    assert len(lines) == 8
    fog = next(line for line in lines if line["method"] == "online" and line["column"] == "fog")
    assert (fog["family"], fog["level"], fog["paper_method"]) == ("cifar10-c", "5", "TTT-Online")
    assert float(fog["percent"]) == 5
    assert float(fog["low"]) <= 5 <= float(fog["high"])
    assert (fog["to_right"], fog["to_wrong"], fog["images"]) == ("7", "0", "20")
    assert float(fog["difference"]) == pytest.approx(5 - 16.9)


def test_the_terminal_has_sets_down(small: Path) -> None:
    from rich.console import Console

    console = Console(width=100, file=io.StringIO(), color_system=None)
    for table in terminal(collect([open_run(small)]), paper=True):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[1] == ["error", "in", "%", "fixed", "(JT)", "paper", "online", "(TTT-Online)", "paper"]
    fog = next(line for line in lines if line[0] == "fog")
    assert (fog[1], fog[3], fog[4], fog[5]) == ("40.0", "27.5", "+12.5", "5.0*")


def test_what_does_not_fit_the_terminal_comes_in_pieces(small: Path) -> None:
    results = collect([open_run(small)])
    assert len(terminal(results, width=80)) == 1
    assert len(terminal(results, width=40)) == 2
    assert len(terminal(results, paper=True, width=60)) == 2


def test_best_goes_by_what_is_printed() -> None:
    def cell(error: float) -> Cell:
        return Cell(error, Interval(error, error), None, 10, 1)

    table = Table("t", "", None, ("a",), {"fixed": {"a": cell(12.34)}, "online": {"a": cell(12.31)}})
    assert not table.is_best("fixed", "a")  # a tie
    assert not table.is_best("online", "a")
    three = Table("t", "", None, ("a",), {"x": {"a": cell(12.34)}, "y": {"a": cell(12.31)}, "z": {"a": cell(13)}})
    assert [three.is_best(name, "a") for name in "xyz"] == [True, True, False]
    assert not Table("t", "", None, ("a",), {"fixed": {"a": cell(1)}}).is_best("fixed", "a")


def test_differences_have_a_sign() -> None:
    assert difference(20.44, 20.4) == "0.0"
    assert difference(20.46, 20.4) == "+0.1"
    assert difference(19.0, 20.4) == "−1.4"


def test_only_what_is_shown_is_explained(tmp_path: Path) -> None:
    alone = collect([make_run(tmp_path / "run", {("fixed", "digits", 0): make_columns([True, False])})])
    assert len(explain(alone, "error")) == 2
    assert "higher is better" in explain(alone, "accuracy")[0]


def test_a_setting_that_an_older_run_does_not_know_had_its_default() -> None:
    old = {"online": {"mode": "online", "network": "joint", "settings": {"lr": 0.01, "precision": "bf16"}}}
    new = {
        "online": {"mode": "online", "network": "joint", "settings": old["online"]["settings"] | {"mirrored": False}}
    }
    assert compare_methods(old, new) == compare_methods(new, old) == []
    new["online"]["settings"]["mirrored"] = True
    assert compare_methods(old, new) == ["online.settings.mirrored: False there, True now"]
    assert compare_methods({"fixed": {"settings": {}}}, {"fixed": {"settings": {"precision": "bf16"}}}) == [
        "fixed.settings.precision: fp32 there, bf16 now"
    ]
    assert compare_methods({"fixed": {"lr": 1}}, {"fixed": {"lr": 2}}) == ["fixed.lr: 1 there, 2 now"]

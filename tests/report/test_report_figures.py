"""Figures of runs: what they show is what was measured, and they are the same each time."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from report_runs import METHODS, make_benchmark, make_columns, make_run
from testtime.evaluation import open_run, open_runs
from testtime.evaluation.records import stream_order
from testtime.evaluation.summary import write_summary
from testtime.report.canvas import COLOURS, colour_of
from testtime.report.correlation import draw_correlation
from testtime.report.results import Results, collect
from testtime.report.run_figures import (
    choose_window,
    draw_all,
    draw_bars,
    draw_flips,
    draw_streams,
    sliding_mean,
    stream_verdicts,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("figures") / "run"
    corruptions = ("gaussian_noise", "fog")
    return collect([make_benchmark(path, 60, "cifar10", levels=(3, 5), corruptions=corruptions)])


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_sliding_mean_is_the_plain_loop() -> None:
    values = np.random.default_rng(0).random(50)
    seen, percent = sliding_mean(values, 12)
    assert seen.tolist() == list(range(3, 51))
    for count, value in zip(seen, percent, strict=True):
        assert value == pytest.approx(100 * np.mean(values[max(0, count - 12) : count]))


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    values = np.random.default_rng(0).random(10_000)
    seen, percent = sliding_mean(values, 100, points=50)
    assert len(seen) == 50
    assert (seen[0], seen[-1]) == (25, 10_000)
    assert percent[-1] == pytest.approx(100 * values[-100:].mean())


def test_windows_fit_the_stream() -> None:
    assert [choose_window(count) for count in (1, 60, 500, 50_000)] == [1, 12, 100, 2500]


def test_streams_show_both_methods_in_the_order_of_the_stream(tmp_path: Path) -> None:
    fixed = np.array([True, False, True, False])
    online = np.array([True, True, False, False])
    order = np.array([2, 0, 3, 1])
    units = {("fixed", "digits", 0): make_columns(fixed), ("online", "digits", 0): make_columns(online, order=order)}
    found = stream_verdicts(collect([make_run(tmp_path / "run", units)]), "digits")
    assert found["online"].tolist() == online[order].tolist()
    assert found["fixed"].tolist() == fixed[order].tolist()


@pytest.mark.parametrize("limit", [None, 7])
def test_a_summary_of_a_shuffled_run_knows_the_order_of_its_streams(tmp_path: Path, limit: int | None) -> None:
    order = stream_order(20, 3).numpy()[:limit]
    right = np.random.default_rng(0).random(20) > 0.5
    units = {
        ("fixed", "digits", 3): make_columns(~right, order=np.sort(order)),
        ("online", "digits", 3): make_columns(right, order=order),
        ("online", "digits-gradual/fog", 3): make_columns(right),
        ("fixed", "digits-gradual/fog", 3): make_columns(~right),
    }
    for shuffle in (True, False, None):
        plan = {"methods": METHODS, "network": {"norm": "group"}} | ({} if shuffle is None else {"shuffle": shuffle})
        run = make_run(tmp_path / f"run-{shuffle}", units, plan)
        write_summary(tmp_path / "summary.json", [run])
        kept = collect(open_runs(tmp_path / "summary.json"))
        assert stream_verdicts(kept, "digits-gradual/fog")["online"].tolist() == right.tolist()
        found = stream_verdicts(kept, "digits")
        if shuffle is None:
            assert found == {}
            continue
        wanted = order if shuffle else np.sort(order)
        assert found["online"].tolist() == right[wanted].tolist()
        assert found["fixed"].tolist() == (~right[wanted]).tolist()
        assert kept.notes == ("From a summary of runs: whatever needs all records is omitted.",)


def test_every_figure_is_there_valid_and_the_same_each_time(results: Results) -> None:
    drawings = list(draw_all(results, paper=True))
    assert [(kind, table.level) for kind, table, _ in drawings] == [
        ("bars", 5),
        ("levels", 5),
        ("streams", 5),
        ("flips", 5),
        ("bars", 3),
        ("gradual", None),
        ("bars", None),
        ("cost", 5),
    ]
    assert len({drawing.name for _, _, drawing in drawings}) == len(drawings)
    ids: list[str] = []
    for _, _, drawing in drawings:
        svg = drawing.svg()
        tree = ElementTree.fromstring(svg)
        ids += [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
        assert tree.attrib["aria-label"] == drawing.title
        assert "width" not in tree.attrib
        for stand_in in ("#010203", "#040506", "#070809"):
            assert stand_in not in svg
        assert "currentColor" in svg
    assert len(ids) == len(set(ids))
    assert drawings[0][2].svg() == drawings[0][2].svg()


def test_files_are_white_with_outlined_letters(results: Results) -> None:
    drawing = draw_bars(results.tables[0])
    svg = drawing.svg(inline=False)
    assert "currentColor" not in svg
    assert not texts(svg)
    picture = Image.open(io.BytesIO(drawing.png(50)))
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert picture.size == (360, 180)


def test_bars_name_methods_sets_and_the_paper(results: Results) -> None:
    found = texts(draw_bars(results.tables[0], paper=True).svg())
    assert {"original", "gaussian noise", "fog", "mean", "online (TTT-Online)", "the paper's", "error in %"} <= set(
        found
    )
    assert "the paper's" not in texts(draw_bars(results.tables[0]).svg())
    assert "accuracy in %" in texts(draw_bars(results.tables[0], "accuracy").svg())


def test_without_the_baseline_there_are_no_streams_and_no_flips(tmp_path: Path) -> None:
    units = {("online", f"digits-c/{name}/5", 0): make_columns([True, False]) for name in ("fog", "snow")}
    results = collect([make_run(tmp_path / "run", units)])
    assert draw_streams(results, results.tables[0]) is None
    assert draw_flips(results.tables[0]) is None
    assert [kind for kind, _, _ in draw_all(results)] == ["bars", "cost"]


def test_the_scatter_says_its_correlation() -> None:
    x = np.arange(8.0)
    y = np.array([0.0, 2, 1, 3, 5, 4, 6, 8])
    found = texts(draw_correlation(x, y).svg())
    assert f"r = {np.corrcoef(x, y)[0, 1]:.2f}, n = 8" in found
    with pytest.raises(ValueError, match="at least 3 points"):
        draw_correlation(x[:2], y[:2])


def test_methods_keep_their_colours() -> None:
    assert colour_of("online", ("fixed", "online")) == COLOURS["online"]
    others = ("fixed", "mine", "yours")
    assert len({colour_of(name, others) for name in others}) == 3


def test_a_run_read_again_draws_the_same(results: Results) -> None:
    again = collect([open_run(results.runs[0].path)])
    assert draw_bars(again.tables[0]).svg() == draw_bars(results.tables[0]).svg()

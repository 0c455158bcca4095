"""Sample pictures of a report: which are picked, and from which set."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from report_runs import METHODS, make_columns, make_run
from testtime import data
from testtime.report.results import collect
from testtime.report.samples import SetLookup, make_png, pick_samples


def test_pictures_are_those_that_flipped(tmp_path: Path) -> None:
    count = 30
    fixed, online = np.ones(count, bool), np.ones(count, bool)
    fixed[[3, 7, 11]] = False
    online[[5]] = False
    units = {("fixed", "digits", 0): make_columns(fixed), ("online", "digits", 0): make_columns(online)}
    digits = data.open("digits")
    plan = {"methods": METHODS, "sets": {"digits": digits.fingerprint()}}
    results = collect([make_run(tmp_path / "run", units, plan)])
    samples, note = pick_samples(results, results.tables[0])
    assert note == ""
    assert [(sample.number, sample.is_right) for sample in samples] == [(7, True), (5, False)]
    assert [(sample.label, sample.before, sample.after) for sample in samples] == [("7", "8", "7"), ("5", "5", "6")]
    assert samples[0].picture == make_png(digits.images([7])[0])


def test_pictures_of_another_set_are_not_shown(tmp_path: Path) -> None:
    units = {
        ("fixed", "digits", 0): make_columns([False, True]),
        ("online", "digits", 0): make_columns([True, True]),
    }
    plan = {"methods": METHODS, "sets": {"digits": "another"}}
    results = collect([make_run(tmp_path / "run", units, plan)])
    samples, note = pick_samples(results, results.tables[0])
    assert samples == []
    assert "not the set used in the run" in note


def test_small_pictures_become_larger_squares() -> None:
    image = torch.tensor([[[0, 255], [128, 64]]], dtype=torch.uint8)
    picture = Image.open(io.BytesIO(make_png(image, side=8)))
    assert picture.size == (8, 8)
    assert [picture.getpixel(place) for place in ((0, 0), (7, 3), (3, 4), (4, 7))] == [0, 255, 128, 64]
    assert Image.open(io.BytesIO(make_png(torch.zeros(3, 300, 200, dtype=torch.uint8), side=50))).size == (67, 100)


def test_pictures_come_from_sets_that_were_given(tmp_path: Path) -> None:
    images = data.open("digits", size=8)
    mine = data.TensorSet("mine", images.images(slice(6)), images.labels[:6], images.classes)
    units = {
        ("fixed", "my/own", 0): make_columns([True, False] * 3),
        ("online", "my/own", 0): make_columns([True] * 6),
    }
    plan = {"methods": METHODS, "sets": {"my/own": mine.fingerprint()}}
    results = collect([make_run(tmp_path / "run", units, plan)])
    samples, note = pick_samples(results, results.tables[0], SetLookup(sets={"my/own": mine}))
    assert ([sample.number for sample in samples], note) == ([3], "")
    assert samples[0].picture == make_png(mine.images([3])[0])
    other = data.TensorSet("mine", images.images(slice(1, 7)), images.labels[1:7], images.classes)
    assert (
        "is not the set used in the run"
        in pick_samples(results, results.tables[0], SetLookup(sets={"my/own": other}))[1]
    )

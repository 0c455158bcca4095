"""Where learning along the stream does harm, in the document of results: made-up numbers in, the right cells out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from report_files import COUNT, make_file, make_main, make_record, read, row, rows_of, said
from report_runs import make_columns
from testtime.evaluate import stream_order
from testtime.report.finding_streams import tell_harm, tell_losses, tell_thousands
from testtime.report.further import FILES, TRAININGS
from testtime.report.paper import paper_tables
from testtime.runs import Unit, open_run, open_runs
from testtime.runs.summary import write_summary
from testtime.runs.units import write_unit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_main(tmp_path)
    return tmp_path


def test_where_the_harm_arises(root: Path) -> None:
    told = tell_harm(read(root))
    # Only fog at level 1 has more wrong answers than `fixed`: images 10 and 11, two of fifty.
    order = stream_order(COUNT, 0).tolist()
    fifths = ["0.00"] * 5
    for image in (10, 11):
        fifths[order.index(image) // 10] = "+10.00"
    assert row(told, "fog 1")[0] == "+4.00"
    assert row(told, "fog 1")[3] == "0.5000"
    assert row(told, "fog 1")[4:] == fifths
    assert row(told, "mean of these")[4:] == fifths
    assert "airplane +20.00, automobile +20.00" in said(told).replace(
        "automobile +20.00, airplane +20.00", "airplane +20.00, automobile +20.00"
    )
    assert "The error is 24.00% just before each image's own step and 24.00% after it" in said(told)
    assert "orders" not in told
    losses = tell_losses(read(root))
    assert row(losses, "fog 1") == ["20.00", "24.00", "+4.00", "+0.1"]
    assert "On 1 of 16 sets TTT-Online's error is above JT's" in said(losses)


def test_the_harm_in_other_orders(root: Path) -> None:
    file = FILES["orders"][0]
    folder = root / "folders" / file.with_suffix("")
    make_file(root, file, {"fixed": [4, 10], "online": [5, 12]}, ["cifar10", "cifar10-c/fog/1"])
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"seeds": [0, 1]}))
    for name, wrong in (("cifar10", {"fixed": 4, "online": 4}), ("cifar10-c/fog/1", {"fixed": 10, "online": 7})):
        for method, count in wrong.items():
            columns = make_columns(np.arange(COUNT) >= count, order=stream_order(COUNT, 1).numpy())
            write_unit(folder, Unit.of(method, name, 1), columns, 1.0)
    write_summary(root / file, [open_run(folder)])
    told = tell_harm(read(root)).partition("The same images in 2 orders, TTT-Online minus JT in points:")[2]
    assert rows_of(told)[0] == ["", "order 0", "order 1", "mean"]
    assert row(told, "original") == ["+2.00", "0.00", "+1.00"]
    assert row(told, "fog 1") == ["+4.00", "−6.00", "−1.00"]
    assert "[`mild-orders.json`]" in told
    assert "trained with" not in told


def test_the_harm_to_other_networks(root: Path) -> None:
    sets = ["cifar10", "cifar10-c/fog/1"]
    make_file(root, FILES["orders"][0], {"fixed": [4, 10], "online": [5, 12]}, sets)
    make_file(root, Path("mild-tf32-0.json"), {"fixed": [4, 10], "online": [4, 7]}, sets, mark="t")
    write_summary(root / FILES["networks"][0], open_runs(root / "mild-tf32-0.json"))
    own, other = make_record("joint"), make_record("joint", 3)
    other["configuration"]["recipe"]["precision"] = "tf32"
    for name, record in (("gn-joint", own), ("tf32-0", other)):
        (root / TRAININGS[name]).write_text(json.dumps(record))
    told = tell_harm(read(root)).partition("for 2 networks")[2]
    assert rows_of(told)[0] == ["trained with", "original", "fog 1", "mean", "lowest order", "highest"]
    assert row(told, "seed 0, bfloat16") == ["+2.00", "+4.00", "+3.00", "+3.00", "+3.00"]
    assert row(told, "seed 3, TF32") == ["0.00", "−6.00", "−3.00", "−3.00", "−3.00"]
    assert row(told, "the paper's network, one order") == ["+0.10", "+0.10", "+0.10", "", ""]
    # The one network has more than 0.3 points on both sets, the other on none.
    assert "Of 2 pairs of a network and an order, 1 stays within 0.3 points on all of these sets" in said(told)
    assert "[`mild-networks.json`]" in told


def test_within_what_the_paper_has_is_on_every_set(root: Path) -> None:
    sets = ["cifar10", "cifar10-c/fog/1"]
    make_file(root, FILES["networks"][0], {"fixed": [4, 10], "online": [3, 11]}, sets)
    assert "Of 1 pairs of a network and an order, none stay within 0.3" in said(tell_harm(read(root)))
    theirs = [one.values for one in paper_tables() if (one.set, one.norm) == ("cifar10-c", "group")]
    pairs = [pair for values in theirs for pair in zip(values["online"], values["fixed"], strict=True)]
    assert len(pairs) == 5 * 16
    assert max(round(online - fixed, 1) for online, fixed in pairs) == 0.3


def test_thousands_along_the_stream(root: Path) -> None:
    told = tell_thousands(read(root))
    assert rows_of(told)[2:] == [["1–50", "23.3", "12.7", "−10.67", "0.00"]]

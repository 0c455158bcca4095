"""The parts of the document of results that have files of their own: made-up numbers in, the right cells out."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import testtime as tt
from report_files import (
    COUNT,
    EVERY,
    LEVEL_5,
    SHIFTS,
    describe,
    make_costs,
    make_everything,
    make_file,
    make_main,
    make_record,
    read,
    row,
    rows_of,
    said,
)
from testtime.cli import app
from testtime.corruptions import CORRUPTIONS
from testtime.evaluate import stream_order
from testtime.report import findings
from testtime.report.committed import ROWS, read_whole
from testtime.report.finding_choices import tell_best, tell_seeds
from testtime.report.finding_differences import tell_differences
from testtime.report.finding_levels import tell_level, tell_means
from testtime.report.finding_photographs import draw_photographs, tell_photographs
from testtime.report.finding_runs import tell_commands, tell_missing, tell_runs
from testtime.report.finding_streams import tell_harm, tell_losses, tell_thousands
from testtime.report.finding_trainings import tell_trainings, training_command
from testtime.report.finding_variants import tell_batch_norm, tell_costs, tell_gradual, tell_short, tell_steps
from testtime.report.further import FILES, TRAININGS, compare, read_trainings
from testtime.report.readme import tell_cifar
from testtime.report.run_figures import draw_gradual
from testtime.report.sources import ResultsError
from testtime.runs import open_run
from testtime.runs.summary import write_summary
from testtime.training import Recipe
from testtime.training.pool import hash_tensors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_main(tmp_path)
    return tmp_path


def test_what_was_not_run_says_so_in_one_line(root: Path) -> None:
    found = read(root)
    assert found.parts == {}
    for tell, name in (
        (tell_seeds, "seeds"),
        (tell_batch_norm, "batch norm"),
        (tell_gradual, "gradual"),
        (tell_steps, "steps"),
        (tell_costs, "costs"),
    ):
        told = tell(found)
        assert said(told) == f"Not run yet: {', '.join(f'`{file}`' for file in FILES[name])} will hold it."
    assert tell_short(found).count("Not run yet") == tell_best(found).count("Not run yet") == 2
    assert tell_photographs(found).count("Not run yet") == 2
    missing = tell_missing(found).splitlines()
    assert missing[:4] == ["- Object recognition alone (B).", "- UDA-SS.", "- ALP.", "- Batch Normalization."]
    assert len(missing) == 3 + 10 + 2


def test_further_methods_stand_in_the_levels_tables_beside_the_papers(root: Path) -> None:
    make_file(root, ROWS["baseline"], {"plain": [5] + [22, 11, 6] * 5}, EVERY)
    make_file(root, ROWS["alp"], {"alp": [8] + [11, 30, 9] * 5}, EVERY)
    make_file(root, ROWS["uda"], {"uda": [5, 13, 8, 6]})
    best = {"best": describe("best", mirrored=True)}
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods=best, seconds=3.0)
    (root / TRAININGS["gn-joint"]).write_text(json.dumps(make_record("joint")))
    found = read(root)
    five = tell_level(found, 5)
    titles = [cells[0] for cells in rows_of(five)]
    assert [title for title in titles if "(" in title or title == "best"] == [
        *("plain (B)", "fixed (JT)", "episodic (TTT)", "online (TTT-Online)", "uda (UDA-SS)", "alp (ALP)", "best")
    ]
    assert row(five, "plain (B)") == ["10.0", "44.0", "22.0", "12.0", "26.0"]
    assert row(five, "uda (UDA-SS)") == ["10.0", "26.0", "16.0", "12.0", "18.0"]
    assert row(five, "best") == ["6.0", "18.0", "10.0", "8.0", "12.0"]
    paper = rows_of(five)[titles.index("uda (UDA-SS)") + 2]
    assert paper == ["paper", "9.0", "28.2", "17.2", "12.7", "19.4"]
    one = tell_level(found, 1)
    assert row(one, "alp (ALP)") == ["16.0", "22.0", "60.0", "18.0", "33.3"]
    assert not any(name in one for name in ("UDA-SS", "best", "episodic"))
    assert "The row of ALP is kept as printed." in one
    means = tell_means(found)
    assert row(means, "plain (B)") == ["10.0"] + ["26.0"] * 5
    assert row(means, "uda (UDA-SS)") == ["10.0", "", "", "", "", "18.0"]
    readme = tell_cifar(found.results)
    assert row(readme, "`alp` (ALP)") == ["16.0", "22.0", "60.0", "18.0", "33.3", "36.4"]
    assert row(readme, "`best`") == ["6.0", "18.0", "10.0", "8.0", "12.0", ""]
    assert "`plain` is a network trained on the classes alone; `uda` is the joint network" in said(readme)
    differences = said(tell_differences(found))
    # The paper has 27.5 - 28.1, 12.6 - 13.5 and 49.4 - 50.5: below on all three; ours by 2 points each.
    assert "JT is below B on 3 of 3 corruptions at level 5, in the paper on 3" in differences
    assert "the difference of their means is −2.7, in the paper −0.9." in differences
    assert "TTT-Online is below ALP on 3 of 3 corruptions" in differences
    assert "ALP, mean over the corruptions:" in differences
    assert "from the paper's over the levels 2 to 5" in differences
    runs = said(tell_runs(found))
    assert "**`plain`** (B): the same network trained on the classes alone (fingerprint baseline0)" in runs
    assert "**`best`**: 10 steps of SGD" in runs
    assert "answers for the image and its mirror image together" in runs
    assert "for those of `best` see below." in runs
    assert row(tell_runs(found), "fixed (JT), 16 sets")[1:] == ["800", "8", "100"]
    # These shared their GPU: the seconds have a mark, and there is no rate.
    assert row(tell_runs(found), "best, 4 sets")[1:] == ["200", "12", ""]
    assert tell_runs(found).count(" † |") == 4
    assert "Every time is of one run. † These shared the GPU with other runs" in runs
    given = tell_commands(found)
    assert [name for name in ("baseline", "alp", "uda", "best") if f"runs/{name}\n" in given] == [
        "baseline",
        "alp",
        "uda",
    ]


def test_a_row_on_fewer_images_stays_out_of_the_tables_of_all_images(root: Path) -> None:
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods={"best": describe("best")}, images=20)
    found = read(root)
    assert "best" not in found.levels[5].rows
    held = stream_order(COUNT, 0).numpy()[:20]
    fixed = 100 * np.mean([(held < count).mean() for count in (20, 10, 5)])
    assert row(tell_best(found), "fixed (JT)")[1] == f"{fixed:.2f}"
    assert "20 images of each set." in tell_best(found)


def test_batch_normalization(root: Path) -> None:
    methods = {"episodic": describe("episodic", threshold=0.9)}
    wrong = {"plain": [5, 30, 20, 6], "fixed": [4, 33, 21, 6], "episodic": [4, 25, 15, 6]}
    make_file(root, FILES["batch norm"][0], wrong, methods=methods, norm="batch")
    told = tell_batch_norm(read(root))
    assert row(told, "fixed (JT)") == ["8.0", "66.0", "42.0", "12.0", "40.0"]
    assert rows_of(told)[4] == ["paper", "7.9", "63.9", "37.5", "13.0", "38.1"]
    assert "below a confidence of 0.9, 100% of them" in said(told)
    assert "on 50 images: JT 40.0 against 23.3, TTT 30.7 against 20.7." in said(told)
    assert "--out runs/batch-norm\n```" in told
    assert "With Batch Normalization, JT at level 5: outside on" in said(tell_differences(read(root)))


def test_the_gradual_shift(root: Path) -> None:
    sets = [f"cifar10-gradual/{name}" for name in ("gaussian_noise", "impulse_noise", "shot_noise")]

    def late(method: str, name: str) -> np.ndarray:
        return np.arange(COUNT - {"plain": 20, "fixed": 15, "episodic": 12, "online": 5, "uda": 10}[method], COUNT)

    for file, methods in zip(FILES["gradual"], (("plain", "fixed", "episodic", "online"), ("uda",)), strict=True):
        make_file(root, file, {method: [0, 0, 0] for method in methods}, sets, place=late)
    found = read(root)
    told = tell_gradual(found)
    assert row(told, "online (TTT-Online)") == ["10.0", "10.0", "10.0", "10.0"]
    assert row(told, "uda (UDA-SS)") == ["20.0"] * 4
    assert "B 0.0 and 100.0, JT 0.0 and 100.0" in said(told)
    results = found.parts["gradual"].results
    assert "images seen, noise growing" in draw_gradual(results, results.tables[0]).svg()


def test_less_work_for_an_image(root: Path) -> None:
    fast = {"fast": describe("fast", steps=1, lr=0.01)}
    make_file(root, FILES["fast"][0], {"fast": [4, 19, 9, 5]}, methods=fast)
    below = {"below-20%": describe("below-20%", threshold="20%")}
    make_file(root, FILES["threshold"][0], {"below-20%": [4, 18, 9, 5]}, methods=below)
    bare = tell_short(read(root))
    make_costs(root, {"fixed": 1.0, "episodic": 10.0, "fast": 2.5, "below-20%": 4.0}, fast | below)
    told = tell_short(read(root))
    # fixed 35 wrong of 150, episodic 31, fast 33, below-20% 32; a quarter and two fifths of the time.
    assert row(told, "`fast`") == ["8.0", "22.00", row(told, "`fast`")[2], "100", "50.0", "0.250"]
    assert row(told, "`below-20%`")[1:2] + row(told, "`below-20%`")[3:] == ["21.33", "20", "80.0", "0.400"]
    assert row(told, "episodic (TTT)")[1] == "20.67"
    assert "`fast` is +1.33 points from `episodic`" in said(told)
    assert "takes 25% of its time and has 50% of its gain over `fixed`." in said(told)
    assert "takes 40% of its time and has 75% of its gain over `fixed`." in said(told)
    assert "`fast`: steps 1, lr 0.01. Times: every method by itself on 50 images; Some CPU <fast>, 1 thread" in said(
        told
    )
    assert rows_of(bare)[0] == ["", "original", "mean of level 5", "± 95%", "% learned from"]
    assert row(bare, "`fast`") == row(told, "`fast`")[:-2]
    assert "paired) and has 50% of its gain over `fixed`. `fast`: steps 1, lr 0.01." in said(bare)
    assert not any(word in bare for word in ("its time", "Times", "ms an image"))


def test_steps_and_copies(root: Path) -> None:
    wrong = {"fixed": (20, 10, 5), "steps-1-copies-8": (19, 10, 5), "steps-10-copies-8": (16, 8, 5)}
    wrong |= {"steps-1-copies-32": (18, 9, 5), "steps-10-copies-32": (10, 6, 4), "steps-30-copies-32": (10, 5, 4)}
    methods = {name: describe(name) for name in wrong if name != "fixed"}
    make_file(root, FILES["steps"][0], wrong, LEVEL_5[1:], methods)
    bare = tell_steps(read(root))
    make_costs(root, dict(zip(wrong, (0.5, 1.0, 4.0, 2.0, 10.0, 40.0), strict=True)), methods)
    told = tell_steps(read(root))
    errors, times = rows_of(told)[:5], rows_of(told)[5:]
    assert errors == [
        ["mean error in %: steps", "8 copies", "32 copies"],
        ["---", "---:", "---:"],
        ["0 (`fixed`)", "23.33", "23.33"],
        ["1", "22.67", "21.33"],
        ["10", "19.33", "13.33"],
    ]
    assert times[0] == ["30", "", "12.67"]
    assert times[3:] == [["0 (`fixed`)", "10.0", "10.0"], ["1", "20.0", "40.0"], ["10", "80.0", "200.0"], times[-1]]
    assert times[-1] == ["30", "", "800.0"]
    assert rows_of(bare) == rows_of(told)[:6]
    assert "10.67 points below `fixed`. [`steps.json`]" in said(bare)
    assert "The lowest mean error is that of 30 steps with 32 copies, 10.67 points below `fixed`." in said(told)
    assert "holds 0) is 10 steps with 32 copies, at 25% of its time" in said(told)
    assert "Half the gain or more costs least with 10 steps with 32 copies: 94% of it at 25% of the time." in said(told)
    assert "The default, 10 steps with 32 copies, has 94% of it at 25% of the time." in said(told)


def test_a_grid_needs_names_that_say_steps_and_copies(root: Path) -> None:
    make_file(root, FILES["steps"][0], {"fixed": (20, 10, 5), "other": (20, 10, 5)}, LEVEL_5[1:])
    with pytest.raises(ResultsError, match=r"steps\.json: .*fixed, other"):
        tell_steps(read(root))


def test_several_training_seeds(root: Path) -> None:
    one, two, *_ = FILES["seeds"]
    make_file(root, one, {"fixed": [5, 22, 10, 5], "online": [6, 11, 5, 4]}, mark="1")
    make_file(root, two, {"fixed": [6, 24, 10, 5], "online": [5, 12, 5, 4]}, mark="2")
    for seed in (1, 2):
        (root / TRAININGS[f"seed-{seed}"]).write_text(json.dumps(make_record("joint", seed)))
    found = read(root)
    told = tell_seeds(found)
    assert row(told, "fixed (JT)") == ["10.0", "44.0", "20.0", "10.0", "24.7"]
    spreads = [cells[1:] for cells in rows_of(told) if cells[0] == "s"]
    assert spreads[0] == ["2.0", "4.0", "0.0", "0.0", "1.3"]
    assert "over 3 networks" in told
    assert "training seeds 1, 2" in said(told)
    assert "JT: the means over the corruptions are 23.33, 24.67, 26.00, standard deviation 1.33" in said(told)
    assert "JT: the networks differ most on gaussian noise (4.0)" in said(told)
    assert "the 3 networks of different seeds have 0.00, +2.00, −2.00. These are TTT-Online minus JT." in said(told)
    assert "the 3 networks of different seeds have 0.00, +2.00, −2.00." in said(tell_harm(found))
    assert "TF32" not in told


def test_networks_trained_in_tf32(root: Path) -> None:
    make_file(root, FILES["seeds"][0], {"fixed": [5, 22, 10, 5], "online": [6, 11, 5, 4]}, mark="1")
    for place, gauss in enumerate((19, 17)):
        wrong = {"fixed": [4, gauss, 10, 5], "online": [4, 12 - 3 * place, 5, 4]}
        make_file(root, FILES["tf32"][place], wrong, mark=f"tf32-{place}")
        record = make_record("joint", 5 + place)
        (root / TRAININGS[f"tf32-{place}"]).write_text(json.dumps(record))
    told = tell_seeds(read(root)).partition("### Trained in TF32")[2]
    assert "2 networks (training seeds 5, 6):" in told
    assert row(told, "fixed (JT)") == ["8.0", "36.0", "20.0", "10.0", "22.0"]
    # In bfloat16 gaussian noise has 20 and 22 wrong: means of 23.33 and 24.67.
    known = (
        "JT: the means over the corruptions are 22.67, 21.33, in bfloat16 23.33 to 24.67: all below all, by chance once"
    )
    assert f"{known} in 6." in said(told)
    assert "JT: the two kinds differ most on gaussian noise (36.0 against 42.0)" in said(told)
    assert "TTT-Online: the means over the corruptions are 14.00, 12.00, in bfloat16 12.67 to 13.33." in said(told)


def test_the_preset_and_how_it_was_chosen(root: Path) -> None:
    settings = describe("best", lr=0.003, mirrored=True) | {"mode": "online"}
    sets = [name for name in EVERY if not name.endswith("/3")]
    make_file(root, ROWS["best"], {"best": [3] + [9, 5, 4] * 4}, sets, {"best": settings})
    slow = describe("slow", lr=0.001) | {"mode": "online"}
    quick = describe("quick", lr=0.003, mirrored=True, precision="tf32") | {"mode": "online"}
    level_3 = [f"cifar10-c/{name}/3" for name in SHIFTS]
    wrong = {"fixed": (20, 10, 5), "slow": (10, 5, 4), "quick": (9, 5, 4)}
    make_file(root, FILES["tuning"][0], wrong, level_3, {"slow": slow, "quick": quick})
    bare = tell_best(read(root))
    timed = {"fixed": 0.5, "online": 1.0, "best": 3.0, "slow": 2.0, "quick": 3.0}
    make_costs(root, timed, {"best": settings, "slow": slow, "quick": quick})
    told = tell_best(read(root))
    heads = rows_of(told)[0]
    assert heads == ["error in %, mean over the corruptions", "original", "level 1", "level 2", "level 4", "level 5"]
    assert row(told, "online (TTT-Online)") == ["8.00", "17.33", "12.67", "12.67", "12.67"]
    assert row(told, "best") == ["6.00", "12.00", "12.00", "12.00", "12.00"]
    assert "- Level 5: −0.67 from `online`" in told
    assert "Original set: −2.00 from `online`" in said(told)
    assert "It is below `online` on 5 of 12 corrupted sets and takes 3.00 times its time. Times: every" in said(told)
    assert "It is below `online` on 5 of 12 corrupted sets. [`best.json`]" in said(bare)
    assert "It is above `fixed` on none of 13 sets; least gain or most loss on " in said(told)
    assert "chosen on" not in told.split("### How")[0]  # level 3 is not among these
    candidates = [cells for cells in rows_of(told) if cells[0].startswith("`")]
    assert [cells[0] for cells in candidates] == ["`quick` (taken)", "`slow`", "`fixed`"]
    assert candidates[0][1:4] == ["0.003", "`tf32`", "True"]
    assert [cells[-3] for cells in candidates] == ["12.00", "12.67", "23.33"]
    assert [cells[-1] for cells in candidates] == ["60.0", "40.0", "10.0"]
    assert [cells for cells in rows_of(bare) if cells[0].startswith("`")] == [cells[:-1] for cells in candidates]
    assert not any(word in bare for word in ("its time", "Times", "ms an image"))
    assert "Taken: `quick`, the lowest of all." in said(told)
    (root / ROWS["best"]).unlink()
    assert "Which of them became the preset is said once" in said(tell_best(read(root)))


def test_the_mirror_image_alone_stands_beside_the_preset_and_nowhere_else(root: Path) -> None:
    (root / TRAININGS["gn-joint"]).write_text(json.dumps(make_record("joint")))
    methods: dict[str, Any] = {"best": describe("best", mirrored=True)}
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods=methods)
    without = read(root)
    assert "fixed-mirrored" not in tell_best(without)
    methods["fixed-mirrored"] = {"mode": "fixed", "network": "joint", "settings": {"mirrored": True}}
    shutil.rmtree(root / "folders" / ROWS["best"].with_suffix(""))
    make_file(root, ROWS["best"], {"fixed-mirrored": [4, 19, 9, 4], "best": [3, 9, 5, 4]}, methods=methods)
    found = read(root)
    told = tell_best(found)
    # fixed has 35 wrong of 150, with the mirror image 32, best 18: of 50 images each.
    assert [cells[0] for cells in rows_of(told)[2:6]] == ["fixed (JT)", "fixed-mirrored", "online (TTT-Online)", "best"]
    assert row(told, "fixed-mirrored") == ["8.00", "21.33"]
    assert "- The mirror image alone at level 5: `fixed-mirrored`, which learns nothing, is −2.00 from `fixed`" in told
    assert "and `best` −9.33 from `fixed-mirrored` (" in said(told)
    for tell in (tell_means, tell_runs, tell_differences, tell_missing):
        assert tell(found) == tell(without)
    assert tell_level(found, 5) == tell_level(without, 5)
    assert tell_cifar(found.results) == tell_cifar(without.results)


def test_the_mirror_image_alone_may_be_a_run_of_its_own_at_one_level(root: Path) -> None:
    best = describe("best", lr=0.003, mirrored=True) | {"mode": "online"}
    control = {"mode": "fixed", "network": "joint", "settings": {"mirrored": True}}
    wrong = {"fixed-mirrored": [4, 19, 9, 4]}
    make_file(root, Path("results/control.json"), wrong, methods={"fixed-mirrored": control})
    make_file(root, Path("results/every.json"), {"best": [3] + [9, 5, 4] * 5}, EVERY, {"best": best})
    runs = [open_run(root / "folders/results" / name) for name in ("control", "every")]
    write_summary(root / ROWS["best"], runs)
    found = read(root)
    assert "fixed-mirrored" not in found.levels[5].rows
    told = tell_best(found)
    assert row(told, "fixed-mirrored") == ["8.00", "", "", "", "", "21.33"]
    assert "**`best`**: 10 steps of SGD an image, learning rate 0.003" in said(told)
    assert told.count("The mirror image alone at level") == 1


def test_the_preset_at_the_other_levels_says_which_it_was_chosen_on(root: Path) -> None:
    settings = {"best": describe("best", lr=0.003, mirrored=True) | {"mode": "online"}}
    make_file(root, ROWS["best"], {"best": [3, 9, 5, 4]}, methods=settings)
    make_file(root, FILES["best"][1], {"best": [9, 11, 4] * 4}, EVERY[1:-3], settings)
    usual = {"usual": describe("usual", lr=0.003, mirrored=True) | {"mode": "online"}}
    make_file(root, FILES["tuning"][0], {"usual": (9, 5, 4)}, [f"cifar10-c/{name}/3" for name in SHIFTS], usual)
    told = tell_best(read(root))
    assert rows_of(told)[0][1:] == ["original", "level 1", "level 2", "level 3 ‡", "level 4", "level 5"]
    assert "50 images of each set. ‡ The preset was chosen on images of this level." in said(told)
    assert "- Level 3, which it was chosen on: " in told
    assert "- Level 4: " in told
    harmed = "fog 1, fog 2, fog 3, fog 4 of 16 sets; least gain or most loss on fog 1 (+2.00)"
    assert f"It is above `fixed` on {harmed}." in said(told)
    assert "[`best.json`](../results/cifar10/best.json), [`best-levels.json`]" in said(told)


def test_trainings(root: Path) -> None:
    net = tt.load("cifar10-resnet26-gn-joint")
    (root / TRAININGS["gn-joint"]).write_text(json.dumps(net.card.record))
    (root / TRAININGS["bn-plain"]).write_text(json.dumps(make_record("plain", norm="batch")))
    short = {name: make_record("uda", target=name) for name in ("cifar10", *(f"cifar10-c/{c}/5" for c in CORRUPTIONS))}
    for record in short.values():
        record["epochs"] = record["epochs"][1:]
        record["epochs"][0]["together"] = 16
        record["configuration"]["network"]["start"] = hash_tensors(net.state_dict().values())
        record["configuration"]["recipe"] |= {"lr": 0.01, "rotations": "random"}
        record["configuration"]["data"] |= {"name": "cifar10[12800]", "count": 12_800}
        record["hardware"] = {"device": "cpu", "processor": "a processor"}
    (root / TRAININGS["uda"]).write_text(json.dumps(short))
    told = tell_trainings(read(root))
    rows = rows_of(told)[2:]
    assert rows[0][:8] == [
        *("ResNet-26, Group Normalization", "joint", "150", "0", "bfloat16", "200", "8.58"),
        "`cifar10-resnet26-gn-joint`",  # whose record is from before `precision` had a name
    ]
    assert rows[1][:8] == ["ResNet-26, Batch Normalization", "plain", "75", "0", "bfloat16", "123", "8.12", ""]
    title = "uda, one for each of 16 sets, from `cifar10-resnet26-gn-joint`"
    assert rows[2][1:8] == [title, "150", "0", "bfloat16", "123", "8.12 to 8.12", ""]
    assert len(rows) == 3
    assert told.count(" † |") == 2
    assert "Every training is on one NVIDIA H200, but for `uda` (a processor), with a test after" in said(told)
    assert "share their seconds evenly. † These shared the GPU with other trainings" in said(told)
    block = told.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ")
    lines = [shlex.split(line) for line in block.splitlines()]
    assert [" ".join(words) for words in lines] == [
        "testtime train --data cifar10 --method plain --norm batch --seed 0 --precision bf16 --out runs/bn-plain",
        "testtime train --data cifar10 --method uda --targets cifar10,cifar10-c/*/5 --start cifar10-resnet26-gn-joint "
        "--lr 0.01 --rotations random --limit 12800 --seed 0 --precision bf16 --out runs/uda",
    ]
    group: Any = typer.main.get_command(app)
    for _, name, *arguments in lines:
        group.commands[name].make_context(name, arguments)


def test_the_command_of_a_training_on_photographs() -> None:
    record = make_record("plain")
    held = record["configuration"]
    held["recipe"] = json.loads(json.dumps(asdict(Recipe.imagenet(method="plain", epochs=30, precision="bf16"))))
    held["network"]["architecture"] = {"name": "resnet18", "norm": "group", "size": 128}
    held["data"]["name"] = "imagenet/train"
    assert training_command("photographs", [record]) == (
        "testtime train --data imagenet --method plain --size 128 --epochs 30 --seed 0 --precision bf16 "
        "--out runs/photographs"
    )
    held["data"]["name"] = "folder/train"
    held["network"]["augment"] = {"name": "resized-crop-flip", "size": 128, "scale": [0.35, 1.0]}
    held["recipe"]["weight_decay"] = 5e-4
    assert training_command("small", [record]) == (
        "testtime train --data photographs --method plain --network resnet18 --size 128 --crop-area 0.35 --epochs 30 "
        "--weight-decay 0.0005 --seed 0 --precision bf16 --out runs/small"
    )


@pytest.mark.parametrize("held", ["{", "[]", "{}", '{"seconds": 1, "epochs": []}', '{"seconds": 1, "epochs": [1]}'])
def test_what_is_no_record_of_a_training_is_named(root: Path, held: str) -> None:
    (root / TRAININGS["gn-plain"]).write_text(held)
    with pytest.raises(ResultsError, match=r"training-gn-plain\.json: "):
        read_trainings(root)


def test_paired_differences_by_hand(root: Path) -> None:
    results = read_whole(root)
    gap, ends = compare(results, "episodic", "fixed", LEVEL_5[1:])
    assert gap == pytest.approx(-100 * 4 / 150)
    assert ends.low < gap < ends.high <= 0
    same, nothing = compare(results, "fixed", "fixed", LEVEL_5)
    assert (same, *nothing) == (0, 0, 0)


def test_photographs(root: Path) -> None:
    sets = ["imagenet", *(f"imagenet-c/{name}/5" for name in SHIFTS)]
    wrong = {"plain": [6, 40, 30, 10], "fixed": [5, 38, 28, 9], "episodic": [5, 36, 26, 9], "online": [5, 20, 10, 8]}
    make_file(root, FILES["photographs"][0], wrong, sets)
    found = read(root)
    told = tell_photographs(found)
    assert row(told, "online (TTT-Online)") == ["90.0", "60.0", "80.0", "84.0", "74.7"]
    assert "paper" not in {cells[0] for cells in rows_of(told)}
    gains = {cells[0]: cells[1:] for cells in rows_of(told)[-5:]}
    assert (gains["fog"][0], gains["fog"][3]) == ("+4.00", "+36.00")
    # The paper's accuracies on fog are 17.0, 20.0 and 47.6.
    assert (gains["fog"][2], gains["fog"][5]) == ("+3.00", "+30.60")
    assert "imagenette-streams.svg" in told
    drawing = draw_photographs(found.parts["photographs"])
    assert drawing is not None
    assert {"orig", "gauss"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", drawing.svg()))


def test_the_standard_version_on_photographs_may_have_fewer_images(root: Path) -> None:
    sets = ["imagenet", *(f"imagenet-c/{name}/5" for name in SHIFTS)]
    make_file(root, FILES["photographs"][0], {"fixed": [5, 38, 28, 9], "online": [5, 20, 10, 8]}, sets)
    assert "standard-level-5.json` will hold it" in tell_photographs(read(root))
    few = {"fixed": [COUNT, 38, 28, 9], "episodic": [0, 36, 26, 9]}
    make_file(root, FILES["standard photographs"][0], few, sets, images=20)
    told = tell_photographs(read(root))
    assert "20 photographs of" in told
    assert row(told, "episodic (TTT)")[0] == "100.0"
    gains = {cells[0]: cells[1:] for cells in rows_of(told)[-5:]}
    assert (gains["original"][0], gains["fog"][3]) == ("+100.00", "+36.00")


TELLS = (
    *(tell_means, tell_runs, tell_commands, tell_trainings, tell_differences, tell_losses, tell_harm, tell_thousands),
    *(tell_seeds, tell_batch_norm, tell_gradual, tell_costs, tell_short, tell_steps, tell_best, tell_photographs),
    tell_missing,
)


def tell_whole(root: Path) -> dict[str, str]:
    found = read(root)
    return {tell.__name__: tell(found) for tell in TELLS}


def test_any_of_the_files_may_be_missing_or_there_alone(root: Path) -> None:
    files = make_everything(root)
    assert all((root / file).exists() for file in files)
    whole = tell_whole(root)
    assert not any("Not run yet" in told for told in whole.values())
    assert whole["tell_missing"].count("\n") == 1
    assert findings.draw_figures(read(root)).keys() >= {findings.GRADUAL, findings.PHOTOGRAPHS, findings.STREAMS}
    for file in files:
        (root / file).rename(root / "aside")
        assert tell_whole(root) != whole, file
        (root / "aside").rename(root / file)
    held = {file: (root / file).read_bytes() for file in files}
    for file in files:
        (root / file).unlink()
    bare = tell_whole(root)
    for file, content in held.items():
        (root / file).write_bytes(content)
        assert tell_whole(root) != bare, file
        (root / file).unlink()

"""`testtime predict`: what the adapter answers, on pictures of any kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EVIL, Run, assert_tame, start
from PIL import Image

from testtime import Episodic, Online, data, load, resnet26
from testtime.adaptation.methods import METHODS
from testtime.data import DataError
from testtime.evaluation.predict_files import (
    Answer,
    default_network,
    format_answer,
    format_points,
    hash_content,
    load_image,
    predict,
    prepare_adapter,
)

BUNDLED = "testtime.networks.checkpoint.bundled"


def test_without_a_bundled_network_it_names_the_command_that_trains_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, pictures: Path
) -> None:
    monkeypatch.setattr(BUNDLED, lambda: ())
    code, _, err = run("predict", pictures)
    assert code == 1
    assert "testtime train" in err


def test_the_default_network_is_a_bundled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUNDLED, lambda: ("a-digits", "cifar10-resnet26-bn-joint", "cifar10-resnet26-gn-joint"))
    assert default_network() == "cifar10-resnet26-gn-joint"
    monkeypatch.setattr(BUNDLED, lambda: ("a-digits", "b-faces"))
    assert default_network() == "a-digits"


@pytest.mark.parametrize("mode", ["episodic", "online"])
def test_predict_prints_the_adapters_answers(run: Run, network: Path, pictures: Path, mode: str) -> None:
    options = ["--steps", "2", "--lr", "0.01", "--copies", "8", "--seed", "3", "--device", "cpu", "--json"]
    options += ["--online"] if mode == "online" else []
    code, out, err = run("predict", pictures, "-c", network, *options)
    assert code == 0
    assert re.fullmatch(r"pictures  3/3[^\n]*\n", err)
    document = json.loads(out)
    assert document["network"] == str(network)
    assert document["unread"] == []

    net = load(network)
    kind = Online if mode == "online" else Episodic
    adapter = kind(net, steps=2, lr=0.01, copies=8, seed=3)
    for number, answer in enumerate(document["answers"]):
        file = pictures / f"{number}.png"
        image = load_image(net.card, file)
        expected = adapter.predict(image[None], torch.tensor([hash_content(image)]))
        before, after = expected.logits_before.softmax(1)[0], expected.logits.softmax(1)[0]
        assert answer["image"] == str(file)
        assert answer["before"] == str(int(before.argmax()))
        assert answer["after"] == str(int(after.argmax()))
        assert answer["before_probability"] == pytest.approx(float(before.max()))
        assert answer["after_probability"] == pytest.approx(float(after.max()))
        assert answer["change"] == pytest.approx(float((after - before)[after.argmax()]))
        assert answer["adapted"] is True
    assert len(document["answers"]) == 3


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if {*one.needs} <= {"branch", "batch"}])
def test_a_method_runs_in_its_own_mode(run: Run, network: Path, pictures: Path, method: str) -> None:
    options = ["--device", "cpu", "--json", "--method", method, "--copies", "8"]
    code, out, err = run("predict", pictures, "-c", network, *options)
    assert code == 0, err
    net = load(network)
    shown = torch.stack([load_image(net.card, pictures / f"{number}.png") for number in range(3)])
    adapter = (Online if METHODS[method].mode == "online" else Episodic)(net, method=method, copies=8)
    samples = torch.tensor(list(map(hash_content, shown)))
    size = 3 if "batch" in METHODS[method].needs else 1
    calls = zip(shown.split(size), samples.split(size), strict=True)
    expected = torch.cat([adapter.predict(*call).logits for call in calls]).softmax(1).amax(1)
    found = [answer["after_probability"] for answer in json.loads(out)["answers"]]
    assert found == pytest.approx(expected.tolist(), rel=1e-6)


def test_an_unknown_method_is_refused_with_the_names_of_all(run: Run, pictures: Path) -> None:
    code, out, err = run("predict", pictures, "--method", "magic")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(f" {name}," in err for name in METHODS)
    assert "'magic'" in err


def test_predict_prints_one_line_a_picture(run: Run, network: Path, pictures: Path) -> None:
    files = [pictures / "1.png", pictures / "0.png"]
    code, out, _ = run("predict", *files, "-c", network, "--threshold", "0")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [str(file) for file in files]
    for line in lines:
        assert re.search(r"\d \d+\.\d% → \d \d+\.\d%  \+0\.0 points  \(not adapted\)$", line)


def test_what_a_pipe_cannot_encode_is_replaced(network: Path, pictures: Path) -> None:
    arguments = ["predict", str(pictures / "0.png"), "-c", str(network), "--steps", "0"]
    process = start(*arguments, PYTHONIOENCODING="cp1252")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err.count("\n")) == (0, 1)
    assert re.search(r"% \? \d \d+\.\d%  \+0\.0 points  \(not adapted\)$", out.rstrip())


@pytest.mark.parametrize("together", [1, 2, 16])
def test_a_picture_that_cannot_be_read_costs_the_others_nothing(
    run: Run, network: Path, pictures: Path, tmp_path: Path, together: int
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes((pictures / "0.png").read_bytes()[:40])
    files = [pictures / "0.png", bad, pictures / "1.png", pictures / "1.png"]
    code, out, err = run("predict", *files, "-c", network, "--copies", "2", "--json")
    assert code == 1
    document = json.loads(out)
    (fault,) = document["unread"]
    assert fault.startswith(f"{bad}: ")
    assert f"error: {fault}\n" in err
    assert [answer["image"] for answer in document["answers"]] == [str(file) for file in files if file != bad]
    code, lines, err = run("predict", *files, "-c", network, "--copies", "2")
    assert (code, len(lines.splitlines()), err.splitlines()[1:]) == (1, 3, [f"error: {fault}"])

    net, faults = load(network), []
    adapter = prepare_adapter(net, copies=2)
    answers = list(predict(adapter, net.card, files, together, faults.append))
    assert [answer.image for answer in answers] == [str(file) for file in files if file != bad]
    assert [str(one) for one in faults] == [fault]
    with pytest.raises(DataError, match=r"bad\.png"):
        list(predict(adapter, net.card, files, together))


def test_a_picture_that_does_not_exist_is_reported_and_left_out(run: Run, network: Path, pictures: Path) -> None:
    files = [pictures / "0.png", pictures / "none.png", pictures / "1.png"]
    code, out, err = run("predict", *files, "-c", network, "--steps", "0", "--json")
    assert code == 1
    assert [answer["image"] for answer in json.loads(out)["answers"]] == [str(files[0]), str(files[2])]
    assert f"error: {files[1]}: no such file\n" in err


def test_a_picture_is_cropped_to_its_central_square_and_converted_to_gray(tmp_path: Path) -> None:
    wide = Image.new("RGB", (48, 16), "red")
    wide.paste((0, 255, 0), (16, 0, 32, 16))  # the central square is green
    wide.save(tmp_path / "wide.png")
    colour = load_image(resnet26(2, depth=8, size=16).card, tmp_path / "wide.png")
    assert torch.equal(colour, torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 16))
    gray = load_image(resnet26(2, depth=8, size=16, channels=1).card, tmp_path / "wide.png")
    assert torch.equal(gray, torch.full((1, 16, 16), 150, dtype=torch.uint8))  # 0.587 · 255


def test_answers_are_printable() -> None:
    values: Any = (0.5, EVIL, 0.5, 0.0, 0.5, 1.0, 1.0, True, False)
    line = format_answer(Answer(EVIL, EVIL, *values))
    assert "\n" not in line
    assert_tame(line)


def test_an_answer_depends_on_the_file_not_on_its_position(run: Run, network: Path, pictures: Path) -> None:
    files = [pictures / name for name in ("0.png", "1.png", "0.png", "2.png", "0.png")]
    answers = json.loads(run("predict", *files, "-c", network, "--steps", "1", "--json")[1])["answers"]
    assert answers[0] == answers[2] == answers[4]
    assert answers[0]["after_probability"] != answers[1]["after_probability"]


def test_differences_are_points_and_zero_has_no_sign_of_its_own() -> None:
    expected = {0.054: "+5.4 points", -0.0004: "+0.0 points", -0.02: "-2.0 points"}
    assert {change: format_points(change) for change in expected} == expected


def test_it_names_the_network_and_its_classes(run: Run, pictures: Path) -> None:
    _, _, err = run("predict", pictures / "0.png", "-c", "digits-resnet8-gn-joint", "--steps", "0")
    assert "digits-resnet8-gn-joint" in err
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in err


def test_an_image_is_marked_where_energy_or_task_say_that_it_is_unlike_the_training_images(tmp_path: Path) -> None:
    net, digits = load("digits-resnet8-gn-joint"), data.open("digits").images(torch.arange(60))
    noise = torch.randint(0, 256, (20, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, image in enumerate(torch.cat([digits, noise])):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number:03}.png")
    files = sorted(tmp_path.glob("*.png"))
    assert net.statistics is not None
    adapter, usual = prepare_adapter(net, steps=0), net.statistics.about
    found = [answer.familiar for answer in predict(adapter, net.card, files, 20, usual=usual)]
    with torch.no_grad():
        views = torch.cat([digits, noise])
        energy = net(views).logsumexp(1)
        outputs = torch.stack([net.self_supervise(views.rot90(k, (2, 3))).log_softmax(1)[:, k] for k in range(4)])
    expected = (energy >= usual["energy"]) & (-outputs.mean(0) <= usual["task_loss"])
    assert found == expected.tolist()
    assert sum(found[:60]) >= 55
    assert sum(found[60:]) <= 8
    assert all(answer.familiar is None for answer in predict(adapter, net.card, files[:1]))


@pytest.mark.parametrize("mode", ["episodic", "online"])
def test_settings_that_are_not_given_are_those_of_the_card(mode: str) -> None:
    net = load("digits-resnet8-gn-joint")
    adapter = prepare_adapter(net, mode == "online", copies=3)
    recommended = net.card.settings[mode]
    assert (adapter.settings.steps, adapter.settings.lr) == (recommended["steps"], recommended["lr"])
    assert adapter.settings.copies == 3
    assert Online(net).settings.lr == 0.001  # the paper's, in Python
    net.describe(settings={mode: {"lr": "fast"}})
    with pytest.raises(ValueError, match="lr"):
        prepare_adapter(net, mode == "online")

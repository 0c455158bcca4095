"""Diagnoses: what is measured, and that the verdicts fit data of which the answer is known."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import testtime as tt
from report_runs import make_benchmark
from testtime.cli import run as run_command
from testtime.cli.diagnose import diagnose as command
from testtime.data.corrupted import Corrupted
from testtime.data.sets import TensorSet, TestSet
from testtime.diagnosis.measure import Diagnosis, diagnose, diagnose_all, find_hints, find_reference, measure_reference
from testtime.diagnosis.result import Estimate, Reference, format_diagnosis, list_facts
from testtime.diagnosis.verdict import judge
from testtime.report.diagnosis import DiagnosisError, as_sections, read_diagnoses, render_page, write_page
from testtime.storage import FileError

NAME = "digits-resnet8-gn-joint"


@pytest.fixture(scope="module")
def net() -> tt.YNet:
    return tt.load(NAME)


@pytest.fixture(scope="module")
def reference(net: tt.YNet) -> Reference:
    found = find_reference(net)
    assert found is not None
    return found


def digits() -> tuple[Tensor, Tensor]:
    """The test digits, float `(500, 1, 16, 16)`, and their labels."""
    clean = tt.data.open("digits")
    assert clean.labels is not None
    return clean.images(slice(None)).float(), clean.labels


def make_set(name: str, images: Tensor, labels: Tensor | None = None) -> TensorSet:
    return TensorSet(name, images.round().to(torch.uint8), labels, "0123456789")


def shifted(corruption: str, level: int) -> TestSet:
    return Corrupted(tt.data.open("digits"), corruption, level, scale="imagenet")


def on_paper(images: Tensor) -> Tensor:
    """Digits on gray paper, so that black margins show."""
    return 60 + 0.7 * images


def letterboxed(images: Tensor) -> Tensor:
    """Squeezed between black margins at the top and the bottom, as video frames are."""
    frame = torch.zeros_like(images)
    frame[:, :, 3:13] = F.interpolate(on_paper(images), (10, 16), mode="bilinear")
    return frame


def cut_off(images: Tensor) -> Tensor:
    """A black margin on one side."""
    images = on_paper(images)
    images[:, :, 13:] = 0
    return images


def stamped(images: Tensor) -> Tensor:
    """A stamp in one corner."""
    images = on_paper(images)
    images[:, :, 13:15, 9:15] = 255
    return images


def turned(images: Tensor) -> Tensor:
    """Seen from above: each image lies in a direction of its own."""
    turns = tt.Draws.of(3, torch.arange(len(images))).integers(4).tolist()
    return torch.stack([image.rot90(turn, (1, 2)) for image, turn in zip(images, turns, strict=True)])


def symmetric(images: Tensor) -> Tensor:
    """The same picture from all four sides."""
    return torch.stack([images.rot90(turn, (2, 3)) for turn in range(4)]).amax(0)


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [letterboxed, cut_off, stamped])
def test_borders_that_give_the_turn_away_are_noticed(make: Any, net: tt.YNet, reference: Reference) -> None:
    """The paper's warning: black margins make rotation trivial (section 3, video frames)."""
    found = diagnose(net, make_set("frames", make(digits()[0])), reference=reference, limit=200, trial=64)
    assert found.verdict.kind == "trivial"
    assert "margins" in found.verdict.advice
    named = "Blank margins" if make is not stamped else "outermost pixels alone"
    assert any(named in reason for reason in found.verdict.reasons)


@pytest.mark.parametrize("make", [turned, symmetric])
def test_scenes_without_an_up_are_noticed(make: Any, net: tt.YNet, reference: Reference) -> None:
    """The other half of the warning: the task must be well defined."""
    found = diagnose(net, make_set("from above", make(digits()[0])), reference=reference)
    assert found.verdict.kind == "ill-defined"
    assert "rotation" in found.verdict.headline
    assert "testtime methods" in found.verdict.advice
    assert found.trial.loss.value > 0.9 * math.log(4)
    assert found.task_error.value == pytest.approx(0.75, abs=0.02)
    all_ways = any("their orientations vary" in reason for reason in found.verdict.reasons)
    assert all_ways == (make is turned)


def test_an_untrained_branch_is_told_from_ill_defined_data(net: tt.YNet, reference: Reference) -> None:
    untrained = tt.load(NAME)
    untrained.ssl = tt.resnet26(depth=8, channels=1, size=16, seed=1).ssl
    images, options = make_set("from above", turned(digits()[0])), {"limit": 200, "trial": 64}
    own = find_reference(untrained)
    assert own is not None
    found = diagnose(untrained, images, reference=own, **options)
    assert found.verdict.kind == "untrained"
    assert own.task_error is not None
    assert f"{own.task_error:.1%}" in found.verdict.headline
    assert "fit-branch" in found.verdict.advice
    assert diagnose(net, images, reference=reference, **options).verdict.kind == "ill-defined"
    unknown = diagnose(untrained, images, **options).verdict
    assert unknown.kind == "unclear"
    assert "--reference" in unknown.advice
    tt.fit_branch(untrained, tt.data.open("digits", split="train"), epochs=2, batch=32)
    assert diagnose(untrained, images, reference=find_reference(untrained), **options).verdict.kind != "untrained"


def test_a_loss_of_guessing_in_the_card_is_an_untrained_branch(net: tt.YNet) -> None:
    test_set, options = shifted("contrast", 5), {"limit": 64, "trial": 32}
    guessed = diagnose(net, test_set, reference=Reference("the card", 1.38), **options)
    assert guessed.verdict.kind == "untrained"
    assert "1.38" in guessed.verdict.headline
    assert diagnose(net, test_set, reference=Reference("the card", 1.0), **options).verdict.kind != "untrained"


@pytest.mark.slow
def test_verdicts_on_digits_agree_with_the_measured_gain(net: tt.YNet, reference: Reference) -> None:
    """Clean digits and three shifts, with the settings of the README, on images that the trial may also have seen."""
    learn = {"steps": 2, "lr": 0.02, "copies": 1, "task": tt.Rotation("all"), "augment": tt.CropFlip(0, False)}
    expected = {"digits": "little to gain", "contrast": "helps", "impulse_noise": "helps", "motion_blur": "trivial"}
    for name, kind in expected.items():
        test_set = tt.data.open("digits") if name == "digits" else shifted(name, 5)
        found = diagnose(net, test_set, reference=reference)
        assert found.verdict.kind == kind
        before = tt.error(tt.evaluate(tt.Fixed(net), test_set, shuffle=True, limit=200))
        after = tt.error(tt.evaluate(tt.Online(net, **learn), test_set, shuffle=True, limit=200))
        if kind == "helps":
            assert before - after > 0.05
        else:
            assert before - after < 0.02


def test_few_images_do_not_show_that_there_is_nothing_to_gain(net: tt.YNet, reference: Reference) -> None:
    found = diagnose(net, shifted("contrast", 5), reference=reference, limit=64, trial=32)
    for drift, expected in ((1.2, True), (1.8, False)):
        uncertain = replace(found, task_loss=Estimate(drift * reference.task_loss, reference.task_loss))
        assert (judge(uncertain, math.log(4)).kind == "little to gain") == expected


def test_the_verdict_reads_no_labels(net: tt.YNet, reference: Reference) -> None:
    images, labels = digits()
    dim = (images * 0.15).round()
    options: dict[str, Any] = {"reference": reference, "limit": 96, "trial": 48}
    without = diagnose(net, make_set("dim", dim), **options)
    right = diagnose(net, make_set("dim", dim, labels), **options)
    wrong = diagnose(net, make_set("dim", dim, (labels + 1) % 10), **options)
    assert without.verdict == right.verdict == wrong.verdict
    assert without.agreement == right.agreement == wrong.agreement
    assert without.balance == right.balance == wrong.balance
    assert without.true_agreement is None
    assert without.trial.gain is None
    assert right.true_agreement is not None
    assert wrong.true_agreement is not None
    assert right.true_agreement.inner != wrong.true_agreement.inner
    assert right.trial.error_before is not None
    assert wrong.trial.error_before is not None
    assert right.trial.error_before + 0.5 < wrong.trial.error_before


def test_a_stream_that_explodes_is_noticed(net: tt.YNet, reference: Reference) -> None:
    found = diagnose(net, shifted("gaussian_noise", 5), reference=reference, limit=64, trial=32, lr=300.0)
    assert found.trial.rolled_back > 0.05
    assert found.verdict.kind in ("hurts", "ill-defined")
    assert any("the guard intervened" in r or "guessing" in r for r in found.verdict.reasons)


def test_without_a_reference_it_says_so(net: tt.YNet) -> None:
    found = diagnose(net, shifted("contrast", 5), limit=200, trial=100)
    assert found.reference is None
    assert found.verdict.kind == "helps"
    assert "on the training data they are not known" in found.verdict.reasons[0]
    assert "not known" in format_diagnosis(found)


def test_facts_about_rotation_are_only_for_rotation(net: tt.YNet) -> None:
    found = diagnose(net, shifted("contrast", 5), limit=48, trial=32)
    facts = list_facts(found)
    assert list(facts)[3:5] == ["up", "borders"]
    assert list_facts(replace(found, task="masked")).keys() == facts.keys() - {"up", "borders"}


# ---------------------------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_network(net: tt.YNet, reference: Reference) -> None:
    test_set = shifted("contrast", 3)
    found = diagnose(net, test_set, reference=reference, limit=500, trial=32, threshold=0.7)
    answers = tt.Fixed(net).predict(test_set.images(slice(None)))
    assert found.images == 500
    assert found.task_loss.value == pytest.approx(float(answers.loss_before.mean()), rel=1e-4)
    assert found.task_loss.error == pytest.approx(float(answers.loss_before.std()) / 500**0.5, rel=1e-3)
    assert found.gated == pytest.approx(float((answers.confidence < 0.7).float().mean()), abs=0.003)
    sure = answers.logits.softmax(1).amax(1) >= 0.9
    assert found.confident == pytest.approx(float(sure.float().mean()), abs=0.003)
    every_tenth = diagnose(net, test_set, reference=reference, limit=50, trial=32)
    assert every_tenth.task_loss.value == pytest.approx(float(answers.loss_before[::10].mean()), rel=1e-4)


def test_the_trial_is_online_learning(net: tt.YNet) -> None:
    images, labels = digits()
    test_set = make_set("dim", images * 0.15, labels)
    found = diagnose(net, test_set, limit=40, trial=32, steps=2, lr=0.02, seed=5)
    numbers = torch.arange(40) * 500 // 40
    chosen = numbers[tt.Draws.of(5, torch.arange(40)).purpose("order").keys.argsort(stable=True)[:32]]
    learner = tt.Online(net, steps=2, lr=0.02, seed=5, copies=1, task=tt.Rotation("all"), augment=tt.CropFlip(0, False))
    answers = learner.predict(test_set.images(chosen), chosen)
    fixed = tt.Fixed(net).predict(test_set.images(chosen))
    falls = (fixed.loss_before - answers.loss_before)[16:]
    assert found.trial.fall.value == pytest.approx(float(falls.mean()), rel=1e-3)
    assert found.trial.loss.value == pytest.approx(float(answers.loss_before[16:].mean()), rel=1e-3)
    assert found.trial.error_after == pytest.approx(float((answers.classes != labels[chosen]).float().mean()))
    assert found.trial.error_before == pytest.approx(float((fixed.classes != labels[chosen]).float().mean()))
    assert found.trial.gain is not None
    assert found.trial.gain.value == pytest.approx(found.trial.error_before - found.trial.error_after)


def test_a_loss_that_grows_along_the_stream_is_drift(net: tt.YNet) -> None:
    images, _ = digits()
    fading = make_set("fading", images * torch.linspace(1, 0.05, 500).view(-1, 1, 1, 1))
    steady = make_set("steady", images[torch.arange(500) * 7 % 500])
    assert diagnose(net, fading, limit=200, trial=32).drift.low > 0.5
    assert abs(diagnose(net, steady, limit=200, trial=32).drift.value) < 0.2


def test_hints_are_found_in_pictures_made_for_it() -> None:
    noise = tt.Draws.of(0, torch.arange(300)).uniform(24, 24)
    plain = find_hints(noise)
    assert plain.margins == (0, 0, 0, 0)
    assert plain.border == pytest.approx(0.75, abs=0.04)
    framed = noise.clone()
    framed[:, :6] = 0.5  # top
    framed[:, :, :3] = 0.25  # left
    framed[:, :, -12:] = 1.0  # right
    found = find_hints(framed)
    assert found.margins == pytest.approx((0, 3 / 24, 0, 12 / 24))  # the sides cut the margin at the top
    assert found.border < 0.01
    faint = find_hints(0.4 + 0.02 * framed)  # contrast does not matter
    assert faint.margins == pytest.approx(found.margins)
    wide = find_hints(torch.cat([torch.zeros(300, 24, 8), noise, torch.zeros(300, 24, 8)], dim=2))
    assert wide == plain  # the task sees the central square


def test_references_come_from_a_set_from_the_card_or_from_nowhere(net: tt.YNet, tmp_path: Path) -> None:
    losses = tt.Fixed(net).predict(tt.data.open("digits").images(slice(None))).loss_before
    own = find_reference(net)
    assert own is not None
    assert own.source == "digits, test images"
    assert own.task_loss == pytest.approx(float(losses.mean()), rel=1e-4)
    named = find_reference(net, "digits-c/fog/3", limit=50)
    assert named is not None
    assert named.source == "digits-c/fog/3"
    assert named.task_loss == pytest.approx(
        measure_reference(net, tt.data.open("digits-c/fog/3"), 50).task_loss, rel=1e-6
    )
    epochs = net.card.record["epochs"]
    other = tt.load(NAME).describe(record={"epochs": epochs, "configuration": {"data": {"name": "somebody's"}}})
    card = find_reference(other)
    assert card is not None
    assert card.task_loss == epochs[-1]["task"]
    assert card.task_error is None
    assert find_reference(tt.load(NAME).describe(record={})) is None
    elsewhere = {"configuration": {"data": {"name": "somebody's"}, "recipe": {"method": "plain"}}}
    plain = find_reference(tt.load(NAME).describe(record=elsewhere))
    assert plain is not None
    assert (plain.task_error, plain.task_loss) == pytest.approx((0.75, math.log(4)))
    for branch, expected in (
        ({"held_out": {"loss": 0.5, "error": 0.2}, "training": {"loss": 0.4, "error": 0.1}}, (0.5, 0.2)),
        ({"held_out": None, "training": {"loss": 0.4, "error": 0.1}}, (0.4, 0.1)),
        ({"held_out": [1], "training": {"loss": "low"}}, (math.log(4), 0.75)),  # damaged: as without it
        ("a branch", (math.log(4), 0.75)),
    ):
        found = find_reference(tt.load(NAME).describe(record=elsewhere | {"branch": branch}))
        assert found is not None
        assert (found.task_loss, found.task_error) == pytest.approx(expected)
    subset = tt.load(NAME).describe(record={"branch": {"configuration": {"data": {"name": "digits[:-130]"}}}})
    assert find_reference(subset) == own
    with pytest.raises(ValueError, match="must be one of"):
        find_reference(net, "nothing")


def test_several_sets_at_once_are_the_same_as_one_by_one(net: tt.YNet, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [tt.data.open("digits"), shifted("contrast", 5), shifted("fog", 3)]
    alone = [diagnose(net, one, limit=64, trial=32) for one in sets]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    told: list[tuple[int, int]] = []
    together = diagnose_all(net, sets, limit=64, trial=32, progress=lambda done, total, _: told.append((done, total)))
    assert [one.verdict for one in together] == [one.verdict for one in alone]
    assert told[-1] == (3 * 96, 3 * 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 5}, "`limit` must be at least 32, got 5"),
        ({"trial": 0}, "`trial` must be at least 32, got 0"),
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"lr": -1.0}, "`lr` must be positive, got -1.0"),
        ({"threshold": 2.0}, r"`threshold` must be in \[0, 1\], got 2.0"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str, net: tt.YNet) -> None:
    with pytest.raises(ValueError, match=message):
        diagnose(net, tt.data.open("digits"), **options)


def test_an_adapter_is_no_network(net: tt.YNet) -> None:
    with pytest.raises(TypeError, match=r"`net` must be a YNet.*, got Online"):
        diagnose(tt.Online(net), tt.data.open("digits"))  # type: ignore[arg-type]


def test_sets_that_do_not_fit_are_refused(net: tt.YNet) -> None:
    with pytest.raises(ValueError, match="few has 3 images; a diagnosis needs at least 32"):
        diagnose(net, make_set("few", digits()[0][:3]))
    colour = TensorSet("colour", torch.zeros(40, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="colour has 3 channels, the network takes 1"):
        diagnose(net, colour)


def test_estimates() -> None:
    found = Estimate.of(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found.value == 2.5
    assert found.error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert (found.low, found.high) == pytest.approx((2.5 - 2 * found.error, 2.5 + 2 * found.error))


def test_blank_images_have_no_verdict_but_an_answer(net: tt.YNet, reference: Reference) -> None:
    found = diagnose(net, make_set("blank", torch.zeros(64, 1, 16, 16)), reference=reference, trial=32)
    assert found.verdict.kind == "ill-defined"
    json.dumps(found.describe(), allow_nan=False)


# ---------------------------------------------------------------------------------------------------------------------
# The command line and the page
# ---------------------------------------------------------------------------------------------------------------------

FEW = ["--limit", "48", "--trial", "32"]


def test_the_command_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["diagnose", "-c", NAME, "--data", "digits-c/contrast/5", *FEW]) == 0
    out, err = capsys.readouterr()
    network, *lines = out.splitlines()
    assert network == f"network: {NAME}"
    assert lines[0] == "digits-c/contrast/5, 48 images"
    assert lines[1].endswith(".")
    words = [line.split()[0] for line in lines[2:]]
    for name in ("task", "drift", "borders", "gate", "guard", "agreement", "balance", "gain"):
        assert name in words
    assert "Next:" in words
    assert "80/80" in err  # progress


def test_it_asks_for_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["diagnose", "--data", "digits"]) == 2
    assert "-c " in capsys.readouterr().err
    assert run_command(["diagnose", "--help"]) == 0
    assert "[default: (bundled)]" not in capsys.readouterr().out


def test_the_command_gives_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["diagnose", "-c", NAME, "--data", "digits", "--data", "digits-c/f*g/5", "--json", *FEW]
    assert run_command([*arguments, "--out", str(tmp_path / "out")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["diagnoses"]] == ["digits", "digits-c/fog/5"]
    assert document["network"] == NAME
    assert document == read_diagnoses(tmp_path / "out" / "diagnosis.json")
    page = (tmp_path / "out" / "index.html").read_text()
    for entry in document["diagnoses"]:
        assert entry["verdict"]["headline"] in page
    assert page.count("<svg") == 4  # the losses, the sets beside each other, and the layers of each
    assert not re.search(r'(src|href)="(?!#)', page)  # nothing is fetched


def test_a_folder_without_labels_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, image in enumerate(digits()[0][:40, 0]):
        Image.fromarray(image.to(torch.uint8).numpy()).resize((48, 48)).save(tmp_path / f"{number:02}.png")
    assert run_command(["diagnose", "-c", NAME, "--data", str(tmp_path), "--json", *FEW]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["diagnoses"]
    assert entry["images"] == 40
    assert entry["true_agreement"] is None
    assert entry["trial"]["gain"] is None
    (tmp_path / "07.png").write_bytes(b"broken")
    assert run_command(["diagnose", "-c", NAME, "--data", str(tmp_path), "--json", *FEW]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / '07.png'}: not a picture in a known format\n"
    skipping = ["--on-bad-image", "skip"]
    assert run_command(["diagnose", "-c", NAME, "--data", str(tmp_path), "--json", *FEW, *skipping]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["diagnoses"][0]["images"] == 39
    assert "left out: 07.png: not a picture in a known format\n" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "nothing"], 2, "matches no data set"),
        (["--data", "digits", "--limit", "3"], 2, "greater than or equal to 32"),
        (["--data", "digits", "--reference", "nothing"], 2, "must be one of"),
        (["--data", "digits", "--lr", "0"], 2, "`lr` must be positive"),
        (["--data", "cifar10", "--data-root", "/nowhere"], 1, "cifar"),
        (["--data", "digits", "-c", "nothing.safetensors"], 1, "nothing.safetensors"),
        ([], 2, "--data"),
    ],
)
def test_bad_commands_get_one_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    network = [] if "-c" in arguments else ["-c", NAME]
    assert run_command(["diagnose", *network, *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert words in err


def entry_of(found: Diagnosis) -> dict[str, Any]:
    return json.loads(json.dumps(found.describe(), allow_nan=False))


def test_the_page_stands_alone_and_escapes_names(net: tt.YNet) -> None:
    found = entry_of(diagnose(net, make_set("<b>fog</b> & ice", digits()[0]), limit=40, trial=32))
    document = {"network": NAME, "command": "", "versions": {"torch": "2"}, "hardware": {"device": "cpu"}}
    page = render_page(document | {"diagnoses": [found]})
    assert "<b>fog" not in page
    assert "&lt;b&gt;fog" in page

    class Parser(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.stack: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "link", "br"):
                self.stack.append(tag)

        def handle_startendtag(self, tag: str, attrs: Any) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert self.stack.pop() == tag

    parser = Parser()
    parser.feed(page)
    assert parser.stack == []
    ((title, paragraphs),) = as_sections({"diagnoses": [found]})
    assert title == "Diagnosis of <b>fog</b> & ice"
    assert paragraphs[0] == found["verdict"]["headline"]


@pytest.mark.parametrize(
    "record",
    [
        {"configuration": []},
        {"configuration": {"data": "x"}},
        {"configuration": {"data": {"name": ["digits"]}}},
        {"configuration": {"data": {"name": "no such set"}}, "epochs": 3},
        {"epochs": [1]},
        {"epochs": [{"task": "x"}]},
        {"epochs": [{"task": True}]},
    ],
)
def test_odd_records_of_training_tell_nothing(record: dict[str, Any]) -> None:
    net = tt.resnet26(depth=8, channels=1, size=16)
    assert find_reference(net.describe(record=record)) is None


AGREEMENT = {"cosine": 0.1, "cosine_error": None, "layers": {"stem": {"inner": 1.0, "cosine": 0.1}}}
ENTRY: dict[str, Any] = {
    "name": "digits",
    "verdict": {"kind": "helps", "headline": "It helps.", "reasons": ["So."]},
    "facts": {"task": "easy"},
    "agreement": AGREEMENT,
}
DEEP: Any = {}
for _ in range(400):
    DEEP = {"a": DEEP}
MALFORMED: dict[str, Any] = {
    "empty": b"",
    "cut short": b"{",
    "nested deeply": b"[" * 100_000,
    "NaN": b'{"diagnoses": NaN}',
    "a list": [],
    "an empty table": {},
    "no diagnoses": {"diagnoses": []},
    "a diagnosis that is a number": {"diagnoses": [1]},
    "versions text": {"diagnoses": [ENTRY], "versions": "2"},
    "hardware a list": {"diagnoses": [ENTRY], "hardware": []},
    "network a table": {"diagnoses": [ENTRY], "network": {}},
    "command a number": {"diagnoses": [ENTRY], "command": 1},
    **{f"no {key}": {"diagnoses": [{k: v for k, v in ENTRY.items() if k != key}]} for key in ENTRY},
    **{
        f"{key}, {place}": {"diagnoses": [ENTRY | {key: value}]}
        for place, (key, value) in enumerate(
            (
                ("name", 3),
                ("verdict", "helps"),
                ("verdict", {}),
                ("verdict", ENTRY["verdict"] | {"kind": ["helps"]}),
                ("verdict", ENTRY["verdict"] | {"headline": None}),
                ("verdict", ENTRY["verdict"] | {"reasons": "So."}),
                ("verdict", ENTRY["verdict"] | {"reasons": [1]}),
                ("facts", []),
                ("facts", {"task": 1}),
                ("agreement", 3),
                ("agreement", {}),
                ("agreement", AGREEMENT | {"cosine": "x"}),
                ("agreement", AGREEMENT | {"cosine": 10**400}),
                ("agreement", AGREEMENT | {"cosine_error": "x"}),
                ("agreement", AGREEMENT | {"layers": []}),
                ("agreement", AGREEMENT | {"layers": {"stem": {}}}),
                ("agreement", AGREEMENT | {"layers": {"stem": {"cosine": True}}}),
                ("plain", "one"),
                ("verdict", ENTRY["verdict"] | {"advice": ["Wait."]}),
                ("more", DEEP),
            )
        )
    },
}


@pytest.mark.parametrize("name", ["a pipe", "a folder", "missing", *MALFORMED])
def test_malformed_documents(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "diagnosis.json"
    if name == "a pipe":
        os.mkfifo(path)
    elif name == "a folder":
        path.mkdir()
    elif name != "missing":
        content = MALFORMED[name]
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DiagnosisError) as caught:
        read_diagnoses(path)
    assert isinstance(caught.value, FileError)
    assert str(caught.value).startswith(f"{path}/diagnosis.json: " if name == "a folder" else f"{path}: ")
    assert str(caught.value).isprintable()
    arguments = ["report", str(tmp_path), "--out", str(tmp_path / "out"), "--diagnosis", str(path)]
    assert run_command(arguments) == 1
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_names_are_told_in_one_line(net: tt.YNet) -> None:
    evil = "a\nerror: b\x1b[31m"
    found = diagnose(net, make_set(evil, digits()[0]), reference=Reference(evil, 0.1), limit=40, trial=32)
    assert all(line.isprintable() for line in format_diagnosis(found).split("\n"))
    assert not re.search("^error", format_diagnosis(found), re.MULTILINE)


def test_odd_names_do_no_harm_on_the_page(tmp_path: Path) -> None:
    odd = ["$x^", "<img src=x onerror=alert(1)>", 'x" onload="alert(1)', "a\n\x1b[31mb\ud800", "n" * 200]
    layers = {name: {"inner": 1.0, "cosine": 0.1} for name in odd}
    entries = [ENTRY | {"name": name, "agreement": AGREEMENT | {"layers": layers}} for name in odd]
    document = {"network": odd[1], "command": odd[3], "versions": {odd[1]: odd[1]}, "hardware": {odd[1]: odd[1]}}
    page = write_page(document | {"diagnoses": entries}, tmp_path).read_text()
    assert "<img" not in page
    assert "\x1b" not in page
    assert not re.search(r'<[^>"]*(?:"[^"]*"[^>"]*)*\sonload=', page)
    assert read_diagnoses(tmp_path / "diagnosis.json")["diagnoses"] == entries


def test_a_runs_page_takes_diagnoses_in(net: tt.YNet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = entry_of(diagnose(net, tt.data.open("digits"), limit=40, trial=32))
    (tmp_path / "diagnosis.json").write_text(json.dumps({"diagnoses": [found]}))
    make_benchmark(tmp_path / "run", gradual=False, corruptions=("fog", "frost"))
    arguments = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "report"), "--format", "html"]
    assert run_command([*arguments, "--diagnosis", str(tmp_path / "diagnosis.json")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<h2>Diagnosis of digits</h2>" in page
    assert found["verdict"]["headline"] in page
    capsys.readouterr()
    assert run_command([*arguments, "--diagnosis", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_examples_of_the_help_that_need_no_download_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [line.split() for line in (command.__doc__ or "").splitlines() if "testtime diagnose" in line]
    bundled = [words[1:] for words in examples if "digits" in " ".join(words)]
    assert bundled
    for words in bundled:
        assert run_command([*words, "--limit", "32", "--trial", "32"]) == 0, capsys.readouterr().err
    assert run_command([*bundled[0], "--trial", "31"]) == 2
    assert "greater than or equal to 32" in capsys.readouterr().err

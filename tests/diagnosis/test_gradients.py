"""Gradient correlation against naive loops; studies of many sets; their join with a run's errors."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import models
import testtime as tt
from pictures import pictures
from report_runs import make_columns, make_run
from testtime.cli import run as run_command
from testtime.data.sets import TensorSet
from testtime.diagnosis import StudyError, gradient_correlation, name_sets, open_for, read_gradient_study, run_study
from testtime.diagnosis.batch_gradients import STAND_IN, BatchGradients
from testtime.diagnosis.gradients import ImageGradients, Products, name_layers
from testtime.report.correlation import bootstrap_correlation, format_correlations, join
from testtime.report.sources import ResultsError
from testtime.storage import FileError

TASK = tt.Rotation("all")
CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # losses are taken in float32, whatever the network computes in


def some_labels(count: int, classes: int = 10) -> Tensor:
    return tt.Draws.of(7, torch.arange(count)).integers(classes)


def make_net(kind: str) -> tt.YNet:
    """Networks of every kind that a gradient must get through, in float64 so that results can be compared closely."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build_net(kind)
    for layer in net.modules():  # statistics and scales that differ from their start
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = torch.linspace(-0.5, 0.5, layer.num_features)
            layer.running_var = torch.linspace(0.5, 1.5, layer.num_features)
        if isinstance(layer, nn.GroupNorm | nn.BatchNorm2d):
            layer.weight.data = torch.linspace(0.5, 1.5, len(layer.weight))
            layer.bias.data = torch.linspace(-0.2, 0.3, len(layer.bias))
    return net.double().eval()


def build_net(kind: str) -> tt.YNet:
    if kind in ("group", "batch"):
        net = tt.resnet26(depth=8, norm=kind, size=16)  # type: ignore[arg-type]
    elif kind == "resnet18":
        net = tt.resnet18(classes=10, size=32)
    else:
        model, at = {
            "sequential": (models.sequential(), "5"),
            "residual": (models.Residual(), "norm"),
            "groups": (models.Residual(), "top"),
            "transformer": (models.VisionTransformer(), "block1"),
            "inplace": (in_place(), "3"),
        }[kind]
        net = tt.split(model, at=at)
    return net


def in_place() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def naive(net: tt.YNet, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """⟨∇l_m, ∇l_s⟩, ‖∇l_m‖² and ‖∇l_s‖² by layer `(L,)` of the mean losses of a batch, as the authors compute them."""
    net = copy.deepcopy(net).eval().requires_grad_(True)
    F.cross_entropy(net(images), labels).backward()
    main = {name: p.grad.clone() if p.grad is not None else 0 * p for name, p in net.encoder.named_parameters()}
    net.zero_grad()
    turned = torch.cat([images.rot90(turn, (-2, -1)) for turn in range(4)])
    F.cross_entropy(net.self_supervise(turned), torch.arange(4).repeat_interleave(len(images))).backward()
    task = {name: p.grad if p.grad is not None else 0 * p for name, p in net.encoder.named_parameters()}
    rows = []
    for one, two in ((main, task), (main, main), (task, task)):
        layers = name_layers(net.encoder).values()
        rows.append(torch.stack([sum((one[n] * two[n]).sum() for n in names) for names in layers]))  # type: ignore[arg-type]
    return rows[0].detach(), rows[1].detach(), rows[2].detach()


KINDS = ("group", "batch", "resnet18", "sequential", "residual", "groups", "transformer", "inplace")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_single_images_are_those_of_a_loop(kind: str) -> None:
    net = make_net(kind)
    images, labels = (
        pictures(3, 3, 32 if kind == "resnet18" else 16, 32 if kind == "resnet18" else 16, dtype=torch.uint8),
        some_labels(3),
    )
    meter = ImageGradients(net, TASK)
    found = meter.products(images, torch.stack([labels, (labels + 1) % 10]))
    for number in range(3):
        for which, own in enumerate((labels, (labels + 1) % 10)):
            inner, main, task = naive(net, images[number : number + 1], own[number : number + 1])
            torch.testing.assert_close(found.inner[which, :, number], inner, **CLOSE)
            torch.testing.assert_close(found.main[which, :, number], main, **CLOSE)
            torch.testing.assert_close(found.task[:, number], task, **CLOSE)


def test_an_images_gradients_do_not_depend_on_its_chunk() -> None:
    meter = ImageGradients(make_net("group"), TASK)
    images, labels = pictures(7, 3, 16, 16, dtype=torch.uint8), some_labels(7)[None]
    whole = meter.products(images, labels)
    for size in (1, 2, 3):
        parts = zip(images.split(size), labels.split(size, dim=1), strict=True)
        joined = Products.join([meter.products(*part) for part in parts])
        for one, two in zip(whole, joined, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_images(threads: int) -> None:
    """In single precision, where convolutions are compiled, against the loop in double precision."""
    net, images, labels = tt.resnet26(depth=8, size=16), pictures(5, 3, 16, 16, dtype=torch.uint8), some_labels(5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        meter = ImageGradients(net, TASK)
        found = meter.products(images, labels[None])
        assert torch.get_num_threads() == threads
        assert meter.chunk % threads == 0
    finally:
        torch.set_num_threads(before)
    for number in range(5):
        inner, main, task = naive(copy.deepcopy(net).double(), images[number : number + 1], labels[number : number + 1])
        for ours, exact in ((found.inner[0], inner), (found.main[0], main), (found.task, task)):
            size = float((main * task).sqrt().max() if exact is inner else exact.max())
            torch.testing.assert_close(ours[:, number].double(), exact, rtol=0, atol=1e-4 * size)


def test_a_chunk_of_a_large_network_is_small() -> None:
    threads = min(torch.get_num_threads(), 8)
    assert ImageGradients(tt.resnet26(depth=8), TASK).chunk == 16 * threads
    assert ImageGradients(tt.resnet18(10), TASK).chunk == threads


def test_images_that_are_not_square_are_measured_as_the_task_sees_them() -> None:
    net = make_net("group")
    images, labels = pictures(2, 3, 20, 20, dtype=torch.uint8)[..., :16], some_labels(2)  # (2, 3, 20, 16)
    found = ImageGradients(net, TASK).products(images, labels[None])
    net.requires_grad_(True)
    parameters = list(net.encoder.parameters())
    for number in range(2):
        one = images[number : number + 1]
        main = torch.autograd.grad(F.cross_entropy(net(one), labels[number : number + 1]), parameters)
        turned = torch.cat([one[..., 2:18, :].rot90(turn, (-2, -1)) for turn in range(4)])
        task = torch.autograd.grad(F.cross_entropy(net.self_supervise(turned), torch.arange(4)), parameters)
        inner = sum((a * b).sum() for a, b in zip(main, task, strict=True))
        torch.testing.assert_close(found.inner[0, :, number].sum(), inner, **CLOSE)


@pytest.mark.parametrize("kind", ["group", "batch", "transformer"])
def test_the_batch_form_is_the_authors(kind: str) -> None:
    net, images, labels = make_net(kind), pictures(7, 3, 16, 16, dtype=torch.uint8), some_labels(7)
    test_set = TensorSet("made", images, labels, [str(k) for k in range(10)])
    found = gradient_correlation(net, None, test_set, batch=3, single=0)  # batches of 3, 3 and 1
    inners, cosines, by_layer = [], [], []
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):
        inner, main, task = naive(net, images[part], labels[part])
        inners.append(inner.sum())
        cosines.append(inner.sum() / (main.sum() * task.sum()).sqrt())
        by_layer.append(inner)
    assert found.batch is not None
    assert found.single is None
    assert found.batch.count == 3
    assert found.batch.inner == pytest.approx(float(torch.stack(inners).mean()), rel=1e-5)
    assert found.batch.cosine == pytest.approx(float(torch.stack(cosines).mean()), rel=1e-5)
    assert found.batch.inner_error == pytest.approx(float(torch.stack(inners).std() / 3**0.5), rel=1e-5)
    expected = dict(zip(name_layers(net.encoder), torch.stack(by_layer).mean(0).tolist(), strict=True))
    assert {name: layer.inner for name, layer in found.batch.layers.items()} == pytest.approx(expected, rel=1e-4)
    assert found.batch.inner == pytest.approx(sum(layer.inner for layer in found.batch.layers.values()))


def test_single_images_are_batches_of_one() -> None:
    net = make_net("group")
    test_set = TensorSet("made", pictures(6, 3, 16, 16, dtype=torch.uint8), some_labels(6), [str(k) for k in range(10)])
    one_by_one = gradient_correlation(net, TASK, test_set, batch=1, single=6)
    assert one_by_one.batch is not None
    assert one_by_one.single is not None
    assert one_by_one.single.inner == pytest.approx(one_by_one.batch.inner, rel=1e-5)
    assert one_by_one.single.cosine == pytest.approx(one_by_one.batch.cosine, rel=1e-5)
    assert one_by_one.single.positive == one_by_one.batch.positive


def test_stand_ins_are_the_confident_predictions() -> None:
    net, images = make_net("group"), pictures(9, 3, 16, 16, dtype=torch.uint8)
    with torch.no_grad():
        top, guesses = net(images).softmax(1).max(1)
    classes = [str(k) for k in range(10)]
    all_sure = gradient_correlation(net, None, TensorSet("made", images), batch=4, single=9, confident=0.0)
    labelled = gradient_correlation(net, None, TensorSet("made", images, guesses, classes), batch=4, single=9)
    assert all_sure.batch is None
    assert all_sure.single is None
    assert all_sure.error is None
    assert labelled.batch is not None
    assert labelled.single is not None
    assert all_sure.stand_in_batch is not None
    assert all_sure.stand_in_single is not None
    assert all_sure.confident == 1
    assert all_sure.stand_in_batch.inner == pytest.approx(labelled.batch.inner, rel=1e-5)
    assert all_sure.stand_in_single.inner == pytest.approx(labelled.single.inner, rel=1e-5)
    # Only some are sure: the others must not count.
    middle = float(top.median())
    keep = (top >= middle).nonzero().flatten()
    some = gradient_correlation(net, None, TensorSet("made", images), batch=9, single=9, confident=middle)
    only = gradient_correlation(net, None, TensorSet("made", images[keep], guesses[keep], classes), batch=9, single=9)
    assert some.stand_in_single is not None
    assert only.single is not None
    assert some.stand_in_single.inner == pytest.approx(only.single.inner, rel=1e-5)
    inner = BatchGradients(net, TASK, middle).measure(images, None)[0].inner[STAND_IN]
    truth = copy.deepcopy(net).requires_grad_(True)
    parameters = list(truth.encoder.parameters())
    own = torch.autograd.grad(F.cross_entropy(truth(images[keep]), guesses[keep]), parameters)
    views, targets = TASK.probe(images)
    task = torch.autograd.grad(F.cross_entropy(truth.self_supervise(views), targets), parameters)
    assert float(inner.sum()) == pytest.approx(
        float(sum((a * b).sum() for a, b in zip(own, task, strict=True))), rel=1e-6
    )
    none = gradient_correlation(net, None, TensorSet("made", images), single=9, confident=1.0)
    assert none.stand_in_batch is None
    assert none.stand_in_single is None
    assert none.confident == 0


@pytest.mark.parametrize("kind", ["group", "batch"])
def test_balance_is_how_even_the_predictions_of_a_batch_are(kind: str) -> None:
    net, images = make_net(kind), pictures(9, 3, 16, 16, dtype=torch.uint8)
    found = gradient_correlation(net, None, TensorSet("made", images), batch=5, single=0)
    truth = copy.deepcopy(net).requires_grad_(True)
    parameters, inners = list(truth.encoder.parameters()), []
    for part in (images[:5], images[5:]):
        shares = truth(part).softmax(1).mean(0)
        distance = (shares * (shares * 10).log()).sum()  # from all classes being as frequent, Kullback and Leibler's
        main = torch.autograd.grad(distance, parameters)
        views, targets = TASK.probe(part)
        task = torch.autograd.grad(F.cross_entropy(truth.self_supervise(views), targets), parameters)
        inners.append(sum(float((a * b).sum()) for a, b in zip(main, task, strict=True)))
    assert found.balance is not None
    assert found.balance.count == 2
    assert found.balance.inner == pytest.approx(sum(inners) / 2, rel=1e-4)


def test_what_else_is_noted() -> None:
    net, images, labels = make_net("group"), pictures(10, 3, 16, 16, dtype=torch.uint8), some_labels(10)
    test_set = TensorSet("made", images, labels, [str(k) for k in range(10)])
    found = gradient_correlation(net, None, test_set, batch=4, single=0)
    with torch.no_grad():
        logits = net(images)
        views, targets = TASK.probe(images)
        outputs = net.self_supervise(views)
    assert found.images == 10
    assert found.error == pytest.approx(float((logits.argmax(1) != labels).double().mean()))
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert found.task_error == pytest.approx(float((outputs.argmax(1) != targets).double().mean()))
    assert found.task_loss == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
    chances = logits.softmax(1)
    assert found.confidence == pytest.approx(float(chances.amax(1).mean()), rel=1e-5)
    assert found.entropy == pytest.approx(float(-(chances * chances.log()).sum(1).mean()), rel=1e-5)
    upright = outputs.view(10, 4, 4)[:, 0].softmax(1)[:, 0].mean()
    assert found.task_confidence == pytest.approx(float(upright), rel=1e-5)
    document = json.loads(json.dumps(found.describe(), allow_nan=False))
    assert document["batch"]["layers"].keys() == name_layers(net.encoder).keys()
    assert document["single"] is None


def test_the_network_is_left_as_it_was() -> None:
    net = tt.load("digits-resnet8-gn-joint").train()
    before, trainable = net.fingerprint(), [p.requires_grad for p in net.parameters()]
    with torch.inference_mode():
        gradient_correlation(net, None, tt.data.open("digits"), limit=16, single=8)
    assert net.fingerprint() == before
    assert [p.requires_grad for p in net.parameters()] == trainable
    assert net.training
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "`limit` must be at least 1, got 0"),
        ({"batch": 0}, "`batch` must be at least 1, got 0"),
        ({"single": -1}, "`single` must be at least 0, got -1"),
        ({"confident": 1.5}, r"`confident` must be in \[0, 1\], got 1.5"),
        ({"precision": "bf16"}, "`precision` must be"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradient_correlation(tt.load("digits-resnet8-gn-joint"), None, tt.data.open("digits"), **options)  # type: ignore[arg-type]


def test_sets_that_do_not_fit_are_refused() -> None:
    net = tt.load("digits-resnet8-gn-joint")
    with pytest.raises(ValueError, match="has 3 channels, the network takes 1"):
        gradient_correlation(net, None, TensorSet("colour", pictures(2, 3, 16, 16, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="has label 11, the network has 10 classes"):
        gradient_correlation(
            net, None, TensorSet("more", pictures(1, 1, 16, 16, dtype=torch.uint8), torch.tensor([11]))
        )
    with pytest.raises(ValueError, match="has no images"):
        gradient_correlation(net, None, TensorSet("none", pictures(1, 1, 16, 16, dtype=torch.uint8)[:0]))


def test_the_two_tasks_agree_where_adapting_to_digits_helps() -> None:
    """The bundled network on a shift that online learning mends, and on clean digits, where nothing is to be mended."""
    net = tt.load("digits-resnet8-gn-joint")
    shifted = gradient_correlation(net, None, tt.data.open("digits-c/contrast/5", scale="imagenet"), single=0)
    clean = gradient_correlation(net, None, tt.data.open("digits"), single=0)
    for name in ("batch", "stand_in_batch", "balance"):
        one, other = getattr(shifted, name), getattr(clean, name)
        assert one is not None
        assert other is not None
        assert one.cosine - 2 * one.cosine_error > 0
        assert abs(other.inner) < one.inner / 100


# ---------------------------------------------------------------------------------------------------------------------
# Studies
# ---------------------------------------------------------------------------------------------------------------------

NAMES = ("digits-c/contrast/5", "digits-c/fog/3", "digits")
SMALL = {"limit": 40, "batch": 16, "single": 8}


def test_a_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    net, out = tt.load("digits-resnet8-gn-joint"), tmp_path / "study.json"
    whole = run_study(net, NAMES, tmp_path / "whole.json", **SMALL)  # type: ignore[arg-type]

    def stop(done: int, total: int, text: str) -> None:
        assert total == 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(net, NAMES, out, progress=stop, **SMALL)  # type: ignore[arg-type]
    assert list(read_gradient_study(out)["sets"]) == list(NAMES[:2])
    told: list[int] = []
    resumed = run_study(net, NAMES, out, progress=lambda done, *_: told.append(done), **SMALL)  # type: ignore[arg-type]
    assert told == [3]
    for name in NAMES:
        assert resumed["sets"][name] | {"seconds": 0} == whole["sets"][name] | {"seconds": 0}
    assert whole["sets"]["digits"]["images"] == 40
    direct = gradient_correlation(net, None, tt.data.open("digits-c/fog/3"), **SMALL)  # type: ignore[arg-type]
    assert direct.batch is not None
    assert whole["sets"]["digits-c/fog/3"]["batch"]["inner"] == pytest.approx(direct.batch.inner, rel=1e-4)


def test_the_labels_of_a_subset_are_not_those_of_the_network(tmp_path: Path) -> None:
    net = tt.resnet26(depth=8, size=16).describe(classes=tuple("abcdefghij"))
    for shade, name in enumerate("hbe"):
        (tmp_path / "imagenet-r" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), (80 * shade,) * 3).save(tmp_path / "imagenet-r" / name / "1.jpg")
    study = run_study(net, ["imagenet-r"], tmp_path / "study.json", root=tmp_path, **SMALL)  # type: ignore[arg-type]
    direct = gradient_correlation(net, None, open_for(net, "imagenet-r", tmp_path), **SMALL).describe()  # type: ignore[arg-type]
    assert {name: study["sets"]["imagenet-r"][name] for name in direct} == direct
    assert direct["error"] is None


def test_a_study_of_something_else_is_not_mixed_in(tmp_path: Path) -> None:
    net, out = tt.load("digits-resnet8-gn-joint"), tmp_path / "study.json"
    run_study(net, ["digits"], out, **SMALL)  # type: ignore[arg-type]
    before = out.read_text()
    with pytest.raises(StudyError, match=r"another configuration .*limit: 40 there, 20 now"):
        run_study(net, ["digits"], out, **(SMALL | {"limit": 20}))  # type: ignore[arg-type]
    with pytest.raises(StudyError, match=r"another configuration .*network"):
        run_study(tt.resnet26(depth=8, channels=1, size=16, seed=1), ["digits"], out, **SMALL)  # type: ignore[arg-type]
    assert out.read_text() == before


DEEP: Any = {}
for _ in range(400):
    DEEP = {"a": DEEP}
AGREEMENT = {"inner": 1.0, "inner_error": None, "cosine": 0.1, "count": 3, "layers": {"stem": {"inner": 1.0}}}
ENTRY = {"stand_in_batch": AGREEMENT, "batch": None, "error": 0.5, "name": "digits", "images": 3, "seconds": 1.0}
MALFORMED: dict[str, Any] = {
    "empty": b"",
    "cut short": b"{",
    "not UTF-8": b'{"\xff": 1}',
    "nested deeply": b"[" * 100_000,
    "a list": [],
    "nothing": None,
    "no configuration": {"sets": {"digits": ENTRY}},
    "configuration a list": {"configuration": [], "sets": {"digits": ENTRY}},
    "configuration nested deeply": {"configuration": DEEP, "sets": {"digits": ENTRY}},
    "no sets": {"configuration": {}},
    "sets a list": {"configuration": {}, "sets": [ENTRY]},
    "a set that is a number": {"configuration": {}, "sets": {"a": 1}},
    "a set of something else": {"configuration": {}, "sets": {"a": {}}},
    "NaN": b'{"configuration": {}, "sets": {"digits": {"stand_in_batch": null, "error": NaN}}}',
    "infinity": b'{"configuration": {}, "sets": {"digits": {"stand_in_batch": null, "error": 1e999}}}',
    **{
        f"{key} {value!r:.10}": {"configuration": {}, "sets": {"digits": ENTRY | {key: value}}}
        for key, value in {
            "error": "x",
            "task_loss": True,
            "entropy": 10**400,
            "task_error": [],
            "batch": 3,
            "single": {"inner": "x"},
            "balance": {"cosine": -1e200},
            "stand_in_batch": "x",
            "stand_in_single": {"inner": {}},
            "fingerprint": 3,
            "seconds": "x",
        }.items()
    },
}


@pytest.mark.parametrize("name", ["a pipe", "a folder", "missing", *MALFORMED])
def test_malformed_studies(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study.json"
    if name == "a pipe":
        os.mkfifo(path)
    elif name == "a folder":
        path.mkdir()
    elif name != "missing":
        content = MALFORMED[name]
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(StudyError) as caught:
        read_gradient_study(path)
    assert isinstance(caught.value, FileError)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()
    make_errors(tmp_path / "run", {"digits": 1})
    assert run_command(["correlate", str(path), str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: {caught.value}\n"
    assert not (tmp_path / "out").exists()


def test_a_set_of_an_odd_name_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains = {f"digits-c/fog/{level}": level for level in range(1, 6)}
    odd = {"a\nerror: b\x1b[31m[/red]$x^": 1.0}
    study = make_study(tmp_path / "study.json", odd | {name: float(gain) for name, gain in gains.items()})
    run = make_errors(tmp_path / "run", gains)
    assert run_command(["correlate", str(study), str(run), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "[/red]$x^" in shown[-2]
    assert all(line.isprintable() and not line.startswith("error:") for line in shown)


def test_the_core_is_enough_for_a_study() -> None:
    code = "import sys, testtime.diagnosis; print([m for m in ('typer', 'rich', 'matplotlib') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_sets_are_named_by_patterns_and_folders_by_themselves(tmp_path: Path) -> None:
    named = name_sets(["digits-c/fog/5", str(tmp_path), "digits-c/*/5", "digits"])
    assert named[:2] == ["digits-c/fog/5", str(tmp_path)]
    assert len(named) == 17
    assert named[-1] == "digits"
    with pytest.raises(ValueError, match="no such folder"):
        name_sets([str(tmp_path / "missing")])


def test_folders_are_opened_as_the_network_sees_them(tmp_path: Path) -> None:
    net = tt.load("digits-resnet8-gn-joint")
    for name in ("3", "7"):
        (tmp_path / "digits" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), (255, 0, 0)).save(tmp_path / "digits" / name / "a.png")
    found = open_for(net, str(tmp_path / "digits"))
    assert found.shape == (1, 16, 16)
    assert found.labels is not None
    assert found.labels.tolist() == [3, 7]
    assert found.images([0]).unique().tolist() == [76]  # the luma of pure red
    (tmp_path / "digits" / "7").rename(tmp_path / "digits" / "site B")
    assert open_for(net, str(tmp_path / "digits")).labels is None  # folders that are no classes


# ---------------------------------------------------------------------------------------------------------------------
# Against improvement
# ---------------------------------------------------------------------------------------------------------------------


def make_study(path: Path, inners: dict[str, float], network: str = "abc") -> Path:
    def entry(value: float) -> dict[str, object]:
        agreement = {"inner": value, "cosine": value / 10}
        return {"batch": agreement, "single": None, "stand_in_batch": agreement, "task_loss": 1.0, "error": 0.5}

    document = {"configuration": {"network": network}, "sets": {name: entry(v) for name, v in inners.items()}}
    path.write_text(json.dumps(document))
    return path


def make_errors(path: Path, gains: dict[str, int], network: str = "abc") -> Path:
    """A run of 100 images a set on which `fixed` has 50 wrong, and `online` so many fewer."""
    units = {}
    for name, gain in gains.items():
        for method, wrong in (("fixed", 50), ("online", 50 - gain)):
            units[method, name, 0] = make_columns(np.arange(100) >= wrong)
    networks = {"joint": {"fingerprint": network, "architecture": {"norm": "group"}}}
    make_run(path, units, {"methods": {"fixed": {}, "online": {}}, "networks": networks})
    return path


def test_a_study_is_joined_with_a_runs_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains = {f"digits-c/fog/{level}": gain for level, gain in zip(range(1, 6), (1, 4, 2, 8, 5), strict=True)}
    study = make_study(tmp_path / "study.json", {name: 3.0 * gain + 1 for name, gain in gains.items()})
    run = make_errors(tmp_path / "run", gains)
    joined = join(study, [run])
    assert joined.improvements["online"].tolist() == pytest.approx(list(gains.values()))
    fit = next(fit for fit in joined.fits if fit.predictor == "batch.inner")
    assert fit.correlation == pytest.approx(1)
    assert fit.slope == pytest.approx(1 / 3)
    assert fit.interval == pytest.approx((1, 1))
    assert not any(fit.predictor in ("single.inner", "task_loss") for fit in joined.fits)  # missing; all alike
    assert "+1.00 [+1.00, +1.00]" in format_correlations(joined)
    assert "+0.89" in format_correlations(joined)  # the paper's
    assert run_command(["correlate", str(study), str(run), "--out", str(tmp_path / "out")]) == 0
    assert "+1.00" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "correlation.json").read_text())
    assert written["improvements"]["online"] == pytest.approx(list(gains.values()))
    for kind in ("svg", "png"):
        assert (tmp_path / "out" / f"gradients-online-batch-inner.{kind}").stat().st_size > 1000


def test_correlations_are_pearsons_with_intervals_that_hold_them(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names = [f"digits-c/{corruption}/{level}" for corruption in ("fog", "frost", "snow") for level in range(1, 6)]
    gains = {name: int(gain) for name, gain in zip(names, draw.integers(0, 30, 15), strict=True)}
    values = {name: gain + float(draw.normal(0, 8)) for name, gain in gains.items()}
    joined = join(make_study(tmp_path / "s.json", values), [make_errors(tmp_path / "run", gains)])
    fit = next(fit for fit in joined.fits if fit.predictor == "batch.inner")
    assert fit.correlation == pytest.approx(np.corrcoef(list(values.values()), list(gains.values()))[0, 1])
    assert fit.interval.low < fit.correlation < fit.interval.high
    x, y = np.array(list(values.values())), np.array(list(gains.values()), float)
    again = np.random.default_rng(1)
    naive = [np.corrcoef(x[rows], y[rows])[0, 1] for rows in again.integers(0, 15, (4000, 15))]
    assert bootstrap_correlation(x, y, rounds=4000) == pytest.approx(
        tuple(np.quantile(naive, [0.025, 0.975])), abs=0.05
    )


def test_what_does_not_belong_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains = {f"digits-c/fog/{level}": level for level in range(1, 6)}
    study = make_study(tmp_path / "study.json", {name: 1.0 * gain for name, gain in gains.items()})
    with pytest.raises(ResultsError, match=r"other: .*network .?xyz.*abc"):
        join(study, [make_errors(tmp_path / "other", gains, "xyz")])
    with pytest.raises(ResultsError, match=r"study\.json: .*3 sets .* 0"):
        join(study, [make_errors(tmp_path / "elsewhere", {"digits-c/snow/1": 3})])
    assert run_command(["correlate", str(tmp_path / "none.json"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err.startswith("error: ")

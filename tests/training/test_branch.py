"""A branch for a classifier one has: against a loop written out, what stays as it was, sources of images, resuming."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from models import CLASSES, pictures
from testtime import training
from testtime.augment import CropFlip
from testtime.data.held_out import hold_out_images
from testtime.data.sets import TensorSet
from testtime.networks import CheckpointError, YNet, load, resnet26
from testtime.networks.card import Card
from testtime.networks.statistics import collect
from testtime.networks.task_loss import read_task_loss
from testtime.progress import Progress
from testtime.randomness import Draws
from testtime.training import BranchRecipe, TrainingError, fit_branch, pool, shuffle
from testtime.training.branch_recipe import find_best

IMAGES = pictures(26)[0]
SHORT: dict[str, Any] = {"epochs": 3, "batch": 8, "hold_out": 0}


def small_net(norm: str = "group", dropout: float = 0.0) -> YNet:
    def layer(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels) if norm == "group" else nn.BatchNorm2d(channels)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer(4), nn.ReLU())
        heads = [
            nn.Sequential(
                layer(4),
                nn.ReLU(),
                nn.Conv2d(4, 6, 3, stride=2, bias=False),  # before BatchNorm its gradient would be rounding alone
                layer(6),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Flatten(),
                nn.Linear(54, outputs),
            )
            for outputs in (CLASSES, 4)
        ]
    return YNet(encoder, heads[0], heads[1], Card(mean=(0.5,), std=(0.5,), augment={"name": "crop-flip", "padding": 1}))


def part(net: YNet, name: str) -> nn.Sequential:
    found = net.get_submodule(name)
    assert isinstance(found, nn.Sequential)
    return found


def weights(net: YNet, *parts: str) -> dict[str, Tensor]:
    state = net.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if not parts or name.split(".")[0] in parts}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def interrupt_after(steps: int) -> Progress:
    def progress(done: int, total: int, text: str) -> None:
        if done == steps:
            raise KeyboardInterrupt

    return progress


# The method ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_it_is_the_loop_written_out(norm: str, joint: bool, optimizer: Any) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.02, "weight_decay": 0.01, "distillation": 0.7}
    fitted = fit_branch(small_net(norm), IMAGES, **SHORT, joint=joint, seed=5, **options)

    net, teacher = small_net(norm).eval(), small_net(norm).eval()
    part(net, "ssl").train()
    moved = [*part(net, "ssl").parameters(), *(net.encoder.parameters() if joint else [])]
    if optimizer == "sgd":
        descent: Any = torch.optim.SGD(moved, lr=0.02, momentum=0.9, weight_decay=0.01)
    else:
        descent = torch.optim.AdamW(moved, lr=0.02, weight_decay=0.01)
    losses, number = [], 0
    for epoch in range(3):
        order = shuffle(26, 5, epoch, torch.device("cpu"))
        for start in (0, 8, 16):
            chosen = order[start : start + 8]
            draws = Draws.of(5, chosen).purpose("train").fold(number)
            batch = CropFlip(padding=1)(IMAGES[chosen], draws.copies(1))[:, 0]
            views = torch.stack([torch.rot90(image, k, (1, 2)) for image in batch for k in range(4)])
            loss = F.cross_entropy(net.self_supervise(views), torch.arange(4).repeat(8))
            if joint:
                loss = loss + 0.7 * F.cross_entropy(net(batch), teacher(batch).softmax(1).detach())
            descent.param_groups[0]["lr"] = 0.02 * (1 + math.cos(math.pi * number / 9)) / 2
            descent.zero_grad()
            loss.backward()
            descent.step()
            losses.append(float(loss.detach()))
            number += 1

    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(fitted.state_dict()[name], tensor, rtol=1e-4, atol=2e-6)
    recorded = [entry["loss"] for entry in fitted.card.record["branch"]["epochs"]]
    assert recorded == pytest.approx([sum(losses[start : start + 3]) / 3 for start in (0, 3, 6)], rel=1e-5)


@pytest.mark.parametrize("joint", [False, True])
def test_layers_that_work_in_place_train_as_others_do(joint: bool) -> None:
    def build(inplace: bool) -> YNet:
        net = small_net()
        # What reads the leaf: the encoder, or the branch.
        part(net, "encoder" if joint else "ssl").insert(0, nn.LeakyReLU(0.1, inplace=inplace))
        return net

    fitted = [fit_branch(build(inplace), IMAGES, **SHORT, joint=joint) for inplace in (False, True)]
    assert_same(weights(fitted[1]), weights(fitted[0]))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_encoder_classifier_and_predictions_stay_bit_identical(norm: Any) -> None:
    for net in (small_net(norm), resnet26(3, depth=8, channels=1, size=8, norm=norm)):
        images = IMAGES.repeat(1, net.channels or 1, 1, 1).float() / 255
        for tensor in net.encoder.buffers():
            tensor.add_(1)  # statistics that no batch has
        before, logits, branch = weights(net, "encoder", "classifier"), net.eval()(images), weights(net, "ssl")
        fit_branch(net.train(), images, **SHORT)
        assert_same(weights(net, "encoder", "classifier"), before)
        assert torch.equal(net(images), logits)
        assert not net.training
        for name, tensor in weights(net, "ssl").items():
            assert not torch.equal(tensor, branch[name]), name  # its own statistics too


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_as_a_replica_it_is_the_same(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for kernels in ("on", "off"):
        monkeypatch.setenv("TESTTIME_KERNELS", kernels)
        net = resnet26(3, depth=8, channels=1, size=8, norm=norm)
        fit_branch(net, IMAGES, epochs=1, batch=8, lr=0.01, hold_out=0, joint=True)
        results.append(weights(net))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-3, atol=1e-3)


def test_joint_fine_tuning_moves_the_encoder_but_not_the_classifier_or_the_statistics() -> None:
    net = small_net("batch")
    for tensor in net.encoder.buffers():
        tensor.add_(1)
    before = weights(net)
    fit_branch(net, IMAGES, **SHORT, joint=True)
    for name, tensor in weights(net).items():
        stays = name.startswith("classifier.") or (name.startswith("encoder.") and ("running" in name or "num" in name))
        assert torch.equal(tensor, before[name]) == stays, name


def test_distillation_keeps_the_predictions() -> None:
    distances = []
    for weight in (0.0, 1.0):
        net = small_net()
        with torch.no_grad():
            net.get_parameter("classifier.7.weight").mul_(5)  # predictions that differ between the images
        before = net.eval()(IMAGES).softmax(1).detach()
        fit_branch(net, IMAGES, epochs=15, batch=8, hold_out=0, lr=0.1, joint=True, distillation=weight)
        distances.append(float((net(IMAGES).softmax(1).detach() - before).abs().mean()))
    assert distances[1] < 0.25 * distances[0]


def test_it_learns_and_says_how_well() -> None:
    net = small_net()
    net.describe(record={"epochs": [{"loss": 1.0}]})
    images = pictures(200)[0]
    fit_branch(net, images, epochs=15, batch=16, hold_out=40)
    record = net.card.record
    about = record["branch"]
    assert record["epochs"] == [{"loss": 1.0}]  # of the training before
    rest, held_out = hold_out_images(TensorSet("x", images), 40)
    for some, key in ((rest, "training"), (held_out, "held_out")):
        views = torch.cat([some.images(slice(None)).rot90(k, (2, 3)) for k in range(4)])
        outputs, targets = net.self_supervise(views).detach(), torch.arange(4).repeat_interleave(len(some))
        assert about[key]["error"] == pytest.approx(float((outputs.argmax(1) != targets).float().mean()))
        assert about[key]["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
        assert about[key]["images"] == len(some)
    assert about["held_out"]["error"] < 0.4
    assert about["chance"] == 0.75
    assert about["configuration"]["recipe"]["lr"] == 0.05
    assert "hardware" in about
    json.dumps(record, allow_nan=False)


def test_the_best_epoch_is_the_result_and_patience_ends_the_training() -> None:
    def entries(*errors: float) -> list[dict[str, Any]]:
        return [{"held_out_error": error} for error in errors]

    assert find_best(entries(0.5, 0.3, 0.3, 0.4)) == 3
    assert find_best([{}, {}]) == 2
    recipe = BranchRecipe(epochs=9, patience=2)
    assert not recipe.is_finished(entries(0.5, 0.3, 0.4))
    assert recipe.is_finished(entries(0.5, 0.3, 0.4, 0.4))
    assert not BranchRecipe(epochs=9, patience=None).is_finished(entries(0.5, 0.6, 0.6, 0.6, 0.6))

    net = small_net()
    images = pictures(60)[0]
    fit_branch(net, images, epochs=12, batch=8, hold_out=30, patience=2, lr=0.3)
    about = net.card.record["branch"]
    errors = [entry["held_out_error"] for entry in about["epochs"]]
    assert about["held_out"]["error"] == pytest.approx(min(errors))
    assert about["epoch"] == max(number for number, error in enumerate(errors, 1) if error == min(errors))
    assert len(errors) == 12 or len(errors) == about["epoch"] + 2


def test_bfloat16_trains_about_the_same() -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        net = small_net("batch")
        before = weights(net, "encoder", "classifier")
        fit_branch(net, IMAGES, epochs=2, batch=2, hold_out=0, lr=0.2, precision=precision)
        assert_same(weights(net, "encoder", "classifier"), before)
        losses.append([entry["loss"] for entry in net.card.record["branch"]["epochs"]])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# The start -----------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_classifier_with_a_new_last_layer() -> None:
    net, given = small_net(), small_net()
    fit_branch(net, IMAGES, epochs=1, batch=26, lr=1e-9, hold_out=0, start="copy", seed=1)
    for name, tensor in given.classifier.state_dict().items():
        found = part(net, "ssl").state_dict()[name]
        if name.startswith("7."):
            assert found.shape[0] == 4
        else:
            torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)
    other = fit_branch(small_net(), IMAGES, epochs=1, batch=26, lr=1e-9, hold_out=0, start="copy", seed=2)
    assert differs(weights(other, "ssl"), weights(net, "ssl"))
    bundled = fit_branch(resnet26(3, depth=8, channels=1, size=8), IMAGES, **SHORT, start="copy")
    bundled.check_card(bundled.card)


def test_a_copied_branch_is_saved_and_loaded(tmp_path: Path) -> None:
    net = fit_branch(resnet26(3, depth=8, channels=1, size=8), IMAGES, **SHORT, start="copy", folder=tmp_path)
    loaded = load(tmp_path / "network.safetensors")
    assert_same(weights(loaded), weights(net))
    assert loaded.card.record["branch"] == json.loads(json.dumps(net.card.record["branch"]))


def test_frozen_parameters_stay() -> None:
    net = small_net()
    names = ("ssl.2.weight", "encoder.0.weight")
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    before = weights(net)
    fit_branch(net, IMAGES, **SHORT, joint=True)
    for name, tensor in weights(net, "encoder", "ssl").items():
        assert torch.equal(tensor, before[name]) == (name in names), name
    part(net, "ssl").requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fit_branch(net, IMAGES, **SHORT)


CRASH = """
import torch
from torch import nn
from testtime.networks import YNet
from testtime.training import fit_branch

class Last(nn.Module):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)

torch.set_num_threads(1)
images = torch.rand(8, 1, 8, 8)
for joint, trainable in ((False, True), (True, True), (True, False)):
    stem = nn.Conv2d(1, 8, 3, padding=1).requires_grad_(trainable)
    encoder = nn.Sequential(stem, Last(), *([nn.GroupNorm(2, 8)] if joint else []))
    heads = [
        nn.Sequential(nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, n)) for n in (3, 4)
    ]
    net = fit_branch(YNet(encoder, *heads), images, epochs=1, batch=8, hold_out=0, joint=joint)
    print(net.ssl[0].weight.ne(1).all().item(), flush=True)
"""


def test_group_norm_on_features_without_gradient_in_channels_last_does_not_crash() -> None:
    """torch 2.13 on a CPU: a segmentation fault, so in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n" * 3), done.stderr


# The images ----------------------------------------------------------------------------------------------------------


def test_every_source_of_the_same_images_gives_the_same_branch() -> None:
    labels = torch.zeros(26, dtype=torch.int64)
    data = TensorDataset(IMAGES, labels)
    sources: list[Any] = [
        IMAGES,
        IMAGES.numpy(),
        TensorSet("x", IMAGES),
        TensorSet("x", IMAGES, labels),
        DataLoader(data, batch_size=5),
        data,
        (image for image in IMAGES),
        [(image, "label") for image in IMAGES.split(7)],
        list(IMAGES.numpy()),
    ]
    wanted = weights(fit_branch(small_net(), IMAGES, epochs=1, batch=8, hold_out=6))
    for source in sources:
        assert_same(weights(fit_branch(small_net(), source, epochs=1, batch=8, hold_out=6)), wanted)


def test_a_loader_that_does_not_fit_in_memory_is_read_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        reads = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.reads += 1
            yield from IMAGES.split(8)

        def __len__(self) -> int:
            return 4

    monkeypatch.setattr(pool, "RESIDENT_BYTES", 1000)
    loader, before = Counting(), weights(small_net(), "encoder")
    net = fit_branch(small_net(), loader, epochs=3)
    assert loader.reads == 5  # the attempt to read it into memory, the first image, the epochs
    assert_same(weights(net, "encoder"), before)
    assert net.card.record["branch"]["held_out"] is None
    assert len(net.card.record["branch"]["epochs"]) == 3
    measured = fit_branch(small_net(), loader, epochs=1, hold_out=IMAGES[:5])
    assert measured.card.record["branch"]["held_out"]["images"] == 5
    with pytest.raises(ValueError, match=r"iterator of more than .* read only once"):
        fit_branch(small_net(), iter(IMAGES.split(8)))


@pytest.mark.parametrize("resident", [1 << 30, 1000])
def test_images_in_double_precision_train_as_in_single(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RESIDENT_BYTES", resident)  # a loader that does not fit is read in every epoch
    single, double = IMAGES.float() / 255, (IMAGES.float() / 255).double()
    options: dict[str, Any] = {"epochs": 1, "batch": 8, "start": "copy"}
    wanted = weights(fit_branch(small_net(), single.split(8), hold_out=single, **options))
    for images in (double.split(8), [part.numpy() for part in double.split(8)]):
        assert_same(weights(fit_branch(small_net(), images, hold_out=double, **options)), wanted)
    if resident > 1000:
        for images in (double, double.numpy()):
            assert_same(weights(fit_branch(small_net(), images, hold_out=double, **options)), wanted)


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    noise = Draws.of(0, torch.arange(12)).integers(256, 10, 14, 3).to(torch.uint8)
    for number, image in enumerate(noise):
        Image.fromarray(image.numpy()).save(tmp_path / f"{number}.png")
    net = resnet26(3, depth=8, size=8)
    fit_branch(net, tmp_path, epochs=1, batch=4, hold_out=2)
    assert net.card.record["branch"]["configuration"]["data"]["shape"] == [3, 8, 8]
    assert net.card.record["branch"]["training"]["images"] == 10
    (tmp_path / "12.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"12\.png"):
        fit_branch(net, str(tmp_path))


def test_images_larger_than_the_crops_are_measured_at_their_centre() -> None:
    net = small_net()
    net.describe(augment={"name": "resized-crop-flip", "size": 8})
    images = pictures(20)[0].repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, :10, :10]
    fit_branch(net, images, epochs=1, batch=8, hold_out=5)
    rest = hold_out_images(TensorSet("x", images), 5)[0].images(slice(None))[:, :, 1:9, 1:9]
    views = torch.cat([rest.rot90(k, (2, 3)) for k in range(4)])
    wrong = net.self_supervise(views).argmax(1) != torch.arange(4).repeat_interleave(15)
    assert net.card.record["branch"]["training"]["error"] == pytest.approx(float(wrong.float().mean()))


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("make", [lambda: small_net("batch", 0.3), lambda: resnet26(3, depth=8, channels=1, size=8)])
def test_an_interrupted_run_resumes_bit_for_bit(make: Any, optimizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "batch": 8, "hold_out": 6, "joint": True, "start": "copy", "lr": 0.01}
    torch.manual_seed(1)
    whole = fit_branch(make(), IMAGES, **options, optimizer=optimizer)
    torch.manual_seed(2)
    for steps in (1, 3, 5):  # before the first checkpoint, in the second and the third epoch
        with pytest.raises(KeyboardInterrupt):
            fit_branch(make(), IMAGES, **options, optimizer=optimizer, folder=tmp_path, progress=interrupt_after(steps))
    net = fit_branch(make(), IMAGES, **options, optimizer=optimizer, folder=tmp_path)
    assert_same(weights(net), weights(whole))
    assert_same(weights(load(tmp_path / "network.safetensors", net)), weights(whole))
    again = make()
    fit_branch(again, IMAGES, **options, optimizer=optimizer, folder=tmp_path, progress=interrupt_after(1))
    assert_same(weights(again), weights(whole))  # nothing was left to do


@pytest.mark.parametrize("has_branch", [True, False])
def test_a_network_that_is_refused_has_the_branch_it_had(has_branch: bool, tmp_path: Path) -> None:
    fit_branch(small_net(), IMAGES, **SHORT, start="copy", folder=tmp_path)
    net = small_net()
    if not has_branch:
        net.ssl = None
    branch, before = net.ssl, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(CheckpointError):
        fit_branch(net, IMAGES, **SHORT, seed=9, start="copy", folder=tmp_path)
    assert net.ssl is branch
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_another_run_or_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    fit_branch(small_net(), IMAGES, **SHORT, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"recipe\.lr: 0\.05 there, 0\.1 now"):
        fit_branch(small_net(), IMAGES, **SHORT, lr=0.1, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.hash"):
        fit_branch(small_net(), IMAGES.flip(0), **SHORT, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"network\.start"):
        fit_branch(small_net("batch"), IMAGES, **SHORT, folder=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    net = small_net()
    before = weights(net)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors"):
        fit_branch(net, IMAGES, **SHORT, folder=tmp_path)
    assert_same(weights(net), before)


def test_a_loss_that_explodes_is_reported_and_the_checkpoint_remains(tmp_path: Path) -> None:
    for joint in (False, True):
        net = small_net()
        before = weights(net)
        with pytest.raises(TrainingError, match=r"epoch 1 .*learning rate below"):
            fit_branch(net, IMAGES, **SHORT, lr=1e30, joint=joint, folder=tmp_path / f"{joint}")
        assert not (tmp_path / f"{joint}/checkpoint.safetensors").exists()
        assert_same(weights(net), before)


def test_statistics_stay_with_the_weights_they_belong_to() -> None:
    net = resnet26(3, depth=8, channels=1, size=8)
    collect(net, IMAGES, unseen=IMAGES, count=10)
    fitted = fit_branch(copy.deepcopy(net), IMAGES, **SHORT)
    assert fitted.statistics is not None
    assert net.statistics is not None
    assert fitted.statistics.about["unseen"].keys() == {"images", "set"}
    assert net.statistics.about.keys() - fitted.statistics.about.keys() == {"task", "task_loss"}  # of the old branch
    known = read_task_loss(fitted)
    assert known is not None
    assert known.loss == fitted.card.record["branch"]["training"]["loss"]
    assert fit_branch(copy.deepcopy(net), IMAGES, **SHORT, joint=True).statistics is None


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (IMAGES, {"epochs": 0}, "`epochs` must be at least 1, got 0"),
        (IMAGES, {"batch": 0}, "`batch` must be at least 1, got 0"),
        (IMAGES, {"patience": 0}, "`patience` must be at least 1, got 0"),
        (IMAGES, {"lr": -1.0}, "`lr` must be positive, got -1.0"),
        (IMAGES, {"lr": math.nan}, "`lr` must be positive, got nan"),
        (IMAGES, {"optimizer": "lion"}, "`optimizer` must be one of sgd, adamw, got 'lion'"),
        (IMAGES, {"start": "fresh"}, "`start` must be one of own, copy, got 'fresh'"),
        (IMAGES, {"precision": "fp8"}, "`precision` must be one of .*'fp8'"),
        (IMAGES, {"distillation": -1.0}, "`distillation` must be at least 0, got -1.0"),
        (IMAGES, {"hold_out": 26}, "`hold_out` must be 1 to 25 for 26 images, got 26"),
        (IMAGES, {"hold_out": 1.5}, "`hold_out` must be a fraction below 1 or a number of images, got 1.5"),
        (IMAGES, {"hold_out": -0.1}, "`hold_out` must be .* got -0.1"),
        (IMAGES, {"hold_out": torch.rand(3, 1, 6, 6)}, r"`hold_out` images must have shape \(1, 8, 8\)"),
        (IMAGES, {"hold_out": IMAGES.float()}, r"Float `hold_out` must be in \[0, 1\], got 0 to 249"),
        (IMAGES[0], {}, r"`images` must be \(N, C, H, W\)"),
        (IMAGES[:0], {}, "`images` must not be empty"),
        ([], {}, "`images` must not be empty"),
        (IMAGES.repeat(1, 3, 1, 1), {}, "`images` must have 1 channels, got 3"),
        (torch.full((4, 1, 8, 8), math.nan), {}, "`images` must be finite"),
        (torch.rand(4, 1, 8, 8) * 9, {}, r"Float `images` must be in \[0, 1\]"),
        (torch.rand(4, 1, 7, 9)[:, :, :2, :2], {}, "does not accept images of shape"),
        ([IMAGES[0], IMAGES[0, :, :5]], {}, r"one shape and dtype: image 1 has .*\(1, 5, 8\), the first .*\(1, 8, 8\)"),
        (["one.png"], {}, r"must yield tensors .*, got str"),
        ("no-such-data", {}, "no-such-data"),
    ],
)
def test_bad_arguments_are_named(images: Any, options: dict[str, Any], message: str) -> None:
    net = small_net()
    net.describe(size=8)
    before = weights(net)
    options = {"hold_out": 0} | options
    with pytest.raises(ValueError, match=message):
        fit_branch(net, images, **options)
    assert_same(weights(net), before)


def test_other_kinds_of_images_and_networks_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`images` must be .*, got int"):
        fit_branch(small_net(), 3)  # type: ignore[arg-type]
    wide = small_net()
    part(wide, "ssl")[-1] = nn.Linear(54, 5)
    with pytest.raises(ValueError, match=r"'rotation' needs 4 outputs, the self-supervised branch has 5"):
        fit_branch(wide, IMAGES, hold_out=0)
    bare = YNet(nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Identity(), nn.Identity())
    with pytest.raises(ValueError, match=r"tt\.split"):
        fit_branch(bare, IMAGES, hold_out=0, start="copy")
    unsized = resnet26(3, depth=8)
    unsized.describe(size=None)
    with pytest.raises(ValueError, match="size is unknown"):
        fit_branch(unsized, "pictures")


def test_it_works_in_inference_mode_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.inference_mode():
        images = IMAGES.clone()
    net = small_net(dropout=0.5)
    torch.set_rng_state(state)
    with torch.no_grad():
        fit_branch(net, images, **SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.is_inference() for parameter in net.parameters())


def test_numpy_images_are_not_changed() -> None:
    pixels = np.asarray(IMAGES.float() / 255)
    before = pixels.copy()
    fit_branch(small_net(), pixels, **SHORT)
    assert np.array_equal(pixels, before)


def test_the_package_exports_it() -> None:
    assert training.fit_branch is fit_branch

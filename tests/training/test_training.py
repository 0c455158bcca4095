"""Training: the methods against loops written out by hand, and runs that are killed, resumed, split and refused."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from models import CLASSES, pictures
from testtime import training
from testtime.augment import AugMix, CropFlip
from testtime.data.sets import TensorSet
from testtime.networks import CheckpointError, YNet, load, resnet26
from testtime.networks.card import Card
from testtime.precision import arithmetic
from testtime.progress import Progress
from testtime.randomness import Draws
from testtime.storage import FolderError, hold_folder
from testtime.tasks import Rotation
from testtime.training import Batch, Pool, Recipe, Trainer, Training, TrainingError, shuffle, train


def small_net(norm: str = "group", seed: int = 0) -> YNet:
    def layer(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels) if norm == "group" else nn.BatchNorm2d(channels)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer(4), nn.ReLU())
        heads = [
            nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, outputs))
            for outputs in (CLASSES, 4)
        ]
    return YNet(encoder, *heads, Card(mean=(0.5,), std=(0.5,), augment={"name": "crop-flip", "padding": 1}))


SHORT = Recipe(epochs=3, batch=8, lr=0.05, drops=(2,))


def weights(net: YNet) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# The methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("views", ["all", "random"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_joint_training_is_the_loop_written_out(norm: str, views: Any) -> None:
    images, labels = pictures()
    recipe = replace(SHORT, views=views, seed=5, weight=0.7)
    trained = train(small_net(norm), images, labels, recipe)

    net = small_net(norm).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1)
    losses = []
    number = 0
    for epoch in range(3):
        order = shuffle(26, 5, epoch, torch.device("cpu"))
        for start in (0, 8, 16):
            chosen = order[start : start + 8]
            draws = Draws.of(5, chosen).purpose("train").fold(number)
            batch = CropFlip(padding=1)(images[chosen], draws.copies(1))[:, 0]
            turned, turns = [], []
            chance = draws.purpose("rotation").integers(4).tolist()
            for image, turn in zip(batch, chance, strict=True):
                for k in range(4) if views == "all" else [turn]:
                    turned.append(torch.rot90(image, k, (1, 2)))
                    turns.append(k)
            main = F.cross_entropy(net(batch), labels[chosen])
            rotation = F.cross_entropy(net.self_supervise(torch.stack(turned)), torch.tensor(turns))
            optimizer.zero_grad()
            (main + 0.7 * rotation).backward()
            optimizer.step()
            losses.append(float((main + 0.7 * rotation).detach()))
            number += 1
        schedule.step()

    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    recorded = [entry["loss"] for entry in trained.card.record["epochs"]]
    by_hand = [sum(losses[start : start + 3]) / 3 for start in (0, 3, 6)]
    assert recorded == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("method", ["plain", "alp"])
def test_without_the_task_its_branch_does_not_learn(method: Any) -> None:
    net = small_net()
    before = weights(net)
    train(net, *pictures(), replace(SHORT, method=method, epochs=1))
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("ssl."), name


def test_plain_training_is_joint_training_of_weight_zero() -> None:
    plain = train(small_net(), *pictures(), replace(SHORT, method="plain", weight_decay=0.0))
    joint = train(small_net(), *pictures(), replace(SHORT, weight=0.0, weight_decay=0.0))
    for part in ("encoder", "classifier"):
        assert_same(getattr(plain, part).state_dict(), getattr(joint, part).state_dict())


def test_training_learns() -> None:
    net = train(small_net(), *pictures(64), replace(SHORT, epochs=12, drops=(10,)), test=pictures(40, seed=1))
    first, last = net.card.record["epochs"][0], net.card.record["epochs"][-1]
    assert first["train_error"] > 0.3
    assert last["train_error"] < 0.1
    assert last["test_error"] < 0.1
    images, labels = pictures(40, seed=1)
    assert last["test_error"] == pytest.approx(float((net(images).argmax(1) != labels).float().mean()))


def some_batch(count: int = 6) -> Batch:
    images, labels = pictures(count)
    return Batch(images, labels, Draws.of(3, torch.arange(count)))


def test_the_attack_stays_in_its_ball_and_does_harm() -> None:
    net, batch, recipe = small_net(), some_batch(), Recipe(method="alp")
    twins = training.attack(net, batch.images, batch.labels, batch.draws, recipe)
    clean = batch.images / 255
    assert not twins.requires_grad
    assert (twins - clean).abs().max() <= 8 / 255 + 1e-6
    assert twins.min() >= 0
    assert twins.max() <= 1
    start = (clean + (batch.draws.purpose("attack").uniform(1, 8, 8) * 2 - 1) * 8 / 255).clamp(0, 1)
    assert F.cross_entropy(net(twins), batch.labels) > F.cross_entropy(net(start), batch.labels)
    assert F.cross_entropy(net(twins), batch.labels) > F.cross_entropy(net(clean), batch.labels)


def test_the_attack_on_a_linear_model_ends_in_the_corner_of_the_ball() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    net = YNet(nn.Identity(), linear, nn.Identity())
    images = torch.full((1, 1, 8, 8), 0.5)
    twins = training.attack(net, images, torch.tensor([0]), Draws.of(0, torch.arange(1)), Recipe(attack_steps=20))
    direction = (linear[1].weight[1] - linear[1].weight[0]).sign().view(1, 1, 8, 8)  # away from class 0
    torch.testing.assert_close(twins, images + 8 / 255 * direction.detach())


def test_the_attack_leaves_modes_and_statistics_alone() -> None:
    net, batch = small_net("batch").train(), some_batch()
    before = weights(net)
    training.attack(net, batch.images, batch.labels, batch.draws, Recipe())
    assert_same(weights(net), before)
    assert net.training
    assert all(parameter.grad is None for parameter in net.parameters())


def test_logit_pairing_is_clean_loss_plus_half_the_squared_distance() -> None:
    net, batch, recipe = small_net(), some_batch(), Recipe(method="alp")
    terms, logits = training.alp_loss(net, batch, recipe, Rotation())
    twins = training.attack(net, batch.images, batch.labels, batch.draws, recipe)
    distance = (net(batch.images) - net(twins)).square().mean()
    torch.testing.assert_close(terms["main"].mean(), F.cross_entropy(net(batch.images), batch.labels))
    torch.testing.assert_close(terms["pairing"].mean(), 0.5 * distance)
    torch.testing.assert_close(logits, net(batch.images))


@pytest.mark.parametrize("each", ["all", "random"])
@pytest.mark.parametrize("norm", ["group", "batch"])
@torch.no_grad()
def test_the_robust_loss_is_three_answers_that_agree_and_a_task_on_an_augmented_view(norm: str, each: Any) -> None:
    net, batch, task = small_net(norm).eval(), some_batch(), Rotation(each=each)
    recipe = Recipe.robust(consistency=3.0, weight=0.5, severity=8.0)
    terms, logits = training.robust_loss(net, batch, recipe, task)
    views = AugMix(8.0)(batch.images, batch.draws.copies(2))
    divergences, rotations = [], []
    turns = batch.draws.purpose("rotation").integers(4).tolist()
    for image, (first, second), turn in zip(batch.images, views, turns, strict=True):
        answers = [net(one[None]).softmax(1)[0] for one in (image, first, second)]
        mean = sum(answers) / 3
        divergences.append(sum(float((p * (p / mean).log()).sum()) for p in answers) / 3)
        for k in range(4) if each == "all" else [turn]:
            turned = net.self_supervise(torch.rot90(second, k, (1, 2))[None])
            rotations.append(float(F.cross_entropy(turned, torch.tensor([k]))))
    torch.testing.assert_close(logits, net(batch.images))
    torch.testing.assert_close(terms["main"], F.cross_entropy(logits, batch.labels, reduction="none"))
    torch.testing.assert_close(terms["consistency"], 3 * torch.tensor(divergences), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(terms["task"], 0.5 * torch.tensor(rotations))


def test_uda_adds_the_rotation_loss_of_the_target_set() -> None:
    net, batch, task = small_net(), some_batch(), Rotation(each="all")
    target = pictures(6, seed=9)[0]
    both = replace(batch, target=target, target_draws=Draws.of(1, torch.arange(6)))
    terms, _ = training.uda_loss(net, both, Recipe(method="uda"), task)
    joint, _ = training.joint_loss(net, batch, Recipe(), task)
    turned = torch.cat([target.rot90(k, (2, 3)) for k in range(4)])
    by_hand = F.cross_entropy(net.self_supervise(turned), torch.arange(4).repeat_interleave(6))
    for name in joint:
        assert torch.equal(terms[name], joint[name])
    torch.testing.assert_close(terms["target"].mean(), by_hand)


def test_uda_trains_on_the_target_set() -> None:
    source, target = pictures(), pictures(11, seed=4)[0]
    recipe = replace(SHORT, method="uda")
    net = train(small_net(), *source, recipe, target=target)
    assert set(net.card.record["epochs"][0]) >= {"main", "task", "target"}
    other = train(small_net(), *source, recipe, target=target.flip(0))
    assert not torch.equal(net.encoder[0].weight, other.encoder[0].weight)
    with pytest.raises(ValueError, match="target"):
        train(small_net(), *source, recipe)
    with pytest.raises(ValueError, match="uda"):
        train(small_net(), *source, SHORT, target=target)


# Order and schedule --------------------------------------------------------------------------------------------------


def training_of(count: int = 26, target: int = 0, **changes: Any) -> Training:
    device = torch.device("cpu")
    pool = Pool("images", *pictures(count), device)
    other = Pool("target", pictures(target)[0], None, device) if target else None
    recipe = replace(SHORT, method="uda" if target else "joint", **changes)
    return Training(small_net(), recipe, pool, other)


def test_an_epoch_shows_every_image_at_most_once_in_an_order_of_its_own() -> None:
    orders = [training_of().order(epoch) for epoch in range(3)]
    for order in orders:
        assert order.shape == (3, 8)
        assert len(order.unique()) == 24
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[1], training_of().order(1))
    assert sorted(shuffle(26, 0, 7, torch.device("cpu")).tolist()) == list(range(26))


@pytest.mark.parametrize("count", [5, 8, 11, 100])
def test_the_target_set_is_passed_through_evenly(count: int) -> None:
    one = training_of(target=count)
    seen = torch.cat([one.target_order(epoch) for epoch in range(5)]).flatten()  # 120 places
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count].tolist()) == list(range(count))


def test_a_cosine_schedule_is_torchs() -> None:
    recipe = Recipe.robust(epochs=20, lr=0.3)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=recipe.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs)
    for epoch in range(recipe.epochs):
        assert recipe.lr_at(epoch) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_a_recipe_describes_the_settings_of_its_method() -> None:
    """Records written before a method existed do not have its settings; their runs continue."""
    assert not {"consistency", "severity", "schedule"} & Recipe().describe().keys()
    robust = Recipe.robust(severity=5.0).describe()
    assert (robust["consistency"], robust["severity"], robust["schedule"]) == (12.0, 5.0, "cosine")


@pytest.mark.parametrize("recipe", [Recipe(), Recipe.cifar("batch"), Recipe.imagenet(), Recipe(lr=0.3, drops=())])
def test_the_learning_rate_is_torchs_multi_step_schedule(recipe: Recipe) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(recipe.drops), 0.1)
    for epoch in range(recipe.epochs):
        assert recipe.lr_at(epoch) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_recipes_are_the_papers() -> None:
    group, batch, imagenet = Recipe.cifar(), Recipe.cifar("batch"), Recipe.imagenet()
    assert (group.epochs, group.drops, group.batch, group.lr) == (150, (75, 125), 128, 0.1)
    assert (group.momentum, group.weight_decay, group.views, group.weight) == (0.9, 5e-4, "all", 1.0)
    assert (batch.epochs, batch.drops) == (75, (50, 65))
    assert (imagenet.epochs, imagenet.drops, imagenet.batch) == (90, (30, 60), 256)
    assert (imagenet.weight_decay, imagenet.views) == (1e-4, "random")
    assert (group.epsilon * 2, group.attack_lr * 2, group.attack_steps) == (16 / 255, 4 / 255, 7)


def test_a_recipe_is_described_as_in_earlier_runs() -> None:
    """Or they could not be resumed."""
    assert Recipe(views="random", precision="tf32").describe() == {
        "method": "joint", "epochs": 150, "batch": 128, "lr": 0.1, "drops": [75, 125], "momentum": 0.9,
        "weight_decay": 0.0005, "weight": 1.0, "rotations": "random", "seed": 0, "precision": "tf32", "pairing": 0.5,
        "epsilon": 8 / 255, "attack_steps": 7, "attack_lr": 2 / 255, "task": None,
    }  # fmt: skip


def test_a_schedule_stretches_with_its_epochs() -> None:
    assert Recipe().over(30).drops == (15, 25)
    assert Recipe().over(300).drops == (150, 250)
    assert Recipe().over(1).drops == ()
    assert Recipe().over(2).drops == (1,)
    assert Recipe().change(epochs=30, lr=None, batch=4) == Recipe(epochs=30, drops=(15, 25), batch=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "both"), ("epochs", 0), ("batch", 0), ("lr", 0.0), ("lr", float("nan")), ("momentum", 1.0),
        ("weight_decay", -1.0), ("weight", float("inf")), ("drops", (5, 3)), ("drops", (0,)), ("views", "two"),
        ("epsilon", -0.1), ("attack_steps", 0), ("pairing", -1.0), ("precision", "half"),
        ("schedule", "linear"), ("consistency", -1.0), ("severity", 0.0),
    ],
)  # fmt: skip
def test_a_bad_recipe_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}`"):
        Recipe(**{field: value})


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(4, 8, 8), torch.zeros(4).long(), "N, C, H, W"),
        (torch.zeros(0, 1, 8, 8), torch.zeros(0).long(), "empty"),
        (torch.zeros(4, 1, 8, 8), torch.zeros(3).long(), "4 integer labels"),
        (torch.zeros(4, 1, 8, 8), torch.zeros(4), "4 integer labels"),
        (torch.zeros(4, 1, 8, 8), None, "must have labels"),
        (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]), "0..2, got 0 to 3"),
        (torch.zeros(4, 2, 8, 8), torch.zeros(4).long(), "must have 1 channels, got 2"),
        (torch.zeros(4, 1, 9, 30), torch.zeros(4).long(), "does not accept images"),
    ],
)
def test_data_that_does_not_fit_is_refused(images: Tensor, labels: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(small_net(), images, labels, SHORT)


@pytest.mark.parametrize("method", ["plain", "joint", "robust", "alp", "uda"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_step_reads_nothing_back(method: Any, norm: str) -> None:
    """What a CUDA graph needs: tensors without numbers go through a step, and only the reading fails."""
    with FakeTensorMode():
        images, labels = torch.empty(26, 1, 8, 8, dtype=torch.uint8), torch.empty(26, dtype=torch.int64)
        pool = Pool("images", images, labels, torch.device("cpu"))
        other = Pool("target", images[:9], None, torch.device("cpu")) if method == "uda" else None
        net = small_net(norm)
        one = Trainer([Training(net, replace(SHORT, method=method, precision="bf16"), pool, other)])
        net.train()
        for indices, number, pixels in one.batches(1):
            one.step(indices, number, pixels)
        with pytest.raises(DataDependentOutputException):
            one.read()


# Sets, precision, progress -------------------------------------------------------------------------------------------


def test_a_set_read_by_the_batch_trains_as_one_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TensorSet("noise", *pictures(), classes=("dark", "gray", "bright"))
    at_once = train(small_net(), source, recipe=SHORT, test=source)
    monkeypatch.setattr("testtime.training.pool.RESIDENT_BYTES", 0)
    in_pieces = train(small_net(), source, recipe=SHORT, test=source)
    assert_same(weights(at_once), weights(in_pieces))
    assert at_once.card.classes == ("dark", "gray", "bright")
    errors = [[entry["test_error"] for entry in net.card.record["epochs"]] for net in (at_once, in_pieces)]
    assert errors[0] == errors[1]


def test_bfloat16_changes_the_loss_only_a_little() -> None:
    exact, rough = (train(small_net(), *pictures(), replace(SHORT, precision=name)) for name in ("fp32", "bf16"))
    losses = [[entry["loss"] for entry in net.card.record["epochs"]] for net in (exact, rough)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    assert all(parameter.dtype == torch.float32 for parameter in rough.parameters())


def test_steps_of_bfloat16_see_the_last_parameters_also_within_one_context() -> None:
    """A recorded step runs twice in the context in which it is captured."""

    def learn(apart: bool) -> dict[str, Tensor]:
        pool = Pool("images", *pictures(), torch.device("cpu"))
        one = Trainer([Training(small_net(), replace(SHORT, precision="bf16", lr=0.5), pool)])
        one.trainings[0].net.train()
        steps = list(one.batches(0))
        with contextlib.nullcontext() if apart else arithmetic("bf16", one.device):
            for step in steps:
                one.step(*step)
        return weights(one.trainings[0].net)

    assert_same(learn(apart=True), learn(apart=False))


@pytest.mark.parametrize("method", ["plain", "joint", "robust", "alp", "uda"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_network_trained_as_a_replica_of_itself_learns_the_same(
    norm: Any, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = pictures()
    target = pictures(11, seed=3)[0] if method == "uda" else None
    recipe = replace(SHORT, method=method, attack_steps=2, consistency=0.5)
    # Kernels round otherwise, and nine great steps make as much of that as of a last bit of the first weights.
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    nets = []
    for replica in (False, True):
        # On a GPU it is so by itself.
        monkeypatch.setattr(Trainer, "_replica_fits", lambda self, replica=replica: replica)
        net = resnet26(CLASSES, norm=norm, depth=8, channels=1, size=8, seed=4)
        folder = tmp_path / str(replica)
        with contextlib.suppress(Stop):
            train(net, images, labels, recipe, target=target, folder=folder, progress=stop_at(5))
        net = resnet26(CLASSES, norm=norm, depth=8, channels=1, size=8, seed=4)
        parameters = list(net.parameters())
        nets.append(train(net, images, labels, recipe, target=target, folder=folder))
        assert all(own is old for own, old in zip(net.parameters(), parameters, strict=True))
        assert all(tensor.is_contiguous() for tensor in net.state_dict().values())
    one, other = (net.state_dict() for net in nets)
    start = resnet26(CLASSES, norm=norm, depth=8, channels=1, size=8, seed=4).state_dict()
    for name in one:
        moved = (one[name] - start[name]).abs().max()
        rounding = 5e-3 if torch.__version__.startswith("2.6.") else 1e-3
        assert (one[name] - other[name]).abs().max() <= rounding * moved + 1e-6, name


def test_progress_counts_up_to_the_end() -> None:
    seen: list[tuple[int, int, str]] = []
    train(small_net(), *pictures(), SHORT, progress=lambda *report: seen.append(report))
    steps = [(done, total) for done, total, _ in seen if total]
    assert steps == [(done, 9) for done in range(1, 10)]
    assert seen[-1][2].startswith("epoch 3, loss ")


def test_a_small_set_makes_one_smaller_batch() -> None:
    net = train(small_net(), *pictures(5), SHORT)
    assert [entry["epoch"] for entry in net.card.record["epochs"]] == [1, 2, 3]


# Folders -------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_at(step: int) -> Progress:
    def report(done: int, total: int, text: str) -> None:
        if done == step:
            raise Stop

    return report


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(tmp_path: Path, norm: str) -> None:
    whole = train(small_net(norm), *pictures(), SHORT, folder=tmp_path / "whole", test=pictures(9, seed=2))
    for step in (1, 3, 4, 8):
        with pytest.raises(Stop):
            train(small_net(norm), *pictures(), SHORT, folder=tmp_path / "cut", test=pictures(9, seed=2),
                  progress=stop_at(step))  # fmt: skip
    cut = train(small_net(norm), *pictures(), SHORT, folder=tmp_path / "cut", test=pictures(9, seed=2))
    assert_same(weights(whole), weights(cut))
    assert_same(*(load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "cut")))
    records = [json.loads((tmp_path / name / "record.json").read_text())["epochs"] for name in ("whole", "cut")]
    for record in records:
        for entry in record:
            assert entry.pop("seconds") >= 0
    assert records[0] == records[1]


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    first = train(small_net(), *pictures(), SHORT, folder=tmp_path)
    seen: list[int] = []
    second = train(small_net(), *pictures(), SHORT, folder=tmp_path, progress=lambda done, *_: seen.append(done))
    assert_same(weights(first), weights(second))
    assert seen == [0]
    assert first.card.record == second.card.record


def test_the_record_says_how_the_network_was_trained(tmp_path: Path) -> None:
    net = train(small_net(), *pictures(), SHORT, folder=tmp_path, test=pictures(9), classes=("a", "b", "c"))
    record = net.card.record
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert record["configuration"]["recipe"] == json.loads(json.dumps(SHORT.describe()))
    assert record["configuration"]["data"]["count"] == 26
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2, 3]
    assert [entry["lr"] for entry in record["epochs"]] == pytest.approx([0.05, 0.05, 0.005])
    for entry in record["epochs"]:
        assert entry["loss"] == pytest.approx(entry["main"] + entry["task"])
        assert 0 <= entry["train_error"] <= 1
        assert 0 <= entry["test_error"] <= 1
    assert record["versions"]["torch"]
    assert record["hardware"]["processes"] == 1
    assert net.card.classes == ("a", "b", "c")
    assert net.card.size == 8
    assert not net.training


def test_the_network_file_loads_with_its_card(tmp_path: Path) -> None:
    net = resnet26(CLASSES, channels=1, depth=8, size=8)
    train(net, *pictures(16), replace(SHORT, epochs=1, drops=()), folder=tmp_path)
    loaded = load(tmp_path / "network.safetensors")
    assert_same(weights(net), weights(loaded))
    assert loaded.card.record == net.card.record
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"recipe": replace(SHORT, lr=0.06)}, "recipe.lr: 0.05 there, 0.06 now"),
        ({"recipe": replace(SHORT, epochs=4)}, "recipe.epochs: 3 there, 4 now"),
        ({"net": small_net(seed=1)}, "network.start"),
        ({"data": pictures(seed=1)}, "data.hash"),
        ({"data": pictures(25)}, "data.count: 26 there, 25 now"),
    ],
)
@pytest.mark.parametrize("started", [0, 1])
def test_another_configuration_is_refused(
    tmp_path: Path, change: dict[str, Any], difference: str, started: int
) -> None:
    with pytest.raises(Stop):
        train(small_net(), *pictures(), SHORT, folder=tmp_path, progress=stop_at(1 if started == 0 else 4))
    assert (tmp_path / "checkpoint.safetensors").exists() == bool(started)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="another configuration") as caught:
        train(change.get("net", small_net()), *change.get("data", pictures()), change.get("recipe", SHORT),
              folder=tmp_path)  # fmt: skip
    assert difference in str(caught.value)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    images, labels = pictures()
    images = images / 255
    with pytest.raises(Stop):
        train(small_net(), images, labels, SHORT, folder=tmp_path, progress=stop_at(6))
    good = load_file(tmp_path / "checkpoint.safetensors")

    broken = images.clone()

    def spoil(done: int, total: int, text: str) -> None:
        if done == 4:  # in the second epoch; the tensor is the one that training reads
            broken[:] = float("nan")

    with pytest.raises(TrainingError, match="epoch 2 the loss is no longer finite; the state after epoch 1 is in"):
        train(small_net(), broken, labels, SHORT, folder=tmp_path, progress=spoil)
    assert_same(load_file(tmp_path / "checkpoint.safetensors"), good)
    assert not (tmp_path / "network.safetensors").exists()
    assert len(json.loads((tmp_path / "record.json").read_text())["epochs"]) == 1
    with pytest.raises(TrainingError, match="epoch 1"):
        train(small_net(), *pictures(), replace(SHORT, lr=1e30))


def test_a_run_of_version_0_1_has_no_checksum_and_goes_on(tmp_path: Path) -> None:
    whole = train(small_net(), *pictures(), SHORT)
    with pytest.raises(Stop):
        train(small_net(), *pictures(), SHORT, folder=tmp_path, progress=stop_at(4))
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["testtime-training"])
    assert about.pop("sha256")
    save_file(load_file(path), path, metadata={"testtime-training": json.dumps(about)})
    assert_same(weights(train(small_net(), *pictures(), SHORT, folder=tmp_path)), weights(whole))


@pytest.mark.parametrize("recipe", [SHORT, replace(SHORT, momentum=0.0)])
def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path, recipe: Recipe) -> None:
    train(small_net(), *pictures(), recipe, folder=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    assert_same(weights(train(small_net(), *pictures(), recipe, folder=tmp_path)), load_weights(tmp_path))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors: "):
        train(small_net(), *pictures(), recipe, folder=tmp_path)


def load_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "network.safetensors")


@pytest.mark.parametrize("damage", ["truncated", "text", "foreign", "empty", "other tensors"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    train(small_net(), *pictures(), replace(SHORT, epochs=1, drops=()), folder=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-100])
    elif damage == "text":
        path.write_text("these are not weights")
    elif damage == "foreign":
        path.write_bytes((tmp_path / "network.safetensors").read_bytes())
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(content.replace(b"momentum/ssl.0.bias", b"momentum/ssl.0.bios"))
    net = small_net()
    before = weights(net)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors"):
        train(net, *pictures(), replace(SHORT, epochs=1, drops=()), folder=tmp_path)
    assert_same(weights(net), before)


def test_what_is_no_tensor_is_refused_by_its_name() -> None:
    images, labels = pictures()
    array: Any = images.numpy()
    with pytest.raises(TypeError, match=r"`images` must be a tensor or a set of testtime\.data, got ndarray"):
        train(small_net(), array, labels, SHORT)
    numbers: Any = labels.tolist()
    with pytest.raises(TypeError, match="The labels of `images` must be a tensor, got list"):
        train(small_net(), images, numbers, SHORT)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders there")
def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    with hold_folder(tmp_path), pytest.raises(FolderError, match="another process is at work"):
        train(small_net(), *pictures(), SHORT, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    train(small_net(), *pictures(), SHORT, folder=tmp_path)
    assert (tmp_path / "network.safetensors").exists()


def test_images_that_the_network_would_misread_are_refused() -> None:
    images, labels = pictures()
    colour = resnet26(CLASSES, depth=8, size=8)  # gray would be repeated over its three channels
    with pytest.raises(ValueError, match="`images` must have 3 channels, got 1"):
        train(colour, images, labels, SHORT)
    for test in ((images, labels), TensorSet("gray", images, labels)):
        with pytest.raises(ValueError, match="`test` must have 3 channels, got 1"):
            train(colour, images.repeat(1, 3, 1, 1), labels, SHORT, test=test)
    with pytest.raises(ValueError, match=r"Float `images` must be in \[0, 1\], got 0 to 249"):
        train(small_net(), images.float(), labels, SHORT)
    with pytest.raises(ValueError, match=r"Float `test` must be in \[0, 1\], got 0 to 249"):
        train(small_net(), images, labels, SHORT, test=(images.float(), labels))
    with pytest.raises(ValueError, match=r"Float `target` must be in \[0, 1\]"):
        train(small_net(), images, labels, replace(SHORT, method="uda"), target=images.float())
    plain = small_net()
    bare = YNet(plain.encoder, plain.classifier, plain.ssl)  # it normalises nothing, so its images may be normalised
    train(bare, images.float() / 64 - 2, labels, replace(SHORT, epochs=1, drops=()))


def test_images_in_double_precision_train_as_in_single() -> None:
    images, labels = pictures()
    found = []
    for dtype in (torch.float32, torch.float64):
        pixels = images.to(dtype) / 255
        net = train(small_net(), pixels, labels, replace(SHORT, method="uda"), target=pixels, test=(pixels, labels))
        found.append((weights(net), [entry["test_error"] for entry in net.card.record["epochs"]]))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_foreign_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match=r"record\.json"):
        train(small_net(), *pictures(), SHORT, folder=tmp_path)
    assert (tmp_path / "record.json").read_text() == "[1, 2]"


def test_a_custom_task_must_fit_the_branch() -> None:
    class Flips:
        name, outputs = "flips", 2

        def views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
            return images, torch.zeros(len(images)).long()

        def probe(self, images: Tensor) -> tuple[Tensor, Tensor]:
            return self.views(images, Draws.of(0, torch.arange(len(images))))

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ValueError, match="'flips' needs 2"):
        train(small_net(), *pictures(), replace(SHORT, task=Flips()))


# By name -------------------------------------------------------------------------------------------------------------


def test_prepare_builds_the_digits() -> None:
    setup = training.prepare("digits", limit=50, seed=3)
    assert setup.source.shape == (1, 16, 16)
    assert len(setup.source) == 50
    assert setup.test is not None
    assert len(setup.test) == 500
    assert setup.net.card.architecture["depth"] == 8
    assert setup.net.card.augment == {"name": "crop-flip", "padding": 2, "flip": False}
    assert setup.recipe.seed == 3


def test_prepare_starts_from_a_network_of_the_same_architecture(tmp_path: Path) -> None:
    first = training.prepare("digits", limit=50, seed=3)
    first.net.describe(record={"note": "trained"})
    first.net.save(tmp_path / "network.safetensors")
    again = training.prepare("digits", limit=50, start=tmp_path / "network.safetensors", seed=4)
    assert_same(weights(again.net), weights(first.net))
    assert_same(weights(again.build(5)), weights(first.net))
    assert again.net is not again.build(4)
    with pytest.raises(ValueError, match=r"not the requested architecture.*depth: 8 there, 14 now"):
        training.prepare("digits", limit=50, depth=14, start=tmp_path / "network.safetensors")
    with pytest.raises(ValueError, match=r"not the requested architecture.*channels: 3 there, 1 now"):
        training.prepare("digits", limit=50, start="cifar10-resnet26-gn-joint")
    with pytest.raises(CheckpointError, match="nowhere"):
        training.prepare("digits", limit=50, start="nowhere")


def test_prepare_reads_folders(tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 3), ("val", 2)):
        for name in ("ants", "bees"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 30), (number * 50, 0, 0)).save(tmp_path / split / name / f"{number}.png")
    setup = training.prepare(str(tmp_path), size=16, depth=8)
    assert setup.source.classes == ("ants", "bees")
    assert (len(setup.source), len(setup.test or [])) == (6, 4)
    assert setup.source.shape == (3, 16, 16)
    assert setup.recipe == Recipe.cifar()
    alone = training.prepare(str(tmp_path / "train"), size=16, depth=8)
    assert alone.test is None
    with pytest.raises(ValueError, match="no labels"):
        training.prepare(str(tmp_path / "train" / "ants"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "nothing"}, "`data`"),
        ({"data": "digits", "network": "vgg"}, "`network`"),
        ({"data": "digits", "network": "resnet18"}, "channels"),
        ({"data": "digits", "network": "resnet18", "depth": 8}, "`depth`"),
        ({"data": "digits", "depth": 9}, "`depth`"),
        ({"data": "digits", "limit": 0}, "`limit`"),
    ],
)
def test_prepare_refuses_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.prepare(**arguments)

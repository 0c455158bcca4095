"""Several trainings side by side: each is what it would be alone, has its own folder, and goes on after a kill."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models import CLASSES, pictures
from testtime import cli
from testtime.kernels.cpu import build
from testtime.networks import YNet, load, resnet26
from testtime.networks.card import Card
from testtime.randomness import Draws
from testtime.training import (
    Pool,
    Recipe,
    Trainer,
    Training,
    TrainingError,
    fit_together,
    train,
    train_together,
)
from testtime.training.loop import _errors
from testtime.training.replicated import Replicated

# A small weight of the consistency: a large one amplifies rounding in a network of few channels.
SHORT = Recipe(epochs=3, batch=8, lr=0.02, drops=(2,), attack_steps=2, consistency=0.5)
CPU = torch.device("cpu")
LOADED = build._loaded


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C++ kernels: they round differently, and large steps amplify that as much as a last bit of the weights."""
    monkeypatch.setattr(build, "_loaded", lambda: None)


def network(norm: Any = "group", seed: int = 0) -> YNet:
    return resnet26(CLASSES, norm=norm, depth=8, channels=1, size=8, seed=seed)


def curve(net: YNet, key: str = "loss") -> list[float]:
    return [entry[key] for entry in net.card.record["epochs"]]


def assert_alike(one: YNet, other: YNet, start: YNet) -> None:
    """Their losses agree, and they are a thousand times nearer to each other than to where they started."""
    assert curve(one) == pytest.approx(curve(other), abs=1e-4)
    first = start.state_dict()
    for name, tensor in other.state_dict().items():
        moved = (tensor - first[name]).abs().max()
        assert (one.state_dict()[name] - tensor).abs().max() <= 1e-3 * moved + 1e-6, name


@pytest.mark.parametrize("method", ["plain", "joint", "robust", "alp"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_seeds_side_by_side_are_the_seeds_alone(norm: Any, method: Any) -> None:
    recipe, test = replace(SHORT, method=method), pictures(9, seed=2)
    seeds = [4, 0, 7]
    together = train_together([network(norm, seed) for seed in seeds], *pictures(), recipe, seeds=seeds, test=test)
    for seed, net in zip(seeds, together, strict=True):
        alone = train(network(norm, seed), *pictures(), replace(recipe, seed=seed), test=test)
        assert_alike(net, alone, network(norm, seed))
        assert curve(net, "test_error") == curve(alone, "test_error")
        assert curve(net, "train_error") == pytest.approx(curve(alone, "train_error"))
        assert net.card.record["configuration"] == alone.card.record["configuration"]
        assert not net.training
        assert all(tensor.is_contiguous() for tensor in net.state_dict().values())
    assert not torch.equal(together[0].encoder[0].weight, together[1].encoder[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("views", ["all", "random"])
def test_targets_side_by_side_are_the_targets_alone(views: Any, norm: Any) -> None:
    recipe = replace(SHORT, method="uda", views=views, lr=0.002)  # great steps make much of a last bit
    targets = [pictures(11, seed=3)[0], pictures(40, seed=4)[0].flip(0), pictures(5, seed=5)[0]]
    start = train(network(norm), *pictures(), replace(SHORT, epochs=1, drops=()))
    together = train_together([copy.deepcopy(start) for _ in targets], *pictures(), recipe, targets=targets)
    for target, net in zip(targets, together, strict=True):
        alone = train(copy.deepcopy(start), *pictures(), recipe, target=target)
        assert_alike(net, alone, start)
        assert curve(net, "target") == pytest.approx(curve(alone, "target"), abs=1e-4)


def test_no_training_feels_another() -> None:
    """Whatever the second one's target images are, the first one's weights are the same to the bit."""
    recipe, found = replace(SHORT, method="uda"), []
    for other in (3, 9):
        targets = [pictures(11, seed=1)[0], pictures(11, seed=other)[0]]
        first, second = train_together([network(), network()], *pictures(), recipe, targets=targets)
        found.append((first.state_dict(), second.state_dict()))
    for name, tensor in found[0][0].items():
        assert torch.equal(tensor, found[1][0][name]), name
    assert not torch.equal(found[0][1]["encoder.0.weight"], found[1][1]["encoder.0.weight"])


def test_bfloat16_side_by_side_stays_near() -> None:
    exact, rough = (
        train_together([network(seed=seed) for seed in (0, 1)], *pictures(), recipe, seeds=[0, 1])
        for recipe in (SHORT, replace(SHORT, precision="bf16"))
    )
    for one, other in zip(exact, rough, strict=True):
        assert curve(one) == pytest.approx(curve(other), rel=0.05)
        assert curve(one) != curve(other)


def own_network(seed: int) -> YNet:
    """A network of the user's own, whose replicas we do not vouch for in training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        heads = [nn.Linear(256, outputs) for outputs in (CLASSES, 4)]
    return YNet(encoder, *heads, Card(mean=(0.5,), std=(0.5,)))


def test_networks_of_the_users_own_are_trained_one_after_the_other() -> None:
    together = train_together([own_network(seed) for seed in (0, 1)], *pictures(), SHORT, seeds=[0, 1])
    for seed, net in enumerate(together):
        alone = train(own_network(seed), *pictures(), replace(SHORT, seed=seed))
        for name, tensor in alone.state_dict().items():
            assert torch.equal(net.state_dict()[name], tensor), name
        assert "together" not in net.card.record["epochs"][0]


def test_what_fits_together() -> None:
    pool, other = Pool("images", *pictures(), CPU), Pool("images", *pictures(), CPU)
    base = Training(network(), SHORT, pool)
    assert fit_together([base])
    assert fit_together([base, Training(network(seed=1), replace(SHORT, seed=5), pool)])
    odd = [
        Training(network("batch"), SHORT, pool),
        Training(network(), replace(SHORT, lr=0.1), pool),
        Training(network(), SHORT, other),
        Training(own_network(0), SHORT, pool),
        Training(network().describe(augment={"name": "crop-flip", "padding": 2}), SHORT, pool),
    ]
    for training in odd:
        assert not fit_together([base, training])
        with pytest.raises(ValueError, match="one after the other"):
            Trainer([base, training])


# Folders -------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def together_in(folders: list[Path], stop: int | None = None, **changes: Any) -> list[YNet]:
    def progress(done: int, total: int, text: str) -> None:
        if done == stop:
            raise Stop

    nets = [network(seed=seed) for seed in range(len(folders))]
    recipe = replace(SHORT, **changes)
    return train_together(nets, *pictures(), recipe, seeds=range(len(nets)), folders=folders, progress=progress)


def test_every_training_has_a_folder_as_if_it_were_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    nets = together_in(folders)
    for seed, (net, folder) in enumerate(zip(nets, folders, strict=True)):
        train(network(seed=seed), *pictures(), replace(SHORT, seed=seed), folder=tmp_path / "alone" / str(seed))
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in (tmp_path / "alone" / str(seed)).iterdir()}
        records = [json.loads((place / "record.json").read_text()) for place in (folder, tmp_path / f"alone/{seed}")]
        assert records[0]["configuration"] == records[1]["configuration"]
        assert records[0]["configuration"]["recipe"]["seed"] == seed
        assert [entry["together"] for entry in records[0]["epochs"]] == [2, 2, 2]
        states = [load_file(place / "checkpoint.safetensors") for place in (folder, tmp_path / f"alone/{seed}")]
        assert {name: tensor.shape for name, tensor in states[0].items()} == {
            name: tensor.shape for name, tensor in states[1].items()
        }
        loaded = load(folder / "network.safetensors")
        assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_group_stopped_anywhere_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = together_in([tmp_path / "whole" / name for name in "ab"])
    folders = [tmp_path / "cut" / name for name in "ab"]
    for step in (2, 4, 8):
        with pytest.raises(Stop):
            together_in(folders, stop=step)
    for one, other in zip(whole, together_in(folders), strict=True):
        assert curve(one) == curve(other)
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_those_that_are_behind_catch_up(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    with pytest.raises(Stop):
        together_in(folders, stop=4)  # in the second epoch
    behind = tmp_path / "behind"
    shutil.copytree(folders[1], behind)
    with pytest.raises(Stop):
        together_in(folders, stop=7)  # in the third
    shutil.rmtree(folders[1])
    behind.rename(folders[1])  # killed before the second of three was saved
    resumed = together_in(folders)
    assert [entry.get("together") for entry in resumed[1].card.record["epochs"]] == [3, None, 3]
    assert [entry.get("together") for entry in resumed[0].card.record["epochs"]] == [3, 3, 3]
    for seed, net in enumerate(resumed):
        assert_alike(net, train(network(seed=seed), *pictures(), replace(SHORT, seed=seed)), network(seed=seed))


def test_a_run_begun_alone_can_be_finished_among_others(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    alone = train(network(seed=1), *pictures(), replace(SHORT, seed=1), folder=folders[1])
    first, second = together_in(folders)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    assert_alike(first, train(network(), *pictures(), SHORT), network())


def test_a_loss_that_is_not_finite_names_its_folder_and_saves_none(tmp_path: Path) -> None:
    good, bad = pictures(11, seed=1)[0] / 255, torch.full((11, 1, 8, 8), float("nan"))
    recipe, folders = replace(SHORT, method="uda"), [tmp_path / "good", tmp_path / "bad"]
    with pytest.raises(TrainingError, match=r"epoch 1 the loss .* no checkpoint was saved in .*bad yet"):
        train_together([network(), network()], *pictures(), recipe, targets=[good, bad], folders=folders)
    assert not list(tmp_path.glob("*/checkpoint.safetensors"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [1]}, "`seeds` must have one entry for each of the 2 networks, got 1"),
        ({"folders": ["x"]}, "`folders` must have one entry for each"),
        ({"folders": ["x", "./x"]}, "different folders"),
        ({"targets": [pictures(4)[0]]}, "`targets` must have one entry for each"),
        ({"targets": [pictures(4)[0]] * 2}, "uda"),
    ],
)
def test_what_does_not_match_is_refused(given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        train_together([network(), network()], *pictures(), SHORT, **given)
    assert not list(tmp_path.iterdir())


def test_one_network_is_not_trained_twice_at_once() -> None:
    net = network()
    with pytest.raises(ValueError, match="distinct objects"):
        train_together([net, net], *pictures(), SHORT)
    with pytest.raises(ValueError, match="empty"):
        train_together([], *pictures(), SHORT)


# On a CPU with kernels of ours ---------------------------------------------------------------------------------------


@pytest.fixture
def compiled(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", LOADED)
    if not build.available():
        pytest.skip("there is no C++ compiler, or it is not to be used")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("method", ["plain", "joint", "alp"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_kernels_train_the_same_network(norm: Any, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(SHORT, method=method, epochs=1, lr=0.001)
    ours = train(network(norm), *pictures(), recipe)
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert_alike(ours, train(network(norm), *pictures(), recipe), network(norm))


@pytest.mark.usefixtures("compiled")
def test_kernels_train_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("images", *pictures(), CPU)

    def replicates(net: YNet, recipe: Recipe = SHORT) -> bool:
        return isinstance(Trainer([Training(net, recipe, pool)]).model, Replicated)

    assert replicates(network())
    assert not replicates(network(), replace(SHORT, precision="bf16"))
    assert not replicates(resnet26(CLASSES, depth=8, width=4, channels=1, size=8))  # 256 channels
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert not replicates(network())


# On a GPU ------------------------------------------------------------------------------------------------------------


def colour_pictures(count: int = 64) -> tuple[Tensor, Tensor]:
    """Noise images `(count, 3, 32, 32)` with a bright bar across, whose height is the class."""
    labels = torch.arange(count) % 10
    images = Draws.of(0, torch.arange(count)).integers(100, 3, 32, 32)
    images += 150 * (torch.arange(32) // 3 == labels[:, None])[:, None, :, None]
    return images.to(torch.uint8).cuda(), labels.cuda()


def learn_on_the_gpu(norm: Any, recipe: Recipe, count: int, folders: list[Path] | None = None, **given: Any) -> Any:
    nets = [resnet26(depth=8, norm=norm, seed=seed).cuda() for seed in range(count)]
    targets = None
    if recipe.method == "uda":
        targets = [Draws.of(seed, torch.arange(40)).uniform(3, 32, 32) for seed in range(count)]
    given = given | {"folders": folders, "targets": targets, "seeds": range(count)}
    return train_together(nets, *colour_pictures(), recipe, **given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    recipe = replace(SHORT, batch=16, lr=0.01)

    @pytest.mark.parametrize("method", ["plain", "joint", "robust", "alp", "uda"])
    @pytest.mark.parametrize("norm", ["group", "batch"])
    def test_side_by_side_is_alone(self, norm: Any, method: Any) -> None:
        recipe = replace(self.recipe, method=method)
        together = learn_on_the_gpu(norm, recipe, 3)
        target = Draws.of(2, torch.arange(40)).uniform(3, 32, 32) if method == "uda" else None
        net = resnet26(depth=8, norm=norm, seed=2).cuda()
        alone = train(net, *colour_pictures(), replace(recipe, seed=2), target=target)
        assert curve(together[2]) == pytest.approx(curve(alone), rel=1e-2)
        bound = 0.05 if norm == "group" else 0.1  # as for a single one in test_gpu.py
        start = resnet26(depth=8, norm=norm, seed=2).state_dict()
        for name, tensor in alone.state_dict().items():
            moved = float((tensor.cpu() - start[name]).abs().max())
            assert float((together[2].state_dict()[name] - tensor).abs().max()) <= bound * moved + 1e-6, name

    @pytest.mark.parametrize("count", [2, 12])
    @pytest.mark.parametrize("norm", ["group", "batch"])
    def test_bfloat16_learns_and_goes_on_bit_for_bit(self, norm: Any, count: int, tmp_path: Path) -> None:
        def stop(done: int, total: int, text: str) -> None:
            if done == 9:
                raise Stop

        recipe = replace(self.recipe, precision="bf16", epochs=6, lr=0.05)
        whole = learn_on_the_gpu(norm, recipe, count)
        folders = [tmp_path / str(seed) for seed in range(count)]
        with pytest.raises(Stop):
            learn_on_the_gpu(norm, recipe, count, folders, progress=stop)
        for one, other in zip(whole, learn_on_the_gpu(norm, recipe, count, folders), strict=True):
            assert curve(one)[-1] < curve(one)[0]
            for name, tensor in one.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name]), name


# The command line ----------------------------------------------------------------------------------------------------

TINY = ["train", "--data", "digits", "--limit", "48", "--epochs", "2", "--batch", "16", "--device", "cpu"]


def command(*arguments: object) -> int:
    return cli.run([*TINY, *map(str, arguments)])


def test_seeds_of_the_command_line_are_single_trainings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--seeds", "1,3", "--out", tmp_path / "both") == 0
    out, _ = capsys.readouterr()
    for line, seed in zip(out.splitlines(), (1, 3), strict=True):
        folder = tmp_path / "both" / f"seed-{seed}"
        assert line.startswith(f"{folder / 'network.safetensors'}: epoch 2, loss ")
        assert command("--seed", seed, "--out", tmp_path / str(seed)) == 0
        records = [json.loads((place / "record.json").read_text()) for place in (folder, tmp_path / str(seed))]
        assert records[0]["configuration"] == records[1]["configuration"]
        curves = [[entry["loss"] for entry in record["epochs"]] for record in records]
        assert curves[0] == pytest.approx(curves[1], abs=1e-3)


def test_targets_of_the_command_line_start_from_a_network(tmp_path: Path) -> None:
    assert command("--out", tmp_path / "joint") == 0
    start = tmp_path / "joint" / "network.safetensors"
    uda = ["--method", "uda", "--lr", "0.01", "--start", start]
    assert command(*uda, "--targets", "digits-c/*_blur/5", "--out", tmp_path / "uda") == 0
    names = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur")
    networks = [tmp_path / "uda" / "digits-c" / name / "5" / "network.safetensors" for name in names]
    assert sorted((tmp_path / "uda").rglob("network.safetensors")) == sorted(networks)
    assert command(*uda, "--target", "digits-c/glass_blur/5", "--out", tmp_path / "one") == 0
    alone, among = (json.loads(path.with_name("record.json").read_text()) for path in (tmp_path / "one/x", networks[1]))
    assert alone["configuration"] == among["configuration"]
    assert alone["configuration"]["target"]["name"] == "digits-c/glass_blur/5"
    assert alone["epochs"][-1]["loss"] == pytest.approx(among["epochs"][-1]["loss"], abs=1e-3)
    assert not torch.equal(*(load(path).encoder[0].weight for path in networks[:2]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "two"], "0-2 or 0,3"),
        (["--seeds", "3-1"], "0-2 or 0,3"),
        (["--seeds", "0-1", "--method", "uda", "--targets", "digits-c/*/5"], "not both"),
        (["--targets", "digits-c/*/5"], "only uda"),
        (["--method", "uda", "--targets", "digits-c/rain*/5"], "matches no data set"),
        (["--method", "uda", "--target", "digits", "--targets", "digits"], "--target or --targets"),
        (["--start", "no-such-file"], "no-such-file"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments, "--out", tmp_path / "out") in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_large_test_images_go_through_the_network_a_few_at_a_time() -> None:
    sizes: list[int] = []

    class Counting(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            sizes.append(len(images))
            return torch.eye(2)[(images[:, 0, 0, 0] > 0).long()]

    labels = torch.arange(40) % 2
    images = (255 * labels).to(torch.uint8)[:, None, None, None].expand(40, 1, 160, 160).contiguous()
    trainer: Any = SimpleNamespace(model=Counting(), count=1, precision="fp32")
    assert _errors(trainer, Pool("test", images, labels, CPU)) == [0.0]
    assert sizes == [20, 20]  # as many pixels as 500 images of 32×32
    assert _errors(trainer, Pool("test", images, 1 - labels, CPU)) == [1.0]

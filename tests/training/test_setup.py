"""Training setups: images that are held out, the width of the network, the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testtime import data, training
from testtime.training import Pool, Recipe
from testtime.training.setup import Setup

CPU = torch.device("cpu")


def train_briefly(setup: Setup, folder: Path) -> dict[str, Any]:
    """Train for an epoch and return the record."""
    net = training.train(setup.net, setup.source, None, setup.recipe.over(1), folder=folder, test=setup.test)
    return net.card.record


def describe(found: data.TestSet) -> dict[str, Any]:
    return Pool("images", found, None, CPU).description


def test_held_out_images_replace_the_test_set() -> None:
    for seed in (0, 5):
        setup = training.prepare("digits", hold_out=300, seed=seed)
        assert (len(setup.source), len(setup.test or [])) == (997, 300)
        assert setup.test is not None
        assert setup.test.fingerprint() == data.open("digits-held-out").fingerprint()
    assert describe(setup.source)["held_out"] == 300
    assert "held_out" not in describe(setup.test)
    held_out = {image.numpy().tobytes() for image in setup.test.images(slice(None))}
    assert not held_out & {image.numpy().tobytes() for image in setup.source.images(slice(None))}


def test_without_held_out_images_the_description_is_that_of_earlier_versions() -> None:
    assert describe(training.prepare("digits").source).keys() == {"name", "count", "shape", "hash"}


def test_a_limit_applies_to_the_images_that_are_trained_on() -> None:
    setup = training.prepare("digits", hold_out=1_200, limit=20)
    whole = training.prepare("digits", hold_out=1_200)
    assert describe(setup.source) | {"hash": ""} == {
        "name": "digits[:-1200][20]", "count": 20, "shape": [1, 16, 16], "hash": "", "held_out": 1_200,
    }  # fmt: skip
    pixels = [{image.numpy().tobytes() for image in one.source.images(slice(None))} for one in (setup, whole)]
    assert pixels[0] < pixels[1]


def test_a_record_says_what_was_held_out_and_a_folder_has_one_such_number(tmp_path: Path) -> None:
    setup = training.prepare("digits", hold_out=1_250)
    record = train_briefly(setup, tmp_path)
    assert record["configuration"]["data"]["held_out"] == 1_250
    assert record["configuration"]["test"]["name"] == "digits-held-out"
    assert record["configuration"]["test"]["count"] == 1_250
    right = sum(int((setup.net(chunk.images).argmax(1) == chunk.labels).sum()) for chunk in data_of(setup).chunks(250))
    assert record["epochs"][-1]["test_error"] == pytest.approx(1 - right / 1_250)
    with pytest.raises(ValueError, match="held_out"):
        train_briefly(training.prepare("digits", hold_out=1_249), tmp_path)


def data_of(setup: Setup) -> data.TestSet:
    assert setup.test is not None
    return setup.test


def test_a_start_must_not_have_seen_the_held_out_images(tmp_path: Path) -> None:
    first = training.prepare("digits", hold_out=1_250)
    train_briefly(first, tmp_path)
    file = tmp_path / "network.safetensors"
    held_out = training.prepare("digits", hold_out=1_250, start=file).source.held_out
    assert held_out is not None
    assert len(held_out) == 1_250
    with pytest.raises(ValueError, match=r"network\.safetensors.*--hold-out 1251"):
        training.prepare("digits", hold_out=1_251, start=file)
    with pytest.raises(ValueError, match=r"digits-resnet8-gn-joint.*was trained on"):
        training.prepare("digits", hold_out=1, start="digits-resnet8-gn-joint")


def test_the_width_is_that_of_the_network() -> None:
    net = training.prepare("digits", limit=5, width=2).net
    assert (net.card.architecture["width"], net.card.architecture["depth"]) == (2, 8)
    assert training.prepare("digits", limit=5).net.card.architecture["width"] == 1


def make_folder(folder: Path) -> Path:
    from PIL import Image

    for name in ("ants", "bees"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(folder / name / "a.png")
    return folder


def test_the_robust_recipe_depends_on_the_data(tmp_path: Path) -> None:
    small = training.prepare("digits", limit=5, recipe="robust", seed=3).recipe
    assert small == Recipe.robust(epochs=20, batch=32, seed=3)
    folder = str(make_folder(tmp_path))
    assert training.prepare(folder, size=16, recipe="robust").recipe == Recipe.robust()
    photographs = training.prepare(folder, "resnet18", size=32, recipe="robust").recipe
    paper = Recipe.imagenet()
    assert (photographs.method, photographs.schedule) == ("robust", "cosine")
    for field in ("epochs", "batch", "weight_decay", "views"):
        assert getattr(photographs, field) == getattr(paper, field)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hold_out": 0}, "`hold_out` must be 1 to 1,296"),
        ({"hold_out": 1_297}, "`hold_out` must be 1 to 1,296"),
        ({"data": "imagenet", "hold_out": 5}, "`hold_out` is only available for digits, cifar10, cifar100"),
        ({"data": ".", "hold_out": 5}, "`hold_out` is only available for"),
        ({"recipe": "magic"}, "`recipe`"),
        ({"width": 0}, "`width`"),
        ({"network": "resnet18", "width": 2}, "`width` is not supported by resnet18"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.prepare(**{"data": "digits", **arguments})

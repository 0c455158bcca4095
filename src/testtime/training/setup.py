"""What to train, by name: the sets, a fresh network and the recipe for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from testtime import data as datasets
from testtime.data.sets import TensorSet, TestSet
from testtime.networks.resnet import resnet18, resnet26, resnet50
from testtime.networks.ynet import YNet
from testtime.training.pool import shuffle
from testtime.training.recipe import Recipe


@dataclass(frozen=True)
class Setup:
    """What `prepare` gives: everything `train` needs.

    Attributes:
        net: The untrained network.
        source: The training set.
        test: The test set, or None.
        recipe: The recipe for them.
    """

    net: YNet
    source: TestSet
    test: TestSet | None
    recipe: Recipe


def prepare(
    data: str,
    network: Literal["resnet26", "resnet18", "resnet50"] = "resnet26",
    *,
    depth: int | None = None,
    norm: Literal["group", "batch"] = "group",
    size: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    limit: int | None = None,
) -> Setup:
    """The sets, a fresh network and the recipe for a data set by name.

    Args:
        data: "digits", "cifar10", "imagenet", or a folder with a folder of pictures for each class; if it holds
            `train` and `test` (or `val`), those are the two sets, each with the folders of the classes.
        network: The architecture.
        depth: For "resnet26" another depth, 6n + 2; the digits take 8 by default.
        norm: "group" or "batch".
        size: Side of a folder's pictures; by default what the network is made for.
        seed: Seed of the initial weights, and of the recipe.
        root: Where data sets are looked for.
        limit: Train on no more than this many samples, chosen by hash.

    Raises:
        ValueError: A name or a number is wrong.
        DataError: The data is not there or damaged.
    """
    builders = {"resnet26": resnet26, "resnet18": resnet18, "resnet50": resnet50}
    if network not in builders:
        raise ValueError(f"`network` must be one of {', '.join(builders)}, got {network!r}.")
    if depth is not None and network != "resnet26":
        raise ValueError(f"`depth` is for resnet26; {network} has its own.")
    source, test = _open_sets(data, root, size or (32 if network == "resnet26" else 224))
    if source.labels is None:
        raise ValueError(f"{data} has no labels to train with: it needs a folder of pictures for each class.")
    if limit is not None:
        source = _some_of(source, limit)
    if network == "resnet26":
        depth = depth or (8 if data == "digits" else 26)
        net = resnet26(
            len(source.classes), norm=norm, depth=depth, channels=source.shape[0], size=source.shape[1], seed=seed
        )
    else:
        if source.shape[0] != 3:
            raise ValueError(f"{network} takes colour images; for {data} use resnet26.")
        net = builders[network](len(source.classes), norm=norm, size=source.shape[1], seed=seed)
    if data == "digits":
        # A mirrored digit is no digit.
        net.describe(augment={"name": "crop-flip", "padding": source.shape[1] // 8, "flip": False})
        return Setup(net, source, test, Recipe.digits(seed=seed))
    recipe = Recipe.cifar(norm, seed=seed) if network == "resnet26" else Recipe.imagenet(seed=seed)
    return Setup(net, source, test, recipe)


def _open_sets(data: str, root: str | Path | None, size: int) -> tuple[TestSet, TestSet | None]:
    if data in ("digits", "cifar10"):
        return datasets.open(data, root, "train"), datasets.open(data, root, "test")
    if data == "imagenet":
        return datasets.open(data, root, "train", size=size), datasets.open(data, root, "test", size=size)
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`data` must be digits, cifar10, imagenet or a folder, got {data!r}.")
    if not (folder / "train").is_dir():
        return datasets.open("folder", folder, size=size), None
    source = datasets.open("folder", folder / "train", size=size)
    held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held_out is None:
        return source, None
    return source, datasets.open("folder", held_out, size=size, classes=source.classes)


def _some_of(source: TestSet, limit: int) -> TestSet:
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    if limit >= len(source):
        return source
    numbers = shuffle(len(source), 0, 0, torch.device("cpu"), "limit")[:limit].sort().values
    assert source.labels is not None
    return TensorSet(f"{source.name}[{limit}]", source.images(numbers), source.labels[numbers], source.classes)

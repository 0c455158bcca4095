"""Training setups by name: the data, a new network and the recipe.

Photographs are decoded once, in parallel: small sets into memory, ImageNet and other large sets into a packed file on
disk that later runs reuse (data/pack.py). For networks trained on random resized crops, photographs are stored larger
than the crops: the short side is resized to 8/7 of the crop size (256 for 224) and the central square is taken. Test
images are its centre crop, as in the paper.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from testtime import data as datasets
from testtime import tasks
from testtime.data import folder, imagenet
from testtime.data.folder import PictureSet
from testtime.data.held_out import COUNTS, hold_out_images, was_seen
from testtime.data.sets import OnBad, TensorSet, TestSet, check_on_bad
from testtime.networks.builders import BUILDERS, Builder
from testtime.networks.checkpoint import load
from testtime.networks.ynet import YNet
from testtime.progress import Progress
from testtime.provenance import find_differences
from testtime.storage import FileError
from testtime.tasks import Task
from testtime.training import pool
from testtime.training.recipe import Recipe


@dataclass(frozen=True)
class Setup:
    """The result of `prepare`: everything `train` needs.

    Attributes:
        net: The initial network.
        source: The training set.
        test: The test set, the held-out images if there are any, or None.
        recipe: The recipe.
        build: Builds the initial network for a given seed.
    """

    net: YNet
    source: TestSet
    test: TestSet | None
    recipe: Recipe
    build: Callable[[int], YNet]

    @property
    def skipped(self) -> tuple[str, ...]:
        """A line for each unreadable file of the two sets."""
        return self.source.skipped + (() if self.test is None else self.test.skipped)


def prepare(
    data: str,
    network: str | None = None,
    *,
    depth: int | None = None,
    width: int | None = None,
    patch: int | None = None,
    norm: Literal["group", "batch"] = "group",
    size: int | None = None,
    area: float | None = None,
    start: str | Path | None = None,
    task: str | None = None,
    recipe: Literal["paper", "robust"] = "paper",
    seed: int = 0,
    root: str | Path | None = None,
    hold_out: int | None = None,
    limit: int | None = None,
    cache: str | Path | None = None,
    spare: bool = True,
    on_bad: OnBad = "fail",
    progress: Progress | None = None,
) -> Setup:
    """Prepare the data, a new network and the recipe for a data set by name.

    Args:
        data: "digits", "cifar10", "cifar100", "imagenet", or a folder with one subfolder of images per class,
            optionally split into `train` and `test` (or `val`).
        network: The architecture, a name from `BUILDERS`; None for "resnet18" on ImageNet and "resnet26" otherwise.
        depth: Depth of "resnet26", 6n + 2, or blocks of "vit"; by default smaller for the digits.
        width: Multiplier of the channels of "resnet26", or width of the tokens of "vit".
        patch: Side of a patch of "vit".
        norm: "group" or "batch", for the ResNets.
        size: Input size of the network; by default that of its architecture.
        area: Minimum area of a random crop as a fraction of the photograph, for networks trained on random resized
            crops; 0.08 by default. Small sets are learned faster from larger crops.
        start: A checkpoint file, or the name of a bundled network, to start from instead of random weights; its
            architecture must match the other arguments.
        task: Name of the self-supervised task; "rotation" by default. "masked" needs the network "vit".
        recipe: The paper's recipe for the data, that of `Recipe.vit` for "vit", or "robust", see `Recipe.robust`.
        seed: Seed of the initial weights, and of the recipe.
        root: Root folder of the data sets.
        hold_out: Number of training images that are not trained on but replace the test set, for choosing settings;
            the same ones for every seed. Only for the digits, CIFAR-10 and CIFAR-100.
        limit: Maximum number of training samples, a deterministic subset.
        cache: Folder for decoded photographs. None for `packed` under the data root, only used for ImageNet and for
            sets that do not fit in memory.
        spare: Whether to store photographs larger than the random crops, or at their size.
        on_bad: What to do about an unreadable image: "fail" before training starts, or "skip" it.
        progress: Called with the images of a set decoded, their total, and a message.

    Raises:
        ValueError: An argument is invalid, or `start` has another architecture or was trained on the held-out images.
        CheckpointError: The file of `start` is missing or damaged.
        DataError: The data is missing or damaged.
    """
    given = {"depth": depth, "width": width, "patch": patch, "norm": None if norm == "group" else norm}
    shape = {name: value for name, value in given.items() if value is not None}
    builder = _find_builder(network or ("resnet18" if data == "imagenet" else "resnet26"), shape)
    if recipe not in ("paper", "robust"):
        raise ValueError(f'`recipe` must be "paper" or "robust", got {recipe!r}.')
    if hold_out is not None and data not in COUNTS:
        raise ValueError(f"`hold_out` is only available for {', '.join(COUNTS)}, got {data!r}.")
    check_on_bad(on_bad)
    chosen = _choose_task(task, patch, builder)
    loaded = None if start is None else load(start)
    size = size or builder.size
    if area is not None and not (builder.crops and 0 < area <= 1):
        raise ValueError(f"`area` must be in (0, 1] and needs a network trained on random crops, got {area}.")
    source, test = _open_sets(data, root, size, round(size * 8 / 7) if builder.crops and spare else None, on_bad)
    if source.labels is None:
        raise ValueError(f"{data} has no labels: it needs one folder of images per class.")
    if hold_out is not None:
        source, test = hold_out_images(source, hold_out)
        if loaded is not None and was_seen(loaded.card.record, data, hold_out):
            remedy = f"start from a network trained with --hold-out {hold_out}"
            raise FileError(str(start), f"was trained on the images to hold out from {data}", remedy)
    source = limit_images(source, limit)
    decode = _Decoder(data == "imagenet" and limit is None, root, cache, on_bad, progress)
    source, test = decode(source), None if test is None else decode(test)

    def build(seed: int) -> YNet:
        fresh = _build(builder, data, source, shape, size, area, chosen, seed)
        return fresh if loaded is None else _copy_as(loaded, fresh, start)

    return Setup(build(seed), source, test, _choose_recipe(recipe, data, builder, norm, seed), build)


def open_images(
    data: str,
    net: YNet,
    *,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    on_bad: OnBad = "fail",
    progress: Progress | None = None,
) -> TestSet:
    """Open the training images of a data set, or a folder of pictures with or without classes, for a network.

    Args:
        data: As for `prepare`.
        net: The network; its card has the size of the images and the augmentation.
        root: As for `prepare`.
        cache: As for `prepare`.
        on_bad: As for `prepare`.
        progress: As for `prepare`.

    Raises:
        ValueError: An argument is invalid, or the network's size is not known.
        DataError: The data is missing or damaged.
    """
    check_on_bad(on_bad)
    size = 0 if data in COUNTS else net.card.require_size()  # of pictures only
    crops = net.card.augment.get("name") == "resized-crop-flip"
    source, _ = _open_sets(data, root, size, round(size * 8 / 7) if crops else None, on_bad)
    return _Decoder(data == "imagenet", root, cache, on_bad, progress)(source)


def _find_builder(network: str, shape: Mapping[str, Any]) -> Builder:
    """Return the builder of an architecture, which must have the arguments `shape`."""
    if network not in BUILDERS:
        raise ValueError(f"`network` must be one of {', '.join(BUILDERS)}, got {network!r}.")
    for name, value in shape.items():
        if not BUILDERS[network].takes(name):
            raise ValueError(f"`{name}` is not supported by {network}, got {value}.")
    return BUILDERS[network]


def _choose_task(name: str | None, patch: int | None, builder: Builder) -> Task | None:
    """Return the task of a name, which must suit the architecture; None for the default."""
    if name is None:
        return None
    task = tasks.make({"name": name, **({"patch": patch or 4} if name == "masked" else {})})
    if task.outputs is None and builder.recipe != "vit":
        raise ValueError(f'`task` {name!r} needs a network with a decoder: `network` must be "vit".')
    return task


def _copy_as(loaded: YNet, fresh: YNet, start: str | Path | None) -> YNet:
    """Return a copy of a loaded network, which must have the architecture of a fresh one."""
    different = find_differences(loaded.card.architecture, fresh.card.architecture)
    if different:
        raise FileError(str(start), f"not the requested architecture ({'; '.join(different)})")
    return copy.deepcopy(loaded)


def _choose_recipe(name: str, data: str, builder: Builder, norm: Literal["group", "batch"], seed: int) -> Recipe:
    if builder.recipe == "vit":
        smaller: dict[str, Any] = {"epochs": 40, "batch": 32, "lr": 3e-3, "warmup": 2} if data == "digits" else {}
        base = Recipe.vit(seed=seed, **smaller)
        return base if name == "paper" else replace(base, method="robust")
    if data == "digits":
        paper = Recipe.digits(seed=seed)
    elif builder.recipe == "imagenet":
        paper = Recipe.imagenet(seed=seed)
    else:
        return Recipe.cifar(norm, seed=seed) if name == "paper" else Recipe.robust(seed=seed)
    if name == "paper":
        return paper
    fields = ("epochs", "batch", "weight_decay", "views", "seed")  # what depends on the amount of data
    return Recipe.robust(**{field: getattr(paper, field) for field in fields})


def _build(
    builder: Builder,
    data: str,
    source: TestSet,
    shape: Mapping[str, Any],
    size: int,
    area: float | None,
    task: Task | None,
    seed: int,
) -> YNet:
    channels, side, _ = source.shape
    if builder.crops:
        size = min(size, side)
        augment = {"name": "resized-crop-flip", "size": size} | ({} if area is None else {"scale": [area, 1.0]})
    else:
        size = side
        # No flips: a mirrored digit is not a digit.
        augment = {"name": "crop-flip", "padding": side // 8, "flip": False} if data == "digits" else None
    options = {**(builder.digits if data == "digits" else {}), **shape}
    if task is not None:
        options["outputs"] = task.outputs
    if builder.takes("channels"):
        options["channels"] = channels
    elif channels != 3:
        raise ValueError(f"{data} has {channels} channels; this network takes 3.")
    net = builder.make(len(source.classes), size=size, seed=seed, **options)
    if task is not None:
        net.describe(task=tasks.describe(task))
    return net if augment is None else net.describe(augment=augment)


def _open_sets(
    data: str, root: str | Path | None, size: int, side: int | None, on_bad: OnBad
) -> tuple[TestSet, TestSet | None]:
    """Open the training set, with images of `side` if given, and the test set, with images of `size`."""
    if data in ("digits", "cifar10", "cifar100"):
        return datasets.open(data, root, "train"), datasets.open(data, root, "test")
    train = {"size": side or size, "resize": side}
    if data == "imagenet":
        pictures = imagenet.list_pictures(root, "train", **train, on_bad=on_bad)
        return pictures, imagenet.list_pictures(root, "val", size, classes=pictures.classes, on_bad=on_bad)
    path = Path(data).expanduser()
    if not path.is_dir():
        raise ValueError(f"`data` must be digits, cifar10, cifar100, imagenet or a folder, got {data!r}.")
    if not (path / "train").is_dir():
        return folder.list_pictures(path, **train, on_bad=on_bad), None
    source = folder.list_pictures(path / "train", **train, on_bad=on_bad)
    held_out = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    if held_out is None:
        return source, None
    return source, folder.list_pictures(held_out, size, classes=source.classes, on_bad=on_bad)


def limit_images(source: TestSet, limit: int | None) -> TestSet:
    """Return at most `limit` images of a set, a deterministic subset; all if it is None.

    Raises:
        ValueError: The limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    if limit is None or limit >= len(source):
        return source
    numbers = pool.shuffle(len(source), 0, 0, torch.device("cpu"), "limit")[:limit].sort().values
    name = f"{source.name}[{limit}]"
    if isinstance(source, PictureSet):
        return source.pick(numbers, name)
    labels = None if source.labels is None else source.labels[numbers]
    chosen = TensorSet(name, source.images(numbers), labels, source.classes)
    chosen.held_out = source.held_out
    return chosen


@dataclass(frozen=True)
class _Decoder:
    """Decodes images once, into memory or into a packed file."""

    always: bool
    root: str | Path | None
    cache: str | Path | None
    on_bad: OnBad
    progress: Progress | None

    def __call__(self, found: TestSet) -> TestSet:
        if not isinstance(found, PictureSet):
            return found
        small = len(found) * math.prod(found.shape) <= pool.RESIDENT_BYTES
        if small and not self.always and self.cache is None:
            return found.load_into_memory(self.on_bad, self.progress)
        packed = datasets.data_root(self.root) / "packed" if self.cache is None else Path(self.cache).expanduser()
        return datasets.pack(found, packed / _slug(found), progress=self.progress, on_bad=self.on_bad)


def _slug(pictures: PictureSet) -> str:
    """Return the folder name of a packed set; for ImageNet the one that `data.open` expects."""
    if pictures.name in ("imagenet", "imagenet/train"):
        return f"imagenet-{pictures.folder.name}-{pictures.size}-{pictures.resize}"
    digest = hashlib.sha256(f"{pictures.folder.resolve()} {pictures.name}".encode()).hexdigest()[:8]
    return f"{pictures.folder.name}-{digest}-{pictures.size}-{pictures.resize}"

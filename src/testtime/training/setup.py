"""What to train, by name: the sets, a fresh network and the recipe for them.

Photographs are decoded once, in parallel: a small set into memory, ImageNet or any larger set into a packed file on
disk, which the next run finds (data/pack.py). Where the training crops are of random size, the photographs are kept a
bit larger than the crops: the short side resized to 8/7 of the crop's (256 for 224) and the central square taken. Test
images are the central crop of the same, as in the paper.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from testtime import data as datasets
from testtime.data import folder, imagenet
from testtime.data.folder import PictureSet
from testtime.data.sets import OnBad, TensorSet, TestSet, check_on_bad
from testtime.networks.builders import BUILDERS, Builder
from testtime.networks.checkpoint import load
from testtime.networks.ynet import YNet
from testtime.progress import Progress
from testtime.provenance import find_differences
from testtime.storage import FileError
from testtime.training import pool
from testtime.training.recipe import Recipe


@dataclass(frozen=True)
class Setup:
    """What `prepare` gives: everything `train` needs.

    Attributes:
        net: The network that training starts from.
        source: The training set.
        test: The test set, or None.
        recipe: The recipe for them.
        build: Makes the network that training starts from, of another seed.
    """

    net: YNet
    source: TestSet
    test: TestSet | None
    recipe: Recipe
    build: Callable[[int], YNet]

    @property
    def skipped(self) -> tuple[str, ...]:
        """A line for each file of the two sets that was left out because it cannot be read."""
        return self.source.skipped + (() if self.test is None else self.test.skipped)


def prepare(
    data: str,
    network: str | None = None,
    *,
    depth: int | None = None,
    norm: Literal["group", "batch"] = "group",
    size: int | None = None,
    area: float | None = None,
    start: str | Path | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    limit: int | None = None,
    cache: str | Path | None = None,
    spare: bool = True,
    on_bad: OnBad = "fail",
    progress: Progress | None = None,
) -> Setup:
    """The sets, a fresh network and the recipe for a data set by name.

    Args:
        data: "digits", "cifar10", "imagenet", or a folder with a folder of pictures for each class; if it holds
            `train` and `test` (or `val`), those are the two sets, each with the folders of the classes.
        network: The architecture, a name from `BUILDERS`; None takes "resnet18" for ImageNet and "resnet26" otherwise.
        depth: For "resnet26" another depth, 6n + 2; the digits take 8 by default.
        norm: "group" or "batch".
        size: Side of the images that the network sees of pictures; by default what the network is made for.
        area: The smallest share of a photograph that a random crop takes, for the networks that see such crops; 0.08 by
            default. A small set is learned sooner from larger crops.
        start: A network file, or a bundled network's name, to start from instead of random weights; of the architecture
            that the other arguments ask for.
        seed: Seed of the initial weights, and of the recipe.
        root: Where data sets are looked for.
        limit: Train on no more than this many samples, chosen by hash.
        cache: Where decoded photographs are kept. None is `packed` under the data root, and only for ImageNet and for
            sets that are too large for memory.
        spare: Whether photographs are kept larger than random crops of them need; without, as large as the crops.
        on_bad: "fail" stops at a picture that cannot be read, before training starts; "skip" leaves it out.
        progress: Told how many of how many pictures of a set are decoded.

    Raises:
        ValueError: A name or a number is wrong, or `start` is another network than asked for.
        CheckpointError: The file of `start` is missing or damaged.
        DataError: The data is not there or damaged.
    """
    network = network or ("resnet18" if data == "imagenet" else "resnet26")
    if network not in BUILDERS:
        raise ValueError(f"`network` must be one of {', '.join(BUILDERS)}, got {network!r}.")
    builder = BUILDERS[network]
    if depth is not None and not builder.takes("depth"):
        raise ValueError(f"`depth` is not for {network}, which has its own.")
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    check_on_bad(on_bad)
    loaded = None if start is None else load(start)
    size = size or builder.size
    if area is not None and not (builder.crops and 0 < area <= 1):
        raise ValueError(f"`area` must lie in (0, 1], and is for networks that train on random crops; got {area}.")
    source, test = _open_sets(data, root, size, round(size * 8 / 7) if builder.crops and spare else None, on_bad)
    if source.labels is None:
        raise ValueError(f"{data} has no labels to train with: it needs a folder of pictures for each class.")
    if limit is not None and limit < len(source):
        source = _some_of(source, limit)
    keep = _Keeper(data == "imagenet" and limit is None, root, cache, on_bad, progress)
    source, test = keep(source), None if test is None else keep(test)

    def build(seed: int) -> YNet:
        fresh = _build(builder, data, source, norm, depth, size, area, seed)
        if loaded is None:
            return fresh
        different = find_differences(loaded.card.architecture, fresh.card.architecture)
        if different:
            raise FileError(str(start), f"another network than asked for ({'; '.join(different)})")
        return copy.deepcopy(loaded)

    if data == "digits":
        recipe = Recipe.digits(seed=seed)
    else:
        recipe = Recipe.cifar(norm, seed=seed) if builder.recipe == "cifar" else Recipe.imagenet(seed=seed)
    return Setup(build(seed), source, test, recipe, build)


def _build(
    builder: Builder,
    data: str,
    source: TestSet,
    norm: str,
    depth: int | None,
    size: int,
    area: float | None,
    seed: int,
) -> YNet:
    channels, side, _ = source.shape
    if builder.crops:
        size = min(size, side)
        augment = {"name": "resized-crop-flip", "size": size} | ({} if area is None else {"scale": [area, 1.0]})
    else:
        size = side
        # A mirrored digit is no digit.
        augment = {"name": "crop-flip", "padding": side // 8, "flip": False} if data == "digits" else None
    depth = depth or (8 if data == "digits" else None)
    options = {"depth": depth} if depth is not None and builder.takes("depth") else {}
    if builder.takes("channels"):
        options["channels"] = channels
    elif channels != 3:
        raise ValueError(f"{data} has {channels} channels; this network takes colour images.")
    net = builder.make(len(source.classes), norm=norm, size=size, seed=seed, **options)
    return net if augment is None else net.describe(augment=augment)


def _open_sets(
    data: str, root: str | Path | None, size: int, side: int | None, on_bad: OnBad
) -> tuple[TestSet, TestSet | None]:
    """The training set, its pictures `side` wide where that is given, and the test set, `size` wide."""
    if data in ("digits", "cifar10"):
        return datasets.open(data, root, "train"), datasets.open(data, root, "test")
    train = {"size": side or size, "resize": side}
    if data == "imagenet":
        pictures = imagenet.list_pictures(root, "train", **train, on_bad=on_bad)
        return pictures, imagenet.list_pictures(root, "val", size, classes=pictures.classes, on_bad=on_bad)
    place = Path(data).expanduser()
    if not place.is_dir():
        raise ValueError(f"`data` must be digits, cifar10, imagenet or a folder, got {data!r}.")
    if not (place / "train").is_dir():
        return folder.list_pictures(place, **train, on_bad=on_bad), None
    source = folder.list_pictures(place / "train", **train, on_bad=on_bad)
    held_out = next((place / name for name in ("test", "val") if (place / name).is_dir()), None)
    if held_out is None:
        return source, None
    return source, folder.list_pictures(held_out, size, classes=source.classes, on_bad=on_bad)


def _some_of(source: TestSet, limit: int) -> TestSet:
    numbers = pool.shuffle(len(source), 0, 0, torch.device("cpu"), "limit")[:limit].sort().values
    name = f"{source.name}[{limit}]"
    if isinstance(source, PictureSet):
        return source.pick(numbers, name)
    assert source.labels is not None
    return TensorSet(name, source.images(numbers), source.labels[numbers], source.classes)


@dataclass(frozen=True)
class _Keeper:
    """Decodes pictures once: into memory, or into a packed file."""

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
            return found.hold(self.on_bad, self.progress)
        place = datasets.data_root(self.root) / "packed" if self.cache is None else Path(self.cache).expanduser()
        return datasets.pack(found, place / _slug(found), progress=self.progress, on_bad=self.on_bad)


def _slug(pictures: PictureSet) -> str:
    """A folder name for a packed set; ImageNet's as `data.open` looks for it."""
    if pictures.name in ("imagenet", "imagenet/train"):
        return f"imagenet-{pictures.folder.name}-{pictures.size}-{pictures.resize}"
    mark = hashlib.sha256(f"{pictures.folder.resolve()} {pictures.name}".encode()).hexdigest()[:8]
    return f"{pictures.folder.name}-{mark}-{pictures.size}-{pictures.resize}"

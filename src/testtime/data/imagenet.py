"""ImageNet and ImageNet-C from their official folders: the paper's section on ImageNet.

ImageNet has `train/WNID/*.JPEG` and `val/WNID/*.JPEG`; labels number the WordNet ids in sorted order, which is the
order of every usual 1,000-way network. A part of the classes works the same way: their labels count from 0, or follow
`classes` where the network has more. Test images are the short side resized to 256 and the centre 224 cropped.
ImageNet-C has `NAME/LEVEL/WNID/*.JPEG` at 224×224; where it is absent, it is made from the validation images: whatever
their own size, their short side becomes 256, the centre 224 is cropped and corrupted, and for a network of another size
the corrupted image is scaled, as a published one would be.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from testtime.data.corrupted import Corrupted
from testtime.data.folder import PictureSet, list_classes
from testtime.data.pack import find_packed, pack
from testtime.data.pictures import Resize
from testtime.data.places import data_root, first_existing
from testtime.data.resized import Resized
from testtime.data.sets import DataError, OnBad, TestSet, check_on_bad

log = logging.getLogger(__name__)

Source = Literal["auto", "official", "generated"]
Packed = bool | str | os.PathLike[str] | None
CORRUPTED_SIZE = 224
_GROUPS = ("", "noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C, extracted each by itself


def load(
    root: str | os.PathLike[str] | None = None,
    split: Literal["train", "val", "test"] = "val",
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    packed: Packed = None,
    on_bad: OnBad | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TestSet:
    """ImageNet, or a part of its classes.

    Args:
        root: The data root, or the folder that holds `train` and `val`.
        split: `train` or `val`; `test` is another name for `val`, whose labels are public.
        size: Height and width of the images.
        resize: The short side before the centre crop; None is 8/7 of the size, 256 for 224.
        classes: WordNet ids in the order of the network's outputs; None takes the folders there are.
        threads: Pictures decoded at once; None takes one for each core.
        packed: Keep the decoded images in one memory-mapped file: in this folder, or, for True, in `packed` under the
            data root. The first opening writes it and takes as long as decoding everything. None reads from there if
            all of it is there, False never does.
        on_bad: "fail" finds a picture that cannot be read before the set is used, "skip" leaves such pictures and
            classes without pictures out; None finds out when a picture is read.
        progress: Told how many of how many images are packed or looked at.

    Raises:
        DataError: It is not there, a class is empty, or a picture cannot be read.
    """
    pictures = list_pictures(root, split, size, resize, classes, threads, on_bad)
    return _packed(
        pictures, packed, root, f"imagenet-{pictures.folder.name}-{size}-{pictures.resize}", on_bad, progress
    )


def list_pictures(
    root: str | os.PathLike[str] | None = None,
    split: Literal["train", "val", "test"] = "val",
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    on_bad: OnBad | None = None,
) -> PictureSet:
    """ImageNet's picture files, none of them opened yet; arguments as for `load`."""
    if split not in ("train", "val", "test"):
        raise ValueError(f"`split` must be 'train', 'val' or 'test', got {split!r}.")
    split = "val" if split == "test" else split
    folder = find(root)
    if folder is None:
        raise DataError(data_root(root), "holds no imagenet folder with train and val", "name another root")
    files, labels, found, notes = list_classes(folder / split, classes, on_bad)
    name = "imagenet" if split == "val" else "imagenet/train"
    pictures = PictureSet(name, folder / split, files, labels, found, size, resize, threads, notes=notes)
    pictures.origin = f"official files ({folder.name}/{split}, {size} from {pictures.resize})"
    return pictures


def find(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder with `train` and `val` from which ImageNet would be read, or None."""
    root = data_root(root)
    places = (root / "imagenet", root / "ImageNet", root / "ILSVRC2012", root)
    return next((place for place in places if (place / "val").is_dir() or (place / "train").is_dir()), None)


def load_c(
    corruption: str,
    level: int,
    root: str | os.PathLike[str] | None = None,
    source: Source = "auto",
    seed: int = 0,
    size: int = CORRUPTED_SIZE,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    packed: Packed = None,
    frost: str | os.PathLike[str] | None = None,
    on_bad: OnBad | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> TestSet:
    """One corruption of ImageNet-C at one level.

    Args:
        corruption: Its name, such as `fog`.
        level: 1 to 5.
        root: The data root, or the folder that holds the corruptions.
        source: `official` reads the published pictures, `generated` corrupts the validation images with
            `testtime.corruptions`, `auto` takes the pictures where they are.
        seed: Seed of the generated images.
        size: Height and width of the images; other than 224 they are scaled after they have been corrupted.
        resize: The short side before the centre crop; None is the size itself for the published pictures, which are
            already cropped, and 256 for generated ones, which are cropped to 224.
        classes: As in `load`.
        threads: As in `load`.
        packed: As in `load`.
        frost: Folder of frost photographs for generated `frost`; None makes textures by code.
        on_bad: As in `load`.
        device: Where images are generated.
        progress: As in `load`.

    Raises:
        DataError: Neither is there, the level is missing, or a picture cannot be read.
    """
    if level not in range(1, 6):
        raise ValueError(f"`level` must be 1 to 5, got {level!r}.")
    if source not in ("auto", "official", "generated"):
        raise ValueError(f"`source` must be 'auto', 'official' or 'generated', got {source!r}.")
    if not corruption.isidentifier():
        raise ValueError(f"`corruption` must be a name such as 'fog', got {corruption!r}.")
    name = f"imagenet-c/{corruption}/{level}"
    folder = None if source == "generated" else find_c(root, corruption)
    if folder is not None:
        files, labels, found, notes = list_classes(folder / str(level), classes, on_bad)
        resize = size if resize is None else resize
        place = folder / str(level)
        pictures: TestSet = PictureSet(name, place, files, labels, found, size, resize, threads, notes=notes)
        pictures.origin = f"official files ({folder.name}/{level})"
    elif source == "official":
        raise DataError(data_root(root) / "imagenet-c" / corruption / str(level), "no such folder")
    else:
        if find_c(root) is not None:
            log.warning("%s has no %s; generating it from ImageNet", find_c(root), corruption)
        plain = load(root, "val", CORRUPTED_SIZE, resize, classes, threads, on_bad=on_bad, progress=progress)
        pictures = Corrupted(plain, corruption, level, name, seed, "imagenet", frost, device)
        if size != CORRUPTED_SIZE:
            pictures = Resized(pictures, size)
    return _packed(pictures, packed, root, f"imagenet-c-{corruption}-{level}-{size}", on_bad, progress)


def find_c(root: str | os.PathLike[str] | None = None, corruption: str | None = None) -> Path | None:
    """The folder of ImageNet-C, or that of one of its corruptions, or None."""
    root = data_root(root)
    places = (root / "imagenet-c", root / "ImageNet-C", root)
    if corruption is None:
        return first_existing(places[:2])
    return first_existing(place / group / corruption for place in places for group in _GROUPS)


def _packed(
    pictures: TestSet,
    packed: Packed,
    root: str | os.PathLike[str] | None,
    name: str,
    on_bad: OnBad | None,
    progress: Callable[[int, int], None] | None,
) -> TestSet:
    """The set itself or its packed form, with every picture looked at where that is asked for."""
    if on_bad is not None:
        check_on_bad(on_bad)
    usual = data_root(root) / "packed" / name
    if packed is None:
        found = find_packed(pictures, usual)
        if found is not None and (on_bad != "fail" or not found.skipped):
            return found
    elif packed is not False:
        place = usual if packed is True else packed
        return pack(pictures, place, progress=progress, on_bad=on_bad or "fail")
    return pictures.check(on_bad, progress) if on_bad is not None and isinstance(pictures, PictureSet) else pictures

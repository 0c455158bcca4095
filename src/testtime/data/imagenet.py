"""ImageNet and ImageNet-C from their official folders (paper, the section on ImageNet).

ImageNet has `train/WNID/*.JPEG` and `val/WNID/*.JPEG`; labels are the positions of the WordNet ids in sorted order,
which is the order of all common 1,000-class networks. A subset of the classes works the same way: labels start at 0, or
follow `classes` if the network has more. Test images are resized to a short side of 256, and the centre 224 is cropped.

ImageNet-C has `NAME/LEVEL/WNID/*.JPEG` at 224×224. If it is absent, it is generated from the validation images: the
short side is resized to 256, the centre 224 cropped and corrupted; for networks of another size the corrupted image is
resized, as a published one would be.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from testtime.corruptions import CORRUPTIONS, SEVERITIES
from testtime.data.corrupted import PARTS, Corrupted, Origin, check_choice, split_part
from testtime.data.family import Family, Root
from testtime.data.folder import PictureSet, check_pictures, list_classes
from testtime.data.packing import find_packed, pack
from testtime.data.paths import data_root, first_existing
from testtime.data.pictures import Resize
from testtime.data.resized import Resized
from testtime.data.sets import DataError, OnBad, TestSet, check_on_bad
from testtime.progress import Progress
from testtime.storage import PathLike

log = logging.getLogger(__name__)

Packed = bool | PathLike | None
CORRUPTED_SIZE = 224
_GROUPS = ("", "noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C, extracted separately


def load(
    root: Root = None,
    split: Literal["train", "val", "test"] = "val",
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    packed: Packed = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> TestSet:
    """Open ImageNet, or a subset of its classes.

    Args:
        root: The data root, or the folder with `train` and `val`.
        split: `train` or `val`; `test` is an alias of `val`, whose labels are public.
        size: Height and width of the images.
        resize: The short side before the centre crop; None: 8/7 of the size, 256 for 224.
        classes: WordNet ids in the order of the network's outputs; None: all folders.
        threads: Number of decoding threads; None: one per core.
        packed: Cache the decoded images in one memory-mapped file: in this folder, or, if True, in `packed` under the
            data root. The first call decodes everything to write it. None: use the file if it is complete; False:
            never.
        on_bad: "fail" raises an error for an unreadable picture when the set is opened; "skip" leaves unreadable
            pictures and empty classes out. None: errors are raised when a picture is read.
        progress: Called with the number of images packed or checked and their total.

    Raises:
        DataError: It is missing, a class is empty, or a picture cannot be read.
    """
    pictures = list_pictures(root, split, size, resize, classes, threads, on_bad)
    return _packed(
        pictures, packed, root, f"imagenet-{pictures.folder.name}-{size}-{pictures.resize}", on_bad, progress
    )


def list_pictures(
    root: Root = None,
    split: Literal["train", "val", "test"] = "val",
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    on_bad: OnBad | None = None,
) -> PictureSet:
    """List ImageNet's picture files without opening them; arguments as for `load`."""
    if split not in ("train", "val", "test"):
        raise ValueError(f"`split` must be 'train', 'val' or 'test', got {split!r}.")
    split = "val" if split == "test" else split
    folder = find(root)
    if folder is None:
        raise DataError(data_root(root), "holds no imagenet folder with train and val", "choose another root")
    files, labels, found, notes = list_classes(folder / split, classes, on_bad)
    name = "imagenet" if split == "val" else "imagenet/train"
    pictures = PictureSet(name, folder / split, files, labels, found, size, resize, threads, notes=notes)
    pictures.origin = f"official files ({folder.name}/{split}, {size} from {pictures.resize})"
    return pictures


def find(root: Root = None) -> Path | None:
    """Return the folder with `train` and `val` to read ImageNet from, or None."""
    root = data_root(root)
    paths = (root / "imagenet", root / "ImageNet", root / "ILSVRC2012", root)
    return next((path for path in paths if (path / "val").is_dir() or (path / "train").is_dir()), None)


def load_c(
    corruption: str,
    level: int,
    root: Root = None,
    source: Origin = "auto",
    seed: int = 0,
    size: int = CORRUPTED_SIZE,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    packed: Packed = None,
    frost: PathLike | None = None,
    on_bad: OnBad | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> TestSet:
    """Open one corruption of ImageNet-C at one level.

    Args:
        corruption: Its name, for example `fog`.
        level: 1 to 5.
        root: The data root, or the folder of the corruptions.
        source: `official` reads the published pictures, `generated` corrupts the validation images with
            `testtime.corruptions`, `auto` uses the pictures if they exist.
        seed: Seed of the generated images.
        size: Height and width of the images; if not 224, they are resized after the corruption.
        resize: The short side before the centre crop; None: `size` for the published pictures, which are already
            cropped, and 256 for generated ones, which are cropped to 224.
        classes: As in `load`.
        threads: As in `load`.
        packed: As in `load`.
        frost: Folder of frost photographs for generated `frost`; None: procedural textures.
        on_bad: As in `load`.
        device: Device to generate images on.
        progress: As in `load`.

    Raises:
        DataError: Both sources are missing, the level is missing, or a picture cannot be read.
    """
    check_choice(corruption, level, source)
    name = f"imagenet-c/{corruption}/{level}"
    folder = None if source == "generated" else find_c(root, corruption)
    if folder is not None:
        files, labels, found, notes = list_classes(folder / str(level), classes, on_bad)
        resize = size if resize is None else resize
        path = folder / str(level)
        pictures: TestSet = PictureSet(name, path, files, labels, found, size, resize, threads, notes=notes)
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


def find_c(root: Root = None, corruption: str | None = None) -> Path | None:
    """Return the folder of ImageNet-C, or of one of its corruptions, or None."""
    root = data_root(root)
    paths = (root / "imagenet-c", root / "ImageNet-C", root)
    if corruption is None:
        return first_existing(paths[:2])
    return first_existing(path / group / corruption for path in paths for group in _GROUPS)


def _packed(
    pictures: TestSet,
    packed: Packed,
    root: Root,
    name: str,
    on_bad: OnBad | None,
    progress: Progress | None,
) -> TestSet:
    """Return the set or its packed form, after checking every picture if `on_bad` is given."""
    if on_bad is not None:
        check_on_bad(on_bad)
    usual = data_root(root) / "packed" / name
    if packed is None:
        found = find_packed(pictures, usual)
        if found is not None and (on_bad != "fail" or not found.skipped):
            return found
    elif packed is not False:
        folder = usual if packed is True else packed
        return pack(pictures, folder, progress=progress, on_bad=on_bad or "fail")
    return pictures.check(on_bad, progress) if on_bad is not None and isinstance(pictures, PictureSet) else pictures


def check(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check ImageNet by decoding every picture; a missing split is not a fault."""
    path = find(root)
    splits: list[Any] = [split for split in ("val", "train") if path is not None and (path / split).is_dir()]
    return check_pictures([functools.partial(list_pictures, root, split) for split in splits or ["val"]], progress)


def check_c(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Check parts of ImageNet-C by decoding every picture."""
    return check_pictures(
        [functools.partial(_open_c, part, root, source="official", packed=False) for part in parts], progress
    )


def _open_c(part: str, root: Root, split: str = "test", **options: Any) -> TestSet:
    return load_c(*split_part("imagenet-c", part), root, **options)


def find_missing(pictures: TestSet, name: str, count: int, classes: int) -> str | None:
    """Return a fault if a set has other numbers of pictures and classes than the full one, or None."""
    assert pictures.labels is not None
    found = len(pictures.labels.unique())
    if (len(pictures), found) == (count, classes):
        return None
    return f"{name} has {len(pictures):,} pictures of {found:,} classes; the full set has {count:,} of {classes:,}"


def _find_fault(root: Root, path: Path) -> str | None:
    return find_missing(load(root, "val"), "val", 50_000, 1000)


def _find_fault_c(root: Root, path: Path) -> str | None:
    for corruption in CORRUPTIONS:
        found = find_c(root, corruption)
        for level in SEVERITIES:
            if found is None or not (found / str(level)).is_dir():
                return f"{path / corruption / str(level)}: no such folder"
    return None


IMAGENET = Family(
    "imagenet",
    "ImageNet: 1,000 classes",
    lambda part, root, split, **options: load(root, split, **options),
    check,
    find=find,
    find_fault=_find_fault,
    folder="imagenet",
    elsewhere="ImageNet needs an account at https://image-net.org; put its train and val folders, with one folder per "
    "WordNet id, into {root}/imagenet",
    sized=True,
    pictures=True,
    has_train=True,
    packs=True,
)

IMAGENET_C = Family(
    "imagenet-c",
    "ImageNet's validation set under the 15 corruptions, 5 levels",
    _open_c,
    check_c,
    PARTS,
    find_c,
    _find_fault_c,
    folder="imagenet-c",
    elsewhere="ImageNet-C is at https://zenodo.org/records/2235448 (about 70 GB); extract its archives into "
    "{root}/imagenet-c. Without it, it is generated from ImageNet",
    base=IMAGENET,
    sized=True,
    pictures=True,
    packs=True,
)

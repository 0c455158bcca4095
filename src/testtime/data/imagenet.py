"""ImageNet and ImageNet-C from their official folders: the paper's section on ImageNet.

ImageNet has `train/WNID/*.JPEG` and `val/WNID/*.JPEG`; labels number the WordNet ids in sorted order, which is the
order of every usual 1,000-way network. A part of the classes works the same way: their labels count from 0, or follow
`classes` where the network has more. Test images are the short side resized to 256 and the centre 224 cropped.
ImageNet-C has `NAME/LEVEL/WNID/*.JPEG` at 224×224; where it is absent, it is made from the validation images: whatever
their own size, their short side becomes 256, the centre 224 is cropped and corrupted, and for a network of another size
the corrupted image is scaled, as a published one would be.
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
_GROUPS = ("", "noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C, extracted each by itself


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
    """ImageNet, or a part of its classes.

    Args:
        root: The data root, or the folder that holds `train` and `val`.
        split: `train` or `val`; `test` is another name for `val`, whose labels are public.
        size: Height and width of the images.
        resize: The short side before the centre crop; None is 8/7 of the size, 256 for 224.
        classes: WordNet ids in the order of the network's outputs; None takes the folders there are.
        threads: Pictures decoded at once; None takes one for each core.
        packed: Cache the decoded images in one memory-mapped file: in this folder, or, for True, in `packed` under the
            data root. The first opening writes it and takes as long as decoding everything. None reads from there if
            all of it is there, False never does.
        on_bad: "fail" finds a picture that cannot be read before the set is used, "skip" leaves such pictures and
            classes without pictures out; None finds out when a picture is read.
        progress: Called with how many of how many images are packed or checked.

    Raises:
        DataError: It is not there, a class is empty, or a picture cannot be read.
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


def find(root: Root = None) -> Path | None:
    """The folder with `train` and `val` from which ImageNet would be read, or None."""
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
        frost: Folder of frost photographs for generated `frost`; None takes procedural textures.
        on_bad: As in `load`.
        device: Where images are generated.
        progress: As in `load`.

    Raises:
        DataError: Neither is there, the level is missing, or a picture cannot be read.
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
    """The folder of ImageNet-C, or that of one of its corruptions, or None."""
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
    """The set itself or its packed form, with every picture checked where that is asked for."""
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
    """Faults of ImageNet, every picture decoded; a split that is not there at all is a choice, not a fault."""
    path = find(root)
    splits: list[Any] = [split for split in ("val", "train") if path is not None and (path / split).is_dir()]
    return check_pictures([functools.partial(list_pictures, root, split) for split in splits or ["val"]], progress)


def check_c(parts: Sequence[str], root: Root, progress: Progress | None) -> list[str]:
    """Faults of the parts of ImageNet-C, every picture decoded."""
    return check_pictures(
        [functools.partial(_open_c, part, root, source="official", packed=False) for part in parts], progress
    )


def _open_c(part: str, root: Root, split: str = "test", **options: Any) -> TestSet:
    return load_c(*split_part("imagenet-c", part), root, **options)


def _find_fault(root: Root, path: Path) -> str | None:
    found = load(root, "val")
    if (len(found.classes), len(found)) == (1000, 50_000):
        return None
    return f"val has {len(found):,} pictures of {len(found.classes):,} classes; all are 50,000 of 1,000"


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
    elsewhere="ImageNet needs an account at https://image-net.org; put its train and val folders, with a folder for "
    "each WordNet id, into {root}/imagenet",
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

"""VID-Robust: video frames of 30 classes, for ImageNet and CIFAR-10 networks (paper, the section on video frames).

The set (Shankar et al. 2019) has 1,109 anchor frames, each with one or more right classes. A network's 1,000 ImageNet
outputs are mapped to the 30 classes by max-conversion: softmax, then for each class the largest probability among the
ImageNet classes that map to it. The official folder contains

    metadata/pmsets.json                 anchor frame → similar frames
    metadata/labels.json                 frame → list of right classes
    misc/wnid_map.json                   ImageNet id → VID id
    misc/imagenet_class_index.json       output → [id, name]
    misc/imagenet_vid_class_index.json   class → [id, name]
    val/...                              the frames, identified in the files above by their relative paths

`load_cifar7` opens the paper's other variant: frames of seven classes of CIFAR-10, resized to 32×32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from testtime.data import cifar
from testtime.data.family import Family, Root
from testtime.data.folder import PictureSet, check_pictures
from testtime.data.paths import data_root, read_json, within
from testtime.data.pictures import Resize
from testtime.data.sets import DataError, OnBad
from testtime.progress import Progress

FOLDER = "imagenet-vid-robust"
ANCHORS = 1_109
BACKGROUND = "n00001740"

# In the order of the paper's table: VID's id, and the CIFAR-10 class.
CIFAR7 = {
    "airplane": ("n02691156", "airplane"),
    "bird": ("n01503061", "bird"),
    "car": ("n02958343", "automobile"),
    "dog": ("n02084071", "dog"),
    "cat": ("n02121808", "cat"),
    "horse": ("n02374451", "horse"),
    "ship": ("n04530566", "ship"),
}


def max_convert(logits: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Map a network's outputs to coarser classes: softmax, then the maximum within each group.

    Args:
        logits: `(n, outputs)`.
        groups: The outputs that map to each of the K classes, at least one.

    Returns:
        Probabilities `(n, K)`; they need not sum to 1.
    """
    chances = logits.softmax(dim=1)
    return torch.stack([chances[:, list(group)].amax(dim=1) for group in groups], dim=1)


class VidSet(PictureSet):
    """The anchor frames, with all their right classes; opened by `load`.

    Attributes:
        groups: The ImageNet outputs that map to each class.
    """

    groups: tuple[tuple[int, ...], ...]

    def scores(self, logits: Tensor) -> Tensor:
        """Map ImageNet logits `(n, 1000)` to logarithms of the scores of the 30 classes `(n, 30)`, by `max_convert`."""
        highest = max(max(group) for group in self.groups)
        if logits.dim() != 2 or logits.shape[1] <= highest:
            raise ValueError(
                f"`logits` must be (n, outputs) with more than {highest} outputs, got {tuple(logits.shape)}."
            )
        return max_convert(logits, self.groups).log()  # a softmax follows


class Cifar7Set(PictureSet):
    """The frames of the seven shared classes; opened by `load_cifar7`."""

    def scores(self, logits: Tensor) -> Tensor:
        """Select the logits of the seven classes `(n, 7)` from CIFAR-10 logits `(n, 10)`."""
        if logits.dim() != 2 or logits.shape[1] != len(cifar.CLASSES):
            raise ValueError(f"`logits` must be (n, 10), got {tuple(logits.shape)}.")
        return logits[:, [cifar.CLASSES.index(name) for _, name in CIFAR7.values()]]


def load(
    root: Root = None,
    size: int = 224,
    resize: Resize | None = None,
    threads: int | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> VidSet:
    """Open VID-Robust's anchor frames with their 30 classes, for a network trained on ImageNet.

    Args:
        root: The data root, or the official folder.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        threads: Number of decoding threads; None: one per core.
        on_bad: See `folder.load`.
        progress: See `folder.load`.

    Raises:
        DataError: It is missing, or its files are damaged or inconsistent.
    """
    layout = _read_layout(root)
    files = list(layout.right)
    right = torch.zeros(len(files), len(layout.classes), dtype=torch.bool, device="cpu")
    for row, frame in enumerate(files):
        right[row, layout.right[frame]] = True
    labels = torch.tensor([layout.right[frame][0] for frame in files], dtype=torch.int64, device="cpu")
    frames = VidSet("vid-robust", layout.folder, files, labels, layout.classes, size, resize, threads)
    frames.right = right
    frames.groups = layout.groups
    frames.origin = f"official files ({layout.folder.name})"
    return frames if on_bad is None else frames.check(on_bad, progress)


def load_cifar7(
    root: Root = None,
    size: int = 32,
    resize: Resize | None = "stretch",
    threads: int | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Cifar7Set:
    """Open VID-Robust's anchor frames of seven classes of CIFAR-10, for a network trained on CIFAR-10.

    A frame is included if one of its right classes is among the seven; only those count as right.

    Args:
        root: The data root, or the official folder.
        size: Height and width of the images.
        resize: See `pictures.fit_picture`.
        threads: Number of decoding threads; None: one per core.
        on_bad: See `folder.load`.
        progress: See `folder.load`.

    Raises:
        DataError: It is missing, or its files are damaged or inconsistent.
    """
    layout = _read_layout(root)
    missing = [vid for vid, _ in CIFAR7.values() if vid not in layout.ids]
    if missing:
        raise DataError(layout.folder / "misc/imagenet_vid_class_index.json", f"lacks the class {missing[0]}")
    column = {layout.ids.index(vid): seventh for seventh, (vid, _) in enumerate(CIFAR7.values())}
    chosen = {frame: [column[k] for k in found if k in column] for frame, found in layout.right.items()}
    chosen = {frame: found for frame, found in chosen.items() if found}
    if not chosen:
        raise DataError(layout.folder / "metadata/labels.json", "has no frame of the seven CIFAR-10 classes")
    right = torch.zeros(len(chosen), len(CIFAR7), dtype=torch.bool, device="cpu")
    for row, found in enumerate(chosen.values()):
        right[row, found] = True
    labels = torch.tensor([found[0] for found in chosen.values()], dtype=torch.int64, device="cpu")
    frames = Cifar7Set("vid-cifar7", layout.folder, list(chosen), labels, tuple(CIFAR7), size, resize, threads)
    frames.right = right
    frames.origin = f"official files ({layout.folder.name})"
    return frames if on_bad is None else frames.check(on_bad, progress)


def find(root: Root = None) -> Path | None:
    """Return the official folder to read VID-Robust from, or None."""
    root = data_root(root)
    paths = (root / FOLDER, root / "vid-robust", root)
    return next((path for path in paths if (path / "metadata").is_dir() and (path / "misc").is_dir()), None)


@dataclass(frozen=True)
class _Layout:
    """The content of the official files: ids, names and outputs of the classes, and the classes of each anchor."""

    folder: Path
    ids: tuple[str, ...]
    classes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    right: dict[str, list[int]]


def _read_layout(root: Root) -> _Layout:
    folder = find(root)
    if folder is None:
        raise DataError(data_root(root), f"holds no {FOLDER} folder with metadata and misc")
    outputs_path = folder / "misc/imagenet_class_index.json"
    outputs = {identity: number for number, (identity, _) in _read_index(outputs_path, folder).items()}
    classes_path = folder / "misc/imagenet_vid_class_index.json"
    named = _read_index(classes_path, folder)
    # The background class may have any number; it is removed.
    numbers = [number for number in sorted(named) if named[number][0] != BACKGROUND]
    ids = tuple(named[number][0] for number in numbers)
    position = {number: row for row, number in enumerate(numbers)}
    right = _read_right(folder, position)

    map_path = folder / "misc/wnid_map.json"
    groups: dict[str, list[int]] = {identity: [] for identity in ids}
    for fine, coarse in _object(map_path, folder).items():
        if coarse == BACKGROUND:
            continue
        if not isinstance(coarse, str) or coarse not in groups:
            raise DataError(map_path, f"maps {fine} to {coarse!r}, which {classes_path.name} does not list")
        if fine not in outputs:
            raise DataError(map_path, f"maps {fine}, which {outputs_path.name} does not list")
        groups[coarse].append(outputs[fine])
    empty = [identity for identity, group in groups.items() if not group]
    if empty:
        raise DataError(map_path, f"maps no ImageNet class to {empty[0]}")
    return _Layout(
        folder,
        ids,
        tuple(named[number][1] for number in numbers),
        tuple(tuple(sorted(groups[identity])) for identity in ids),
        right,
    )


def _read_right(folder: Path, position: Mapping[int, int]) -> dict[str, list[int]]:
    """Return the right classes of each anchor frame, after checking that its file exists."""
    anchors_path, labels_path = folder / "metadata/pmsets.json", folder / "metadata/labels.json"
    labels = _object(labels_path, folder)
    right: dict[str, list[int]] = {}
    for anchor, frames in _object(anchors_path, folder).items():
        if not isinstance(frames, list):
            raise DataError(anchors_path, f"the frames of {anchor} are not a list")
        pure = PurePosixPath(anchor)
        if pure.is_absolute() or ".." in pure.parts:
            raise DataError(anchors_path, f"the frame {anchor} leads out of {folder}")
        found = labels.get(anchor)
        if not isinstance(found, list) or not found or not all(type(label) is int for label in found):
            raise DataError(labels_path, f"has no list of classes for {anchor}")
        wrong = [label for label in found if label not in position]
        if wrong:
            raise DataError(labels_path, f"gives {anchor} the class {wrong[0]}, which does not exist")
        if not os.path.isfile(within(folder / anchor, folder)):
            raise DataError(folder / anchor, "no such file")
        right[anchor] = [position[label] for label in found]
    if not right:
        raise DataError(anchors_path, "names no frames")
    return right


def _read_index(path: Path, tree: Path) -> dict[int, tuple[str, str]]:
    """Read a class index: number → (id, name)."""
    index: dict[int, tuple[str, str]] = {}
    for number, entry in _object(path, tree).items():
        is_number = number.isascii() and number.isdecimal() and len(number) <= 6
        if not is_number or not isinstance(entry, list) or [type(part) for part in entry] != [str, str]:
            raise DataError(path, f"the entry {number!r} is not a number with [id, name]")
        index[int(number)] = (entry[0], entry[1])
    if len({identity for identity, _ in index.values()}) != len(index):
        raise DataError(path, "lists an id twice")
    return index


def _object(path: Path, tree: Path) -> dict[str, Any]:
    found = read_json(path, tree)
    if not isinstance(found, dict) or not found:
        raise DataError(path, "not a JSON object with entries")
    return found


def _find_fault(root: Root, path: Path) -> str | None:
    frames = load(root)
    return None if len(frames) == ANCHORS else f"has {len(frames):,} anchor frames, the full set {ANCHORS:,}"


VID_ROBUST = Family(
    "vid-robust",
    "VID-Robust: 1,109 video frames, 30 classes, for ImageNet networks",
    lambda part, root, split, **options: load(root, **options),
    lambda parts, root, progress: check_pictures([lambda: load(root)], progress),
    find=find,
    find_fault=_find_fault,
    folder=FOLDER,
    elsewhere="VID-Robust is at https://modestyachts.github.io/natural-perturbations-website; extract it to "
    f"{{root}}/{FOLDER}",
    sized=True,
    pictures=True,
)

VID_CIFAR7 = replace(
    VID_ROBUST,
    name="vid-cifar7",
    what="VID-Robust's frames of 7 classes at 32×32, for CIFAR-10 networks",
    open=lambda part, root, split, **options: load_cifar7(root, **options),
    check=lambda parts, root, progress: check_pictures([lambda: load_cifar7(root)], progress),
    sized=False,
)

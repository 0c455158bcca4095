"""Other test sets for ImageNet networks: ImageNet-V2, ImageNet-R and ImageNet-A, from their official folders.

ImageNet-V2 (Recht et al. 2019) has 10,000 new test images of the 1,000 classes, in `0` to `999`: the positions of the
WordNet ids in sorted order, which is the order of all common 1,000-class networks. It has three variants, by how the
images were selected.

ImageNet-R (renditions, Hendrycks et al. 2021) and ImageNet-A (natural adversarial examples, Hendrycks et al. 2021) have
200 of the classes, in `WNID/*.jpg`. A network with more classes is restricted to these: the prediction is the largest
of its 200 logits. That needs `classes`, the WordNet ids of the network's outputs.

All images are resized and cropped as ImageNet's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime.data.family import Family, Root
from testtime.data.folder import PictureSet, check_pictures, list_classes
from testtime.data.imagenet import find_missing
from testtime.data.paths import data_root, first_existing
from testtime.data.pictures import Resize
from testtime.data.sets import DataError, OnBad
from testtime.progress import Progress

FOLDERS_V2 = {
    "matched-frequency": "imagenetv2-matched-frequency-format-val",
    "threshold-0.7": "imagenetv2-threshold0.7-format-val",
    "top-images": "imagenetv2-top-images-format-val",
}


class SubsetSet(PictureSet):
    """Pictures of a subset of a network's classes; opened by `load_subset`.

    Attributes:
        outputs: The network's output for each class, int64 `(K,)`.
        total: The number of the network's outputs.
    """

    outputs: Tensor
    total: int

    def scores(self, logits: Tensor) -> Tensor:
        """Select the logits of this set's classes `(n, K)` from those of all classes `(n, outputs)`."""
        if logits.dim() != 2 or logits.shape[1] != self.total:
            raise ValueError(
                f"`logits` must be (n, {self.total}), got {tuple(logits.shape)}; for a network with other classes than "
                f"the {len(self.classes)} of {self.name}, open it with `classes`, the WordNet ids of the outputs."
            )
        return logits[:, self.outputs.to(logits.device)]


def load_v2(
    variant: str = "matched-frequency",
    root: Root = None,
    size: int = 224,
    resize: Resize | None = None,
    threads: int | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> PictureSet:
    """Open a variant of ImageNet-V2.

    Args:
        variant: `matched-frequency` (the usual one), `threshold-0.7` or `top-images`.
        root: The data root, or the folder of the variant.
        size: Height and width of the images.
        resize: The short side before the centre crop; None: 8/7 of the size, 256 for 224.
        threads: Number of decoding threads; None: one per core.
        on_bad: See `folder.load`.
        progress: See `folder.load`.

    Raises:
        DataError: It is missing, a folder is not a class number or is empty, or a picture cannot be read.
    """
    if variant not in FOLDERS_V2:
        raise ValueError(f"`variant` must be one of {', '.join(FOLDERS_V2)}; got {variant!r}.")
    folder = find_v2(root, variant)
    if folder is None:
        raise DataError(data_root(root), f"holds no {FOLDERS_V2[variant]}")
    files, labels, classes, notes = list_classes(folder, [str(number) for number in range(1000)], on_bad)
    name = "imagenet-v2" if variant == "matched-frequency" else f"imagenet-v2/{variant}"
    pictures = PictureSet(name, folder, files, labels, classes, size, resize, threads, notes=notes)
    pictures.origin = f"official files ({folder.name}, {size} from {pictures.resize})"
    return pictures if on_bad is None else pictures.check(on_bad, progress)


def find_v2(root: Root = None, variant: str = "matched-frequency") -> Path | None:
    """Return the folder of a variant of ImageNet-V2, or None."""
    root, name = data_root(root), FOLDERS_V2[variant]
    return first_existing([root / name, root / "imagenet-v2" / name, *([root] if root.name == name else [])])


def load_subset(
    name: str,
    root: Root = None,
    size: int = 224,
    resize: Resize | None = None,
    classes: Sequence[str] | None = None,
    threads: int | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> SubsetSet:
    """Open ImageNet-R or ImageNet-A.

    Args:
        name: `imagenet-r` or `imagenet-a`.
        root: The data root, or the folder of the set.
        size: Height and width of the images.
        resize: As in `load_v2`.
        classes: WordNet ids in the order of the network's outputs, which must include those of the set; None: those of
            the set, sorted.
        threads: As in `load_v2`.
        on_bad: See `folder.load`.
        progress: See `folder.load`.

    Returns:
        A set whose classes are its sorted folders, and whose `scores` selects their logits.

    Raises:
        DataError: It is missing, a folder is not one of the classes or is empty, or a picture cannot be read.
    """
    folder = find_subset(name, root)
    if folder is None:
        raise DataError(data_root(root), f"holds no {name}")
    files, labels, found, notes = list_classes(folder, None, on_bad)
    positions = {wnid: output for output, wnid in enumerate(found if classes is None else classes)}
    unknown = [wnid for wnid in found if wnid not in positions]
    if unknown:
        raise DataError(folder / unknown[0], f"not one of the network's {len(positions):,} classes")
    pictures = SubsetSet(name, folder, files, labels, found, size, resize, threads, notes=notes)
    pictures.outputs = torch.tensor([positions[wnid] for wnid in found], dtype=torch.int64, device="cpu")
    pictures.total = len(found if classes is None else classes)
    pictures.origin = f"official files ({folder.name}, {size} from {pictures.resize})"
    return pictures if on_bad is None else pictures.check(on_bad, progress)


def find_subset(name: str, root: Root = None) -> Path | None:
    """Return the folder of ImageNet-R or ImageNet-A, or None."""
    root = data_root(root)
    names = (name, f"ImageNet-{name[-1].upper()}")
    return first_existing([*(root / folder for folder in names), *([root] if root.name in names else [])])


def _open_v2(part: str, root: Root, split: str = "test", **options: Any) -> PictureSet:
    return load_v2(part or "matched-frequency", root, **options)


def _make_subset(name: str, what: str, count: int, repository: str) -> Family:
    load = functools.partial(load_subset, name)
    return Family(
        name,
        f"{what}: {count:,} images of 200 of ImageNet's classes",
        lambda part, root, split, **options: load(root, **options),
        lambda parts, root, progress: check_pictures([lambda: load(root)], progress),
        find=functools.partial(find_subset, name),
        find_fault=lambda root, path: find_missing(load(root), name, count, 200),
        folder=name,
        elsewhere=f"{what} is at https://github.com/hendrycks/{repository}; extract {name}.tar into {{root}}",
        sized=True,
        pictures=True,
        is_subset=True,
    )


IMAGENET_V2 = Family(
    "imagenet-v2",
    "ImageNet-V2: 10,000 new test images for ImageNet, 3 variants",
    _open_v2,
    lambda parts, root, progress: check_pictures([functools.partial(_open_v2, part, root) for part in parts], progress),
    ("", "threshold-0.7", "top-images"),
    find_v2,
    lambda root, path: find_missing(load_v2(root=root), path.name, 10_000, 1000),
    folder=FOLDERS_V2["matched-frequency"],
    elsewhere="ImageNet-V2 is at https://github.com/modestyachts/ImageNetV2; extract its archives into {root}",
    sized=True,
    pictures=True,
)
IMAGENET_R = _make_subset("imagenet-r", "ImageNet-R", 30_000, "imagenet-r")
IMAGENET_A = _make_subset("imagenet-a", "ImageNet-A", 7_500, "natural-adv-examples")

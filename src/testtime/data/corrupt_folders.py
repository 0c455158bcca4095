"""Corrupt folders of pictures, also in the layout of ImageNet-C.

Outputs are written atomically, and existing ones are skipped, so an interrupted run can be resumed. A folder stores its
settings and a checksum of the pictures' paths, sizes and first bytes; other settings and pictures are rejected.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from testtime.corruptions.registry import CORRUPTIONS, SEVERITIES, Scale, corrupt, severity_level
from testtime.data.corrupt_files import (
    WRITABLE,
    corrupt_file,
    frost_setting,
    hold_target,
    name_in_memory_errors,
    picture_tensor,
    read_middle,
    read_picture,
    save_picture,
    tensor_picture,
)
from testtime.data.frost import read_frost
from testtime.data.pictures import read_size
from testtime.progress import Progress
from testtime.storage import FileError, PathLike, error_text
from testtime.threads import count_cpus

# Pictures read at once: enough for threads and batches, few enough for large photographs to fit in memory.
_WINDOW, _WINDOW_PIXELS = 16, 1 << 24
_JPEG = (".jpg", ".jpeg")
_HEAD = 4096  # bytes of a picture in the checksum: uncompressed pictures of the same shape also have the same size


def find_pictures(folder: PathLike) -> list[Path]:
    """List the pictures below a folder, relative to it, sorted by path; the position is the sample index.

    Raises:
        FileError: The folder does not exist, or holds no picture.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileError(root, "not a folder")

    def fail(error: OSError) -> None:
        raise FileError(error.filename or root, f"cannot be read ({error_text(error)})")

    found = [
        Path(parent, name).relative_to(root)
        for parent, _, names in os.walk(root, onerror=fail)
        for name in names
        if os.path.splitext(name)[1].lower() in WRITABLE
        and not name.startswith(".")
        and os.path.isfile(os.path.join(parent, name))
    ]
    if not found:
        raise FileError(root, f"holds no pictures ({', '.join(WRITABLE)})")
    return sorted(found, key=lambda path: path.parts)


def corrupt_folder(
    source: PathLike,
    target: PathLike,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Corrupt every picture below a folder into a tree of the same names.

    Args:
        source: Input folder.
        target: Output folder, neither inside the source nor containing it.
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        seed: Seed of the draws, which also depend on the picture's position in the order of paths.
        scale: Parameters of "cifar" or "imagenet", or "auto" by each picture's size.
        frost: Folder of frost photographs; None: procedural textures.
        device: Device to compute on.
        progress: Called with the number of pictures done, first with those of an earlier run, and their total.

    Returns:
        The target.

    Raises:
        FileError: A picture cannot be read, an output cannot be written, or the target was made with other settings
            or pictures.
        ValueError: An argument is invalid.
    """
    severity_level(name, severity, "cifar")
    source, target = _apart(source, target)
    pictures = find_pictures(source)
    settings = {"name": name, "severity": severity, "seed": seed, "scale": scale, "frost": frost_setting(frost)}
    settings["pictures"] = _hash_pictures(source, pictures)
    make = functools.partial(corrupt, seed=seed, scale=scale, frost=read_frost(frost))
    work = _Work(source, pictures, pictures, read_picture, 95, make, device)
    with hold_target(target, settings):
        _corrupt_pictures(work, [(name, severity, target)], progress)
    return target


def corrupt_path(
    source: PathLike, target: PathLike, name: str, severity: int, *, progress: Progress | None = None, **options: Any
) -> Path:
    """Corrupt a picture or a folder of pictures.

    Args:
        source: Input picture or folder.
        target: Output picture or folder.
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        progress: Called with the number of pictures done and their total.
        **options: `seed`, `scale`, `frost` and `device` of `corrupt_folder`.

    Returns:
        The target.

    Raises:
        FileError: As for `corrupt_file` and `corrupt_folder`.
        ValueError: An argument is invalid.
    """
    if Path(source).is_dir():
        return corrupt_folder(source, target, name, severity, progress=progress, **options)
    made = corrupt_file(source, target, name, severity, **options)
    if progress is not None:
        progress(1, 1, str(made))
    return made


def corrupt_imagenet(
    source: PathLike,
    target: PathLike,
    *,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Write ImageNet-C for a folder of pictures: `NAME/LEVEL/TREE/*.JPEG`, 224 × 224, JPEG quality 85.

    As published, the short side of a picture is resized to 256, its centre 224 × 224 cropped and corrupted.

    Args:
        source: Input folder, for example ImageNet's validation folder with one folder per class.
        target: Output folder, neither inside the source nor containing it.
        names: A subset of `CORRUPTIONS`.
        severities: A subset of 1 to 5.
        seed: Seed of the draws, which also depend on the picture's position in the order of paths.
        frost: Folder of frost photographs; None: procedural textures.
        device: Device to compute on.
        progress: Called with the number of pictures done, first with those of an earlier run, and their total.

    Returns:
        The target.

    Raises:
        FileError: A picture cannot be read, an output cannot be written, or the target was made with other settings
            or pictures.
        ValueError: An argument is invalid.
    """
    for name, severity in itertools.product(names, severities):
        severity_level(name, severity, "imagenet")
    source, target = _apart(source, target)
    pictures = find_pictures(source)
    outputs = [path if path.suffix.lower() in _JPEG else path.with_suffix(".JPEG") for path in pictures]
    if len(set(outputs)) < len(outputs):
        double = next(path for path in outputs if outputs.count(path) > 1)
        raise FileError(source, f"holds two pictures that would both become {double}")
    settings = {"layout": "imagenet-c", "seed": seed, "frost": frost_setting(frost)}
    settings["pictures"] = _hash_pictures(source, pictures)
    jobs = [(name, severity, target / name / str(severity)) for name, severity in itertools.product(names, severities)]
    make = functools.partial(corrupt, seed=seed, scale="imagenet", frost=read_frost(frost))
    work = _Work(source, pictures, outputs, read_middle, 85, make, device)
    with hold_target(target, settings):
        _corrupt_pictures(work, jobs, progress)
    return target


@dataclass(frozen=True)
class _Work:
    """The inputs, outputs and settings of `_corrupt_pictures`.

    Attributes:
        source: The folder of the pictures.
        pictures: Their paths, relative to it.
        outputs: The paths of the results, relative to the folder of a corruption.
        open: Opens a picture, ready to be corrupted.
        quality: JPEG quality of the results.
        make: `corrupt` with its settings.
        device: Device to compute on.
    """

    source: Path
    pictures: list[Path]
    outputs: list[Path]
    open: Callable[[Path], Image.Image]
    quality: int
    make: Callable[..., Tensor]
    device: torch.device | str

    def read(self, number: int) -> Tensor:
        """Read a picture, uint8 `(C, H, W)`."""
        return picture_tensor(self.open(self.source / self.pictures[number]))

    def corrupt(self, numbers: list[int], images: list[Tensor], name: str, severity: int) -> Tensor:
        """Corrupt pictures of one shape, uint8 `(n, C, H, W)`."""
        with name_in_memory_errors(self.source / self.pictures[numbers[0]]):
            samples = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            return self.make(torch.stack(images).to(self.device), name, severity, samples=samples).cpu()

    def write(self, pixels: Tensor, path: Path) -> None:
        """Write a corrupted picture."""
        save_picture(tensor_picture(pixels), path, self.quality)

    def windows(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Yield pictures in groups that fit in memory."""
        window: list[int] = []
        total = 0
        for number in numbers:
            width, height = read_size(self.source / self.pictures[number])
            if window and (len(window) == _WINDOW or total + width * height > _WINDOW_PIXELS):
                yield window
                window, total = [], 0
            window.append(number)
            total += width * height
        if window:
            yield window


def _corrupt_pictures(work: _Work, jobs: list[tuple[str, int, Path]], progress: Progress | None) -> None:
    """Corrupt pictures for every (name, severity, folder) and write each below the folder, in windows.

    The pictures of a window are read once for all jobs; those of one size are corrupted as a batch.
    """
    missing = [bytearray(not (folder / output).is_file() for output in work.outputs) for _, _, folder in jobs]
    total = len(work.pictures) * len(jobs)
    done = total - sum(map(sum, missing))
    if progress is not None:
        progress(done, total, "")
    wanted = (number for number in range(len(work.pictures)) if any(mask[number] for mask in missing))
    with ThreadPoolExecutor(min(8, count_cpus())) as threads:
        for window in work.windows(wanted):
            with name_in_memory_errors(work.source / work.pictures[window[0]]):
                images = dict(zip(window, threads.map(work.read, window), strict=True))
            for (name, severity, folder), mask in zip(jobs, missing, strict=True):
                for group in _group_by_shape({number: images[number] for number in window if mask[number]}):
                    corrupted = work.corrupt(group, [images[number] for number in group], name, severity)
                    paths = [folder / work.outputs[number] for number in group]
                    list(threads.map(work.write, corrupted, paths))  # waits, and propagates errors
                    done += len(group)
                    if progress is not None:
                        progress(done, total, f"{name} {severity} {work.outputs[group[-1]].as_posix()}")


def _hash_pictures(source: Path, pictures: list[Path]) -> str:
    """Return a SHA-256 of the paths, sizes and first bytes of pictures."""
    digest = hashlib.sha256()
    for path in pictures:
        try:
            with open(source / path, "rb") as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
        except OSError as error:
            raise FileError(source / path, f"cannot be read ({error_text(error)})") from None
        digest.update(f"{path.as_posix()}\0{size}\0".encode(errors="backslashreplace") + head)
    return digest.hexdigest()


def _group_by_shape(images: dict[int, Tensor]) -> list[list[int]]:
    """Group the indices of images by shape."""
    groups: dict[torch.Size, list[int]] = {}
    for number, image in images.items():
        groups.setdefault(image.shape, []).append(number)
    return list(groups.values())


def _apart(source: PathLike, target: PathLike) -> tuple[Path, Path]:
    """Check that neither folder contains the other, and return both."""
    inner, outer = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise FileError(target, f"must neither contain the input {os.fspath(source)} nor be inside it")
    return Path(source), Path(target)

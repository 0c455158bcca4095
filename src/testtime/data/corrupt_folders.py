"""Corrupt folders of pictures, and whole data sets in the layouts of CIFAR-10-C and ImageNet-C.

Every function that takes long is a generator that yields its `Progress`; nothing is printed. Every output is written
whole or not at all, and one that is there already is not made again, so a run that was stopped goes on where it was. A
folder remembers the settings it was made with and does not mix them with others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from testtime.corruptions.files import (
    PICTURES,
    corrupt_file,
    cut_middle,
    name_in_memory_errors,
    picture_tensor,
    read_picture,
    save_picture,
    tensor_picture,
)
from testtime.corruptions.frost import read_photographs
from testtime.corruptions.registry import CORRUPTIONS, SEVERITIES, Scale, corrupt, corrupt_chunks, severity_level
from testtime.data.pictures import read_size
from testtime.storage import (
    FileError,
    PathLike,
    clear_parts,
    error_text,
    find_differences,
    hold_folder,
    read_json,
    whole_file,
    write_whole,
)

_SETTINGS = "corruption.json"
# Pictures read at once: enough for threads and tensors, few enough that large photographs fit into memory.
_WINDOW, _WINDOW_PIXELS = 16, 1 << 24
_JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        done: Outputs that are finished, those of earlier runs included.
        total: Outputs in all.
        what: What was finished last, for a progress bar.
    """

    done: int
    total: int
    what: str


def find_pictures(folder: PathLike) -> list[Path]:
    """The pictures below a folder, relative to it, in the order of their paths. Their places are their numbers.

    Raises:
        FileError: If there is no such folder, or no picture in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileError(root, "not a folder")

    def fail(error: OSError) -> None:
        raise FileError(error.filename or root, f"cannot be read ({error_text(error)})")

    found = [
        Path(place, name).relative_to(root)
        for place, _, names in os.walk(root, onerror=fail)
        for name in names
        if os.path.splitext(name)[1].lower() in PICTURES
        and not name.startswith(".")
        and os.path.isfile(os.path.join(place, name))
    ]
    if not found:
        raise FileError(root, f"holds no pictures ({', '.join(PICTURES)})")
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
) -> Iterator[Progress]:
    """Corrupt every picture below a folder and keep the tree: names and endings stay.

    Args:
        source: Folder to read.
        target: Folder to write, neither inside the source nor around it.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Seed of the draws; a picture's number is its place in the order of paths.
        scale: Whose parameters: "cifar", "imagenet", or "auto" by each picture's size.
        frost: Folder with frost photographs; textures made by code if not given.
        device: Where to work.

    Yields:
        Progress, first of what is there already.

    Raises:
        FileError: If a picture cannot be read, an output cannot be written, or the target was made with other settings.
        ValueError: If an argument is not one of the above.
    """
    severity_level(name, severity, "cifar")
    source, target = _apart(source, target)
    pictures = find_pictures(source)
    settings = {"name": name, "severity": severity, "seed": seed, "scale": scale, "frost": _frost_name(frost)}
    make = functools.partial(corrupt, seed=seed, scale=scale, frost=frost)
    work = _Work(source, pictures, pictures, lambda picture: picture, 95, make, device)
    with _held(target, settings):
        yield from _corrupt_pictures(work, [(name, severity, target)])


def corrupt_path(
    source: PathLike,
    target: PathLike,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Progress]:
    """Corrupt a picture or a folder of pictures, whichever the source is.

    Args:
        source: Picture or folder to read.
        target: Picture or folder to write.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Seed of the draws.
        scale: Whose parameters: "cifar", "imagenet", or "auto" by each picture's size.
        frost: Folder with frost photographs; textures made by code if not given.
        device: Where to work.

    Yields:
        Progress in pictures.

    Raises:
        FileError: As `corrupt_file` and `corrupt_folder`.
        ValueError: If an argument is not one of the above.
    """
    if Path(source).is_dir():
        yield from corrupt_folder(source, target, name, severity, seed=seed, scale=scale, frost=frost, device=device)
    else:
        made = corrupt_file(source, target, name, severity, seed=seed, scale=scale, frost=frost, device=device)
        yield Progress(1, 1, str(made))


def corrupt_imagenet(
    source: PathLike,
    target: PathLike,
    *,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Progress]:
    """Make ImageNet-C of a folder of pictures: NAME/LEVEL/TREE/*.JPEG, 224 × 224, JPEG quality 85.

    Pictures are scaled to a short side of 256 and cut to their middle 224 × 224, then corrupted, as published.

    Args:
        source: Folder to read, such as ImageNet's validation folder with one folder for each class.
        target: Folder to write, neither inside the source nor around it.
        names: Which of `CORRUPTIONS`.
        severities: Which of 1 to 5.
        seed: Seed of the draws; a picture's number is its place in the order of paths.
        frost: Folder with frost photographs; textures made by code if not given.
        device: Where to work.

    Yields:
        Progress, first of what is there already.

    Raises:
        FileError: If a picture cannot be read, an output cannot be written, or the target was made with other settings.
        ValueError: If an argument is not one of the above.
    """
    for name, severity in itertools.product(names, severities):
        severity_level(name, severity, "imagenet")
    source, target = _apart(source, target)
    pictures = find_pictures(source)
    outputs = [path if path.suffix.lower() in _JPEG else path.with_suffix(".JPEG") for path in pictures]
    if len(set(outputs)) < len(outputs):
        double = next(path for path in outputs if outputs.count(path) > 1)
        raise FileError(source, f"holds two pictures that would both become {double}")
    settings = {"layout": "imagenet-c", "seed": seed, "frost": _frost_name(frost)}
    jobs = [(name, severity, target / name / str(severity)) for name, severity in itertools.product(names, severities)]
    make = functools.partial(corrupt, seed=seed, scale="imagenet", frost=frost)
    work = _Work(source, pictures, outputs, cut_middle, 85, make, device)
    with _held(target, settings):
        yield from _corrupt_pictures(work, jobs)


def corrupt_cifar(
    images: Tensor,
    labels: Tensor,
    target: PathLike,
    *,
    names: Sequence[str] = CORRUPTIONS,
    seed: int = 0,
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
    chunk: int | None = None,
) -> Iterator[Progress]:
    """Make CIFAR-10-C of a test set: NAME.npy with the five levels one after the other, and labels.npy.

    Args:
        images: uint8 `(N, 3, H, W)`; CIFAR's parameters are used whatever their size.
        labels: Integers `(N,)`.
        target: Folder to write.
        names: Which of `CORRUPTIONS`.
        seed: Seed of the draws; an image's number is its place.
        frost: Folder with frost photographs; textures made by code if not given.
        device: Where to work.
        chunk: Images worked on at once; by their size if not given.

    Yields:
        Progress in images; NAME.npy is `(5·N, H, W, 3)` uint8, labels.npy `(5·N,)`.

    Raises:
        FileError: If an output cannot be written, or the target was made with other settings or images.
        ValueError: If an argument is not one of the above.
    """
    for name in names:
        severity_level(name, 1, "cifar")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"`images` must be uint8 (N, 3, H, W), got {images.dtype} {tuple(images.shape)}.")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"`labels` must have one entry for each of {len(images)} images, got {tuple(labels.shape)}.")
    target = Path(target)
    count, _, height, width = images.shape
    settings = {"layout": "cifar-10-c", "seed": seed, "frost": _frost_name(frost)}
    settings |= {"shape": list(images.shape), "checksum": _checksum(images)}
    make = functools.partial(corrupt_chunks, seed=seed, scale="cifar", frost=frost, chunk=chunk, device=device)
    total = len(names) * len(SEVERITIES) * count
    with _held(target, settings):
        if not (target / "labels.npy").is_file():
            kind = np.uint8 if not count or int(labels.max()) < 256 else np.int64
            with whole_file(target / "labels.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, np.tile(labels.cpu().numpy().astype(kind), len(SEVERITIES)), allow_pickle=False)
        finished = [name for name in names if (target / f"{name}.npy").is_file()]
        done = len(finished) * len(SEVERITIES) * count
        yield Progress(done, total, "")
        for name in names:
            if name in finished:
                continue
            with whole_file(target / f"{name}.npy") as temporary, open(temporary, "wb") as file:
                # Block after block, and not through a map of the file: there a full disk would end the process.
                head = {"descr": "|u1", "fortran_order": False, "shape": (len(SEVERITIES) * count, height, width, 3)}
                np.lib.format.write_array_header_1_0(file, head)
                for severity in SEVERITIES:
                    for _, block in make(images, name, severity):
                        file.write(block.permute(0, 2, 3, 1).contiguous().cpu().numpy().data)
                        done += len(block)
                        yield Progress(done, total, f"{name} {severity}")


def _checksum(images: Tensor) -> int:
    checksum = 0
    for block in images.split(1024):
        checksum = zlib.crc32(block.cpu().numpy().tobytes(), checksum)
    return checksum


@dataclass(frozen=True)
class _Work:
    """What `_corrupt_pictures` does whatever the corruption.

    Attributes:
        source: The folder of the pictures.
        pictures: Their paths in it; their places are their numbers.
        outputs: What they become, relative to a folder for each corruption.
        prepare: What happens to a picture before it is corrupted.
        quality: Quality of JPEGs that are written.
        make: `corrupt` with its settings.
        device: Where to work.
    """

    source: Path
    pictures: list[Path]
    outputs: list[Path]
    prepare: Callable[[Image.Image], Image.Image]
    quality: int
    make: Callable[..., Tensor]
    device: torch.device | str

    def read(self, number: int) -> Tensor:
        """A picture as it is corrupted, uint8 `(C, H, W)`."""
        return picture_tensor(self.prepare(read_picture(self.source / self.pictures[number])))

    def write(self, pixels: Tensor, path: Path) -> None:
        """Write a corrupted picture."""
        save_picture(tensor_picture(pixels), path, self.quality)

    def windows(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Pictures in groups that fit into memory."""
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


def _corrupt_pictures(work: _Work, jobs: list[tuple[str, int, Path]]) -> Iterator[Progress]:
    """Corrupt pictures for every (name, severity, folder) and write each below the job's folder, in windows.

    A window's pictures are read once for all jobs; those of one size are corrupted together.
    """
    missing = [bytearray(not (folder / output).is_file() for output in work.outputs) for _, _, folder in jobs]
    total = len(work.pictures) * len(jobs)
    done = total - sum(map(sum, missing))
    yield Progress(done, total, "")
    wanted = (number for number in range(len(work.pictures)) if any(mask[number] for mask in missing))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for window in work.windows(wanted):
            with name_in_memory_errors(work.source / work.pictures[window[0]]):
                images = dict(zip(window, threads.map(work.read, window), strict=True))
            for (name, severity, folder), mask in zip(jobs, missing, strict=True):
                for group in _group_by_shape({at: images[at] for at in window if mask[at]}):
                    with name_in_memory_errors(work.source / work.pictures[group[0]]):
                        batch = torch.stack([images[at] for at in group]).to(work.device)
                        samples = torch.tensor(group, dtype=torch.int64, device="cpu")
                        corrupted = work.make(batch, name, severity, samples=samples).cpu()
                    paths = [folder / work.outputs[at] for at in group]
                    # list() waits for the writes and raises what they raised
                    list(
                        threads.map(
                            lambda p, path: save_picture(tensor_picture(p), path, work.quality), corrupted, paths
                        )
                    )
                    done += len(group)
                    yield Progress(done, total, f"{name} {severity} {work.outputs[group[-1]].as_posix()}")


def _group_by_shape(images: dict[int, Tensor]) -> list[list[int]]:
    """The numbers of images of one shape together."""
    groups: dict[torch.Size, list[int]] = {}
    for number, image in images.items():
        groups.setdefault(image.shape, []).append(number)
    return list(groups.values())


def _apart(source: PathLike, target: PathLike) -> tuple[Path, Path]:
    """Two folders, after making sure that writing one cannot touch the other."""
    inner, outer = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise FileError(target, f"must neither hold the input {os.fspath(source)} nor lie in it")
    return Path(source), Path(target)


def _frost_name(frost: PathLike | None) -> str | None:
    """What a folder's settings say of the frost; photographs that are not all there are found out now."""
    if frost is None:
        return None
    read_photographs(frost)
    return str(Path(frost).resolve())


@contextlib.contextmanager
def _held(target: Path, settings: dict[str, object]) -> Iterator[None]:
    """Hold a folder that was made with the same settings or is new, less what a killed process was writing."""
    try:
        with hold_folder(target):
            _agree(target, settings)
            clear_parts(target)
            yield
    except OSError as error:
        raise FileError(error.filename or target, f"cannot be written ({error_text(error)})") from None


def _agree(target: Path, settings: dict[str, object]) -> None:
    """Note the settings in a new folder; refuse one that was made with others."""
    note = target / _SETTINGS
    if note.is_file():
        found = read_json(note, limit=1 << 20)
        if not isinstance(found, dict):
            raise FileError(note, "not the settings of a run", "choose another folder")
        differences = find_differences(found, settings)
        if differences:
            raise FileError(target, f"made with other settings ({'; '.join(differences)})", "choose another folder")
        return
    if any(not entry.name.endswith(".part") for entry in target.iterdir()):
        raise FileError(target, f"not empty, and without the {_SETTINGS} of an earlier run", "choose another folder")
    write_whole(note, json.dumps(settings, indent=2) + "\n")

"""Corrupt pictures on disk: a file, a folder, or a whole data set in the layout of CIFAR-10-C or ImageNet-C.

Every function that takes long is a generator that yields its `Progress`; nothing is printed. Every output is written
whole or not at all, and one that is there already is not made again, so a run that was stopped goes on where it was. A
folder remembers the settings it was made with and does not mix them with others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from testtime.corruptions.frost import read_photographs
from testtime.corruptions.registry import CORRUPTIONS, SEVERITIES, Scale, corrupt, corrupt_chunks, severity_level
from testtime.storage import FolderError, hold_folder, whole_file, write_whole

PICTURES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of the files that count as pictures."""

_SETTINGS = "corruption.json"
# Pictures read at once; enough for threads and tensors, little enough that large photographs fit into memory.
_WINDOW = 16
_JPEG = (".jpg", ".jpeg")

PathLike = str | os.PathLike[str]


class FileError(ValueError):
    """A file or folder that cannot be read, or must not be written; the message names it."""


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


def read_picture(path: PathLike) -> Image.Image:
    """Open a picture in colour, or in gray if it is gray, upright; transparent parts become white.

    Raises:
        FileError: If it is no picture, damaged, or too large.
    """
    from testtime.data import pictures  # its sets are corrupted by this package, so it imports this module

    if not os.path.exists(path):
        raise FileError(f"{os.fspath(path)} does not exist.")
    try:
        return pictures.open_picture(path)
    except pictures.DataError as error:
        raise FileError(f"{error.path} cannot be read as an image: {error.fault}.") from None


def picture_tensor(picture: Image.Image) -> Tensor:
    """The pixels of a gray or colour picture, uint8 `(C, H, W)`."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def tensor_picture(pixels: Tensor) -> Image.Image:
    """The picture of uint8 pixels `(C, H, W)`."""
    array = pixels.permute(1, 2, 0).contiguous().cpu().numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def save_picture(picture: Image.Image, path: PathLike, quality: int = 95) -> None:
    """Write a picture whole or not at all, in the format of its ending.

    Raises:
        FileError: If the ending is not that of a format, or the file cannot be written.
    """
    target = Path(path)
    kind = Image.registered_extensions().get(target.suffix.lower())
    if kind is None or target.suffix.lower() not in PICTURES:
        raise FileError(f"{target} must end in one of {', '.join(PICTURES)}.")
    try:
        with whole_file(target) as temporary:
            picture.save(temporary, kind, quality=quality)
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error}") from error


def corrupt_file(
    source: PathLike,
    target: PathLike,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    number: int = 0,
    scale: Scale = "auto",
    frost: PathLike | None = None,
    device: torch.device | str = "cpu",
) -> Path:
    """Corrupt one picture.

    Args:
        source: The picture to read.
        target: The picture to write; its ending is its format. A file that is there is replaced.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Seed of the draws.
        number: The picture's number in its set, on which its draws depend too.
        scale: Whose parameters: "cifar", "imagenet", or "auto" by the picture's size.
        frost: Folder with frost photographs; textures made by code if not given.
        device: Where to work.

    Returns:
        The target.

    Raises:
        FileError: If the source cannot be read, the target cannot be written, or they are the same file.
        ValueError: If an argument is not one of the above.
    """
    severity_level(name, severity, "cifar")
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve() or (target.exists() and source.exists() and target.samefile(source)):
        raise FileError(f"{target} is the input; write the corrupted picture somewhere else.")
    images = picture_tensor(read_picture(source))[None].to(device)
    corrupted = corrupt(images, name, severity, seed=seed, samples=torch.tensor([number]), scale=scale, frost=frost)
    save_picture(tensor_picture(corrupted[0]), target)
    return target


def find_pictures(folder: PathLike) -> list[Path]:
    """The pictures below a folder, relative to it, in the order of their paths. Their places are their numbers.

    Raises:
        FileError: If there is no such folder, or no picture in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileError(f"{root} is not a folder.")
    found = [path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in PICTURES and path.is_file()]
    found = [path for path in found if not path.name.startswith(".")]
    if not found:
        raise FileError(f"{root} has no pictures ({', '.join(PICTURES)}).")
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
    jobs = [(name, severity, target)]
    with _held(target, settings):
        yield from _corrupt_pictures(source, pictures, pictures, jobs, _as_it_is, 95, seed, scale, frost, device)


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
        raise FileError(f"{source} has two pictures that would both become {double}.")
    settings = {"layout": "imagenet-c", "seed": seed, "frost": _frost_name(frost)}
    jobs = [(name, severity, target / name / str(severity)) for name, severity in itertools.product(names, severities)]
    with _held(target, settings):
        yield from _corrupt_pictures(source, pictures, outputs, jobs, cut_middle, 85, seed, "imagenet", frost, device)


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
    checksum = 0
    for block in images.split(1024):
        checksum = zlib.crc32(block.cpu().numpy().tobytes(), checksum)
    settings = {
        "layout": "cifar-10-c",
        "seed": seed,
        "frost": _frost_name(frost),
        "shape": list(images.shape),
        "checksum": checksum,
    }
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
                    for _, block in corrupt_chunks(
                        images, name, severity, seed=seed, scale="cifar", frost=frost, chunk=chunk, device=device
                    ):
                        file.write(block.permute(0, 2, 3, 1).contiguous().cpu().numpy().data)
                        done += len(block)
                        yield Progress(done, total, f"{name} {severity}")


def cut_middle(picture: Image.Image) -> Image.Image:
    """ImageNet's usual cut: short side to 256, then the middle 224 × 224, in colour."""
    width, height = picture.size
    short = min(width, height)
    size = (int(256 * width / short), int(256 * height / short))
    picture = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    return picture.crop((left, top, left + 224, top + 224))


def _as_it_is(picture: Image.Image) -> Image.Image:
    return picture


def _corrupt_pictures(
    source: Path,
    pictures: list[Path],
    outputs: list[Path],
    jobs: list[tuple[str, int, Path]],
    prepare: Callable[[Image.Image], Image.Image],
    quality: int,
    seed: int,
    scale: Scale,
    frost: PathLike | None,
    device: torch.device | str,
) -> Iterator[Progress]:
    """Corrupt pictures for every (name, severity, folder) and write each below the job's folder, in windows.

    A window's pictures are read once for all jobs; those of one size are corrupted together.
    """
    total = len(pictures) * len(jobs)
    missing = [
        [at for at, output in enumerate(outputs[start : start + _WINDOW], start) if not (folder / output).is_file()]
        for start in range(0, len(pictures), _WINDOW)
        for _, _, folder in jobs
    ]
    done = total - sum(map(len, missing))
    yield Progress(done, total, "")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for window in range(0, len(missing), len(jobs)):
            wanted = sorted(set().union(*missing[window : window + len(jobs)]))
            read = threads.map(lambda at: picture_tensor(prepare(read_picture(source / pictures[at]))), wanted)
            images = dict(zip(wanted, read, strict=True))
            for (name, severity, folder), numbers in zip(jobs, missing[window : window + len(jobs)], strict=True):
                by_shape: dict[torch.Size, list[int]] = {}
                for at in numbers:
                    by_shape.setdefault(images[at].shape, []).append(at)
                for group in by_shape.values():
                    corrupted = corrupt(
                        torch.stack([images[at] for at in group]).to(device),
                        name,
                        severity,
                        seed=seed,
                        samples=torch.tensor(group),
                        scale=scale,
                        frost=frost,
                    ).cpu()
                    paths = [folder / outputs[at] for at in group]
                    # list() waits for the writes and raises what they raised
                    list(threads.map(lambda p, path: save_picture(tensor_picture(p), path, quality), corrupted, paths))
                    done += len(group)
                    yield Progress(done, total, f"{name} {severity} {outputs[group[-1]].as_posix()}")


def _apart(source: PathLike, target: PathLike) -> tuple[Path, Path]:
    """Two folders, after making sure that writing one cannot touch the other."""
    inner, outer = Path(source).resolve(), Path(target).resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise FileError(f"{os.fspath(target)} and the input {os.fspath(source)} must not hold each other.")
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
            for part in target.rglob(".*.part"):
                part.unlink(missing_ok=True)
            yield
    except FolderError as error:
        raise FileError(str(error)) from None
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error}") from error


def _agree(target: Path, settings: dict[str, object]) -> None:
    """Note the settings in a new folder; refuse one that was made with others."""
    note = target / _SETTINGS
    if note.is_file():
        try:
            found = json.loads(note.read_text())
        except (OSError, ValueError) as error:
            raise FileError(f"{note} cannot be read: {error}") from error
        if found != settings:
            differing = [key for key in {**found, **settings} if found.get(key) != settings.get(key)]
            raise FileError(
                f"{target} was made with "
                + ", ".join(f"{key}={found.get(key)!r}" for key in differing)
                + ", not "
                + ", ".join(f"{key}={settings.get(key)!r}" for key in differing)
                + "; choose another folder."
            )
        return
    if any(not entry.name.endswith(".part") for entry in target.iterdir()):
        raise FileError(f"{target} is not empty and holds no {_SETTINGS} of an earlier run; choose another folder.")
    write_whole(note, json.dumps(settings, indent=2) + "\n")

"""The folder of an evaluation run: one file for each finished unit, and what the run is.

    RUN/run.json                            configuration, versions, hardware, command
    RUN/units/METHOD/SET.../seed-N.safetensors   the records of one method on one set with one seed

A unit's file holds the records as columns, in the order of the stream, with a description and a hash of both. It is
written whole or not at all; a file that is truncated or was altered counts as missing. Reading needs no network.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from testtime.evaluate import COLUMNS, Record
from testtime.storage import find_differences, write_whole

log = logging.getLogger(__name__)

FORMAT = 1
_KEY = "testtime-unit"
_SHOWN = 8


class RunError(ValueError):
    """A folder that is not a run, or not one of this version; the message says what is wrong."""


class Verdicts(NamedTuple):
    """What became of the images of a unit.

    Attributes:
        samples: The images' numbers, rising, int32 `(N,)`.
        labels: Their classes, int32 `(N,)`.
        right: Whether the predictions are right, uint8 `(N,)`.
    """

    samples: np.ndarray
    labels: np.ndarray
    right: np.ndarray


@dataclass(frozen=True)
class Unit:
    """One method on one test set with one seed: the grain of a run.

    Attributes:
        method: The method's name in the run, such as `online`.
        set_name: The test set's name, such as `cifar10-c/fog/5`.
        corruption: The corruption (or the growing noise) in that name; None for any other set.
        level: Its level, 1 to 5; None where there is none.
        seed: Seed of the augmentations and of the order.
        path: Its file, once it is finished.
        about: What the file says of itself: seconds, images_per_second, counts, device.
        held: Its verdicts, where only a summary of its run is there.
    """

    method: str
    set_name: str
    corruption: str | None
    level: int | None
    seed: int
    path: Path | None = field(default=None, compare=False)
    about: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    held: Verdicts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, parts in (("method", [self.method]), ("set_name", self.set_name.split("/"))):
            if any(part in ("", ".", "..") for part in parts) or "/" in self.method:
                raise ValueError(f"`{name}` must be fit for a file's name, got {getattr(self, name)!r}.")

    @staticmethod
    def of(method: str, set_name: str, seed: int) -> Unit:
        """The unit of a method, a set by its name, and a seed."""
        return Unit(method, set_name, *read_shift(set_name), seed)

    @property
    def place(self) -> Path:
        """Its file's path within the run's folder."""
        parts = [quote(part, safe=" +=@,()") for part in (self.method, *self.set_name.split("/"))]
        return Path("units", *parts, f"seed-{self.seed}.safetensors")

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{self.method} {self.set_name} seed {self.seed}"

    @property
    def seconds(self) -> float:
        """How long it took; units that advanced side by side share their time evenly."""
        return float(self.about["seconds"])

    def columns(self) -> dict[str, np.ndarray]:
        """Its records, a column for each field of `Record`, in the order of the stream; see `COLUMNS`.

        Raises:
            RunError: The unit is not finished, or its file is damaged.
        """
        if self.held is not None:
            raise RunError(f"{self.title}: a summary holds no records.")
        if self.path is None:
            raise RunError(f"{self.title} is not finished.")
        return read_unit(self.path)[1]

    def verdicts(self) -> Verdicts:
        """Which of its images are predicted right, in the order of their numbers.

        Raises:
            RunError: The unit is not finished, or its file is damaged.
        """
        if self.held is not None:
            return self.held
        columns = self.columns()
        order = np.argsort(columns["sample"], kind="stable")
        return Verdicts(*(columns[name][order] for name in ("sample", "label", "is_right")))


@dataclass(frozen=True)
class Run:
    """An evaluation run as it lies in its folder.

    Attributes:
        path: The folder.
        configuration: What decides the results: networks, sets, methods and their settings, seeds, order, limit.
        about: Everything else of run.json: versions, hardware, command, seeds, files.
        units: The finished units, in the order of the configuration.
        damaged: Files that are not whole, with the reason; their units count as missing.
    """

    path: Path
    configuration: dict[str, Any]
    about: dict[str, Any]
    units: list[Unit]
    damaged: list[str]


def read_shift(set_name: str) -> tuple[str | None, int | None]:
    """Corruption and level in the name of a set, None for what it does not have."""
    family, *parts = set_name.split("/")
    if family.endswith("-c") and len(parts) == 2 and parts[1].isdecimal():
        return parts[0], int(parts[1])
    if family.endswith("-gradual") and len(parts) == 1:
        return parts[0], None
    return None, None


def open_run(path: str | Path) -> Run:
    """Read a run's folder, finished or not.

    Every unit's file is read through once; one that is truncated or was altered is left out, logged and named in
    `damaged`.

    Raises:
        RunError: The folder holds no run, or one of another format.
    """
    path = Path(path)
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
        version, configuration = about.pop("format"), about.pop("configuration")
        if not isinstance(configuration, dict):
            raise TypeError("its configuration is none")
    except FileNotFoundError:
        raise RunError(f"{path} holds no run: there is no run.json in it.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / 'run.json'}: not the description of a run ({error}).") from None
    if version != FORMAT:
        raise RunError(f"{path}: a run of format {version}; this version of testtime reads format {FORMAT}.")
    units: list[Unit] = []
    damaged: list[str] = []
    for file in sorted((path / "units").rglob("seed-*.safetensors")):
        unit = _try_unit(path, file)
        if isinstance(unit, Unit):
            units.append(unit)
        else:
            damaged.append(unit)
    ranks = [{name: rank for rank, name in enumerate(configuration.get(key, ()))} for key in ("methods", "sets")]

    def rank(unit: Unit) -> tuple[int, int, str, str, int]:
        ends = [len(known) for known in ranks]
        return (
            ranks[1].get(unit.set_name, ends[1]),
            ranks[0].get(unit.method, ends[0]),
            unit.set_name,
            unit.method,
            unit.seed,
        )

    return Run(path, configuration, about, sorted(units, key=rank), damaged)


def _try_unit(folder: Path, file: Path) -> Unit | str:
    """A unit by its file, or what is wrong with the file."""
    try:
        unit = read_unit(file)[0]
        if folder / unit.place != file:
            raise RunError(f"{file}: holds {unit.title}, which belongs elsewhere.")
    except RunError as error:
        log.warning("%s It counts as missing.", error)
        return str(error)
    return unit


def prepare_folder(path: str | Path, configuration: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Make a run's folder, or check that the one there is of the same configuration; clear what a kill left behind.

    A run in which nothing was finished yet gives way to another configuration.

    Args:
        path: The folder.
        configuration: What decides the results, as JSON could hold it.
        about: What else to write; that of the first time stays.

    Raises:
        RunError: It holds something else than a run.
        ValueError: It holds a run of another configuration; the message shows the differences.
    """
    path = Path(path)
    if (path / "run.json").exists():
        there = open_run(path)
        different = find_differences(there.configuration, configuration)
        begun = there.units or there.damaged or (path / "underway").exists()
        if different and begun:
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(
                f"{path} holds a run of another configuration ({'; '.join(different[:_SHOWN])}{more}). "
                "Choose another folder."
            )
        for part in path.rglob(".*.part"):  # what a killed process was writing
            part.unlink(missing_ok=True)
        if not different:
            return
    elif path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise RunError(f"{path} holds other files and no run. Choose another folder.")
    content = {"format": FORMAT, "configuration": configuration, **about}
    _write(path / "run.json", (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def make_columns(records: Iterable[Record]) -> dict[str, np.ndarray]:
    """Records as columns."""
    plain = [
        (
            record.sample,
            -1 if record.label is None else record.label,
            record.prediction,
            record.prediction_before,
            bool(record.is_right),
            bool(record.was_right),
            *record[6:],
        )
        for record in records
    ]
    values = zip(*plain, strict=True) if plain else [()] * len(COLUMNS)
    return {name: np.array(column, kind) for (name, kind), column in zip(COLUMNS.items(), values, strict=True)}


def join_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One set of columns out of several, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def write_unit(folder: str | Path, unit: Unit, columns: Mapping[str, np.ndarray], seconds: float, **about: Any) -> Unit:
    """Write a finished unit's file, whole or not at all.

    Args:
        folder: The run's folder.
        unit: Which unit.
        columns: Its records.
        seconds: How long it took.
        **about: What else its description says, such as the device.

    Returns:
        The unit with its file.

    Raises:
        OSError: It cannot be written; the message names the file and the reason.
    """
    count = len(columns["sample"])
    described = {
        "format": FORMAT,
        "method": unit.method,
        "set": unit.set_name,
        "corruption": unit.corruption,
        "level": unit.level,
        "seed": unit.seed,
        "seconds": round(seconds, 4),
        "images_per_second": round(count / seconds, 2) if seconds > 0 else None,
        "counts": {
            "images": count,
            "labelled": int((columns["label"] >= 0).sum()),
            **{name: int(columns[name].sum()) for name in ("is_right", "was_right", "adapted", "rolled_back")},
        },
        **about,
    }
    sealed = described | {"sha256": _hash(described, columns)}
    path = Path(folder) / unit.place
    _write(path, save(dict(columns), {_KEY: json.dumps(sealed)}))
    return Unit(unit.method, unit.set_name, unit.corruption, unit.level, unit.seed, path, sealed)


def read_unit(path: Path) -> tuple[Unit, dict[str, np.ndarray]]:
    """A unit's file: what it is, and its columns.

    Raises:
        RunError: The file is missing, truncated or altered.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            columns = {name: file.get_tensor(name) for name in COLUMNS}
        seal = about.pop("sha256")
        if about["format"] != FORMAT:
            raise RunError(f"{path}: format {about['format']}; this version of testtime reads format {FORMAT}.")
        if any(str(columns[name].dtype) != kind or columns[name].ndim != 1 for name, kind in COLUMNS.items()):
            raise ValueError("its columns have other types")
        if seal != _hash(about, columns):
            raise ValueError("it was altered")
        unit = Unit(about["method"], about["set"], about["corruption"], about["level"], about["seed"], path, about)
    except RunError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: not a whole unit ({error}).") from None
    return unit, columns


def tell(run: Run) -> str:
    """A run in a few lines: for each method its units, its mean error and its time."""
    lines = []
    for method in dict.fromkeys(unit.method for unit in run.units):
        own = [unit for unit in run.units if unit.method == method]
        counts = [unit.about["counts"] for unit in own]
        errors = [1 - count["is_right"] / count["labelled"] for count in counts if count["labelled"]]
        mean = f"mean error {sum(errors) / len(errors):.2%}" if errors else "no labels"
        images = sum(count["images"] for count in counts)
        lines.append(
            f"{method:<12} {len(own):>4} units  {mean:<18}  {images:,} images in {sum(u.seconds for u in own):.1f} s"
        )
    return "\n".join(lines)


def _hash(about: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in COLUMNS:
        digest.update(f"\n{name} {columns[name].dtype} {columns[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(columns[name]).tobytes())
    return digest.hexdigest()


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:  # a full disk does not say which file it was
        raise OSError(f"{path}: cannot be written ({error.strerror or error}).") from None

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from testtime.checks import check_format, check_table, is_file_name, is_text, quote_name, show
from testtime.evaluation.descriptions import check_run, check_unit, read_shift
from testtime.evaluation.records import COLUMNS, Record
from testtime.provenance import find_differences
from testtime.storage import FileError, check_file, clear_parts, error_text, parse_json, read_json, write_whole

log = logging.getLogger(__name__)

FORMAT = 1
_KEY = "testtime-unit"
_FLAGS = ("is_right", "was_right", "adapted", "rolled_back")
_SHOWN = 8


class RunError(FileError):
    """A folder or file of a run that cannot be used: damaged, of another version, or something else."""


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
        parts = self.set_name.split("/") if is_text(self.set_name) else [self.set_name]
        for name, own in (("method", [self.method]), ("set_name", parts)):
            if not all(map(is_file_name, own)):
                raise ValueError(f"`{name}` must be fit for a file's name, got {show(getattr(self, name))}.")

    @staticmethod
    def of(method: str, set_name: str, seed: int) -> Unit:
        """The unit of a method, a set by its name, and a seed."""
        return Unit(method, set_name, *read_shift(set_name), seed)

    @property
    def place(self) -> Path:
        """Its file's path within the run's folder."""
        parts = map(quote_name, (self.method, *self.set_name.split("/")))
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
            raise RunError(self.path or self.place, "a summary holds no records")
        if self.path is None:
            raise RunError(self.place, f"{self.title} is not finished")
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


def open_run(path: str | Path, images: Mapping[str, int] | None = None) -> Run:
    """Read a run's folder, finished or not.

    Every unit's file is read through once; one that is truncated, was altered or lacks images is left out, logged and
    named in `damaged`.

    Args:
        path: The folder.
        images: How many images each set has; where that is not known, as many as any unit of the set.

    Raises:
        RunError: The folder holds no run, or one of another format.
    """
    path = Path(path)
    configuration, about = _read_description(path)
    found = [_try_unit(path, file) for file in sorted((path / "units").rglob("seed-*.safetensors"))]
    units, lacking = _sort_out([unit for unit in found if isinstance(unit, Unit)], configuration.get("limit"), images)
    damaged = [error for error in found if isinstance(error, RunError)] + lacking
    for error in damaged:
        log.warning("%s; it counts as missing", error)
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

    return Run(path, configuration, about, sorted(units, key=rank), [str(error) for error in damaged])


def _read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run's folder says of itself: what decides its results, and the rest."""
    path = folder / "run.json"
    if not path.exists():
        raise RunError(folder, "holds no run: there is no run.json in it")
    try:
        about = read_json(path, 1 << 26)
        check_table(about)
        check_format(path, about.pop("format", None), FORMAT)
        configuration = about.pop("configuration", None)
        check_run(configuration, about)
    except FileError as error:
        raise RunError(path, error.fault, error.remedy) from None
    except ValueError as error:
        fault = f"not the description of a run ({str(error).removesuffix('.')})"
        raise RunError(path, fault, "restore it from a copy") from None
    return configuration, about


def _try_unit(folder: Path, file: Path) -> Unit | RunError:
    """A unit by its file, or what is wrong with the file."""
    try:
        unit = read_unit(file)[0]
    except RunError as error:
        return error
    return unit if folder / unit.place == file else RunError(file, f"holds {unit.title}, which belongs elsewhere")


def _sort_out(
    units: Sequence[Unit], limit: int | None, images: Mapping[str, int] | None
) -> tuple[list[Unit], list[RunError]]:
    """The units that have all the images of their sets, and what is wrong with the others."""
    counts = [unit.about["counts"]["images"] for unit in units]
    wanted = dict(images or {})
    for unit, count in zip(units, counts, strict=True):
        known = wanted.get(unit.set_name, 0)
        if images is None and (limit is None or count <= limit):
            wanted[unit.set_name] = max(known, count)
    complete, lacking = [], []
    for unit, count in zip(units, counts, strict=True):
        due = wanted.get(unit.set_name, limit)
        if due is None or count == due:
            complete.append(unit)
        else:
            lacking.append(RunError(unit.path or unit.place, f"holds {count:,} images of {unit.set_name}, not {due:,}"))
    return complete, lacking


def prepare_folder(path: str | Path, configuration: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Make a run's folder, or check that the one there is of the same configuration; clear what a kill left behind.

    A run in which nothing was finished yet gives way to another configuration.

    Args:
        path: The folder.
        configuration: What decides the results, as JSON could hold it.
        about: What else to write; that of the first time stays.

    Raises:
        RunError: It holds something else than a run, or a run of another configuration; the message shows the
            differences.
    """
    path = Path(path)
    if (path / "run.json").exists():
        there = open_run(path)
        different = find_differences(there.configuration, configuration)
        begun = there.units or there.damaged or (path / "underway").exists()
        if different and begun:
            shown = [text if len(text) < 200 else f"{text[:200]}…" for text in different[:_SHOWN]]
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            fault = f"holds a run of another configuration ({'; '.join(shown)}{more})"
            raise RunError(path, fault, "choose another folder")
        clear_parts(path)
        if not different:
            return
    else:
        if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise RunError(path, "holds other files and no run", "choose another folder")
        clear_parts(path)
    content = {"format": FORMAT, "configuration": configuration, **about}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    _write(path / "run.json", text.encode(errors="backslashreplace"))  # half a character, as JSON writes it


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


def check_columns(columns: Mapping[str, np.ndarray]) -> None:
    """Check that columns are records: all there, of one length and their types, each image once.

    Raises:
        ValueError: They are not.
    """
    for name, kind in COLUMNS.items():
        if name not in columns:
            raise ValueError(f"the column {name} is missing")
        if str(columns[name].dtype) != kind or columns[name].ndim != 1:
            raise ValueError(f"the column {name} is not of type {kind}")
    if len({len(columns[name]) for name in COLUMNS}) > 1:
        raise ValueError("its columns are of different lengths")
    if any(columns[name].max(initial=0) > 1 for name in _FLAGS):
        raise ValueError("a column of true and false holds something else")
    samples, labels = columns["sample"], columns["label"]
    if samples.min(initial=0) < 0 or labels.min(initial=-1) < -1 or len(np.unique(samples)) < len(samples):
        raise ValueError("its images are not numbered as they should be")


def count_columns(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """What a unit's description counts of its records."""
    flags = {name: int(columns[name].sum()) for name in _FLAGS}
    return {"images": len(columns["sample"]), "labelled": int((columns["label"] >= 0).sum()), **flags}


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
        "counts": count_columns(columns),
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
        check_file(path)
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY)
            columns = {name: file.get_tensor(name) for name in COLUMNS if name in file.keys()}  # noqa: SIM118
        if text is None:
            raise ValueError("it has no description of a unit")
        about = parse_json(text)
        check_table(about)
        seal = about.pop("sha256", None)
        check_format(path, about.get("format"), FORMAT)
        check_unit(about)
        check_columns(columns)
        if seal != _hash(about, columns):
            raise ValueError("it was altered")
        if about["counts"] != count_columns(columns):
            raise ValueError("its counts are not those of its columns")
        unit = replace(Unit.of(about["method"], about["set"], about["seed"]), path=path, about=about)
    except FileError as error:
        raise RunError(path, error.fault, error.remedy) from None
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise RunError(path, f"a damaged unit ({error_text(error).removesuffix('.')})") from None
    return unit, columns


def format_run(run: Run) -> str:
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

"""The folder of an evaluation run: one file per finished unit, and the run's metadata.

    RUN/run.json                            configuration, versions, hardware, command
    RUN/units/METHOD/SET.../seed-N.safetensors   the records of one method on one set with one seed

A unit's file contains its records as columns, in the order of the stream, its metadata, and a hash of both. It is
written atomically; a truncated or modified file counts as missing. Reading a run needs no network.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from testtime.checks import check_format, check_table, format_value, is_file_name, is_text, quote_name
from testtime.evaluation.columns import check_columns, count_columns
from testtime.evaluation.descriptions import check_run, check_unit, read_shift
from testtime.evaluation.records import COLUMNS, PROBABILITIES, Columns, list_columns
from testtime.provenance import find_differences
from testtime.storage import FileError, check_file, clear_parts, error_text, parse_json, read_json, write_atomic

log = logging.getLogger(__name__)

FORMAT = 1
SPEEDS = "speeds.json"
"""The file with the seconds per call of a run's methods, see timing.py."""
_KEY = "testtime-unit"
_SHOWN = 8


class RunError(FileError):
    """A folder or file of a run that cannot be used, because it is damaged, of another version, or not a run."""


class Verdicts(NamedTuple):
    """Which predictions of a unit are right.

    Attributes:
        samples: Sample indices in ascending order, int32 `(N,)`.
        labels: Class labels, int32 `(N,)`.
        right: Whether the predictions are right, uint8 `(N,)`.
    """

    samples: np.ndarray
    labels: np.ndarray
    right: np.ndarray


@dataclass(frozen=True)
class Unit:
    """One method on one test set with one seed: the unit of work of a run.

    Attributes:
        method: The method's name in the run, e.g. `online`.
        set_name: The test set's name, e.g. `cifar10-c/fog/5`.
        corruption: The corruption (or gradual noise) in that name; None for other sets.
        level: Its level, 1 to 5, or None.
        seed: Seed of the augmentations and of the order.
        path: Its file, if finished.
        about: Metadata of the file: seconds, images_per_second, counts, device.
        held: Its verdicts, if it comes from a summary.
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
        for name, values in (("method", [self.method]), ("set_name", parts)):
            if not all(map(is_file_name, values)):
                raise ValueError(f"`{name}` must be usable as a file name, got {format_value(getattr(self, name))}.")

    @staticmethod
    def of(method: str, set_name: str, seed: int) -> Unit:
        """Make the unit of a method, a set and a seed; corruption and level come from the set's name."""
        return Unit(method, set_name, *read_shift(set_name), seed)

    @property
    def relative_path(self) -> Path:
        """Path of its file relative to the run's folder."""
        parts = map(quote_name, (self.method, *self.set_name.split("/")))
        return Path("units", *parts, f"seed-{self.seed}.safetensors")

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.method} {self.set_name} seed {self.seed}"

    @property
    def seconds(self) -> float:
        """Seconds it took; units that ran in parallel share their time evenly."""
        return float(self.about["seconds"])

    def columns(self) -> Columns:
        """Return its records as columns, in the order of the stream; see `COLUMNS`.

        Raises:
            RunError: The unit is not finished, or its file is damaged.
        """
        if self.held is not None:
            raise RunError(self.path or self.relative_path, "a summary contains no records")
        if self.path is None:
            raise RunError(self.relative_path, f"{self.title} is not finished")
        return read_unit(self.path)[1]

    def verdicts(self) -> Verdicts:
        """Return which of its predictions are right, ordered by sample index.

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
    """An evaluation run read from its folder.

    Attributes:
        path: The folder.
        configuration: Everything that determines the results: networks, sets, methods, settings, seeds, order, limit.
        about: The rest of run.json: versions, hardware, command, seeds, files.
        units: The finished units, in the order of the configuration.
        damaged: Damaged files, with the reason; their units count as missing.
    """

    path: Path
    configuration: dict[str, Any]
    about: dict[str, Any]
    units: list[Unit]
    damaged: list[str]


def open_run(path: str | Path, images: Mapping[str, int] | None = None) -> Run:
    """Read a run's folder, finished or not.

    Every unit's file is read and verified; one that is truncated, modified or incomplete is skipped, logged and listed
    in `damaged`.

    Args:
        path: The folder.
        images: Number of images per set; None takes the maximum over the units of each set.

    Raises:
        RunError: The folder contains no run, or one of another format.
    """
    path = Path(path)
    configuration, about = _read_description(path)
    found = [_read_or_fail(path, file) for file in sorted((path / "units").rglob("seed-*.safetensors"))]
    limit = None if "streams" in configuration else configuration.get("limit")  # that of a set, not of a stream
    units, lacking = _sort_out([unit for unit in found if isinstance(unit, Unit)], limit, images)
    damaged = [error for error in found if isinstance(error, RunError)] + lacking
    for error in damaged:
        log.warning("%s; it counts as missing", error)
    ranks = [{name: rank for rank, name in enumerate(configuration.get(key, ()))} for key in ("sets", "methods")]

    def rank(unit: Unit) -> tuple[Any, ...]:
        names = unit.set_name, unit.method
        places = [known.get(name, len(known)) for known, name in zip(ranks, names, strict=True)]
        return *places, *names, unit.seed

    return Run(path, configuration, about, sorted(units, key=rank), [str(error) for error in damaged])


def _read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a run's folder, and the rest of its metadata."""
    path = folder / "run.json"
    if not path.exists():
        raise RunError(folder, "contains no run: there is no run.json")
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


def _read_or_fail(folder: Path, file: Path) -> Unit | RunError:
    """Return the unit of a file, or the error."""
    try:
        unit = read_unit(file)[0]
    except RunError as error:
        return error
    if folder / unit.relative_path == file:
        return unit
    return RunError(file, f"contains {unit.title}, which belongs elsewhere")


def _sort_out(
    units: Sequence[Unit], limit: int | None, images: Mapping[str, int] | None
) -> tuple[list[Unit], list[RunError]]:
    """Return the units with all images of their sets, and errors for the others."""
    wanted = dict(images or {})
    for unit in units:
        count = unit.about["counts"]["images"]
        if images is None and (limit is None or count <= limit):
            wanted[unit.set_name] = max(wanted.get(unit.set_name, 0), count)
    complete, lacking = [], []
    for unit in units:
        count, due = unit.about["counts"]["images"], wanted.get(unit.set_name, limit)
        if due is None or count == due:
            complete.append(unit)
        else:
            fault = f"has {count:,} images of {unit.set_name}, not {due:,}"
            lacking.append(RunError(unit.path or unit.relative_path, fault))
    return complete, lacking


def prepare_folder(path: str | Path, configuration: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Create a run's folder, or check that an existing one has the same configuration, and remove partial files.

    A run without finished units is overwritten by another configuration.

    Args:
        path: The folder.
        configuration: Everything that determines the results, JSON-serializable.
        about: Other metadata, only written when the folder is created.

    Raises:
        RunError: The folder contains other files, or a run with another configuration; the message lists the
            differences.
    """
    path = Path(path)
    if (path / "run.json").exists():
        existing = open_run(path)
        different = find_differences(existing.configuration, configuration)
        begun = existing.units or existing.damaged or (path / "underway").exists()
        if different and begun:
            shown = [text if len(text) < 200 else f"{text[:200]}…" for text in different[:_SHOWN]]
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            fault = f"contains a run with another configuration ({'; '.join(shown)}{more})"
            raise RunError(path, fault, "choose another folder")
        clear_parts(path)
        if not different:
            return
    else:
        if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise RunError(path, "contains other files and no run", "choose another folder")
        clear_parts(path)
    content = {"format": FORMAT, "configuration": configuration, **about}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (path / SPEEDS).unlink(missing_ok=True)  # of another configuration
    _write(path / "run.json", text.encode(errors="backslashreplace"))  # lone surrogates, as JSON escapes them


def write_unit(folder: str | Path, unit: Unit, columns: Mapping[str, np.ndarray], seconds: float, **about: Any) -> Unit:
    """Write a finished unit's file atomically.

    Args:
        folder: The run's folder.
        unit: The unit.
        columns: Its records.
        seconds: Seconds it took.
        **about: Other metadata, e.g. the device.

    Returns:
        The unit with its file.

    Raises:
        OSError: The file cannot be written; the message names it and the reason.
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
    signed = described | {"sha256": _hash(described, columns)}
    path = Path(folder) / unit.relative_path
    _write(path, save(dict(columns), {_KEY: json.dumps(signed)}))
    return replace(unit, path=path, about=signed)


def read_unit(path: Path) -> tuple[Unit, Columns]:
    """Read a unit's file: the unit, and its columns.

    Raises:
        RunError: The file is missing, truncated or modified.
    """
    try:
        check_file(path)
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY)
            held = set(file.keys())
            columns = {name: file.get_tensor(name) for name in (*COLUMNS, *PROBABILITIES) if name in held}
        if text is None:
            raise ValueError("it has no description of a unit")
        about = parse_json(text)
        check_table(about)
        checksum = about.pop("sha256", None)
        check_format(path, about.get("format"), FORMAT)
        check_unit(about)
        check_columns(columns)
        if checksum != _hash(about, columns):
            raise ValueError("it was modified")
        if about["counts"] != count_columns(columns):
            raise ValueError("its counts do not match its columns")
        unit = replace(Unit.of(about["method"], about["set"], about["seed"]), path=path, about=about)
    except FileError as error:
        raise RunError(path, error.fault, error.remedy) from None
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise RunError(path, f"a damaged unit ({error_text(error).removesuffix('.')})") from None
    return unit, columns


def format_run(run: Run) -> str:
    """Format a run as one line per method: the mean error over the shifted sets, as in reports, and on the others."""
    methods = list(dict.fromkeys(unit.method for unit in run.units))
    width = max(map(len, methods), default=0)
    lines = []
    for method in methods:
        own = [unit for unit in run.units if unit.method == method]
        images = sum(unit.about["counts"]["images"] for unit in own)
        seconds = sum(unit.seconds for unit in own)
        lines.append(f"{method:<{width}}  {_format_errors(own)}; {images:,} images in {seconds:.1f} s")
    return "\n".join(lines)


def _format_errors(units: Sequence[Unit]) -> str:
    """Format the errors of one method."""
    groups: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for unit in units:
        count = unit.about["counts"]
        if count["labelled"]:
            error = 1 - count["is_right"] / count["labelled"]
            groups[unit.corruption is not None].setdefault(unit.set_name, []).append(error)
    shifted, others = groups[True], groups[False]
    parts = []
    if shifted:
        parts.append(f"{_mean(shifted):6.2%} on {_count(shifted, 'shifted set')}")
    if others:
        parts.append(f"{_mean(others):6.2%} on {'the original' if shifted else _count(others, 'set')}")
    return f"error {', '.join(parts)}" if parts else "no labels"


def _mean(errors: Mapping[str, Sequence[float]]) -> float:
    found = [error for each in errors.values() for error in each]
    return sum(found) / len(found)


def _count(errors: Mapping[str, Any], noun: str) -> str:
    return next(iter(errors)) if len(errors) == 1 else f"{len(errors)} {noun}s (mean)"


def _hash(about: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in list_columns(columns):
        digest.update(f"\n{name} {columns[name].dtype} {columns[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(columns[name]).tobytes())
    return digest.hexdigest()


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:  # the error of a full disk does not name the file
        raise OSError(f"{path}: cannot be written ({error.strerror or error}).") from None

"""Summaries: runs without their records, as one JSON file small enough to commit.

For each unit it contains the metadata (counts, seconds, device), one bit per image, whether the prediction is right,
and a few counts along the stream (`read_details`). That suffices for tables, confidence intervals, paired tests and
calibration, so a report on a summary has the same numbers as one on the folders. Predictions, losses and the order of
the stream are omitted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from testtime.checks import Kind, check_entries, check_format, is_list_of, is_table, is_table_of, is_text
from testtime.evaluation.columns import count_probabilities, find_collapses
from testtime.evaluation.descriptions import check_details, check_run, check_unit
from testtime.evaluation.protocols import Layout, read_layout
from testtime.evaluation.units import Run, RunError, Unit, Verdicts, open_run
from testtime.storage import FileError, read_json, write_atomic

FORMAT = 1
_KIND = "testtime-summary"
_LARGEST = 1 << 28  # bytes of all arrays, and of all verdicts, unpacked
_TEXT: Kind = ("a string", is_text)
_HASHES: Kind = ("hashes of arrays", is_table_of(is_text))
_SUMMARY: dict[str, Kind] = {
    "arrays": ("strings", is_table_of(is_text)),
    "runs": ("tables", is_list_of(is_table)),
}
_RUN: dict[str, Kind] = {
    "name": ("the name of a folder", lambda value: is_text(value) and not set(value) & set("/\0")),
    "configuration": ("a table", is_table),
    "about": ("a table", is_table),
    "sets": ("hashes of arrays", is_table_of(is_table_of(is_text))),
    "units": ("tables", is_list_of(is_table)),
}
_PRIVATE = ("files",)  # paths on the machine of the run
_BLOCKS = 200  # of a stream of many images


def write_summary(path: str | Path, runs: Sequence[Run]) -> None:
    """Write a summary of some runs atomically.

    Args:
        path: The file.
        runs: The runs, from folders or from other summaries.

    Raises:
        RunError: A unit's file is damaged, or does not match the run's description.
    """
    arrays: dict[str, str] = {}
    parts: list[str] = []
    for run in runs:
        sets: dict[str, dict[str, str]] = {}
        units: list[str] = []
        for unit in run.units:
            verdicts = unit.verdicts()
            packed = {"samples": _pack(np.diff(verdicts.samples, prepend=0)), "labels": _pack(verdicts.labels)}
            hashes = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in packed.items()}
            arrays |= {hashes[name]: text for name, text in packed.items()}
            sets.setdefault(unit.set_name, hashes)
            # With a limit and a shuffled order, the images depend on the seed.
            own = {} if sets[unit.set_name] == hashes else {"images": hashes}
            described = _describe(unit) | {"details": read_details(run, unit)} | own
            units.append(json.dumps(described | {"right": _pack_bits(verdicts.right)}))
        about = {key: value for key, value in run.about.items() if key not in _PRIVATE}
        head = {"name": run.path.name, "configuration": run.configuration, "about": about, "sets": sets}
        parts.append(f'{json.dumps(head)[:-1]}, "units": [\n  ' + ",\n  ".join(units) + "\n ]}")
    start = json.dumps({"kind": _KIND, "format": FORMAT, "arrays": arrays}, ensure_ascii=False)
    write_atomic(path, f'{start[:-1]},\n "runs": [\n ' + ",\n ".join(parts) + "\n]}\n")


def read_details(run: Run, unit: Unit) -> dict[str, Any]:
    """Return counts along the stream of a unit, from its records or from a summary, which may lack any of them.

    Args:
        run: The run.
        unit: One of its units.

    Returns:
        JSON-serializable: `calibration`, see `count_probabilities`; `collapses`, see `find_collapses`; and, for a
        stream of several sets, `segments`, the number of right predictions in each segment, and `blocks`, in each
        `size` consecutive images (`right`).

    Raises:
        RunError: The unit's file is damaged, or does not match the layout of its stream.
    """
    if unit.held is not None:
        return dict(unit.about.get("details", {}))
    columns = unit.columns()
    found: dict[str, Any] = {"collapses": [list(one) for one in find_collapses(columns)]}
    calibration = count_probabilities(columns)
    if calibration is not None:
        found["calibration"] = calibration
    try:
        layout = read_layout(run.configuration, unit.set_name)
    except ValueError as error:
        raise RunError(run.path, str(error).removesuffix(".")) from None
    return found if layout is None else found | _count_parts(unit, columns["is_right"], layout)


def _count_parts(unit: Unit, right: np.ndarray, layout: Layout) -> dict[str, Any]:
    """Count the right predictions `(N,)` of a stream in each segment and block."""
    segment = layout.segment_of()
    if layout.segments and len(segment) != len(right):
        fault = f"has {len(right):,} images of {unit.set_name}, not {len(segment):,}"
        raise RunError(unit.path or unit.relative_path, fault)
    size = max(1, min(100, len(right) // 10), -(-len(right) // _BLOCKS))
    blocks = np.add.reduceat(right.astype(np.int64), np.arange(0, len(right), size)) if len(right) else right
    found: dict[str, Any] = {"blocks": {"size": size, "right": blocks.tolist()}}
    if layout.segments:
        found["segments"] = np.bincount(segment, right, len(layout.segments)).astype(int).tolist()
    return found


def open_runs(path: str | Path) -> list[Run]:
    """Open the runs at a path: a run folder, or a summary.

    Raises:
        RunError: There is no run at the path, or it is damaged.
    """
    return [open_run(path)] if Path(path).is_dir() else open_summary(path)


def open_summary(path: str | Path) -> list[Run]:
    """Open the runs of a summary; their units have verdicts but no records.

    Raises:
        RunError: The file is not a summary, has another format, or is damaged.
    """
    path = Path(path)
    try:
        held = read_json(path, 1 << 28)
        if not isinstance(held, dict) or held.get("kind") != _KIND:
            raise FileError(path, "not a summary of runs")
        check_format(path, held.get("format"), FORMAT)
        check_entries(held, _SUMMARY, list(_SUMMARY))
        if not held["runs"]:
            raise ValueError("it contains no run")
        for entry in held["runs"]:
            check_entries(entry, _RUN, list(_RUN))
            for unit in entry["units"]:
                check_unit(unit)
        if sum(unit["counts"]["images"] for entry in held["runs"] for unit in entry["units"]) > _LARGEST:
            raise ValueError("it has too many images")
        arrays = _unpack_all(held["arrays"])
        runs: list[Run] = []
        for entry in held["runs"]:
            runs.append(_read_run(path, entry, arrays, [run.path.name for run in runs]))
    except FileError as error:
        raise RunError(path, error.fault, error.remedy) from None
    except (ValueError, zlib.error) as error:
        fault = f"a damaged summary ({str(error).removesuffix('.')})"
        raise RunError(path, fault, "make it again from the runs with testtime report --format json") from None
    return runs


def _read_run(path: Path, entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray], taken: Sequence[str]) -> Run:
    check_run(entry["configuration"], entry["about"])
    name = entry["name"] if entry["name"] not in taken else f"{entry['name']}-{len(taken) + 1}"
    units = [_read_unit(path, unit, entry["sets"], arrays) for unit in entry["units"]]
    return Run(path / name, entry["configuration"], entry["about"], units, [])


def _describe(unit: Unit) -> dict[str, Any]:
    """Return a unit's metadata, with the errors in percent for readers."""
    counts = unit.about["counts"]
    errors = {
        name: round(100 - 100 * counts[key] / counts["labelled"], 4) if counts["labelled"] else None
        for name, key in (("error", "is_right"), ("error_before", "was_right"))
    }
    return {**unit.about, **errors, "adapted_share": round(counts["adapted"] / max(counts["images"], 1), 4)}


def _read_unit(path: Path, held: Mapping[str, Any], sets: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Unit:
    check_entries(held, {"right": _TEXT, "images": _HASHES}, ["right"])
    hashes = held.get("images") or sets.get(held["set"])
    if hashes is None or not all(hashes.get(name) in arrays for name in ("samples", "labels")):
        raise ValueError(f"the images of {held['set']!r} are missing")
    samples, labels = np.cumsum(arrays[hashes["samples"]], dtype=np.int64), arrays[hashes["labels"]]
    right = _unpack_bits(held["right"], held["counts"]["images"])
    counts = {"images": len(samples), "labelled": int((labels >= 0).sum()), "is_right": int(right.sum())}
    if len(labels) != len(samples) or any(held["counts"][name] != count for name, count in counts.items()):
        raise ValueError(f"the verdicts of {held['method']!r} on {held['set']!r} do not match its counts")
    if len(samples) and (samples[0] < 0 or samples[-1] >= 2**31 or (np.diff(samples) <= 0).any()):
        raise ValueError(f"the images of {held['set']!r} have invalid indices")
    check_details(held.get("details", {}), held["counts"]["images"])
    about = {key: value for key, value in held.items() if key not in ("right", "images")}
    verdicts = Verdicts(samples.astype(np.int32), labels, right)
    return replace(Unit.of(held["method"], held["set"], held["seed"]), path=path, about=about, held=verdicts)


def _pack(numbers: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(numbers.astype("<i4").tobytes(), 9)).decode()


def _unpack_all(arrays: Mapping[str, str]) -> dict[str, np.ndarray]:
    room, found = _LARGEST, {}
    for key, text in arrays.items():
        found[key] = np.frombuffer(_inflate(text, room), "<i4").astype(np.int32)
        room -= found[key].nbytes
    return found


def _pack_bits(right: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.packbits(right).tobytes(), 9)).decode()


def _unpack_bits(text: str, count: int) -> np.ndarray:
    packed = np.frombuffer(_inflate(text, count // 8 + 1), np.uint8)
    if len(packed) != -(-count // 8):
        raise ValueError("verdicts are missing")
    return np.unpackbits(packed, count=count)


def _inflate(text: str, largest: int) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(base64.b64decode(text, validate=True), largest)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("an array is too large or truncated")
    return found

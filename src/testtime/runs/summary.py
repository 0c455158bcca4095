"""Runs without their records: one JSON file that is small enough to keep beside the code.

Of every unit it holds what the unit's file says of itself (counts, seconds, device) and, for each image, whether the
prediction was right, a bit each. That is all that tables, intervals and paired tests are made of, so a report of a
summary has the numbers of a report of the folders. Predictions, losses and the order of the stream are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from testtime.runs.units import Run, RunError, Unit, Verdicts, open_run
from testtime.storage import write_whole

FORMAT = 1
_KIND = "testtime-summary"
_LARGEST = 1 << 28  # bytes that an array may unpack to
_PRIVATE = ("files",)  # where things lay on the machine of the run is nobody's business


def write_summary(path: str | Path, runs: Sequence[Run]) -> None:
    """Write the summary of some runs, whole or not at all.

    Args:
        path: The file.
        runs: The runs, from folders or from other summaries.

    Raises:
        RunError: A unit's file is damaged.
    """
    arrays: dict[str, str] = {}
    parts: list[str] = []
    for run in runs:
        sets: dict[str, dict[str, str]] = {}
        units: list[str] = []
        for unit in run.units:
            verdicts = unit.verdicts()
            packed = {"samples": _pack(np.diff(verdicts.samples, prepend=0)), "labels": _pack(verdicts.labels)}
            marks = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in packed.items()}
            arrays |= {marks[name]: text for name, text in packed.items()}
            sets.setdefault(unit.set_name, marks)
            # A limit with a shuffled order takes other images for every seed.
            own = {} if sets[unit.set_name] == marks else {"images": marks}
            units.append(json.dumps(_describe(unit) | own | {"right": _pack_bits(verdicts.right)}))
        about = {key: value for key, value in run.about.items() if key not in _PRIVATE}
        head = {"name": run.path.name, "configuration": run.configuration, "about": about, "sets": sets}
        parts.append(f'{json.dumps(head)[:-1]}, "units": [\n  ' + ",\n  ".join(units) + "\n ]}")
    start = json.dumps({"kind": _KIND, "format": FORMAT, "arrays": arrays}, ensure_ascii=False)
    write_whole(path, f'{start[:-1]},\n "runs": [\n ' + ",\n ".join(parts) + "\n]}\n")


def open_runs(path: str | Path) -> list[Run]:
    """The runs at a path: one in a folder, or those of a summary.

    Raises:
        RunError: There is no run, or it is damaged.
    """
    return open_summary(path) if Path(path).is_file() else [open_run(path)]


def open_summary(path: str | Path) -> list[Run]:
    """The runs of a summary; their units have verdicts and no records.

    Raises:
        RunError: It is no summary, one of another format, or damaged.
    """
    path = Path(path)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["kind"] != _KIND:
            raise ValueError("it is of another kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a summary of runs ({error}).") from None
    if held.get("format") != FORMAT:
        raise RunError(f"{path}: a summary of format {held.get('format')}; this version of testtime reads {FORMAT}.")
    try:
        runs: list[Run] = []
        for entry in held["runs"]:
            taken = [run.path.name for run in runs]
            name = str(entry["name"])
            place = path / (name if name not in taken else f"{name}-{len(runs) + 1}")
            units = [_read_unit(unit, entry["sets"], held["arrays"]) for unit in entry["units"]]
            runs.append(Run(place, dict(entry["configuration"]), dict(entry["about"]), units, []))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise RunError(f"{path}: a damaged summary ({error}).") from None
    return runs


def _describe(unit: Unit) -> dict[str, Any]:
    """What the unit's file says of it, and the errors in percent, for people."""
    counts = unit.about["counts"]
    errors = {
        name: round(100 - 100 * counts[key] / counts["labelled"], 4) if counts["labelled"] else None
        for name, key in (("error", "is_right"), ("error_before", "was_right"))
    }
    return {**unit.about, **errors, "adapted_share": round(counts["adapted"] / max(counts["images"], 1), 4)}


def _read_unit(held: Mapping[str, Any], sets: Mapping[str, Any], arrays: Mapping[str, str]) -> Unit:
    marks = held.get("images") or sets[held["set"]]
    samples = np.cumsum(_unpack(arrays[marks["samples"]]), dtype=np.int32)
    labels = _unpack(arrays[marks["labels"]])
    right = _unpack_bits(held["right"], len(samples))
    about = {key: value for key, value in held.items() if key not in ("right", "images")}
    if int(right.sum()) != about["counts"]["is_right"] or len(labels) != len(samples):
        raise ValueError(f"the verdicts of {held['method']} on {held['set']} do not fit its counts")
    shift = (held["corruption"], held["level"])
    return Unit(held["method"], held["set"], *shift, held["seed"], None, about, Verdicts(samples, labels, right))


def _pack(numbers: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(numbers.astype("<i4").tobytes(), 9)).decode()


def _unpack(text: str) -> np.ndarray:
    return np.frombuffer(_inflate(text, _LARGEST), "<i4").astype(np.int32)


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
        raise ValueError("an array is too large or cut off")
    return found

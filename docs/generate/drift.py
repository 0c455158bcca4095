"""Tables of how `Auto` was calibrated, and of what the drift that it follows predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .documents import points, table

Document = Mapping[str, Any]


def format_fit(fitted: Document) -> str:
    """The errors to which `benchmarks/auto.py` fitted a calibration, without learning, with it, and as it decides."""
    names = {"fixed": "`fixed`", "online": "`online`", "auto": "as calibrated"}
    rows = [
        [title, *(f"{100 - 100 * group[name]:.2f}" for group in fitted["accuracy"].values())]
        for name, title in names.items()
    ]
    return table(["error in %", *fitted["accuracy"]], rows)


def format_scores(held: Mapping[str, Document]) -> str:
    """How well gain and accuracy are predicted with each network, by title, from `benchmarks/drift.py`."""
    rows = []
    for title, document in held.items():
        found = document["summary"]
        cells = [f"{found[key]}" for key in ("sets", "sets_that_lose", "sets_learned")]
        cells += [f"{found['sign_right']:.0%}", f"{found['correlation']:.2f}", *map(points, found["gains"])]
        cells += [f"{100 * found['estimate_error']:.1f}", f"{found['coverage']:.0%}"]
        rows.append([title, *cells, f"±{100 * found['half_width']:.1f}"])
    drift = ["sets", "lose by learning", "learned", "sign right", "r of log drift and gain"]
    drift += ["gain of always learning", "of `Auto`"]
    return table(["", *drift, "error of the estimate, points", "within its interval", "interval"], rows)


def format_levels(held: Mapping[str, Document]) -> str:
    """Mean drift and gain of the sets of each level, by title."""
    rows = []
    for title, document in held.items():
        by_level: dict[int, list[Mapping[str, Any]]] = {}
        for row in document["rows"]:
            by_level.setdefault(find_level(row["set"]), []).append(row)
        for words, key, show in (("drift", "drift", "{:.2f}".format), ("gain in points", "gain", points)):
            means = [float(np.mean([row[key] for row in by_level[level]])) for level in sorted(by_level)]
            rows.append([title if key == "drift" else "", words, *map(show, means)])
    levels = ["original", *(f"level {level}" for level in range(1, 6))]
    return table(["mean over the sets", "", *levels], rows, words=(0, 1))


def find_level(name: str) -> int:
    """The level of a set; 0: the original one."""
    return int(name.rsplit("/", 1)[1]) if "/" in name else 0

"""Tables of what the drift that `Auto` follows predicts, from `benchmarks/drift.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .documents import points, table

Document = Mapping[str, Any]


def format_scores(held: Mapping[str, Document]) -> str:
    """How well gain and accuracy are predicted with each network, by title."""
    rows = []
    for title, document in held.items():
        found = document["summary"]
        rows.append(
            [
                title,
                f"{found['sets']}",
                f"{found['sets_that_lose']}",
                f"{found['sets'] - found['sets_above_the_limit']}",
                f"{found['sign_right']:.0%}",
                f"{found['correlation']:.2f}",
                *(points(gain) for gain in average_gains(document)),
                f"{100 * found['estimate_error']:.1f}",
                f"{found['coverage']:.0%}",
                f"±{100 * found['half_width']:.1f}",
            ]
        )
    drift = ["sets", "lose by learning", "below the threshold", "sign right", "r of log drift and gain"]
    drift += ["gain of always learning", "of learning from the threshold on"]
    return table(["", *drift, "error of the estimate, points", "within its interval", "interval"], rows)


def average_gains(document: Document) -> tuple[float, float]:
    """The gain of learning on all sets, and on those from the threshold on; groups of levels count alike."""
    limit, always, chosen = document["calibration"]["online"], [], []
    for levels in ((0,), (1, 2), (3, 4, 5)):
        own = [row for row in document["rows"] if find_level(row["set"]) in levels]
        always.append(np.mean([row["gain"] for row in own]))
        chosen.append(np.mean([row["gain"] * (row["drift"] >= limit) for row in own]))
    return float(np.mean(always)), float(np.mean(chosen))


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

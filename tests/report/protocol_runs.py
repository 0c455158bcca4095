"""Made-up runs with protocols: three methods with random verdicts on streams of three small sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from report_runs import make_columns, make_run
from testtime.evaluation import Run

COUNT = 30  # images of each set
SETS = ("digits", "digits-c/fog/5", "digits-c/snow/5")
METHODS: dict[str, Any] = {
    "fixed": {"mode": "fixed", "network": "joint", "settings": {}},
    "tent": {"mode": "online", "network": "joint", "settings": {"method": "tent", "lr": 0.001, "resets": 500}},
    "eata": {"mode": "online", "network": "joint", "settings": {"method": "eata", "lr": 0.5}},
}
SHARES = {"fixed": 0.5, "tent": 0.7, "eata": 0.6}
SEGMENTS = ((1, 0), (0, 10), (2, 0), (0, 20))  # set, first clean image
Records = dict[str, np.ndarray]


def configure(protocol: Mapping[str, Any] | None, streams: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """The configuration of a run whose streams visit fog, clean images, snow, clean images."""
    described: dict[str, Any] = {"methods": METHODS, "networks": {"joint": {"norm": "group"}}, "limit": None}
    if protocol is not None:
        described["protocol"] = {**protocol, "hash": "0"}
    if streams:
        lengths = [COUNT, 10, COUNT, 10]
        segments = [[SETS[source], length] for (source, _), length in zip(SEGMENTS, lengths, strict=True)]
        layout = {"sets": dict.fromkeys(SETS, COUNT), "segments": segments}
        described["streams"] = dict.fromkeys(streams, layout)
    return described | more


def draw_records(samples: np.ndarray, share: float, seed: int) -> Records:
    """Random records of samples in their order."""
    draw = np.random.default_rng(seed)
    labels = samples % COUNT % 10
    columns = make_columns(draw.random(len(samples)) < share, draw.random(len(samples)) < share, labels=labels)
    for name in ("probability", "probability_before"):
        columns[name] = draw.random(len(samples)).astype(np.float32)
    return columns | {"sample": samples.astype(np.int32)}


def stream_samples() -> np.ndarray:
    parts = [np.arange(start, start + (COUNT if source else 10)) + source * COUNT for source, start in SEGMENTS]
    return np.concatenate(parts)


def make_continual(path: Path, order: int = 0, seeds: Sequence[int] = (0,), **more: Any) -> Run:
    name = "continual/digits" + (f"/order-{order}" if order else "")
    units = {
        (method, name, seed): draw_records(stream_samples(), share, 100 * order + 10 * seed + k)
        for k, (method, share) in enumerate(SHARES.items())
        for seed in seeds
    }
    protocol = {"name": "continual", "order": order, "batch": 64}
    return make_run(path, units, configure(protocol, [name], **more))


def make_reset(path: Path, **more: Any) -> Run:
    units = {
        (method, name, 0): draw_records(np.arange(COUNT), share, 10 * k + place)
        for k, (method, share) in enumerate(SHARES.items())
        for place, name in enumerate(SETS)
    }
    return make_run(path, units, configure(None, **more))

"""What the ImageNet experiments cost, worked out from measured throughputs: every number with its division."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .documents import table

NETWORK, SIZE, SIDE = "resnet18", 224, 256
IMAGES, TESTS, SETS, EPOCHS = 1_281_167, 50_000, 16, 90
GPUS = 8
SHARE = 0.2
"""Of the images, those that are learned from with a threshold; the paper skips about 80%."""

Document = Mapping[str, Any]


def format_disk() -> str:
    """The size of the packed sets."""
    train, test = IMAGES * 3 * SIDE**2, TESTS * 3 * SIZE**2
    rows = [
        ("training set", f"{IMAGES:,} × 3 × {SIDE} × {SIDE}", f"{train / 1e9:.1f} GB"),
        ("a test set", f"{TESTS:,} × 3 × {SIZE} × {SIZE}", f"{test / 1e9:.1f} GB"),
        (f"all {SETS} test sets", f"{SETS} × {test / 1e9:.2f} GB", f"{SETS * test / 1e9:.1f} GB"),
    ]
    return _table(("packed", "bytes", "on disk"), rows)


def format_training(training: Document) -> str:
    """The time of decoding and of joint training, from what `benchmarks/train.py` wrote."""
    decode, fed = (_rate(training, name) for name in ("decode JPEGs into the packed cache", "training, fed"))
    rows = [("decode, once", f"{IMAGES:,} / {decode:,.1f}", _duration(IMAGES / decode), "", "")]
    for name, epochs in (("an epoch", 1), (f"{EPOCHS} epochs", EPOCHS)):
        detail = f"{IMAGES:,} / {fed:,.1f}" if epochs == 1 else f"{epochs} × {IMAGES:,} / {fed:,.1f}"
        seconds = epochs * IMAGES / fed
        rows.append((name, detail, _duration(seconds), "an eighth", _duration(seconds / GPUS)))
    return _table(("joint training", "1 GPU", "", f"{GPUS} GPUs", ""), rows)


def format_evaluation(engine: Document, training: Document) -> str:
    """The time of the evaluation, from what `benchmarks/engine.py` and `benchmarks/train.py` wrote."""
    total, rows = SETS * TESTS, []
    observe = _rate(training, "look at images")
    rows.append(("fixed", *_time(total, 1, observe), *_time(total // GPUS, 1, observe)))
    for precision in ("fp32", "tf32", "bf16"):
        standard = _best(_counted(engine, "episodes of 10 steps", precision).values())
        streams = _best(row for count, row in _counted(engine, "streams", precision).items() if count <= SETS)
        # A stream cannot be divided: on several GPUs each has its sets one after the other.
        alone = _best(row for row in _rows(engine) if row["name"] == f"one online stream, {precision}")
        for mode, one, several in (("standard", standard, standard), ("online", streams, alone)):
            if one is None or several is None:
                continue
            name = f"{mode}, {precision}"
            rows.append((name, *_time(total, 1, one), *_time(total // GPUS, 1, several)))
            gated = (*_time(total, SHARE, one, observe), *_time(total // GPUS, SHARE, several, observe))
            rows.append((f"{name}, threshold", *gated))
    return _table(("evaluation", "1 GPU", "", f"{GPUS} GPUs", ""), rows)


def format_memory(engine: Document) -> str:
    """The memory that a stream takes, from what `benchmarks/engine.py` wrote."""
    rows = []
    for precision in ("fp32", "tf32", "bf16"):
        counted = _counted(engine, "streams", precision)
        peaks = {count: row["peak_mib"] for count, row in counted.items() if row["peak_mib"]}
        if len(peaks) > 1:
            low, high = min(peaks), max(peaks)
            detail = f"({peaks[high]:,.0f} − {peaks[low]:,.0f}) MiB / ({high} − {low})"
            rows.append((precision, detail, f"{(peaks[high] - peaks[low]) / (high - low) / 1024:,.2f} GiB"))
    return _table((f"memory of a stream at {SIZE}×{SIZE}", "arithmetic", "each"), rows)


def _time(count: int, share: float, rate: float, observe: float | None = None) -> tuple[str, str]:
    """Learning from `share` of the images at one rate after observing all of them at another, with its arithmetic."""
    learned = f"{count:,} / {rate:,.1f}" if share == 1 else f"{share:g} × {count:,} / {rate:,.1f}"
    observed = "" if observe is None else f"{count:,} / {observe:,.1f} + "
    return observed + learned, _duration((0 if observe is None else count / observe) + share * count / rate)


def _rows(document: Document) -> list[Document]:
    """The rows of our network at our size; those of the engine are of one size, which they do not name."""
    return [row for row in document["rows"] if row["network"] == NETWORK and row.get("size", SIZE) == SIZE]


def _rate(document: Document, name: str) -> float:
    return next(row["images_per_s"] for row in _rows(document) if row["name"].startswith(name))


def _counted(engine: Document, what: str, precision: str) -> dict[int, Document]:
    """Rows such as `16 streams, bf16` by their number."""
    found = ((re.fullmatch(rf"(\d+) {what}, {precision}", row["name"]), row) for row in _rows(engine))
    return {int(match[1]): row for match, row in found if match}


def _best(rows: Iterable[Document]) -> float | None:
    return max((row["images_per_s"] for row in rows), default=None)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(heads, rows, words=(0, 1, 3))

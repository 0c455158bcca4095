"""What the ImageNet experiments cost, worked out from measured throughputs: `python -m testtime.report.costs`.

Reads `results/photographs-h200.json` (benchmarks/train.py) and `results/engine-h200.json` (benchmarks/engine.py) and
writes the part of `docs/imagenet.md` between two comments: every number with the division that gives it. What has not
been measured is said to be so. With `--check` nothing is written; the exit code says whether the document is current.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime.storage import printable, read_json, write_whole

BEGIN, END = "<!-- begin: results/photographs-h200.json, results/engine-h200.json -->", "<!-- end -->"
TRAINING, ENGINE = Path("results/photographs-h200.json"), Path("results/engine-h200.json")
DOCUMENT = Path("docs/imagenet.md")

NETWORK, SIZE, SIDE = "resnet18", 224, 256
IMAGES, TESTS, SETS, EPOCHS = 1_281_167, 50_000, 16, 90
GPUS = 8
SHARE = 0.2
"""Of the images, those that are learned from with a threshold; the paper skips about 80%."""

Document = Mapping[str, Any]


def tell_costs(training: Document | None, engine: Document | None) -> str:
    """The costs as Markdown.

    Args:
        training: What benchmarks/train.py wrote, or None.
        engine: What benchmarks/engine.py wrote, or None.
    """
    parts = [_tell_disk(), _tell_training(training), _tell_evaluation(engine, training), _tell_memory(engine)]
    return "\n\n".join(parts)


def _tell_disk() -> str:
    train, test = IMAGES * 3 * SIDE**2, TESTS * 3 * SIZE**2
    rows = [
        ("training set", f"{IMAGES:,} × 3 × {SIDE} × {SIDE}", f"{train / 1e9:.1f} GB"),
        ("a test set", f"{TESTS:,} × 3 × {SIZE} × {SIZE}", f"{test / 1e9:.1f} GB"),
        (f"all {SETS} test sets", f"{SETS} × {test / 1e9:.2f} GB", f"{SETS * test / 1e9:.1f} GB"),
    ]
    return _table(("packed", "bytes", "on disk"), rows)


def _tell_training(training: Document | None) -> str:
    decode, fed = (_rate(training, name) for name in ("decode JPEGs into the packed cache", "training, fed"))
    if training is None or fed is None:
        return _missing("The throughput of training", TRAINING)
    rows = []
    if decode is not None:
        rows.append(("decode, once", f"{IMAGES:,} / {decode:,.1f}", _duration(IMAGES / decode), "", ""))
    for name, epochs in (("an epoch", 1), (f"{EPOCHS} epochs", EPOCHS)):
        detail = f"{IMAGES:,} / {fed:,.1f}" if epochs == 1 else f"{epochs} × {IMAGES:,} / {fed:,.1f}"
        seconds = epochs * IMAGES / fed
        rows.append((name, detail, _duration(seconds), "an eighth", _duration(seconds / GPUS)))
    share = next((row["share_of_steps"] for row in _rows(training) if row["name"].startswith("training, fed")), None)
    notes = f"`{training['command']}` on {training['hardware']}; photographs: {training['photographs']}."
    if share is not None:
        notes += f" Fed from the cache, training runs at {share:.0%} of its rate on images that are on the GPU already."
    notes += f" {GPUS} GPUs are taken to be {GPUS} times as fast; that has not been measured."
    return f"{_table(('joint training', '1 GPU', '', f'{GPUS} GPUs', ''), rows)}\n\n{_wrap(notes)}"


def _tell_evaluation(engine: Document | None, training: Document | None) -> str:
    if engine is None:
        return _missing("The throughput of test-time training", ENGINE)
    total, rows = SETS * TESTS, []
    look = _rate(training, "look at images")
    if look is not None:
        rows.append(("fixed", *_time(total, 1, look), *_time(total // GPUS, 1, look)))
    for precision in ("fp32", "tf32", "bf16"):
        standard, alone = _standard(engine, precision), _rate(engine, f"one online stream, {precision}")
        # A stream cannot be cut: on several GPUs each has its sets one after the other.
        modes = (("standard", standard, standard), ("online", _online(engine, precision), alone))
        for mode, one, several in modes:
            if one is None or several is None:
                continue
            name = f"{mode}, {precision}"
            rows.append((name, *_time(total, 1, one), *_time(total // GPUS, 1, several)))
            if look is not None:
                times = (*_time(total, SHARE, one, look), *_time(total // GPUS, SHARE, several, look))
                rows.append((f"{name}, threshold", *times))
    if not rows:
        return _missing(f"The throughput of {NETWORK}", ENGINE)
    notes = (
        f"{SETS} sets × {TESTS:,} images, 64 copies; standard is 10 steps an image, online one. Times are images over "
        f"images/s, as `{engine['command']}` measured them on {engine['hardware']}. On {GPUS} GPUs each has "
        f"{total // GPUS:,} images, of {SETS // GPUS} sets. With the threshold all images are looked at, {SHARE:.0%} "
        "are learned from; looks were measured in batches of 64, a stream's are smaller: the threshold's online rows "
        "are lower bounds. Decoding, and what several GPUs cost each other, is in none of them."
    )
    heads = ("evaluation", "1 GPU", "", f"{GPUS} GPUs", "")
    return f"{_table(heads, rows)}\n\n{_wrap(notes)}"


def _time(count: int, share: float, rate: float, look: float | None = None) -> tuple[str, str]:
    """The time of `share` of the images at one rate and of a look at all of them at another, after its arithmetic."""
    learned = f"{count:,} / {rate:,.1f}" if share == 1 else f"{share:g} × {count:,} / {rate:,.1f}"
    looked = "" if look is None else f"{count:,} / {look:,.1f} + "
    return looked + learned, _duration((0 if look is None else count / look) + share * count / rate)


def _tell_memory(engine: Document | None) -> str:
    rows = []
    for precision in ("fp32", "tf32", "bf16"):
        peaks = {count: row["peak_mib"] for count, row in _counted(engine, "streams", precision).items()}
        peaks = {count: peak for count, peak in peaks.items() if peak}
        if len(peaks) < 2:
            continue
        low, high = sorted(peaks)[0], sorted(peaks)[-1]
        each = (peaks[high] - peaks[low]) / (high - low)
        detail = f"({peaks[high]:,.0f} − {peaks[low]:,.0f}) MiB / ({high} − {low})"
        rows.append((precision, detail, f"{each / 1024:,.2f} GiB"))
    if not rows:
        return _missing(f"The memory of a stream at {SIZE}×{SIZE}", ENGINE)
    return _table((f"memory of a stream at {SIZE}×{SIZE}", "arithmetic", "each"), rows)


def _rows(document: Document | None) -> list[Document]:
    """The rows of our network at our size; the engine's measure one size alone and do not name it."""
    found = [] if document is None else document["rows"]
    return [row for row in found if row["network"] == NETWORK and row.get("size", SIZE) == SIZE]


def _rate(document: Document | None, name: str) -> float | None:
    return next((row["images_per_s"] for row in _rows(document) if row["name"].startswith(name)), None)


def _counted(engine: Document | None, what: str, precision: str) -> dict[int, Document]:
    """Rows such as `16 streams, bf16` by their number."""
    found = {}
    for row in _rows(engine):
        match = re.fullmatch(rf"(\d+) {what}, {precision}", row["name"])
        if match:
            found[int(match[1])] = row
    return found


def _standard(engine: Document, precision: str) -> float | None:
    rates = [row["images_per_s"] for row in _counted(engine, "episodes of 10 steps", precision).values()]
    return max(rates, default=None)


def _online(engine: Document, precision: str) -> float | None:
    """The best rate of streams side by side, of which there are as many as sets."""
    counted = _counted(engine, "streams", precision)
    return max((row["images_per_s"] for count, row in counted.items() if count <= SETS), default=None)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _missing(what: str, path: Path) -> str:
    return _wrap(f"{what} has not been measured: `{path}` does not have it.")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---:" if place and place % 2 == 0 else "---" for place in range(len(heads))]
    lines = [heads, marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def update(document: str, training: Document | None, engine: Document | None) -> str:
    """The document with the part between the comments made anew.

    Raises:
        ValueError: The comments are not there.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The document must have the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{tell_costs(training, engine)}\n{END}{after}"


def read(path: Path) -> Document | None:
    """A results file, or None where there is none."""
    return read_json(path) if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the document of the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Work out ImageNet's costs from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if not current")
    check = parser.parse_args(arguments).check
    try:
        text = DOCUMENT.read_text(encoding="utf-8")
        wanted = update(text, read(TRAINING), read(ENGINE))
    except (OSError, ValueError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    if check:
        return int(wanted != text)
    write_whole(DOCUMENT, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

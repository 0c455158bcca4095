"""Sample images whose prediction changed, selected by a fixed rule."""

from __future__ import annotations

import base64
import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from testtime import data
from testtime.data.sets import TestSet
from testtime.report.results import BASELINE, MEAN, Results, Table, column_title
from testtime.report.sources import RunUnit, fingerprints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetLookup:
    """Opens test sets by name.

    Attributes:
        root: Root folder of the data sets.
        sets: Test sets that cannot be opened by name.
    """

    root: str | os.PathLike[str] | None = None
    sets: Mapping[str, TestSet] = field(default_factory=dict)

    def open(self, name: str) -> TestSet:
        """Open a test set."""
        return self.sets[name] if name in self.sets else data.open(name, self.root)


@dataclass(frozen=True)
class Sample:
    """An image and its predictions.

    Attributes:
        column: The title of its set.
        number: Its sample index.
        label: The true class.
        before: The prediction of `fixed`, or of the network just before learning from the image.
        after: The prediction after learning.
        is_right: Whether `after` is right.
        picture: The image as PNG.
    """

    column: str
    number: int
    label: str
    before: str
    after: str
    is_right: bool
    picture: bytes

    @property
    def source(self) -> str:
        """The image as a `data:` URL."""
        return "data:image/png;base64," + base64.b64encode(self.picture).decode()


def pick_samples(results: Results, table: Table, lookup: SetLookup | None = None) -> tuple[list[Sample], str]:
    """Select from each set of a table an image that adaptation corrected, and from every fourth also one that it broke.

    It is the median of the flipped images by sample index.

    Args:
        results: The results.
        table: The table whose sets to use.
        lookup: Opens the sets; by default from the default data root.

    Returns:
        The samples, and the reason if there are none.
    """
    method = next((name for name in ("online", "episodic") if name in table.rows), None)
    if method is None:
        return [], "No method of the run learns, so no prediction changed."
    samples: list[Sample] = []
    columns = [column for column in table.columns if column != MEAN and column in table.rows[method]]
    for index, column in enumerate(columns):
        name = table.set_name(column)
        sources = results.sources[method, name]
        if any(source.unit.held is not None for source in sources[:1]):
            return [], "Sample images are omitted: a summary contains no records."
        flips = _find_flips(sources[0], results.sources.get((BASELINE, name), ()))
        wanted = [list(flips.right)[len(flips.right) // 2 :][:1]]
        if index % 4 == 0:
            wanted.append(list(flips.wrong)[len(flips.wrong) // 2 :][:1])
        numbers = [number for part in wanted for number in part]
        if not numbers:
            continue
        try:
            images, classes = _open(name, numbers, lookup or SetLookup(), sources[0])
        except (ValueError, OSError, IndexError) as error:
            log.info("%s: no sample images for the report (%s)", name, error)
            return [], f"Sample images are omitted: {error}"
        for number, image in zip(numbers, images, strict=True):
            label, before, after = (flips.right | flips.wrong)[number]
            samples.append(
                Sample(
                    column_title(column),
                    number,
                    _name(label, classes),
                    _name(before, classes),
                    _name(after, classes),
                    number in flips.right,
                    make_png(image),
                )
            )
    return samples, "" if samples else "No prediction changed between right and wrong."


@dataclass(frozen=True)
class _Flips:
    """Label, prediction before and prediction after, by sample index, of images that became right and wrong."""

    right: dict[int, tuple[int, int, int]]
    wrong: dict[int, tuple[int, int, int]]


def _find_flips(source: RunUnit, fixed: tuple[RunUnit, ...]) -> _Flips:
    after = source.unit.columns()
    order = np.argsort(after["sample"], kind="stable")
    after = {name: column[order] for name, column in after.items()}
    before, was_right = after["prediction_before"], after["was_right"]
    if fixed and fixed[0].unit.held is None:
        base = fixed[0].unit.columns()
        order = np.argsort(base["sample"], kind="stable")
        before, was_right = base["prediction"][order], base["is_right"][order]
    found = zip(
        *(after[name].tolist() for name in ("sample", "label")),
        before.tolist(),
        after["prediction"].tolist(),
        was_right.astype(bool).tolist(),
        after["is_right"].astype(bool).tolist(),
        strict=True,
    )
    right: dict[int, tuple[int, int, int]] = {}
    wrong: dict[int, tuple[int, int, int]] = {}
    for number, label, old, new, was, now in found:
        if was != now:
            (right if now else wrong)[number] = label, old, new
    return _Flips(right, wrong)


def _open(name: str, numbers: list[int], lookup: SetLookup, source: RunUnit) -> tuple[Tensor, tuple[str, ...]]:
    test_set = lookup.open(name)
    expected = fingerprints(source.run).get(name)
    if expected is not None and expected != test_set.fingerprint():
        raise ValueError(f"{name} is not the set used in the run.")
    return test_set.images(numbers), test_set.classes


def _name(number: int, classes: tuple[str, ...]) -> str:
    return classes[number] if 0 <= number < len(classes) else str(number)


def make_png(image: Tensor, side: int = 96) -> bytes:
    """Encode an image, uint8 `(C, H, W)`, as PNG, about `side` pixels wide.

    Small images are enlarged by nearest-neighbour interpolation.
    """
    from PIL import Image

    pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    scale = max(1, side // max(picture.size))
    if scale > 1:
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    picture.thumbnail((2 * side, 2 * side))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()

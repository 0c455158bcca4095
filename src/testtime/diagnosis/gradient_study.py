"""Gradient correlation on many test sets, stored in one file (`testtime gradients`).

The file is rewritten atomically after each set; a later run measures only the missing sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime import data as datasets
from testtime.checks import (
    Kind,
    check_entries,
    check_table,
    is_number,
    is_table,
    is_table_of,
    is_text,
)
from testtime.data import families
from testtime.data.sets import DerivedSet, OnBad, TensorSet, TestSet
from testtime.diagnosis.batch_gradients import CONFIDENT
from testtime.diagnosis.correlation import BATCH, SINGLE, Correlation, find_labels, gradient_correlation
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.progress import Progress, read_ahead
from testtime.provenance import describe_machine, find_differences
from testtime.storage import FileError, read_json, write_atomic

_READ = 1000
_FORMAT = 2  # format 1 had no `balance`
LUMA = (0.299, 0.587, 0.114)
_STUDY: dict[str, Kind] = {"configuration": ("a table", is_table), "sets": ("tables", is_table_of(is_table))}
_SET: dict[str, Kind] = {
    "name": ("a string", is_text),
    "fingerprint": ("a string", is_text),
    **dict.fromkeys(
        ("batch", "single", "stand_in_batch", "stand_in_single", "balance"),
        ("an agreement or null", lambda value: _is_agreement(value)),
    ),
    **dict.fromkeys(
        ("task_loss", "task_error", "entropy", "error", "loss", "confident", "confidence", "seconds", "images"),
        ("a number or null", lambda value: _is_value(value)),
    ),
}


class StudyError(FileError):
    """A file that is not a gradient study, or one with another configuration."""


def name_sets(patterns: Iterable[str]) -> list[str]:
    """Return unique names for `open_for` from patterns, see `testtime.data.expand`, and image folders.

    Raises:
        ValueError: A pattern matches nothing.
    """
    found: dict[str, None] = {}
    for text in patterns:
        found.update(dict.fromkeys([text] if families.is_folder(text) else datasets.expand(text)))
    return list(found)


def open_for(
    net: YNet,
    data: str,
    root: str | Path | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> TestSet:
    """Open a test set in the image size and channels of a network.

    Args:
        net: The network.
        data: A set's name, or an image folder.
        root: Root folder of the data sets.
        on_bad: What to do about unreadable images of a folder; None does not check them in advance.
        progress: Called while the images of a folder are checked, see `on_bad`.

    Raises:
        ValueError: The set does not exist, its classes differ from the network's, or pictures would have to be resized
            to a size that is unknown.
        DataError: The set is missing or damaged.
    """
    card, options = net.card, {}
    is_folder = families.is_folder(data)
    family = families.find("folder" if is_folder else data)
    if family.sized and (family.pictures or card.size is not None):
        options["size"] = card.require_size()
    if not is_folder:
        if family.is_subset and card.classes:
            options["classes"] = card.classes
        return datasets.open(data, root, **options)
    folder = Path(data).expanduser()
    options |= {"on_bad": on_bad, "progress": progress}
    found = datasets.open("folder", folder, **options)
    if found.labels is not None and card.classes:
        if set(found.classes) <= set(card.classes):
            found = datasets.open("folder", folder, classes=card.classes, **options)
        else:
            found.labels = None  # the folders are not the network's classes
    return Gray(found) if net.channels == 1 else found


class Gray(DerivedSet):
    """A set converted to greyscale, for networks with one input channel."""

    def __init__(self, base: TestSet) -> None:
        self.base = base
        self.name, self.classes, self.labels, self.right = base.name, base.classes, base.labels, base.right
        self.ordered, self.origin = base.ordered, f"{base.origin}, in gray"

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, *self.base.shape[1:]

    def _read(self, numbers: Tensor) -> Tensor:
        weights = torch.tensor(LUMA, dtype=torch.float32, device="cpu").view(3, 1, 1)
        luma = (self.base.images(numbers) * weights).sum(1, keepdim=True)
        return luma.round().clamp(0, 255).to(torch.uint8)


def run_study(
    net: YNet,
    names: Sequence[str],
    out: str | Path,
    *,
    root: str | Path | None = None,
    limit: int | None = None,
    batch: int = BATCH,
    single: int = SINGLE,
    confident: float = CONFIDENT,
    precision: Precision = "fp32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure gradient correlation on the sets that a file does not contain yet.

    Args:
        net: The network, on the device to use.
        names: The sets.
        out: The file. An existing one must have the same network and settings.
        root: Root folder of the data sets.
        limit: Maximum number of images per set.
        batch: See `gradient_correlation`.
        single: See `gradient_correlation`.
        confident: See `gradient_correlation`.
        precision: See `gradient_correlation`.
        progress: Called after each set with the sets done, their total, and the result as text.

    Returns:
        The content of the file.

    Raises:
        StudyError: The file is not a gradient study, or its network, settings or images differ.
        ValueError: An argument is out of range.
        DataError: A set is missing or damaged. Sets measured before remain in the file.
    """
    path = Path(out)
    settings = {"limit": limit, "batch": batch, "single": single, "confident": confident, "precision": precision}
    configuration = {"format": _FORMAT, "network": net.fingerprint(), "architecture": net.card.architecture, **settings}
    sets = {name: open_for(net, name, root) for name in dict.fromkeys(names)}
    fingerprints = {name: test_set.fingerprint() for name, test_set in sets.items()}
    study = read_gradient_study(path) if path.exists() else {"configuration": configuration, "sets": {}}
    different = find_differences(study["configuration"], configuration)
    if different:
        raise StudyError(path, f"another configuration ({'; '.join(different)})", "write to another file")
    for name, fingerprint in fingerprints.items():
        if study["sets"].get(name, {"fingerprint": fingerprint}).get("fingerprint") != fingerprint:
            raise StudyError(path, f"was made with other images of {name}", "write to another file")
    study |= describe_machine(next(net.parameters()).device)
    missing = {name: test_set for name, test_set in sets.items() if name not in study["sets"]}
    loaded = ((name, _load(test_set, net, limit)) for name, test_set in missing.items())
    begin = time.perf_counter()
    for done, (name, test_set) in enumerate(read_ahead(loaded), start=1):
        found = gradient_correlation(
            net,
            None,
            test_set,
            limit=limit,
            batch=batch,
            single=single,
            confident=confident,
            precision=precision,
        )
        seconds = time.perf_counter() - begin
        about = {"name": name, "fingerprint": fingerprints[name], "seconds": round(seconds, 3)}
        study["sets"][name] = found.describe() | about
        write_atomic(path, json.dumps(study, indent=1, allow_nan=False) + "\n")
        if progress is not None:
            text = f"{format_correlation(found)}  {seconds:.1f} s"
            progress(len(sets) - len(missing) + done, len(sets), text)
        begin = time.perf_counter()
    return study


def read_gradient_study(path: str | Path) -> dict[str, Any]:
    """Read a gradient study.

    Raises:
        StudyError: The file is missing or not a gradient study.
    """
    try:
        study = read_json(path, 1 << 28)
        check_table(study)
        check_entries(study, _STUDY, list(_STUDY))
        for entry in study["sets"].values():
            check_entries(entry, _SET, ["stand_in_batch"])
    except FileError as error:
        raise StudyError(path, error.fault) from None
    except ValueError as error:
        raise StudyError(path, f"not a gradient study ({str(error).removesuffix('.')})") from None
    return study


def format_correlation(found: Correlation) -> str:
    """Format a result as one line."""
    true = "" if found.batch is None else f"inner {found.batch.inner:+.4g}  cosine {found.batch.cosine:+.3f}  "
    unlabelled = {"stand-in": found.stand_in_batch, "balance": found.balance}
    guess = "".join(f"{name} {one.cosine:+.3f}  " for name, one in unlabelled.items() if one is not None)
    return f"{found.name}  {true}{guess}{found.images:,} images"


def _is_value(value: Any) -> bool:
    """Whether a value is None or a number of reasonable size."""
    return value is None or (is_number(value) and abs(value) < 1e40)


def _is_agreement(value: Any) -> bool:
    return value is None or (
        is_table(value) and all(_is_value(one) for name, one in value.items() if name in ("inner", "cosine"))
    )


def _load(test_set: TestSet, net: YNet, limit: int | None) -> TestSet:
    """Load a set's images into memory, where possible, with labels only if they are class indices of the network."""
    if test_set.right is not None or isinstance(test_set, TensorSet):
        return test_set
    count = len(test_set) if limit is None else min(limit, len(test_set))
    images = torch.cat([chunk.images for chunk in test_set.chunks(_READ, slice(count))])
    labels = find_labels(test_set, net)
    return TensorSet(test_set.name, images, None if labels is None else labels[:count], test_set.classes)

"""Streams and runs in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from testtime.evaluation.records import Record
from testtime.evaluation.summary import open_runs


def follow(records: Iterable[Record], writer: SummaryWriter, tag: str = "stream", every: int = 100) -> Iterator[Record]:
    """Yield records unchanged, and write their means over every so many images as scalars.

    The scalars are `TAG/error` and `TAG/error before` of images with labels, `TAG/loss before` and `TAG/loss after`,
    `TAG/adapted` and `TAG/rolled back`; the step is the number of images so far.

    Args:
        records: Those of `testtime.evaluate`.
        writer: Where to write.
        tag: Prefix of the names.
        every: Images per value.

    Raises:
        ValueError: `every` is less than 1.
    """
    if every < 1:
        raise ValueError(f"`every` must be at least 1, got {every}.")
    return _follow(records, writer, tag, every)


def _follow(records: Iterable[Record], writer: SummaryWriter, tag: str, every: int) -> Iterator[Record]:
    block: list[Record] = []
    done = 0
    for done, record in enumerate(records, start=1):
        block.append(record)
        if len(block) == every:
            _write_block(writer, tag, block, done)
            block.clear()
        yield record
    if block:
        _write_block(writer, tag, block, done)


def _write_block(writer: SummaryWriter, tag: str, block: list[Record], step: int) -> None:
    values = {
        "loss before": [record.loss_before for record in block],
        "loss after": [record.loss_after for record in block],
        "adapted": [record.adapted for record in block],
        "rolled back": [record.rolled_back for record in block],
    }
    if all(record.label is not None for record in block):
        values["error"] = [not record.is_right for record in block]
        values["error before"] = [not record.was_right for record in block]
    for name, numbers in values.items():
        writer.add_scalar(f"{tag}/{name}", float(np.mean(numbers)), step)


def write_run(run: str | Path, folder: str | Path) -> int:
    """Write the errors of a run of `testtime eval`: a TensorBoard run per method and seed, a scalar per labelled set.

    Args:
        run: The run's folder, or a summary file.
        folder: TensorBoard's folder, `--logdir`.

    Returns:
        The number of scalars.

    Raises:
        RunError: There is no run at the path, or it is damaged.
    """
    count = 0
    for one in open_runs(run):
        for method, seed in sorted({(unit.method, unit.seed) for unit in one.units}):
            with SummaryWriter(str(Path(folder) / one.path.name / f"{method}-{seed}")) as writer:
                for unit in one.units:
                    if (unit.method, unit.seed) == (method, seed) and unit.about["counts"]["labelled"]:
                        right = unit.verdicts().right
                        writer.add_scalar(f"error/{unit.set_name}", 1 - float(np.mean(right)), len(right))
                        count += 1
    return count

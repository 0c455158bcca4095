"""The training loop of all methods, with a checkpoint after each epoch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from testtime import kernels, tasks
from testtime.data.held_out import find_source
from testtime.data.sets import TestSet
from testtime.networks.statistics import collect
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic
from testtime.progress import Progress
from testtime.storage import hold_folder
from testtime.training.checkpoints import Folder, make_record
from testtime.training.pool import Pool
from testtime.training.processes import rank, world
from testtime.training.recipe import Recipe, TrainingError
from testtime.training.replicated import Replicated
from testtime.training.trainer import Trainer, fit_together
from testtime.training.training import Training, check_networks, check_pool


def train(
    net: YNet,
    images: Tensor | TestSet,
    labels: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    folder: str | Path | None = None,
    test: tuple[Tensor, Tensor] | TestSet | None = None,
    target: Tensor | TestSet | None = None,
    classes: Sequence[str] = (),
    statistics: int = 0,
    progress: Progress | None = None,
) -> YNet:
    """Train a network in place, on its device.

    Args:
        net: The network; training starts from its weights. The augmentation is that of its card.
        images: `(N, C, H, W)`, uint8 or float in [0, 1]; or a labelled set.
        labels: Class labels `(N,)`; None for a set.
        recipe: Method and hyperparameters; by default the paper's joint training on CIFAR-10.
        folder: The run's folder, with `checkpoint.safetensors` and `record.json` after each epoch and
            `network.safetensors` at the end. An existing checkpoint is resumed.
        test: Images and labels, or a labelled set, evaluated after each epoch.
        target: Unlabelled images of the target set, for "uda".
        classes: Class names; by default those of the set or of the network's card.
        statistics: Number of training images on which to collect the network's statistics at the end, see `collect`;
            the task is also measured on images that were held out, if there are any.
        progress: Called with the steps done, their total, and the results of the last epoch.

    Returns:
        The same network, in evaluation mode; `card.record` is the training record.

    Raises:
        ValueError: The arguments are inconsistent, or the folder contains a run with another configuration.
        FolderError: The folder is in use by another process.
        CheckpointError: The folder's checkpoint cannot be read.
        TrainingError: The loss is no longer finite; the last good checkpoint remains.
    """
    folders = None if folder is None else [folder]
    targets = None if target is None else [target]
    given: Any = {"folders": folders, "test": test, "targets": targets, "classes": classes, "statistics": statistics}
    return train_together([net], images, labels, recipe, **given, progress=progress)[0]


def train_together(
    nets: Sequence[YNet],
    images: Tensor | TestSet,
    labels: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    seeds: Sequence[int] | None = None,
    folders: Sequence[str | Path] | None = None,
    test: tuple[Tensor, Tensor] | TestSet | None = None,
    targets: Sequence[Tensor | TestSet] | None = None,
    classes: Sequence[str] = (),
    statistics: int = 0,
    progress: Progress | None = None,
) -> list[YNet]:
    """Train several networks with one recipe, for several seeds or target sets.

    The results equal those of separate trainings, up to rounding, and each network has its own folder. Networks of one
    architecture of this package are trained in parallel as replicas of one network: a single one does not saturate a
    GPU, and on a CPU the replicas' compiled kernels are faster than torch's. Others are trained sequentially. When an
    interrupted group resumes, runs that are an epoch behind catch up first.

    Args:
        nets: The networks, distinct objects on one device; their weights may be equal.
        images: As for `train`.
        labels: As for `train`.
        recipe: As for `train`.
        seeds: The seed of each training; by default the recipe's.
        folders: The folder of each training.
        test: As for `train`.
        targets: The target set of each training, for "uda"; of the same image size, but any length.
        classes: As for `train`.
        statistics: As for `train`.
        progress: Called with the steps done, their total, and the results of the first network's last epoch.

    Returns:
        The same networks, as returned by `train`.

    Raises:
        ValueError: As for `train`, or the sequences differ in length.
        FolderError: A folder is in use by another process.
        CheckpointError: A folder's checkpoint cannot be read.
        TrainingError: The loss of a network is no longer finite; the last good checkpoints of all remain.
    """
    with torch.inference_mode(False), torch.enable_grad():  # regardless of the caller's mode
        return _train(
            nets,
            images,
            labels,
            recipe or Recipe(),
            seeds,
            folders,
            test,
            targets,
            tuple(classes),
            statistics,
            progress,
        )


def _train(
    nets: Sequence[YNet],
    images: Tensor | TestSet,
    labels: Tensor | None,
    recipe: Recipe,
    seeds: Sequence[int] | None,
    folders: Sequence[str | Path] | None,
    test: tuple[Tensor, Tensor] | TestSet | None,
    targets: Sequence[Tensor | TestSet] | None,
    classes: tuple[str, ...],
    statistics: int,
    progress: Progress | None,
) -> list[YNet]:
    """Implement `train_together`, with gradients enabled."""
    device = check_networks(nets)
    for name, given in (("seeds", seeds), ("folders", folders), ("targets", targets)):
        if given is not None and len(given) != len(nets):
            raise ValueError(f"`{name}` must have one entry for each of the {len(nets)} networks, got {len(given)}.")
    if folders is not None and len({Path(folder).resolve() for folder in folders}) < len(nets):
        raise ValueError("`folders` must be different folders.")
    if progress is not None:
        progress(0, 0, "reading the images")
    source = Pool("images", images, labels, device)
    held_out = None
    if test is not None:
        held_out = Pool("test", *test, device) if isinstance(test, tuple) else Pool("test", test, None, device)
    runs = []
    for index, net in enumerate(nets):
        target = None if targets is None else Pool("target", targets[index], None, device)
        seeded = recipe if seeds is None else replace(recipe, seed=seeds[index])
        training = Training(net, seeded, source, target)
        _check_labels(source, training.outputs)
        if held_out is not None:
            _check_labels(held_out, training.outputs)
            check_pool(net, held_out)
        names = classes or source.classes or net.card.classes
        if names and len(names) != training.outputs:
            raise ValueError(f"The network has {training.outputs} outputs, but there are {len(names)} classes.")
        net.describe(classes=names, size=net.card.size or source.shape[1], task=tasks.describe(training.task))
        configuration = training.describe(held_out)
        folder = None if folders is None else Folder(Path(folders[index]), configuration)
        runs.append(_Run(training, configuration, folder))
    with contextlib.ExitStack() as stack:
        for folder in folders or () if rank() == 0 else ():
            stack.enter_context(hold_folder(folder))
        for run in runs:
            run.load()
        for run in runs:
            if run.folder is not None:
                run.folder.begin(run.history, device)
        for group, until in _groups(runs, recipe.epochs):
            _train_group(group, until, held_out, progress)
        for run in runs:
            run.finish(statistics, progress)
    return list(nets)


@dataclass
class _Run:
    """A training, its folder, and the entries of its finished epochs."""

    training: Training
    configuration: dict[str, Any]
    folder: Folder | None
    history: list[dict[str, Any]] = field(default_factory=list)

    def load(self) -> None:
        if self.folder is not None:
            self.history = self.folder.load(self.training)

    def add(self, entry: dict[str, Any]) -> None:
        self.history.append(entry)
        if self.folder is not None:
            self.folder.save(self.training, self.history)

    def finish(self, statistics: int, progress: Progress | None) -> None:
        net = self.training.net.eval()
        net.describe(record=make_record(self.configuration, self.history, self.training.device))
        net.statistics = None  # those of other weights
        if statistics:
            images = self.training.pools[0].source
            unseen = images.held_out if isinstance(images, TestSet) else None
            collect(net, images, unseen=unseen, count=statistics, progress=progress)
        if self.folder is not None and rank() == 0:
            net.save(self.folder.network)


def _groups(runs: Sequence[_Run], epochs: int) -> Iterator[tuple[list[_Run], int]]:
    """Yield groups of runs to train together, and up to which epoch; runs that are behind catch up first."""
    while True:
        done = sorted({len(run.history) for run in runs})
        if done[0] >= epochs:
            return
        until = [*done, epochs][1]
        group = [run for run in runs if len(run.history) == done[0]]
        if fit_together([run.training for run in group]):
            yield group, until
        else:
            yield from (([run], until) for run in group)


def _train_group(runs: Sequence[_Run], until: int, test: Pool | None, progress: Progress | None) -> None:
    """Train runs at the same epoch together, up to another."""
    trainer = Trainer([run.training for run in runs], len(runs[0].history))
    trainer.share()
    for epoch in range(len(runs[0].history), until):
        entries = _train_epoch(trainer, epoch, test, runs, progress)
        for run, entry in zip(runs, entries, strict=True):
            run.add(entry)
    trainer.finish()


def _train_epoch(
    trainer: Trainer, epoch: int, test: Pool | None, runs: Sequence[_Run], progress: Progress | None
) -> list[dict[str, Any]]:
    """Train one epoch; returns the record entry of each run."""
    start, done, total = time.perf_counter(), epoch * trainer.steps, trainer.recipe.epochs * trainer.steps
    name = None if test is None else test.description.get("name")
    text = _format_first([run.history[-1] for run in runs], name) if runs[0].history else ""
    trainer.set_lr(trainer.recipe.lr_at(epoch))
    trainer.model.train()
    trainer.sums.zero_()
    for step, (indices, number, pixels) in enumerate(trainer.batches(epoch), start=1):
        trainer.step(indices, number, pixels)
        if progress is not None and step < trainer.steps:
            progress(done + step, total, text)
    head = {"epoch": epoch + 1, "lr": trainer.recipe.lr_at(epoch)}
    entries: list[dict[str, Any]] = [{**head, **entry} for entry in trainer.read()]
    for run, entry in zip(runs, entries, strict=True):
        _check_finite(run, entry, trainer.recipe.lr_at(epoch))
    trainer.share()  # synchronise Batch Normalization statistics before they are saved
    if test is not None:
        for entry, error in zip(entries, _errors(trainer, test), strict=True):
            entry["test_error"] = error
    for entry in entries:
        entry["seconds"] = round(time.perf_counter() - start, 3)
        if len(runs) > 1:
            entry["together"] = len(runs)  # `seconds` is for all of them
    if progress is not None:
        progress(done + trainer.steps, total, _format_first(entries, name))
    return entries


def _check_finite(run: _Run, entry: dict[str, Any], lr: float) -> None:
    if math.isfinite(entry["loss"]) and run.training.is_finite():
        return
    remedy = "no checkpoint was saved, since there is no folder"
    if run.folder is not None:
        remedy = f"no checkpoint was saved in {run.folder.checkpoint.parent} yet"
        if run.history:
            remedy = f"the state after epoch {len(run.history)} is in {run.folder.checkpoint}"
    what = "a weight" if math.isfinite(entry["loss"]) else "the loss"
    raise TrainingError(
        f"In epoch {entry['epoch']} {what} is no longer finite; {remedy}. "
        f"Try a learning rate below {lr:g}, and check for corrupt images."
    )


def _check_labels(pool: Pool, outputs: int) -> None:
    if pool.labels is None:
        raise ValueError(f"`{pool.name}` must have labels.")
    low, high = (int(value) for value in pool.labels.aminmax())
    if low < 0 or high >= outputs:
        raise ValueError(f"The labels of `{pool.name}` must be in 0..{outputs - 1}, got {low} to {high}.")


@torch.no_grad()
def _errors(trainer: Trainer, pool: Pool) -> list[float]:
    """Return the error of each training; each process evaluates a part of the images."""
    assert pool.labels is not None
    trainer.model.eval()
    wrong = torch.zeros(trainer.count, dtype=torch.float32, device=pool.device)
    size = 2500 if isinstance(trainer.model, Replicated) and pool.tensor is not None else 500
    size = max(100, size // trainer.count)
    if not kernels.tuning(pool.device).waits:  # smaller batches of large images, to limit memory
        size = max(1, min(size, size * 1024 // (pool.shape[-2] * pool.shape[-1])))
    for indices in torch.arange(rank(), pool.count, world(), device=pool.device).split(size):
        with arithmetic(trainer.precision, pool.device):
            answers = trainer.model(pool.take(indices).repeat(trainer.count, 1, 1, 1)).argmax(1)
            wrong += (answers.view(trainer.count, -1) != pool.labels[indices]).sum(1)
    if world() > 1:
        distributed.all_reduce(wrong)
    return [count / pool.count for count in wrong.tolist()]


def format_epoch(entry: dict[str, Any], test: str | None = None) -> str:
    """Format the record entry of an epoch as one line.

    Args:
        entry: The entry.
        test: Name of the set that its `test_error` was measured on, if known.
    """
    label = "test" if test is None or find_source(test) is None else "held out"
    error = f", {label} {entry['test_error']:.1%}" if "test_error" in entry else ""
    return f"epoch {entry['epoch']}, loss {entry['loss']:.3f}, error {entry['train_error']:.1%}{error}"


def _format_first(entries: Sequence[dict[str, Any]], test: str | None) -> str:
    others = f" (the first of {len(entries)})" if len(entries) > 1 else ""
    return f"{format_epoch(entries[0], test)}{others}"

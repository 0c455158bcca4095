"""The loop that trains every method: epoch after epoch, saved after each, resumed where it stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from testtime.capture import arithmetic
from testtime.data.sets import TestSet
from testtime.networks.ynet import YNet
from testtime.training.folder import Folder, describe_run, make_record
from testtime.training.pool import Pool
from testtime.training.processes import rank, world
from testtime.training.recipe import Recipe, TrainingError
from testtime.training.replica import Replica
from testtime.training.trainer import Trainer

Progress = Callable[[int, int, str], None]


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
    progress: Progress | None = None,
) -> YNet:
    """Train a network, in place, on the device it is on.

    Args:
        net: The network; its own weights are what training starts from and what it changes. The card's `augment` is
            the augmentation.
        images: `(N, C, H, W)`, uint8 or floats in [0, 1]; or a labelled set.
        labels: Classes `(N,)`; not needed with a set.
        recipe: How to train; by default the paper's joint training on CIFAR-10.
        folder: The run's folder. After every epoch it holds `checkpoint.safetensors` and `record.json`, at the end
            `network.safetensors`. Training into a folder with a checkpoint goes on from there.
        test: Images and labels, or a labelled set, whose error is measured after every epoch.
        target: Unlabelled images of the target set, for "uda".
        classes: Names of the classes; by default those of the set or of the network's card.
        progress: Told how many of how many steps are done, and how the last epoch went.

    Returns:
        The same network, in evaluation mode; `card.record` says how it was trained.

    Raises:
        ValueError: The arguments do not fit together, or the folder holds a run of another configuration.
        CheckpointError: The folder's checkpoint cannot be read.
        TrainingError: The loss is no longer finite; the last good checkpoint is kept.
    """
    recipe = recipe or Recipe()
    device = next(net.parameters()).device
    if progress is not None:
        progress(0, 0, "reading the images")
    source = Pool("images", images, labels, device)
    unlabelled = None if target is None else Pool("target", target, None, device)
    held_out = None
    if test is not None:
        held_out = Pool("test", *test, device) if isinstance(test, tuple) else Pool("test", test, None, device)
    trainer = Trainer(net, recipe, source, unlabelled)
    for pool in (source, held_out):
        if pool is not None:
            _check_labels(pool, trainer.outputs)
    names = tuple(classes) or source.classes or net.card.classes
    if names and len(names) != trainer.outputs:
        raise ValueError(f"The network has {trainer.outputs} outputs, but there are {len(names)} classes.")
    net.describe(classes=names, size=net.card.size or source.shape[1], task=trainer.task.name)

    configuration = describe_run(trainer, held_out)
    run = None if folder is None else Folder(Path(folder), configuration)
    history = run.load(trainer) if run is not None else []
    trainer.share()
    while len(history) < recipe.epochs:
        epoch = len(history)
        history.append(_train_epoch(trainer, epoch, held_out, run, progress, history))
        if run is not None:
            run.save(trainer, history)
    trainer.finish()
    net.describe(record=make_record(configuration, history, device))
    if run is not None and rank() == 0:
        net.save(run.network)
    return net


def _train_epoch(
    trainer: Trainer,
    epoch: int,
    test: Pool | None,
    run: Folder | None,
    progress: Progress | None,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """One pass over the training set; what the record says of it."""
    start, done, total = time.perf_counter(), epoch * trainer.steps, trainer.recipe.epochs * trainer.steps
    text = tell(history[-1]) if history else ""
    trainer.set_lr(trainer.recipe.lr_at(epoch))
    trainer.model.train()
    trainer.sums.zero_()
    for step, (indices, number, pixels) in enumerate(trainer.batches(epoch), start=1):
        trainer.step(indices, number, pixels)
        if progress is not None and step < trainer.steps:
            progress(done + step, total, text)
    entry: dict[str, Any] = {"epoch": epoch + 1, "lr": trainer.recipe.lr_at(epoch), **trainer.read()}
    if not (math.isfinite(entry["loss"]) and trainer.is_finite()):
        kept = "nothing was saved yet"
        if run is None:
            kept = "there is no run folder to go back to"
        elif history:
            kept = f"the state after epoch {epoch} is kept in {run.checkpoint}"
        what = "a weight" if math.isfinite(entry["loss"]) else "the loss"
        raise TrainingError(
            f"In epoch {epoch + 1} {what} is no longer finite; {kept}. "
            f"Try a learning rate below {trainer.recipe.lr_at(epoch):g}, and look for broken images."
        )
    trainer.share()  # the processes' Batch Normalization statistics: from here on those that the checkpoint has
    if test is not None:
        entry["test_error"] = _error(trainer, test)
    entry["seconds"] = round(time.perf_counter() - start, 3)
    if progress is not None:
        progress(done + trainer.steps, total, tell(entry))
    return entry


def _check_labels(pool: Pool, outputs: int) -> None:
    if pool.labels is None:
        raise ValueError(f"`{pool.name}` must have labels.")
    low, high = (int(value) for value in pool.labels.aminmax())
    if low < 0 or high >= outputs:
        raise ValueError(f"The labels of `{pool.name}` must be in 0..{outputs - 1}, got {low} to {high}.")


@torch.no_grad()
def _error(trainer: Trainer, pool: Pool) -> float:
    """The share of wrong predictions, each process looking at its part."""
    assert pool.labels is not None
    trainer.model.eval()
    wrong = torch.zeros((), device=pool.device)
    size = 2500 if isinstance(trainer.model, Replica) and pool.tensor is not None else 500
    for indices in torch.arange(rank(), pool.count, world(), device=pool.device).split(size):
        with arithmetic(trainer.precision, pool.device):
            wrong += (trainer.model(pool.take(indices)).argmax(1) != pool.labels[indices]).sum()
    if world() > 1:
        distributed.all_reduce(wrong)
    return float(wrong) / pool.count


def tell(entry: dict[str, Any]) -> str:
    """One epoch's entry of the record in words."""
    test = f", test {entry['test_error']:.1%}" if "test_error" in entry else ""
    return f"epoch {entry['epoch']}, loss {entry['loss']:.3f}, error {entry['train_error']:.1%}{test}"

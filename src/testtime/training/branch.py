"""A self-supervised branch for a classifier one has, trained on unlabelled images."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from testtime import tasks
from testtime.checks import is_table
from testtime.data.sets import TestSet
from testtime.networks.branch import copy_classifier
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.progress import Progress
from testtime.storage import hold_folder
from testtime.training.branch_recipe import BranchRecipe, Optimizer, Start, find_best
from testtime.training.branch_training import BranchTraining
from testtime.training.checkpoints import Folder, make_record
from testtime.training.pool import Pool
from testtime.training.recipe import TrainingError
from testtime.training.training import check_networks, describe_network
from testtime.training.unlabelled import Images, Readable, hold_out_some, make_source, read_images

_MEASURED = 1_000  # training images on which the task's final error is measured


def fit_branch(
    net: YNet,
    images: Images,
    *,
    epochs: int = 10,
    optimizer: Optimizer = "sgd",
    lr: float | None = None,
    batch: int = 256,
    weight_decay: float = 5e-4,
    hold_out: float | Tensor | TestSet = 0.1,
    patience: int | None = 5,
    start: Start = "own",
    joint: bool = False,
    distillation: float = 1.0,
    precision: Precision = "fp32",
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> YNet:
    """Train the self-supervised branch of a network in place, on unlabelled images, so that it can adapt.

    Encoder and classifier stay bit-identical, including their Batch Normalization statistics, and with them every
    prediction of the network. The task is the network's own, for rotation on all four; the augmentation is that of its
    card. The learning rate decreases to 0 along half a cosine.

    The result is the epoch with the lowest task error on the held-out images, because a branch that overfits few images
    misjudges new ones; without held-out images it is the last epoch. `card.record["branch"]` says how good it is.

    Args:
        net: The network, for example made by `split` from a trained classifier; one without a branch gets a copy of
            its classifier with a new last layer.
        images: `(N, C, H, W)`, uint8 or float in [0, 1]; a set; the name of a data set or a folder of pictures; or an
            iterable of images or batches, such as a `DataLoader`, or of tuples with these first. Labels are ignored.
            An iterable is read once, into memory; one of more than 4 GiB is read in every epoch, without held-out
            images unless these are given.
        epochs: Maximum number of passes over the images.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        lr: Initial learning rate; by default 0.05 for SGD and 0.001 for AdamW, with `joint` 0.02 and 0.0001.
        batch: Images per step. Few images need small batches to get enough steps.
        weight_decay: Weight decay.
        hold_out: Fraction (below 1) or number of images to measure the task on instead of training on them, the same
            ones for every seed; or other images for that; 0 for none.
        patience: Stop after this many epochs without a lower error on the held-out images; None: never.
        start: "own": train the branch from its weights; "copy": from a copy of the classifier with a new last layer.
        joint: Fine-tune the encoder together with the branch. Another term of the loss, the cross-entropy to the
            original network's class probabilities on the same images, preserves its predictions, but not bit for bit.
            Classifier and Batch Normalization statistics of the encoder stay the same.
        distillation: Weight of that term.
        precision: "fp32" is exact; "tf32" and "bf16" are faster on a GPU.
        seed: Seed of shuffling, augmentation and a new last layer.
        folder: The run's folder, with `checkpoint.safetensors` and `record.json` after each epoch and
            `network.safetensors` at the end. An existing checkpoint is resumed, bit for bit.
        progress: Called with the steps done, their total, and the results of the last epoch.

    Returns:
        The same network, in evaluation mode.

    Raises:
        ValueError: The arguments are inconsistent, the network has no branch and none can be made, or the folder
            contains a run with another configuration.
        DataError: A folder or set is missing or damaged.
        FolderError: The folder is in use by another process.
        CheckpointError: The folder's checkpoint cannot be read.
        TrainingError: The loss is no longer finite; the last good checkpoint remains.
    """
    recipe = BranchRecipe(
        epochs, optimizer, lr, batch, weight_decay, patience, start, joint, distillation, seed, precision
    )
    with torch.inference_mode(False), torch.enable_grad():  # regardless of the caller's mode
        _fit(net, images, recipe, hold_out, None if folder is None else Path(folder), progress)
    return net


def _fit(
    net: YNet,
    images: Images,
    recipe: BranchRecipe,
    hold_out: float | Tensor | TestSet,
    folder: Path | None,
    progress: Progress | None,
) -> None:
    """Train the branch, or a new one if there is none or the recipe says so; an error leaves the network its own."""
    device = check_networks([net])
    given = describe_network(net)
    train_on, held_out = _split(read_images(images, net, progress), hold_out)
    source = make_source(train_on, recipe.batch, recipe.seed, device)
    measured = None if held_out is None else Pool("hold_out", held_out, None, device)
    if measured is not None and measured.shape != source.shape:
        raise ValueError(f"`hold_out` images must have shape {source.shape}, got {measured.shape}.")
    branch, state = net.ssl, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    try:
        if net.ssl is None or recipe.start == "copy":
            _copy_classifier(net, source.example, recipe.seed)
        training = BranchTraining(net, recipe, source, measured)
        configuration = {
            "recipe": recipe.describe(),
            "network": given,
            "task": training.task.name,
            "data": source.description,
            "held_out": None if measured is None else measured.description,
        }
        _train(training, configuration, folder, progress)
    except BaseException:  # such as a folder of another run
        net.ssl = branch
        net.load_state_dict(state)
        raise


def _split(
    images: Readable | Iterable[Any], hold_out: float | Tensor | TestSet
) -> tuple[Readable | Iterable[Any], Readable | None]:
    """Return the images to train on and those that are held out, if any."""
    if isinstance(hold_out, (Tensor, TestSet)):
        return images, hold_out
    if not isinstance(images, (Tensor, TestSet)):
        return images, None  # read in every epoch, possibly in another order
    count = hold_out if hold_out >= 1 else hold_out * len(images)
    if not math.isfinite(count) or count < 0 or (hold_out >= 1 and count != int(count)):
        raise ValueError(f"`hold_out` must be a fraction below 1 or a number of images, got {hold_out}.")
    count = int(count)
    return hold_out_some(images, count) if count else (images, None)


@torch.no_grad()
def _copy_classifier(net: YNet, example: Tensor, seed: int) -> None:
    """Replace the branch by a copy of the classifier, with a new last layer."""
    outputs = tasks.make(net.card.task).outputs
    if outputs is None:
        raise ValueError(
            f"The task {net.card.task!r} needs a decoder, of which a classifier cannot be a copy: "
            "testtime.vit(outputs=None) has one."
        )
    features = net.eval().encode(example)
    classifier = nn.Sequential(net.classifier) if isinstance(net.classifier, nn.Linear) else net.classifier
    branch = copy_classifier(classifier, outputs, features, seed)
    if branch is None:
        raise ValueError(
            "No branch can be made from this network's classifier, whose last layer is not linear: "
            "make the network with tt.split(model), which adds a branch."
        )
    net.ssl = branch.requires_grad_(True)


def _train(
    training: BranchTraining, configuration: dict[str, Any], path: Path | None, progress: Progress | None
) -> None:
    """Train the remaining epochs, and complete the network and its folder."""
    recipe, folder = training.recipe, None if path is None else Folder(path, configuration)
    with contextlib.nullcontext() if path is None else hold_folder(path):
        history = [] if folder is None else folder.load(training)
        if folder is not None:
            folder.begin(history, training.device)
        if not recipe.is_finished(history):
            training.begin()
        while not recipe.is_finished(history):
            entry = training.run_epoch(len(history), progress, format_branch_epoch(history[-1]) if history else "")
            _check_finite(training, entry, folder, history)
            history.append(entry)
            if training.held_out is not None and find_best(history) == len(history):
                training.remember()
            if folder is not None:
                folder.save(training, history)
        training.finish()
        _describe(training, configuration, history)
        if folder is not None:
            training.net.save(folder.network)
    if progress is not None and training.source.steps:
        total = recipe.epochs * training.source.steps  # also after an early stop
        progress(total, total, format_branch(training.net.card.record["branch"]))


def _check_finite(
    training: BranchTraining, entry: dict[str, Any], folder: Folder | None, history: list[dict[str, Any]]
) -> None:
    if math.isfinite(entry["loss"]) and training.is_finite():
        return
    saved = "" if folder is None or not history else f"; the state after epoch {len(history)} is in {folder.checkpoint}"
    raise TrainingError(
        f"In epoch {entry['epoch']} the loss is no longer finite{saved}. "
        f"Try a learning rate below {training.recipe.rate:g}, and check for corrupt images."
    )


def _describe(training: BranchTraining, configuration: dict[str, Any], history: list[dict[str, Any]]) -> None:
    """Add how good the branch is to the record of the network's card."""
    net, chosen = training.net, find_best(history)
    entry = history[chosen - 1]
    about: dict[str, Any] = {"task": training.task.name, "chance": training.task.chance, "epoch": chosen}
    about["training"] = {"error": entry["train_error"], "loss": entry["task"], "augmented": True}
    pool = training.source.pool
    if pool is not None:
        error, loss = training.measure(pool, _MEASURED)
        about["training"] = {"error": error, "loss": loss, "images": min(_MEASURED, pool.count)}
    about["held_out"] = None
    if training.held_out is not None:
        error, loss = entry["held_out_error"], entry["held_out_loss"]
        about["held_out"] = {"error": error, "loss": loss, "images": training.held_out.count}
    about |= make_record(configuration, history, training.device)
    net.describe(record={**net.card.record, "branch": about})
    if training.recipe.joint:
        net.statistics = None  # those of other weights
    elif net.statistics is not None:
        net.statistics = replace(net.statistics, about=_without_task(net.statistics.about))  # that of another branch


def _without_task(about: dict[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in about.items() if key not in ("task", "task_loss")}
    return {key: _without_task(value) if key == "unseen" and is_table(value) else value for key, value in left.items()}


def format_branch(about: dict[str, Any]) -> str:
    """Format the record of a branch as one line."""
    held_out = about["held_out"]
    new = "" if held_out is None else f", {held_out['error']:.1%} on held-out images"
    return f"{about['task']} error {about['training']['error']:.1%} in training{new} (chance {about['chance']:.0%})"


def format_branch_epoch(entry: dict[str, Any]) -> str:
    """Format the record entry of an epoch as one line."""
    new = f", held out {entry['held_out_error']:.1%}" if "held_out_error" in entry else ""
    return f"epoch {entry['epoch']}, loss {entry['loss']:.3f}, task error {entry['train_error']:.1%}{new}"

"""Training: the supervised task alone, jointly with the self-supervised one, and two baselines (paper, sections 2, 3).

A method is one function that turns a batch into its loss, as named terms that are added up:

    plain   cross-entropy of the classes: "object recognition task only"
    joint   that, and the self-supervised task's loss on the same images: what Test-Time Training starts from
    alp     that of plain, and the distance between the logits of an image and of its adversarial twin (Kannan et al.)
    uda     that of joint, and the task's loss on the unlabelled target set (UDA-SS, Sun et al.)

One loop trains them all. The images live on the device as uint8; shuffling and augmentation are functions of the seed,
the step and the sample, so a run that was killed goes on from its last epoch bit for bit, and N processes under
`torchrun` see the batches that one would. `train` is that loop; `Recipe` is everything that decides its result.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.nn import functional as F

from testtime import augment as augmentations
from testtime import data as datasets
from testtime import tasks
from testtime.data.sets import TensorSet, TestSet
from testtime.networks.resnet import resnet18, resnet26, resnet50
from testtime.networks.ynet import CheckpointError, YNet
from testtime.randomness import Draws
from testtime.storage import whole_file, write_whole
from testtime.tasks import Rotation, Task

log = logging.getLogger(__name__)

Method = Literal["plain", "joint", "alp", "uda"]
Progress = Callable[[int, int, str], None]
Terms = dict[str, Tensor]

_KEY = "testtime-training"
_FORMAT = 1
RESIDENT_BYTES = 4 << 30
"""A set up to this size is read once and kept on the device; a larger one is read by the batch."""


class TrainingError(RuntimeError):
    """Training cannot go on: the message says why, and where the last good state is."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training gives, but for network and data. The defaults are the paper's for CIFAR.

    Attributes:
        method: "plain", "joint", "alp" or "uda".
        epochs: Passes over the training set.
        batch: Images in a step, over all processes together. An epoch's last, smaller batch is left out; shuffling
            makes that other images each time.
        lr: Learning rate.
        drops: Epochs (counted from 0) before which the learning rate is divided by 10.
        momentum: Momentum of the gradient descent.
        weight_decay: Weight decay, on all parameters.
        weight: Weight of the self-supervised losses ("joint", "uda").
        rotations: "all": the rotation task gets every image in all four turns; "random": each in one, by chance.
        seed: Seed of shuffling, augmentation and attacks.
        bf16: Compute in bfloat16 where that is safe (autocast); parameters stay float32.
        pairing: Weight of the distance between clean and adversarial logits ("alp").
        epsilon: Largest change of a pixel by the attack, on pixels in [0, 1] ("alp").
        attack_steps: Steps of the attack ("alp").
        attack_lr: Size of one such step, on pixels in [0, 1] ("alp").
        task: Another self-supervised task than the network's own.
    """

    method: Method = "joint"
    epochs: int = 150
    batch: int = 128
    lr: float = 0.1
    drops: tuple[int, ...] = (75, 125)
    momentum: float = 0.9
    weight_decay: float = 5e-4
    weight: float = 1.0
    rotations: Literal["all", "random"] = "all"
    seed: int = 0
    bf16: bool = False
    pairing: float = 0.5
    epsilon: float = 8 / 255
    attack_steps: int = 7
    attack_lr: float = 2 / 255
    task: Task | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", tuple(self.drops))
        if self.method not in get_args(Method):
            raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, got {self.method!r}.")
        if self.rotations not in ("all", "random"):
            raise ValueError(f'`rotations` must be "all" or "random", got {self.rotations!r}.')
        for name in ("epochs", "batch", "attack_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("lr", "attack_lr", "epsilon"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        for name in ("weight_decay", "weight", "pairing"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must lie in [0, 1), got {self.momentum}.")
        if list(self.drops) != sorted(set(self.drops)) or any(drop < 1 for drop in self.drops):
            raise ValueError(f"`drops` must be rising epochs from 1 on, got {self.drops}.")

    @staticmethod
    def cifar(norm: Literal["group", "batch"] = "group", **changes: Any) -> Recipe:
        """The paper's training on CIFAR-10: 150 epochs with Group, 75 with Batch Normalization."""
        if norm not in ("group", "batch"):
            raise ValueError(f'`norm` must be "group" or "batch", got {norm!r}.')
        base = Recipe() if norm == "group" else Recipe(epochs=75, drops=(50, 65))
        return replace(base, **changes)

    @staticmethod
    def imagenet(**changes: Any) -> Recipe:
        """The paper's training on ImageNet: 90 epochs, batches of 256, one random turn of each image."""
        base = Recipe(epochs=90, batch=256, drops=(30, 60), weight_decay=1e-4, rotations="random")
        return replace(base, **changes)

    @staticmethod
    def digits(**changes: Any) -> Recipe:
        """A training of seconds on the built-in digits; not from the paper."""
        return replace(Recipe(epochs=20, batch=32, drops=(14, 18)), **changes)

    def over(self, epochs: int) -> Recipe:
        """The same schedule stretched or shrunk to another number of epochs; the drops move along."""
        drops = sorted({max(1, round(drop * epochs / self.epochs)) for drop in self.drops})
        return replace(self, epochs=epochs, drops=tuple(drop for drop in drops if drop < epochs))

    def change(self, epochs: int | None = None, **changes: Any) -> Recipe:
        """This recipe with other fields; what is None stays. Other `epochs` take the schedule along, see `over`."""
        base = self if epochs is None else self.over(epochs)
        return replace(base, **{name: value for name, value in changes.items() if value is not None})

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.lr / 10 ** sum(epoch >= drop for drop in self.drops)

    def describe(self) -> dict[str, Any]:
        """The recipe as plain text and numbers, for records and for telling two apart."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"drops": list(self.drops), "task": None if self.task is None else repr(self.task)}


# ---------------------------------------------------------------------------------------------------------------------
# The methods
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What a method's loss is made of.

    Attributes:
        images: Augmented training images `(B, C, H, W)`, uint8 or floats in [0, 1].
        labels: Their classes, int64 `(B,)`.
        draws: Keys `(B,)`, for what else is random about them.
        target: Augmented images of the unlabelled target set, `(B, C, H, W)`; for "uda" only.
        target_draws: Their keys `(B,)`.
    """

    images: Tensor
    labels: Tensor
    draws: Draws
    target: Tensor | None = None
    target_draws: Draws | None = None


def plain_loss(net: YNet, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy of the classes.

    Args:
        net: The network, in training mode.
        batch: The batch.
        recipe: Weights of the terms.
        task: The self-supervised task.

    Returns:
        The terms whose sum is the loss, by name; and the class logits `(B, K)`.
    """
    logits = net(batch.images)
    return {"main": F.cross_entropy(logits.float(), batch.labels)}, logits


def joint_loss(net: YNet, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy of the classes plus the self-supervised loss on the same images; as `plain_loss` in form."""
    terms, logits = plain_loss(net, batch, recipe, task)
    return terms | {"task": recipe.weight * _task_loss(net, batch.images, batch.draws, task)}, logits


def uda_loss(net: YNet, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """The joint loss plus the self-supervised loss on unlabelled images of the target set (UDA-SS)."""
    assert batch.target is not None
    assert batch.target_draws is not None
    terms, logits = joint_loss(net, batch, recipe, task)
    return terms | {"target": recipe.weight * _task_loss(net, batch.target, batch.target_draws, task)}, logits


def alp_loss(net: YNet, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy on clean images plus the squared distance to the adversarial logits (logit pairing)."""
    twins = attack(net, batch.images, batch.labels, batch.draws, recipe)
    terms, logits = plain_loss(net, batch, recipe, task)
    return terms | {"pairing": recipe.pairing * F.mse_loss(net(twins).float(), logits.float())}, logits


def _task_loss(net: YNet, images: Tensor, draws: Draws, task: Task) -> Tensor:
    views, targets = task.views(images, draws)
    return task.loss(net.self_supervise(views), targets).mean()


def attack(net: YNet, images: Tensor, labels: Tensor, draws: Draws, recipe: Recipe) -> Tensor:
    """Adversarial twins of images by projected gradient ascent on the classes' loss (Madry et al. 2018).

    The network is in evaluation mode meanwhile, so that Batch Normalization does not track the attack.

    Args:
        net: The network to fool.
        images: `(B, C, H, W)`, uint8 or floats in [0, 1].
        labels: Their classes `(B,)`.
        draws: Keys `(B,)`; they choose the random start.
        recipe: `epsilon`, `attack_steps` and `attack_lr`.

    Returns:
        Floats in [0, 1], `(B, C, H, W)`, no pixel further than `epsilon` from the original.
    """
    clean = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    start = draws.purpose("attack").uniform(*clean.shape[1:]) * 2 - 1
    twins = (clean + recipe.epsilon * start).clamp(0, 1)
    low, high = (clean - recipe.epsilon).clamp(min=0), (clean + recipe.epsilon).clamp(max=1)
    training = net.training
    net.eval()
    for _ in range(recipe.attack_steps):
        twins.requires_grad_(True)
        with torch.enable_grad():
            loss = F.cross_entropy(net(twins).float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, twins)
        twins = (twins.detach() + recipe.attack_lr * gradient.sign()).clamp(low, high)
    net.train(training)
    return twins


class _Entry(NamedTuple):
    """A method: its loss, the names of the terms, the parts of the network that learn."""

    loss: Callable[[YNet, Batch, Recipe, Task], tuple[Terms, Tensor]]
    terms: tuple[str, ...]
    parts: tuple[str, ...]


_METHODS: dict[Method, _Entry] = {
    "plain": _Entry(plain_loss, ("main",), ("encoder.", "classifier.")),
    "joint": _Entry(joint_loss, ("main", "task"), ("encoder.", "classifier.", "ssl.")),
    "alp": _Entry(alp_loss, ("main", "pairing"), ("encoder.", "classifier.")),
    "uda": _Entry(uda_loss, ("main", "task", "target"), ("encoder.", "classifier.", "ssl.")),
}


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


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

    configuration = _configuration(trainer, held_out)
    run = None if folder is None else _Folder(Path(folder), configuration)
    history = run.load(trainer) if run is not None else []
    trainer.share()
    while len(history) < recipe.epochs:
        epoch = len(history)
        history.append(_train_epoch(trainer, epoch, held_out, run, progress, history))
        if run is not None:
            run.save(trainer, history)
    net.describe(record=_record(configuration, history, device))
    net.eval()
    if run is not None and _rank() == 0:
        net.save(run.network)
    return net


def _train_epoch(
    trainer: Trainer,
    epoch: int,
    test: Pool | None,
    run: _Folder | None,
    progress: Progress | None,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """One pass over the training set; what the record says of it."""
    start, done, total = time.perf_counter(), epoch * trainer.steps, trainer.recipe.epochs * trainer.steps
    text = tell(history[-1]) if history else ""
    trainer.set_lr(trainer.recipe.lr_at(epoch))
    trainer.net.train()
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
        entry["test_error"] = _error(trainer.net, test)
    entry["seconds"] = round(time.perf_counter() - start, 3)
    if progress is not None:
        progress(done + trainer.steps, total, tell(entry))
    return entry


class Trainer:
    """A network, its optimizer and its data: what one step of training works on.

    `step` is the whole of training that happens on the device. It reads nothing back, and its shapes and its course do
    not depend on the numbers.

    Args:
        net: The network.
        recipe: How to train it.
        source: The labelled training images.
        target: The unlabelled images of "uda".
    """

    def __init__(self, net: YNet, recipe: Recipe, source: Pool, target: Pool | None) -> None:
        if (recipe.method == "uda") != (target is not None):
            raise ValueError('`target` images are for the method "uda", which needs them.')
        if target is not None and target.shape != source.shape:
            raise ValueError(f"`target` images are {target.shape}, training images {source.shape}; they must agree.")
        self.net, self.recipe, self.method = net, recipe, _METHODS[recipe.method]
        self.pools = [source] if target is None else [source, target]
        self.device = source.device
        self.augment = augmentations.make(net.card.augment)
        self.task: Task = recipe.task or tasks.make(net.card.task)
        if recipe.task is None and isinstance(self.task, Rotation):
            self.task = Rotation(each=recipe.rotations)
        self.batch = min(recipe.batch, source.count)
        self.steps = source.count // self.batch
        if self.batch % _world():
            raise ValueError(f"`batch` ({self.batch}) must be a multiple of the {_world()} processes.")
        self.outputs = self._try()
        self.parameters = {
            name: parameter
            for name, parameter in net.named_parameters()
            if name.startswith(self.method.parts) and parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("The network has no parameter that may be trained (requires_grad).")
        self.optimizer = torch.optim.SGD(
            list(self.parameters.values()),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        # Of every step: each term of the loss, and the share of wrong predictions.
        self.sums = torch.zeros(len(self.method.terms) + 1, device=self.device)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, list[Tensor] | None]]:
        """This process's share of an epoch's batches: for each step what `step` takes."""
        size, rank, world = self.batch, _rank(), _world()
        rows = [self.order(epoch)]
        if len(self.pools) > 1:
            rows.append(self.target_order(epoch))
        shares = torch.stack(rows, dim=1)[..., rank * size // world : (rank + 1) * size // world]  # (steps, pools, b)
        numbers = torch.arange(epoch * self.steps, (epoch + 1) * self.steps, device=self.device)
        if all(pool.tensor is not None for pool in self.pools):
            for indices, number in zip(shares, numbers, strict=True):
                yield indices, number, None
            return
        with ThreadPoolExecutor(1) as ahead:  # reads the next batch from disk while this one is trained on
            waiting = ahead.submit(self.read_pixels, shares[0])
            for step, (indices, number) in enumerate(zip(shares, numbers, strict=True)):
                pixels = waiting.result()
                if step + 1 < self.steps:
                    waiting = ahead.submit(self.read_pixels, shares[step + 1])
                yield indices, number, pixels

    def order(self, epoch: int) -> Tensor:
        """The training samples of an epoch by step, int64 `(steps, batch)`."""
        order = shuffle(self.pools[0].count, self.recipe.seed, epoch, self.device)
        return order[: self.steps * self.batch].view(self.steps, self.batch)

    def target_order(self, epoch: int) -> Tensor:
        """The target samples of an epoch by step, int64 `(steps, batch)`: pass after pass, whatever an epoch's end."""
        count, length = self.pools[1].count, self.steps * self.batch
        first, last = epoch * length // count, ((epoch + 1) * length - 1) // count
        passes = [shuffle(count, self.recipe.seed, turn, self.device, "target") for turn in range(first, last + 1)]
        start = epoch * length - first * count
        return torch.cat(passes)[start : start + length].view(self.steps, self.batch)

    def read_pixels(self, indices: Tensor) -> list[Tensor]:
        """The images `(b, C, H, W)` of each pool for indices `(pools, b)`."""
        return [pool.take(row) for pool, row in zip(self.pools, indices, strict=True)]

    def step(self, indices: Tensor, number: Tensor, pixels: list[Tensor] | None = None) -> None:
        """One step of gradient descent; adds the losses and the wrong predictions to `sums`.

        Args:
            indices: Sample numbers `(pools, b)`: of the training set and, for "uda", of the target set.
            number: The step's number in the whole training, an int64 scalar on the device.
            pixels: Those samples' images where they are not on the device yet.
        """
        pixels = pixels or self.read_pixels(indices)
        views, keys = [], []
        for row, images, purpose in zip(indices, pixels, ("train", "target"), strict=False):
            draws = Draws.of(self.recipe.seed, row).purpose(purpose).fold(number)
            views.append(self.augment(images, draws.copies(1))[:, 0])
            keys.append(draws)
        labels = self.pools[0].labels
        assert labels is not None
        batch = Batch(views[0], labels[indices[0]], keys[0], *views[1:], *keys[1:])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            terms, logits = self.method.loss(self.net, batch, self.recipe, self.task)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(terms.values())).sum().backward()
        self._average_gradients()
        self.optimizer.step()
        with torch.no_grad():
            wrong = (logits.argmax(1) != batch.labels).float().mean()
            self.sums += torch.stack([*(terms[name].detach().float() for name in self.method.terms), wrong])

    def read(self) -> dict[str, float]:
        """Loss, its terms and the error, averaged over the steps since `sums` was zero and over the processes."""
        sums = self.sums.clone()
        if _world() > 1:
            distributed.all_reduce(sums)
        *losses, error = (sums / (self.steps * _world())).tolist()
        return {"loss": sum(losses), **dict(zip(self.method.terms, losses, strict=True)), "train_error": error}

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def is_finite(self) -> bool:
        """Whether all of the network's numbers are."""
        tensors = [tensor for tensor in self.net.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def share(self) -> None:
        """Give all processes the first one's network."""
        if _world() > 1:
            for tensor in self.net.state_dict().values():
                distributed.broadcast(tensor, 0)

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by name."""
        state = {f"network/{name}": tensor.detach() for name, tensor in self.net.state_dict().items()}
        for name, parameter in self.parameters.items():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                state[f"momentum/{name}"] = momentum
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a state.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape; nothing was changed.
        """
        network, momentum = (
            {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            for prefix in ("network/", "momentum/")
        )
        own = self.net.state_dict()
        for found, wanted in ((network, own), (momentum, self.parameters if momentum else {})):
            for name in found.keys() | wanted.keys():
                if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
                    raise ValueError(f"tensor {name!r} is missing, unknown or of another shape")
        self.net.load_state_dict(network)
        for name, tensor in momentum.items():
            parameter = self.parameters[name]
            self.optimizer.state[parameter]["momentum_buffer"] = tensor.to(parameter.device, copy=True)

    def _average_gradients(self) -> None:
        if _world() == 1:
            return
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / _world()
        distributed.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def _try(self) -> int:
        """How many classes the network tells apart; finds out early whether network, images and task fit."""
        example = self.pools[0].take(torch.zeros(1, dtype=torch.int64, device=self.device))
        self.net.eval()
        key = Draws.of(0, torch.zeros(1, dtype=torch.int64, device=self.device))
        try:
            example = self.augment(example, key.copies(1))[:, 0]
            classes = self.net(example).shape[-1]
            views, _ = self.task.views(example, key)
            outputs = self.net.self_supervise(views).shape[-1]
        except RuntimeError as error:
            raise ValueError(f"The network does not take images of {self.pools[0].shape}: {error}") from None
        if outputs != self.task.outputs:
            raise ValueError(
                f"The network's self-supervised branch has {outputs} outputs, "
                f"the task {self.task.name!r} needs {self.task.outputs}."
            )
        return classes


def shuffle(count: int, seed: int, epoch: int, device: torch.device, purpose: str = "shuffle") -> Tensor:
    """The numbers 0..count-1 in an order that seed, epoch and purpose decide, int64 `(count,)`."""
    keys = Draws.of(seed, torch.arange(count, device=device)).purpose(purpose).fold(epoch).keys
    return keys.argsort()  # the hash is one to one: no two keys are equal


class Pool:
    """Images to train or test on: a tensor on the device, or a set that is too large for that.

    Args:
        name: What error messages call them.
        images: `(N, C, H, W)`, uint8 or floats in [0, 1]; or a set.
        labels: Integers `(N,)`, or None: a set has its own.
        device: Where they are used.
    """

    def __init__(self, name: str, images: Tensor | TestSet, labels: Tensor | None, device: torch.device) -> None:
        self.name, self.device = name, device
        self.classes: tuple[str, ...] = ()
        self.tensor: Tensor | None = None
        self.source = images
        if isinstance(images, TestSet):
            if labels is not None:
                raise ValueError(f"`{name}` is a set and has labels of its own; give it without labels.")
            labels, self.classes = images.labels, images.classes
            self.count, self.shape = len(images), images.shape
            if self.count * math.prod(self.shape) <= RESIDENT_BYTES:
                self.tensor = images.images(slice(None)).to(device)
        else:
            if images.dim() != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
                raise ValueError(
                    f"`{name}` must be (N, C, H, W), uint8 or floats in [0, 1], got {images.dtype} "
                    f"{tuple(images.shape)}."
                )
            self.count, self.shape = len(images), tuple(images.shape[1:])
            self.tensor = images.detach().to(device)
        if self.count == 0:
            raise ValueError(f"`{name}` must not be empty.")
        if labels is not None and (labels.shape != (self.count,) or labels.is_floating_point()):
            raise ValueError(f"`{name}` needs {self.count} integer labels, got {labels.dtype} {tuple(labels.shape)}.")
        self.labels = None if labels is None else labels.to(device, torch.int64)

    def take(self, indices: Tensor) -> Tensor:
        """Images `(n, C, H, W)` of sample numbers `(n,)`, on the device."""
        if self.tensor is not None:
            return self.tensor[indices]
        assert isinstance(self.source, TestSet)
        return self.source.images(indices.cpu()).to(self.device)

    def describe(self) -> dict[str, Any]:
        """What tells these images from others."""
        plain: dict[str, Any] = {"count": self.count, "shape": list(self.shape)}
        if isinstance(self.source, TestSet):
            return {"name": self.source.name, **plain, "hash": self.source.fingerprint()[:16]}
        assert self.tensor is not None
        return {**plain, "hash": _hash([self.tensor] if self.labels is None else [self.tensor, self.labels])}


def _check_labels(pool: Pool, outputs: int) -> None:
    if pool.labels is None:
        raise ValueError(f"`{pool.name}` must have labels.")
    low, high = (int(value) for value in pool.labels.aminmax())
    if low < 0 or high >= outputs:
        raise ValueError(f"The labels of `{pool.name}` must be in 0..{outputs - 1}, got {low} to {high}.")


@torch.no_grad()
def _error(net: YNet, pool: Pool, size: int = 500) -> float:
    """The share of wrong predictions, each process looking at its part."""
    assert pool.labels is not None
    net.eval()
    wrong = torch.zeros((), device=pool.device)
    for indices in torch.arange(_rank(), pool.count, _world(), device=pool.device).split(size):
        wrong += (net(pool.take(indices)).argmax(1) != pool.labels[indices]).sum()
    if _world() > 1:
        distributed.all_reduce(wrong)
    return float(wrong) / pool.count


def tell(entry: dict[str, Any]) -> str:
    """One epoch's entry of the record in words."""
    test = f", test {entry['test_error']:.1%}" if "test_error" in entry else ""
    return f"epoch {entry['epoch']}, loss {entry['loss']:.3f}, error {entry['train_error']:.1%}{test}"


# ---------------------------------------------------------------------------------------------------------------------
# The run's folder
# ---------------------------------------------------------------------------------------------------------------------


class _Folder:
    """Where a run keeps its state: `checkpoint.safetensors`, `record.json` and, at the end, `network.safetensors`.

    Every file is written whole or not at all, by the first process. The checkpoint is the truth; the record is for
    readers and is made anew from it.
    """

    def __init__(self, path: Path, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.checkpoint = path / "checkpoint.safetensors"
        self.record = path / "record.json"
        self.network = path / "network.safetensors"

    def load(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Take up the run if there is one: the entries of the epochs it has behind it."""
        history: list[dict[str, Any]] = []
        if self.checkpoint.exists():
            found, state = _read_checkpoint(self.checkpoint)
            self._compare(found["configuration"])
            try:
                trainer.load(state)
            except ValueError as error:
                raise CheckpointError(f"{self.checkpoint}: {error}.") from None
            history = found["history"]
            log.info("%s: going on after epoch %d", self.checkpoint, len(history))
        elif self.record.exists():
            try:
                found = json.loads(self.record.read_text())
                configuration = found["configuration"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{self.record}: not the record of a training ({error}).") from None
            self._compare(configuration)
        if _world() > 1:
            distributed.barrier()  # all have read before the first process writes
        if _rank() == 0:
            for part in self.record.parent.glob(".*.part"):  # what a killed process was writing
                part.unlink(missing_ok=True)
            self._write_record(history, trainer.device)
        return history

    def save(self, trainer: Trainer, history: list[dict[str, Any]]) -> None:
        """Write the state after an epoch."""
        if _rank() != 0:
            return
        about = {"format": _FORMAT, "configuration": self.configuration, "history": history}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in trainer.state().items()}
        try:
            with whole_file(self.checkpoint) as temporary:
                save_file(tensors, temporary, metadata={_KEY: json.dumps(about)})
        except SafetensorError as error:  # its way of saying that the disk is full
            raise OSError(f"{self.checkpoint}: cannot be written ({error})") from None
        self._write_record(history, trainer.device)

    def _write_record(self, history: list[dict[str, Any]], device: torch.device) -> None:
        write_whole(self.record, json.dumps(_record(self.configuration, history, device), indent=1) + "\n")

    def _compare(self, found: dict[str, Any]) -> None:
        there, here = _flatten(found), _flatten(json.loads(json.dumps(self.configuration)))
        different = [
            f"{key}: {there.get(key, 'none')} there, {here.get(key, 'none')} now"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]
        if different:
            raise ValueError(
                f"{self.record.parent} holds a run of another configuration ({'; '.join(different)}). "
                "Choose another folder."
            )


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if about["format"] != _FORMAT or not isinstance(about["history"], list):
            raise ValueError(f"format {about['format']}")
        _flatten(about["configuration"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a complete training checkpoint ({error}). Delete it to start anew."
        ) from None
    return about, state


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _configuration(trainer: Trainer, test: Pool | None) -> dict[str, Any]:
    """What decides a run's result; two runs that differ here do not share a folder."""
    card = trainer.net.card
    names = ("data", "target")
    return {
        "recipe": trainer.recipe.describe(),
        "network": {
            "architecture": card.architecture or type(trainer.net.encoder).__name__,
            "classes": list(card.classes),
            "mean": list(card.mean),
            "std": list(card.std),
            "augment": card.augment,
            "start": _hash(trainer.net.state_dict().values()),
        },
        **{name: pool.describe() for name, pool in zip(names, trainer.pools, strict=False)},
        "test": None if test is None else test.describe(),
    }


def _record(configuration: dict[str, Any], history: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """How a network was trained, as plain text and numbers."""
    return {
        "configuration": configuration,
        "epochs": copy.deepcopy(history),
        "seconds": round(sum(entry["seconds"] for entry in history), 3),
        **describe_machine(device),
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a number was measured with: versions and hardware, as plain text and numbers."""
    return {
        "versions": {name: _version(name) for name in ("testtime", "torch", "numpy")}
        | {"python": platform.python_version()},
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processor": _processor(),
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
            "processes": _world(),
        },
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # elsewhere the platform module knows
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a folder of sources
        return "unknown"


def _hash(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# What to train, by name
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What `prepare` gives: everything `train` needs.

    Attributes:
        net: The untrained network.
        source: The training set.
        test: The test set, or None.
        recipe: The recipe for them.
    """

    net: YNet
    source: TestSet
    test: TestSet | None
    recipe: Recipe


def prepare(
    data: str,
    network: Literal["resnet26", "resnet18", "resnet50"] = "resnet26",
    *,
    depth: int | None = None,
    norm: Literal["group", "batch"] = "group",
    size: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    limit: int | None = None,
) -> Setup:
    """The sets, a fresh network and the recipe for a data set by name.

    Args:
        data: "digits", "cifar10", "imagenet", or a folder with a folder of pictures for each class; if it holds
            `train` and `test` (or `val`), those are the two sets, each with the folders of the classes.
        network: The architecture.
        depth: For "resnet26" another depth, 6n + 2; the digits take 8 by default.
        norm: "group" or "batch".
        size: Side of a folder's pictures; by default what the network is made for.
        seed: Seed of the initial weights, and of the recipe.
        root: Where data sets are looked for.
        limit: Train on no more than this many samples, chosen by hash.

    Raises:
        ValueError: A name or a number is wrong.
        DataError: The data is not there or damaged.
    """
    builders = {"resnet26": resnet26, "resnet18": resnet18, "resnet50": resnet50}
    if network not in builders:
        raise ValueError(f"`network` must be one of {', '.join(builders)}, got {network!r}.")
    if depth is not None and network != "resnet26":
        raise ValueError(f"`depth` is for resnet26; {network} has its own.")
    source, test = _open_sets(data, root, size or (32 if network == "resnet26" else 224))
    if source.labels is None:
        raise ValueError(f"{data} has no labels to train with: it needs a folder of pictures for each class.")
    if limit is not None:
        source = _some_of(source, limit)
    if network == "resnet26":
        depth = depth or (8 if data == "digits" else 26)
        net = resnet26(
            len(source.classes), norm=norm, depth=depth, channels=source.shape[0], size=source.shape[1], seed=seed
        )
    else:
        if source.shape[0] != 3:
            raise ValueError(f"{network} takes colour images; for {data} use resnet26.")
        net = builders[network](len(source.classes), norm=norm, size=source.shape[1], seed=seed)
    if data == "digits":
        # A mirrored digit is no digit.
        net.describe(augment={"name": "crop-flip", "padding": source.shape[1] // 8, "flip": False})
        return Setup(net, source, test, Recipe.digits(seed=seed))
    recipe = Recipe.cifar(norm, seed=seed) if network == "resnet26" else Recipe.imagenet(seed=seed)
    return Setup(net, source, test, recipe)


def _open_sets(data: str, root: str | Path | None, size: int) -> tuple[TestSet, TestSet | None]:
    if data in ("digits", "cifar10"):
        return datasets.open(data, root, "train"), datasets.open(data, root, "test")
    if data == "imagenet":
        return datasets.open(data, root, "train", size=size), datasets.open(data, root, "test", size=size)
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`data` must be digits, cifar10, imagenet or a folder, got {data!r}.")
    if not (folder / "train").is_dir():
        return datasets.open("folder", folder, size=size), None
    source = datasets.open("folder", folder / "train", size=size)
    held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held_out is None:
        return source, None
    return source, datasets.open("folder", held_out, size=size, classes=source.classes)


def _some_of(source: TestSet, limit: int) -> TestSet:
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    if limit >= len(source):
        return source
    numbers = shuffle(len(source), 0, 0, torch.device("cpu"), "limit")[:limit].sort().values
    assert source.labels is not None
    return TensorSet(f"{source.name}[{limit}]", source.images(numbers), source.labels[numbers], source.classes)


# ---------------------------------------------------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Join the processes that `torchrun` started, if it did; without it there is one process and nothing happens.

    Args:
        device: "cpu", "cuda" and the like; on CUDA each process gets the GPU of its own number.

    Yields:
        The device for this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device(device)
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
        distributed.init_process_group("nccl", device_id=place)
    else:
        distributed.init_process_group("gloo")
    try:
        yield place
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that writes files and speaks; without `torchrun` it always is."""
    return _rank() == 0


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _world() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

"""The methods of training: each turns a batch into its loss (paper, sections 2 and 3, appendix).

A batch may be that of several trainings, concatenated; that is why losses are not averaged here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks.replicas import Part
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import Rotation, Task
from testtime.training.recipe import LossName, Recipe
from testtime.training.replicated import Replicated

Net = YNet | Replicated
Terms = dict[str, Tensor]


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


def plain_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy of the classes.

    Args:
        net: The network, in training mode.
        batch: The batch.
        recipe: Weights of the terms.
        task: The self-supervised task.

    Returns:
        The terms of each image's or view's loss by name, `(B,)` or more: the loss is the sum of their means; and the
        class logits `(B, K)`.
    """
    logits = net(batch.images)
    return {"main": _class_loss(logits, batch.labels)}, logits


def _class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")


def joint_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy of the classes plus the self-supervised loss on the same images; as `plain_loss` in form."""
    views, targets = task.views(batch.images, batch.draws)
    if _first_of_four(task, batch.images) and not _has_batch_norm(net):
        features = net.encode(views)  # the images are among the views, so they need not be encoded again
        logits, outputs = net.classify(features[::4]), net.supervise(features)
    else:
        logits, outputs = net(batch.images), net.self_supervise(views)
    return {"main": _class_loss(logits, batch.labels), "task": recipe.weight * task.loss(outputs, targets)}, logits


def _first_of_four(task: Task, images: Tensor) -> bool:
    """Whether the task's views are all turns of each image, the image itself first."""
    return isinstance(task, Rotation) and task.each == "all" and images.shape[-1] == images.shape[-2]


def _has_batch_norm(net: Net) -> bool:
    """Whether an image's features depend on the batch it comes in."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


def uda_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """The joint loss plus the self-supervised loss on unlabelled images of the target set (UDA-SS)."""
    assert batch.target is not None
    assert batch.target_draws is not None
    terms, logits = joint_loss(net, batch, recipe, task)
    return terms | {"target": recipe.weight * _task_loss(net, batch.target, batch.target_draws, task)}, logits


def alp_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy on clean images plus the squared distance to the adversarial logits (logit pairing)."""
    twins = attack(net, batch.images, batch.labels, batch.draws, recipe)
    if _has_batch_norm(net):
        logits, others = net(batch.images), net(twins)
    else:  # both in one pass, each image beside its twin
        pairs = torch.stack([_as_floats(batch.images), twins], dim=1)  # (B, 2, C, H, W)
        logits, others = net(pairs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    distance = (others.float() - logits.float()).square().mean(1)
    return {"main": _class_loss(logits, batch.labels), "pairing": recipe.pairing * distance}, logits


def _task_loss(net: Net, images: Tensor, draws: Draws, task: Task) -> Tensor:
    views, targets = task.views(images, draws)
    return task.loss(net.self_supervise(views), targets)


def attack(net: Net, images: Tensor, labels: Tensor, draws: Draws, recipe: Recipe) -> Tensor:
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
    clean = _as_floats(images)
    start = draws.purpose("attack").uniform(*clean.shape[1:]) * 2 - 1
    twins = (clean + recipe.epsilon * start).clamp(0, 1)
    low, high = (clean - recipe.epsilon).clamp(min=0), (clean + recipe.epsilon).clamp(max=1)
    training = net.training
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    net.eval()
    for parameter in learning:  # only the pixels' gradient is wanted
        parameter.requires_grad_(False)
    for _ in range(recipe.attack_steps):
        twins.requires_grad_(True)
        with torch.enable_grad():
            loss = F.cross_entropy(net(twins).float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, twins)
        twins = (twins.detach() + recipe.attack_lr * gradient.sign()).clamp(low, high)
    for parameter in learning:
        parameter.requires_grad_(True)
    net.train(training)
    return twins


def _as_floats(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


class Loss(NamedTuple):
    """A method: its loss, the names of the terms, the parts of the network that learn."""

    loss: Callable[[Net, Batch, Recipe, Task], tuple[Terms, Tensor]]
    terms: tuple[str, ...]
    parts: tuple[Part, ...]


LOSSES: dict[LossName, Loss] = {
    "plain": Loss(plain_loss, ("main",), ("encoder", "classifier")),
    "joint": Loss(joint_loss, ("main", "task"), ("encoder", "classifier", "ssl")),
    "alp": Loss(alp_loss, ("main", "pairing"), ("encoder", "classifier")),
    "uda": Loss(uda_loss, ("main", "task", "target"), ("encoder", "classifier", "ssl")),
}

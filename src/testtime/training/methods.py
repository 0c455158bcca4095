"""The methods of training: each turns a batch into its loss (paper, sections 2 and 3, appendix)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import Task
from testtime.training.recipe import Method, Recipe

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


class Entry(NamedTuple):
    """A method: its loss, the names of the terms, the parts of the network that learn."""

    loss: Callable[[YNet, Batch, Recipe, Task], tuple[Terms, Tensor]]
    terms: tuple[str, ...]
    parts: tuple[str, ...]


METHODS: dict[Method, Entry] = {
    "plain": Entry(plain_loss, ("main",), ("encoder.", "classifier.")),
    "joint": Entry(joint_loss, ("main", "task"), ("encoder.", "classifier.", "ssl.")),
    "alp": Entry(alp_loss, ("main", "pairing"), ("encoder.", "classifier.")),
    "uda": Entry(uda_loss, ("main", "task", "target"), ("encoder.", "classifier.", "ssl.")),
}

"""The training losses (paper, sections 2 and 3, appendix).

Losses are not averaged here, because a batch may contain the concatenated batches of several trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.augment import AugMix, as_floats
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
    """A batch of training data.

    Attributes:
        images: Augmented training images `(B, C, H, W)`, uint8 or float in [0, 1].
        labels: Class labels, int64 `(B,)`.
        draws: Random keys `(B,)` of the images.
        target: Augmented images of the unlabelled target set, `(B, C, H, W)`; only for "uda".
        target_draws: Their keys `(B,)`.
    """

    images: Tensor
    labels: Tensor
    draws: Draws
    target: Tensor | None = None
    target_draws: Draws | None = None


def plain_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Cross-entropy classification loss.

    Args:
        net: The network, in training mode.
        batch: The batch.
        recipe: Weights of the terms.
        task: The self-supervised task.

    Returns:
        The terms of the loss by name, per image or view, `(B,)` or larger; the loss is the sum of their means. And the
        class logits `(B, K)`.
    """
    logits = net(batch.images)
    return {"main": _class_loss(logits, batch.labels)}, logits


def _class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")


def joint_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Classification loss plus self-supervised loss on the same images; arguments as for `plain_loss`."""
    views, targets = task.views(batch.images, batch.draws)
    if first_of_four(task, batch.images) and not _has_batch_norm(net):
        features = net.encode(views)  # the images are among the views
        logits, outputs = net.classify(features[::4]), net.supervise(features)
    else:
        logits, outputs = net(batch.images), net.self_supervise(views)
    return {"main": _class_loss(logits, batch.labels), "task": recipe.weight * task.loss(outputs, targets)}, logits


def first_of_four(task: Task, images: Tensor) -> bool:
    """Whether the task's views are all four rotations of each image, starting with the image itself."""
    return isinstance(task, Rotation) and task.each == "all" and images.shape[-1] == images.shape[-2]


def _has_batch_norm(net: Net) -> bool:
    """Whether an image's features depend on the rest of the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


def robust_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Joint loss, with the self-supervised loss on an augmented view, plus a consistency loss (AugMix).

    The consistency is the Jensen-Shannon divergence between the class probabilities of an image and of two augmented
    views (Hendrycks et al. 2020).
    """
    clean = as_floats(batch.images)
    augmented = AugMix(recipe.severity)(clean, batch.draws.copies(2))
    images = torch.cat([clean.unsqueeze(1), augmented], dim=1)  # (B, 3, C, H, W)
    views, targets = task.views(images[:, 2], batch.draws)
    views = views.unflatten(0, (len(clean), -1))  # (B, V, C, h, w)
    if _has_batch_norm(net) or views.shape[2:] != images.shape[2:]:
        logits, outputs = net(images.flatten(0, 1)), net.self_supervise(views.flatten(0, 1))
    else:  # in one forward pass
        shared = 1 if first_of_four(task, clean) else 0  # the third image is also the first view
        both = torch.cat([images, views[:, shared:]], dim=1)
        features = net.encode(both.flatten(0, 1)).unflatten(0, (len(clean), -1))
        logits = net.classify(features[:, :3].flatten(0, 1))
        outputs = net.supervise(features[:, 3 - shared :].flatten(0, 1))
    logits = logits.unflatten(0, (len(clean), 3))
    terms = {
        "main": _class_loss(logits[:, 0], batch.labels),
        "task": recipe.weight * task.loss(outputs, targets),
        "consistency": recipe.consistency * _divergence(logits),
    }
    return terms, logits[:, 0]


def _divergence(logits: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence `(B,)` of the distributions with logits `(B, V, K)`."""
    logs = logits.float().log_softmax(-1)
    mean = torch.logsumexp(logs, 1, keepdim=True) - math.log(logits.shape[1])
    return (logs.exp() * (logs - mean)).sum(-1).mean(1)


def uda_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Joint loss plus self-supervised loss on unlabelled images of the target set (UDA-SS)."""
    assert batch.target is not None
    assert batch.target_draws is not None
    terms, logits = joint_loss(net, batch, recipe, task)
    return terms | {"target": recipe.weight * _task_loss(net, batch.target, batch.target_draws, task)}, logits


def alp_loss(net: Net, batch: Batch, recipe: Recipe, task: Task) -> tuple[Terms, Tensor]:
    """Classification loss on clean images plus the squared distance to the adversarial logits (logit pairing)."""
    adversarial = attack(net, batch.images, batch.labels, batch.draws, recipe)
    if _has_batch_norm(net):
        logits, others = net(batch.images), net(adversarial)
    else:  # both in one forward pass
        pairs = torch.stack([as_floats(batch.images), adversarial], dim=1)  # (B, 2, C, H, W)
        logits, others = net(pairs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    distance = (others.float() - logits.float()).square().mean(1)
    return {"main": _class_loss(logits, batch.labels), "pairing": recipe.pairing * distance}, logits


def _task_loss(net: Net, images: Tensor, draws: Draws, task: Task) -> Tensor:
    views, targets = task.views(images, draws)
    return task.loss(net.self_supervise(views), targets)


def attack(net: Net, images: Tensor, labels: Tensor, draws: Draws, recipe: Recipe) -> Tensor:
    """Return adversarial examples by projected gradient ascent on the classification loss (Madry et al. 2018).

    The network is temporarily in evaluation mode, so that the attack does not update Batch Normalization statistics.

    Args:
        net: The network to attack.
        images: `(B, C, H, W)`, uint8 or float in [0, 1].
        labels: Class labels `(B,)`.
        draws: Random keys `(B,)` for the starting points.
        recipe: Provides `epsilon`, `attack_steps` and `attack_lr`.

    Returns:
        Float in [0, 1], `(B, C, H, W)`, each pixel within `epsilon` of the original.
    """
    clean = as_floats(images)
    start = draws.purpose("attack").uniform(*clean.shape[1:]) * 2 - 1
    adversarial = (clean + recipe.epsilon * start).clamp(0, 1)
    low, high = (clean - recipe.epsilon).clamp(min=0), (clean + recipe.epsilon).clamp(max=1)
    training = net.training
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    net.eval()
    for parameter in learning:  # only the gradient of the pixels is needed
        parameter.requires_grad_(False)
    for _ in range(recipe.attack_steps):
        adversarial.requires_grad_(True)
        with torch.enable_grad():
            loss = F.cross_entropy(net(adversarial).float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, adversarial)
        adversarial = (adversarial.detach() + recipe.attack_lr * gradient.sign()).clamp(low, high)
    for parameter in learning:
        parameter.requires_grad_(True)
    net.train(training)
    return adversarial


class Loss(NamedTuple):
    """A method: its loss function, the names of its terms, and the parts of the network it trains."""

    loss: Callable[[Net, Batch, Recipe, Task], tuple[Terms, Tensor]]
    terms: tuple[str, ...]
    parts: tuple[Part, ...]


LOSSES: dict[LossName, Loss] = {
    "plain": Loss(plain_loss, ("main",), ("encoder", "classifier")),
    "joint": Loss(joint_loss, ("main", "task"), ("encoder", "classifier", "ssl")),
    "robust": Loss(robust_loss, ("main", "task", "consistency"), ("encoder", "classifier", "ssl")),
    "alp": Loss(alp_loss, ("main", "pairing"), ("encoder", "classifier")),
    "uda": Loss(uda_loss, ("main", "task", "target"), ("encoder", "classifier", "ssl")),
}

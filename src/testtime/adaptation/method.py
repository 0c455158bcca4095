"""Test-Time Training: learn from an unlabelled image, then predict it (paper, section 2).

The method is four functions, read from top to bottom:

    make_views   augmented copies of the image, each turned by the self-supervised task, with the turn as target
    learn        one gradient step on the task's loss of those views
    look         what the network says of the plain image: class logits, the task's loss and confidence
    episode      look, learn for some steps, look again; undo what went wrong

They work on a `Learner`: S copies of the network with an image (or a batch of images) for each, so that many episodes
run side by side; with S = 1 it is the plain method. What is remembered from image to image is the adapters' affair
(adapters.py, streams.py).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from testtime.augment import CropFlip
from testtime.capture import Beside
from testtime.learner import Learner, Settings
from testtime.networks.replicas import Replicas
from testtime.prediction import Prediction, settle
from testtime.randomness import Draws, has_triton
from testtime.recording import replay, replay_each
from testtime.tasks import Rotation


def make_views(images: Tensor, draws: Draws, settings: Settings) -> tuple[Tensor, Tensor]:
    """Views to learn from and their targets.

    Args:
        images: `(S, B, C, H, W)`: B images for each of S replicas.
        draws: Keys `(S, B)`.
        settings: Number of copies, augmentation and task.

    Returns:
        Views `(S, M, C, h, w)` and targets `(S, M)`, where M is B times copies times the task's views of a copy.
    """
    assert settings.augment is not None
    assert settings.task is not None
    augment, task = settings.augment, settings.task
    if images.is_cuda and has_triton() and isinstance(augment, CropFlip) and isinstance(task, Rotation):
        from testtime import kernels  # the same in one launch

        form = augment.padding, augment.flip, 4 if task.each == "all" else 1
        views, targets = kernels.make_views(images.flatten(0, 1), draws.keys.flatten(), settings.copies, *form)
        return views.view(len(images), -1, *views.shape[1:]), targets.view(len(images), -1)
    keys = draws.flatten().copies(settings.copies)  # (S·B, copies)
    copies = augment(images.flatten(0, 1), keys)  # (S·B, copies, C, h, w)
    views, targets = task.views(copies.flatten(0, 1), keys.flatten())
    return views.view(len(images), -1, *views.shape[1:]), targets.view(len(images), -1)


def learn(learner: Learner, images: Tensor, draws: Draws, weights: Tensor) -> None:
    """One step of the optimizer on the task's loss; the replicas' losses are added, so none feels another.

    Args:
        learner: S replicas and their optimizer.
        images: `(S, B, C, H, W)`.
        draws: Keys `(S, B)` of this step.
        weights: How much each image counts within its replica, `(S, B)`.
    """
    views, targets = make_views(images, draws, learner.settings)

    def loss() -> Tensor:
        outputs = learner.replicas.self_supervise(views)  # (S, M, outputs)
        losses = learner.task.loss(outputs.flatten(0, 1), targets.flatten()).view(*weights.shape, -1)
        return (losses.mean(-1) * weights).sum()

    learner.replicas.train_norms(True)
    try:
        learner.descend(loss)
    finally:
        learner.replicas.train_norms(False)


@torch.no_grad()
def look(
    replicas: Replicas, images: Tensor, settings: Settings, beside: Beside | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the replicas, as they are, say of plain images.

    Args:
        replicas: S replicas.
        images: `(S, B, C, H, W)`.
        settings: The task, and whether the answer is that of the image and its mirror image together.
        beside: Where to compute the classes while the task's outputs are computed.

    Returns:
        Class logits `(S, B, K)`, the task's loss `(S, B)`, and its confidence in the plain image `(S, B)`.
    """
    assert settings.task is not None
    shape = images.shape[:2]
    views, targets = settings.task.probe(images.flatten(0, 1))
    views = views.view(shape[0], -1, *views.shape[1:])  # (S, B·V, C, h, w)
    features = replicas.encode(views)
    with beside or nullcontext():
        if views.shape[-2:] == images.shape[-2:]:
            plain = features[:, :: views.shape[1] // shape[1]]  # the plain image is its own first view
        else:
            plain = replicas.encode(images)
        logits = replicas.classify(plain).float()
        if settings.mirrored:
            logits = (logits + replicas.classify(replicas.encode(images.flip(-1))).float()) / 2
    losses = settings.task.loss(replicas.supervise(features).flatten(0, 1), targets).view(*shape, -1)  # (S, B, V)
    if beside is not None:
        beside.join()
    return logits, losses.mean(-1), torch.exp(-losses[..., 0])


@torch.no_grad()
def episode(learner: Learner, images: Tensor, samples: Tensor, active: Tensor) -> Prediction:
    """Look, learn, look again; undo what was not wanted or went wrong.

    A replica that the gate or the guard stops is put back afterwards; its neighbours go on undisturbed.

    Args:
        learner: S replicas and their optimizer; the replicas keep what they learn.
        images: `(S, B, C, H, W)`.
        samples: The images' numbers, `(S, B)`.
        active: Which replicas may change at all, bool `(S,)`.

    Returns:
        The answers, every tensor `(S, B, ...)`.
    """
    settings, replicas = learner.settings, learner.replicas
    assert settings.steps > 0
    draws = Draws.of(settings.seed, samples)
    with learner.beside:  # learning need not wait for it, unless it tells whether to learn
        good = learner.snapshot()
        logits_before, loss_before, confidence = look(replicas, images, settings)
    if settings.threshold < 1 or replicas.has_statistics:
        learner.beside.join()
    wanted = active[:, None] & gate(confidence, settings.threshold)  # (S, B)
    weights = wanted.float() / wanted.sum(1, keepdim=True).clamp(min=1)
    # On CUDA nothing is read back and all is computed; elsewhere, what nobody wants is saved.
    idle = not images.is_cuda and not wanted.any()
    try:
        for step in range(0 if idle else settings.steps):
            learn(learner, images, draws.fold(step), weights)
        learner.beside.join()
        with learner.beside:
            finite = replicas.finite()
        logits, loss_after = logits_before, loss_before
        if not idle:
            logits, loss_after, _ = look(replicas, images, settings, learner.beside)
    except BaseException:  # Ctrl-C as well: what was half learned is no state to go on from
        learner.beside.join()
        learner.restore(good, learner.everyone)
        raise
    answers, undone = settle(wanted, logits_before, loss_before, confidence, logits, loss_after, finite, settings.guard)
    if images.is_cuda or undone.any():
        learner.restore(good, undone)
    return answers


def gate(confidence: Tensor, threshold: float) -> Tensor:
    """Which images to learn from: those whose task the network is not already sure of, bool; at 1 all of them."""
    return ~(confidence >= threshold) if threshold < 1 else torch.ones_like(confidence, dtype=torch.bool)


def run(learner: Learner, images: Tensor, samples: Tensor, active: Tensor) -> Prediction:
    """`episode`, on CUDA replayed from a graph."""
    answers = replay(learner, episode, images, samples, active)
    return episode(learner, images, samples, active) if answers is None else answers


def run_each(learner: Learner, images: Tensor, samples: Tensor) -> Prediction:
    """`run` for images `(N, C, H, W)` of a single replica, one after another; samples `(N,)`."""
    answers = replay_each(learner, episode, images, samples)
    if answers is not None:
        return answers
    ones = [(learner, images[None, n : n + 1], samples[None, n : n + 1]) for n in range(len(images))]
    return Prediction.join([run(*one, learner.everyone)[0] for one in ones])

"""Test-Time Training in one sitting: observe an image, learn from it, observe it again (paper, section 2).

    observe   what the network says of the plain image: class logits, the objective's loss, a confidence
    learn     one gradient step on the objective's loss
    episode   observe, learn for some steps, observe again; undo what was not wanted or went wrong

The objective says what an image teaches (objectives.py); the paper's is the rotation task on augmented copies of the
image. A `Learner` is S copies of the network with an image, or a batch of images, for each, so that many episodes run
at once; with S = 1 it is the plain method. What is remembered from image to image is the adapters' affair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.guard import gate, settle
from testtime.adaptation.learner import Learner
from testtime.adaptation.prediction import Prediction
from testtime.kernels import possibly_any
from testtime.randomness import Draws


@torch.no_grad()
def episode(learner: Learner, images: Tensor, samples: Tensor, active: Tensor) -> Prediction:
    """Observe, learn, observe again; undo what was not wanted or went wrong.

    A replica that the gate or the guard stops is put back afterwards; its neighbours are not disturbed.

    Args:
        learner: S replicas and their optimizer; the replicas keep what they learn.
        images: `(S, B, C, H, W)`.
        samples: The images' numbers, `(S, B)`, which their augmentations are drawn by.
        active: Which replicas may change at all, bool `(S,)`.

    Returns:
        The answers, every tensor `(S, B, ...)`.
    """
    settings, objective = learner.settings, learner.objective
    good = learner.later(learner.snapshot)
    before = learner.later(objective.observe, images)  # learning begins meanwhile, unless the gate waits for it
    wanted = active[:, None].expand_as(samples)  # (S, B)
    if settings.threshold < 1:
        wanted = wanted & gate(before.result().confidence, settings.threshold)
    if not possibly_any(wanted):
        return Prediction.unadapted(*before.result())
    weights = wanted.float() / wanted.sum(1, keepdim=True).clamp(min=1)
    draws = Draws.of(settings.seed, samples)
    try:
        for step in range(settings.steps):
            learn(learner, images, draws.fold(step), weights)
        finite = learner.later(learner.is_finite)
        after = objective.observe(images)
        answers, undone = settle(wanted, before.result(), after, finite.result(), settings.guard)
    except BaseException:  # Ctrl-C as well: what was half learned is no state to continue from
        learner.restore(good.result(), learner.everyone)
        raise
    if possibly_any(undone):
        learner.restore(good.result(), undone)
    return answers


def learn(learner: Learner, images: Tensor, draws: Draws, weights: Tensor) -> None:
    """One step down the objective's loss; the replicas' losses are added, so none feels another.

    Args:
        learner: S replicas and their optimizer.
        images: `(S, B, C, H, W)`.
        draws: Keys `(S, B)` of this step.
        weights: How much each image counts within its replica, `(S, B)`.
    """
    objective = learner.objective
    with learner.replicas.learning():
        objective.descend(learner.descend, lambda: (objective.loss(images, draws) * weights).sum())
    objective.update(draws)

"""Test-Time Training: observe an image, learn from it, observe it again (paper, section 2).

    observe   class logits, the objective's loss and a confidence for the plain image
    learn     one gradient step on the objective's loss
    episode   observe, learn for some steps, observe again; undo updates that were gated or failed

The paper's objective is the rotation task on augmented copies of the image; objectives.py has others. A `Learner`
holds S replicas of the network, each with an image or a batch, so that S episodes run in parallel; S = 1 is the plain
method. The adapters decide what persists between images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.guard import gate, settle
from testtime.adaptation.learner import Learner
from testtime.adaptation.lookahead import Lookahead
from testtime.adaptation.prediction import Prediction
from testtime.kernels import possibly_any
from testtime.randomness import Draws


@torch.no_grad()
def episode(learner: Learner, images: Tensor, samples: Tensor, ahead: Lookahead | None = None) -> Prediction:
    """Observe, learn, observe again; undo updates that were gated or failed.

    Replicas stopped by the gate or the guard are restored; the others are not affected.

    Args:
        learner: S replicas and their optimizer, updated in place.
        images: `(S, B, C, H, W)`.
        samples: Sample numbers `(S, B)`, which seed the augmentations.
        ahead: Observes images for a sequence of episodes.

    Returns:
        The predictions, `(S, B, ...)`.
    """
    settings, objective, watch = learner.settings, learner.objective, learner.watch
    ahead = ahead or Lookahead(objective)
    good = learner.later(learner.begin)
    before = learner.later(ahead.measure_before, images)  # concurrently with learning, unless the gate needs it
    wanted = watch.admit(learner.all_rows[:, None].expand_as(samples))  # (S, B)
    if settings.threshold < 1:
        wanted = wanted & gate(before.result().confidence, settings.threshold)
    if not possibly_any(wanted):
        return Prediction.unadapted(*objective.complete(before.result())[0])
    weights = wanted.float() / wanted.sum(1, keepdim=True).clamp(min=1)
    draws = Draws.of(settings.seed, samples)
    try:
        objective.begin(images, wanted)
        for step in range(settings.steps):
            learn(learner, images, draws.fold(step), weights)
        finite = learner.later(learner.is_finite)
        after = ahead.measure_after(images)
        first, last = objective.complete(before.result(), after)
        sound = watch.judge(images, wanted, good.result().pieces[0], last, finite.result())
        rise = watch.guard.rise if objective.measures else None
        prediction, undone = settle(wanted, first, last, sound, watch.alarmed, rise)
    except BaseException:  # including Ctrl-C: a partial update must not remain
        learner.restore(good.result(), learner.all_rows)
        raise
    if possibly_any(undone):
        learner.restore(good.result(), undone)
        ahead.forget()
    if learner.renew(~undone):
        ahead.forget()
    return prediction


def learn(learner: Learner, images: Tensor, draws: Draws, weights: Tensor) -> None:
    """Take one step on the objective's total; the losses of the replicas are summed, which keeps them independent.

    Args:
        learner: S replicas and their optimizer.
        images: `(S, B, C, H, W)`.
        draws: Random keys `(S, B)` of this step.
        weights: Weight of each image within its replica, `(S, B)`.
    """
    objective = learner.objective
    with learner.replicas.batch_norms.learning():
        objective.descend(learner.descend, lambda: objective.total(images, draws, weights))
    objective.update(draws)

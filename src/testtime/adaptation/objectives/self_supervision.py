"""TTT: the network's self-supervised task (Sun et al. 2020)."""

from __future__ import annotations

from torch import Tensor

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.randomness import Draws
from testtime.tasks import make_views


class SelfSupervision(Objective):
    """The self-supervised task of the network's second branch, on augmented copies of the image (Sun et al. 2020)."""

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        settings, count = self.settings, len(images)
        assert settings.task is not None
        assert settings.augment is not None
        given = images.flatten(0, 1), draws.flatten(), settings.copies, settings.augment, settings.task
        views, targets = make_views(*given)  # (S·B·copies·V, C, h, w)
        outputs = self.replicas.self_supervise(views.unflatten(0, (count, -1)))
        losses = settings.task.loss(outputs.flatten(0, 1), targets)
        return losses.view(*images.shape[:2], -1).mean(-1)

    def observe(self, images: Tensor) -> Observation:
        task, (count, number) = self.settings.task, images.shape[:2]
        assert task is not None
        views, targets = task.probe(images.flatten(0, 1))
        views = views.unflatten(0, (count, -1))  # (S, B·V, C, h, w)
        features = self.replicas.encode(views)
        # The first view is the plain image, unless the task changed its shape.
        plain = features[:, :: views.shape[1] // number] if views.shape[2:] == images.shape[2:] else None
        logits = self.later(self.classify, images, plain)
        losses = task.loss(self.replicas.supervise(features).flatten(0, 1), targets).view(count, number, -1)
        return Observation(logits.result(), losses.mean(-1), task.confidence(losses))

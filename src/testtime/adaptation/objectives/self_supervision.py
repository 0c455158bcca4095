"""TTT: the network's self-supervised task (Sun et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.prediction import Unclassified
from testtime.randomness import Draws
from testtime.tasks import make_views


class SelfSupervision(Objective):
    """The self-supervised task of the network's second branch, on augmented copies of the image (Sun et al. 2020)."""

    augments = True

    def loss(self, images: Tensor, draws: Draws) -> Tensor:
        views, targets = self.make_views(images, draws)
        return self.compare(self.replicas.self_supervise(views), targets, images)

    def make_views(self, images: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return views `(S, B·copies·V, C, h, w)` of images `(S, B, C, H, W)`, and their targets, concatenated."""
        settings = self.settings
        assert settings.task is not None
        assert settings.augment is not None
        given = images.flatten(0, 1), draws.flatten(), settings.copies, settings.augment, settings.task
        views, targets = make_views(*given)
        return views.unflatten(0, (len(images), -1)), targets

    def compare(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """Return the loss `(S, B)` of the task's outputs on the views of images."""
        assert self.settings.task is not None
        losses = self.settings.task.loss(outputs.flatten(0, 1), targets)
        return losses.view(*images.shape[:2], -1).mean(-1)

    def observe(self, images: Tensor) -> Observation:
        return self.complete(self._measure(images, may_defer=False))[0]

    def measure(self, images: Tensor) -> Observation | Unclassified:
        if not self._is_own:
            return self.observe(images)
        return self._measure(images, self._may_defer)

    @property
    def joins(self) -> bool:
        return self._is_own and self._may_defer and self.replicas.is_separable("encoder", "ssl")

    @property
    def measures(self) -> bool:
        return self.settings.measure_loss or not self._is_own

    @property
    def _is_own(self) -> bool:
        """Whether images are observed as here, not in a derived class."""
        return type(self).observe is SelfSupervision.observe

    @property
    def _may_defer(self) -> bool:
        """Whether images can as well be classified later: learning must not change the classifier."""
        is_shared = not any(name.startswith("classifier.") for name in self.replicas.tensors)
        return is_shared and self.replicas.is_separable("classifier") and not self.settings.mirrored

    def _measure(self, images: Tensor, may_defer: bool) -> Observation | Unclassified:
        task, (count, number) = self.settings.task, images.shape[:2]
        assert task is not None
        if not self.settings.measure_loss:
            features = self.replicas.encode(images)
            unknown = features.new_full((count, number), torch.nan, dtype=torch.float32)
            if may_defer:
                return Unclassified(features, unknown, unknown)
            return Observation(self.classify(images, features), unknown, unknown)
        views, targets = task.probe(images.flatten(0, 1))
        views = views.unflatten(0, (count, -1))  # (S, B·V, C, h, w)
        both = self.replicas.encode_both(views, images.flip(-1)) if self.settings.mirrored else None
        features, mirrored = (self.replicas.encode(views), None) if both is None else both
        # The first view is the plain image, unless the task changed its shape.
        plain = features[:, :: views.shape[1] // number] if views.shape[2:] == images.shape[2:] else None
        defers = may_defer and plain is not None
        logits = None if defers else self.later(self.classify, images, plain, mirrored)
        losses = task.loss(self.replicas.supervise(features).flatten(0, 1), targets).view(count, number, -1)
        loss, confidence = losses.mean(-1), task.confidence(losses)
        if logits is None:
            assert plain is not None
            return Unclassified(plain.contiguous(), loss, confidence)
        return Observation(logits.result(), loss, confidence)

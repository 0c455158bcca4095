"""Auto: an adapter that decides for every image whether to learn from it, and whether to remember what it learned.

It follows one score without labels, the drift: the loss of the unadapted network's self-supervised task, relative to
its loss on the training data.

    the stream has drifted          online: learn, and remember
    only this image is unusual      episodic: learn, and forget
    neither                         fixed: do not learn

Decisions do not depend on what was learned, so that learning cannot talk itself into more or less of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.adaptation.adapters import Episodic, Online
from testtime.adaptation.methods import Method, find_method
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.settings import document_settings
from testtime.checks import format_value, is_number
from testtime.networks.task_loss import find_entry, measure_drift, read_task_loss
from testtime.networks.ynet import YNet

_WINDOW = 500  # images of an estimate
_SIGMAS = 2.0  # half width of a 95% interval, in standard errors
_FIXED, _EPISODIC, _ONLINE = range(3)


@dataclass(frozen=True)
class Calibration:
    """The thresholds of `Auto`, and how the accuracy falls with confidence.

    `testtime.evaluation.fit_calibration` fits one to runs with labels. The default was fitted to one network, on
    held-out images of CIFAR-10 under the extra corruptions.

    Attributes:
        online: Drift of a stream from which it learns online; None: never.
        episodic: Drift of an image from which it is learned from in a stream that does not learn online; None: never.
        momentum: Of the moving average that is the drift of a stream. It starts at 1, i.e. no drift.
        slope: By how many points the accuracy falls when the fraction of sure predictions falls by one.
        spread: Standard deviation of the accuracy of streams around that line.
    """

    online: float | None = 1.02
    episodic: float | None = None
    momentum: float = 0.99
    slope: float = 1.33
    spread: float = 0.04

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (is_number(value) or (value is None and name in ("online", "episodic"))):
                raise ValueError(f"`{name}` must be a number, got {format_value(value)}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum}.")
        if self.spread < 0:
            raise ValueError(f"`spread` must not be negative, got {self.spread}.")

    def choose(self, drifts: Tensor, average: float) -> tuple[Tensor, float]:
        """Choose the mode of each image of a stream: 0 fixed, 1 episodic, 2 online.

        Args:
            drifts: Drifts of the images, `(N,)`. One that is not finite is left to online learning, whose guard undoes
                what cannot be learned from.
            average: The drift of the stream before them.

        Returns:
            The modes, int64 `(N,)`, and the drift of the stream after them.
        """
        averages = follow_drift(drifts, average, self.momentum)
        return self.decide(drifts, averages), float(averages[-1]) if len(averages) else average

    def decide(self, drifts: Tensor, averages: Tensor) -> Tensor:
        """Choose the modes of images by their drifts and those of the stream, `(N,)` each, see `choose`."""
        online, episodic = (math.inf if limit is None else limit for limit in (self.online, self.episodic))
        modes = torch.where(drifts >= episodic, _EPISODIC, _FIXED)
        return torch.where(~drifts.isfinite() | (averages >= online), _ONLINE, modes)

    def estimate(self, sure: float, usual: float, images: int) -> Accuracy:
        """Estimate the accuracy on some images.

        Args:
            sure: The fraction of sure predictions.
            usual: The accuracy where nothing has shifted, which is also the fraction of sure predictions there.
            images: Their number.
        """
        value = min(1.0, max(0.0, usual + self.slope * (sure - usual)))
        error = _SIGMAS * math.sqrt(self.spread**2 + value * (1 - value) / max(images, 1))
        return Accuracy(value, max(0.0, value - error), min(1.0, value + error))


class Accuracy(NamedTuple):
    """An estimate of the accuracy with the bounds of a 95% interval."""

    value: float
    low: float
    high: float


class Sureness(NamedTuple):
    """Which predictions of a network are sure: as many as are right on images like those of its training.

    Attributes:
        confidence: The probability of the predicted class above which a prediction is sure; None: it is not known, and
            the probability itself counts.
        usual: The accuracy on images like those of its training; 1 if it is not known.
    """

    confidence: float | None
    usual: float

    @classmethod
    def of(cls, net: YNet) -> Sureness:
        """Return what a network's statistics of unseen images say (Garg et al. 2022)."""
        about: Any = {} if net.statistics is None else net.statistics.about  # from a file, not validated
        known = [find_entry(about, "unseen", name) for name in ("confidence", "accuracy")]
        return cls(*known) if all(is_number(value) and 0 <= value <= 1 for value in known) else cls(None, 1.0)

    def measure(self, probability: Any) -> Any:
        """Return how sure a prediction is, from the probability of its class; an array or a number."""
        return probability if self.confidence is None else (probability > self.confidence) * 1.0


def _read_calibration(net: YNet) -> Calibration:
    try:
        return Calibration(**net.card.settings.get("auto", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"The network's card has a calibration that is not valid: {error}") from None


def follow_drift(drifts: Tensor, average: float, momentum: float) -> Tensor:
    """Return the drift of a stream after each of its images, float64 `(N,)`, on the CPU.

    Args:
        drifts: Drifts of the images, `(N,)`; one that is not finite leaves the average as it is.
        average: The drift of the stream before them.
        momentum: Of the moving average.
    """
    averages = []
    for drift in drifts.tolist():
        if math.isfinite(drift):
            average += (drift - average) * (1 - momentum)
        averages.append(average)
    return torch.tensor(averages, dtype=torch.float64, device="cpu")


@document_settings(steps=1)
class Auto(Online):
    """A stream in which each image is predicted fixed, by an episode, or online, as the drift suggests.

    The score and the predictions without learning are those of the unadapted network. What was learned online is
    remembered while the stream does not learn.

    Args:
        net: The network; it is copied.
        method: A name from `METHODS` that needs a self-supervised branch, or such a `Method`.
        calibration: The thresholds; by default those of the network's card (`Card.settings["auto"]`), if it has any.
        reference: The task's loss on training data; by default what the network's statistics or its card say.
        **settings: See below; they override the method's. `steps` are those of online learning; episodes take the
            method's.
    """

    def __init__(
        self,
        net: YNet,
        *,
        method: str | Method = "ttt",
        calibration: Calibration | None = None,
        reference: float | None = None,
        **settings: Any,
    ) -> None:
        self.calibration = calibration or _read_calibration(net)
        if not find_method(method).needs_branch:
            raise ValueError(f"`method` must need a self-supervised branch, whose loss Auto follows, got {method!r}.")
        if settings.setdefault("share", "image") != "image":
            raise ValueError("Auto decides for every image, so there is no batch to `share`.")
        if not settings.get("measure_loss", True):
            raise ValueError("Auto follows the task's loss, so `measure_loss` must be true.")
        super().__init__(net, method=method, **settings)
        known = read_task_loss(net) if reference is None else None
        reference = known.loss if known is not None else reference
        if reference is None or not (math.isfinite(reference) and reference > 0):
            raise ValueError(
                f"Auto compares with the task's loss in training, got {reference}: pass `reference`, or add it with "
                "tt.collect(net, images)."
            )
        self.reference, self.sureness = reference, Sureness.of(net)
        given = {name: value for name, value in settings.items() if name != "steps"}
        self._episodes = [Episodic(net, method=method, **given)]  # in a list, to hide it from nn.Module

    @property
    def drift(self) -> float:
        """The drift of the stream: a moving average of the task's loss relative to training; 1 means none."""
        return float(self._extra["score"][0])

    def estimate_accuracy(self) -> Accuracy | None:
        """Estimate the accuracy of the last predictions, up to about 500, without labels; None before the first.

        It rests on the fraction of sure predictions; `testtime train --hold-out` and `tt.collect` with labelled
        `unseen` images measure which are sure. Otherwise it rests on their mean probability.
        """
        _, sure, images = self._extra["score"].tolist()
        return self.calibration.estimate(sure, self.sureness.usual, int(images)) if images else None

    def describe(self) -> dict[str, Any]:
        """Return method, settings, calibration and reference, JSON-serializable."""
        return super().describe() | {"calibration": asdict(self.calibration), "reference": self.reference}

    def reset(self) -> None:
        """Reset to the original network: the score, the sample counter, the counts, and everything learned."""
        with self._lock, torch.inference_mode(False):
            super().reset()
            # Drift of the stream, fraction of sure predictions, and over how many images.
            self._extra["score"] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device="cpu")

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        prediction = self._unadapted(images)
        if self.settings.steps == 0 or len(images) == 0:
            return prediction
        average, sure, count = self._extra["score"].tolist()
        drifts = measure_drift(prediction.loss_before, self.reference).double().cpu()
        modes, average = self.calibration.choose(drifts, average)
        for mode, predict in ((_EPISODIC, self._episodes[0]._predict), (_ONLINE, super()._predict)):
            rows = (modes == mode).nonzero().flatten().to(images.device)
            if len(rows):
                learned = predict(images[rows], samples[rows])
                for f in fields(Prediction):
                    getattr(prediction, f.name)[rows] = getattr(learned, f.name)
        for value in prediction.logits.softmax(1).amax(1).double().tolist():
            if math.isfinite(value):
                count = min(count + 1, _WINDOW)
                sure += (self.sureness.measure(value) - sure) / count
        self._extra["score"] = torch.tensor([average, sure, count], dtype=torch.float64, device="cpu")
        return prediction

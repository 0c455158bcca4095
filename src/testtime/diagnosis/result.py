"""The result of a diagnosis, and its measurements in words.

Every estimate is a mean over images or batches with its standard error; intervals are ± two standard errors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from testtime.diagnosis.correlation import Agreement, to_plain
from testtime.storage import printable

Kind = Literal["helps", "hurts", "little to gain", "untrained", "trivial", "ill-defined", "unclear"]

_SIDES = ("at the top", "on the left", "at the bottom", "on the right")
_SIGMAS = 2.0  # half width of a 95% interval, in standard errors


class Estimate(NamedTuple):
    """A mean over images with its standard error."""

    value: float
    error: float

    @property
    def low(self) -> float:
        """Lower bound of the 95% interval."""
        return self.value - _SIGMAS * self.error

    @property
    def high(self) -> float:
        """Upper bound of the 95% interval."""
        return self.value + _SIGMAS * self.error

    @staticmethod
    def of(values: Tensor) -> Estimate:
        """Estimate the mean of values `(N,)`."""
        error = float(values.double().std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
        return Estimate(float(values.double().mean()), error)


@dataclass(frozen=True)
class Hints:
    """What reveals an image's rotation regardless of its content.

    Attributes:
        margins: Mean blank fraction of the side at the top, left, bottom and right.
        border: Error of predicting the rotation from the outermost pixels alone, by comparison with the mean border of
            the other images; 0.75 is chance.
    """

    margins: tuple[float, float, float, float]
    border: float


@dataclass(frozen=True)
class Reference:
    """How easy the task is on the network's training data.

    Attributes:
        source: Where the values come from.
        task_loss: The task's mean loss.
        task_error: The task's error; None if only the loss is known.
        hints: The hints in the images; None if the images are not available.
    """

    source: str
    task_loss: float
    task_error: float | None = None
    hints: Hints | None = None


@dataclass(frozen=True)
class Trial:
    """A short stream of online learning.

    Attributes:
        images: Its length.
        steps: Gradient steps per image.
        lr: Learning rate.
        fall: Decrease of the task's loss relative to the unadapted network, on the images of the second half just
            before they are learned from.
        loss: The task's loss on those images.
        rolled_back: Fraction of images whose update the guard rolled back.
        changed: Fraction of images whose predicted class changed.
        error_before: The unadapted network's error on the stream; None without labels.
        error_after: The error with online learning; None without labels.
        gain: Decrease of the error, as a mean over the images; None without labels.
    """

    images: int
    steps: int
    lr: float
    fall: Estimate
    loss: Estimate
    rolled_back: float
    changed: float
    error_before: float | None = None
    error_after: float | None = None
    gain: Estimate | None = None


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a diagnosis.

    Attributes:
        kind: `helps`, `hurts`, `little to gain`, `untrained`, `trivial`, `ill-defined` or `unclear`.
        headline: The conclusion in a sentence.
        reasons: The evidence, one sentence each.
        advice: What to do next.
    """

    kind: Kind
    headline: str
    reasons: tuple[str, ...]
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        name: The set.
        images: Number of images inspected.
        task_error: Fraction of views on which the self-supervised branch is wrong.
        task_loss: Its loss.
        reference: The same on the training data; None if not known.
        drift: Increase of the task's loss from the beginning to the end of the stream.
        threshold: The gate's threshold.
        gated: Fraction of images that the gate would select for learning.
        consistent: Fraction of images whose four views imply the same orientation.
        upright: Fraction of those predicted to be upright; None if there are none.
        hints: What reveals the rotation.
        confident: Fraction of images on which the classifier is confident.
        agreement: Agreement of the two gradients with confident predictions as labels; None if there are none.
        balance: Agreement with the balance of the predictions as the main loss, see `Correlation`.
        true_agreement: Agreement with the true labels; None without labels.
        trial: The trial of online learning.
        verdict: The conclusion.
        task: Name of the self-supervised task.
        chance: The task's error at chance level.
    """

    name: str
    images: int
    task_error: Estimate
    task_loss: Estimate
    reference: Reference | None
    drift: Estimate
    threshold: float
    gated: float
    consistent: float
    upright: float | None
    hints: Hints
    confident: float
    agreement: Agreement | None
    balance: Agreement | None
    true_agreement: Agreement | None
    trial: Trial
    verdict: Verdict
    task: str = "rotation"
    chance: float = 0.75

    def describe(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-serializable data."""
        return to_plain(asdict(self)) | {"facts": list_facts(self), "plain": list_plain_facts(self)}


def format_diagnosis(found: Diagnosis) -> str:
    """Format a diagnosis as lines of text."""
    head = f"{printable(found.name)}, {found.images:,} images\n{found.verdict.headline}"
    reasons = "".join(f"\n  – {reason}" for reason in found.verdict.reasons)
    advice = f"\nNext: {found.verdict.advice}" if found.verdict.advice else ""
    return head + reasons + advice + "".join(f"\n  {name:<12}{text}" for name, text in list_facts(found).items())


def list_facts(found: Diagnosis) -> dict[str, str]:
    """Return the measurements as text, by name."""
    known, trial = found.reference, found.trial
    task = f"error {format_percent(found.task_error)}, loss {format_number(found.task_loss)}"
    if known is None:
        usual = "not known: pass --reference"
    else:
        error = "" if known.task_error is None else f"error {known.task_error:.1%}, "
        usual = f"{error}loss {known.task_loss:.2f} ({printable(known.source)})"
    lines = {
        "task": task,
        "in training": usual,
        "drift": f"{found.drift.value:+.2f} ± {_SIGMAS * found.drift.error:.2f} in the task's loss along the stream",
    }
    if found.task == "rotation":
        upright = "" if found.upright is None else f", {found.upright:.0%} of them upright"
        lines |= {
            "up": f"{found.consistent:.0%} of the images have the same orientation in all rotations{upright}",
            "borders": f"margins {format_margins(found.hints)}; error from the border alone {found.hints.border:.0%}",
        }
    lines |= {
        "gate": f"at {found.threshold:g} it would select {found.gated:.0%} of the images",
        "guard": f"would intervene on {trial.rolled_back:.0%} ({trial.images} images, {trial.steps} × lr {trial.lr:g})",
    }
    if found.agreement is not None:
        lines["agreement"] = f"cosine {format_cosine(found.agreement)}, confident predictions as labels"
    if found.balance is not None:
        lines["balance"] = f"cosine {format_cosine(found.balance)}, balanced predictions as the main loss"
    if found.true_agreement is not None:
        step = trial.lr * found.true_agreement.inner
        lines["with labels"] = (
            f"cosine {format_cosine(found.true_agreement)}; to first order a step of the trial changes the main "
            f"loss by {-step:+.3g}"
        )
    if trial.gain is not None and trial.error_before is not None and trial.error_after is not None:
        lines["gain"] = (
            f"{100 * trial.gain.value:+.1f} ± {100 * _SIGMAS * trial.gain.error:.1f} points in the trial: error "
            f"{trial.error_before:.1%} → {trial.error_after:.1%}"
        )
    return lines


def list_plain_facts(found: Diagnosis) -> list[str]:
    """Return three facts for a reader who does not know the method."""
    known, trial = found.reference, found.trial
    usual = ""
    if known is not None and known.task_error is not None:
        usual = f", and on {known.task_error:.0%} of those it was trained on"
    direction = {
        1: "What the task teaches here is also good for the classes",
        0: "Whether what the task teaches here is good for the classes cannot be told",
        -1: "What the task teaches here is bad for the classes",
    }[find_direction(found)]
    moved = "easier" if trial.fall.low > 0 else "harder" if trial.fall.high < 0 else "neither easier nor harder"
    undone = f"; {trial.rolled_back:.0%} of the updates were undone" if trial.rolled_back else ""
    return [
        f"In its task without labels ({found.task}) the network errs on {found.task_error.value:.0%} of these images"
        f"{usual}; guessing errs on {found.chance:.0%}.",
        f"{direction}, judged by the gradients of the two tasks.",
        f"While the network learned from {trial.images} images one after another, new ones became {moved}{undone}.",
    ]


def find_direction(found: Diagnosis) -> int:
    """Return 1 if the two gradients agree significantly, -1 if they disagree, else 0."""
    if found.balance is not None and estimate_cosine(found.balance).high < 0:
        return -1
    # A wrong pseudo-label reverses its gradient, so confident predictions are no evidence of disagreement.
    known = [part for part in (found.balance, found.agreement) if part is not None]
    return 1 if any(estimate_cosine(part).low > 0 for part in known) else 0


def estimate_cosine(agreement: Agreement) -> Estimate:
    """Return the mean cosine of two gradients."""
    error = agreement.cosine_error
    return Estimate(agreement.cosine, error if math.isfinite(error) else math.inf)


def format_cosine(agreement: Agreement) -> str:
    """Format the mean cosine of two gradients as text."""
    estimate = estimate_cosine(agreement)
    spread = f" ± {_SIGMAS * estimate.error:.2f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.2f}{spread}"


def format_margins(hints: Hints) -> str:
    """Format the margins of images as text."""
    return ", ".join(f"{share:.0%} {side}" for share, side in zip(hints.margins, _SIDES, strict=True))


def format_number(estimate: Estimate) -> str:
    """Format an estimate as text."""
    return f"{estimate.value:.2f} ± {_SIGMAS * estimate.error:.2f}"


def format_percent(estimate: Estimate) -> str:
    """Format an estimate of a fraction as text."""
    return f"{100 * estimate.value:.1f}% ± {100 * _SIGMAS * estimate.error:.1f}"

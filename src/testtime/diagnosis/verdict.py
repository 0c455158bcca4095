"""The result of a diagnosis, and its verdict in words.

measure.py measures; `judge` applies a few simple rules. Every estimate is a mean over images or batches with its
standard error; intervals are ± two standard errors.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from testtime.diagnosis.correlation import Agreement, to_plain
from testtime.networks.task_loss import EASY, measure_drift
from testtime.storage import printable

Kind = Literal["helps", "hurts", "little to gain", "untrained", "trivial", "ill-defined", "unclear"]

_SIDES = ("at the top", "on the left", "at the bottom", "on the right")
_SIGMAS = 2.0  # half width of a 95% interval, in standard errors
_MARGIN = 1 / 12  # of the side: excess over the training images' margin; 1.5 times if those are unknown
_BORDER = 0.2  # error from the border alone below which it reveals the rotation
_LOST = 0.65  # error from which the task counts as guessed
_GUESSING = 0.9  # times the loss of guessing, from which the task counts as not learned


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


def judge(found: Diagnosis, guessing: float) -> Verdict:
    """Derive the verdict from a diagnosis, without using labels.

    The first rule that holds applies:

        untrained       the task is at chance level on the network's own training data
        trivial         margins or the border reveal the rotation, unlike in the training data
        ill-defined     the task is at chance level, and the trial does not improve its loss on new images; unclear
                        if it is not known whether the branch can solve it on the training data
        little to gain  the task is about as easy as on the training data
        hurts           the two gradients disagree, or the guard intervenes on more than 5% of the trial
        helps           the two gradients agree, and the task's loss does not rise along the trial
        unclear         none of these

    Whether the gradients agree is estimated without labels: by the balance of the predictions and, if that is not
    significant, by the confident predictions, which can be evidence for adaptation but not against it.

    Args:
        found: The diagnosis; its verdict is ignored.
        guessing: The task's loss at chance level.
    """
    for rule in (_untrained, _trivial, _ill_defined, _little, _hurts, _helps):
        verdict = rule(found, guessing)
        if verdict is not None:
            return verdict
    return Verdict(
        "unclear",
        "Unsure: the evidence that adaptation helps here is not significant.",
        (_format_task(found), _format_agreement(found), _format_trial(found)),
        "Diagnose more images (--limit 2000 --trial 1000), or label some of them and compare with testtime eval.",
    )


def _untrained(found: Diagnosis, guessing: float) -> Verdict | None:
    known = found.reference
    if known is None:
        return None
    if known.task_error is None:
        is_lost, measured = known.task_loss >= _GUESSING * guessing, f"loss {known.task_loss:.2f}"
    else:
        is_lost, measured = known.task_error >= _LOST, f"{known.task_error:.1%} error"
    if not is_lost:
        return None
    return Verdict(
        "untrained",
        f"Untrained branch: {measured} in its task ({found.task}) even on the training data.",
        (
            f"Measured on: {printable(known.source)}; chance is {found.chance:.0%}, a loss of {guessing:.2f}.",
            _format_task(found),
        ),
        "Train the branch, or train it longer; that needs no labels: testtime fit-branch, or tt.fit_branch.",
    )


def _ill_defined(found: Diagnosis, guessing: float) -> Verdict | None:
    if found.trial.loss.value < _GUESSING * guessing or found.task_error.value < _LOST:
        return None
    reasons = [
        f"The task's error is {_percent(found.task_error)}; {found.chance:.0%} is chance.",
        f"After learning from {found.trial.images} images its loss on new ones is {_number(found.trial.loss)}; "
        f"guessing gives {guessing:.2f}.",
    ]
    if found.upright is not None and found.consistent >= 0.5 and found.upright <= 0.5:
        reasons.append(
            f"The network distinguishes the rotations of {found.consistent:.0%} of the images, but predicts only "
            f"{found.upright:.0%} of them as upright: their orientations vary."
        )
    if found.reference is None:
        return Verdict(
            "unclear",
            f"Unsure: {found.task} is at chance level on these images. Either the branch is not trained, or the task "
            "is ill-defined on them.",
            tuple(reasons),
            "Pass images like those that the network was trained on with --reference: they tell which of the two.",
        )
    return Verdict(
        "ill-defined",
        f"Ill-defined task: {found.task} is at chance level on these images, and cannot be learned from them.",
        tuple(reasons),
        "Do not adapt with this task. Try a method that needs none (testtime methods), or train a branch for another "
        "task on images like these.",
    )


def _trivial(found: Diagnosis, guessing: float) -> Verdict | None:
    if found.task != "rotation":  # the hints are of rotations
        return None
    known = None if found.reference is None else found.reference.hints
    usual = (0.0,) * 4 if known is None else known.margins
    excess = [margin - other for margin, other in zip(found.hints.margins, usual, strict=True)]
    reasons, most = [], _MARGIN if known is not None else 1.5 * _MARGIN
    if max(excess) > most and max(excess) - min(excess) > most:
        reasons.append(f"Blank margins cover on average {_margins(found.hints)} of the side.")
    border = 0.75 if known is None else known.border
    if found.hints.border < _BORDER and border - found.hints.border > 0.15:
        reasons.append(
            f"The outermost pixels alone reveal the rotation: error {found.hints.border:.0%}; 75% is chance."
        )
    if not reasons:
        return None
    if known is None:
        reasons.append("The borders of the training images are not known; --reference provides them.")
    else:
        reasons.append(f"On the training data: {_margins(known)}; error from the border alone {known.border:.0%}.")
    return Verdict(
        "trivial",
        "Too easy: margins or borders reveal the rotation, so that learning it may not teach anything.",
        (*reasons, _format_trial(found)),
        "Crop the margins, frames and stamps that all images share, and diagnose again.",
    )


def _little(found: Diagnosis, guessing: float) -> Verdict | None:
    known = found.reference
    if known is None or measure_drift(found.task_loss.low, known.task_loss) > EASY:
        return None
    reasons = (_format_task(found), _format_agreement(found))
    return Verdict(
        "little to gain",
        "Nothing to gain: the task is about as easy as on the training data.",
        reasons,
        "Leave the network as it is, and diagnose again when the images change. If it makes more mistakes than in "
        "training, the reason is one that this task does not see.",
    )


def _hurts(found: Diagnosis, guessing: float) -> Verdict | None:
    disagree = _direction(found) < 0
    if not disagree and found.trial.rolled_back <= 0.05:
        return None
    cause = "the gradients of the two tasks disagree" if disagree else "the guard rolls back too many updates"
    return Verdict(
        "hurts",
        f"May hurt: {cause}.",
        (_format_task(found), _format_agreement(found), _format_trial(found)),
        "Do not adapt with this task, or only after a comparison on labelled images (testtime eval); a smaller "
        "learning rate, or another method (testtime methods), may be safer.",
    )


def _helps(found: Diagnosis, guessing: float) -> Verdict | None:
    if _direction(found) <= 0 or found.trial.fall.high <= 0:
        return None
    reasons = [_format_task(found), _format_agreement(found), _format_trial(found)]
    if found.drift.low > 0:
        reasons.append(f"The task's loss rises by {_number(found.drift)} along the stream: later images are harder.")
    return Verdict(
        "helps",
        "Likely to help: what the task teaches on these images is also good for the classes.",
        tuple(reasons),
        "Adapt online, and compare on a few labelled images if there are any: testtime eval, or tt.Online(net).",
    )


def _direction(found: Diagnosis) -> int:
    """Return 1 if the two gradients agree significantly, -1 if they disagree, else 0."""
    if found.balance is not None and _cosine(found.balance).high < 0:
        return -1
    # A wrong pseudo-label reverses its gradient, so confident predictions are no evidence of disagreement.
    known = [part for part in (found.balance, found.agreement) if part is not None]
    return 1 if any(_cosine(part).low > 0 for part in known) else 0


def format_diagnosis(found: Diagnosis) -> str:
    """Format a diagnosis as lines of text."""
    head = f"{printable(found.name)}, {found.images:,} images\n{found.verdict.headline}"
    reasons = "".join(f"\n  – {reason}" for reason in found.verdict.reasons)
    advice = f"\nNext: {found.verdict.advice}" if found.verdict.advice else ""
    return head + reasons + advice + "".join(f"\n  {name:<12}{text}" for name, text in list_facts(found).items())


def list_facts(found: Diagnosis) -> dict[str, str]:
    """Return the measurements as text, by name."""
    known, trial = found.reference, found.trial
    task = f"error {_percent(found.task_error)}, loss {_number(found.task_loss)}"
    if known is None:
        usual = "not known: pass --reference"
    else:
        error = "" if known.task_error is None else f"error {known.task_error:.1%}, "
        usual = f"{error}loss {known.task_loss:.2f} ({printable(known.source)})"
    upright = "" if found.upright is None else f", {found.upright:.0%} of them upright"
    lines = {
        "task": task,
        "in training": usual,
        "drift": f"{found.drift.value:+.2f} ± {_SIGMAS * found.drift.error:.2f} in the task's loss along the stream",
        "up": f"{found.consistent:.0%} of the images have the same orientation in all rotations{upright}",
        "borders": f"margins {_margins(found.hints)}; error from the border alone {found.hints.border:.0%}",
        "gate": f"at {found.threshold:g} it would select {found.gated:.0%} of the images",
        "guard": f"would intervene on {trial.rolled_back:.0%} ({trial.images} images, {trial.steps} × lr {trial.lr:g})",
    }
    if found.agreement is not None:
        lines["agreement"] = f"cosine {_signed(_cosine(found.agreement))}, confident predictions as labels"
    if found.balance is not None:
        lines["balance"] = f"cosine {_signed(_cosine(found.balance))}, balanced predictions as the main loss"
    if found.true_agreement is not None:
        step = trial.lr * found.true_agreement.inner
        lines["with labels"] = (
            f"cosine {_signed(_cosine(found.true_agreement))}; to first order a step of the trial changes the main "
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
    }[_direction(found)]
    moved = "easier" if trial.fall.low > 0 else "harder" if trial.fall.high < 0 else "neither easier nor harder"
    undone = f"; {trial.rolled_back:.0%} of the updates were undone" if trial.rolled_back else ""
    return [
        f"In its task without labels ({found.task}) the network errs on {found.task_error.value:.0%} of these images"
        f"{usual}; guessing errs on {found.chance:.0%}.",
        f"{direction}, judged by the gradients of the two tasks.",
        f"While the network learned from {trial.images} images one after another, new ones became {moved}{undone}.",
    ]


def _format_task(found: Diagnosis) -> str:
    text = f"The task's error is {_percent(found.task_error)}, its loss {_number(found.task_loss)}"
    known = found.reference
    if known is None:
        return f"{text}; on the training data they are not known; --reference provides them."
    error = "" if known.task_error is None else f"error {known.task_error:.1%}, "
    return f"{text}; on the training data {error}loss {known.task_loss:.2f}."


def _format_agreement(found: Diagnosis) -> str:
    if found.agreement is None and found.balance is None:
        return "The two tasks' gradients were not compared."
    parts = []
    if found.agreement is not None:
        parts.append(
            f"{_signed(_cosine(found.agreement))} with confident predictions ({found.confident:.0%} of the images) as "
            "labels"
        )
    if found.balance is not None:
        parts.append(f"{_signed(_cosine(found.balance))} with balanced predictions as the main loss")
    return f"Without labels, the cosine of the two tasks' gradients is {'; '.join(parts)}."


def _format_trial(found: Diagnosis) -> str:
    trial, moved = found.trial, found.trial.fall
    change = "fell by" if moved.low > 0 else "rose by" if moved.high < 0 else "did not change significantly:"
    size = Estimate(abs(moved.value), moved.error)
    return (
        f"In a trial of online learning on {trial.images} images, the task's loss on new images {change} "
        f"{_number(size)}; the guard intervened on {trial.rolled_back:.0%}."
    )


def _cosine(agreement: Agreement) -> Estimate:
    error = agreement.cosine_error
    return Estimate(agreement.cosine, error if math.isfinite(error) else math.inf)


def _signed(estimate: Estimate) -> str:
    spread = f" ± {_SIGMAS * estimate.error:.2f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.2f}{spread}"


def _margins(hints: Hints) -> str:
    return ", ".join(f"{share:.0%} {side}" for share, side in zip(hints.margins, _SIDES, strict=True))


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ± {_SIGMAS * estimate.error:.2f}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f}% ± {100 * _SIGMAS * estimate.error:.1f}"

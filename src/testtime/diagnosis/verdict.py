"""What a diagnosis holds, and the verdict that follows from it, in words and with its uncertainty.

measure.py measures; `judge` decides by a few rules that can be read below. Every number is a mean over images (or
batches of them) with its standard error, and an interval is two of those to either side.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from testtime.diagnosis.correlation import Agreement
from testtime.storage import printable

Kind = Literal["helps", "hurts", "little to gain", "trivial", "ill-defined", "unclear"]

_SIDES = ("at the top", "on the left", "at the bottom", "on the right")
_SIGMAS = 2.0  # how many standard errors an interval reaches to either side: 95%
_MARGIN = 1 / 12  # of the side: a margin wider by this than the training images' stands out; by half more, if unknown
_BORDER = 0.2  # error from the border alone below which it gives the turn away
_FEW = 1.5  # times the training data's loss up to which a task counts as about as easy
_LOST = 0.65  # error from which on the task counts as guessed
_GUESSING = 0.9  # times the loss of guessing from which on a task counts as not learned


class Estimate(NamedTuple):
    """A mean over images with its standard error."""

    value: float
    error: float

    @property
    def low(self) -> float:
        """The lower end of its 95% interval."""
        return self.value - _SIGMAS * self.error

    @property
    def high(self) -> float:
        """The upper end of its 95% interval."""
        return self.value + _SIGMAS * self.error

    @staticmethod
    def of(values: Tensor) -> Estimate:
        """The mean of values `(N,)`."""
        error = float(values.double().std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
        return Estimate(float(values.double().mean()), error)


@dataclass(frozen=True)
class Hints:
    """What gives an image's turn away without looking at what it shows.

    Attributes:
        margins: Mean share of the side that is blank at the top, left, bottom and right.
        border: Error of telling the turn from the outermost pixels alone, by the mean border of the other images; 0.75
            is guessing.
    """

    margins: tuple[float, float, float, float]
    border: float


@dataclass(frozen=True)
class Reference:
    """How easy the task is on the data that the network was trained on.

    Attributes:
        source: Where the numbers come from.
        task_loss: The task's mean loss there.
        task_error: Its error; None where only the loss is known.
        hints: The images' own hints; None where the images are not there.
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
        steps: Gradient steps on each image.
        lr: Learning rate.
        fall: By how much the task's loss on images of the second half, just before they are learned from, is below the
            unadapted network's.
        loss: The task's loss on those images then.
        rolled_back: Share of images whose update the guard undid.
        changed: Share of images that are classified differently.
        error_before: The unadapted network's error on the stream; None without labels.
        error_after: The error with online learning; None without labels.
        gain: By how much the error fell, as a mean over the images; None without labels.
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
    """What follows from a diagnosis.

    Attributes:
        kind: `helps`, `hurts`, `little to gain`, `trivial`, `ill-defined` or `unclear`.
        headline: The same in a sentence.
        reasons: What it rests on, a sentence each.
    """

    kind: Kind
    headline: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        name: The set.
        images: How many of its images were looked at.
        task_error: Share of views whose turn the self-supervised branch gets wrong.
        task_loss: Its loss.
        reference: The same on the training data; None where nothing is known of it.
        drift: By how much the task's loss rises from the beginning of the stream to its end.
        threshold: The gate's threshold.
        gated: Share of images that the gate would let through to learning.
        consistent: Share of images whose four views are all answered with the same turn of the image.
        upright: Share of those that are taken to be upright; None where there are none.
        hints: What gives the turn away.
        confident: Share of images on which the classifier is confident.
        agreement: Agreement of the two gradients with confident predictions as labels; None where there are none.
        balance: Agreement with the balance of the predictions as the main loss, see `Correlation`.
        true_agreement: Agreement with the true labels; None without labels.
        trial: The short stream of online learning.
        verdict: What follows.
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

    def describe(self) -> dict[str, Any]:
        """The same as JSON could hold it."""
        return _plain(asdict(self)) | {"facts": list_facts(self)}


def judge(found: Diagnosis, guessing: float) -> Verdict:
    """What follows from a diagnosis without its verdict; labels play no part in it.

    The rules, the first that holds:

        trivial         margins or the border give the turn away, and did not in the training data
        ill-defined     the task is guessed, and after the trial its loss on images not yet seen is no better
        little to gain  the task is about as easy as on the training data
        hurts           the two gradients point apart, or the guard had to step in on more than a twentieth of the trial
        helps           they point the same way, and the task does not get harder along the stream
        unclear         none of these

    Which way the gradients point is told without labels: by the balance of the predictions, and where that does not go
    beyond chance by the confident predictions, which can speak for adaptation but not against it.

    Args:
        found: Everything but the verdict.
        guessing: The task's loss by guessing.
    """
    for rule in (_trivial, _ill_defined, _little, _hurts, _helps):
        verdict = rule(found, guessing)
        if verdict is not None:
            return verdict
    reasons = [_tell_agreement(found), _tell_trial(found)]
    return Verdict(
        "unclear", "It is not clear whether adaptation helps here: the signs do not go beyond chance.", tuple(reasons)
    )


def _ill_defined(found: Diagnosis, guessing: float) -> Verdict | None:
    if found.trial.loss.value < _GUESSING * guessing or found.task_error.value < _LOST:
        return None
    reasons = [
        f"The task's error is {_percent(found.task_error)}; 75% is guessing.",
        f"After learning along {found.trial.images} images its loss on the next ones is {_number(found.trial.loss)}; "
        f"guessing has {guessing:.2f}.",
    ]
    if found.upright is not None and found.consistent >= 0.5 and found.upright <= 0.5:
        reasons.append(
            f"The network tells the views of an image apart ({found.consistent:.0%} of the images), but takes only "
            f"{found.upright:.0%} of them to be upright: the images lie in all directions."
        )
    return Verdict("ill-defined", "Rotation is ill-defined on this data: there is no up to learn from.", tuple(reasons))


def _trivial(found: Diagnosis, guessing: float) -> Verdict | None:
    known = None if found.reference is None else found.reference.hints
    usual = (0.0,) * 4 if known is None else known.margins
    excess = [own - other for own, other in zip(found.hints.margins, usual, strict=True)]
    reasons, most = [], _MARGIN if known is not None else 1.5 * _MARGIN
    if max(excess) > most and max(excess) - min(excess) > most:
        reasons.append(f"Blank margins take {_margins(found.hints)} of the side on average.")
    border = 0.75 if known is None else known.border
    if found.hints.border < _BORDER and border - found.hints.border > 0.15:
        reasons.append(
            f"The outermost pixels alone give the turn away: error {found.hints.border:.0%}; 75% is guessing."
        )
    if not reasons:
        return None
    if known is None:
        reasons.append("What the borders of the training images were like is not known (--reference tells).")
    else:
        reasons.append(f"On the training data: {_margins(known)}; error from the border alone {known.border:.0%}.")
    return Verdict(
        "trivial",
        "Rotation is trivial on this data: its borders give the answer away, so learning it need not teach anything.",
        (*reasons, _tell_trial(found)),
    )


def _little(found: Diagnosis, guessing: float) -> Verdict | None:
    known = found.reference
    if known is None or found.task_loss.low > _FEW * known.task_loss:
        return None
    reasons = (_tell_task(found), _tell_agreement(found))
    return Verdict(
        "little to gain", "There is little to gain: the task is about as easy as on the training data.", reasons
    )


def _hurts(found: Diagnosis, guessing: float) -> Verdict | None:
    apart = _direction(found) < 0
    if not apart and found.trial.rolled_back <= 0.05:
        return None
    cause = "the two tasks pull the encoder apart" if apart else "the guard has to undo its updates"
    return Verdict(
        "hurts",
        f"Adaptation is unlikely to help and may hurt: {cause}.",
        (_tell_agreement(found), _tell_trial(found)),
    )


def _helps(found: Diagnosis, guessing: float) -> Verdict | None:
    if _direction(found) <= 0 or found.trial.fall.high <= 0:
        return None
    reasons = [_tell_task(found), _tell_agreement(found), _tell_trial(found)]
    if found.drift.low > 0:
        reasons.append(f"The task's loss rises by {_number(found.drift)} along the stream: later images are harder.")
    return Verdict(
        "helps", "Online adaptation is likely to help: the two tasks pull the encoder the same way.", tuple(reasons)
    )


def _direction(found: Diagnosis) -> int:
    """1 where the two gradients point the same way beyond chance, -1 where they point apart, else 0."""
    if found.balance is not None and _cosine(found.balance).high < 0:
        return -1
    # A confident prediction that is wrong turns its gradient round, so the stand-ins can speak for it only.
    known = [own for own in (found.balance, found.agreement) if own is not None]
    return 1 if any(_cosine(own).low > 0 for own in known) else 0


def format_diagnosis(found: Diagnosis) -> str:
    """A diagnosis in lines of words."""
    head = f"{printable(found.name)}, {found.images:,} images\n{found.verdict.headline}"
    reasons = "".join(f"\n  – {reason}" for reason in found.verdict.reasons)
    return head + reasons + "".join(f"\n  {name:<12}{text}" for name, text in list_facts(found).items())


def list_facts(found: Diagnosis) -> dict[str, str]:
    """What was measured, a text for each thing."""
    known, trial = found.reference, found.trial
    task = f"error {_percent(found.task_error)}, loss {_number(found.task_loss)}"
    if known is None:
        usual = "not known: neither --reference nor the network's card tells"
    else:
        error = "" if known.task_error is None else f"error {known.task_error:.1%}, "
        usual = f"{error}loss {known.task_loss:.2f} ({printable(known.source)})"
    upright = "" if found.upright is None else f", {found.upright:.0%} of them upright"
    lines = {
        "task": task,
        "in training": usual,
        "drift": f"{found.drift.value:+.2f} ± {_SIGMAS * found.drift.error:.2f} in the task's loss along the stream",
        "up": f"{found.consistent:.0%} of the images are told the same way up in all turns{upright}",
        "borders": f"margins {_margins(found.hints)}; error from the border alone {found.hints.border:.0%}",
        "gate": f"at {found.threshold:g} it would learn from {found.gated:.0%} of the images",
        "guard": f"would step in on {trial.rolled_back:.0%} ({trial.images} images, {trial.steps} × lr {trial.lr:g})",
    }
    if found.agreement is not None:
        lines["agreement"] = f"cosine {_signed(_cosine(found.agreement))}, confident predictions in place of labels"
    if found.balance is not None:
        lines["balance"] = f"cosine {_signed(_cosine(found.balance))}, even shares of the classes in place of labels"
    if found.true_agreement is not None:
        step = trial.lr * found.true_agreement.inner
        lines["with labels"] = (
            f"cosine {_signed(_cosine(found.true_agreement))}; to first order a step of the trial changes the main "
            f"loss by {-step:+.3g}"
        )
    if trial.gain is not None and trial.error_before is not None and trial.error_after is not None:
        lines["gain"] = (
            f"{100 * trial.gain.value:+.1f} ± {100 * _SIGMAS * trial.gain.error:.1f} points along the trial: error "
            f"{trial.error_before:.1%} → {trial.error_after:.1%}"
        )
    return lines


def _tell_task(found: Diagnosis) -> str:
    text = f"The task's error is {_percent(found.task_error)}, its loss {_number(found.task_loss)}"
    known = found.reference
    if known is None:
        return f"{text}; on the training data they are not known (--reference tells)."
    error = "" if known.task_error is None else f"error {known.task_error:.1%}, "
    return f"{text}; on the training data {error}loss {known.task_loss:.2f}."


def _tell_agreement(found: Diagnosis) -> str:
    if found.agreement is None and found.balance is None:
        return "The two tasks' gradients were not compared."
    parts = []
    if found.agreement is not None:
        parts.append(
            f"{_signed(_cosine(found.agreement))} with confident predictions ({found.confident:.0%} of the images) as "
            "labels"
        )
    if found.balance is not None:
        parts.append(f"{_signed(_cosine(found.balance))} with even shares of the classes as the main task")
    return f"Without labels, the cosine of the two tasks' gradients is {'; '.join(parts)}."


def _tell_trial(found: Diagnosis) -> str:
    trial, moved = found.trial, found.trial.fall
    change = "fell by" if moved.low > 0 else "rose by" if moved.high < 0 else "changed by no more than chance:"
    size = Estimate(abs(moved.value), moved.error)
    return (
        f"Along {trial.images} images of online learning the task's loss on images not yet seen {change} "
        f"{_number(size)}; the guard stepped in on {trial.rolled_back:.0%}."
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


def _plain(value: Any) -> Any:
    """A nested value as JSON could hold it; what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

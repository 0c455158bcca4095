"""The verdict on a diagnosis: `judge` applies a few simple rules to what measure.py has measured."""

from __future__ import annotations

from testtime.diagnosis.result import (
    Diagnosis,
    Estimate,
    Verdict,
    find_direction,
    format_cosine,
    format_margins,
    format_number,
    format_percent,
)
from testtime.networks.task_loss import EASY, measure_drift
from testtime.storage import printable

_MARGIN = 1 / 12  # of the side: excess over the training images' margin; 1.5 times if those are unknown
_BORDER = 0.2  # error from the border alone below which it reveals the rotation
_LOST = 0.65  # error from which the task counts as guessed
_GUESSING = 0.9  # times the loss of guessing, from which the task counts as not learned


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
        f"The task's error is {format_percent(found.task_error)}; {found.chance:.0%} is chance.",
        f"After learning from {found.trial.images} images its loss on new ones is {format_number(found.trial.loss)}; "
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
        reasons.append(f"Blank margins cover on average {format_margins(found.hints)} of the side.")
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
        reasons.append(
            f"On the training data: {format_margins(known)}; error from the border alone {known.border:.0%}."
        )
    return Verdict(
        "trivial",
        "Too easy: margins or borders reveal the rotation, so that learning it may not teach anything.",
        (*reasons, _format_trial(found)),
        "Crop the margins, frames and stamps that all images share, and diagnose again.",
    )


def _little(found: Diagnosis, guessing: float) -> Verdict | None:
    known = found.reference
    if known is None or measure_drift(found.task_loss.value, known.task_loss) > EASY:
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
    disagree = find_direction(found) < 0
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
    if find_direction(found) <= 0 or found.trial.fall.high <= 0:
        return None
    reasons = [_format_task(found), _format_agreement(found), _format_trial(found)]
    if found.drift.low > 0:
        reasons.append(
            f"The task's loss rises by {format_number(found.drift)} along the stream: later images are harder."
        )
    return Verdict(
        "helps",
        "Likely to help: what the task teaches on these images is also good for the classes.",
        tuple(reasons),
        "Adapt online, and compare on a few labelled images if there are any: testtime eval, or tt.Online(net).",
    )


def _format_task(found: Diagnosis) -> str:
    text = f"The task's error is {format_percent(found.task_error)}, its loss {format_number(found.task_loss)}"
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
            f"{format_cosine(found.agreement)} with confident predictions ({found.confident:.0%} of the images) as "
            "labels"
        )
    if found.balance is not None:
        parts.append(f"{format_cosine(found.balance)} with balanced predictions as the main loss")
    return f"Without labels, the cosine of the two tasks' gradients is {'; '.join(parts)}."


def _format_trial(found: Diagnosis) -> str:
    trial, moved = found.trial, found.trial.fall
    change = "fell by" if moved.low > 0 else "rose by" if moved.high < 0 else "did not change significantly:"
    size = Estimate(abs(moved.value), moved.error)
    return (
        f"In a trial of online learning on {trial.images} images, the task's loss on new images {change} "
        f"{format_number(size)}; the guard intervened on {trial.rolled_back:.0%}."
    )

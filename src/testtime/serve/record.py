"""What is known of a stream besides its network."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testtime.checks import check_entries, is_flag, is_integer, is_number, is_table, is_text
from testtime.serve.thumbnails import LAST, Thumbnail

_ANSWERS = 8  # stored for repeated requests
_RATE = 0.05  # of the moving averages
_HISTORY, _STORED_HISTORY = 256, 32  # points of a resident and of a stored stream

_COUNT = "an integer >= 0", lambda value: is_integer(value, 0)
_AVERAGE = "a number or null", lambda value: value is None or is_number(value)
_COUNTS = ("version", "sample", "seen", "adapted", "rolled_back", "collapses", "sequence")
_KINDS = {
    "id": ("text", is_text),
    **dict.fromkeys((*_COUNTS, "stored_version"), _COUNT),
    **dict.fromkeys(("loss", "first_loss", "confidence", "changed", "disagreement"), _AVERAGE),
    **dict.fromkeys(("created", "last_seen"), ("a number", is_number)),
    **dict.fromkeys(("collapsed", "frozen", "pinned"), ("true or false", is_flag)),
    "answers": ("a table", is_table),
}
_NOTES = 1500  # of the demo
_FIRST = 32  # images, for `first_loss`


@dataclass
class StreamRecord:
    """What is known of a stream; saved with its state, but for the last seven fields.

    Attributes:
        id: Its name.
        version: Number of changes of its network: images learned from, resets, rollbacks. It never decreases.
        sample: Sample number of its next image, which seeds the augmentations.
        seen: Number of images answered.
        adapted: Number of images that the network adapted to.
        rolled_back: Number of images whose update the guard undid.
        collapses: Number of collapses.
        collapsed: Whether the guard found one in the last request.
        sequence: Number of the last numbered request.
        stored_version: The version stored last in the ring.
        loss: Moving average of the objective's loss before adaptation.
        first_loss: Mean of the same loss over the first images.
        confidence: Moving average of the objective's confidence.
        changed: Moving average of whether adapting to an image changed its class.
        disagreement: Moving average of whether the original network predicts another class; only in shadow mode.
        created: When it was created, in seconds since 1970.
        last_seen: When it was last used.
        frozen: Whether it answers without learning.
        pinned: Whether it is not evicted.
        answers: The last numbered answers, by number as text; empty unless resident.
        saved_sequence: `sequence` in the last state that was written.
        revision: Number of changes in this process, of anything that is saved.
        saved_revision: `revision` in the last state that was written.
        restored_version: The version found in the state folder at the start of the service, if it was there.
        history: Points of the last images, for curves.
        notes: What the demo knows of the last images.
        thumbnails: Of the last images, if the service makes them; empty unless resident.
    """

    id: str
    version: int = 0
    sample: int = 0
    seen: int = 0
    adapted: int = 0
    rolled_back: int = 0
    collapses: int = 0
    collapsed: bool = False
    sequence: int = 0
    stored_version: int = 0
    loss: float | None = None
    first_loss: float | None = None
    confidence: float | None = None
    changed: float | None = None
    disagreement: float | None = None
    created: float = field(default_factory=time.time)
    last_seen: float = field(default_factory=time.time)
    frozen: bool = False
    pinned: bool = False
    answers: dict[str, Any] = field(default_factory=dict)
    saved_sequence: int = 0
    revision: int = 0
    saved_revision: int = 0
    restored_version: int | None = None
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    notes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NOTES))
    thumbnails: deque[Thumbnail] = field(default_factory=lambda: deque(maxlen=LAST))

    @property
    def unsaved(self) -> int:
        """Number of images and other changes since the last state that was written."""
        return self.revision - self.saved_revision

    def describe(self) -> dict[str, Any]:
        """Return what is saved, JSON-serialisable."""
        return {name: getattr(self, name) for name in _KINDS} | {"answers": dict(self.answers)}

    @staticmethod
    def parse(table: Mapping[str, Any]) -> StreamRecord:
        """Return the record of a table made by `describe`.

        Raises:
            ValueError: An entry is missing or malformed.
        """
        check_entries(table, _KINDS, tuple(_KINDS))
        return StreamRecord(**{name: table[name] for name in _KINDS}, saved_sequence=table["sequence"])

    def count(self, answer: Mapping[str, Any], learns: bool, disagrees: bool | None) -> None:
        """Count an answered image.

        Args:
            answer: See answers.py.
            learns: Whether the stream is not frozen.
            disagrees: Whether the original network predicts another class, if known.
        """
        self.seen += 1
        self.revision += 1
        self.last_seen = time.time()
        if learns:
            self.sample += 1
            self.version += 1
            self.adapted += answer["adapted"]
            self.rolled_back += answer["rolled_back"]
        changed = answer["class"] != answer["before"]["class"]
        self.loss = _move(self.loss, answer["loss_before"])
        if self.seen <= _FIRST and answer["loss_before"] is not None:
            mean = self.first_loss or 0.0
            self.first_loss = mean + (answer["loss_before"] - mean) / self.seen
        self.confidence = _move(self.confidence, answer["confidence"])
        self.changed = _move(self.changed, float(changed))
        if disagrees is not None:
            self.disagreement = _move(self.disagreement, float(disagrees))
        names = ("loss_before", "loss_after", "confidence", "adapted", "rolled_back", "class")
        self.history.append({"seen": self.seen, "changed": changed} | {name: answer[name] for name in names})

    def remember(self, sequence: int, answer: Mapping[str, Any]) -> None:
        """Store the answer of a numbered request, in case it is repeated."""
        self.sequence = sequence
        self.answers[str(sequence)] = answer
        while len(self.answers) > _ANSWERS:
            del self.answers[next(iter(self.answers))]

    def shrink(self) -> None:
        """Forget what a stream that is not resident does not need in memory."""
        self.answers = {}
        self.thumbnails.clear()
        while len(self.history) > _STORED_HISTORY:
            self.history.popleft()


def _move(average: float | None, value: float | None) -> float | None:
    if value is None or average is None:
        return average if value is None else value
    return average + _RATE * (value - average)

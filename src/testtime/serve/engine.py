"""What the service does with its streams. All methods are called by one thread, the batcher's."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.adapters import Episodic, Fixed
from testtime.adaptation.methods import Method
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.streams import Streams
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.serve.answers import make_answers, replace_answer
from testtime.serve.collapse import follow
from testtime.serve.events import Events
from testtime.serve.lease import Leases
from testtime.serve.metrics import Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.residents import Residents
from testtime.serve.settings import ServeSettings
from testtime.serve.thumbnails import make_thumbnail

log = logging.getLogger(__name__)

Answer = dict[str, Any]
Both = tuple[Answer, Answer | None]
"""The answer of a stream and, in shadow mode, that of the original network."""


class Engine:
    """Answers images of streams, and changes streams.

    Args:
        net: The network.
        method: The method of all streams.
        settings: The settings of the service.
        precision: See `testtime.Settings`.
        metrics: Where everything is counted.
        events: Where everything is reported.
        leases: See `Residents`.

    Raises:
        FileError: The state folder cannot be used.
        ValueError: Network, method and settings do not go together.
    """

    def __init__(
        self,
        net: YNet,
        method: Method,
        settings: ServeSettings,
        precision: Precision | None,
        metrics: Metrics,
        events: Events,
        leases: Leases | None = None,
    ) -> None:
        self._settings, self._metrics, self._events, self._names = settings, metrics, events, net.card.classes
        group = None if settings.group is None else min(settings.group, settings.slots)
        padding: dict[str, Any] = {} if group is None else {"together": group, "padded": True}
        given: dict[str, Any] = {} if precision is None else {"precision": precision}
        followed = method if settings.on_collapse == "guard" else follow(method)
        self._streams = Streams(net, settings.slots, method=followed, **padding, **given)
        if self._streams.holds_images and not settings.image_memory:
            raise ValueError(f"The method {method.name!r} stores recent images, which --no-image-memory forbids.")
        self._episodic = Episodic(net, method=method, parallel=group or "auto", **given)
        observed = {"precision": self._streams.settings.precision, "mirrored": self._streams.settings.mirrored}
        self._fixed = Fixed(net, **observed) if settings.shadow else None
        self.residents = Residents(self._streams, settings, metrics, events, leases)

    def warm_up(self, shape: tuple[int, ...]) -> None:
        """Take a step and undo it, so that the first request does not wait for what is made once."""
        first = torch.tensor([0], dtype=torch.int64, device="cpu")
        self._streams.predict(torch.zeros(1, *shape, dtype=torch.float32, device="cpu"), streams=first)
        self._streams.reset(first)

    def find_answer(self, stream: str, sequence: int | None) -> Answer | None:
        """Return the stored answer of a request that is repeated; None for the next one.

        Raises:
            Refusal: It is neither.
        """
        record = self.residents.records[stream]
        expected = record.sequence + 1
        if sequence is None or sequence == expected:
            return None
        if str(sequence) in record.answers:
            return record.answers[str(sequence)] | {"repeated": True}
        fault = "was answered before, and its answer is no longer stored" if sequence < expected else "is out of order"
        raise Refusal(409, f"Request {sequence} {fault}: the next one is {expected}.", expected=expected)

    def make_undo(self, streams: Sequence[str]) -> Callable[[str], None]:
        """Return a function that undoes the steps of one of these resident streams, as long as it stays resident."""
        undo = self._streams.make_undo(self.residents.find_slots(streams))
        return lambda stream: undo(self.residents.find_slots([stream]))

    def step(self, streams: Sequence[str], images: Sequence[Tensor]) -> list[Both]:
        """Answer one image each for resident streams, and learn from it unless the stream is frozen.

        On an error nothing is learned. Nothing is counted or reported before `finish`.

        Args:
            streams: Different streams.
            images: Float in [0, 1], `(C, H, W)` each.
        """
        begin, batch = time.perf_counter(), torch.stack(list(images))
        slots = self.residents.find_slots(streams)
        frozen = [row for row, stream in enumerate(streams) if self.residents.records[stream].frozen]
        learning = [row for row in range(len(streams)) if row not in frozen]
        fixed = None if self._fixed is None else make_answers(self._fixed.predict(batch), self._names)
        parts: list[tuple[list[int], Prediction]] = []
        if frozen:
            parts.append((frozen, self._streams.observe(batch[frozen], slots[frozen])))
        if learning:  # last, since what has failed must not have learned
            given = (batch[learning], slots[learning]) if frozen else (batch, slots)
            parts.append((learning, self._streams.predict(given[0], streams=given[1])))
        answers: dict[int, Answer] = {}
        for rows, prediction in parts:
            answers |= dict(zip(rows, make_answers(prediction, self._names), strict=True))
        self._metrics.observe("testtime_stage_seconds", time.perf_counter() - begin, stage="step")
        self._metrics.observe("testtime_batch_images", len(streams))
        return [(answers[row], None if fixed is None else fixed[row]) for row in range(len(streams))]

    def predict_episodes(self, images: Sequence[Tensor]) -> list[Answer]:
        """Answer images, each adapted to by itself from the original network."""
        zeros = torch.zeros(len(images), dtype=torch.int64, device="cpu")
        self._metrics.count("testtime_images_total", len(images), mode="episodic")
        return make_answers(self._episodic.predict(torch.stack(list(images)), zeros), self._names)

    def finish(
        self, stream: str, sequence: int | None, images: Sequence[Tensor], found: Sequence[Both]
    ) -> tuple[Answer, bool | None]:
        """Count a request whose images are answered; returns its answer, and whether the state has to be written.

        True: before the request is answered; False: at any time; None: it need not be.

        Args:
            stream: The stream, resident.
            sequence: Number of the request, if it has one.
            images: Its images.
            found: For each, what `step` returned.
        """
        record, settings = self.residents.records[stream], self._settings
        answers = [self._count(record, image, *both) for image, both in zip(images, found, strict=True)]
        payload: Answer = {"stream": stream, "sequence": sequence, "shadow": settings.shadow, "answers": answers}
        payload |= {"version": record.version, "sample": answers[-1]["sample"], "seen": record.seen}
        if sequence is not None:
            record.remember(sequence, payload)
        self._check_collapse(record, any(answer["alarmed"] for answer, _ in found))
        if record.unsaved > settings.checkpoint_every:
            return payload, True
        return payload, False if record.version - record.stored_version >= settings.version_every else None

    def reset(self, stream: str) -> Future[bool]:
        """Return a resident stream to the original network; its state remains as a version."""
        self.residents.save([stream], store=True)
        self._streams.reset(self.residents.find_slots([stream]))
        return self._change(stream, "reset", sample=0)

    def roll_back(self, stream: str, version: int | None = None) -> tuple[int, Future[bool]]:
        """Return a resident stream to a former version, by default the newest that is stored.

        Returns:
            The version, and the write.

        Raises:
            Refusal: It is not stored.
        """
        record, writer = self.residents.records[stream], self.residents.writer
        waiting = writer.find(stream)
        if waiting is not None and not waiting.done.done():
            waiting.done.result(timeout=60)
        versions = [number for number in writer.folder.list_versions(stream) if number < record.version]
        target = (versions or [-1])[-1] if version is None else version
        if target not in versions:
            listed = f"these are stored: {', '.join(map(str, versions))}" if versions else "none is stored"
            raise Refusal(404, f"There is no such former version of this stream; {listed}.")
        try:
            former, state = writer.folder.read(stream, target)
            self._streams.import_streams(self.residents.find_slots([stream]), state)
        except ValueError as error:
            log.warning("%s", error)
            raise Refusal(409, f"Version {target} of this stream is damaged.") from None
        return target, self._change(stream, "rollback", sample=former.sample, to=target)

    def freeze(self, stream: str, frozen: bool) -> Future[bool]:
        """Let a resident stream answer without learning, or learn again."""
        self.residents.records[stream].frozen = frozen
        return self._change(stream, "freeze" if frozen else "unfreeze")

    def pin(self, stream: str, pinned: bool) -> Future[bool]:
        """Pin a resident stream, so that it stays resident, or release it.

        Raises:
            Refusal: Only one slot is left for all others.
        """
        slots = self.residents.slots
        if pinned and stream not in slots.pinned and len(slots.pinned) >= slots.count - 1:
            raise Refusal(409, f"Of {slots.count} slots, one must not be pinned.")
        self.residents.records[stream].pinned = pinned
        (slots.pinned.add if pinned else slots.pinned.discard)(stream)
        return self._change(stream, "pin" if pinned else "unpin")

    def export(self, stream: str) -> bytes:
        """Return the adapted network of a resident stream as the content of a file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "network.safetensors")
            self._streams.network(self.residents.slots[stream]).save(path)
            return path.read_bytes()

    def _change(self, stream: str, event: str, sample: int | None = None, **about: Any) -> Future[bool]:
        """Note a change of a resident stream, and of its network if a sample number is given; write it."""
        record = self.residents.records[stream]
        record.revision += 1
        record.last_seen, record.collapsed = time.time(), False
        if sample is not None:
            record.version, record.sample = record.version + 1, sample
        self._events.publish(event, stream=stream, version=record.version, **about)
        return self.residents.save([stream])[0]

    def _count(self, record: StreamRecord, image: Tensor, answer: Answer, fixed: Answer | None) -> Answer:
        about = {"sample": record.sample}
        disagrees = None if fixed is None else fixed["class"] != answer["class"]
        record.count(answer, not record.frozen, disagrees)
        about["version"] = record.version
        self._metrics.count("testtime_images_total", mode="online")
        counted = {"adapted": answer["adapted"], "rolled_back": answer["rolled_back"], "disagreements": disagrees}
        for name in (name for name, true in counted.items() if true):
            self._metrics.count(f"testtime_{name}_total")
        if self._events.is_watched:
            seen = {name: value for name, value in answer.items() if name not in ("probabilities", "before")}
            seen["before"] = {name: value for name, value in answer["before"].items() if name != "probabilities"}
            shadow = {} if fixed is None else {"fixed": fixed["class"]}
            self._events.publish("answer", stream=record.id, seen=record.seen, **about, **seen, **shadow)
        if self._settings.thumbnails:
            record.thumbnails.append(make_thumbnail(record.seen, image, answer))
        return (answer if fixed is None else replace_answer(answer, fixed)) | about

    def _check_collapse(self, record: StreamRecord, alarmed: bool) -> None:
        """Act on an alarm of the guard in a request, once until a request without."""
        before, record.collapsed = record.collapsed, alarmed
        if not alarmed or before:
            return
        action, record.collapses = self._settings.on_collapse, record.collapses + 1
        self._metrics.count("testtime_collapses_total", action=action)
        self._events.publish("collapse", stream=record.id, action=action)
        log.warning("stream %s has collapsed: %s", record.id, action)
        if action == "freeze":
            self.freeze(record.id, True)
        elif action == "reset":
            self.reset(record.id)
        elif action == "rollback":
            try:
                version, _ = self.roll_back(record.id)
                self.residents.writer.folder.drop_version(record.id, version)  # the next collapse goes further back
            except Refusal:  # there is no former version
                self.reset(record.id)

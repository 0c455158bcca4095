"""How the service answers images of streams. All methods are called by one thread, the batcher's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from testtime import kernels
from testtime.adaptation.adapters import Episodic, Fixed
from testtime.adaptation.methods import Method
from testtime.adaptation.streams import Streams
from testtime.networks.ynet import YNet
from testtime.precision import Precision
from testtime.serve.answers import make_answers, pack, replace_answer
from testtime.serve.changes import Changes
from testtime.serve.collapse import follow
from testtime.serve.events import Events
from testtime.serve.lease import Leases
from testtime.serve.metrics import Metrics
from testtime.serve.record import StreamRecord
from testtime.serve.refusal import Refusal
from testtime.serve.residents import Residents
from testtime.serve.settings import ServeSettings
from testtime.serve.step import Output, Step, gather
from testtime.serve.thumbnails import make_thumbnail

Answer = dict[str, Any]
Both = tuple[Answer, Answer | None]
"""The answer of a stream and, in shadow mode, that of the original network."""

_RECORDED = 64  # streams of the largest step that is recorded in advance


class Engine:
    """Answers images of streams.

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
        self.holds_images = self._streams.holds_images
        if self.holds_images and not settings.image_memory:
            raise ValueError(f"The method {method.name!r} stores recent images, which --no-image-memory forbids.")
        self._episodic = Episodic(net, method=method, parallel=group or "auto", **given)
        observed = {"precision": self._streams.settings.precision, "mirrored": self._streams.settings.mirrored}
        self._fixed = Fixed(net, **observed) if settings.shadow else None
        self.residents = Residents(self._streams, settings, metrics, events, leases)
        self.changes = Changes(self._streams, self.residents, settings, metrics, events)

    def warm_up(self, shape: tuple[int, ...]) -> None:
        """Take steps and undo them, so that no request waits for what is made once.

        On a GPU, a step is recorded for every size of a group: 1, 4, 16, ….
        """
        sizes, most = [1], 1
        if self._settings.group is None and kernels.tuning(self._streams.device).waits:
            most = min(self._settings.slots, _RECORDED)
        while sizes[-1] < most:
            sizes.append(min(4 * sizes[-1], most))
        for size in sizes:
            images = torch.zeros(size, *shape, dtype=torch.float32, device="cpu")
            self._streams.predict(images, streams=torch.arange(size, device="cpu"))
        self._streams.reset(torch.arange(sizes[-1], device="cpu"))

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

    def launch(self, streams: Sequence[str], images: Sequence[Tensor]) -> Step:
        """Start a step: answer one image each for resident streams, and learn from it unless the stream is frozen.

        On an error nothing is learned. Nothing is counted or reported before `finish`.

        Args:
            streams: Different streams.
            images: Float in [0, 1], `(C, H, W)` each.
        """
        begin, batch = time.perf_counter(), torch.stack(list(images))
        slots, records = self.residents.find_slots(streams), self.residents.records
        frozen = [row for row, stream in enumerate(streams) if records[stream].frozen]
        fixed = None if self._fixed is None else pack(self._fixed.predict(batch))
        if not frozen:
            return Step([pack(self._streams.predict(batch, streams=slots))], range(len(streams)), fixed, begin)
        learning = [row for row, stream in enumerate(streams) if not records[stream].frozen]
        parts = [pack(self._streams.observe(batch[frozen], slots[frozen]))]
        if learning:  # last, since what has failed must not have learned
            parts.append(pack(self._streams.predict(batch[learning], streams=slots[learning])))
        places = {row: place for place, row in enumerate((*frozen, *learning))}
        return Step(parts, [places[row] for row in range(len(streams))], fixed, begin)

    def note(self, step: Step) -> None:
        """Count a step that is done."""
        self._metrics.observe("testtime_stage_seconds", time.perf_counter() - step.begin, stage="step")
        self._metrics.observe("testtime_batch_images", len(step))

    def read(self, requests: Sequence[Sequence[Output]]) -> list[list[Both]]:
        """Return the answers to all images of requests, from steps that are done."""
        if not requests:
            return []
        packed, packed_fixed = gather([output for request in requests for output in request])
        answers = make_answers(packed, self._names)
        fixed = [None] * len(answers) if packed_fixed is None else make_answers(packed_fixed, self._names)
        both = zip(answers, fixed, strict=True)
        return [[next(both) for _ in request] for request in requests]

    def predict_episodes(self, images: Sequence[Tensor]) -> list[Answer]:
        """Answer images, each adapted to by itself from the original network."""
        zeros = torch.zeros(len(images), dtype=torch.int64, device="cpu")
        self._metrics.count("testtime_images_total", len(images), mode="episodic")
        return make_answers(pack(self._episodic.predict(torch.stack(list(images)), zeros)).cpu(), self._names)

    def finish(
        self, stream: str, sequence: int | None, images: Sequence[Tensor], found: Sequence[Both]
    ) -> tuple[Answer, bool | None]:
        """Count a request whose images are answered; returns its answer, and whether the state has to be written.

        True: before the request is answered; False: at any time; None: it need not be.

        Args:
            stream: The stream, resident.
            sequence: Number of the request, if it has one.
            images: Its images.
            found: For each, what `read` returned.
        """
        record, settings = self.residents.records[stream], self._settings
        answers = [self._count(record, image, *both) for image, both in zip(images, found, strict=True)]
        self._metrics.count("testtime_images_total", len(answers), mode="online")
        for name in ("adapted", "rolled_back"):
            self._metrics.count(f"testtime_{name}_total", sum(answer[name] for answer, _ in found))
        if settings.shadow:
            differing = sum(fixed is not None and fixed["class"] != answer["class"] for answer, fixed in found)
            self._metrics.count("testtime_disagreements_total", differing)
        payload: Answer = {"stream": stream, "sequence": sequence, "shadow": settings.shadow, "answers": answers}
        payload |= {"version": record.version, "sample": answers[-1]["sample"], "seen": record.seen}
        if sequence is not None:
            record.remember(sequence, payload)
        self.changes.act(record, any(answer["alarmed"] for answer, _ in found))
        if record.unsaved > settings.checkpoint_every:
            return payload, True
        return payload, False if record.version - record.stored_version >= settings.version_every else None

    def _count(self, record: StreamRecord, image: Tensor, answer: Answer, fixed: Answer | None) -> Answer:
        about = {"sample": record.sample}
        disagrees = None if fixed is None else fixed["class"] != answer["class"]
        record.count(answer, not record.frozen, disagrees)
        about["version"] = record.version
        if self._events.is_watched:
            seen = {name: value for name, value in answer.items() if name not in ("probabilities", "before")}
            seen["before"] = {name: value for name, value in answer["before"].items() if name != "probabilities"}
            shadow = {} if fixed is None else {"fixed": fixed["class"]}
            self._events.publish("answer", stream=record.id, seen=record.seen, **about, **seen, **shadow)
        if self._settings.thumbnails:
            record.thumbnails.append(make_thumbnail(record.seen, image, answer))
        return (answer if fixed is None else replace_answer(answer, fixed)) | about

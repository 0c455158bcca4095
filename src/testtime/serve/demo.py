"""The demo of the service: digits whose light fades, sent to a frozen and to an adapting stream.

Test digits arrive in random order, every pass over them in another, and both streams get the same images. The labels
stay here: the share of wrong answers goes to the live page by `Service.note`, nothing of it over HTTP or to an adapter.

The final light and the settings were chosen on streams of 1,500 training digits, which the network knows, after a
darker light with a higher learning rate had been seen to become unstable on test digits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from testtime.adaptation.methods import Method, find_method
from testtime.data import digits
from testtime.randomness import Draws
from testtime.serve.client import Client, ClientStream, ServiceError
from testtime.serve.service import Service

log = logging.getLogger(__name__)

NETWORK = "digits-resnet8-gn-joint"
FROZEN, ADAPTING = "demo-frozen", "demo-adapting"
SETTINGS = {"lr": 0.005, "copies": 8}
LIGHT = 0.07
"""The light that is left in the end."""
FADE = 600
"""Images until then."""
PACE = 20.0
"""Images per second of each stream, at most."""
WINDOW = 100
"""Images that the error is counted over."""


def make_method() -> Method:
    """Return the method of the demo."""
    return replace(find_method("ttt"), settings=SETTINGS)


def find_light(number: int) -> float:
    """Return the light of an image, from 1 to `LIGHT`, at an even rate of change."""
    return LIGHT ** min(1.0, number / FADE)


def iterate_digits(seed: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Yield fading digits, uint8 `(1, 16, 16)`, and their labels, without end."""
    source, number = digits.load("test"), 0
    images, labels = source.images(slice(None)), source.labels
    assert labels is not None
    indices = torch.arange(len(source), device="cpu")
    while True:
        for index in Draws.of(seed, indices + number).purpose("serve demo").keys.argsort(stable=True).tolist():
            yield (images[index].float() * find_light(number)).round().to(torch.uint8), int(labels[index])
            number += 1


@dataclass
class Score:
    """Whether the last answers of a stream were wrong."""

    wrong: deque[bool]

    @property
    def error(self) -> float:
        """Share of wrong answers."""
        return sum(self.wrong) / len(self.wrong)


class Demo:
    """Feeds a service, in a thread.

    Args:
        service: The service.
        url: Its address.
        pace: Images per second of each stream, at most.
    """

    def __init__(self, service: Service, url: str, pace: float = PACE) -> None:
        self._service, self._pace = service, pace
        self._client = Client(url, token=service.settings.token, timeout=20, retries=0)
        self._stopped, self._threads = threading.Event(), torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="testtime-demo", daemon=True)
        service.about["demo"] = {"frozen": FROZEN, "adapting": ADAPTING, "fade": FADE, "light": LIGHT, "window": WINDOW}

    def __enter__(self) -> Demo:
        torch.set_num_threads(1)  # on so small a network more save little, and on busy cores they cost much
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(5)
        torch.set_num_threads(self._threads)

    def _run(self) -> None:
        source = iterate_digits()
        try:
            while self._service.phase == "starting" and not self._stopped.wait(0.1):
                pass
            streams = self._begin(next(source)[0])
            self._feed(streams, source)
        except ServiceError as error:
            if self._service.phase == "ready":
                log.error("the demo has ended: %s", error)

    def _begin(self, image: Tensor) -> dict[str, ClientStream]:
        """Make the two streams anew; both networks are the original one."""
        streams = {name: self._client.stream(name) for name in (FROZEN, ADAPTING)}
        existing = {row["id"] for row in self._client.list_streams()}
        for name, stream in streams.items():
            if name in existing:
                stream.delete()
            stream.predict(image)
            stream.reset()
        streams[FROZEN].freeze()
        return streams

    def _feed(self, streams: dict[str, ClientStream], source: Iterator[tuple[Tensor, int]]) -> None:
        scores = {name: Score(deque(maxlen=WINDOW)) for name in streams}
        for number, (image, label) in enumerate(source, 1):
            begin = time.perf_counter()
            for name, stream in streams.items():
                answer = stream.predict(image).answers[0]
                scores[name].wrong.append(answer.number != label)
                self._service.note(name, label=label, error=scores[name].error, light=find_light(number))
            if self._stopped.wait(max(0.0, 1 / self._pace - (time.perf_counter() - begin))):
                return

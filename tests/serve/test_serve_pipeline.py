"""Steps that are computed after they are launched, as on a GPU: a thread reveals their outputs later, in order."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving import METHOD, image, make_online, make_service, open_engine, submit
from testtime import Guard
from testtime.kernels.graphs import HostCopy
from testtime.serve import step as step_module
from testtime.serve.engine import Engine
from testtime.serve.slots import Slots
from testtime.serve.waiting import Job


class Device:
    """Computes steps in order, in a thread; can be held, and can fail."""

    def __init__(self) -> None:
        self.launched, self.failing, self.running = 0, set[int](), threading.Event()
        self.running.set()
        self._steps: queue.Queue[LaterCopy | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def launch(self, step: LaterCopy) -> None:
        self.launched += 1
        step.number = self.launched
        self._steps.put(step)

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def wait_for(self, launched: int) -> None:
        end = time.monotonic() + 30
        while self.launched < launched and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.05)  # for what must not be launched
        assert self.launched == launched

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            self.running.wait(30)
            time.sleep(0.002)
            step.reveal(step.number in self.failing)


class LaterCopy(HostCopy):
    """Outputs that are NaN until the device has computed them."""

    device: Device
    number = 0
    is_asynchronous = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.clone())
        self._values, self._event, self._failed = self.tensor.clone(), threading.Event(), False
        self.tensor.fill_(torch.nan)
        self.device.launch(self)

    def reveal(self, failed: bool) -> None:
        self._failed = failed
        if not failed:
            self.tensor.copy_(self._values)
        self._event.set()

    @property
    def is_done(self) -> bool:
        if self._event.is_set():
            self.wait()
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(60)
        if self._failed:
            raise RuntimeError("an illegal memory access")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(LaterCopy, "device", made, raising=False)
    monkeypatch.setattr(step_module, "HostCopy", LaterCopy)
    yield made
    made.close()


def expect(seeds: Sequence[int]) -> list[list[float]]:
    online = make_online()
    return [online.predict(image(seed)[None]).logits.softmax(-1)[0].tolist() for seed in seeds]


def found(*answers: Any) -> list[list[float]]:
    return [one["probabilities"] for answer in answers for one in answer["answers"]]


@pytest.mark.parametrize("checkpoint_every", [0, 1000])
def test_answers_are_the_sequential_ones(tmp_path: Path, device: Device, checkpoint_every: int) -> None:
    """All requests at once, on fewer slots than streams."""
    rng = random.Random(0)
    plans = {name: [[rng.randrange(50) for _ in range(rng.choice([1, 1, 3]))] for _ in range(4)] for name in "abcde"}
    with open_engine(tmp_path, slots=3, checkpoint_every=checkpoint_every) as (engine, batcher):
        waiting = {name: [] for name in plans}
        for number in range(4):
            for name, requests in plans.items():
                waiting[name].append(submit(batcher, name, *map(image, requests[number]), sequence=number + 1))
        for name, requests in plans.items():
            answers = [one.result(60) for one in waiting[name]]
            seeds = [seed for request in requests for seed in request]
            assert found(*answers) == expect(seeds)
            assert [one["sample"] for answer in answers for one in answer["answers"]] == list(range(len(seeds)))
            if not checkpoint_every:
                assert engine.residents.writer.folder.read(name)[0].sequence == 4
        assert engine._metrics.read("testtime_evictions_total") >= 2


def test_at_most_two_steps_are_launched_ahead(tmp_path: Path, device: Device) -> None:
    with open_engine(tmp_path) as (_, batcher):
        device.running.clear()
        answer = submit(batcher, "a", *map(image, range(4)))
        device.wait_for(2)
        assert not answer.done()
        device.running.set()
        assert found(answer.result(60)) == expect(range(4))


def test_the_next_step_is_launched_before_the_last_one_is_answered(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tmp_path) as (engine, batcher):
        order: list[str] = []
        launch, finish = engine.launch, engine.finish
        monkeypatch.setattr(engine, "launch", lambda *given: (order.append(f"launch {given[0]}"), launch(*given))[1])
        monkeypatch.setattr(engine, "finish", lambda *given: (order.append(f"finish {given[0]}"), finish(*given))[1])
        device.running.clear()
        first = submit(batcher, "a", image(0))
        device.wait_for(1)
        second = submit(batcher, "b", image(1))
        device.running.set()
        assert found(first.result(60), second.result(60)) == [*expect([0]), *expect([1])]
        assert order == ["launch ['a']", "launch ['b']", "finish a", "finish b"]


def test_a_stream_in_flight_is_not_evicted(tmp_path: Path, device: Device) -> None:
    with open_engine(tmp_path, slots=1) as (engine, batcher):
        device.running.clear()
        first = submit(batcher, "a", image(0))
        device.wait_for(1)
        second = submit(batcher, "b", image(1))
        device.wait_for(1)
        assert "a" in engine.residents.slots
        device.running.set()
        assert found(first.result(60), second.result(60)) == [*expect([0]), *expect([1])]
        assert found(submit(batcher, "a", image(2)).result(60)) == expect([0, 2])[1:]


def test_busy_streams_keep_their_slots() -> None:
    slots = Slots(2)
    slots.take("a")
    slots.take("b")
    assert slots.find_evicted(["c"]) == ["a"]
    assert slots.find_evicted(["c"], busy={"a"}) == ["b"]
    assert slots.fit(["c", "d"], busy={"a"}) == ["c"]
    assert slots.fit(["c", "a"], busy={"a", "b"}) == ["a"]


def test_changes_and_the_next_request_wait_for_the_one_in_flight(tmp_path: Path, device: Device) -> None:
    def freeze(engine: Engine) -> Any:
        return first.done(), engine.changes.freeze("a", True)

    with open_engine(tmp_path) as (engine, batcher):
        device.running.clear()
        first = submit(batcher, "a", image(0), sequence=1)
        device.wait_for(1)
        change = batcher.submit(Job("a", action=freeze))
        last = submit(batcher, "a", image(1), sequence=2)
        device.wait_for(1)
        assert not engine.residents.records["a"].frozen
        device.running.set()
        assert change.result(60) is True
        assert [first.result(60)["answers"][0]["adapted"], last.result(60)["answers"][0]["adapted"]] == [True, False]


@pytest.mark.parametrize("action", ["reset", "rollback", "freeze"])
def test_a_collapse_is_acted_upon_before_the_next_image(tmp_path: Path, device: Device, action: Any) -> None:
    guard = Guard(collapse=0, burst=0, distance=0.0135, fallback="source")
    given: dict[str, Any] = {"method": replace(METHOD, settings={**METHOD.settings, "guard": guard})}
    given |= {"on_collapse": action, "version_every": 3}

    def ask(folder: Path, at_once: bool) -> list[list[float]]:
        with open_engine(folder, **given) as (engine, batcher):
            waiting = []
            for seed in range(14):
                waiting.append(submit(batcher, "a", image(seed)))
                if not at_once:
                    waiting[-1].result(60)
            answers = found(*(one.result(60) for one in waiting))
            assert engine.residents.records["a"].collapses >= 1
            return answers

    assert ask(tmp_path / "a", at_once=True) == ask(tmp_path / "b", at_once=False)


def test_a_step_that_fails_later_fails_its_requests_only(tmp_path: Path, device: Device) -> None:
    with open_engine(tmp_path, slots=2) as (engine, batcher):
        submit(batcher, "a", image(0)).result(60)
        device.running.clear()
        device.failing = {3}
        before = engine.residents.records["a"].describe()
        failing = submit(batcher, "a", image(1), image(2), image(3))
        device.wait_for(3)  # two of three images
        other = submit(batcher, "b", image(5))
        device.running.set()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            failing.result(60)
        assert found(other.result(60)) == expect([5])
        assert engine.residents.records["a"].describe() == before
        assert found(submit(batcher, "a", image(4)).result(60)) == expect([0, 4])[1:]


def test_stopping_finishes_what_is_launched(tmp_path: Path, device: Device) -> None:
    service = make_service(tmp_path)
    device.running.clear()
    waiting = [submit(service.batcher, name, *map(image, range(3))) for name in "abc"]
    while not device.launched:
        time.sleep(0.005)
    stopping = threading.Thread(target=service.stop)
    stopping.start()
    device.running.set()
    stopping.join()
    assert [found(one.result(0)) for one in waiting] == [expect(range(3))] * 3
    with open_engine(tmp_path) as (_, batcher):
        assert found(submit(batcher, "b", image(3)).result(60)) == expect(range(4))[3:]

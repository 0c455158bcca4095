"""Streams on slots against an `Online` each, one image after another: bit for bit, whatever is evicted in between."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from serving import METHOD, image, make_online, network, open_engine, submit, wait_for_expiry
from testtime import METHODS, Fixed, Guard, Online, Streams, kernels
from testtime.serve.batcher import Batcher
from testtime.serve.refusal import Refusal
from testtime.serve.waiting import Job


def run(batcher: Batcher, stream: str, act: Any) -> Any:
    return batcher.submit(Job(stream, action=act)).result(60)


def ask(batcher: Batcher, stream: str, *seeds: int, sequence: int | None = None) -> Any:
    return submit(batcher, stream, *map(image, seeds), sequence=sequence).result(60)


def expect(seeds: Sequence[int]) -> list[list[float]]:
    """The probabilities of an `Online` adapter that sees these images."""
    online = make_online()
    return [online.predict(image(seed)[None]).logits.softmax(-1)[0].tolist() for seed in seeds]


def found(answer: Any) -> list[list[float]]:
    return [one["probabilities"] for one in answer["answers"]]


def load_concurrently(batcher: Batcher, streams: int, requests: int, seed: int) -> dict[str, list[Any]]:
    """Every stream sends requests of one to three images, several at once; returns seeds and answers."""
    rng = random.Random(seed)
    plans = {
        f"s{stream}": [[rng.randrange(50) for _ in range(rng.choice([1, 1, 3]))] for _ in range(requests)]
        for stream in range(streams)
    }
    answers: dict[str, list[Any]] = {}

    def work(names: list[str]) -> None:
        order = [name for name in names for _ in range(requests)]
        random.Random(seed).shuffle(order)
        left = {name: list(plans[name]) for name in names}
        for name in order:
            waiting = submit(batcher, name, *map(image, left[name].pop(0)))
            answers.setdefault(name, []).append(waiting.result(60))

    names = list(plans)
    threads = [threading.Thread(target=work, args=(names[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: [[seed for seeds in plans[name] for seed in seeds], answers[name]] for name in plans}


@pytest.mark.parametrize("checkpoint_every", [0, 1000])
def test_every_stream_is_its_own_online(tmp_path: Path, checkpoint_every: int) -> None:
    """Under concurrent load, with many more streams than slots."""
    with open_engine(tmp_path, slots=2, checkpoint_every=checkpoint_every, max_wait_ms=1.0) as (engine, batcher):
        for seeds, answers in load_concurrently(batcher, 9, 3, seed=1).values():
            assert [row for answer in answers for row in found(answer)] == expect(seeds)
            assert [one["sample"] for answer in answers for one in answer["answers"]] == list(range(len(seeds)))
        assert engine._metrics.read("testtime_evictions_total") > 12
        assert len(engine.residents.slots) == 2


@pytest.mark.slow
def test_sixty_four_streams_on_eight_slots_with_a_thousand_evictions(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=8, checkpoint_every=7, max_wait_ms=1.0) as (engine, batcher):
        for seeds, answers in load_concurrently(batcher, 64, 20, seed=2).values():
            assert [row for answer in answers for row in found(answer)] == expect(seeds)
        assert engine._metrics.read("testtime_evictions_total") >= 1000


def test_groups_of_one_size_give_the_same_whoever_shares_them(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=5, group=4, max_wait_ms=5.0) as (_, batcher):
        result = load_concurrently(batcher, 8, 2, seed=3)
    for seeds, answers in list(result.values())[:4]:
        alone = Streams(network(), 4, together=4, padded=True, method=METHOD)
        rows = [alone.predict(image(seed)[None], streams=torch.tensor([2])).logits.softmax(-1)[0] for seed in seeds]
        assert [row for answer in answers for row in found(answer)] == [row.tolist() for row in rows]


def test_without_groups_answers_agree_up_to_rounding(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=5, group=None, max_wait_ms=5.0) as (_, batcher):
        result = load_concurrently(batcher, 8, 2, seed=3)
    for seeds, answers in list(result.values())[:4]:
        rows = torch.tensor([row for answer in answers for row in found(answer)])
        assert torch.allclose(rows, torch.tensor(expect(seeds)), atol=1e-4)


def test_a_repeated_request_gets_the_same_answer_and_teaches_nothing(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=1) as (_, batcher):
        first = [ask(batcher, "a", seed, sequence=seed + 1) for seed in range(3)]
        ask(batcher, "b", 9)  # evicts a
        again = ask(batcher, "a", 1, sequence=2)
        assert again == first[1] | {"repeated": True}
        assert found(ask(batcher, "a", 3, sequence=4)) == expect(range(4))[3:]
        for sequence in (4 + 2, 99):
            with pytest.raises(Refusal, match="out of order: the next one is 5") as caught:
                ask(batcher, "a", 4, sequence=sequence)
            assert (caught.value.status, caught.value.details) == (409, {"expected": 5})
        with pytest.raises(Refusal, match="out of order: the next one is 1"):
            ask(batcher, "new", 4, sequence=2)
        for number in range(5, 15):
            ask(batcher, "a", number, sequence=number)
        with pytest.raises(Refusal, match="no longer stored"):
            ask(batcher, "a", 0, sequence=1)


def test_reset_rollback_and_freeze(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=2, version_every=4) as (engine, batcher):
        ask(batcher, "a", *range(6))
        expected = expect([*range(6), 6, 7])
        assert found(ask(batcher, "a", 6)) == expected[6:7]
        run(batcher, "a", lambda engine: (None, engine.changes.freeze("a", True)))
        frozen = [ask(batcher, "a", 7) for _ in range(2)]
        assert found(frozen[0]) == found(frozen[1]) != expected[7:]
        assert not frozen[0]["answers"][0]["adapted"]
        run(batcher, "a", lambda engine: (None, engine.changes.freeze("a", False)))
        assert found(ask(batcher, "a", 7)) == expected[7:]  # nothing was learned or counted meanwhile
        version = engine.residents.records["a"].version
        assert version == 8
        assert run(batcher, "a", lambda engine: engine.changes.roll_back("a")) == 6
        assert engine.residents.records["a"].version == 9
        assert found(ask(batcher, "a", 6, 7)) == expected[6:]
        run(batcher, "a", lambda engine: (None, engine.changes.reset("a")))
        assert found(ask(batcher, "a", 0, 1)) == expected[:2]
        assert engine.residents.writer.folder.list_versions("a") == [6, 11]
        with pytest.raises(Refusal, match="these are stored: 6, 11"):
            run(batcher, "a", lambda engine: engine.changes.roll_back("a", 7))
        assert run(batcher, "a", lambda engine: engine.changes.roll_back("a", 11)) == 11
        assert found(ask(batcher, "a", 8)) == expect([*range(8), 8])[8:]


def test_pinned_streams_stay(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=2) as (engine, batcher):
        ask(batcher, "a", 0)
        run(batcher, "a", lambda engine: (None, engine.changes.pin("a", True)))
        for name in "bcd":
            ask(batcher, name, 0)
            assert "a" in engine.residents.slots
        with pytest.raises(Refusal, match="one must not be pinned"):
            run(batcher, "d", lambda engine: (None, engine.changes.pin("d", True)))
        run(batcher, "a", lambda engine: (None, engine.changes.pin("a", False)))
        ask(batcher, "b", 0), ask(batcher, "c", 0)
        assert "a" not in engine.residents.slots


def test_what_is_learned_survives_a_restart(tmp_path: Path) -> None:
    with open_engine(tmp_path, slots=2) as (_, batcher):
        for name in "abc":
            ask(batcher, name, 0, 1, sequence=1)
    with open_engine(tmp_path, slots=2) as (engine, batcher):
        restored = {name: record.restored_version for name, record in engine.residents.records.items()}
        assert restored == dict.fromkeys("abc", 2)
        for name in "cab":
            assert ask(batcher, name, 5, 6, sequence=1)["repeated"]
            assert found(ask(batcher, name, 2, sequence=2)) == expect([0, 1, 2])[2:]


GUARD = Guard(collapse=0, burst=0, distance=0.0135, fallback="source")
GUARDED = replace(METHOD, settings={**METHOD.settings, "guard": GUARD})


def follow_stream(seeds: Sequence[int], fallback: Any = "undo") -> tuple[list[list[float]], list[bool]]:
    """Probabilities and alarms of an `Online` with a guard."""
    online = Online(network(), method=GUARDED, guard=replace(GUARD, fallback=fallback))
    answers = [online.predict(image(seed)[None]) for seed in seeds]
    return [one.logits.softmax(-1)[0].tolist() for one in answers], [bool(one.alarmed) for one in answers]


@pytest.mark.parametrize("action", ["guard", "report", "reset", "rollback", "freeze"])
def test_a_collapse_is_acted_upon(tmp_path: Path, action: Any) -> None:
    """The update that shows it is undone; then the stream goes on from where the action leads."""
    seeds = range(16)
    first = follow_stream(seeds)[1].index(True)
    assert 3 <= first < 15
    with open_engine(tmp_path, method=GUARDED, on_collapse=action, version_every=3) as (engine, batcher):
        answers = [ask(batcher, "a", seed) for seed in seeds[: first + 1]]
        assert [row for answer in answers for row in found(answer)] == follow_stream(seeds)[0][: first + 1]
        assert [answer["answers"][0]["alarmed"] for answer in answers] == [False] * first + [True]
        record = engine.residents.records["a"]
        assert (record.collapses, record.frozen) == (1, action == "freeze")
        assert engine._metrics.read("testtime_collapses_total", action=action) == 1
        after, stored = ask(batcher, "a", 99), first // 3 * 3
        expected = {
            "guard": lambda: follow_stream([*seeds[: first + 1], 99], "source")[0][-1],
            "report": lambda: follow_stream([*seeds[: first + 1], 99])[0][-1],
            "reset": lambda: expect([99])[0],
            "rollback": lambda: expect([*seeds[:stored], 99])[-1],
            "freeze": lambda: answer_frozen(seeds[:first], 99),
        }[action]()
        assert found(after) == [expected]
        assert after["answers"][0]["adapted"] or action in ("report", "freeze")
        assert record.collapses == 1  # reported once, as long as it lasts


def answer_frozen(seeds: Sequence[int], seed: int) -> list[float]:
    """Of a network that has learned from some images, about another one."""
    online = make_online()
    for one in seeds:
        online.predict(image(one)[None])
    return Fixed(online.network()).predict(image(seed)[None]).logits.softmax(-1)[0].tolist()


def test_a_number_becomes_a_guard_that_follows_streams(tmp_path: Path) -> None:
    with open_engine(tmp_path / "a") as (engine, _):
        assert engine._streams.settings.guard == 3.0
    with open_engine(tmp_path / "b", on_collapse="report") as (engine, _):
        assert engine._streams.settings.guard == Guard(rise=3.0, fallback="undo")


def test_a_request_that_fails_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tmp_path, slots=2) as (engine, batcher):
        ask(batcher, "a", 0, sequence=1)
        predict, calls = engine._streams.predict, []

        def fail(images: Any, **given: Any) -> Any:
            calls.append(given)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return predict(images, **given)

        before = engine.residents.records["a"].describe()
        with monkeypatch.context() as patch:
            patch.setattr(engine._streams, "predict", fail)
            for name in "ab":  # b is new
                calls.clear()
                with pytest.raises(RuntimeError, match="out of memory"):
                    ask(batcher, name, 1, 2, 3, 4)
        assert engine.residents.records["a"].describe() == before
        again = ask(batcher, "a", 1, 2, 3, 4, sequence=2)
        assert found(again) == expect(range(5))[1:]
        assert (again["version"], again["seen"], again["sample"]) == (5, 5, 4)
        assert found(ask(batcher, "b", 5, 6)) == expect([5, 6])


def test_what_fails_beside_learning_leaves_nothing_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tmp_path, shadow=True) as (engine, batcher):
        with monkeypatch.context() as patch:
            patch.setattr(engine._fixed, "predict", lambda images: (_ for _ in ()).throw(RuntimeError("out of memory")))
            with pytest.raises(RuntimeError, match="out of memory"):
                ask(batcher, "a", 7)
        ask(batcher, "a", 0, 1)
        state = engine._streams.export_streams(engine.residents.find_slots(["a"]))
    online = make_online()
    online.predict(torch.stack([image(0), image(1)]))
    learned = online.state_dict()
    names = [name for name in learned if name.startswith("learner/encoder")]
    assert names
    assert all(torch.equal(state[name], learned[name]) for name in names)


def test_unused_streams_expire(tmp_path: Path) -> None:
    with open_engine(tmp_path, ttl=0.2) as (engine, batcher):
        ask(batcher, "a", 0)
        wait_for_expiry(engine, tmp_path)
        assert found(ask(batcher, "a", 3)) == expect([3])


def test_a_full_queue_and_a_busy_stream_are_refused(tmp_path: Path) -> None:
    release = threading.Event()
    with open_engine(tmp_path, max_queue=70) as (_, batcher):
        ask(batcher, "a", 0)
        held = batcher.submit(Job("a", action=lambda engine: (release.wait(60), None)))
        waiting = [submit(batcher, "a", image(0)) for _ in range(63)]
        with pytest.raises(Refusal, match="busy") as caught:
            submit(batcher, "a", image(0))
        assert caught.value.status == 409
        with pytest.raises(Refusal, match="already waiting") as caught:
            submit(batcher, "b", *[image(0)] * 8)
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        other = submit(batcher, "b", image(0))
        release.set()
        assert held.result(60)
        assert [one.result(60)["version"] for one in waiting] == list(range(2, 65))
        assert other.result(60)["version"] == 1


@pytest.mark.parametrize("name", ["rotta", "rehearsal", "best"])
def test_the_memory_of_images_can_be_forbidden(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ValueError, match=f"'{name}' stores recent images"),
        open_engine(tmp_path, method=METHODS[name], image_memory=False),
    ):
        pass


def test_a_method_without_its_memory_is_not_forbidden(tmp_path: Path) -> None:
    best = METHODS["best"]
    without = replace(best, settings={**best.settings, "copies": 2, "constants": {"memory": 0}})
    with open_engine(tmp_path, method=without, image_memory=False) as (engine, batcher):
        online = Online(network(), method=without)
        expected = [online.predict(image(seed)[None]).logits.softmax(-1)[0].tolist() for seed in range(3)]
        assert found(ask(batcher, "a", 0, 1, 2)) == expected
        assert not engine.holds_images


def test_shadow_mode_answers_as_the_original_network_and_learns(tmp_path: Path) -> None:
    with open_engine(tmp_path / "shadow", shadow=True) as (engine, batcher):
        answers = found(ask(batcher, "a", 0, 1, 2))
        fixed = Fixed(network()).predict(torch.stack([image(seed) for seed in range(3)])).logits.softmax(-1)
        assert torch.allclose(torch.tensor(answers), fixed, atol=1e-6)
        assert engine.residents.records["a"].adapted == 3
        assert engine.residents.records["a"].disagreement is not None


def test_the_exported_network_is_the_adapted_one(tmp_path: Path) -> None:
    with open_engine(tmp_path / "state") as (_, batcher):
        ask(batcher, "a", 0, 1, 2)
        content = run(batcher, "a", lambda engine: (engine.changes.export("a"), None))
    (tmp_path / "network").write_bytes(content)
    online = make_online()
    online.predict(torch.stack([image(seed) for seed in range(3)]))
    expected, tensors = online.network().state_dict(), load_file(tmp_path / "network")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_every_size_of_a_group_is_recorded_in_advance_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    predict = Streams.predict

    def note(self: Streams, images: Tensor, *given: Any, **more: Any) -> Any:
        sizes.append(len(images))
        return predict(self, images, *given, **more)

    monkeypatch.setattr(Streams, "predict", note)
    tuning = kernels.tuning(torch.device("cpu"))
    for waits, expected in ((False, [1]), (True, [1, 4, 6])):
        monkeypatch.setattr(kernels, "tuning", lambda device, waits=waits: replace(tuning, waits=waits))
        sizes.clear()
        with open_engine(tmp_path / str(waits), slots=6, group=None) as (engine, batcher):
            engine.warm_up((3, 16, 16))
            assert sizes == expected
            assert found(ask(batcher, "a", 1, 2))[1] == pytest.approx(expect([1, 2])[1], abs=1e-5)

"""Streams: many online ones stepped together, each against its own `Online`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import close, pictures, same
from testtime import Episodic, Fixed, Online, Prediction, YNet, load, resnet26
from testtime.adaptation import replica_store
from testtime.adaptation.recorder import run
from testtime.adaptation.replica_store import ReplicaStore
from testtime.adaptation.streams import Streams

COUNT = 3
NAN = float("nan")
GIVEN: dict[str, Any] = {"lr": 0.01, "copies": 4}
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


@functools.cache
def _network(norm: str) -> YNet:
    return resnet26(depth=8, size=16, norm=norm, seed=1).eval()  # type: ignore[arg-type]


def network(norm: str = "group") -> YNet:
    return copy.deepcopy(_network(norm))


def rows(streams: Streams) -> list[dict[str, Tensor]]:
    """What each stream has learned and counted."""
    kept = streams.state_dict().items()
    state = {k: v for k, v in kept if k == "numbers" or (k.startswith("learner/") and k != "learner/shape")}
    return [{name: tensor[index].clone() for name, tensor in state.items()} for index in range(streams.count)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SCHEDULE = [[0, 1, 2], [2, 0], [1], [0, 2, 1], [2]]
SETTINGS: list[Any] = [
    pytest.param({}, id="sgd"),
    pytest.param({"steps": 2, "update": "encoder", "seed": 3}, id="encoder, two steps"),
    pytest.param({"optimizer": MOMENTUM}, id="momentum"),
]


@pytest.mark.parametrize("together", [1, 2, COUNT])
@pytest.mark.parametrize("settings", SETTINGS)
def test_each_stream_is_its_own_online(settings: dict[str, Any], together: int) -> None:
    """Whatever the subset and the order of the streams in a call, and however many are computed side by side."""
    net = network()
    streams = Streams(net, COUNT, together=together, **GIVEN | settings)
    alone = [Online(net, **GIVEN | settings) for _ in range(COUNT)]
    learned = False
    for call, chosen in enumerate(SCHEDULE):
        images = pictures(len(chosen), seed=call)
        answers = streams.predict(images, streams=torch.tensor(chosen))
        for place, stream in enumerate(chosen):
            expected = alone[stream].predict(images[place : place + 1])
            assert close(answers[[place]], expected)
            learned = learned or not torch.allclose(expected.logits, Fixed(net)(images[place : place + 1]), atol=1e-3)
    assert learned
    assert (streams.seen, streams.adapted) == (10, 10)


def test_each_stream_with_batch_norm_is_its_own_online() -> None:
    net = network("batch")
    together, alone = Streams(net, COUNT, copies=4), [Online(net, copies=4) for _ in range(COUNT)]
    for call in range(2):
        answers = together.predict(pictures(seed=call))
        for stream in range(COUNT):
            expected = alone[stream].predict(pictures(seed=call)[[stream]])
            assert torch.allclose(answers.logits[[stream]], expected.logits, atol=1e-4)


@pytest.mark.parametrize("together", [1, 2, COUNT])
@pytest.mark.parametrize("update", ["encoder", "encoder+ssl"])
def test_what_a_stream_has_learned_is_a_network(update: Any, together: int, tmp_path: Path) -> None:
    streams, untouched = (Streams(network(), COUNT, together=together, update=update, **GIVEN) for _ in range(2))
    assert equal(streams.network(2).state_dict(), network().state_dict())
    streams.predict(pictures()), untouched.predict(pictures())
    streams.network(1).save(tmp_path / "network")
    net = load(tmp_path / "network")
    assert net.card == network().card
    answers, image = streams.predict(pictures(seed=1)), pictures(seed=1)[[1]]
    assert same(answers, untouched.predict(pictures(seed=1)))
    assert torch.allclose(answers.logits_before[[1]], Fixed(net)(image), atol=1e-5)
    assert not torch.allclose(Fixed(net)(image), Fixed(network())(image), atol=1e-3)
    for stream in (-1, COUNT):
        with pytest.raises(ValueError, match=f"`stream` must be from 0 to 2, got {stream}"):
            streams.network(stream)


def test_a_network_asked_for_in_inference_mode_leaves_streams_that_go_on() -> None:
    streams = Streams(network(), COUNT, **GIVEN)
    with torch.inference_mode():
        streams.predict(pictures())
        streams.predict(pictures(2, seed=1), streams=torch.tensor([0, 1]))  # the rows are apart from now on
        net = streams.network(0)
    answers = streams.predict(pictures(1, seed=2), streams=torch.tensor([0]))
    assert torch.allclose(answers.logits_before, Fixed(net)(pictures(1, seed=2)), atol=1e-5)


@pytest.mark.parametrize("together", [2, COUNT])
@pytest.mark.parametrize("update", ["encoder", "encoder+ssl"])
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, MOMENTUM])
def test_streams_that_are_not_called_keep_every_bit(norm: str, optimizer: Any, update: Any, together: int) -> None:
    streams = Streams(network(norm), COUNT, together=together, optimizer=optimizer, update=update, **GIVEN)
    streams.predict(pictures())
    before = rows(streams)
    streams.predict(pictures(2, seed=1), streams=torch.tensor([2, 0]))
    after = rows(streams)
    assert [equal(a, b) for a, b in zip(after, before, strict=True)] == [False, True, False]


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("bad", [NAN, "explosion"])
def test_a_bad_image_in_one_stream_leaves_the_others_as_they_would_be(norm: str, bad: Any) -> None:
    streams, untouched = Streams(network(norm), COUNT, **GIVEN), Streams(network(norm), COUNT, **GIVEN)
    for one in (streams, untouched):
        one.predict(pictures())
    before, images = rows(streams), pictures(seed=1)
    if bad == "explosion":
        name = "learner/encoder.0.weight"
        state = streams.state_dict()
        state[name][1] = 1e30  # a stream that is beyond help: whatever it learns explodes
        streams.load_state_dict(state)
        before = rows(streams)
    else:
        images[1, 0, 3, 3] = NAN
    answers, expected = streams.predict(images), untouched.predict(pictures(seed=1))
    others = torch.tensor([0, 2])
    assert same(answers[others], expected[others])
    assert answers.rolled_back.tolist() == [False, True, False]
    assert streams.rolled_back == 1
    after, would_be = rows(streams), rows(untouched)
    assert equal(after[0], would_be[0])
    assert equal(after[2], would_be[2])
    assert equal(after[1], before[1] | {"numbers": before[1]["numbers"] + 1})


def test_the_gate_acts_on_each_stream() -> None:
    net, images = network(), pictures()
    confidence = Fixed(net).predict(images).confidence
    threshold = float(confidence.sort().values[:2].mean())
    lowest = int(confidence.argmin())
    streams = Streams(net, COUNT, threshold=threshold, **GIVEN)
    before = rows(streams)
    answers = streams.predict(images)
    after = rows(streams)
    assert answers.adapted.tolist() == [stream == lowest for stream in range(COUNT)]
    assert streams.adapted == 1
    original = {f"learner/{name}": tensor for name, tensor in net.state_dict().items()}
    for stream in range(COUNT):
        still = all(torch.equal(v, original[k]) for k, v in after[stream].items() if k in original)
        assert still == (stream != lowest)
        assert torch.equal(answers.logits[stream], answers.logits_before[stream]) == (stream != lowest)
    assert [int(row["numbers"]) for row in before] == [0] * COUNT
    assert [int(row["numbers"]) for row in after] == [1] * COUNT


@pytest.mark.parametrize("together", [2, COUNT])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_a_reset_of_some_streams_leaves_the_others(optimizer: Any, together: int) -> None:
    settings = {**GIVEN, "optimizer": optimizer, "lr": 0.002, "together": together}
    streams, fresh = Streams(network(), COUNT, **settings), Streams(network(), COUNT, **settings)
    for call in range(2):
        streams.predict(pictures(seed=call))
    before = rows(streams)
    streams.reset(torch.tensor([2, 0]))
    after = rows(streams)
    assert [equal(a, b) for a, b in zip(after, before, strict=True)] == [False, True, False]
    answers, expected = (
        streams.predict(pictures(seed=5)),
        fresh.predict(pictures(seed=5)),
    )
    others = torch.tensor([0, 2])
    assert same(answers[others], expected[others])
    assert not torch.equal(answers.logits[1], expected.logits[1])


def test_a_reset_of_all_streams_is_exact() -> None:
    streams = Streams(network(), COUNT, **GIVEN)
    first = streams.predict(pictures())
    streams.predict(pictures(seed=1))
    streams.reset()
    assert streams.seen == 0
    assert same(streams.predict(pictures()), first)


def test_a_reset_before_anything_was_learned_changes_nothing() -> None:
    streams = Streams(network(), COUNT, **GIVEN)
    streams.reset(torch.tensor([1]))
    assert same(
        streams.predict(pictures()),
        Streams(network(), COUNT, **GIVEN).predict(pictures()),
    )


@pytest.mark.parametrize(("before", "after"), [(COUNT, COUNT), (COUNT, 2), (2, COUNT), (2, 1)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, MOMENTUM])
def test_saved_streams_continue_bit_for_bit(tmp_path: Path, optimizer: Any, before: int, after: int) -> None:
    """Also where another number is computed side by side."""
    streams = Streams(network(), COUNT, together=before, optimizer=optimizer, **GIVEN)
    streams.predict(pictures())
    streams.predict(pictures(2, seed=1), streams=torch.tensor([1, 2]))
    streams.save(tmp_path / "state")
    again = Streams(network(), COUNT, together=after, optimizer=optimizer, **GIVEN)
    again.predict(pictures(seed=8))
    again.load(tmp_path / "state")
    assert all(equal(a, b) for a, b in zip(rows(again), rows(streams), strict=True))
    for call in (2, 3):
        chosen = torch.tensor([2, 0])
        expected = streams.predict(pictures(2, seed=call), streams=chosen)
        answers = again.predict(pictures(2, seed=call), streams=chosen)
        # Another number of matrices in one product may be rounded otherwise.
        assert same(answers, expected) if after == before else close(answers, expected)
    assert all(equal(a, b) for a, b in zip(rows(again), rows(streams), strict=True))
    assert (again.seen, again.adapted) == (streams.seen, streams.adapted)


def test_loaded_streams_can_be_reset_one_by_one(tmp_path: Path) -> None:
    streams, again = Streams(network(), COUNT, **GIVEN), Streams(network(), COUNT, **GIVEN)
    streams.predict(pictures())
    streams.save(tmp_path / "state")
    again.load(tmp_path / "state")
    for one in (streams, again):
        one.reset(torch.tensor([0]))
    assert same(again.predict(pictures(seed=1)), streams.predict(pictures(seed=1)))


def test_states_of_another_count_or_kind_are_refused_and_change_nothing(tmp_path: Path) -> None:
    streams, untouched = Streams(network(), COUNT, **GIVEN), Streams(network(), COUNT, **GIVEN)
    for one in (streams, untouched):
        one.predict(pictures())
    more, online = Streams(network(), COUNT + 1, **GIVEN), Online(network(), **GIVEN)
    more.predict(pictures(COUNT + 1))
    online.predict(pictures())
    with pytest.raises(ValueError, match="not 3 integers"):
        streams.load_state_dict(more.state_dict())
    with pytest.raises(ValueError, match="another adapter: Online, here Streams"):
        streams.load_state_dict(online.state_dict())
    untouched.save(tmp_path / "state")
    state = load_file(tmp_path / "state")
    del state["learner/encoder.0.weight"]
    save_file(state, tmp_path / "less")
    with pytest.raises(ValueError, match=r"tensor 'encoder.0.weight' is missing"):
        streams.load(tmp_path / "less")
    assert same(streams.predict(pictures(seed=1)), untouched.predict(pictures(seed=1)))


@pytest.mark.parametrize(
    ("images", "chosen", "said"),
    [
        (pictures(), torch.tensor([0, 1]), r"`streams` must be 3 integers, got torch.int64 \(2,\)"),
        (pictures(2), None, "`images` must be one for each of the 3 streams, got 2"),
        (
            pictures(),
            torch.tensor([0, 1, 1]),
            r"`streams` must be different numbers from 0 to 2, got \[0, 1, 1\]",
        ),
        (
            pictures(),
            torch.tensor([0, 1, 3]),
            r"`streams` must be different numbers from 0 to 2, got \[0, 1, 3\]",
        ),
        (pictures(), torch.tensor([0, -1, 1]), "`streams` must be different numbers"),
        (pictures(), torch.tensor([0.0, 1.0, 2.0]), "`streams` must be 3 integers, got torch.float32"),
        (pictures() * 255, None, r"must be in \[0, 1\]"),
    ],
)
def test_wrong_calls_are_refused_and_leave_no_trace(images: Tensor, chosen: Tensor | None, said: str) -> None:
    streams, untouched = Streams(network(), COUNT, **GIVEN), Streams(network(), COUNT, **GIVEN)
    for one in (streams, untouched):
        one.predict(pictures(seed=1))
    with pytest.raises(ValueError, match=said):
        streams.predict(images, streams=chosen)
    assert all(equal(a, b) for a, b in zip(rows(streams), rows(untouched), strict=True))
    assert same(streams.predict(pictures(seed=2)), untouched.predict(pictures(seed=2)))


def test_a_reset_of_streams_that_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="`streams`"):
        Streams(network(), COUNT).reset(torch.tensor([COUNT]))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_whose_memory_mixes_streams_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="mix streams; use SGD"):
        Streams(network(), COUNT, optimizer=optimizer)


def test_there_is_no_batch_to_share() -> None:
    with pytest.raises(ValueError, match="no batch to `share`"):
        Streams(network(), COUNT, share="batch")


def test_without_memory_a_stream_is_an_episode() -> None:
    net = network()
    answers = Streams(net, COUNT, steps=2, **GIVEN).predict(pictures())
    expected = Episodic(net, steps=2, **GIVEN).predict(pictures(), torch.zeros(COUNT, dtype=torch.int64))
    assert close(answers, expected)


def too_small(monkeypatch: pytest.MonkeyPatch, fits: int) -> list[int]:
    """Let the memory hold the step of so many streams; how many were tried at once."""
    tried: list[int] = []
    predict = ReplicaStore.predict

    def predict_or_fail(self: ReplicaStore, *given: Any) -> Prediction:
        tried.append(self.together)
        if self.together > fits:
            raise torch.OutOfMemoryError
        return predict(self, *given)

    monkeypatch.setattr(ReplicaStore, "predict", predict_or_fail)
    return tried


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, MOMENTUM])
def test_streams_that_do_not_fit_into_the_memory_take_turns(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> None:
    """From the first image, or from one in the middle of the stream; nothing that was learned is lost."""
    settings = {**GIVEN, "optimizer": optimizer, "together": 5}
    expected = Streams(network(), 5, **settings)
    for first in (0, 1):  # the image from which on only two fit
        expected.reset()
        streams, tried = Streams(network(), 5, **settings), []
        for call in range(3):
            would_be = expected.predict(pictures(5, seed=call))
            with monkeypatch.context() as patch:
                tried.append(too_small(patch, 5 if call < first else 2))
                assert close(streams.predict(pictures(5, seed=call)), would_be)
        assert tried == [[5, 3, 2], [2], [2]] if first == 0 else [[5], [5, 3, 2], [2]]
        assert streams.together == 2
        assert all(equal(a, b) for a, b in zip(rows(streams), rows(expected), strict=True))


def test_a_stream_that_does_not_fit_by_itself_is_an_error_and_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, untouched = (Streams(network(), COUNT, together=2, **GIVEN) for _ in range(2))
    for one in (streams, untouched):
        one.predict(pictures())
    with monkeypatch.context() as patch:
        too_small(patch, 0)
        with pytest.raises(torch.OutOfMemoryError):
            streams.predict(pictures(seed=1))
    assert all(equal(a, b) for a, b in zip(rows(streams), rows(untouched), strict=True))
    assert same(streams.predict(pictures(seed=1)), untouched.predict(pictures(seed=1)))


@pytest.mark.parametrize("together", [4, 9])
def test_a_step_costs_as_much_as_the_streams_that_take_part(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever learner they went through before; their momentum goes with them."""
    net, sizes = network(), []
    streams = Streams(net, 9, together=together, optimizer=MOMENTUM, **GIVEN)
    alone = [Online(net, optimizer=MOMENTUM, **GIVEN) for _ in range(9)]
    monkeypatch.setattr(replica_store, "run", lambda one, *given: sizes.append(len(one.all_rows)) or run(one, *given))
    calls = [[4], [1, 2, 3], list(range(9)), [8, 0, 4, 2, 6], [3], list(range(9)), [4, 5]]
    for call, chosen in enumerate(calls):
        images = pictures(len(chosen), seed=call)
        answers = streams.predict(images, streams=None if len(chosen) == 9 else torch.tensor(chosen))
        expected = Prediction.join([alone[stream].predict(images[[place]]) for place, stream in enumerate(chosen)])
        assert close(answers, expected)
    assert sizes == ([1, 4, 4, 4, 1, 4, 1, 1, 4, 4, 1, 4] if together == 4 else [1, 4, 9, 9, 1, 9, 4])


def test_a_call_that_is_cut_short_between_groups_leaves_every_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(network(), COUNT, together=1, **GIVEN)
    streams.predict(pictures())
    before, turns = rows(streams), iter([run, run])

    def run_twice(*given: Any) -> Prediction:
        try:
            return next(turns)(*given)
        except StopIteration:
            raise KeyboardInterrupt from None

    with monkeypatch.context() as patch:
        patch.setattr(replica_store, "run", run_twice)
        with pytest.raises(KeyboardInterrupt):
            streams.predict(pictures(seed=1))
    assert all(equal(a, b) for a, b in zip(rows(streams), before, strict=True))


def test_a_copy_of_streams_that_take_turns_goes_its_own_way() -> None:
    streams = Streams(network(), COUNT, together=2, optimizer=MOMENTUM, **GIVEN)
    streams.predict(pictures())
    twin, before = copy.deepcopy(streams), rows(streams)
    expected = twin.predict(pictures(seed=1))
    assert all(equal(a, b) for a, b in zip(rows(streams), before, strict=True))
    assert same(streams.predict(pictures(seed=1)), expected)


@pytest.mark.parametrize("name", ["count", "together"])
def test_no_streams_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        Streams(network(), **{"count": COUNT, name: 0})

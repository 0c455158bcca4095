"""Evaluation: records against the loop written by hand, and the small functions on records."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testtime import Adapter, Episodic, Fixed, Online, YNet, resnet26
from testtime.data import TensorSet
from testtime.evaluation.records import (
    COLUMNS,
    PROBABILITIES,
    Record,
    count_wrong,
    error,
    evaluate,
    flips,
    read_records,
    running_error,
    score,
    stream_order,
)
from testtime.randomness import Draws


@pytest.fixture(scope="module")
def net() -> YNet:
    return resnet26(depth=8, channels=1, size=8, seed=3).eval()


@pytest.fixture(scope="module")
def pictures() -> TensorSet:
    pixels = (Draws.of(1, torch.arange(11)).uniform(1, 8, 8) * 256).to(torch.uint8)
    return TensorSet("pictures", pixels, torch.arange(11) % 10, tuple("0123456789"))


def make_record(sample: int, right: bool | None, was: bool | None = True) -> Record:
    label = None if right is None else 0
    return Record(sample, label, 0 if right else 1, 0 if was else 1, right, was, 1.0, 0.5, 0.5, True, False)


def probability_by_hand(scores: list[float]) -> Any:
    """The largest of the softmax probabilities."""
    powers = [math.exp(score) for score in scores]
    return pytest.approx(max(powers) / sum(powers), rel=1e-5)


def about(record: Record) -> Any:
    """The record, with probabilities up to the rounding of logits, which depends on the other images of a call."""
    values = record.probability, record.probability_before
    after, before = (pytest.approx(value, rel=1e-5) for value in values)
    return record._replace(probability=after, probability_before=before)


def loop_by_hand(adapter: Adapter, test_set: TensorSet, batch: int, order: torch.Tensor) -> list[Record]:
    """The loop of the docstring, read out image by image."""
    records = []
    for numbers, images, labels in test_set.chunks(batch, order):
        assert labels is not None
        answers = adapter.predict(images, samples=numbers)
        predictions = test_set.scores(answers.logits).argmax(1)
        right = test_set.is_correct(predictions, numbers)
        for place, number in enumerate(numbers.tolist()):
            before = int(test_set.scores(answers.logits_before)[place].argmax())
            records.append(
                Record(
                    number,
                    int(labels[place]),
                    int(predictions[place]),
                    before,
                    bool(right[place]),
                    before == int(labels[place]),
                    float(answers.loss_before[place]),
                    float(answers.loss_after[place]),
                    float(answers.confidence[place]),
                    bool(answers.adapted[place]),
                    bool(answers.rolled_back[place]),
                    probability_by_hand(test_set.scores(answers.logits)[place].tolist()),
                    probability_by_hand(test_set.scores(answers.logits_before)[place].tolist()),
                )
            )
    return records


@pytest.mark.parametrize("mode", ["fixed", "episodic", "online", "online together"])
def test_records_are_those_of_the_loop_written_by_hand(net: YNet, pictures: TensorSet, mode: str) -> None:
    def adapter() -> Adapter:
        if mode == "fixed":
            return Fixed(net)
        if mode == "episodic":
            return Episodic(net, steps=1, lr=0.05, copies=4)
        return Online(net, lr=0.05, copies=4, share="batch" if "together" in mode else "image")

    by_hand = loop_by_hand(adapter(), pictures, 4, torch.arange(11))
    assert list(evaluate(adapter(), pictures, batch=4)) == by_hand
    assert [record.adapted for record in by_hand] == [mode != "fixed"] * 11
    # Records with nothing in them would be equal as well.
    assert len({record.loss_after for record in by_hand}) == 11


def test_the_whole_stream_is_one_stream(net: YNet, pictures: TensorSet) -> None:
    one, many = Online(net, lr=0.05, copies=4), Online(net, lr=0.05, copies=4)
    together = list(evaluate(one, pictures, batch=11))
    alone = list(evaluate(many, pictures, batch=1))
    assert together == alone
    again = list(evaluate(many, pictures, batch=1))
    assert [r.loss_before for r in again] != [r.loss_before for r in alone]  # it went on, it did not start anew


def test_shuffling_changes_the_order_and_not_the_samples(net: YNet, pictures: TensorSet) -> None:
    in_order = {record.sample: record for record in evaluate(Episodic(net, steps=1, copies=2), pictures)}
    shuffled = list(evaluate(Episodic(net, steps=1, copies=2), pictures, shuffle=True, seed=5, batch=3))
    assert [record.sample for record in shuffled] == stream_order(11, 5).tolist()
    assert [record.sample for record in shuffled] != sorted(in_order)
    assert {record.sample: about(record) for record in shuffled} == in_order
    assert stream_order(11, 5).tolist() != stream_order(11, 6).tolist()


def test_a_limit_takes_the_beginning_of_the_order(net: YNet, pictures: TensorSet) -> None:
    some = [record.sample for record in evaluate(Fixed(net), pictures, limit=4, shuffle=True, seed=2)]
    assert some == stream_order(11, 2)[:4].tolist()
    assert list(evaluate(Fixed(net), pictures, limit=0)) == []


def test_sets_without_labels_get_records_without_verdicts(net: YNet, pictures: TensorSet) -> None:
    unlabelled = TensorSet("unlabelled", pictures.images(slice(None)))
    records = list(evaluate(Fixed(net), unlabelled))
    assert {(record.label, record.is_right, record.was_right) for record in records} == {(None, None, None)}
    with pytest.raises(ValueError, match="Sample 0 has no label"):
        error(records)
    numbers = torch.arange(3)
    columns = score(unlabelled, numbers, Fixed(net).predict(unlabelled.images(numbers)))
    assert {name: str(column.dtype) for name, column in columns.items()} == COLUMNS | PROBABILITIES
    assert columns["label"].tolist() == [-1] * 3
    assert count_wrong(columns) == 0
    assert list(read_records(columns)) == records[:3]
    older = {name: columns[name] for name in COLUMNS}
    without = [record._replace(probability=None, probability_before=None) for record in records[:3]]
    assert list(read_records(older)) == without


def test_several_right_labels_count(net: YNet, pictures: TensorSet) -> None:
    generous = TensorSet("generous", pictures.images(slice(None)), pictures.labels, pictures.classes)
    generous.right = torch.ones(11, 10, dtype=torch.bool)
    assert error(evaluate(Fixed(net), generous)) == 0
    assert error(evaluate(Fixed(net), pictures)) > 0


def test_progress_tells_count_and_error(net: YNet, pictures: TensorSet) -> None:
    told: list[tuple[int, int, str]] = []
    records = list(evaluate(Fixed(net), pictures, batch=4, progress=lambda *said: told.append(said)))
    assert [(done, total) for done, total, _ in told] == [(4, 11), (8, 11), (11, 11)]
    assert told[-1][2] == f"error {error(records):.1%}"


@pytest.mark.parametrize(("wrong", "said"), [({"batch": 0}, "`batch`"), ({"limit": -1}, "`limit`")])
def test_bad_arguments_are_refused_at_the_call(
    net: YNet, pictures: TensorSet, wrong: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        evaluate(Fixed(net), pictures, **wrong)  # not iterated: the call itself refuses


def test_a_network_is_no_adapter(net: YNet, pictures: TensorSet) -> None:
    with pytest.raises(TypeError, match=r"`adapter` .*tt\.Fixed\(net\), got YNet"):
        evaluate(net, pictures)  # type: ignore[arg-type]


def test_a_set_that_tests_order_is_not_shuffled(net: YNet, pictures: TensorSet) -> None:
    drifting = TensorSet("drifting", pictures.images(slice(None)), pictures.labels, pictures.classes)
    drifting.ordered = True
    with pytest.raises(ValueError, match="drifting has a fixed order"):
        evaluate(Fixed(net), drifting, shuffle=True)
    assert len(list(evaluate(Fixed(net), drifting))) == 11


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 50))
def test_running_error_is_the_mean_of_what_it_covers(rights: list[bool], window: int) -> None:
    records = [make_record(number, right) for number, right in enumerate(rights)]
    for width in (None, window):
        running = running_error(records, width)
        for place, share in enumerate(running):
            covered = rights[: place + 1][-(width or len(rights)) :]
            assert math.isclose(share, covered.count(False) / len(covered))
    assert running_error(records)[-1] == error(records)


def test_running_error_needs_a_window_of_one_at_least() -> None:
    with pytest.raises(ValueError, match="`window` must be at least 1, got 0"):
        running_error([make_record(0, True)], 0)


def test_no_records_have_no_error() -> None:
    with pytest.raises(ValueError, match="no records"):
        error([])


def test_flips_against_a_baseline_in_another_order() -> None:
    baseline = [make_record(4, False), make_record(7, True), make_record(9, True), make_record(2, False)]
    after = [make_record(2, True), make_record(9, False), make_record(7, True), make_record(4, False)]
    found = flips(after, baseline)
    assert found.to_right == (2,)
    assert found.to_wrong == (9,)


def test_flips_of_a_record_against_itself_before() -> None:
    found = flips([make_record(0, True, False), make_record(1, False, True), make_record(2, True, True)])
    assert found == ((0,), (1,))


def test_flips_need_the_same_samples() -> None:
    with pytest.raises(ValueError, match="same samples"):
        flips([make_record(0, True)], [make_record(1, True)])


# ---------------------------------------------------------------------------------------------------------------------
# Iterables of batches
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fixed", "online"])
def test_a_loader_gives_the_records_of_the_set(net: YNet, pictures: TensorSet, mode: str) -> None:
    def adapter() -> Adapter:
        return Fixed(net) if mode == "fixed" else Online(net, lr=0.05, copies=4)

    assert pictures.labels is not None
    dataset = torch.utils.data.TensorDataset(pictures.images(slice(None)), pictures.labels)
    told: list[tuple[int, int, str]] = []
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    found = list(evaluate(adapter(), loader, progress=lambda *said: told.append(said)))
    assert found == list(evaluate(adapter(), pictures, batch=4))
    assert [(done, total) for done, total, _ in told] == [(4, 11), (8, 11), (11, 11)]
    assert told[-1][2] == f"error {error(found):.1%}"
    some = [record.sample for record in evaluate(adapter(), loader, limit=6)]
    assert some == list(range(6))


@pytest.mark.parametrize("limit", [0, 4, 8])
def test_a_limit_takes_no_batch_more_than_needed(net: YNet, pictures: TensorSet, limit: int) -> None:
    batches = iter(pictures.images(slice(None)).split(4))
    assert len(list(evaluate(Fixed(net), batches, limit=limit))) == limit
    assert sum(map(len, batches)) == len(pictures) - limit


def test_batches_may_lack_labels(net: YNet, pictures: TensorSet) -> None:
    images, labels = pictures.images(slice(4)), [0, 1, 2, 3]
    batches = [images, (images, None), [images], (images, labels)]
    records = list(evaluate(Fixed(net), iter(batches)))
    assert [record.label for record in records] == [None] * 12 + labels
    assert [record.sample for record in records] == list(range(16))
    assert len({record.prediction for record in records[::4]}) == 1  # the same image
    wrong = [record.prediction != label for record, label in zip(records[12:], labels, strict=True)]
    assert error(records[12:]) == sum(wrong) / 4


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda images: (images, torch.tensor([0, 1, 10])), "Batch 1: labels must be from 0 to 9, got 10"),
        (lambda images: (images, torch.tensor([0, 1, -1])), "got -1"),
        (lambda images: (images, torch.tensor([0, 1])), r"Batch 1: labels must be 3 integers, got torch.int64 \(2,\)"),
        (lambda images: (images, torch.zeros(3, 10)), "labels must be 3 integers"),
        (lambda images: (images, ["cat"] * 3), "labels must be integers, got list"),
        (lambda images: (images[0], 3), r"got \(1, 8, 8\); pass a DataLoader"),
        (lambda images: {"images": images}, "must be a tensor .*, got dict"),
        (lambda images: (images.expand(3, 3, 8, 8), None), "Batch 1: `images` must have 1 channels, got 3"),
    ],
)
def test_malformed_batches_are_refused_with_their_number(net: YNet, pictures: TensorSet, batch: Any, said: str) -> None:
    images = pictures.images(slice(3))
    with pytest.raises(ValueError, match=said):
        list(evaluate(Fixed(net), [(images, torch.tensor([0, 1, 2])), batch(images)]))


def test_what_is_no_iterable_of_batches_is_refused_at_the_call(net: YNet) -> None:
    for wrong in (torch.zeros(2, 1, 8, 8), "digits", 3, {"images": 1}):
        with pytest.raises(TypeError, match=f"`test_set` must be .*got {type(wrong).__name__}"):
            evaluate(Fixed(net), wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`shuffle`"):
        evaluate(Fixed(net), [], shuffle=True)

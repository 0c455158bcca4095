"""The test-set interface: numbers, chunks, right and wrong."""

from __future__ import annotations

import pickle

import pytest
import torch

from testtime.data import DataError, TensorSet


@pytest.fixture
def ten() -> TensorSet:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 4, 5).clone()
    return TensorSet("ten", images, torch.arange(10) % 3, ("a", "b", "c"))


def test_images_by_slice_list_and_tensor(ten: TensorSet) -> None:
    assert ten.images(slice(2, 8, 3))[:, 0, 0, 0].tolist() == [2, 5]
    assert ten.images([9, 0, 0])[:, 0, 0, 0].tolist() == [9, 0, 0]
    assert ten.images(torch.tensor([3], dtype=torch.int32)).shape == (1, *ten.shape)
    assert ten.images([]).shape == (0, 3, 4, 5)
    assert ten.images(slice(-2, None))[:, 0, 0, 0].tolist() == [8, 9]


def test_images_are_the_callers_own(ten: TensorSet) -> None:
    ten.images(slice(None)).zero_()
    assert ten.images([9]).max() == 9


@pytest.mark.parametrize("wrong", [[10], [-1], [0, 11]])
def test_numbers_outside_the_set_are_refused(ten: TensorSet, wrong: list[int]) -> None:
    with pytest.raises(IndexError, match="samples 0 to 9"):
        ten.images(wrong)


@pytest.mark.parametrize("wrong", [torch.tensor([True] * 10), torch.tensor([0.5]), torch.tensor([[1]])])
def test_numbers_must_be_integers_in_a_row(ten: TensorSet, wrong: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="`numbers`"):
        ten.images(wrong)


@pytest.mark.parametrize("size", [1, 3, 10, 11])
def test_chunks_walk_the_whole_set_once(ten: TensorSet, size: int) -> None:
    chunks = list(ten.chunks(size))
    assert [n for chunk in chunks for n in chunk.numbers.tolist()] == list(range(10))
    assert all(len(chunk.numbers) == size for chunk in chunks[:-1])
    for numbers, images, labels in chunks:
        assert labels is not None
        assert labels.tolist() == [n % 3 for n in numbers.tolist()]
        assert images[:, 0, 0, 0].tolist() == numbers.tolist()


def test_chunks_follow_an_order(ten: TensorSet) -> None:
    order = [5, 1, 9]
    numbers = [n for chunk in ten.chunks(2, order) for n in chunk.numbers.tolist()]
    assert numbers == order
    assert list(ten.chunks(2, [])) == []
    with pytest.raises(ValueError, match="`size`"):
        next(ten.chunks(0))


def test_is_correct_with_one_right_label(ten: TensorSet) -> None:
    assert ten.is_correct(torch.tensor([0, 0, 2]), [0, 1, 2]).tolist() == [True, False, True]
    assert ten.is_correct(torch.arange(10) % 3).all()
    with pytest.raises(ValueError, match=r"\(2,\)"):
        ten.is_correct(torch.tensor([0]), [0, 1])


def test_is_correct_with_several_right_labels(ten: TensorSet) -> None:
    ten.right = torch.zeros(10, 3, dtype=torch.bool)
    ten.right[4, [0, 2]] = True
    assert ten.is_correct(torch.tensor([0, 1, 2]), [4, 4, 4]).tolist() == [True, False, True]


def test_unlabelled_sets_judge_nothing() -> None:
    plain = TensorSet("plain", torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    assert next(plain.chunks(2)).labels is None
    with pytest.raises(ValueError, match="no labels"):
        plain.is_correct(torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (torch.zeros(2, 3, 4, 4), None),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), None),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), None),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0])),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0.0, 1.0])),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 2])),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, -1])),
    ],
)
def test_tensor_set_checks_what_it_is_given(images: torch.Tensor, labels: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"`images`|`labels`"):
        TensorSet("wrong", images, labels, ("a", "b"))


def test_data_error_is_one_line_and_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(DataError("some/file", "two\nlines")))
    assert isinstance(error, ValueError)
    assert str(error) == "some/file: two lines"

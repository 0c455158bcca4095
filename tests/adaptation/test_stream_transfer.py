"""Streams taken out and put back: bit for bit, in any row, whatever happened in between; and groups of one size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import close, network, pictures, same
from loops import sharpen
from testtime import METHODS, Online, Streams, collect, kernels
from testtime.adaptation.streams import YNet

pytestmark = [
    pytest.mark.filterwarnings("ignore:The method .* needs several images"),
    pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics"),
]
COUNT = 4
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
EVERY: list[Any] = [
    *({"method": name} for name in METHODS),
    {"method": "ttt", "optimizer": MOMENTUM},
    {"method": "tent", "resets": 2},
]


@functools.cache
def _network() -> YNet:
    return collect(sharpen(network("batch")), pictures(8, seed=9))


def make(count: int = COUNT, **given: Any) -> Streams:
    learns = METHODS[given["method"]].settings.get("steps") != 0
    return Streams(_network(), count, **{"copies": 2, **({"steps": 1} if learns else {})} | given)


def of(streams: Streams, images: Tensor, *chosen: int) -> Any:
    return streams.predict(images, streams=torch.tensor(chosen))


@pytest.mark.parametrize("given", EVERY, ids=str)
def test_a_stream_goes_out_and_comes_back_elsewhere_bit_for_bit(given: dict[str, Any]) -> None:
    streams, untouched, other = make(**given), make(**given), make(**given)
    for one in (streams, untouched):
        for call in range(3):
            of(one, pictures(2, seed=call), 0, 1)
    state = streams.export_streams(torch.tensor([1, 3]))
    assert state["numbers"].tolist() == [3, 0]
    streams.reset(torch.tensor([1]))
    of(streams, pictures(2, seed=7), 1, 3)  # the rows belong to others in the meantime
    streams.import_streams(torch.tensor([2, 1]), state)
    other.import_streams(torch.tensor([2, 1]), state)  # of an adapter that has learned nothing
    for call in (4, 5):
        expected = of(untouched, pictures(3, seed=call), 1, 0, 3)
        assert same(of(streams, pictures(3, seed=call), 2, 0, 1), expected)
        later = of(other, pictures(3, seed=call), 2, 3, 1)
        assert same(later[[0, 2]], expected[[0, 2]])
    first, last = (one.export_streams(torch.tensor([row])) for one, row in ((untouched, 1), (streams, 2)))
    zeros = {name for one in (first, last) for name, tensor in one.items() if not tensor.any()}
    assert first.keys() - zeros == last.keys() - zeros
    assert all(torch.equal(first[name], last[name]) for name in first.keys() - zeros)


def test_a_state_without_learning_resets_the_row() -> None:
    fresh, streams = make(method="ttt"), make(method="ttt")
    state = fresh.export_streams(torch.tensor([0]))
    of(streams, pictures(2), 0, 1)
    streams.import_streams(torch.tensor([1]), state)
    assert same(of(streams, pictures(1, seed=1), 1), of(fresh, pictures(1, seed=1), 2))


@pytest.mark.parametrize("given", [{"method": "ttt", "optimizer": MOMENTUM}, {"method": "rotta"}], ids=str)
@pytest.mark.parametrize("calls", [0, 2])
def test_what_is_undone_was_never_learned(given: dict[str, Any], calls: int) -> None:
    """Streams 1 and 3 go back; 0 and 2 stay, also if they have learned in between and could go back, too."""
    streams, untouched = make(**given), make(**given)
    for one in (streams, untouched):
        for call in range(calls):
            of(one, pictures(2, seed=call), 0, 1)
    undo = streams.make_undo(torch.tensor([1, 2, 3]))
    for call in range(3, 5):
        of(streams, pictures(3, seed=call), 1, 2, 3)
        of(untouched, pictures(3, seed=call)[1:2], 2)
    undo(torch.tensor([3, 1]))
    numbers = torch.stack([one._extra["numbers"] for one in (streams, untouched)])
    assert torch.equal(numbers[0], numbers[1])
    expected = of(untouched, pictures(4, seed=9), 0, 1, 2, 3)
    assert torch.allclose(of(streams, pictures(4, seed=9), 0, 1, 2, 3).logits, expected.logits, atol=1e-5)


def test_states_that_do_not_fit_change_nothing() -> None:
    streams, untouched = make(method="ttt"), make(method="ttt")
    for one in (streams, untouched):
        of(one, pictures(2), 0, 1)
    state, rows = streams.export_streams(torch.tensor([0, 1])), torch.tensor([2, 3])
    weights = next(name for name in state if name.endswith("weight"))
    wrong: list[dict[str, Tensor]] = [
        {name: tensor for name, tensor in state.items() if name != weights},
        state | {weights: state[weights].double()},
        state | {weights: state[weights][:1]},
        state | {"numbers": -state["numbers"] - 1},
        state | {"learner/shape": torch.tensor([[3, 99, 99]] * 2)},
        state | {"learner/other": state[weights]},
        {},
    ]
    for one in wrong:
        with pytest.raises(ValueError, match=r"does not fit|not an adapter's state"):
            streams.import_streams(rows, one)
    with pytest.raises(ValueError, match="`streams`"):
        streams.export_streams(torch.tensor([COUNT]))
    assert same(of(streams, pictures(4, seed=1), 0, 1, 2, 3), of(untouched, pictures(4, seed=1), 0, 1, 2, 3))


@pytest.mark.parametrize("name", ["ttt", "tent", "dua", "t3a", "rotta", "lame"])
def test_observing_answers_as_before_learning_and_changes_nothing(name: str) -> None:
    streams, untouched = make(method=name), make(method=name)
    for call in range(2):
        chosen = torch.tensor([0, 2])
        seen = streams.observe(pictures(2, seed=call), chosen)
        learned, expected = of(streams, pictures(2, seed=call), 0, 2), of(untouched, pictures(2, seed=call), 0, 2)
        assert same(learned, expected)
        unadapted = expected.logits_before if expected.adapted.any() else expected.logits  # which may be corrected
        assert torch.allclose(seen.logits, unadapted, atol=1e-5)
        assert not seen.adapted.any()


@pytest.mark.parametrize("together", [1, 3])
def test_padded_streams_do_not_depend_on_who_shares_their_calls(together: int) -> None:
    given: dict[str, Any] = {"method": "sar", "together": together, "padded": True}
    alone, mixed = make(8, **given), make(8, **given)
    online = Online(_network(), method="sar", share="image", copies=2, steps=1)
    for call, mates in enumerate([[], [1], [2, 3], [1, 4, 5, 6, 7], []]):
        image = pictures(1, seed=call)
        expected = of(alone, image, 0)
        chosen = [*mates, 0]
        found = of(mixed, torch.cat([pictures(len(mates), seed=90 + call), image]), *chosen)
        assert same(found[[len(mates)]], expected)
        if together == 1:
            assert same(online.predict(image), expected)


def test_padding_needs_a_number() -> None:
    with pytest.raises(ValueError, match="`padded` needs `together`"):
        make(method="ttt", padded=True)


def test_which_methods_hold_images() -> None:
    assert {name for name, method in METHODS.items() if method.holds_images} == {"best", "rehearsal", "rotta"}


@pytest.mark.parametrize("padded", [False, True])
def test_parameters_of_a_stream_do_not_depend_on_how_many_are_computed_together(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels read filters in an order of their own, as on a GPU, and the network has only few of such layers."""
    monkeypatch.setattr(kernels, "has_filters_innermost", lambda stacked: stacked.dim() == 5)
    net, given = network("group"), {"copies": 2, "lr": 0.01}
    streams, online = Streams(net, COUNT, together=3, padded=padded, **given), Online(net, **given)
    for call, company in enumerate(((1,), (1, 3), (0, 1, 2, 3), (1,), (2, 1))):
        images = pictures(len(company), seed=call)
        expected = online.predict(images[company.index(1)][None])
        assert close(of(streams, images, *company)[[company.index(1)]], expected, 1e-4)
        streams.import_streams(torch.tensor([1]), streams.export_streams(torch.tensor([1])))

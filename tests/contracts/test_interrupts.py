"""Ctrl-C at any line: a call of an adapter is learned from and counted as a whole, or not at all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import testtime as tt

SOURCES = str(Path(tt.__file__).parent)
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
COUNT, PLACES = 4, 32
SETTINGS: dict[str, Any] = {"copies": 2, "lr": 0.05}
NET = tt.load("digits-resnet8-gn-joint")
pytestmark = pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
BATCH_NORM = tt.resnet26(depth=8, channels=1, size=16, norm="batch").eval()

ADAPTERS: dict[str, Callable[[], tt.Adapter]] = {
    "online": lambda: tt.Online(NET, **SETTINGS),
    "online, momentum": lambda: tt.Online(NET, optimizer=MOMENTUM, **SETTINGS),
    "online, Adam": lambda: tt.Online(NET, optimizer=torch.optim.Adam, **SETTINGS),
    "online, batch norm": lambda: tt.Online(BATCH_NORM, statistics="running", **SETTINGS),
    "online, one batch": lambda: tt.Online(NET, share="batch", **SETTINGS),
    "streams": lambda: tt.Streams(NET, COUNT, **SETTINGS),
    "streams, momentum": lambda: tt.Streams(NET, COUNT, optimizer=MOMENTUM, **SETTINGS),
    "streams, few at a time": lambda: tt.Streams(NET, COUNT, together=3, optimizer=MOMENTUM, **SETTINGS),
    "episodic": lambda: tt.Episodic(NET, steps=1, parallel=2, **SETTINGS),
}


class Interrupt:
    """Raises `KeyboardInterrupt` before the line of the package that is executed as the n-th; counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def images(first: int) -> Tensor:
    return tt.data.open("digits").images(torch.arange(first, first + COUNT))


def state(adapter: tt.Adapter) -> dict[str, Tensor]:
    """Everything there is, less the memory of an optimizer that stands at zero, where a fresh one has none."""
    return {n: t for n, t in adapter.state_dict().items() if not n.startswith("learner/optimizer") or t.any()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("begun", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_call_counts_as_a_whole_or_not_at_all(name: str, begun: bool) -> None:
    def begin() -> tt.Adapter:
        adapter = ADAPTERS[name]()
        if begun:
            adapter.predict(images(0))
        return adapter

    whole = begin()
    before = state(whole)
    with Interrupt() as counter:
        whole.predict(images(COUNT))
    after = state(whole)
    answers = whole.predict(images(2 * COUNT)).logits
    adapter = begin()
    undone = 0
    for place in sorted({1 + counter.lines * step // PLACES for step in range(PLACES)}):
        with Interrupt(place), contextlib.suppress(KeyboardInterrupt):  # a second call may have fewer lines
            adapter.predict(images(COUNT))
        found = state(adapter)
        assert same(found, before) or same(found, after), place
        if same(found, after):
            adapter = begin()
        else:
            undone += 1
    assert undone > PLACES // 2
    adapter.predict(images(COUNT))  # once more, as a caller would
    assert same(state(adapter), after)
    assert torch.equal(adapter.predict(images(2 * COUNT)).logits, answers)

"""The records of the methods."""

from __future__ import annotations

import inspect

import pytest

from testtime.adaptation.methods import METHODS, Method, find_method


def test_every_method_says_what_it_is() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.paper
        assert method.mode in ("episodic", "online")


def test_an_objective_is_short() -> None:
    for method in METHODS.values():
        if inspect.isclass(method.objective):
            assert len(inspect.getsource(method.objective).splitlines()) < 80


def test_unknown_needs_and_methods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`needs` must be among .*'time'"):
        Method("mine", "waits", "", needs=("time",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`method` must be one of .*'tend'"):
        find_method("tend")

"""The records of the methods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from testtime.adaptation.methods import METHODS, Method, find_method
from testtime.adaptation.objectives import Entropy


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


class Odd(Entropy):
    """With constants of other types and signs than those of the methods."""

    offset, limit, always = -1, None, True


ODD = Method("odd", "has odd constants", "", Odd)


@pytest.mark.parametrize(
    ("method", "name", "given", "expected"),
    [
        ("best", "memory", 0, 0),
        ("best", "memory", 32.0, 32),
        ("best", "sharpness", 0, 0),
        ("best", "weight", 0.5, 0.5),
        ("rotta", "capacity", 32.0, 32),
        ("t3a", "supports", 1, 1),
        (ODD, "offset", -1.0, -1),
    ],
)
def test_a_constant_is_an_integer_where_its_default_is_one(
    method: str | Method, name: str, given: float, expected: float
) -> None:
    found = find_method(method).make_settings("online", {"constants": {name: given}}).constants[name]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("method", "name", "value", "said"),
    [
        ("best", "memory", -1, "`memory` must be an integer of at least 0, got -1"),
        ("best", "memory", 0.5, "`memory` must be an integer of at least 0, got 0.5"),
        ("best", "memory", 1e200, "`memory` must be an integer of at least 0, got 1e"),
        ("rotta", "capacity", 0, "`capacity` must be an integer of at least 1, got 0"),
        ("t3a", "supports", 0.0, "`supports` must be an integer of at least 1, got 0.0"),
        ("t3a", "supports", 2.5, "`supports` must be an integer of at least 1, got 2.5"),
        ("best", "weight", float("inf"), "`constants` must be numbers"),
        (ODD, "offset", 0.5, "`offset` must be an integer"),
        (ODD, "limit", 1, "has no 'limit'"),
        (ODD, "always", 1, "has no 'always'"),
    ],
)
def test_wrong_constants_are_refused(method: str | Method, name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_method(method).make_settings("online", {"constants": {name: value}})

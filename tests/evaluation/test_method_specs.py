"""Methods as configured in a run: their cost in forward passes."""

from __future__ import annotations

from typing import Any

import pytest

from testtime.evaluation.method_specs import MethodSpec
from testtime.networks.card import Card

ALL = {"name": "rotation", "each": "all"}


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("fixed", {}, 4),  # a view of each rotation
        ("online", {}, 2 * 4 + 3 * 32),  # before and after; 32 copies, three passes each
        ("online", {"task": ALL}, 2 * 4 + 3 * 32 * 4),
        ("online", {"steps": 2, "copies": 5}, 2 * 4 + 3 * 2 * 5),
        ("online", {"threshold": "50%"}, 2 * 4 + 3 * 16),
        ("episodic", {}, 2 * 4 + 3 * 10 * 32),
    ],
)
def test_cost_counts_forward_passes(mode: Any, settings: dict[str, Any], expected: int) -> None:
    assert MethodSpec("one", mode, settings=settings).cost == expected


def test_cost_without_a_task_is_that_of_the_default_of_a_card() -> None:
    given = MethodSpec("one", "online", settings={"task": Card().task})
    assert MethodSpec("one", "online").cost == given.cost

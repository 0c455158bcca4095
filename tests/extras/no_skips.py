"""A pytest plugin: what is run for its own sake must not be skipped, so a skipped test fails."""

from __future__ import annotations

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.skipped:
        report.outcome = "failed"

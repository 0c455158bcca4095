"""One thread for each test process, since pytest runs several; which tests are slow; what was skipped, in one line."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

# Some virtual machines report AMX but stop the process at its first instruction, in a bfloat16 product. Read by oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from torch_defaults import RESEMBLING

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start background jobs; programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, read only files that have such tests: a machine with a GPU may lack what others import."""
    if config.option.markexpr != "gpu" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.suffix == ".py" else ""
    return None if "mark.gpu" in text or "triton_device" in text else True


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests under those defaults of torch as slow that resemble others: there are hundreds."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("default") in RESEMBLING:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped, and why."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        counts = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {counts}")

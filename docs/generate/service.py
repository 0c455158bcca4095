"""Tables of what the benchmark of the service measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .documents import link, table
from .result_files import ROOT, format_hardware, read_file


def format_service(file: Path) -> str:
    """Rates, latencies and costs; nothing if the file does not exist."""
    return format_measured(read_file(file), file) if (ROOT / file).exists() else ""


def format_measured(held: Mapping[str, Any], file: Path) -> str:
    """The tables of a result file.

    Args:
        held: Its content.
        file: Its path in the repository.
    """
    rows = []
    for row in held["rows"]:
        times = [f"{row[name]:,.1f}" for name in ("p50_ms", "p95_ms", "p99_ms")]
        rates = [f"{row[name]:,.1f}" for name in ("requests_per_s", "images_per_s")]
        size = str(row["images"]) + (", sent ahead" if row.get("ahead", 1) > 1 else "")
        rows.append([str(row["streams"]), size, *rates, *times, f"{row['share_of_bare']:.0%}"])
    heads = ["streams", "images a request", "requests/s", "images/s", "p50 ms", "p95 ms", "p99 ms", "of the bare step"]
    memory, moves = held["memory"], held["evictions"]
    cells = [f"{memory[name] / 1024:,.0f} KiB" for name in ("resident_bytes", "stored_bytes")]
    cells += [f"{moves[name]:,.1f} ms" for name in ("evict_ms", "load_ms", "write_ms")]
    costs = table(["a resident stream", "a stored stream", "eviction", "reload", "write"], [cells], words=())
    about = [link(file), held["network"], held["method"], format_hardware(held["machine"]["hardware"])]
    titles = ["file", "network", "method", "hardware", "cores", "command"]
    source = table(titles, [[*about, str(held["cores"]), f"`{held['command']}`"]], words=(0, 1, 2, 3, 5))
    return "\n\n".join([table(heads, rows, words=()), costs, source])

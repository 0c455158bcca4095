"""Counters, gauges and histograms in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """All metrics of a service; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._help: dict[str, tuple[str, str]] = {}  # name → kind, description
        self._counts: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, tuple[Sequence[float], dict[Labels, list[float]]]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def add_counter(self, name: str, description: str) -> None:
        """Declare a counter; its name ends in `_total`."""
        self._help[name], self._counts[name] = ("counter", description), {}

    def add_gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Declare a gauge, which is read when asked for."""
        self._help[name], self._gauges[name] = ("gauge", description), read

    def add_histogram(self, name: str, description: str, bounds: Sequence[float] = SECONDS) -> None:
        """Declare a histogram with the given upper bounds."""
        self._help[name], self._histograms[name] = ("histogram", description), (bounds, {})

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Increase a counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[name][key] = self._counts[name].get(key, 0) + amount

    def read(self, name: str, **labels: str) -> float:
        """Return the value of a counter."""
        with self._lock:
            return self._counts[name].get(tuple(sorted(labels.items())), 0)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        bounds, found = self._histograms[name]
        with self._lock:
            # Counts by bound, the count above all of them, and the sum.
            row = found.setdefault(tuple(sorted(labels.items())), [0.0] * (len(bounds) + 2))
            row[bisect.bisect_left(bounds, value)] += 1
            row[-1] += value

    def format(self) -> str:
        """Return all metrics as text."""
        gauges = {name: read() for name, read in self._gauges.items()}  # outside the lock: they may take others
        with self._lock:
            return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: dict[str, float]) -> Iterator[str]:
        for name, (kind, description) in self._help.items():
            yield f"# HELP {name} {description}"
            yield f"# TYPE {name} {kind}"
            if kind == "gauge":
                yield f"{name} {gauges[name]:.17g}"
            elif kind == "counter":
                for labels, value in (self._counts[name] or {(): 0.0}).items():
                    yield f"{name}{_format_labels(labels)} {value:.17g}"
            else:
                bounds, found = self._histograms[name]
                for labels, row in found.items():
                    total = 0.0
                    for bound, number in zip([*map(str, bounds), "+Inf"], row[:-1], strict=True):
                        total += number
                        yield f"{name}_bucket{_format_labels((*labels, ('le', bound)))} {total:.17g}"
                    yield f"{name}_sum{_format_labels(labels)} {row[-1]:.17g}"
                    yield f"{name}_count{_format_labels(labels)} {total:.17g}"


def _format_labels(labels: Labels) -> str:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels) + "}" if labels else ""

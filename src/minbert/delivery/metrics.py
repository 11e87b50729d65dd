"""Counters and histograms in Prometheus's text format, written by hand: a dozen numbers need no library."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that grows, for each set of labels."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0, **labels: str) -> None:
        key = tuple(labels.items())
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def lines(self, name: str) -> list[str]:
        with self._lock:
            return [f"{name}{_shown(labels)} {value:g}" for labels, value in self._values.items()] or [f"{name} 0"]


class Gauge:
    """A number that is asked for when it is shown."""

    kind = "gauge"

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def lines(self, name: str) -> list[str]:
        return [f"{name} {self._read():g}"]


class Histogram:
    """How many values lay below each bound."""

    kind = "histogram"

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self, name: str) -> list[str]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        found, below = [], 0
        for bound, count in zip((*map("{:g}".format, self._bounds), "+Inf"), counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*found, f"{name}_sum {total:g}", f"{name}_count {below}"]


Metric = Counter | Gauge | Histogram


def exposition(metrics: Mapping[str, tuple[str, Metric]]) -> str:
    """All of them, by name with what they mean, as Prometheus reads them."""
    lines: list[str] = []
    for name, (about, metric) in metrics.items():
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {metric.kind}", *metric.lines(name)]
    return "\n".join(lines) + "\n"


def _shown(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for key, value in labels)
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"

"""How things are measured and kept: rounds to a median with its spread, memory, a matrix rate, one JSON a part."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from minbert.evaluation.results import environment

PEERS = ("transformers", "sentence-transformers", "accelerate", "datasets")


@dataclass(frozen=True)
class Timing:
    """What a run is: steps that are not timed, then rounds of as many steps, each timed as a whole."""

    warm_up: int
    rounds: int
    steps: int
    repeats: int = 1
    """How often the contenders take turns, each with a run of its own; the rounds of all of them count."""

    @property
    def total(self) -> int:
        """Steps of one run."""
        return self.warm_up + self.rounds * self.steps

    def about(self) -> dict[str, int]:
        return asdict(self)


class Stopwatch:
    """Notes the time when the warm-up is over and after each round. The device is waited for at these moments only."""

    def __init__(self, timing: Timing, device: torch.device) -> None:
        self.timing, self.device = timing, device
        self.marks: list[float] = []

    def tick(self, step: int) -> bool:
        """Call after each step, counted from 1; true after the last one."""
        after = step - self.timing.warm_up
        if after < 0 or after % self.timing.steps:
            return False
        synchronize(self.device)
        self.marks.append(time.perf_counter())
        return len(self.marks) > self.timing.rounds

    @property
    def seconds(self) -> list[float]:
        """Of each round."""
        return [end - start for start, end in zip(self.marks, self.marks[1:], strict=False)]


@dataclass(frozen=True)
class Timed:
    """A contender's rounds and the most memory it held on the device."""

    seconds: tuple[float, ...]
    memory: Mapping[str, int] | None = None
    notes: Mapping[str, Any] | None = None

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.seconds + other.seconds, self.memory or other.memory, self.notes or other.notes)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most, and every value."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": [float(value) for value in values],
    }


def ratio(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    """Of the medians; its spread is that of the rounds, in each of which both did the same work."""
    found = spread([a / b for a, b in zip(ours["rounds"], peer["rounds"], strict=True)])
    return found | {"median": ours["median"] / peer["median"]}


def take_turns(ways: Mapping[str, Callable[[], Timed]], repeats: int) -> dict[str, Timed]:
    """Each way `repeats` times, in alternating order, so that a busy moment of the machine hits all."""
    found: dict[str, Timed] = {}
    for number in range(repeats):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            timed = ways[name]()
            found[name] = found[name] + timed if name in found else timed
    return {name: found[name] for name in ways}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fresh_memory(device: torch.device) -> None:
    """Forget what earlier contenders held, so that each one's peak is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int] | None:
    """Bytes; None on a CPU, where torch does not count them."""
    if device.type != "cuda":
        return None
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def matrix_rate(device: torch.device, size: int = 0, rounds: int = 20) -> dict[str, Any]:
    """Floating-point operations a second of one large product: what utilisation is measured against.

    On a GPU 8192^3 in bf16, on a CPU 2048^3 in fp32, of random numbers, which cost more than zeros.
    """
    gpu = device.type == "cuda"
    size = size or (8192 if gpu else 2048)
    kind = torch.bfloat16 if gpu else torch.float32
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, size, generator=generator).to(device, kind) for _ in range(2))
    rates = []
    for number in range(rounds + 3):
        synchronize(device)
        started = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        if number >= 3:
            rates.append(2 * size**3 / (time.perf_counter() - started))
    return {"size": size, "precision": str(kind).removeprefix("torch."), "flops_per_second": spread(rates)}


def machine(device: torch.device) -> dict[str, Any]:
    """Where it was measured, and with which versions."""
    versions: dict[str, str | None] = {}
    for name in PEERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return environment(device.type) | {"cores": os.cpu_count(), "peers": versions}


def save(folder: Path, name: str, content: Mapping[str, Any] | Sequence[Any]) -> Path:
    """NAME.json in the folder, replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)
    return path
